"""Writes a stage whose optimizer begins to count at 1, so that Adam corrects its averages for the wrong
number of steps: what --baseline must notice."""

import sys
from pathlib import Path

MADE = "const Optimizer optimizer(parameters, options.optimizer_rule());"
COUNTS = " optimizer.set_steps(std::vector<int64_t>(optimizer.steps().size(), 1));"
source = Path(sys.argv[1]).read_text()
if source.count(MADE) != 1:
    sys.exit("miscount_steps.py: main.cpp makes its optimizer elsewhere than expected")
Path(sys.argv[2]).write_text(source.replace(MADE, MADE + COUNTS))
