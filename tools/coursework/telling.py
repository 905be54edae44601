"""Verdicts for people, and for a teacher's script."""

import textwrap

from coursework.verdict import FAILED, OPEN, PASSED

HOW = {"compile": "does not compile", "crash": "crashed", "deadline": "endless", "memory": "memory",
       "race": "race"}


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
