"""Writes a DataParallel that forgets the last replica's gradient: what --baseline must notice."""

import sys
from pathlib import Path

CALL = "  reduce_add();\n"
source = Path(sys.argv[1]).read_text()
if source.count(CALL) != 1:
    sys.exit("leave_out_replica.py: data_parallel.cpp calls reduce_add() elsewhere than expected")
Path(sys.argv[2]).write_text(source.replace(
    CALL, "  replicas_[in_use_ - 1].parameters->zero_gradients();\n" + CALL))
