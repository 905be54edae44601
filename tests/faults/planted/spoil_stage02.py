"""Writes a stage 02 with mistakes that --baseline must notice. With $LOCKSTEP_MISTAKE "gradient" it forgets
the last replica's gradient, with "steps" its optimizer begins to count at 1, so that Adam corrects its
averages for the wrong number of steps."""

import sys
from pathlib import Path

ADDS = "  reduce_add();\n"
MADE = "  const Optimizer optimizer(parameters, options.optimizer_rule());\n"
WRONG = "  if (*std::getenv(\"LOCKSTEP_MISTAKE\") == '{}') {};\n"
SPOILT = (
    (ADDS, WRONG.format("g", "replicas_[in_use_ - 1].parameters->zero_gradients()") + ADDS),
    (MADE, MADE + WRONG.format("s", "optimizer.set_steps(std::vector<int64_t>("
                                    "optimizer.steps().size(), 1))")),
)
for source, target, (found, spoilt) in zip(sys.argv[1:3], sys.argv[3:], SPOILT):
    text = Path(source).read_text()
    if text.count(found) != 1:
        sys.exit(f"spoil_stage02.py: {source} does not have this line once: {found}")
    Path(target).write_text("#include <cstdlib>\n" + text.replace(found, spoilt))
