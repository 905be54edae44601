"""Child processes: all start in one place, none is left, and under nohup, or as a shell's background
job, signals still end them."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import child_processes  # noqa: E402
from child_processes import Running, how_it_ended, run  # noqa: E402
from processes import gone, start  # noqa: E402

IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD)
# Each case fails if the runner does not take care of it.
CASES = """
import os, signal, subprocess, unittest

class TestChild(unittest.TestCase):
    def test_a_program_ends_by_the_signal(self):
        for name in ("HUP", "INT", "QUIT"):
            done = subprocess.run(["sh", "-c", f"ulimit -c 0; kill -{name} $$; exit 3"])
            self.assertEqual(done.returncode, -getattr(signal, "SIG" + name))

    def test_this_process_goes_on(self):
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            os.kill(os.getpid(), number)
"""


class TestRun(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.pid = Path(folder.name) / "pid"

    def test_all_that_may_run_for_long_starts_here(self):
        # subprocess.run() and its like are for questions that another program answers at once.
        users = {path.name for path in (ROOT / "tools").rglob("*") if path.is_file()
                 and "Popen(" in path.read_text(errors="replace")}
        self.assertEqual(users, {"child_processes.py"})

    def test_how_it_ended_in_words(self):
        self.assertEqual([how_it_ended(status) for status in (-signal.SIGBUS, 3, 0, 77)],
                         ["killed by SIGBUS", "exited with status 3", "", ""])
        self.assertEqual(run(("sh", "-c", "echo a; echo b >&2")), ("", "a\nb\n"))
        self.assertEqual(run(("sh", "-c", "echo a; sleep 100"), deadline=0.5), ("ran past its deadline of 0 s", "a\n"))

    def test_a_kernel_that_tells_no_ends_is_asked_again_and_again(self):
        with mock.patch.object(os, "pidfd_open", side_effect=OSError):
            self.assertEqual(("exited with status 3", "a\n"), run(("sh", "-c", "echo a; sleep 0.1; exit 3")))
            self.assertEqual("ran past its deadline of 0 s", run(("sleep", "100"), deadline=0.1)[0])

    def test_what_runs_ends_with_an_interrupted_run_and_nothing_is_started_then(self):
        running = Running()
        sleeper = running.start(["sleep", "100"], start_new_session=True)
        running.end()
        self.assertEqual(sleeper.poll(), -signal.SIGTERM)
        with self.assertRaises(InterruptedError):
            running.start(["true"])

    def test_an_interrupted_build_leaves_no_compiler(self):
        (self.pid.parent / "build.ninja").write_text(
            "rule compile\n  command = echo $$$$ >pid; exec sleep 1000\nbuild object: compile\n")
        program = ("import sys; sys.path.insert(0, sys.argv[1]); import child_processes\n"
                   "child_processes.run(('ninja', '-C', sys.argv[2]))")
        process = start(self, sys.executable, "-c", program, ROOT / "tools", self.pid.parent,
                        stderr=subprocess.DEVNULL)
        begin = time.monotonic()
        while not (self.pid.is_file() and self.pid.read_text()) and time.monotonic() - begin < 30:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.wait(30)
        self.assertTrue(gone(int(self.pid.read_text())))

    def test_a_signal_while_a_process_starts_finds_it(self):
        told = self.pid
        class Slow(subprocess.Popen):  # the signal comes before the constructor returns
            def __init__(self, *words, **options):
                super().__init__(*words, **options)
                told.write_text(str(self.pid))
                os.kill(os.getpid(), signal.SIGINT)
        with mock.patch.object(child_processes.subprocess, "Popen", Slow), \
                self.assertRaises(KeyboardInterrupt):
            run(("sleep", "1000"))
        self.assertTrue(gone(int(told.read_text())))


class TestRunner(unittest.TestCase):
    def run_cases(self, ignores):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "test_child.py").write_text(CASES)
            process = start(self, sys.executable, ROOT / "tools/run_python_tests.py", folder,
                            ignores=ignores, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, env={**os.environ, "LOCKSTEP_TEST_LOG": ""})
            output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def test_ignores_signals_alone(self):
        status, output = self.run_cases(IGNORED)
        self.assertEqual(status, 0, output)
        self.assertIn("Ran 2 tests", output)

    def test_is_ended_by_a_signal_that_was_not_ignored(self):
        self.assertEqual(self.run_cases(())[0], -signal.SIGHUP)


if __name__ == "__main__":
    unittest.main()
