"""Writes a DataParallel that forgets the last replica's gradient: what --baseline must notice."""

import sys
from pathlib import Path

LOOP = "for (size_t r = 1; r < in_use_; ++r) {\n    hand_back(r);\n    copy(replicas_[r].parameters->gradients()"
source = Path(sys.argv[1]).read_text()
if source.count(LOOP) != 1:
    sys.exit("leave_out_replica.py: reduce_add() of data_parallel.cpp looks different, expected\n" + LOOP)
Path(sys.argv[2]).write_text(source.replace(LOOP, LOOP.replace("r < in_use_", "r + 1 < in_use_")))
