"""Writes a stage whose kernels count the steps one too far, so that Adam corrects its averages for the
wrong number of steps: what --baseline must notice."""

import sys
from pathlib import Path

STATE = "context.begin_step({.step = log.steps(),"
source = Path(sys.argv[1]).read_text()
if source.count(STATE) != 1:
    sys.exit("miscount_steps.py: main.cpp begins a step elsewhere than expected")
Path(sys.argv[2]).write_text(source.replace(STATE, STATE.replace("steps()", "steps() + 1")))
