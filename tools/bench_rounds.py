"""What `lockstep bench` will measure, and how it is measured: in rounds, so that what disturbs the
machine for a while disturbs all contenders alike. Where it is: on a terminal a line that is rewritten,
else a line from time to time."""

import statistics
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from progress import CORES, Progress


CLEAR = "\r\033[K"
REWRITTEN, PLAIN = 1, 15  # seconds between two lines


class NotHere(Exception):
    """This machine does not permit the measurement; the text says why."""


@dataclass
class Run:
    """One contender: a call makes one round of it, which takes about `seconds`."""

    what: str
    seconds: float
    call: Callable[[], object]


@dataclass
class Group:
    """Runs that are compared: in every round each of them runs once, in turn. `lines` and `figures`
    get the results of all rounds by the runs' keys. After Ctrl-C these can be fewer, but where
    there are any, the first run has one."""

    part: str
    runs: dict[object, Run]
    rounds: int
    lines: Callable[[dict], list[str]]
    figures: Callable[[dict], object]
    found: dict = field(default_factory=dict)

    def seconds(self):
        return self.rounds * sum(run.seconds for run in self.runs.values())

    def steps(self):
        """(round, key, run), in the order in which they are made."""
        return [(number, key, run) for number in range(self.rounds)
                for key, run in self.runs.items()]


def medians(found):
    """The median of each run's `seconds`."""
    return {key: statistics.median(result["seconds"] for result in results)
            for key, results in found.items()}


def all_rounds(found):
    return {key: [result["seconds"] for result in results] for key, results in found.items()}


class Terminal:
    """Keeps the line and the results apart, which come from two threads."""

    def __init__(self, errors=None):
        self.errors = errors or sys.stderr
        self.rewrites = self.errors.isatty()
        self.every = REWRITTEN if self.rewrites else PLAIN
        self.lock = threading.Lock()

    def say(self, line):
        with self.lock:
            self.clear()
            print(line, file=self.errors, end="" if self.rewrites else "\n", flush=True)

    def clear(self):
        """The one thing that a terminal is told to do: by the stream below the one that shows it as text."""
        if self.rewrites:
            print(end=CLEAR, file=getattr(self.errors, "raw", self.errors), flush=True)

    def show(self, lines):
        """Prints results in place of the line."""
        with self.lock:
            self.clear()
            if lines:
                print("\n".join(lines), flush=True)


class Measuring:
    """Makes all runs of some groups. Says where it is, and prints each group when it is done."""

    def __init__(self, groups, titles, terminal):
        self.groups, self.titles, self.terminal = groups, titles, terminal
        self.progress = Progress(terminal.say, terminal.every)
        self.names = {}  # of each step, for Progress: they begin with its number
        steps = [(group, *step) for group in groups for step in group.steps()]
        for place, (group, number, key, run) in enumerate(steps, 1):
            name = (f"{place} of {len(steps)}: {group.part}, {run.what}, round {number + 1} of "
                    f"{group.rounds}")
            self.names[id(group), number, key] = name
            self.progress.expect({name: CORES * run.seconds})

    def run(self):
        titles = dict(self.titles)
        with self.progress.shown():
            for group in self.groups:
                with self.printed(group, titles):
                    for number, key, run in group.steps():
                        with self.progress.step(self.names[id(group), number, key]):
                            result = run.call()
                        group.found.setdefault(key, []).append(result)

    @contextmanager
    def printed(self, group, titles):
        """Prints what was found, also if it is not all: the part's title once, then its lines."""
        lines = []
        try:
            yield
        except NotHere as reason:
            lines = [f"  not measured: {reason}"]
            self.progress.drop(self.names[id(group), number, key]
                               for number, key, _ in group.steps())
        finally:
            lines = lines or (group.lines(group.found) if group.found else [])
            if lines and group.part in titles:
                lines = ["", titles.pop(group.part), *lines]
            self.terminal.show(lines)
