"""The walks of common/README.md ("From a gradient to the wire") name functions that are there.

Each item of such a section is `N. \`PATH\`, \`FUNCTION()\`: what it does`: the file exists and defines
the function. What else the item names as a function is a word of one of the files that it names.
"""

import re
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^## (From an? [^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^(\d+)\. ", re.MULTILINE)
STEP = re.compile(r"`([\w./-]+)`, `([\w:~]+)(?:\(\))?\(\)`: ")
FUNCTION = re.compile(r"`([\w:~]+)\(\)`")
FILE = re.compile(r"`([\w-]+/[\w./-]+)`")


def last_word(function):
    return re.escape(function.split("::")[-1])


def step_faults(step, root):
    path = root / step[1]
    if not path.is_file():
        return [f"no file {step[1]}"]
    kind = r"^ *(?!return |else )[\w:<>,&* ]*[\w>&*] [&*]*(?:\w+::)*"  # a type, which calls have not
    if not re.search(rf"{kind}{last_word(step[2])}\([^;]*?\)[^;{{}}]*{{", path.read_text(), re.M):
        return [f"no {step[2]}() in {step[1]}"]
    return []


def other_faults(item, root):
    """Of the functions and files that an item names; a blank line ends it."""
    item = item.split("\n\n")[0]
    files = [root / name for name in FILE.findall(item)]
    faults = [f"no file {path.relative_to(root)}" for path in files if not path.is_file()]
    text = "\n".join(path.read_text() for path in files if path.is_file())
    return faults + [f"no {name}() in its files" for name in FUNCTION.findall(item)
                     if not re.search(rf"\b{last_word(name)}\b", text)]


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
            else:
                found = step_faults(step, root) or other_faults(item, root)
                faults += [f"{where}: {fault}" for fault in found]
        if not ITEM.search(section):
            faults.append(f"{title} has no items")
    return faults


class TestWalks(unittest.TestCase):
    def test_the_walks_lead_along_functions_that_are_there(self):
        text = (ROOT / "common/README.md").read_text()
        self.assertIn("From a gradient to the wire", text)
        self.assertEqual(walk_faults(text, ROOT), [])

    def test_wrong_items_are_found(self):
        text = ("## From a to b\n1. `a/a.cpp`, `A::run()`: right, calls `link()`\n2. `a/a.cpp`, `x_`\n"
                "3. `no/file.py`, `a()`: wrong\n5. `a/a.cpp`, `run()`: wrong\n"
                "5. `a/a.h`, `A::run()`: only declared\n6. `a/a.cpp`, `A::run()`: calls `push()`\n"
                "7. `a/a.cpp`, `A::run()`: as in `a/b.cpp`\n8. `a/a.cpp`, `link()`: only called\n"
                "## From a c to d\nNothing\n## Another\n1. `a`\n")
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "a").mkdir()
            (root / "a/a.h").write_text("struct A {\n  void run();\n};\n")
            (root / "a/a.cpp").write_text("void A::run() const {\n  if (link()) {\n  }\n  link([]() {});\n}\n")
            faults = walk_faults(text, root)
        self.assertEqual(faults, [
            "From a to b: 2 does not begin with a file and a function",
            "From a to b: 3: no file no/file.py", "From a to b: 5 is item 4",
            "From a to b: 5: no A::run() in a/a.h", "From a to b: 6: no push() in its files",
            "From a to b: 7: no file a/b.cpp", "From a to b: 8: no link() in a/a.cpp",
            "From a c to d has no items"])


if __name__ == "__main__":
    unittest.main()
