"""Writes a stage 06 in which no rank gets the shards that the others have updated: what --baseline must
notice."""

import sys
from pathlib import Path

CALL = "      parallel.gather_parameters();"
lines = Path(sys.argv[1]).read_text().splitlines(keepends=True)
kept = [line for line in lines if not line.startswith(CALL)]
if len(kept) != len(lines) - 1:
    sys.exit("forget_gather.py: main.cpp calls gather_parameters() elsewhere than expected")
Path(sys.argv[2]).write_text("".join(kept))
