"""Verdicts in words: for people, for a teacher's script, and for one student of a class."""

import textwrap

from coursework.sandbox import NONE
from coursework.verdict import FAILED, OPEN, PASSED

HOW = {"compile": "does not compile", "crash": "crashed", "deadline": "endless", "memory": "memory",
       "race": "race", "hidden": "other values", "witness": "not counted", "refused": "refused"}


def lines_of(verdict):
    """A verdict for people."""
    status = verdict.status
    if status == FAILED and verdict.how in HOW:
        status = f"failed: {'deadlock' if verdict.waits else HOW[verdict.how]}"
    lines = [f"{verdict.id:<6}{verdict.name:<28} {status:<26} {points(verdict.points)} of {verdict.of}"]
    place = f"{verdict.file}:{verdict.line}" if verdict.file and verdict.line else verdict.file
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
        for case, worth in verdict.partly.items():
            lines += wrapped("      passed:   ", f"{case} ({points(worth)} of {verdict.of})")
    elif verdict.status == PASSED and verdict.text:
        lines.append(f"      {verdict.text}")
    return lines


def points(number):
    """2 for 2.0: points are whole where they can be."""
    return f"{number:g}"


def wrapped(label, value):
    """A value after its label, in lines of 100 columns; code keeps its lines."""
    lines = [part for line in value.split("\n")
             for part in (textwrap.wrap(line, 100 - len(label)) or [""])]
    return [(label if number == 0 else " " * len(label)) + line
            for number, line in enumerate(lines)]


def how_graded(settings):
    """The first line of a grading: what guards the machine, and what decides."""
    sandbox = settings.sandbox
    room = (f"no sandbox: students' code runs with your rights ({sandbox.why})" if sandbox.kind == NONE
            else f"sandbox: {sandbox.kind}")
    taken = "whole files, not only the marked lines" if settings.whole_files else "the marked lines"
    decides = "visible and hidden cases" if settings.hidden else "visible cases"
    return f"{room}; taken: {taken}; graded by: {decides}"


def facts_of(name, verdicts, notes, seconds, settings):
    """The facts for a teacher's script."""
    return {"tree": name, "points": sum(v.points for v in verdicts),
            "of": sum(v.of for v in verdicts), "seconds": round(seconds, 1), "notes": notes,
            "sandbox": settings.sandbox.kind, "without_sandbox": settings.sandbox.why,
            "whole_files": settings.whole_files, "hidden_cases": settings.hidden is not None,
            "tasks": [verdict.facts() for verdict in verdicts]}


def students_report(facts, verdicts):
    """What a student of a class sees."""
    lines = [f"{points(facts['points'])} of {points(facts['of'])} points"]
    lines += [f"note: {note}" for note in facts["notes"]]
    for verdict in verdicts:
        lines += ["", *lines_of(verdict)]
    return "\n".join(lines) + "\n"
