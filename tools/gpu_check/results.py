"""Sections of a result file: what a part prints goes to the terminal and into its section."""

import datetime
import re
import time

OUTCOMES = ("passed", "failed", "skipped")


class Section:
    """One part's lines (Markdown), its outcome, and the time it may take."""

    def __init__(self, part, limit):
        self.part, self.limit = part, limit
        self.lines, self.count = [], dict.fromkeys(OUTCOMES, 0)
        self.begin = time.monotonic()

    def say(self, text=""):
        print(text, flush=True)
        self.lines.append(text)

    def begin_now(self):
        """The part's time starts here: what was before it is not its own."""
        self.begin = time.monotonic()

    def seconds(self):
        return time.monotonic() - self.begin

    def remaining(self):
        """Seconds until the limit; at least one, so that the next command is ended, not refused."""
        return max(1.0, self.limit - self.seconds())

    def add(self, outcome, number=1):
        self.count[outcome] += number

    def check(self, name, fault, outcome="failed"):
        """Counts one check: passed without a fault, else `outcome`, which is printed with its
        name."""
        self.add(outcome if fault else "passed")
        if fault:
            self.say(f"* {outcome}: {name}: {fault}")

    def closing(self):
        """ "41 passed, 0 failed", with ", 2 skipped" where any were."""
        shown = [outcome for outcome in OUTCOMES if outcome != "skipped" or self.count[outcome]]
        return ", ".join(f"{self.count[outcome]} {outcome}" for outcome in shown)

    def verdict(self):
        """One of OUTCOMES, for the whole part."""
        if self.count["failed"] or not any(self.count.values()):
            return "failed"
        return "passed" if self.count["passed"] else "skipped"

    def finish(self):
        """The last lines of a part. A part in which nothing was checked has failed."""
        if not any(self.count.values()):
            self.check(self.part, "nothing was checked")
        self.say()
        self.say(f"{self.part}: {self.closing()} in {self.seconds():.0f} s "
                 f"(limit {self.limit:.0f} s): {self.verdict()}")

    def markdown(self, now):
        text = "\n".join(self.lines)
        return f"\n## {self.part}, {now:%Y-%m-%d %H:%M} UTC\n\n{text}\n"


def now():
    return datetime.datetime.now(datetime.timezone.utc)


def default_name(device):
    """docs/results/ + this; `device` in lower case with dashes."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"gpu-check-{now():%Y-%m-%d}-{slug}.md"


def header(device, rows):
    """The head of a result file: where its figures were measured."""
    table = "".join(f"| {name} | {value} |\n" for name, value in [("date", f"{now():%Y-%m-%d}"),
                                                                  *rows])
    return f"# gpu-check on {device}\n\n| | |\n|---|---|\n{table}"


def append(path, head, text):
    """Adds text to a result file; a new file gets the head first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.is_file() or path.stat().st_size == 0
    with open(path, "a") as file:
        file.write((head() if new else "") + text)
