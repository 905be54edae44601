#!/usr/bin/env python3
"""Grade all submissions of a class: `./lockstep grade-class SUBMISSIONS -o RESULTS`.

Each entry of the folder SUBMISSIONS is a student's: a tree, some files of it, or an archive. Run again, it
goes on where it was interrupted. The exit status is 0 if every submission was graded, 1 if one could not
be, 2 if nothing could (docs/coursework.md).
"""

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import grade
from command_line import Parser, complain, run_command
from coursework import CourseworkError, gradebook, handed_out, marked_lines, similarity, tasks as table, tree
from coursework.grader import Grader
from coursework.report import facts_of, how_graded, points, students_report
from coursework.sandbox import NONE
from coursework.submission import LARGEST, MOST_BYTES, is_archive, list_plain, name_of, printable, read_submission
from coursework.workshop import Workshop
from plain_files import read_json, write_whole
from progress import CORES, Progress

ROOT = Path(__file__).resolve().parent.parent
LONGEST_NAME = 200  # bytes: endings follow it in names of files
EACH = 40.0  # seconds that a submission takes, before the first of this run (two cores of an AMD EPYC, 2026)


def say(text):
    print(f"lockstep grade-class: {text}", file=sys.stderr, flush=True)


def parse_options(argv, root):
    parser = Parser(prog="lockstep grade-class", description=__doc__.splitlines()[0])
    parser.refused = 2
    parser.add_argument("submissions", type=Path, metavar="SUBMISSIONS", help="a folder with an entry for each student")
    parser.add_argument("tasks", nargs="*", default=[], metavar="TASK", help="a task (02.1) or stage (02), default all")
    parser.add_argument("-o", dest="results", type=results_folder, metavar="RESULTS", required=True,
                        help="a folder for marks and reports")
    grade.add_options(parser, root)
    return parser.parse_args(argv)


def results_folder(text):
    if not text:
        raise argparse.ArgumentTypeError("'', expected the name of a folder: name a new one, or that of an earlier run")
    return Path(text)


def find_students(folder):
    """The submissions by the students' names."""
    if not folder.is_dir():
        raise CourseworkError(f"{folder}: expected a folder with an entry for each student")
    students = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or tree.LITTER.fullmatch(path.name):
            continue
        name = name_of(path)
        if not name.isprintable():
            raise CourseworkError(f"{printable(str(path))}: a name with characters that cannot be shown: rename it")
        if len(os.fsencode(name)) > LONGEST_NAME:
            raise CourseworkError(f"{name[:40]}...: a name of {len(os.fsencode(name))} bytes, expected at most "
                                  f"{LONGEST_NAME}: rename it")
        if name in students:
            raise CourseworkError(f"{students[name]} and {path} have the same name, {name}: expected one of them")
        students[name] = path
    if not students:
        raise CourseworkError(f"{folder} is empty, expected an entry for each student")
    return students


class Results:
    """The folder with what is known so far. A student's file is written whole, last of all: what it says is
    not found out again."""

    def __init__(self, folder, wanted, given_seed=None):
        self.folder, self.students = folder, folder / "students"
        try:
            self.students.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CourseworkError(f"-o {folder}: {error.strerror}; expected a folder with earlier results or a new "
                                  "one: name another") from error
        self.plan = self.folder / "grading.json"
        if not self.plan.is_file():
            write_whole(self.plan, json.dumps(wanted, indent=1) + "\n")
        made = self.read_plan()
        other = [key for key in wanted if key != "seed" and wanted[key] != made.get(key)]
        if other:
            raise CourseworkError(f"{folder} has results of a grading with {other[0]} {made.get(other[0])}, this one has "
                                  f"{wanted[other[0]]}: name another folder")
        self.seed = made["seed"]
        if given_seed not in (None, self.seed):
            raise CourseworkError(f"--seed {given_seed}: {folder} has results of a grading with seed {self.seed}, "
                                  "expected this one or none: name another folder")

    def read_plan(self):
        """How the grading was made, as its first run wrote it."""
        try:
            made = read_json(self.plan)
            return {**made, "seed": int(made["seed"])}
        except (ValueError, TypeError, KeyError) as error:
            raise CourseworkError(f"{self.plan} says no more how the grading was made ({error}): name another folder, "
                                  "or remove this one") from error

    def known(self, name, digest):
        """What is known of this submission, if it was graded and is still the same; else None."""
        try:
            facts = read_json(self.students / f"{name}.json")
        except (OSError, ValueError):
            return None
        ours = isinstance(facts, dict) and facts.get("submission") == digest and facts.get("graded")
        return facts if ours else None

    def keep(self, name, facts, report):
        write_whole(self.students / f"{name}.txt", report)
        write_whole(self.folder / "gradescope" / f"{name}.json",
                    json.dumps(gradebook.gradescope(facts), indent=1) + "\n")
        write_whole(self.folder / "autolab" / f"{name}.json", gradebook.autolab(facts) + "\n")
        write_whole(self.students / f"{name}.json", json.dumps(facts, indent=1) + "\n")

    def make_folders(self):
        for name in ("gradescope", "autolab"):
            (self.folder / name).mkdir(exist_ok=True)


def digest_of(path):
    """A checksum of what was submitted; the place does not count, nor what is in a file that is too large to be
    taken. "" for what cannot be read."""
    whole = hashlib.sha256()
    try:
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            return ""
        files = [(name, path / name) for name in list_plain(path)] if path.is_dir() else [(path.name, path)]
        for name, file in files:
            size = file.stat().st_size
            content = file.read_bytes() if size <= (MOST_BYTES if is_archive(file) else LARGEST) else b""
            whole.update(name.encode(errors="surrogateescape") + b"\0%d" % size + hashlib.sha256(content).digest())
    except (CourseworkError, OSError):
        return ""
    return whole.hexdigest()


def grade_one(grader, path, chosen):
    """Facts and report of one submission. One that cannot be graded has no points, and says why."""
    begin, verdicts, notes = time.monotonic(), [], []
    try:
        submission = read_submission(path, grader.places, grader.teachers)
        verdicts = grader.grade(submission, chosen)
        notes = grader.work.notes
    except Exception as error:  # whatever it is, it costs this submission and not the class
        known = isinstance(error, (CourseworkError, OSError))
        why = str(error) if known else f"a fault of the grader: {error!r}"
        notes = [f"could not be graded: {printable(why.replace(str(path), path.name))}"]  # the student reads it
    facts = facts_of(path.name, verdicts, notes, time.monotonic() - begin, grader.settings)
    facts["of"], facts["graded"] = sum(task.points for task in chosen), bool(verdicts)
    return facts, students_report(facts, verdicts)


def grade_all(students, results, grader, chosen):
    """Grades those that are not known. Returns all facts by name."""
    rows = {name: results.known(name, digest_of(path)) for name, path in students.items()}
    left = [name for name, facts in rows.items() if facts is None]
    if len(left) < len(rows):
        say(f"{len(rows) - len(left)} of {len(rows)} are graded already")
    if left:
        grader.prepare(chosen, all_flavours=True)
    grader.say = lambda text: None
    progress = Progress(say)
    progress.expect({name: EACH * CORES for name in left})
    with progress.shown():
        for number, name in enumerate(left, 1):
            with progress.step(name):
                facts, report = grade_one(grader, students[name], chosen)
                facts["submission"] = digest_of(students[name])
                results.keep(name, facts, report)
                rows[name] = facts
            print(f"{name}: {points(facts['points'])} of {points(facts['of'])} points ({number} of {len(left)})",
                  flush=True)
    return rows


def look_for_copies(students, grader, chosen):
    """Pairs of students whose marked lines are alike, and how many have written each task."""
    texts = {}
    for name, path in students.items():
        try:
            texts[name] = read_submission(path, grader.places).files
        except (CourseworkError, OSError):
            continue
    pairs, counts = [], {}
    for task in chosen:
        handed_out = "\n".join(table.lines_of(grader.handed_out[task.file].read_text(), task.file, task.id))
        lines = {name: "\n".join(found) for name, files in texts.items()
                 if (found := marked_lines.submitted_lines(files.get(task.file, ""), task.id)[1])}
        counts[task.id] = sum(text != handed_out for text in lines.values())
        pairs += similarity.pairs_of(task.id, lines, handed_out)
    return pairs, counts


def write_summary(results, rows, students, grader, chosen):
    write_whole(results.folder / "grades.csv", gradebook.grades_csv(rows, chosen))
    write_whole(results.folder / "grades.json", json.dumps(rows, indent=1) + "\n")
    pairs, counts = look_for_copies(students, grader, chosen)
    write_whole(results.folder / "similarity.md", similarity.report(pairs, counts))
    say(f"{results.folder}: grades.csv, grades.json, a report for each student in students/, gradescope/, autolab/, "
        f"and similarity.md with {len(pairs)} pairs")


def grade_class(options, root):
    """Returns the exit status: 0 if every submission was graded, 1 if not, 2 if none was."""
    if not handed_out.is_teachers(root):
        raise CourseworkError(f"{root} is a student's tree: a class is graded in the repository that has the solutions")
    table.select(table.load_tasks(root), options.tasks)  # before anything is written
    students = find_students(options.submissions)
    if options.submissions.resolve() in (options.results / "x").resolve().parents:
        raise CourseworkError(f"{options.results} lies in {options.submissions}, where each entry is a student's: name a "
                              "folder elsewhere")
    settings = grade.settings_of(options, root)
    say(how_graded(settings))
    if settings.sandbox.kind == NONE and options.sandbox:
        raise CourseworkError(f"there is no sandbox ({settings.sandbox.why}), and students' code would run with your "
                              "rights: install bubblewrap, or give --no-sandbox")
    wanted = {"seed": settings.seed, "tasks": options.tasks, "races": settings.races, "sandbox": settings.sandbox.kind,
              "whole_files": settings.whole_files, "take_flagged": settings.take_flagged}
    results = Results(options.results, wanted, options.seed)
    results.make_folders()
    settings = replace(settings, seed=results.seed)
    workshop = Workshop(options.build.resolve(), settings.sandbox)
    with workshop.locked(say):
        grader = Grader(handed_out.handed_out_tree(root, workshop, say), workshop, say, settings)
        chosen = grader.select(options.tasks)
        rows = grade_all(students, results, grader, chosen)
        write_summary(results, rows, students, grader, chosen)
    graded = [facts["graded"] for facts in rows.values()]
    return 0 if all(graded) else 1 if any(graded) else 2


def main(argv, root=ROOT):
    options = parse_options(argv, root)
    try:
        return grade_class(options, root)
    except (CourseworkError, OSError) as error:
        complain("lockstep grade-class", error)
        return 2


if __name__ == "__main__":
    run_command(main)
