"""The lessons and their slides quote the sources as they are, say where from, and lessons stay short.

In a stage's README and in docs/course/ every block of C++ has the comment `<!-- quote: PATH -->` on the line before it.
Its lines are consecutive lines of that file, indented less; a line `// ...` marks lines left out. A
comment `<!-- quote: PATH NAME -->` without a block keeps the place of a quote that is still to
come.
"""

import re
import tempfile
import textwrap
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(ROOT.glob("[0-9][0-9]-*/**/README.md"))
COURSE = sorted((ROOT / "docs/course").rglob("*.md"))
MOST_WORDS = 2300  # of a lesson, its code and tables included

MARKER = re.compile(r"<!-- quote: (\S+)( \S+)? -->")
BLOCK = re.compile(r"``` *(cpp|c\+\+|cuda)\b", re.I)
GAP = "// ..."
TASK = re.compile(r"// \[(task|end) (\d\d\.\d+)\]")


# --- What a document quotes -----------------------------------------------------------------------

def quotes_in(text):
    """(line, path, lines) of every block of C++, where `line` is that of its ```cpp. For a marker
    without a block lines is None, for a block without a marker path is None. In a list both may be
    indented."""
    found, all_lines = [], text.splitlines()
    lines = [line.strip() for line in all_lines]
    blocks = {i for i, line in enumerate(lines) if BLOCK.match(line)}
    for i, line in enumerate(lines):
        marker = MARKER.fullmatch(line)
        if marker and i + 1 not in blocks:
            found.append((i + 1, marker[1] + (marker[2] or ""), None))
        if i in blocks:
            end = lines.index("```", i + 1) if "```" in lines[i + 1:] else len(lines)
            before = MARKER.fullmatch(lines[i - 1]) if i else None
            found.append((i + 1, before and before[1],
                          textwrap.dedent("\n".join(all_lines[i + 1:end])).splitlines()))
    return found


def pieces_of(lines):
    """A quote's lines between its gaps: [(number of the first one, lines)]."""
    pieces, begin = [], 0
    for i, line in enumerate([*lines, GAP]):
        if line.strip() == GAP:
            if i > begin:
                pieces.append((begin, lines[begin:i]))
            begin = i + 1
    return pieces


# --- Where that is in the source -----------------------------------------------------------------

def indented(line, by):
    return by + line if line.strip() else ""


def find_piece(source, piece, first, by):
    """Where a piece, indented further, first appears from line `first` on: (its place, None); if
    nowhere, (None, the largest number of its lines that were found)."""
    best = 0
    for place in range(first, len(source)):
        count = 0
        while (count < len(piece) and place + count < len(source)
               and source[place + count] == indented(piece[count], by)):
            count += 1
        if count == len(piece):
            return place, None
        best = max(best, count)
    return None, best


def find_quote(source, lines):
    """The lines of a source that a quote shows, from 0, and the number of the quote's first line that is
    not there, or None."""
    furthest = 0
    pieces = pieces_of(lines)
    for by in sorted({re.match(" *", line)[0] for line in source}, key=len):
        shown, first = [], 0
        for begin, piece in pieces:
            place, count = find_piece(source, piece, first, by)
            if place is None:
                furthest = max(furthest, begin + count)
                break
            shown += range(place, place + len(piece))
            first = place + len(piece) + 1  # at least one line is left out
        else:
            return shown, None
    return [], furthest


def tasks_of(source):
    """The task, or None, that each line of a source belongs to."""
    inside, found = None, []
    for line in source:
        marker = TASK.search(line)
        if marker and marker[1] == "task":
            inside = marker[2]
        found.append(inside)
        if marker and marker[1] == "end":
            inside = None
    return found


def fault_of(root, path, lines):
    """(number of the quote's line, what is wrong with it); None for a quote that is right."""
    if not path:
        return -1, "C++ without <!-- quote: PATH --> on the line before it"
    name, _, place = path.partition(" ")
    if not (root / name).is_file():
        return -1, f"{name} is no file"
    if lines is None:
        return None if place else (-1, f"no block of C++ comes after the quote of {name}")
    source = (root / name).read_text().splitlines()
    if not pieces_of(lines):
        return 0, "an empty quote"
    shown, missing = find_quote(source, lines)
    if missing is not None:
        return missing, f"{name} has no such line in this place: {lines[missing].strip()}"
    tasks = tasks_of(source)
    task = next((tasks[i] for i in shown if tasks[i]), None)
    return task and (0, f"{name}: these lines are task {task}'s, which students write")


def faults_of(root, document):
    """A line for each quote of a document that is wrong: file, line of the document, and what is wrong."""
    faults = []
    for line, path, lines in quotes_in((root / document).read_text()):
        fault = fault_of(root, path, lines)
        if fault:
            faults.append(f"{document}:{line + 1 + fault[0]}: {fault[1]}")
    return faults


class TestQuotes(unittest.TestCase):
    def test_the_lessons_quote_what_is_there(self):
        for readme in READMES:
            with self.subTest(readme.parent.name):
                self.assertEqual([], faults_of(ROOT, str(readme.relative_to(ROOT))))

    def test_the_course_quotes_what_is_there(self):
        self.assertTrue(COURSE)
        for page in COURSE:
            with self.subTest(page.name):
                self.assertEqual([], faults_of(ROOT, str(page.relative_to(ROOT))))

    def test_every_lesson_has_quotes(self):
        for readme in READMES:
            if not list(readme.parent.glob("*/README.md")):  # one with lessons below it leads to them
                self.assertTrue([lines for _, path, lines in quotes_in(readme.read_text()) if path and lines],
                                readme)

    def test_a_lesson_is_an_evening(self):
        for readme in READMES:
            name = str(readme.relative_to(ROOT))
            with self.subTest(name):
                self.assertLessEqual(len(readme.read_text().split()), MOST_WORDS)


class TestQuotesProveThemselves(unittest.TestCase):
    source = "int f() {\n  a();\n\n  // [task 04.1] x\n  b();\n  // [end 04.1]\n  if (c) {\n    d();\n  }\n}\n"

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "f.cpp").write_text(self.source)

    def faults(self, quoted, marker="<!-- quote: f.cpp -->"):
        (self.root / "README.md").write_text(f"Text.\n\n{marker}\n```cpp\n{quoted}```\n")
        return faults_of(self.root, "README.md")

    def test_what_is_right(self):
        for quoted in ("int f() {\n  a();\n", "a();\n", "if (c) {\n  d();\n}\n", "a();\n// ...\n  d();\n",
                       "int f() {\n  a();\n\n  // ...\n  if (c) {\n    d();\n  }\n}\n",
                       "// ...\na();\n// ...\nif (c) {\n"):
            self.assertEqual([], self.faults(quoted), quoted)

    def test_a_block_may_lie_in_a_list(self):
        for wrong, faults in (("", []), ("1", ["README.md:6: f.cpp has no such line in this place: d();1"])):
            (self.root / "README.md").write_text("* One:\n\n  <!-- quote: f.cpp -->\n  ```cpp\n  if (c) {\n"
                                                 f"    d();{wrong}\n  ```\n\n* Two.\n")
            self.assertEqual(faults, faults_of(self.root, "README.md"))
        (self.root / "README.md").write_text("* One:\n\n  ```cpp\n  a();\n  ```\n")
        self.assertEqual(["README.md:3: C++ without <!-- quote: PATH --> on the line before it"],
                         faults_of(self.root, "README.md"))

    def test_what_is_wrong_is_named(self):
        for quoted, line, text in (
                ("int f() {\n  A();\n", 6, "A();"),  # another line
                ("a();\nd();\n", 6, "d();"),  # not the next one
                ("if (c) {\nd();\n", 6, "d();"),  # not as far to the right
                ("d();\n// ...\na();\n", 7, "a();"),  # not in this order
                ("int f() {\n// ...\n  a();\n", 7, "a();")):  # nothing is left out there
            self.assertEqual([f"README.md:{line}: f.cpp has no such line in this place: {text}"],
                             self.faults(quoted), quoted)

    def test_a_task_is_not_told(self):
        for quoted in ("b();\n", "a();\n// ...\nb();\n// ...\nif (c) {\n"):
            self.assertEqual(["README.md:5: f.cpp: these lines are task 04.1's, which students write"],
                             self.faults(quoted))

    def test_markers_are_needed_and_lead_to_a_file(self):
        self.assertEqual(["README.md:4: C++ without <!-- quote: PATH --> on the line before it"],
                         self.faults("a();\n", marker=""))
        self.assertEqual(["README.md:4: g.cpp is no file"],
                         self.faults("a();\n", marker="<!-- quote: g.cpp -->"))
        self.assertEqual(["README.md:5: an empty quote"], self.faults("// ...\n"))
        (self.root / "README.md").write_text("<!-- quote: f.cpp -->\n\n<!-- quote: f.cpp f -->\nText.\n")
        self.assertEqual(["README.md:1: no block of C++ comes after the quote of f.cpp"],
                         faults_of(self.root, "README.md"))


if __name__ == "__main__":
    unittest.main()
