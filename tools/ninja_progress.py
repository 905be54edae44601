"""Ninja with progress: what it will do, how far it is and how long is left.

A step's work is what `.ninja_log` says it took last time, in seconds of one core. A step that was
never done is assumed to take as long as others of its kind. While ninja runs, its own speed
corrects the estimate.
"""

import os
import re
import selectors
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from child_processes import started

CORES = len(os.sched_getaffinity(0))
# Seconds of one core if nothing is known, of a compiler (which is given several sources as one) and
# of any other step; measured on an AMD EPYC in 2026.
COMPILING, OTHER = 8.0, 0.5
TRUST = 15  # seconds for which the earlier estimate counts against what is measured
TICK = 1.0  # seconds between two looks at the clock while no step ends
STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")
NOTHING_TO_DO = "no work to do"


@dataclass(frozen=True)
class Progress:
    """How far a build is. Times are in seconds; `left` is an estimate."""

    done: int
    total: int
    elapsed: float
    left: float


class Plan:
    """What ninja would do for some targets: steps, and the work of each by its description."""

    def __init__(self, folder, targets, compiling=COMPILING):
        self.compiling = compiling
        self.took = durations(folder)
        done = subprocess.run(["ninja", "-C", str(folder), "-n", *targets], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace",
                              env=environment())
        self.nothing_to_do = done.returncode == 0 and NOTHING_TO_DO in done.stdout
        self.steps = [match[3] for line in done.stdout.splitlines() if (match := STEP.match(line))]
        self.work = sum(map(self.work_of, self.steps))

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


class Clock:
    """Follows ninja's lines; reports how far it is."""

    def __init__(self, plan, jobs):
        self.plan, self.jobs = plan, jobs
        self.begin = time.monotonic()
        self.done, self.total, self.work_done = 0, len(plan.steps), 0.0

    def read(self, line):
        """True if the line says that a step has ended."""
        step = STEP.match(line)
        if step:
            self.done, self.total = int(step[1]), int(step[2])
            self.work_done += self.plan.work_of(step[3])
        return bool(step)

    def now(self):
        elapsed = time.monotonic() - self.begin
        done = self.work_done / self.jobs
        rest = max(self.plan.seconds(self.jobs) - done, 0)
        # A running step counts when it ends; until then as half a step, if that much time has
        # passed.
        step = self.plan.work / max(len(self.plan.steps), 1)
        under_way = min(elapsed, step / 2, rest / 2)
        slower = (TRUST + elapsed) / (TRUST + done + under_way)  # than expected
        left = (rest - under_way) * slower if self.done < self.total else 0
        return Progress(self.done, self.total, elapsed, left)


def run_ninja(folder, targets, jobs=CORES, on_progress=None, plan=None, keep_going=False):
    """Builds the targets; returns ninja's status and all that it wrote. `on_progress` is called with
    a Progress at every step's end, and every TICK seconds meanwhile. With `keep_going` a failed step
    does not end the others."""
    clock, lines = Clock(plan or Plan(folder, targets), jobs), []
    options = ["-j", str(jobs), *(("-k", "0") if keep_going else ())]
    with started(["ninja", "-C", str(folder), *options, *targets], stdout=subprocess.PIPE,
                 stderr=subprocess.STDOUT, env=environment()) as process, process.stdout as output:
        for line in timed_lines(output):
            lines.append(line)
            if (not line or clock.read(line)) and on_progress:
                on_progress(clock.now())
        return process.wait(), "".join(lines)


def timed_lines(stream):
    """The lines of a pipe as they come, and an empty one for every TICK without any."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(TICK):
                yield ""
                continue
            piece = os.read(stream.fileno(), 65536)
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode(errors="replace") + "\n" for line in whole)
            if not piece:
                if rest:
                    yield rest.decode(errors="replace")
                return


def failure(output):
    """Ninja's output from its first failed step on; all of it if no step is named."""
    lines = [line for line in output.splitlines(keepends=True)
             if not line.startswith("ninja: Entering directory")]
    failed = [place for place, line in enumerate(lines) if line.startswith("FAILED: ")]
    return "".join(lines[failed[0]:] if failed else lines)


class Lines:
    """Prints how far a build is, a line every `every` seconds, if no terminal shows ninja's own
    line."""

    def __init__(self, say, every=15):
        self.say, self.every, self.next = say, every, every

    def __call__(self, progress):
        if progress.elapsed >= self.next:
            self.next = progress.elapsed + self.every
            self.say(f"{progress.done} of {progress.total} steps done, "
                     f"about {in_words(progress.left)} left")


def in_words(seconds):
    """A time as exact as an estimate is: `40 s`, `3 min`."""
    if seconds < 100:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min"
