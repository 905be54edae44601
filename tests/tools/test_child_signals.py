"""Tests that run under nohup, or as a shell's background job: signals still end what they start."""

import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))

from processes import start  # noqa: E402

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
