"""Labs: mistakes to run, each with what to expect and why (`./lockstep exercise --lab NAME`)."""

import json
import sys
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


def ask(lab, say):
    """Asks what will happen and returns the line that the student types. Raises CourseworkError where nobody
    can answer."""
    if not sys.stdin.isatty():
        raise CourseworkError("--predict: standard input is no terminal, expected one to type a line in; "
                              "run it in a terminal, or leave --predict out")
    say(textwrap.fill(f"Predict: {lab['ask']}", WIDTH))
    expectation = ""
    while not expectation.strip():
        try:
            expectation = input("What do you expect, in one line? ")
        except EOFError:
            raise CourseworkError("--predict: found no line, expected what you expect of the lab; "
                                  "start it again and type one") from None
    return expectation.strip()


def run_lab(name, build, say, expectation=None):
    """Says what to expect of a lab, runs it with the mistake and without, and explains it. With the
    student's own expectation, what to expect comes last, beside that. Returns the exit status: 0 if the
    run without the mistake ended well. Raises CourseworkError for a lab that does not exist or was not built."""
    lab = named_lab(name)
    program = build / lab["program"]
    if expectation is None:
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
    if expectation is not None:
        say("\n" + textwrap.fill(f"You expected: {expectation}", WIDTH))
        say(textwrap.fill(f"It shows: {lab['expect']}", WIDTH))
    say("\n" + textwrap.fill(f"Why: {lab['why']}", WIDTH))
    return status
