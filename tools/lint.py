#!/usr/bin/env python3
"""Run clang-tidy on the product's sources: `./lockstep lint [FILE...]`.

.clang-tidy says what to look for; any finding makes the exit status 1. Nothing is compiled: Meson
writes the compile commands into build-lint/. Headers are seen through the sources that include
them; the CUDA backend with the headers of tests/cuda_model, so that no toolkit is needed.
"""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from child_processes import Running, run
from command_line import Parser, one_line, run_command
from progress import CORES

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build-lint"
OPTIONS = ("-Dtests=disabled", "-Dcuda=disabled")
# What the sources of the CUDA backend need in addition: without CUDA no compile command names them,
# and clang-tidy takes that of a similar file.
FOR_CUDA = (f"-isystem{ROOT}/tests/cuda_model/include", '-DLOCKSTEP_CUDA_LIBRARY=""',
            '-DLOCKSTEP_NCCL_LIBRARY=""')
FINDING = re.compile(r"^\S+:\d+:\d+: (?:warning|error): ")
COUNTS = re.compile(r"^\d+ warnings?( and \d+ errors?)? (generated|treated as errors?)"
                    r"|^Error while processing")


def product_files():
    """The sources to lint: those of common/ and of the stages."""
    return sorted(path.relative_to(ROOT) for folder in (ROOT / "common", *ROOT.glob("0[1-9]-*"))
                  for path in folder.rglob("*.cpp"))


def chosen_files(names, product):
    """The files that the user named, as paths below the root."""
    chosen = []
    for name in names:
        path = Path(os.path.relpath(Path(name).resolve(), ROOT))
        if path not in product:
            raise SystemExit(f"lint: '{one_line(name)}' is no source of the product, expected a .cpp file in "
                             "common/ or a stage (a header is seen through the sources that include it)")
        chosen.append(path)
    return chosen


def configure():
    """Brings build-lint/compile_commands.json up to date; an error's output or ""."""
    fresh = not (BUILD / "build.ninja").is_file()
    command = (["meson", "setup", str(BUILD), str(ROOT), *OPTIONS] if fresh
               else ["ninja", "-C", str(BUILD), "build.ninja"])
    ended, output = run(command)
    return ended and (output or "meson failed without a word")


def lint(program, path, running):
    """Runs clang-tidy on a file; returns its findings, each with its notes, and how it ended."""
    ended, output = run([program, "--quiet", "-p", BUILD, *(f"--extra-arg={word}" for word in FOR_CUDA),
                         ROOT / path], running=running, cwd=ROOT)
    findings = []
    for line in output.splitlines():
        if FINDING.match(line) or not findings:
            findings.append("")
        if not COUNTS.match(line):
            findings[-1] += re.sub(rf"^({re.escape(str(ROOT))}/)?(build-lint/)?(\.\./)?", "", line) + "\n"
    return [finding for finding in findings if finding.strip()], ended


def lint_all(program, files):
    """Prints progress, and each finding once, however many sources see its header; their number."""
    told, failed, processes = set(), 0, Running()
    with ThreadPoolExecutor(CORES) as pool:
        running = {pool.submit(lint, program, path, processes): path for path in files}
        try:
            for number, done in enumerate(as_completed(running), 1):
                findings, ended = done.result()
                failed += bool(ended)
                print(f"[{number}/{len(files)}] {running[done]}", flush=True)
                for finding in findings:
                    if finding not in told:
                        print(finding, end="", flush=True)
                    told.add(finding)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()
            raise
    return len(told) or failed


def main(arguments):
    parser = Parser(prog="lockstep lint", description=__doc__.splitlines()[0])
    parser.add_argument("files", metavar="FILE", nargs="*", help="default: all sources of the product")
    parser.add_argument("--clang-tidy", metavar="PROGRAM", default="clang-tidy",
                        help="another version (default: %(default)s)")
    options = parser.parse_args(arguments)
    product = product_files()
    files = chosen_files(options.files, product) or product
    if not shutil.which(options.clang_tidy):
        raise SystemExit(f"lint: no {one_line(options.clang_tidy)} in PATH (Debian: apt-get install clang-tidy)")
    error = configure()
    if error:
        raise SystemExit(f"{error}lint: meson could not configure build-lint/, see above")
    findings = lint_all(options.clang_tidy, files)
    print(f"sources: {len(files)}, findings: {findings}")
    return 1 if findings else 0


if __name__ == "__main__":
    run_command(main)
