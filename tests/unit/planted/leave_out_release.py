"""Writes a shared-memory transport that does not release what it shows: a race to be found."""

import sys
from pathlib import Path

STORE = "mine.rounds.store(++round_, std::memory_order_release);"
source = Path(sys.argv[1]).read_text()
if source.count(STORE) != 1:
    sys.exit("leave_out_release.py: shm_transport.cpp stores its rounds elsewhere than expected")
Path(sys.argv[2]).write_text(source.replace(STORE, STORE.replace("release", "relaxed")))
