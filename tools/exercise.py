#!/usr/bin/env python3
"""Write a student's tree with all tasks open: `./lockstep exercise DIR`; what only teachers get:
`./lockstep exercise --teacher DIR`; or show one of the stages' labs: `./lockstep exercise --lab NAME`.

The tree is a copy of this repository in which the lines of every task throw and say where they are,
without its history, with the solutions as prebuilt objects for the grader (docs/coursework.md).
"""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import build_programs
from child_processes import signals_held
from command_line import Parser, complain, run_command
from coursework import CourseworkError, SOLUTIONS, labs, services, solutions, tasks as table, teacher, tree
from coursework.workshop import Workshop

ROOT = Path(__file__).resolve().parent.parent
# What an assistant may do for a student, under the name that such programs look for.
ASSISTANT_PAGE = ("tools/coursework/assistant_page.md", "AGENTS.md")
# Files that know the solutions or answers, and that page under its name in the teacher's tree.
LEFT_OUT = (teacher.WRONG, f"{tree.HIDDEN}/", "tests/coursework/test_", "tests/coursework/made_up_class.py",
            teacher.ANSWERS, ASSISTANT_PAGE[0])


def say(text):
    print(text, flush=True)


def check_target(target, root):
    if (root / SOLUTIONS).exists():
        raise CourseworkError(f"{root} is a student's tree: go to the solved one that it was made from")
    real = target.resolve()
    if real == root or root in real.parents:
        raise CourseworkError(f"{target} is inside this repository, expected a folder outside")
    if not target.parent.is_dir():
        raise CourseworkError(f"there is no folder {target.parent}")
    if target.is_file():
        raise CourseworkError(f"{target} is a file, expected a new folder")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise CourseworkError(f"{target} is there and not empty, expected a new folder")


def choose_files(root, say):
    """The files that a student's tree is made from, without those that may be the teacher's own."""
    unknown = tree.list_unknown(root)
    told = [path for path in unknown if not path.startswith(LEFT_OUT)]
    if told:
        say(f"left out: {', '.join(told)}; 'git add' what students need of it")
    return [path for path in tree.list_files(root) if path not in unknown]


def write_tree(root, files, tasks, target, assistant_page=True):
    """Writes everything but the solutions: a copy of the files, with the tasks in them opened."""
    with_tasks = {task.file for task in tasks}
    for path in files:
        if path.startswith(LEFT_OUT):
            continue
        if path not in with_tasks:
            tree.copy_file(root / path, target / path)
            continue
        opened = table.open_text((root / path).read_text(), path)
        for copy in (target / path, target / solutions.OPEN_FILES / path):
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(opened)
    page, name = ASSISTANT_PAGE
    if assistant_page and page in files:
        tree.copy_file(root / page, target / name)


@contextmanager
def new_folder(target):
    """A folder beside the target, which gets the target's name at the end: it is whole or not there."""
    beside = None
    try:
        with signals_held():  # one between the folder and its name would leave the folder
            beside = Path(tempfile.mkdtemp(prefix=".exercise-", dir=target.parent))
        yield beside
        beside.chmod(0o755)
        beside.rename(target)
    finally:
        if beside:
            shutil.rmtree(beside, ignore_errors=True)


def exercise(root, target, workshop, say, assistant_page=True, for_github=False):
    """Writes a student's tree, with another workflow than ours if it is for GitHub Classroom."""
    target = Path(os.path.abspath(target))
    check_target(target, root)
    tasks = make_tree(root, target, workshop, say, assistant_page, for_github)
    minutes = sum(task.minutes for task in tasks)
    say(f"{target}: {len(tasks)} tasks, {sum(task.points for task in tasks)} points, about "
        f"{minutes / 60:.0f} hours of work; there, './lockstep grade' says where you are")


def make_tree(root, target, workshop, say, assistant_page=True, for_github=False):
    """Returns the tasks."""
    tasks = table.load_tasks(root)
    table.check_markers(tasks, tree.read_sources(root))
    files = choose_files(root, say)
    with new_folder(target) as beside:
        with workshop.locked(say):
            workshop.fill({path: root / path for path in files})
            of_objects = solutions.make_solutions(workshop, tasks, beside, say)
        write_tree(root, files, tasks, beside, assistant_page)
        if for_github:
            for path in services.OURS:
                (beside / path).unlink(missing_ok=True)
            (beside / services.WORKFLOW).parent.mkdir(parents=True, exist_ok=True)
            (beside / services.WORKFLOW).write_text(services.workflow())
        solutions.write_manifest(beside, of_objects)
    return tasks


def write_for_teacher(root, target, say):
    target = Path(os.path.abspath(target))
    check_target(target, root)
    with new_folder(target) as beside:
        teacher.write(root, beside, LEFT_OUT)
    say(f"{target}: answers to the exercises, the hidden cases, and tasks.md with each task's cases and common "
        "mistakes; students' trees have none of it")


def show_lab(options, programs):
    """Compiles and runs a lab, or lists them."""
    if not options.lab:
        return labs.list_labs(say)
    lab = labs.named_lab(options.lab)
    expectation = labs.ask(lab, say) if options.predict else None  # before the minute that compiling takes
    if programs is None:
        programs = build_programs.BUILD
        build_programs.build(options.mine, options.lab)
    return labs.run_lab(options.lab, programs, say, expectation)


def parser_of(root):
    parser = Parser(
        prog="lockstep exercise",
        description="Write a student's tree with all tasks open, or what only teachers get, or show one of "
                    "the stages' labs.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", type=Path, nargs="?", metavar="DIR", help="a new folder")
    what.add_argument("--teacher", type=Path, metavar="DIR",
                      help="write answers to all exercises, and each task's cases and common mistakes, into "
                           "a new folder")
    what.add_argument("--lab", metavar="NAME", nargs="?", const="",
                      help="say what to expect of a mistake, show it, explain it; without NAME: "
                           "list them")
    parser.add_argument("--predict", action="store_true",
                        help="with --lab NAME: ask what you expect first, and show it beside what came out")
    parser.add_argument("--mine", action="store_true",
                        help="with --lab NAME in a student's tree: run the student's own functions only, "
                             "without the prebuilt solutions of what is open")
    parser.add_argument("--for", dest="service", choices=("github", "gradescope"), metavar="SERVICE",
                        help="github: DIR also gets a workflow for GitHub Classroom; gradescope: DIR is instead a "
                             "new archive (.zip) for Gradescope, made of this repository")
    parser.add_argument("--without-assistant-page", dest="assistant_page", action="store_false",
                        help="leave out AGENTS.md, which tells assistants not to write the open bodies")
    parser.add_argument("--build", type=Path, metavar="FOLDER", default=root / "build-coursework",
                        help="where the solutions are compiled (default build-coursework/)")
    return parser


def main(argv, root=ROOT, programs=None):
    """`programs`: a folder with compiled labs; without it they are compiled into build/."""
    parser = parser_of(root)
    options = parser.parse_args(argv)
    for option in ("predict", "mine"):
        if getattr(options, option) and not options.lab:
            parser.error(f"--{option} belongs to a lab: expected --lab NAME")
    if options.service and not options.folder:
        parser.error("--for belongs to a tree or an archive: expected DIR")
    try:
        if options.lab is not None:
            return show_lab(options, programs)
        if options.teacher:
            write_for_teacher(root, options.teacher, say)
        elif options.service == "gradescope":
            services.write_gradescope(root, options.folder, choose_files(root, say), say)
        else:
            exercise(root, options.folder, Workshop(options.build.resolve()), say, options.assistant_page,
                     for_github=options.service == "github")
    except build_programs.Failed as failed:
        complain("lockstep", failed)
        return 1
    except (CourseworkError, OSError) as error:
        complain("lockstep exercise", error)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
