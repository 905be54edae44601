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
            print(f"{CLEAR}{line}" if self.rewrites else line, file=self.errors,
                  end="" if self.rewrites else "\n", flush=True)

    def show(self, lines):
        """Prints results in place of the line."""
        with self.lock:
            if self.rewrites:
                print(end=CLEAR, file=self.errors, flush=True)
            if lines:
                print("\n".join(lines), flush=True)
