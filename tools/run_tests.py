#!/usr/bin/env python3
"""Build everything and run every test: `./lockstep test [--full] [KIND, STAGE or TAG]`.

The tests are those of `meson test --list`, in four builds (BUILDS), with --full in five. While one
build compiles, the tests of the previous one run. Cases are counted over all executables and builds
(tools/case_records.py says how); the last line is `N passed, N failed, N skipped`, and the exit
status is 1 if anything failed.
"""

import os
import queue
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from case_records import Case, read_cases, report
from child_processes import Running, keep_ignored_signals_here, run
from command_line import Parser, one_line, run_command
from compile_tests import compile_rows, configure, tsan_wrapper
from gpu_check.machine import find_gpu
from progress import CORES, Progress, Times
from suites import Build, parts, read_rows, refusal, select

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 60  # of the output of a failure
FULL_FACTOR = 10  # --full repeats the random campaigns, so every deadline grows

# A room's sources are compiled as one, which takes half as long. A case of tests/tools in --full
# compiles each alone and so finds a missing #include.
UNITY = ("-Dunity=on", "-Dunity_size=40")
# Optimised as far as debugging allows: compiles as fast as without, and runs faster. Kernels are
# optimised in all builds; `lockstep run` compiles the rest like that, too, and compares all weights.
QUICK = ("-Doptimization=g", "-Ddebug=false", *UNITY)
LINES = "-g1"  # line numbers for the sanitizers' reports, and a quarter less time than with variables
SANITIZED = ("-Dcpu_engine=reference", f"-Dcpp_args={LINES}", *QUICK)

# Left out are the checks of UndefinedBehaviorSanitizer that take a third of that build's time: of
# pointers, as AddressSanitizer stops where a wrong one is used, and vptr, casts to a wrong class.
# Whether addresses are aligned costs a quarter: without --full that is added to this list.
WITHOUT = f"-Dcpp_args={LINES} -fno-sanitize=null,object-size,pointer-overflow,vptr"

CUDA_MODEL = "build-cuda-model"

# Warnings are errors in all of these builds, which is why the first is not `build/`: a user's own
# change must not fail on a warning in `lockstep run`. tests/*/meson.build says which tests a build
# has.
BUILDS = (
    Build("default", "build-test", ("-Dgpu_archs=75", *QUICK)),
    Build("double", "build-double", ("-Dprecision=double", "-Dcuda=disabled", *QUICK)),
    Build("asan", "build-asan", ("-Db_sanitize=address,undefined", "-Db_lundef=false",
                                 *SANITIZED, f"{WITHOUT},alignment"),
          cuda_model=CUDA_MODEL, full_options=(WITHOUT,)),
    Build("tsan", "build-tsan", ("-Db_sanitize=thread", "-Dcuda=disabled", *SANITIZED)),
    Build("tsan-gpu", "build-tsan-gpu", ("-Db_sanitize=thread", *SANITIZED), cuda_model=CUDA_MODEL,
          only_full=True),
)


class Run:
    """All builds and rows of one `lockstep test`: compiles in order, runs what is compiled."""

    def __init__(self, root, part=None, full=False):
        self.root, self.part, self.full = root, part, full
        self.jobs, self.cases, self.lock = queue.Queue(), [], threading.Lock()
        self.running = Running()
        self.times = Times(root)
        self.progress = Progress(self.say)

    def say(self, text):
        with self.lock:
            print(text, flush=True)

    def expect(self, steps):
        self.progress.expect({step: self.times.of(step) for step in steps})

    def execute(self, builds):
        """Fills self.cases: helpers run tests while this thread compiles; afterwards there is one
        more helper. There are more helpers than cores, as many tests wait for something. This
        thread, which a signal interrupts, starts no tests: one that it was just starting would be
        left running."""
        self.expect(f"compile {build.name}" for build in builds)
        helpers = [threading.Thread(target=self.work, daemon=True) for _ in range(CORES + 1)]
        for helper in helpers[1:]:
            helper.start()
        with self.progress.shown():
            for build in builds:
                self.prepare(build)
            helpers[0].start()
            for _ in helpers:
                self.jobs.put(None)
            for helper in helpers:
                while helper.is_alive():
                    helper.join(1)  # without a limit, a signal that came just before goes unheard

    def prepare(self, build):
        """Compiles what a build's rows need and queues them, or records why they cannot run. Rows
        that need nothing compiled are queued earlier."""
        begin = time.monotonic()
        with self.progress.step(f"compile {build.name}") as how_far:
            error = configure(build, self.root)
            rows = [] if error else self.without_gpu(build, select(
                read_rows(self.root / build.folder), self.part, self.full, self.root))
            self.expect(f"{build.name} {row.name}" for row in rows)
            ready = [row for row in rows if not row.targets]
            compiled = [row for row in rows if row.targets]
            self.queue(build, ready)
            error = error or compile_rows(build, compiled, self.root, how_far)
        if compiled or error:
            self.say(f"{build.name:<8} {'NOT BUILT' if error else 'built'} in "
                     f"{time.monotonic() - begin:.0f} s")
        if error:
            self.say(tail(error))
            self.cases += [Case(f"{build.name} {row.name}", "(the executable)", "failed",
                                "could not be built") for row in compiled] or [
                                    Case(build.name, "(the build)", "failed", "not configured")]
        else:
            self.queue(build, compiled)

    def queue(self, build, rows):
        wrapper = tsan_wrapper() if rows and build.name.startswith("tsan") else ()
        if wrapper is None:
            self.cases += [Case(f"{build.name} {row.name}", "every case", "skipped",
                                "TSan cannot map its shadow") for row in rows]
            return
        for row in rows:
            self.jobs.put((build, row, wrapper))

    def without_gpu(self, build, rows):
        """These rows, without those of kind gpu if there is no GPU: their large program would skip
        all cases. On the CUDA model they run."""
        gpu, why_none = find_gpu()
        if build.cuda_model or gpu or "LOCKSTEP_NEEDS_GPU" in os.environ:
            return rows
        self.cases += [Case(f"{build.name} {row.name}", "every case", "skipped", why_none)
                       for row in rows if "gpu" in row.suites]
        return [row for row in rows if "gpu" not in row.suites]

    def work(self):
        while (job := self.jobs.get()) is not None:
            build, row, _ = job
            where = f"{build.name} {row.name}"
            try:
                with self.progress.step(where):
                    self.run_row(*job)
            except Exception as error:  # a thread's own end must not swallow the row
                self.cases.append(Case(where, "(its record)", "failed", f"unreadable: {error!r}"))

    def environment(self, row, log):
        """The environment of a row's process."""
        told = {**os.environ, **row.environment, "LOCKSTEP_TEST_LOG": str(log)}
        told.pop("LOCKSTEP_FULL", None)  # --full decides, not the caller
        return {**told, "LOCKSTEP_FULL": "1"} if self.full else told

    def run_row(self, build, row, wrapper):
        """Runs one executable or script and records its cases."""
        where = f"{build.name} {row.name}"
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "cases.jsonl"
            deadline = row.deadline * (FULL_FACTOR if self.full else 1)
            try:
                ended, output = run((*wrapper, *row.command), deadline, self.running,
                                    cwd=self.root, env=self.environment(row, log))
            except OSError as error:
                ended, output = f"could not be started: {error.strerror}", ""
            cases = read_cases(where, log, ended, may_be_empty=self.part is not None)
        if not cases or self.running.over:
            return  # none of its cases carries the tag, or the run was interrupted
        failed = [case for case in cases if case.status == "failed"]
        with self.lock:
            self.cases += cases
            print(f"{build.name:<8} {row.name:<18} {len(cases):4} cases, {len(failed)} failed, "
                  f"{time.monotonic() - begin:.1f} s", flush=True)
            if failed:
                print(tail(output), flush=True)


def tail(output):
    lines = output.rstrip().splitlines()
    return "\n".join("    " + line for line in lines[-TAIL_LINES:])


def main(argv, builds=BUILDS, root=ROOT):
    parser = Parser(prog="lockstep test", description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="random campaigns at full counts")
    parser.add_argument("part", nargs="?", metavar="PART", help="a kind (unit, faults, ...), a stage"
                        " (04) or a tag (loader); an unknown word lists them all")
    parser.error = lambda why: parser.exit(2, f"lockstep test: {one_line(why)}; PART is {parts(root)}\n")
    options = parser.parse_args(argv)
    part = None if options.part is None else options.part.strip("[]")
    if part is not None and (why := refusal(part, root)):
        parser.exit(2, f"lockstep test: {one_line(why)}\n")
    keep_ignored_signals_here()
    if options.full:
        builds = [replace(build, options=build.options + build.full_options) for build in builds]
    else:
        builds = [build for build in builds if not build.only_full]
    whole = Run(root, part, options.full)
    try:
        whole.execute(builds)
    except KeyboardInterrupt:
        return 130
    finally:
        whole.running.end()
    if not whole.cases:
        whole.cases.append(Case("lockstep test", part or "all", "failed", "no test was found"))
    print("\n".join(report(whole.cases)), flush=True)
    failed = any(case.status == "failed" for case in whole.cases)
    if not failed and part is None and not options.full:
        whole.times.keep(whole.progress.took)
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
