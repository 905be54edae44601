"""What a graded program does, and that it leaves nothing: whether one that does not end computes or
waits, however little processor time it gets.

In a loop some thread is always able to run, in a deadlock none is. In between is a program that
checks now and then whether it may continue: beside others it queues for a processor most of the
time, but it computes far less than it sleeps. So the time in the queue is not counted.
"""

import ctypes
import os
import signal
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ASLEEP, ENDED = "STtI", "ZXx"  # states in /proc/PID/task/TID/stat; others can run, or read a disk
SAMPLES = 40  # the last ones, with the time between them, are used
LEAST_PERIOD = 0.01  # seconds: a clock tick of the processor times
TICKS = os.sysconf("SC_CLK_TCK")
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
WAITS = 0.25  # a program that computes a smaller share of the time in which it could have, waits


@dataclass(frozen=True)
class Sample:
    """A snapshot of all threads of some processes."""

    at: float
    idle: bool  # all of them sleep
    computed: dict  # seconds, by thread


class Watch:
    """Watches the processes in `running` (run() adds its own) and all that they started, from
    the middle of the time until the deadline."""

    def __init__(self, running, deadline):
        self.running, self.begin, self.over = running, deadline / 2, threading.Event()
        self.period = max(deadline / 5 / SAMPLES, LEAST_PERIOD)
        self.samples = deque(maxlen=SAMPLES)
        self.thread = threading.Thread(target=self.look, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def look(self):
        pause = self.begin
        while not self.over.wait(pause):
            pause = self.period
            for leader in self.running:
                if sample := look_at(leader.pid):
                    self.samples.append(sample)

    @property
    def waits(self):
        return share_computed(self.samples) < WAITS

    @property
    def computed(self):
        """Seconds of processor time of those that were there last: in a sandbox nobody else counts them."""
        return sum(self.samples[-1].computed.values()) if self.samples else 0


def share_computed(samples):
    """The share of computing in the time in which a program slept or computed. 1 if it did neither,
    because others had the processors."""
    samples = list(samples)
    slept = computed = 0.0
    for before, now in zip(samples, samples[1:]):
        slept += (now.at - before.at) * now.idle
        computed += sum(max(0, seconds - before.computed.get(thread, 0))
                        for thread, seconds in now.computed.items())
    return computed / (computed + slept) if slept else 1


def look_at(leader):
    """A sample of a process and all that it started; None if all of it has ended."""
    threads = [stat for pid in family(leader) for stat in stats(f"/proc/{pid}/task")]
    states = {thread.state for thread in threads} - set(ENDED)
    if not states:
        return None
    return Sample(time.monotonic(), states <= set(ASLEEP),
                  {thread.id: thread.ticks / TICKS for thread in threads})


def family(leader):
    """The ids of a process, its descendants and its session: a child may leave for another session,
    and a parent may end before its child."""
    processes = stats("/proc")
    found, size = {leader}, 0
    while len(found) > size:
        size = len(found)
        found |= {process.id for process in processes
                  if process.parent in found or process.session == leader}
    return found


@dataclass(frozen=True)
class Stat:
    """What the kernel says about a process or a thread."""

    id: int
    state: str
    parent: int
    session: int
    ticks: int  # of the clock, spent computing


def stats(folder):
    """The Stat of each process or thread that has a folder in this one."""
    found = []
    for name in filter(str.isdigit, listed(folder)):
        try:
            text = Path(folder, name, "stat").read_text(errors="replace")
        except OSError:
            continue  # it has just ended
        fields = text.rsplit(")", 1)[1].split()  # a name may contain anything
        found.append(Stat(int(name), fields[0], int(fields[1]), int(fields[3]),
                          int(fields[11]) + int(fields[12])))
    return found


def listed(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


# --- What it leaves behind -----------------------------------------------------------------------

@contextmanager
def none_left():
    """Ends everything that was started inside and is still running, in whatever session: orphans become
    children of this process."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    before = children()
    try:
        yield
    finally:
        while left := children() - before:  # the children of an ended one come next
            for pid in left:
                end(pid)


def children():
    """The ids of this process' children."""
    return {process.id for process in stats("/proc") if process.parent == os.getpid()}


def end(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
