#!/usr/bin/env python3
"""Build a student's tree and grade its tasks: `./lockstep grade [DIR] [TASK]`.

Each task is graded by itself: those that are not graded run from the prebuilt solutions. The exit
status is 0 if all graded tasks passed, 1 if not, 2 if there was nothing to grade or no way to
(docs/coursework.md).
"""

import argparse
import json
import re
import sys
import textwrap
import time
from pathlib import Path

from compile_tests import tsan_wrapper
from coursework import CourseworkError, run_command, solutions, tasks as table, tree
from coursework.verdict import FAILED, OPEN, PASSED, Verdict, verdict_of
from coursework.workshop import ERROR, FAILED_EDGE, UNDEFINED, Workshop

ROOT = Path(__file__).resolve().parent.parent
TASK = re.compile(r"\d\d(\.\d+)?")


class Grader:
    """Grades the tree `folder`. Table, tests and solutions are those of `root`, where this has
    solutions (a teacher's copy of the tree), else the student's own."""

    def __init__(self, root, folder, workshop, say, races=True):
        self.folder, self.workshop, self.say, self.races = folder, workshop, say, races
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

    def select(self, words):
        """The tasks with these ids, or of these stages; all if there are none."""
        unknown = [word for word in words
                   if not any(task.id == word or task.id.split(".")[0] == word
                              for task in self.tasks)]
        if unknown:
            raise CourseworkError(f"there is no task {unknown[0]}, expected one of "
                                  f"{', '.join(task.id for task in self.tasks)}, or a stage")
        return [task for task in self.tasks
                if not words or task.id in words or task.id.split(".")[0] in words]

    def grade(self, chosen):
        """Yields the verdict of each of these tasks."""
        missing = [task for task in self.tasks if not (self.folder / task.file).is_file()]
        self.files |= {task.file: self.own / solutions.OPEN / task.file for task in missing}
        self.workshop.fill(self.files)
        self.say("compiling")
        broken = self.compile("plain", chosen)
        broken |= {task.id: Verdict(task.id, task.name, FAILED, task.points, how="compile",
                                    text=f"the file {task.file} is missing") for task in missing}
        for task in chosen:
            verdict = broken.get(task.id) or self.run("plain", task)
            if verdict.status == PASSED and task.race:
                verdict = self.look_for_races(task, verdict)
            yield verdict

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
        line = self.open_line(task)
        if verdict.how == "crash" and line:  # threads that throw at once leave no text
            return Verdict(task.id, task.name, OPEN, task.points, file=task.file, line=line)
        return verdict

    def open_line(self, task):
        """Where the student's file still has the line that was handed out; 0: nowhere."""
        text = self.students_text(task)
        throws = f'open_task("task {task.id} ({task.name}) is yours'
        return next((number for number, line in enumerate(text.split("\n"), 1) if throws in line), 0)

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
        self.workshop.configure(flavour, "grade")
        programs = [self.program(task) for task in chosen]
        status, output = self.workshop.compile(flavour, programs)
        if status == 0:
            return {}
        failed = failed_edges(output)
        broken = self.broken_tasks(flavour, failed)
        self.files |= {task.file: self.own / solutions.OPEN / task.file for task in self.tasks
                       if task.id in broken}
        if broken:
            self.workshop.fill(self.files)
            status, output = self.workshop.compile(flavour, programs)
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
        """The verdict, with the compiler's first words: of the task's own file, if it has any."""
        verdict = Verdict(task.id, task.name, FAILED, task.points, how="compile")
        errors = [(self.workshop.path_in_tree(error["file"]), int(error["line"]), error["text"])
                  for error in ERROR.finditer(output)]
        own = [error for error in errors if error[0] == task.file]
        undefined = UNDEFINED.search(output)
        if errors:
            verdict.file, verdict.line, verdict.text = (own or errors)[0]
        else:
            verdict.text = (undefined[0] if undefined else output.strip().split("\n")[-1]).strip()
        return verdict


def failed_edges(output):
    """What was written about each target that Ninja could not make, by the target."""
    parts = re.split(r"^(?=FAILED: |\[\d+/\d+\] )", output, flags=re.MULTILINE)
    return {match[1]: part for part in parts if (match := FAILED_EDGE.match(part))}


# --- Telling -------------------------------------------------------------------------------------

HOW = {"compile": "does not compile", "crash": "crashed", "deadline": "endless", "race": "race"}


def lines_of(verdict):
    """A verdict for people."""
    status = verdict.status
    if status == FAILED and verdict.how in HOW:
        status = f"failed: {HOW[verdict.how]}"
    lines = [f"{verdict.id:<6}{verdict.name:<28} {status:<26} {verdict.points} of {verdict.of}"]
    place = f"{verdict.file}:{verdict.line}" if verdict.file else ""
    if verdict.status == OPEN:
        lines.append(f"      yours: {place}")
    told = {"test": verdict.case, "asserted": verdict.asserted, "found": verdict.found,
            "said": verdict.text, "hint": verdict.hint, "at": place}
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
    """A value behind its label, in lines of 100 columns; what is code keeps its lines."""
    lines = [part for line in value.split("\n")
             for part in (textwrap.wrap(line, 100 - len(label)) or [""])]
    return [(label if number == 0 else " " * len(label)) + line
            for number, line in enumerate(lines)]


def report(folder, verdicts, notes, seconds):
    """The facts for a teacher's script."""
    return {"tree": str(folder), "points": sum(v.points for v in verdicts),
            "of": sum(v.of for v in verdicts), "seconds": round(seconds, 1), "notes": notes,
            "tasks": [verdict.facts() for verdict in verdicts]}


def parse_options(argv, root):
    parser = argparse.ArgumentParser(prog="lockstep grade", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="DIR or TASK",
                        help="a student's tree (default: this one); a task (02.1) or stage (02), "
                             "default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there, too")
    parser.add_argument("--build", type=Path, metavar="FOLDER", default=root / "build-coursework",
                        help="where it is compiled (default build-coursework/)")
    parser.add_argument("--no-races", dest="races", action="store_false",
                        help="do not run tasks under ThreadSanitizer, whose programs are compiled "
                             "for themselves")
    options = parser.parse_args(argv)
    options.tasks = [word for word in options.words if TASK.fullmatch(word)]
    folders = [word for word in options.words if not TASK.fullmatch(word)]
    if len(folders) > 1:
        parser.error(f"two trees: {folders[0]} and {folders[1]}")
    options.folder = Path(folders[0]).resolve() if folders else root
    return options


def main(argv, root=ROOT):
    options = parse_options(argv, root)
    begin = time.monotonic()

    def say(text):
        print(f"lockstep grade: {text}", file=sys.stderr, flush=True)

    try:
        if not options.folder.is_dir():
            raise CourseworkError(f"there is no folder {options.folder}, and no task of that name: "
                                  "tasks are like 02.1, stages like 02")
        if options.json and not options.json.resolve().parent.is_dir():
            raise CourseworkError(f"--json: there is no folder {options.json.parent}")
        workshop = Workshop(options.build.resolve())
        grader = Grader(root, options.folder, workshop, say, options.races)
        chosen = grader.select(options.tasks)
        notes = solutions.differences(grader.own, options.folder)
        if grader.own == options.folder != root:
            notes.append(f"graded by the tests in {options.folder} itself; to grade by yours, start "
                         "a handed-out tree's ./lockstep")
        for note in notes:
            say(note)
        verdicts = []
        with workshop.locked(say):
            for verdict in grader.grade(chosen):
                verdicts.append(verdict)
                print("\n".join(lines_of(verdict)), flush=True)
        facts = report(options.folder, verdicts, notes, time.monotonic() - begin)
        print(f"{facts['points']} of {facts['of']} points")
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n")
    except (CourseworkError, OSError) as error:
        print(f"lockstep grade: {error}", file=sys.stderr)
        return 2
    return 0 if all(verdict.status == PASSED for verdict in verdicts) else 1


if __name__ == "__main__":
    run_command(main)
