"""Signals as programs under test expect them, however the test runner was started.

What `nohup` and a shell's background jobs make a process ignore (SIGHUP; SIGINT and SIGQUIT), every
program that it starts would ignore, too: what a test sends then has no effect.
"""

import signal
import sys

PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}  # Python ignores these, and gives them back itself


def end_by_exception():
    """SIGTERM, and SIGHUP where it is not ignored, end this process by an exception, as Ctrl-C does:
    so every `finally` runs, and ends what was started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def keep_ignored_signals_here():
    """This process goes on ignoring them; programs that it starts do not: a handler, unlike
    SIG_IGN, does not outlive the start of a program."""
    for number in signal.valid_signals() - PYTHONS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
