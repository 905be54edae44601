"""Child processes: all that run for long are started here. None is left running, and each one receives
the signals sent to it.

`nohup` and a shell's background jobs make a process ignore some signals (SIGHUP; SIGINT and
SIGQUIT). Every program that it starts would ignore them, too: a test's signals would have no
effect.
"""

import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager

SKIPPED = 77  # the exit status of a test, or of a tool, that cannot run here; Meson knows it, too
LATE = "ran past its deadline"
ENDING = (signal.SIGTERM, signal.SIGHUP)  # Python turns SIGINT into an exception itself
# Under nohup, this process does not react to the end of the terminal.
OUTLIVES_TERMINAL = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}  # Python ignores these, and restores them itself


def end_by_exception():
    """SIGTERM, and SIGHUP where it is not ignored, end this process by an exception, as Ctrl-C
    does: so every `finally` runs, and ends what was started."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def keep_ignored_signals_here():
    """This process continues to ignore them; programs that it starts do not: a handler, unlike
    SIG_IGN, does not outlive the start of a program."""
    for number in signal.valid_signals() - PYTHONS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@contextmanager
def signals_held():
    """Delays signals until the block ends: an exception inside of Popen would lose its process, inside
    of mkstemp its file."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread gets any
        return
    came = []
    handlers = {number: signal.signal(number, lambda number, frame: came.append(number))
                for number in (signal.SIGINT, *ENDING)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)


class Running:
    """Processes that run at the same time: whoever is interrupted ends them all, and then none is
    started any more."""

    def __init__(self):
        self.processes, self.over, self.lock = set(), False, threading.Lock()

    def start(self, command, **options):
        process = None
        try:
            with self.lock, signals_held():
                if self.over:
                    raise InterruptedError(errno.EINTR, "the run was interrupted")
                process = subprocess.Popen(list(map(str, command)), **options)
                self.processes.add(process)
            return process
        except BaseException:  # a signal that was held
            if process is not None:
                end([process])
            raise

    def __iter__(self):
        return iter(list(self.processes))

    def end(self):
        with self.lock:
            self.over, left = True, list(self)
        end(left)


@contextmanager
def started(command, **options):
    """A process that has ended when the block ends: it is asked to, and ends what it started
    itself. Under nohup the end of the terminal does not reach it: Ninja would react to that
    although it ignores it."""
    process = None
    try:
        process = Running().start(command, start_new_session=OUTLIVES_TERMINAL, **options)
        yield process
    finally:
        if process is not None:
            if process.poll() is None:
                process.terminate()
            process.wait()


def run(command, deadline=None, running=None, **options):
    """Runs a command in a process group of its own, for `deadline` seconds at most; returns how it
    ended in words, "" if well, and what it wrote."""
    running, process = running or Running(), None
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            process = running.start(command, stdout=output, stderr=subprocess.STDOUT,
                                    start_new_session=True, **options)
            ended = how_it_ended(wait(process, deadline))
        except subprocess.TimeoutExpired:
            ended = f"{LATE} of {deadline:.0f} s"
        finally:
            if process is not None:
                end([process])  # and everything that it started
                running.processes.discard(process)
        output.seek(0)
        return ended, output.read()


def wait(process, deadline):
    """process.wait(deadline), which itself looks every 50 ms only."""
    try:
        ending = os.pidfd_open(process.pid)
    except OSError:  # an old kernel
        return process.wait(deadline)
    try:
        select.select([ending], [], [], deadline)
    finally:
        os.close(ending)
    return process.wait(None if deadline is None else 0)


def how_it_ended(status):
    """How a process ended, in words; "" if all was well, or if it could not run here."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return "" if status in (0, SKIPPED) else f"exited with status {status}"


def end(processes, patience=5):
    """Ends processes that lead groups, with these. Before, they have `patience` seconds to end what
    they started in other groups, which killing theirs does not reach."""
    for process in processes:
        if process.poll() is None:
            send(process, signal.SIGTERM)
    give_up = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    for process in processes:
        send(process, signal.SIGKILL)
        process.wait()


def send(process, number):
    """Sends a signal to a process' group, as long as it leads one."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        process.send_signal(number)  # does nothing after its end
