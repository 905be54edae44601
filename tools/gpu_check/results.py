"""What somebody who has never seen the project needs: the parts, and one file of results to hand back.
What a part prints goes to the terminal and into its section of the file."""

import datetime
import re
import tempfile
import time
from pathlib import Path

from gpu_check.machine import CheckError

OUTCOMES = ("passed", "failed", "skipped")
WHAT = {"build": "configures and compiles everything for the GPU found",
        "ops": "every operation on the GPU against the CPU",
        "stages": "whole steps against the CPU, and every stage trained",
        "sanitizer": "compute-sanitizer on the operations",
        "bench": "samples per second, beside PyTorch where it is installed"}


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


def one_line(error):
    """An error's text in one line; its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def opening(limits, device):
    """The opening: parts and the minutes that each may take there. `limits`: seconds by part."""
    minutes = {part: -(-limit // 60) for part, limit in limits.items()}
    lines = [f"{len(limits)} part{'s' * (len(limits) != 1)} on {device}, at most {-(-sum(limits.values()) // 60)} minutes; "
             "Ctrl-C ends it, and what was found is kept"]
    lines += [f"  {part:<10}at most {minutes[part]:>2} min  {WHAT[part]}" for part in limits]
    return "\n".join(lines)


class ResultFile:
    """The one file. Where it cannot be written it is made elsewhere, and says why."""

    def __init__(self, path, head):
        self.path, self.head = path.absolute(), head
        self.text, self.notes = "", []  # of this call, for a file elsewhere

    def add(self, text):
        """Appends to the file; CheckError if there is no folder that takes it."""
        self.text += text
        try:
            append(self.path, self.head, text)
        except OSError as error:
            self._move(error)

    def _move(self, error):
        places = dict.fromkeys((Path.cwd(), Path.home(), Path(tempfile.gettempdir())))
        for place in places:
            note = f"{self.path}: {error.strerror or error}"
            target = place / self.path.name
            if target == self.path:
                continue
            try:
                append(target, self.head,
                               f"\nNot written: {note}; this file is in its place.\n{self.text}")
            except OSError as next_error:
                self.path, error = target, next_error
                continue
            self.notes.append(f"{note}; went on in {target}")
            self.path = target
            return
        raise CheckError(f"{self.path}: {error.strerror or error}; no folder takes the results, "
                         "free some space or name a file with --out; send what is above instead")


def closing(parts, verdicts):
    """The last lines of a call, in Markdown: every part's verdict."""
    rows = "".join(f"| {part} | {verdicts.get(part, 'not run')} |\n" for part in parts)
    return f"\n| part | verdict |\n|---|---|\n{rows}"


def what_to_send(path):
    return (f"send this one file: {path}\n"
            "to: whoever asked you for it, or as a pull request that adds it to docs/results/; "
            "do so also if a part failed, for that is what it is for")
