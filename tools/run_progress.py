"""How far `./lockstep test` is, and about how long is left: a line every 15 s.

The times of each build and each row come from the last run (.cache/test-times.json), or, before the
first run, from tools/test_times.json, which was measured on two cores. The pace so far corrects
them.
"""

import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from ninja_progress import CORES, in_words

SHIPPED = Path(__file__).resolve().parent / "test_times.json"
UNKNOWN = {"compile": 200.0, "row": 5.0}  # seconds, for what is new
TRUST = 30  # seconds for which the earlier estimate counts against the pace


class Times:
    """Seconds that steps took: "compile BUILD" of one core, "BUILD ROW" of a clock."""

    def __init__(self, root):
        self.kept = Path(root) / ".cache/test-times.json"
        self.known = {}
        for file in (SHIPPED, self.kept):
            if file.is_file():
                self.known.update(json.loads(file.read_text()))
        self.measured = {}

    def of(self, step):
        kind = "compile" if step.startswith("compile ") else "row"
        return self.known.get(step, UNKNOWN[kind])

    def keep(self):
        """Remembers what was measured."""
        self.kept.parent.mkdir(exist_ok=True)
        self.kept.write_text(json.dumps({**self.known, **self.measured}, indent=0, sort_keys=True))


class Progress:
    """Follows the steps of a run. Threads report what begins and ends."""

    def __init__(self, times, say, every=15):
        self.times, self.say, self.every = times, say, every
        self.lock, self.over = threading.Lock(), threading.Event()
        self.begin = time.monotonic()
        self.waiting, self.running, self.done = {}, {}, 0.0  # seconds of work, by step

    def plan(self, steps, work=None):
        """Adds future steps; `work`, if it is known better than from earlier runs."""
        with self.lock:
            self.waiting.update({step: self.times.of(step) if work is None else work
                                 for step in steps})

    def drop(self, steps):
        """Steps that will not be taken after all."""
        with self.lock:
            for step in steps:
                self.waiting.pop(step, None)

    @contextmanager
    def step(self, name, cores=1):
        """One step under way: on `cores`, as its work is counted. Yields a function to call with
        words, and the share of the step that is done."""
        begin = time.monotonic()
        with self.lock:
            work = self.waiting.pop(name, self.times.of(name))
            self.running[name] = (work, "", 0.0)

        def how_far(text, share):
            self.running[name] = (work, f" ({text})", share)

        yield how_far
        with self.lock:
            del self.running[name]
            self.done += work
            self.times.measured[name] = round((time.monotonic() - begin) * cores, 1)

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
