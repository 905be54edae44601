"""What somebody who has never seen the project needs: a plan, and one file to hand back."""

import tempfile
from pathlib import Path

from gpu_check import results
from gpu_check.machine import CheckError

WHAT = {"build": "configures and compiles everything for the GPU found",
        "ops": "every operation on the GPU against the CPU",
        "stages": "whole steps against the CPU, and every stage trained",
        "sanitizer": "compute-sanitizer on the operations",
        "bench": "samples per second, beside PyTorch where it is installed"}


def one_line(error):
    """An error's text in one line; its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def plan(limits):
    """The opening: parts and the minutes that each may take. `limits`: seconds by part."""
    minutes = {part: -(-limit // 60) for part, limit in limits.items()}
    lines = [f"plan: {len(limits)} parts, at most {-(-sum(limits.values()) // 60)} minutes; "
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
            results.append(self.path, self.head, text)
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
                results.append(target, self.head,
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
