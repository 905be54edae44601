"""Labs: mistakes to run, each with what to expect and why (`./lockstep exercise --lab NAME`)."""

import json
import textwrap
from pathlib import Path

from child_processes import started
from coursework import CourseworkError

TABLE = Path(__file__).with_name("labs.json")
WIDTH = 100


def load_labs():
    """The labs by name, in the order of the stages."""
    return {lab["name"]: lab for lab in json.loads(TABLE.read_text())["labs"]}


def list_labs(say):
    """All names, with what to expect of each. Returns the exit status, 0."""
    for name, lab in load_labs().items():
        say(f"{name:<28} {lab['program'].split('/')[0]}")
        say(textwrap.fill(lab["expect"], WIDTH, initial_indent="    ", subsequent_indent="    "))
    return 0


def named_lab(name):
    """Raises CourseworkError for a lab that does not exist."""
    known = load_labs()
    if name not in known:
        raise CourseworkError(f"--lab {name}: expected one of {', '.join(known)}")
    return known[name]


def run_lab(name, build, say):
    """Says what to expect of a lab, runs it with the mistake and without, and explains it. Returns
    the exit status: 0 if the run without the mistake ended well. Raises CourseworkError for a lab
    that does not exist or was not built."""
    lab = named_lab(name)
    program = build / lab["program"]
    say(textwrap.fill(f"Expect: {lab['expect']}", WIDTH))
    for heading, words in (("With the mistake", [name]), ("Without it", [name, "--fixed"])):
        say(f"\n== {heading}: build/{lab['program']} {' '.join(words)}")
        try:
            with started([program, *words]) as process:
                status = process.wait()
        except OSError as error:
            raise CourseworkError(f"{program}: {error.strerror}; './lockstep exercise --lab {name}' "
                                  "builds it") from None
        if status != 0:
            say(f"(exit status {status})")
    say("\n" + textwrap.fill(f"Why: {lab['why']}", WIDTH))
    return status
