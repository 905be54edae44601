"""The walks of common/README.md ("From a gradient to the wire") name functions that are there.

Each item of such a section is `N. \`PATH\`, \`FUNCTION()\`: what it does`: the file exists, and the
function's name is a word of it.
"""

import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^## (From an? [^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^(\d+)\. ", re.MULTILINE)
STEP = re.compile(r"`([\w./-]+)`, `([\w:~]+)(?:\(\))?\(\)`: ")


def walk_faults(text, root):
    """One line for each item of a walk that leads nowhere."""
    faults = []
    for title, section in SECTION.findall(text):
        for expected, (number, item) in enumerate(zip(*[iter(ITEM.split(section)[1:])] * 2), 1):
            where, step = f"{title}: {number}", STEP.match(item)
            if int(number) != expected:
                faults.append(f"{where} is item {expected}")
            elif step is None:
                faults.append(f"{where} does not begin with a file and a function")
            elif not (root / step[1]).is_file():
                faults.append(f"{where}: no file {step[1]}")
            elif not re.search(rf"\b{step[2].split('::')[-1]}\b", (root / step[1]).read_text()):
                faults.append(f"{where}: no {step[2]}() in {step[1]}")
        if not ITEM.search(section):
            faults.append(f"{title} has no items")
    return faults


class TestWalks(unittest.TestCase):
    def test_the_walks_lead_along_functions_that_are_there(self):
        text = (ROOT / "common/README.md").read_text()
        self.assertIn("From a gradient to the wire", text)
        self.assertEqual(walk_faults(text, ROOT), [])

    def test_wrong_items_are_found(self):
        here = "tests/tools/test_walks.py"
        text = (f"## From a to b\n1. `{here}`, `Walks::walk_faults()`: right\n2. `{here}`, `x_`\n"
                f"3. `no/file.py`, `a()`: wrong\n5. `{here}`, `a()`: wrong\n"
                f"5. `common/README.md`, `Zebra::gallops()`: wrong\n## Another\n1. `a`\n")
        self.assertEqual(walk_faults(text, ROOT), [
            "From a to b: 2 does not begin with a file and a function",
            "From a to b: 3: no file no/file.py", "From a to b: 5 is item 4",
            "From a to b: 5: no Zebra::gallops() in common/README.md"])


if __name__ == "__main__":
    unittest.main()
