"""The records of `./lockstep test`: one JSON line when a case starts, one when it ends.

tests/support/listener.cpp writes them for Catch2, tools/run_python_tests.py for Python:
    {"event": "start", "case": NAME}
    {"event": "end", "case": NAME, "status": "passed|failed|skipped", "reason": TEXT, "seconds": S}
The reason of a failure is its first failed assertion, with the end of what INFO() said of it.
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

# A skip counts as a failure unless its reason begins with one of these.
ALLOWED_SKIPS = (
    "no GPU",
    "fewer than two GPUs",
    "sanitizer refuses the device",
    "namespaces not permitted",
    "no tc",
    "no libsodium",
    "no AVX-512",
    "needs two cores",
    "only root becomes another user",
    "no large pages",
    "no mpirun",
    "no mpiexec.mpich",
    "no pandoc",
    "no Sphinx",
    "no torch",
    "no Chromium",
    "TSan cannot map its shadow",
    "package cache absent",
    "not the CUDA model",
    "another host",
    "no Slurm",
    "takes minutes",
    "tests/coursework runs it",
    "tests/tools runs it",
    "only with --full",
    "no ctags",
    "no clang-format",
    "no clang-tidy",
    "no nvdisasm",
    "no TF32",
    "no packages of CUDA",
    "names no program",
    "no packages of Debian",
    "no other release",
)


@dataclass(frozen=True)
class Case:
    """The outcome of one test case."""

    where: str  # "BUILD KIND", for instance "tsan unit"
    name: str
    status: str  # passed, failed or skipped
    reason: str = ""
    seconds: float = 0.0


def judged(case):
    """The case itself, or a failure if it was skipped for a reason that is not allowed."""
    if case.status == "passed" or case.status == "failed":
        return case
    if case.status == "skipped" and case.reason.startswith(ALLOWED_SKIPS):
        return case
    reason = f"{case.status} for a reason that is not allowed: '{case.reason}'"
    return Case(case.where, case.name, "failed", reason, case.seconds)


def read_events(log):
    """The events of a record file; a line cut short by a crash counts as not written."""
    if not Path(log).is_file():
        return
    for line in Path(log).read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def read_cases(where, log, ended, may_be_empty=False):
    """The cases of one executable: its record, and how its process ended ("" for status 0).

    A case that started and never ended has failed; the reason is what ended the process. An
    executable that ran no case has failed, too (`may_be_empty`: unless it was asked for a tag), and
    so has one that ended badly although every case in its record is well.
    """
    cases, running = [], None
    for event in read_events(log):
        if event["event"] == "start":
            if running is not None:
                cases.append(Case(where, running, "failed", "never ended"))
            running = event["case"]
        else:
            reason = event.get("reason", "")
            seconds = event.get("seconds", 0.0)
            cases.append(judged(Case(where, event["case"], event["status"], reason, seconds)))
            running = None
    if running is not None:
        reason = ended or "the process ended with status 0 in the middle of it"
        cases.append(Case(where, running, "failed", reason))
    if not cases and may_be_empty and ended in ("", "exited with status 2"):
        return []  # if no case passes a filter, Catch2 3 ends with status 2, Catch2 2 with 0
    if not cases:
        cases.append(Case(where, "(the executable)", "failed", ended or "it ran no test case"))
    if ended and all(case.status != "failed" for case in cases):
        cases.append(Case(where, "(after the last case)", "failed", ended))
    return cases


REASON_LENGTH = 400  # enough for an assertion with both its values


def line_of(case):
    """A case in a list: one line, with the reason if there is one."""
    reason = textwrap.shorten(case.reason, REASON_LENGTH, placeholder=" ...")
    return f"  {case.where}: {case.name}" + (f": {reason}" if reason else "")


def report(cases, slowest=10):
    """The lines that close a run. The failures come last, just before the one line `N passed, N
    failed, N skipped`, so that they survive where only the end of an output is kept."""
    lines = ["", f"Slowest {slowest} cases:"]
    by_time = sorted(cases, key=lambda case: -case.seconds)
    lines += [f"  {c.seconds:7.2f} s  {c.where}: {c.name}" for c in by_time[:slowest]]
    for status, heading in (("skipped", "Skipped:"), ("failed", "Failed:")):
        chosen = [case for case in cases if case.status == status]
        if chosen:
            lines += ["", heading]
        lines += map(line_of, chosen)
    count = {s: sum(c.status == s for c in cases) for s in ("passed", "failed", "skipped")}
    return [*lines, "", ", ".join(f"{number} {status}" for status, number in count.items())]
