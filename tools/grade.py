#!/usr/bin/env python3
"""Build a student's tree and grade its tasks: `./lockstep grade [SUBMISSION] [TASK]`.

Each task is graded by itself: all others run from the prebuilt solutions. The exit status is 0 if
all graded tasks passed, 1 if not, 2 if there was nothing to grade or no way to do so
(docs/coursework.md).
"""

import argparse
import json
import re
import secrets
import sys
import time
from pathlib import Path

from command_line import Parser, complain, run_command
from coursework import CourseworkError, SubmissionError, gradebook, solutions, tasks as table, tree
from coursework.grader import Grader, Settings
from coursework.handed_out import handed_out_tree, is_teachers
from coursework.report import facts_of, how_graded, lines_of, points
from coursework.sandbox import find_sandbox
from coursework.submission import lay, read_submission
from coursework.verdict import PASSED
from coursework.workshop import Workshop
from plain_files import require_writable, write_whole

ROOT = Path(__file__).resolve().parent.parent
TASK = re.compile(r"\d\d(\.\d+)?")


def add_options(parser, root):
    """The options of `grade` and `grade-class`."""
    parser.add_argument("--build", type=Path, metavar="FOLDER", default=root / "build-coursework",
                        help="where it is compiled (default build-coursework/)")
    parser.add_argument("--no-races", dest="races", action="store_false",
                        help="do not run tasks under ThreadSanitizer, for which programs are compiled "
                             "once more")
    parser.add_argument("--no-sandbox", dest="sandbox", action="store_false",
                        help="run students' code with your own rights")
    parser.add_argument("--whole-files", action="store_true",
                        help="take all that a submission has changed, not only the marked lines; the result says so")
    parser.add_argument("--take-flagged", action="store_true",
                        help="compile marked lines even if something in them is not allowed: look at them first")
    parser.add_argument("--seed", type=seed, metavar="N",
                        help="seed for the values of the hidden cases (default: a new one each time)")


def seed(text):
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"'{text}', expected a whole number from 0 to 2^63 - 1")
    return int(text)


def parse_options(argv, root):
    parser = Parser(prog="lockstep grade", description=__doc__.splitlines()[0])
    parser.refused = 2  # 1: not all passed
    parser.add_argument("words", nargs="*", metavar="SUBMISSION or TASK",
                        help="a student's tree, some files of it, or an archive (default: this tree); a task (02.1) "
                             "or stage (02), default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdicts to this file")
    parser.add_argument("--gradescope", type=Path, metavar="FILE",
                        help="also write results.json for Gradescope to this file")
    parser.add_argument("--autolab", action="store_true", help="end with the line of points that Autolab reads")
    parser.add_argument("--prepare", action="store_true",
                        help="only compile what does not depend on students, in a teacher's repository")
    add_options(parser, root)
    return parser.parse_args(argv)


def settings_of(options, root):
    """How to grade, with the machine's best sandbox."""
    return Settings(find_sandbox(options.sandbox), options.races, options.whole_files, options.take_flagged,
                    root if is_teachers(root) else None,
                    secrets.randbits(63) if options.seed is None else options.seed)


def sort_words(words, root):
    """The submission, and the tasks or stages, that the words mean."""
    chosen = [word for word in words if TASK.fullmatch(word)]
    places = [word for word in words if word not in chosen]
    for word in places:
        if not Path(word).exists() and "/" in word:
            raise CourseworkError(f"there is no folder or file {word}")
        if not Path(word).exists():
            raise table.no_such_task(f"or submission {word}", table.load_tasks(root))
    if len(places) > 1:
        raise CourseworkError(f"two submissions: {places[0]} and {places[1]}, expected one")
    return Path(places[0]).resolve() if places else root, chosen


def clear_file(option, path):
    """Removes earlier verdicts; if none can be written there, that is found out before grading."""
    try:
        require_writable(path)
        path.resolve().unlink(missing_ok=True)  # a link stays
    except OSError as error:
        raise CourseworkError(f"{option} {path}: {error.strerror}; expected a file's name in a folder "
                              "that may be written to") from error


def say(text):
    print(f"lockstep grade: {text}", file=sys.stderr, flush=True)


def own_tree(root):
    """The tree that is graded with its own tests."""
    if is_teachers(root):
        raise CourseworkError(f"{root} is the solved tree: name a submission, or grade in a tree that 'lockstep "
                              "exercise DIR' has made")
    tree.check_tree(root)
    return root


def prepare(options, root, settings, workshop):
    """The Grader, and what is submitted to it; None for a submission that is not wanted."""
    place, words = sort_words(options.words, root)
    if place == root and not options.prepare:
        grader = Grader(own_tree(root), workshop, say, settings)
        chosen = grader.select(words)
        submission = lay(root, grader.places)
        submission.notes += solutions.differences(root, root)
        return grader, submission, chosen
    if options.prepare and not settings.hidden:
        raise CourseworkError(f"--prepare: {root} is a student's tree, expected the repository with the solutions")
    own = handed_out_tree(root, workshop, say) if settings.hidden else root
    grader = Grader(own, workshop, say, settings)
    chosen = grader.select(words)
    submission = None
    if not options.prepare:
        submission = read_submission(place, grader.places, grader.teachers)
        submission.notes += solutions.differences(own, own)
    if settings.hidden:
        grader.prepare(chosen, all_flavours=options.prepare)
    return grader, submission, chosen


def grade(options, root):
    """Grades and reports. Returns whether all passed."""
    begin = time.monotonic()
    for option, path in (("--json", options.json), ("--gradescope", options.gradescope)):
        if path and path.resolve() in {Path(word).resolve() for word in options.words}:
            raise CourseworkError(f"{option} {path}: that is the submission; expected another file")
        if path:
            clear_file(option, path)
    place, words = sort_words(options.words, root)
    table.select(table.load_tasks(root), words)  # before anything is waited for
    settings = settings_of(options, root)
    say(how_graded(settings))
    workshop = Workshop(options.build.resolve(), settings.sandbox)
    with workshop.locked(say):
        grader, submission, chosen = prepare(options, root, settings, workshop)
        if submission is None:
            return True
        verdicts = grader.grade(submission, chosen)
    for note in grader.work.notes:
        say(note)
    for verdict in verdicts:
        print("\n".join(lines_of(verdict)), flush=True)
    tell(options, facts_of(str(place), verdicts, grader.work.notes, time.monotonic() - begin, settings))
    return all(verdict.status == PASSED for verdict in verdicts)


def tell(options, facts):
    print(f"{points(facts['points'])} of {facts['of']} points")
    if options.json:
        write_whole(options.json, json.dumps(facts, indent=1) + "\n")
    if options.gradescope:
        write_whole(options.gradescope, json.dumps(gradebook.gradescope(facts), indent=1) + "\n")
    if options.autolab:
        print(gradebook.autolab(facts))


def main(argv, root=ROOT):
    options = parse_options(argv, root)
    try:
        return 0 if grade(options, root) else 1
    except (CourseworkError, OSError) as error:
        complain("lockstep grade", error)
        if options.gradescope and isinstance(error, SubmissionError):
            write_whole(options.gradescope, json.dumps(gradebook.nothing(str(error)), indent=1) + "\n")
        return 2


if __name__ == "__main__":
    run_command(main)
