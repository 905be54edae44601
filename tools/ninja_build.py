"""Ninja with progress: what it will do, how far it is and how long is left.

A step's work is what `.ninja_log` says it took last time, in seconds of one core. A step that was
never done is assumed to take as long as others of its kind.
"""

import functools
import os
import re
import shlex
import subprocess
from pathlib import Path

from child_processes import started
from progress import CORES, Progress, in_words

# Seconds of one core if nothing is known, of a compiler (which is given several sources as one) and
# of any other step; measured on an AMD EPYC in 2026.
COMPILING, OTHER = 8.0, 0.5
STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")
NOTHING_TO_DO = "no work to do"
# Characters of a line, and of all lines, that are kept of what compilers write: a short source can make them write
# hundreds of megabytes.
LONGEST, MOST = 4000, 4 << 20
NAMES_A_STEP = ("FAILED: ", "ninja: ")


class Steps:
    """What ninja would do for some targets: steps, and the work of each by its description."""

    def __init__(self, folder, targets, compiling=COMPILING):
        self.compiling = compiling
        self.took = durations(folder)
        done = subprocess.run(["ninja", "-C", str(folder), "-n", *targets], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace",
                              env=environment())
        self.nothing_to_do = done.returncode == 0 and NOTHING_TO_DO in done.stdout
        self.names = [match[3] for line in done.stdout.splitlines() if (match := STEP.match(line))]
        self.work = sum(map(self.work_of, self.names))

    def work_of(self, step):
        """Seconds of one core. Meson's descriptions end with the file that is made."""
        return self.took.get(step.rsplit(" ", 1)[-1], self.compiling if is_compiling(step) else OTHER)

    def seconds(self, jobs=CORES):
        """How long it will take on a machine that has nothing else to do."""
        return self.work / jobs

    def estimate(self):
        """The same in words; says so where others want the cores, too."""
        load = os.getloadavg()[0]
        busy = f", longer on a machine as busy as now (load {load:.0f})" if load > 2 * CORES else ""
        return f"about {in_words(self.seconds())}{busy}"


@functools.cache
def linking():
    """Meson's options for a fast linker: mold takes a quarter of the time of binutils' ld for a program
    of ours. None where mold is missing, or the compiler does not know it (g++ before 12.1)."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        known = subprocess.run([*compiler, "-fuse-ld=mold", "-Wl,--version"], capture_output=True)
    except OSError:  # Meson says that there is no compiler
        return ()
    return ("-Dcpp_link_args=-fuse-ld=mold",) if known.returncode == 0 else ()


def is_compiling(step):
    return step.startswith("Compiling ")


def durations(folder):
    """Seconds that making each file took last time; empty if nothing was made."""
    try:
        lines = (Path(folder) / ".ninja_log").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    rows = [line.split("\t") for line in lines if line.count("\t") == 4]
    return {made: (int(end) - int(begin)) / 1000 for begin, end, _, made, _ in rows}


def environment():
    """Makes Ninja print its lines in the form that STEP reads, whatever the caller prefers."""
    return {**os.environ, "NINJA_STATUS": "[%f/%t] "}


def run_ninja(folder, targets, how_far=lambda text, share: None, steps=None, keep_going=False, jobs=CORES,
              wrapped=lambda words: words):
    """Builds the targets; returns ninja's status and what it wrote, up to LONGEST and MOST. `how_far` is called at every
    step's end, as Progress.step() wants it. With `keep_going` a failed step does not end the others.
    `wrapped` puts its command into another one."""
    steps, done, lines, size = steps or Steps(folder, targets), 0.0, [], 0
    options = ["-j", jobs, *(("-k", "0") if keep_going else ())]
    with started(wrapped(["ninja", "-C", folder, *options, *targets]), stdout=subprocess.PIPE,
                 stderr=subprocess.STDOUT, env=environment(), text=True,
                 errors="replace") as process, process.stdout as output:
        for line in short_lines(output):
            size += len(line)
            if size < MOST or line.startswith(NAMES_A_STEP):
                lines.append(line)
            if step := STEP.match(line):
                done = min(done + steps.work_of(step[3]), steps.work)
                # Of those that have begun, half is done.
                under_way = min(jobs * steps.work / max(len(steps.names), 1), steps.work - done) / 2
                how_far(f"{step[1]} of {step[2]}", (done + under_way) / max(steps.work, OTHER))
        return process.wait(), "".join(lines)


def short_lines(output):
    """The lines of a stream, each without what is beyond LONGEST."""
    begins = True
    while piece := output.readline(LONGEST):
        if begins:
            yield piece.rstrip("\n") + "\n"
        begins = piece.endswith("\n")


def run_and_say(folder, targets, steps, say, what, keep_going=False, wrapped=lambda words: words):
    """The same; now and then says how far it is."""
    progress = Progress(say)
    progress.expect({what: steps.work})
    with progress.shown(), progress.step(what) as how_far:
        return run_ninja(folder, targets, how_far, steps, keep_going, wrapped=wrapped)


def failure(output):
    """Ninja's output from its first failed step on; all of it if no step is named."""
    lines = [line for line in output.splitlines(keepends=True)
             if not line.startswith("ninja: Entering directory")]
    failed = [place for place, line in enumerate(lines) if line.startswith("FAILED: ")]
    return "".join(lines[failed[0]:] if failed else lines)
