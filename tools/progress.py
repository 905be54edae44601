"""How far a run of many steps is, and about how long is left: a line every 15 s.

About how much work each step is, is known before; the pace so far corrects it.
"""

import json
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path

CORES = len(os.sched_getaffinity(0))
SHIPPED = Path(__file__).resolve().parent / "test_times.json"
UNKNOWN = {"compile": 200.0, "row": 5.0}  # seconds, for what is new
TRUST = 30  # seconds for which the earlier estimate counts against the pace


def in_words(seconds):
    """A time as exact as an estimate is: `40 s`, `3 min`."""
    if seconds < 100:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min"


class Times:
    """Seconds that the steps of `./lockstep test` took: "compile BUILD" of one core, "BUILD ROW" of a
    clock. They come from the last run, or, before the first, from tools/test_times.json, which was
    measured on two cores."""

    def __init__(self, root):
        self.kept = Path(root) / ".cache/test-times.json"
        self.known = {}
        for file in (SHIPPED, self.kept):
            if file.is_file():
                self.known.update(json.loads(file.read_text()))

    def of(self, step):
        kind = "compile" if step.startswith("compile ") else "row"
        return self.known.get(step, UNKNOWN[kind])

    def keep(self, took):
        """Remembers what was measured: seconds of a clock by step."""
        measured = {step: round(seconds * (CORES if step.startswith("compile ") else 1), 1)
                    for step, seconds in took.items()}
        self.kept.parent.mkdir(exist_ok=True)
        self.kept.write_text(json.dumps({**self.known, **measured}, indent=0, sort_keys=True))


class Progress:
    """Follows the steps of a run. Threads report what begins and ends. Work is in seconds of one core."""

    def __init__(self, say, every=15):
        self.say, self.every = say, every
        self.lock, self.over = threading.Lock(), threading.Event()
        self.begin = time.monotonic()
        self.waiting, self.running, self.done = {}, {}, 0.0  # seconds of work, by step
        self.took = {}  # seconds of those that have ended

    def expect(self, work):
        """Adds future steps, each with its work."""
        with self.lock:
            self.waiting.update(work)

    def drop(self, steps):
        """Steps that will not be taken after all."""
        with self.lock:
            for step in steps:
                self.waiting.pop(step, None)

    @contextmanager
    def step(self, name):
        """One of the steps is under way. Yields a function to call with words, and the share of the step
        that is done."""
        begin = time.monotonic()
        with self.lock:
            work = self.waiting.pop(name)
            self.running[name] = (work, "", 0.0)

        def how_far(text, share):
            self.running[name] = (work, f" ({text})", share)

        yield how_far
        with self.lock:
            del self.running[name]
            self.done += work
            self.took[name] = time.monotonic() - begin

    def line(self):
        with self.lock:
            elapsed = time.monotonic() - self.begin
            running = list(self.running.values())
            done = self.done + sum(work * share for work, _, share in running)
            left = sum(self.waiting.values()) + sum(work * (1 - share) for work, _, share in running)
            slower = (TRUST + elapsed) / (TRUST + done / CORES)
            names = ", ".join(name + text for name, (_, text, _) in self.running.items())
            return (f"{int(elapsed) // 60}:{int(elapsed) % 60:02}  {names or 'starting'}; "
                    f"about {in_words(slower * left / CORES)} left")

    def follow(self):
        """Prints a line from time to time, until the run is over."""
        while not self.over.wait(self.every):
            self.say(self.line())

    @contextmanager
    def shown(self):
        thread = threading.Thread(target=self.follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()
