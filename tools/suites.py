"""Which tests there are, and which of them a run includes.

Meson knows them: a build's tests are those of `meson test --list`, each with its suites (a kind,
and the room or stage that it is about), its command and what has to be compiled for it.
"""

import json
import re
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from stages import all_stages

KINDS = ("unit", "equivalence", "parity", "convergence", "faults", "gpu", "coursework", "tools",
         "readme")
WAITS_FOR_FULL = "full"  # the suite of tests that only `./lockstep test --full` runs
INCLUDED = re.compile(r'^#include ?[<"](.+)[>"]$', re.M)
TAGS = re.compile(r'"((?:\[[a-z][\w.]*\])+)"')  # of a Catch2 case


@dataclass(frozen=True)
class Build:
    """A build folder and the Meson options that make it. Under --full `full_options` come after the
    others, and one of `only_full` is built only then. With `cuda_model` the CUDA backend is built
    against tests/cuda_model, installed into that folder."""

    name: str
    folder: str
    options: tuple
    cuda_model: str = ""
    full_options: tuple = ()
    only_full: bool = False


@dataclass(frozen=True)
class Row:
    """One of Meson's tests: one run of an executable or script, which has many cases."""

    name: str
    suites: frozenset
    command: tuple
    deadline: float = 900  # seconds
    environment: dict = field(default_factory=dict)
    targets: tuple = ()  # files to be compiled for it
    sources: tuple = ()  # of its executable; none: a script
    priority: int = 0


def sources_of(target):
    """A target's sources. If several are compiled as one, Meson names only the file that it made,
    which includes them."""
    for group in target["target_sources"]:
        yield from group.get("sources", [])
        for made in map(Path, group.get("generated_sources", [])):
            if "-unity" in made.name:
                yield from INCLUDED.findall(made.read_text())


def rows_of(tests, targets):
    """The rows in the output of `meson introspect --tests --targets`, those of high priority
    first."""
    made = {target["id"]: target for target in targets}
    by_file = {name: target for target in targets for name in target["filename"]}
    rows = []
    for test in tests:
        program = by_file.get(test["cmd"][0], {"target_sources": []})
        rows.append(Row(
            test["name"], frozenset(suite.rpartition(":")[2] for suite in test["suite"]),
            tuple(test["cmd"]), test["timeout"], test["env"],
            tuple(name for each in test["depends"] for name in made[each]["filename"]),
            tuple(sources_of(program)), test["priority"]))
    return sorted(rows, key=lambda row: -row.priority)


def read_rows(folder):
    """The rows of a build folder that Meson has configured."""
    done = subprocess.run(["meson", "introspect", "--tests", "--targets", str(folder)], check=True,
                          capture_output=True, text=True)
    told = json.loads(done.stdout)
    return rows_of(told["tests"], told["targets"])


# --- Choosing a part ------------------------------------------------------------------------------

def stages(root):
    """The numbers of the stages."""
    return sorted({stage[:2] for stage in all_stages(Path(root))})


def tags_in(text):
    return {tag for tags in TAGS.findall(text) for tag in re.findall(r"[\w.]+", tags)}


def tags(root):
    """The tags of all Catch2 cases."""
    cases = Path(root, "tests").rglob("*_test.cpp")
    return set().union(*(tags_in(path.read_text()) for path in cases))


def numbered(words):
    """Words as a person lists them: row2, row5, row4 and row3 as `row2 ... row5`."""
    rows = {int(word[3:]): word for word in words if re.fullmatch(r"row\d+", word)}
    runs = []
    for number in sorted(rows):
        if number - 1 not in rows:
            runs.append([number])
        runs[-1][1:] = [number] if number != runs[-1][0] else []
    return ", ".join([*sorted(set(words) - set(rows.values())),
                      *(" ... ".join(rows[number] for number in run) for run in runs)])


def refusal(word, root):
    """Why there is no such part; "" if there is one."""
    if word in KINDS or word in stages(root) or word in tags(root):
        return ""
    return f"'{word}' is no part of the tests, expected {parts(root)}"


def parts(root):
    return (f"a kind ({', '.join(KINDS)}), a stage ({', '.join(stages(root))}) "
            f"or a tag ({numbered(tags(root))})")


def tags_of_source(source, root):
    """The tags of a file's cases, and of those in sources that it includes, as hidden cases include visible ones."""
    text = Path(source).read_text()
    included = [Path(root, path) for path in re.findall(r'^#include "(tests/[^"]+\.cpp)"', text, re.MULTILINE)]
    return tags_in(text).union(*(tags_in(path.read_text()) for path in included))


def with_tag(row, tag, root):
    """The row narrowed to its cases with a tag, or None where its sources have no such case."""
    if not any(tag in tags_of_source(source, root) for source in row.sources):
        return None
    *command, cases = row.command if len(row.command) > 1 else (*row.command, "")
    narrowed = ",".join(f"{each}[{tag}]" for each in cases.split(","))
    return replace(row, command=(*command, narrowed))


def select(rows, part, full, root):
    """The rows that a run includes: of a kind, a stage or a tag, or all (`part` is None)."""
    chosen = [row for row in rows if full or WAITS_FOR_FULL not in row.suites]
    if part is None:
        return chosen
    if part in KINDS or part in stages(root):
        return [row for row in chosen if part in row.suites]
    return [row for row in (with_tag(row, part, root) for row in chosen) if row]
