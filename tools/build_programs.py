#!/usr/bin/env python3
"""Compile the programs of every stage, and none of the tests, into build/. `exercise` compiles only a lab's
program with it.

Says what it will do, how far it is and how long is left; says nothing if there is nothing to do. In a
student's tree the programs run with the prebuilt solutions of what is still open, unless --mine is
given.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

from child_processes import run, started
from command_line import complain, run_command
from coursework import CourseworkError, labs, solutions
from gpu_check.machine import find_gpu
from ninja_build import Steps, failure, run_and_say
from progress import CORES

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LINKED = re.compile(r"^(?!tests/|subprojects/)(.+): [a-z]+_LINKER(?:_RSP)?$", re.MULTILINE)


class Failed(Exception):
    """Ends this program, with one line; everything else has been shown."""


def say(text):
    complain("lockstep", text)


def quietly(*command):
    """Runs a command; returns whether it worked. Only the output of a failed command is shown."""
    ended, output = run(command)
    if ended:
        sys.stderr.write(output)
    return not ended


# A room's sources are compiled as one, with line numbers as a debugger's only information: that
# takes half as long. If you want it otherwise, make build/ with `meson setup` first.
OPTIONS = ("-Dunity=on", "-Dunity_size=40", "-Dcpp_args=-g1")
# Without a GPU, kernels are compiled for one generation; if a GPU comes later, its driver
# translates them.
WITHOUT_GPU = ("-Dgpu_archs=75",)


def options():
    gpu, _ = find_gpu()
    return OPTIONS if gpu else (*OPTIONS, *WITHOUT_GPU)


def configure(tasks):
    """`tasks` are those that prebuilt solutions stand in for, in a student's tree."""
    students = solutions.meson_options(ROOT, tasks)
    stamp = BUILD / "students-options"
    changed = students and "\n".join(students) != (stamp.read_text() if stamp.is_file() else "")
    if not (BUILD / "build.ninja").is_file():
        say("configuring build/ with meson, some seconds; then it is compiled, at first some minutes")
        if not quietly("meson", "setup", str(BUILD), str(ROOT), *options(), *students):
            raise Failed("meson could not configure build/, see above; './lockstep doctor' names what is too old")
    elif changed and not quietly("meson", "configure", str(BUILD), *students):
        raise Failed("meson could not configure build/ anew, see above")
    if changed:
        stamp.write_text("\n".join(students))
    if not quietly("ninja", "-C", str(BUILD), "build.ninja"):
        raise Failed("meson could not configure build/ anew, see above")


def programs(lab):
    """The linked files of the project, without its tests; or the program of a lab."""
    if lab:
        return [labs.named_lab(lab)["program"]]
    listing = subprocess.run(("ninja", "-C", str(BUILD), "-t", "targets", "all"),
                             stdout=subprocess.PIPE, text=True, errors="replace")
    return LINKED.findall(listing.stdout)


def compile_programs(targets, steps):
    """Returns whether it worked. A terminal sees ninja's own line, anything else one every 15
    seconds."""
    if sys.stdout.isatty():
        command = ("ninja", "-C", str(BUILD), "-j", str(CORES), *targets)
        with started(command) as ninja:
            return ninja.wait() == 0
    status, output = run_and_say(BUILD, targets, steps, say, "compiling build/")
    if status != 0:
        sys.stderr.write(failure(output))
    return status == 0


def build(mine, lab=None):
    if mine and not solutions.is_students_tree(ROOT):
        raise Failed(f"{solutions.MINE} is for a student's tree, and no task is open in this one: leave it out")
    if lab is not None:
        labs.named_lab(lab)  # before the minute that a folder takes
    tasks = solutions.replaced(ROOT, mine)
    for line in solutions.told(ROOT, tasks):
        say(line)
    configure(tasks)
    targets = programs(lab)
    steps = Steps(BUILD, targets)
    if steps.nothing_to_do:
        return
    number, cores = counted(len(steps.names), "step"), counted(CORES, "core")
    say(f"compiling build/: {number} on {cores}, {steps.estimate()}")
    begin = time.monotonic()
    if not compile_programs(targets, steps):
        raise Failed("the build failed, see above (after moving the folder: delete build/)")
    say(f"compiled build/ in {time.monotonic() - begin:.0f} s")


def counted(number, noun):
    return f"{number} {noun}" + ("s" if number != 1 else "")


def main(argv):
    try:
        build(solutions.MINE in argv)
    except (Failed, CourseworkError) as failed:
        say(failed)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
