"""How a build says what it will do, how far it is and how long is left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import build_programs  # noqa: E402
import ninja_build  # noqa: E402
import progress  # noqa: E402
from ninja_build import CORES, Steps, failure, run_and_say, run_ninja  # noqa: E402
from processes import gone, start  # noqa: E402

# Steps that take SECONDS and make a file, described as Meson describes them.
RULES = """rule compile
  command = sleep $seconds && touch $out
  description = Compiling C++ object $out
rule break
  command = echo oh no; false
rule wait
  command = echo $$$$ >pid; exec sleep 1000
"""


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def graph(self, seconds):
        """A build with one step for each of the times, named a, b, c, ..."""
        self.targets = [chr(ord("a") + number) for number in range(len(seconds))]
        steps = [f"build {target}: compile\n  seconds = {length}\n"
                 for target, length in zip(self.targets, seconds)]
        (self.folder / "build.ninja").write_text(RULES + "".join(steps) + "build bad: break\n"
                                                 "build endless: wait\n")

    def log(self, **seconds):
        """Ninja's log of steps that it has done."""
        rows = [f"0\t{int(1000 * length)}\t0\t{made}\tabc\n" for made, length in seconds.items()]
        (self.folder / ".ninja_log").write_text("# ninja log v5\n" + "".join(rows))


class TestSteps(Folder):
    def test_counts_the_steps_and_guesses_their_time(self):
        self.graph([0, 0])
        steps = Steps(self.folder, self.targets)
        self.assertEqual(steps.names, ["Compiling C++ object a", "Compiling C++ object b"])
        self.assertFalse(steps.nothing_to_do)
        self.assertEqual(steps.seconds(jobs=2), ninja_build.COMPILING)
        self.assertEqual(steps.work_of("Linking target x"), ninja_build.OTHER)

    def test_a_step_takes_as_long_as_last_time(self):
        self.graph([0, 0])
        self.log(b=40, other=1000)
        self.assertEqual(Steps(self.folder, self.targets, compiling=10).seconds(jobs=2), 25)

    def test_an_estimate_says_so_if_others_want_the_cores(self):
        self.graph([0, 0])
        self.log(a=20 * CORES, b=20 * CORES)
        steps = Steps(self.folder, self.targets)
        for load, expected in ((2 * CORES, "about 40 s"),
                               (9 * CORES, "about 40 s, longer on a machine as busy as now (load "
                                           f"{9 * CORES})")):
            with unittest.mock.patch("os.getloadavg", lambda load=load: (load, 0, 0)):
                self.assertEqual(steps.estimate(), expected)

    def test_after_a_build_there_is_nothing_to_do(self):
        self.graph([0])
        self.assertEqual(run_ninja(self.folder, self.targets)[0], 0)
        self.assertTrue(Steps(self.folder, self.targets).nothing_to_do)

    def test_of_what_a_compiler_writes_without_end_the_beginning_is_kept_and_what_failed(self):
        (self.folder / "build.ninja").write_text(
            "rule write\n  command = yes $what | head -c 20000000 | tr -d '$without'; false\n"
            "build lines: write\n  what = an error\nbuild line: write\n  what = one\n  without = \\n\n")
        status, output = run_ninja(self.folder, ["lines", "line"], keep_going=True, jobs=1)
        self.assertEqual(1, status)
        self.assertLess(len(output), ninja_build.MOST + 1000)
        self.assertLessEqual(max(map(len, output.splitlines())), ninja_build.LONGEST)
        for what in ("FAILED: lines", "an error", "FAILED: line ", "ninja: build stopped"):
            self.assertIn(what, output)

    def test_a_target_that_does_not_exist_is_something_to_do(self):
        self.graph([0])
        self.assertFalse(Steps(self.folder, ["absent"]).nothing_to_do)


class TestLinking(Folder):
    def test_mold_links_only_where_the_compiler_can_call_it(self):
        self.addCleanup(ninja_build.linking.cache_clear)
        compiler = self.folder / "c++"
        for status, expected in ((0, ("-Dcpp_link_args=-fuse-ld=mold",)), (1, ())):
            compiler.write_text(f"#!/bin/sh\n[ $2 = -fuse-ld=mold ] && exit {status}\n")
            compiler.chmod(0o755)
            ninja_build.linking.cache_clear()
            with unittest.mock.patch.dict(os.environ, {"CXX": f"{compiler} -m64"}):
                self.assertEqual(expected, ninja_build.linking())
        ninja_build.linking.cache_clear()
        with unittest.mock.patch.dict(os.environ, {"CXX": str(self.folder / "none")}):
            self.assertEqual((), ninja_build.linking())


class TestRunning(Folder):
    def test_says_how_far_it_is_at_every_step(self):
        self.graph([0] * 10)
        self.log(**{target: 10 for target in self.targets})
        seen = []
        status, output = run_ninja(self.folder, self.targets, lambda *how: seen.append(how), jobs=1)
        self.assertEqual(status, 0)
        self.assertIn("[10/10] Compiling C++ object j\n", output)
        # The step that has begun counts as half of one; the last is not over before it ends.
        self.assertEqual(seen[0::8], [("1 of 10", 0.15), ("9 of 10", 0.95)])
        self.assertEqual(seen[-1], ("10 of 10", 1))

    def test_what_a_compiler_says_is_no_step(self):
        self.graph([])
        (self.folder / "build.ninja").write_text("rule c\n  command = echo 'a.cpp:3:1: warning: [1/2] x'\nbuild a: c\n")
        seen = []
        run_ninja(self.folder, ["a"], lambda text, share: seen.append(text))
        self.assertEqual(seen, ["1 of 1"])

    def test_a_long_build_says_a_line_now_and_then(self):
        self.graph([1])
        said = []
        with unittest.mock.patch.object(ninja_build, "Progress", lambda say: progress.Progress(say, every=0.4)):
            run_and_say(self.folder, ["a"], Steps(self.folder, ["a"]), said.append, "compiling a")
        self.assertRegex(said[0], r"^0:00  compiling a; about \d+ s left$")

    def test_a_failure_has_its_status_and_words(self):
        self.graph([0])
        status, output = run_ninja(self.folder, ["a", "bad"], jobs=1)
        self.assertEqual(status, 1)
        self.assertTrue(failure(output).startswith("FAILED: bad"), output)
        self.assertIn("\noh no\n", failure(output))
        status, output = run_ninja(self.folder, ["absent"])
        self.assertTrue(failure(output).startswith("ninja: error: unknown target 'absent'"), output)

    def test_the_callers_form_of_ninjas_lines_does_not_matter(self):
        self.graph([0])
        program = ("import sys; sys.path.insert(0, sys.argv[1]); import ninja_build\n"
                   "print(ninja_build.run_ninja(sys.argv[2], ['a'])[1])")
        done = subprocess.run([sys.executable, "-c", program, str(ROOT / "tools"), str(self.folder)],
                              env={**os.environ, "NINJA_STATUS": "%p "}, capture_output=True, text=True)
        self.assertIn("[1/1] Compiling", done.stdout, done.stderr)

    def interrupt(self, popen=""):
        """Status of a build that gets SIGTERM when its compiler runs, and the compiler's number."""
        self.graph([])
        pid = self.folder / "pid"
        program = ("import sys; sys.path.insert(0, sys.argv[1])\n"
                   "import child_processes, ninja_build, os, pathlib, signal, subprocess, time\n"
                   f"{popen}child_processes.end_by_exception()\n"
                   "ninja_build.run_ninja(sys.argv[2], ['endless'])\n")
        process = start(self, sys.executable, "-c", program, ROOT / "tools", self.folder)
        self.addCleanup(lambda: gone(int(pid.read_text())) or os.kill(int(pid.read_text()), 9))
        begin = time.monotonic()
        while not (pid.is_file() and pid.read_text()) and time.monotonic() - begin < 30:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        return process.wait(30), int(pid.read_text())

    def test_an_interrupted_build_leaves_no_compiler(self):
        status, compiler = self.interrupt()
        self.assertEqual(status, 143)
        self.assertTrue(gone(compiler))

    def test_nor_does_one_that_is_interrupted_while_it_starts_ninja(self):
        status, compiler = self.interrupt(
            "class Slow(subprocess.Popen):\n"
            "    def __init__(self, *words, **options):\n"
            "        super().__init__(*words, **options)\n"
            "        if '-n' not in words[0]: time.sleep(1)\n"  # the compiler runs, and the signal comes
            "subprocess.Popen = Slow\n")
        self.assertEqual(status, 143)
        self.assertTrue(gone(compiler))


    def test_under_nohup_the_end_of_the_terminal_does_not_reach_ninja(self):
        self.graph([1])
        program = ("import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
                   "sys.path.insert(0, sys.argv[1]); import ninja_build, threading\n"
                   "threading.Timer(0.5, lambda: os.killpg(0, signal.SIGHUP)).start()\n"
                   "sys.exit(ninja_build.run_ninja(sys.argv[2], ['a'])[0])\n")
        process = start(self, sys.executable, "-c", program, ROOT / "tools", self.folder,
                        start_new_session=True)
        self.assertEqual(process.wait(30), 0)
        self.assertTrue((self.folder / "a").is_file())


class TestPrograms(unittest.TestCase):
    def test_without_a_gpu_kernels_are_for_one_generation_of_gpus(self):
        for gpu, archs in (("a GPU", []), (None, ["-Dgpu_archs=75"])):
            with unittest.mock.patch.object(build_programs, "find_gpu", lambda: (gpu, "")):
                told = [option for option in build_programs.options() if "archs" in option]
            self.assertEqual(told, archs)

    def test_are_linked_and_neither_tests_nor_of_a_subproject(self):
        listing = ("01-a/01-a: cpp_LINKER\ncommon/libcuda.so: cuda_LINKER_RSP\nall: phony\n"
                   "tests/unit/unit-test: cpp_LINKER\nsubprojects/fmt/libfmt.so: cpp_LINKER\n"
                   "common/libcommon.a: STATIC_LINKER\na b/c: c_LINKER\n01-a/a.o: cpp_COMPILER\n")
        self.assertEqual(build_programs.LINKED.findall(listing),
                         ["01-a/01-a", "common/libcuda.so", "a b/c"])


if __name__ == "__main__":
    unittest.main()
