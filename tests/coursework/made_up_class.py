#!/usr/bin/env python3
"""Write the submissions of a class that does not exist, to see how long grading one takes.

  python3 tests/coursework/made_up_class.py submissions
  ./lockstep grade-class submissions -o results

Each student sends an archive with the files of all tasks. A task is right with 70 %, wrong with 20 % (a body of
wrong/), and open with 10 %. The same number of students gives the same class."""

import argparse
import io
import random
import sys
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from coursework import tasks, teacher  # noqa: E402

SHARES = {"right": 70, "wrong": 20, "open": 10}  # percent


def body_of(task, kind, chance):
    """The lines of a task that is right or wrong."""
    if kind == "right":
        return tasks.lines_of((ROOT / task.file).read_text(), task.file, task.id)
    _, body = chance.choice(list(teacher.wrong_solutions(ROOT, task.id).values()))
    return body.split("\n")


def submission(name, table, chance):
    """Texts by path, and the kind of each task."""
    files = {task.file: tasks.open_text((ROOT / task.file).read_text(), task.file) for task in table}
    kinds = chance.choices(list(SHARES), list(SHARES.values()), k=len(table))
    for task, kind in zip(table, kinds):
        if kind != "open":  # no two students send the same bytes
            lines = [f"  // {name}", *body_of(task, kind, chance)]
            files[task.file] = tasks.replace_section(files[task.file], task.file, task.id, lines)
    return files, kinds


def pack(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made")
    parser.add_argument("students", type=int, nargs="?", default=60, help="how many (60)")
    options = parser.parse_args()
    try:
        options.folder.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"{options.folder} is there already, expected the name of a new folder")
    table, chance, count = tasks.load_tasks(ROOT), random.Random(2026), Counter()
    for number in range(1, options.students + 1):
        name = f"student{number:02d}"
        files, kinds = submission(name, table, chance)
        pack(options.folder / f"{name}.tgz", files)
        count.update(kinds)
    print(f"{options.folder}: {options.students} submissions with {len(table)} tasks each: "
          + ", ".join(f"{count[kind]} {kind}" for kind in SHARES))


if __name__ == "__main__":
    main()
