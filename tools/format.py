#!/usr/bin/env python3
"""Lay out the C++ and CUDA sources with clang-format: `./lockstep format [--check] [FILE...]`.

.clang-format sets the style. Versions of clang-format differ in details, so one decides: 19, which
Debian 12 and 13 both have.
"""

import re
import shutil
import subprocess
from pathlib import Path

from command_line import Parser, one_line, run_command

ROOT = Path(__file__).resolve().parent.parent
VERSION = "19"
SUFFIXES = (".cpp", ".h", ".inl", ".cu", ".cuh")


def find_clang_format():
    """The program of the version that decides, or None."""
    for name in (f"clang-format-{VERSION}", "clang-format"):
        if shutil.which(name):
            told = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
            if re.search(rf"version {VERSION}\.", told):
                return name
    return None


def sources():
    """Every source of the tree."""
    return sorted(path for folder in (ROOT / "common", ROOT / "tests", *ROOT.glob("0[1-9]-*"))
                  for path in folder.rglob("*") if path.suffix in SUFFIXES)


def chosen_files(names):
    for name in names:
        path = Path(name)
        if not path.is_file() or path.suffix not in SUFFIXES:
            raise SystemExit(f"format: '{one_line(name)}' is no source, expected a file that ends in one of: "
                             f"{', '.join(SUFFIXES)}")
    return [Path(name).resolve() for name in names]


def unformatted(program, files):
    """Those of the files that clang-format would change."""
    done = subprocess.run([program, "--dry-run", "--style=file", *map(str, files)],
                          capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr}format: {program} failed, see above")
    found = re.findall(r"^(.+?):\d+:\d+: warning: code should be clang-formatted", done.stderr, re.M)
    return [path for path in files if str(path) in set(found)]


def main(arguments):
    parser = Parser(prog="lockstep format", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true",
                        help="change nothing; list what is not laid out, and fail if there is any")
    parser.add_argument("files", metavar="FILE", nargs="*", help="default: every source of the tree")
    options = parser.parse_args(arguments)
    files = chosen_files(options.files) or sources()
    program = find_clang_format()
    if not program:
        raise SystemExit(f"format: no clang-format {VERSION} in PATH, whose layout this tree has "
                         f"(Debian: apt-get install clang-format-{VERSION})")
    found = unformatted(program, files)
    for path in found:
        print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    if found and not options.check:
        subprocess.run([program, "-i", "--style=file", *map(str, found)], check=True)
    print(f"sources: {len(files)}, {'to be laid out' if options.check else 'changed'}: {len(found)}")
    return 1 if found and options.check else 0


if __name__ == "__main__":
    run_command(main)
