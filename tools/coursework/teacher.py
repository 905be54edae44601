"""What only teachers get (`./lockstep exercise --teacher DIR`): answers to the lessons' exercises, the hidden cases,
and for each task where its cases are and which mistakes students make. Students' trees have none of it."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from coursework import CourseworkError, tasks as table, tree

ANSWERS = "docs/course/answers/"
WRONG = "tests/coursework/wrong/"
TESTS = "tests/coursework"
WRONG_HEAD = re.compile(r"^// \[wrong (\w+)\] (\S.*)\n", re.MULTILINE)
TEXT = r'((?:"(?:\\.|[^"\\])*"\s*)+)'  # one or more literals, which the compiler joins
CASE = re.compile(rf'^TEST_CASE\(\s*{TEXT},\s*"([^"]*)"', re.MULTILINE)
HINT = re.compile(rf"\bHINT\(\s*{TEXT}\)")


@dataclass(frozen=True)
class Case:
    """A task's test."""

    name: str
    tags: str
    file: str
    line: int


def joined(literals):
    return re.sub(r"\\(.)", r"\1", "".join(re.findall(r'"((?:\\.|[^"\\])*)"', literals)))


def wrong_solutions(root, task_id):
    """A task's wrong solutions by name: the hint that is expected, and the lines between the markers
    (docs/coursework.md)."""
    before, *parts = WRONG_HEAD.split((Path(root) / WRONG / f"{task_id}.txt").read_text())
    names, hints, bodies = parts[0::3], parts[1::3], [body.rstrip("\n") for body in parts[2::3]]
    if before or "// [wrong" in "".join(bodies) or not all(bodies) or len(set(names)) < len(names):
        raise ValueError(f"{task_id}.txt: expected '// [wrong NAME] HINT' as the first line, each NAME "
                         "once, and lines of code below each")
    return dict(zip(names, zip(hints, bodies)))


def cases_of(root):
    """All cases of the tasks' tests, in the order of files and lines."""
    found = []
    for path in sorted((root / TESTS).rglob("*.cpp")):
        text = path.read_text()
        found += [Case(joined(match[1]), match[2], str(path.relative_to(root)), text.count("\n", 0, match.start()) + 1)
                  for match in CASE.finditer(text)]
    return found


def hints_of(root):
    """The whole texts of all hints."""
    return [joined(match[1]) for path in sorted((root / TESTS).rglob("*.*")) if path.suffix in (".cpp", ".h")
            for match in HINT.finditer(path.read_text())]


def mistakes_by_hint(root, task, hints):
    """The names of a task's wrong solutions by the hint that each gets. Where the report is none of the tests'
    hints, it is the part of it that is expected."""
    found = {}
    for name, (part, _) in wrong_solutions(root, task.id).items():
        whole = next((hint for hint in hints if part in hint), part)
        found.setdefault(whole, []).append(name.replace("_", " "))
    return found


def section(root, task, cases, hints, left_out):
    """A task's part of the page."""
    lines = [f"## {task.id} {task.name}", "", f"{task.teaches} In `{task.file}`; points: {task.points}, "
             f"minutes: {task.minutes}.", "", "Cases:", ""]
    for case in cases:
        if task.tag in case.tags or task.hidden_tag in case.tags:
            hidden = case.file.startswith(left_out)
            lines.append(f"* `{case.file}:{case.line}`, {'hidden from' if hidden else 'seen by'} students: {case.name}")
    lines += ["", f"Mistakes (`{WRONG}{task.id}.txt` has their lines), by the hint that each gets:", ""]
    lines += [f"* \"{hint}\" ({', '.join(names)})"
              for hint, names in mistakes_by_hint(root, task, hints).items()]
    return "\n".join(lines) + "\n"


def tasks_page(root, left_out):
    cases, hints = cases_of(root), hints_of(root)
    head = ("# The tasks, for teachers\n\nFor each task: the cases that grade it, and the mistakes that students make, "
            "with the hint that the\ngrader shows for each. Paths are those of the solved tree. A case is hidden "
            "where its file is not part of a student's tree.\n")
    return "\n".join([head, *(section(root, task, cases, hints, left_out) for task in table.load_tasks(root))])


def write(root, folder, left_out):
    """Writes the answers, the hidden cases and the page of the tasks into a folder. `left_out`: beginnings of the
    paths that students' trees do not have."""
    answers = sorted((root / ANSWERS).glob("*.md"))
    if not answers:
        raise CourseworkError(f"{root / ANSWERS} has no pages, expected one for each lesson: "
                              "they are part of the repository")
    (folder / "answers").mkdir()
    for page in answers:
        shutil.copy(page, folder / "answers")
    shutil.copytree(root / tree.HIDDEN, folder / "hidden")
    (folder / "tasks.md").write_text(tasks_page(root, left_out))
