#!/usr/bin/env python3
"""Build a student's tree and grade its tasks: `./lockstep grade [DIR] [TASK]`.

Each task is graded by itself: all others run from the prebuilt solutions. The exit status is 0 if
all graded tasks passed, 1 if not, 2 if there was nothing to grade or no way to do so
(docs/coursework.md).
"""

import json
import re
import sys
import textwrap
import time
from pathlib import Path

from compile_tests import tsan_wrapper
from command_line import Parser, complain, run_command
from coursework import CourseworkError, names, solutions, tasks as table, tree
from coursework.verdict import FAILED, OPEN, PASSED, Verdict, cut, verdict_of
from coursework.workshop import ERROR, FAILED_EDGE, REQUIRED, UNDEFINED, WARNING, Workshop
from plain_files import require_writable, write_whole

ROOT = Path(__file__).resolve().parent.parent
TASK = re.compile(r"\d\d(\.\d+)?")
HOW = {"compile": "does not compile", "crash": "crashed", "deadline": "endless", "memory": "memory",
       "race": "race"}


class Grader:
    """Grades the tree `folder`. Table, tests and solutions are those of `root`, if this has
    solutions (a teacher's copy of the tree), else the student's own."""

    def __init__(self, root, folder, workshop, say, races=True):
        self.folder, self.workshop, self.say, self.races = folder, workshop, say, races
        tree.check_tree(folder)
        self.own = next((place for place in (root, folder)
                         if (place / solutions.MANIFEST).is_file()), None)
        if self.own is None:
            raise CourseworkError(f"{folder} has no prebuilt solutions: give a tree that 'lockstep "
                                  "exercise DIR' has made")
        self.tasks = table.load_tasks(self.own)
        self.files = {path: self.own / path for path in tree.list_files(self.own)
                      if not tree.is_students(path)}
        self.files |= {path: folder / path for path in tree.list_files(folder)
                       if tree.is_students(path)}
        # A student's git may ignore them.
        self.files |= {task.file: folder / task.file for task in self.tasks
                       if tree.is_plain(folder, task.file)}
        self.changed_headers = solutions.changed_headers(self.own, folder)
        self.warnings = []  # what the compiler said this time: file, line, text

    def select(self, words):
        """The tasks with these ids, or of these stages; all if there are none."""
        for word in words:
            if not any(word in (task.id, task.id.split(".")[0]) for task in self.tasks):
                raise no_such_task(word, self.tasks)
        return [task for task in self.tasks
                if not words or task.id in words or task.id.split(".")[0] in words]

    def grade(self, chosen):
        """Yields the verdict of each of these tasks."""
        missing = [task for task in self.tasks if task.file not in self.files]
        self.files |= {task.file: self.own / solutions.OPEN / task.file for task in missing}
        self.workshop.fill(self.files)
        known = {task.id: Verdict(task.id, task.name, FAILED, task.points, how="compile",
                                  text=f"the file {task.file} is missing") for task in missing}
        known |= {task.id: verdict for task in chosen if (verdict := self.open_verdict(task))}
        known |= self.compile("asan", [task for task in chosen if task.id not in known])
        for task in chosen:
            verdict = known.get(task.id) or self.run("asan", task)
            if verdict.status == PASSED and task.race:
                verdict = self.look_for_races(task, verdict)
            yield verdict

    def open_verdict(self, task):
        """The verdict of a task that still calls open_task: nothing needs to be compiled for it. None
        for any other."""
        if task.file not in self.files or not (self.folder / task.file).is_file():
            return None
        line = table.open_line(self.students_text(task), task.file, task.id)
        if not line:
            return None
        return Verdict(task.id, task.name, OPEN, task.points, file=task.file, line=line)

    def look_for_races(self, task, verdict):
        wrapper = tsan_wrapper() if self.races else None
        if wrapper is None:
            why = "ThreadSanitizer cannot run here" if self.races else "--no-races"
            verdict.text = f"not looked for races: {why}"
            return verdict
        self.say(f"looking for races in task {task.id}")
        broken = self.compile("tsan", [task])
        return broken.get(task.id) or self.run("tsan", task, wrapper, race=True)

    def run(self, flavour, task, wrapper=(), race=False):
        program = self.workshop.build(flavour) / self.program(task)
        verdict = verdict_of(task, program, self.workshop.path_in_tree, wrapper, race,
                             self.own_lines(task))
        if verdict.status != FAILED or race:
            return verdict
        if verdict.how in ("crash", "memory") and self.changed_headers:
            verdict.text += (f"; the prebuilt solutions were compiled with "
                             f"{names(self.changed_headers)} as handed out, and a changed class "
                             "makes them crash")
        verdict.warning = self.warning_in(task)
        return verdict

    def warning_in(self, task):
        """The compiler's first warning in the task's lines, if they were compiled this time."""
        own = self.own_lines(task)
        return next((f"{file}:{line}: {cut(text)}" for file, line, text in self.warnings
                     if file == task.file and line in own), "")

    def own_lines(self, task):
        """The lines between the task's markers, in the student's file."""
        try:
            return table.section_of(self.students_text(task), task.file, task.id).lines
        except CourseworkError:
            return range(0)  # a marker is gone

    def students_text(self, task):
        return (self.folder / task.file).read_text(errors="replace")

    def program(self, task):
        return f"tests/coursework/grade-{task.id}"

    # --- Compiling -------------------------------------------------------------------------------

    def compile(self, flavour, chosen):
        """Compiles the programs of these tasks. A file that does not compile costs only the tasks
        in it: for the others it is put back as it was handed out. Returns the verdicts of tasks
        that have no program."""
        if not chosen:
            return {}
        self.workshop.configure(flavour, "grade")
        programs = [self.program(task) for task in chosen]
        what = f"task{'s' if len(chosen) > 1 else ''} {names([task.id for task in chosen])}"
        what += " with ThreadSanitizer" if flavour == "tsan" else ""
        status, output = self.workshop.compile(flavour, programs, what, self.say)
        self.warnings = self.places(WARNING, output)
        if status == 0:
            return {}
        failed = failed_edges(output)
        broken = self.broken_tasks(flavour, failed)
        self.files |= {task.file: self.own / solutions.OPEN / task.file for task in self.tasks
                       if task.id in broken}
        if broken:
            self.workshop.fill(self.files)
            status, output = self.workshop.compile(flavour, programs, what, self.say)
            failed = failed_edges(output)
        for task in chosen:
            if status != 0 and task.id not in broken and not self.workshop.is_up_to_date(
                    flavour, self.program(task)):
                said = failed.get(self.program(task)) or output
                broken[task.id] = self.does_not_compile(task, said)
        return broken

    def broken_tasks(self, flavour, failed):
        """The verdicts of the tasks in files that do not compile. A source with several headers
        costs those that its errors are in."""
        objects, broken = self.workshop.objects(flavour), {}
        for target, said in failed.items():
            affected = [task for task in self.tasks if objects.get(task.compiled) == target]
            files = {self.workshop.path_in_tree(error["file"]) for error in ERROR.finditer(said)}
            for task in [task for task in affected if task.file in files] or affected:
                broken[task.id] = self.does_not_compile(task, said)
        return broken

    def does_not_compile(self, task, output):
        """The verdict, with the compiler's first words: about the task's own file, if there are
        any. Raises CourseworkError if they say nothing about the sources."""
        verdict = Verdict(task.id, task.name, FAILED, task.points, how="compile")
        errors, undefined = self.places(ERROR, output), UNDEFINED.search(output)
        if errors:
            own = [error for error in errors if error[0] == task.file]
            verdict.file, verdict.line, text = (own or errors)[0]
            verdict.text = cut(text)
            if verdict.file.startswith("/"):  # a library's header: who included it?
                asked = [place for place in self.places(REQUIRED, output) if place[0][0] != "/"]
                asked.sort(key=lambda place: place[0] != task.file)
                verdict.file, verdict.line, _ = (asked or errors)[0]
        elif undefined:
            verdict.text = cut(undefined[0].strip())
        else:
            raise CourseworkError(f"task {task.id} could not be built in {self.workshop.folder}: "
                                  f"{cut(last_words(output))}; expected a compiler's error")
        return verdict

    def places(self, pattern, output):
        """File in the tree, line and text of all compiler messages of this form."""
        return [(self.workshop.path_in_tree(said["file"]), int(said["line"]), said["text"])
                for said in pattern.finditer(output)]


def last_words(output):
    """The last line, except for those that follow every failure."""
    follows = ("FAILED: ", "collect2: ", "compilation terminated", "ninja: ")
    lines = [line.strip() for line in output.split("\n") if not line.startswith(follows)]
    return next(filter(None, reversed(lines)), "nothing was said")


def no_such_task(word, tasks):
    return CourseworkError(f"there is no task {word}, expected one of "
                           f"{', '.join(task.id for task in tasks)}, or a stage")


def failed_edges(output):
    """The output for each target that Ninja could not make, by target."""
    parts = re.split(r"^(?=FAILED: |\[\d+/\d+\] )", output, flags=re.MULTILINE)
    return {match[1]: part for part in parts if (match := FAILED_EDGE.match(part))}


# --- Verdicts for people, and for a teacher's script ---------------------------------------------

def lines_of(verdict):
    """A verdict for people."""
    status = verdict.status
    if status == FAILED and verdict.how in HOW:
        status = f"failed: {'deadlock' if verdict.waits else HOW[verdict.how]}"
    lines = [f"{verdict.id:<6}{verdict.name:<28} {status:<26} {verdict.points} of {verdict.of}"]
    place = f"{verdict.file}:{verdict.line}" if verdict.file else ""
    if verdict.status == OPEN:
        lines.append(f"      yours: {place}")
    told = {"test": verdict.case, "asserted": verdict.asserted, "found": verdict.found,
            "said": verdict.text, "warning": verdict.warning, "hint": verdict.hint, "at": place}
    if verdict.status == FAILED:
        if told["found"] == told["asserted"]:
            del told["found"]
        for key, value in told.items():
            if value:
                lines += wrapped(f"      {key + ':':<10}", value)
    elif verdict.status == PASSED and verdict.text:
        lines.append(f"      {verdict.text}")
    return lines


def wrapped(label, value):
    """A value after its label, in lines of 100 columns; code keeps its lines."""
    lines = [part for line in value.split("\n")
             for part in (textwrap.wrap(line, 100 - len(label)) or [""])]
    return [(label if number == 0 else " " * len(label)) + line
            for number, line in enumerate(lines)]


def report(folder, verdicts, notes, seconds):
    """The facts for a teacher's script."""
    return {"tree": str(folder), "points": sum(v.points for v in verdicts),
            "of": sum(v.of for v in verdicts), "seconds": round(seconds, 1), "notes": notes,
            "tasks": [verdict.facts() for verdict in verdicts]}


# --- The command ---------------------------------------------------------------------------------

def parse_options(argv, root):
    parser = Parser(prog="lockstep grade", description=__doc__.splitlines()[0])
    parser.refused = 2  # 1: not all passed
    parser.add_argument("words", nargs="*", metavar="DIR or TASK",
                        help="a student's tree (default: this one); a task (02.1) or stage (02), "
                             "default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there, too")
    parser.add_argument("--build", type=Path, metavar="FOLDER", default=root / "build-coursework",
                        help="where it is compiled (default build-coursework/)")
    parser.add_argument("--no-races", dest="races", action="store_false",
                        help="do not run tasks under ThreadSanitizer, whose programs are compiled "
                             "for themselves")
    return parser.parse_args(argv)


def sort_words(words, root):
    """The tree, and the tasks or stages, that the words mean."""
    chosen = [word for word in words if TASK.fullmatch(word)]
    folders = [word for word in words if word not in chosen]
    for word in folders:
        if Path(word).is_file():
            raise CourseworkError(f"{word} is a file, expected a student's tree")
        if not Path(word).is_dir() and "/" in word:
            raise CourseworkError(f"there is no folder {word}")
        if not Path(word).is_dir():
            raise no_such_task(f"or folder {word}", table.load_tasks(root))
    if len(folders) > 1:
        raise CourseworkError(f"two trees: {folders[0]} and {folders[1]}, expected one")
    return Path(folders[0]).resolve() if folders else root, chosen


def clear_json(path):
    """Removes earlier verdicts; if none can be written there, that is found out before grading."""
    try:
        require_writable(path)
        path.resolve().unlink(missing_ok=True)  # a link stays
    except OSError as error:
        raise CourseworkError(f"--json {path}: {error.strerror}; expected a file's name in a folder "
                              "that may be written to") from error


def say(text):
    print(f"lockstep grade: {text}", file=sys.stderr, flush=True)


def grade(options, root):
    """Grades and reports. Returns whether all passed."""
    begin = time.monotonic()
    if options.json:
        clear_json(options.json)
    folder, words = sort_words(options.words, root)
    workshop = Workshop(options.build.resolve())
    grader = Grader(root, folder, workshop, say, options.races)
    chosen = grader.select(words)
    notes = solutions.differences(grader.own, folder)
    if grader.own == folder != root:
        notes.append(f"graded by the tests in {folder} itself; to grade by yours, start a "
                     "handed-out tree's ./lockstep")
    for note in notes:
        say(note)
    verdicts = []
    with workshop.locked(say):
        for verdict in grader.grade(chosen):
            verdicts.append(verdict)
            print("\n".join(lines_of(verdict)), flush=True)
    facts = report(folder, verdicts, notes, time.monotonic() - begin)
    print(f"{facts['points']} of {facts['of']} points")
    if options.json:
        write_whole(options.json, json.dumps(facts, indent=1) + "\n")
    return all(verdict.status == PASSED for verdict in verdicts)


def main(argv, root=ROOT):
    options = parse_options(argv, root)
    try:
        return 0 if grade(options, root) else 1
    except (CourseworkError, OSError) as error:
        complain("lockstep grade", error)
        return 2


if __name__ == "__main__":
    run_command(main)
