"""Signals and child processes: none is left running, and each one receives the signals sent to it.

`nohup` and a shell's background jobs make a process ignore some signals (SIGHUP; SIGINT and
SIGQUIT). Every program that it starts would ignore them, too: a test's signals would have no
effect.
"""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

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
    """Delays signals until the block ends: an exception inside of Popen would lose its process."""
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


@contextmanager
def started(command, **options):
    """A process that has ended when the block ends: it is asked to, and ends what it started
    itself. Under nohup the end of the terminal does not reach it: Ninja would react to that
    although it ignores it."""
    process = None
    try:
        with signals_held():
            process = subprocess.Popen(command, start_new_session=OUTLIVES_TERMINAL, **options)
        yield process
    finally:
        if process is not None:
            if process.poll() is None:
                process.terminate()
            process.wait()
