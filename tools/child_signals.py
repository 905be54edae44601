"""Signals and the programs that this process starts: it leaves none behind, and they hear what is sent.

What `nohup` and a shell's background jobs make a process ignore (SIGHUP; SIGINT and SIGQUIT), every
program that it starts would ignore, too: what a test sends then has no effect.
"""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

ENDING = (signal.SIGTERM, signal.SIGHUP)  # beside SIGINT, for which Python raises an exception itself
# The end of the terminal is not this process's: it was started under nohup.
OUTLIVES_TERMINAL = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}  # Python ignores these, and gives them back itself


def end_by_exception():
    """SIGTERM, and SIGHUP where it is not ignored, end this process by an exception, as Ctrl-C does:
    so every `finally` runs, and ends what was started."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def keep_ignored_signals_here():
    """This process goes on ignoring them; programs that it starts do not: a handler, unlike
    SIG_IGN, does not outlive the start of a program."""
    for number in signal.valid_signals() - PYTHONS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@contextmanager
def signals_held():
    """Signals come when this is left: an exception inside of Popen would lose its process."""
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
    """A process that has ended when this is left: it is asked to, and ends what it started itself.
    Under nohup the terminal's end does not reach it: Ninja would heed that, though told to ignore it."""
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
