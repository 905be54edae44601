"""The tasks: their table (tasks.json) and the markers around their lines in the sources.

    // [task 02.1] chunk rule
    ...
    // [end 02.1]

Indented markers stand around the lines of one function, markers at the left margin around several
whole functions.
"""

import json
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from coursework import CourseworkError
from plain_files import read_json

TABLE = "tools/coursework/tasks.json"
SHOWN = 60  # characters of a value that is not as expected
TASK_ID = re.compile(r"\d\d\.\d+")
OPENED = None  # in place of a body: the line that throws
MARKER = re.compile(r"^([ \t]*)// \[(task|end) (\d\d\.\d+)\](?: (\S.*))?$")
LIKE_A_MARKER = re.compile(r"//\s*\[(task|end)\b")


@dataclass(frozen=True)
class Task:
    """One row of the table."""

    id: str  # "02.1": stage and number
    name: str
    file: str  # that holds the student's lines
    symbols: tuple  # functions made of them, demangled, without their arguments
    teaches: str
    points: int
    minutes: int
    source: str = ""  # that compiles `file`, if this is a header
    needs: tuple = ()  # ids of tasks worth doing before
    deadline: int = 20  # seconds for its tests
    race: str = ""  # what to say about a data race, for tasks that may have one
    cases: tuple = ()  # that are worth points by themselves: rows with `case`, `hidden` and `points`
    calls: tuple = ()  # functions of the system that a right solution may call, beside those of ours

    @property
    def compiled(self):
        return self.source or self.file

    @property
    def tag(self):
        return f"[task{self.id}]"

    @property
    def hidden_tag(self):
        return f"[hidden{self.id}]"

    @property
    def order(self):
        return sort_key(self.id)


TEXT = "a text", lambda value: isinstance(value, str)
COUNT = "a whole number of at least 1", lambda value: type(value) is int and value >= 1
PART = "a number above 0", lambda value: type(value) in (int, float) and value > 0
TEXTS = "a list of texts", lambda value: isinstance(value, list) and all(map(TEXT[1], value))
ROWS = "a list of objects", lambda value: isinstance(value, list) and all(isinstance(row, dict) for row in value)
ROW = {"id": TEXT, "name": TEXT, "file": TEXT, "symbols": TEXTS, "teaches": TEXT, "points": COUNT, "minutes": COUNT,
       "source": TEXT, "needs": TEXTS, "deadline": COUNT, "race": TEXT, "cases": ROWS,
       "calls": TEXTS}
NEEDED = [field.name for field in fields(Task) if field.default is MISSING]
CASE = {"case": TEXT, "hidden": TEXT, "points": PART}


def sort_key(task_id):
    return tuple(int(part) for part in task_id.split("."))


def select(tasks, words):
    """The tasks with these ids, or of these stages; all if there are none."""
    for word in words:
        if not any(word in (task.id, task.id.split(".")[0]) for task in tasks):
            raise no_such_task(word, tasks)
    return [task for task in tasks if not words or task.id in words or task.id.split(".")[0] in words]


def no_such_task(word, tasks):
    return CourseworkError(f"there is no task {word}, expected one of "
                           f"{', '.join(task.id for task in tasks)}, or a stage")


def load_tasks(root):
    """The table of a tree, in order. Raises CourseworkError if it is not well formed."""
    tasks = []
    for number, row in enumerate(read_rows(root), 1):
        check_type(f"{TABLE}: row {number}", row, "an object", isinstance(row, dict))
        name = f"{TABLE}: " + (f"task {row['id']}" if isinstance(row.get("id"), str) else f"row {number}")
        check_keys(name, row, ROW, NEEDED)
        for place, case in enumerate(row.get("cases", ()), 1):
            check_keys(f"{name}: cases: row {place}", case, CASE, CASE)
        lists = {key: tuple(row[key]) for key in ("symbols", "needs", "cases", "calls") if key in row}
        tasks.append(Task(**{**row, **lists}))
    check_rows(tasks)
    return tasks


def read_rows(root):
    try:
        table = read_json(Path(root) / TABLE)
    except ValueError as error:
        raise CourseworkError(f"{TABLE} is no JSON ({error}): mend it, or take the repository's") from error
    rows = table.get("tasks") if isinstance(table, dict) else None
    check_type(TABLE, table, 'an object with the list "tasks"', isinstance(rows, list))
    return rows


def check_keys(name, row, expected, needed):
    """Checks that a row has what is needed, and each of it of its type."""
    if unknown := sorted(row.keys() - expected.keys()):
        raise CourseworkError(f"{name}: unknown {', '.join(unknown)}, expected {', '.join(expected)}: rename or remove "
                              "it")
    for key in needed:
        if key not in row:
            raise CourseworkError(f"{name}: there is no {key}, expected {expected[key][0]}: add it")
    for key, value in row.items():
        check_type(f"{name}: {key}", value, expected[key][0], expected[key][1](value))


def check_type(name, value, expected, fits):
    if not fits:
        found = json.dumps(value)
        found = found if len(found) <= SHOWN else f"{found[:SHOWN]}..."
        raise CourseworkError(f"{name} is {found}, expected {expected}: correct it")


def check_rows(tasks):
    seen = {}
    for task in tasks:
        name = f"{TABLE}: task {task.id}"
        if not TASK_ID.fullmatch(task.id):
            raise CourseworkError(f"{name}: expected an id like 02.1")
        if seen and task.order <= list(seen.values())[-1].order:
            raise CourseworkError(f"{name} comes after task {list(seen)[-1]}, expected before it")
        if not task.symbols:
            raise CourseworkError(f"{name}: symbols is [], expected the task's functions: add them")
        if (parts := sum(row["points"] for row in task.cases)) >= task.points:
            raise CourseworkError(f"{name}: cases have {parts:g} points together, expected less than the task's "
                                  f"{task.points}: correct them")
        if any(task.name == other.name for other in seen.values()):
            raise CourseworkError(f"{name}: another task has the name '{task.name}', too")
        for needed in task.needs:
            if needed not in seen:
                raise CourseworkError(f"{name} needs {needed}, which does not stand before it")
        seen[task.id] = task


# --- Markers -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Section:
    """A student's lines: those between the markers at lines `begin` and `end` (from 0)."""

    id: str
    name: str
    indent: str
    begin: int
    end: int

    @property
    def lines(self):
        """Their numbers, from 1."""
        return range(self.begin + 2, self.end + 1)


def find_sections(text, file):
    """The sections of a file. Raises CourseworkError if markers do not pair or ascend."""
    sections, opened = [], None
    for number, line in enumerate(text.split("\n")):
        match = MARKER.match(line)
        if not match:
            if LIKE_A_MARKER.search(line):
                raise CourseworkError(f"{file}:{number + 1}: '{line.strip()}' is no marker, "
                                      "expected '// [task NN.N] name' or '// [end NN.N]'")
            continue
        indent, kind, task_id, name = match.groups()
        where = f"{file}:{number + 1}: [{kind} {task_id}]"
        if (kind == "task") != (opened is None) or (kind == "end" and opened[1] != task_id):
            inside = f"inside task {opened[1]}" if opened else "outside of a task"
            raise CourseworkError(f"{where} stands {inside}")
        if kind == "end":
            sections.append(Section(opened[1], opened[2], opened[0], opened[3], number))
            opened = None
            continue
        if not name:
            raise CourseworkError(f"{where} has no name")
        if sections and sort_key(task_id) <= sort_key(sections[-1].id):
            raise CourseworkError(f"{where} comes after task {sections[-1].id}, expected before")
        opened = (indent, task_id, name, number)
    if opened:
        raise CourseworkError(f"{file}: task {opened[1]} has no end")
    return sections


def section_of(text, file, task_id):
    """A task's section. Raises CourseworkError if the file has none."""
    for section in find_sections(text, file):
        if section.id == task_id:
            return section
    raise CourseworkError(f"{file}: no markers of task {task_id}")


def replace_section(text, file, task_id, body):
    """The text with a task's lines replaced by the lines of `body`."""
    lines, section = text.split("\n"), section_of(text, file, task_id)
    return "\n".join(lines[:section.begin + 1] + body + lines[section.end:])


def lines_of(text, file, task_id):
    """A task's lines."""
    section = section_of(text, file, task_id)
    return text.split("\n")[section.begin + 1:section.end]


def open_line(text, file, task_id):
    """The number of the first line in which a section still calls open_task; 0: none does."""
    try:
        section = section_of(text, file, task_id)
    except CourseworkError:
        return 0  # a marker is gone
    lines = text.split("\n")
    return next((number for number in section.lines
                 if lines[number - 1].strip().startswith("open_task(")), 0)


def open_text(text, file):
    """The text as a student gets it: in each section, or in each of its functions, a line that
    throws and says where it is."""
    for section in find_sections(text, file):
        # Earlier sections have become shorter: the line numbers are those in the new text.
        first = section_of(text, file, section.id).lines.start
        indent, heads = section.indent, [OPENED]
        if not indent:
            indent, heads = "  ", heads_of(lines_of(text, file, section.id), file, section)
        said = f"task {section.id} ({section.name}) is yours: {file}"
        text = replace_section(text, file, section.id, [
            f'{indent}open_task("{said}:{first + number}");' if line is OPENED else line
            for number, line in enumerate(heads)])
    return text


def heads_of(lines, file, section):
    """The lines of whole functions, with OPENED in the place of each body."""
    heads, inside = [], False
    for line in lines:
        inside = inside and line != "}"
        if inside:
            continue
        heads.append(line)
        if line.endswith("{"):
            inside = True
            heads.append(OPENED)
        elif line.endswith("}") and line != "}":
            raise CourseworkError(f"{file}: task {section.id}: '{line}', expected the body of a "
                                  "function on lines of its own")
    if OPENED not in heads or inside:
        raise CourseworkError(f"{file}: task {section.id} begins at the left margin, expected whole "
                              "functions there")
    return heads


def outside_text(text, file):
    """The text without all students' lines. An editor may have moved the markers with those: how far
    they are indented does not count."""
    for section in find_sections(text, file):
        text = replace_section(text, file, section.id, [])
    return "\n".join(line.strip() if MARKER.match(line) else line for line in text.split("\n"))


def check_markers(tasks, texts):
    """Checks that table and markers agree; `texts` are the files that may have markers, by path."""
    found = {}
    for file, text in texts.items():
        for section in find_sections(text, file):
            if section.id in found:
                raise CourseworkError(f"task {section.id} is marked in {found[section.id][0]} and "
                                      f"in {file}, expected in one place")
            found[section.id] = (file, section.name)
    for task in tasks:
        marked = found.pop(task.id, ("no file", ""))
        if marked[0] != task.file:
            raise CourseworkError(f"task {task.id} is marked in {marked[0]}, {TABLE} says "
                                  f"{task.file}")
        if marked[1] != task.name:
            raise CourseworkError(f"task {task.id} is called '{marked[1]}' in {task.file}, "
                                  f"'{task.name}' in {TABLE}")
    for task_id, (file, _) in found.items():
        raise CourseworkError(f"task {task_id}, marked in {file}, is not in {TABLE}")
