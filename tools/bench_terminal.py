"""Where `lockstep bench` is: on a terminal a line that is rewritten, else a line from time to
time."""

import sys
import threading

CLEAR = "\r\033[K"
REWRITTEN, PLAIN = 1, 15  # seconds between two lines


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
