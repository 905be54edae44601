#!/usr/bin/env python3
"""Build everything and run every test: `./lockstep test [--full] [KIND or TAG]`.

The table BUILDS says what runs where. While one build compiles, the tests of the one before run.
Cases are counted over all executables and builds (tools/case_records.py says how); the last line
is `N passed, N failed, N skipped`, and the exit status is 1 if anything failed.
"""

import argparse
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from case_records import Case, read_cases, report
from compile_tests import CORES, compile_build, tsan_wrapper

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 60  # of the output of what failed
FULL_FACTOR = 10  # --full repeats the random campaigns, so every deadline grows


@dataclass(frozen=True)
class Row:
    """One test executable of a build: BUILD/tests/KIND/KIND-test, or another command."""

    kind: str
    tags: str = ""  # Catch2 filter, a comma meaning "or"; empty runs every case
    deadline: int = 900  # seconds; three times what a slow machine takes
    command: tuple = ()
    environment: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """A build folder, the Meson options that make it (None: nothing to build), its tests. With
    `cuda_model` the CUDA backend is built against tests/cuda_model, installed into that folder."""

    name: str
    folder: str
    options: tuple | None
    rows: tuple
    environment: dict = field(default_factory=dict)
    cuda_model: str = ""


# Eight sources at a time are compiled as one, which takes half as long. A missing #include is found
# where each is compiled alone: in build/, and by a case of tests/tools in --full.
UNITY = ("-Dunity=on", "-Dunity_size=8")
# The sanitizers' own code makes an optimised build slow to compile; kernels stay at -O3 anyway.
SANITIZED = ("-Dcpu_engine=reference", "-Doptimization=0", *UNITY)
ASAN = "protect_shadow_gap=0:detect_leaks=1"
TSAN = "halt_on_error=1:second_deadlock_stack=1"  # the process stops in the case that has the race
if (ROOT / "tests/support/tsan.supp").is_file():
    TSAN += f":suppressions={ROOT}/tests/support/tsan.supp"

# The model's library of the driver is found like a real one. A test that would be skipped for want
# of a GPU fails there.
CUDA_MODEL = "build-cuda-model"
MODEL_ENVIRONMENT = {"LD_LIBRARY_PATH": f"{ROOT}/{CUDA_MODEL}/lib", "LOCKSTEP_NEEDS_GPU": "1"}

# A row counts where tests/KIND/ holds sources. Warnings are errors in all of these builds, which
# is why the first is not `build/`: nobody's own change may fail on a warning in `lockstep run`.
# A comparison starts stages that other cases start, too; under AddressSanitizer it takes a minute.
BUILDS = (
    Build("tools", ".", None,
          (Row("tools", command=(sys.executable, "tools/run_python_tests.py", "tests/tools")),
           Row("coursework",
               command=(sys.executable, "tools/run_python_tests.py", "tests/coursework")))),
    Build("default", "build-test", ("-Dgpu_archs=75", *UNITY),
          (Row("convergence"), Row("unit"), Row("equivalence"), Row("parity"), Row("faults"),
           Row("gpu"), Row("coursework"),
           Row("readme", command=(sys.executable, "tools/run_python_tests.py", "tests/readme")))),
    Build("asan", "build-asan", ("-Db_sanitize=address,undefined", "-Db_lundef=false", *SANITIZED),
          (Row("unit"), Row("faults", "~[compare]"), Row("gpu", environment=MODEL_ENVIRONMENT)),
          {"ASAN_OPTIONS": ASAN, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
          CUDA_MODEL),
    Build("double", "build-double", ("-Dprecision=double", "-Dcuda=disabled", "-Doptimization=1",
                                      *UNITY),
          (Row("unit", "~[data]~[loader]~[io]~[app]~[streams]"), Row("parity"),
           Row("equivalence"))),
    Build("tsan", "build-tsan", ("-Db_sanitize=thread", "-Dcuda=disabled", *SANITIZED),
          (Row("unit", "[streams],[loader],[tsan]"),), {"TSAN_OPTIONS": TSAN}),
)
KINDS = ("unit", "equivalence", "parity", "convergence", "faults", "gpu", "coursework", "tools",
         "readme")


# --- What to run ---------------------------------------------------------------------------------

def with_tag(tags, tag):
    """The filter that a case passes if it passes `tags` and carries `tag`."""
    return ",".join(f"{part}[{tag}]" for part in tags.split(","))


def select(builds, part, root):
    """The builds with the rows that exist here and belong to `part`: a kind, a tag or None."""
    chosen = []
    for build in builds:
        rows = [row for row in build.rows
                if row.command or any((root / "tests" / row.kind).glob("*.cpp"))]
        if part in KINDS:
            rows = [row for row in rows if row.kind == part]
        elif part:
            rows = [replace(row, tags=with_tag(row.tags, part)) for row in rows if not row.command]
        if rows:
            chosen.append(replace(build, rows=tuple(rows)))
    return chosen


# --- Running -------------------------------------------------------------------------------------

def how_it_ended(status):
    """A process' end in words, "" for status 0."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with status {status}" if status else ""


def run_process(command, cwd, environment, deadline, running=None):
    """Runs a command in a process group of its own; returns how it ended and its output. The
    process is in the set `running` meanwhile, so that an interrupted run can end it."""
    running = set() if running is None else running
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        running.add(process)
        try:
            ended = how_it_ended(process.wait(deadline))
        except subprocess.TimeoutExpired:
            ended = f"ran past its deadline of {deadline:.0f} s"
        finally:
            kill_group(process)  # whatever it started, too
            running.discard(process)
        output.seek(0)
        return ended, output.read()


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Run:
    """All builds and rows of one `lockstep test`: compiles in order, runs what is compiled."""

    def __init__(self, root, full=False, tag=False):
        self.root, self.full, self.tag = root, full, tag
        self.jobs, self.cases, self.lock = queue.Queue(), [], threading.Lock()
        self.running = set()  # processes

    def say(self, text):
        with self.lock:
            print(text, flush=True)

    def execute(self, builds):
        """Fills self.cases: helpers run tests while this thread compiles, then it helps them."""
        helpers = [threading.Thread(target=self.work, daemon=True)
                   for _ in range(max(1, CORES // 2))]
        for helper in helpers:
            helper.start()
        for build in builds:
            self.prepare(build)
        for _ in range(len(helpers) + 1):
            self.jobs.put(None)
        self.work()
        for helper in helpers:
            helper.join()

    def prepare(self, build):
        """Compiles a build and queues its rows, or records why they cannot run."""
        wrapper = tsan_wrapper() if "TSAN_OPTIONS" in build.environment else ()
        if wrapper is None:
            self.cases += [Case(f"{build.name} {row.kind}", "every case", "skipped",
                                "TSan cannot map its shadow") for row in build.rows]
            return
        begin = time.monotonic()
        error = compile_build(build, self.root) if build.options is not None else ""
        if build.options is not None:
            state = "NOT BUILT" if error else "built"
            self.say(f"{build.name:<8} {state} in {time.monotonic() - begin:.0f} s"
                     + (f"\n{tail(error)}" if error else ""))
        for row in build.rows:
            if error:
                self.cases.append(Case(f"{build.name} {row.kind}", "(the executable)", "failed",
                                       "could not be built"))
            else:
                self.jobs.put((build, row, wrapper))

    def work(self):
        while (job := self.jobs.get()) is not None:
            try:
                self.run_row(*job)
            except Exception as error:  # a thread's own end must not swallow the row
                where = f"{job[0].name} {job[1].kind}"
                self.cases.append(Case(where, "(its record)", "failed", f"unreadable: {error!r}"))

    def run_row(self, build, row, wrapper):
        """Runs one executable and records its cases."""
        where = f"{build.name} {row.kind}"
        program = self.root / build.folder / "tests" / row.kind / f"{row.kind}-test"
        command = row.command or (str(program), *([row.tags] if row.tags else []))
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "cases.jsonl"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **build.environment,
                           **row.environment,
                           "LOCKSTEP_TEST_LOG": str(log),
                           "LOCKSTEP_BUILD_DIR": str(self.root / build.folder)}
            environment.pop("LOCKSTEP_FULL", None)  # --full decides, not who calls
            if self.full:
                environment["LOCKSTEP_FULL"] = "1"
            deadline = row.deadline * (FULL_FACTOR if self.full else 1)
            try:
                ended, output = run_process((*wrapper, *command), self.root, environment, deadline,
                                            self.running)
            except OSError as error:
                ended, output = f"could not be started: {error.strerror}", ""
            cases = read_cases(where, log, ended, may_be_empty=self.tag)
        if not cases:
            return  # none of its cases carries the tag
        failed = [case for case in cases if case.status == "failed"]
        with self.lock:
            self.cases += cases
            print(f"{build.name:<8} {row.kind:<12} {len(cases):4} cases, {len(failed)} failed, "
                  f"{time.monotonic() - begin:.1f} s", flush=True)
            if failed:
                print(tail(output), flush=True)


def tail(output):
    lines = output.rstrip().splitlines()
    return "\n".join("    " + line for line in lines[-TAIL_LINES:])


def main(argv, builds=BUILDS, root=ROOT):
    parser = argparse.ArgumentParser(prog="lockstep test", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="random campaigns at full counts")
    parser.add_argument("part", nargs="?", metavar="KIND or TAG",
                        help=f"one of {', '.join(KINDS)}, or the tag of some cases, e.g. loader")
    options = parser.parse_args(argv)
    part = options.part.strip("[]") if options.part else None
    run = Run(root, options.full, tag=bool(part) and part not in KINDS)
    try:
        run.execute(select(builds, part, root))
    finally:
        for process in list(run.running):  # only an interrupted run has any left
            kill_group(process)
    if not run.cases:
        what = f"no test case carries the tag [{part}]" if run.tag else "no test was found"
        run.cases.append(Case("lockstep test", part or "all", "failed", what))
    print("\n".join(report(run.cases)), flush=True)
    return 1 if any(case.status == "failed" for case in run.cases) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
