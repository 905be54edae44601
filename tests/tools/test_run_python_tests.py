"""The runner of the tests in Python: what it records of each case."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import case_records  # noqa: E402


class TestPythonRecords(unittest.TestCase):
    CASES = """import unittest
class T(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self): self.fail("no")
    def test_not(self): self.skipTest("no torch")
    def test_sub(self):
        with self.subTest("x"): self.fail("no")
class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise OSError("no room")
    def test_never(self): pass
"""

    def test_each_method_is_recorded(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "test_sample.py").write_text(self.CASES)
            log = Path(folder) / "log"
            done = subprocess.run(
                [sys.executable, str(ROOT / "tools/run_python_tests.py"), folder],
                env={"LOCKSTEP_TEST_LOG": str(log)}, capture_output=True)
            self.assertEqual(done.returncode, 1)
            cases = case_records.read_cases("w", log, "exited with status 1")
            reasons = {case.name.rpartition(".")[2]: case.reason for case in cases}
            self.assertEqual(reasons["test_bad"], "no", reasons)
        statuses = {case.name.split(".")[-1]: case.status for case in cases}
        self.assertEqual(statuses.pop("Broken)"), "failed")
        self.assertEqual(statuses, {"test_good": "passed", "test_bad": "failed",
                                    "test_not": "skipped", "test_sub": "failed"})

    def test_a_case_that_is_interrupted_is_the_one_that_failed(self):
        cases = ("import os, signal, time, unittest\nclass T(unittest.TestCase):\n"
                 "    def test_a(self): pass\n"
                 "    def test_b(self): os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "test_sample.py").write_text(cases)
            log = Path(folder) / "log"
            subprocess.run([sys.executable, str(ROOT / "tools/run_python_tests.py"), folder],
                           env={"LOCKSTEP_TEST_LOG": str(log)}, capture_output=True)
            cases = case_records.read_cases("w", log, "ran past its deadline of 9 s")
        self.assertEqual([(case.name[-6:], case.status) for case in cases],
                         [("test_a", "passed"), ("test_b", "failed")])

    def test_skips_alone_are_not_a_pass(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "test_sample.py").write_text(self.CASES)
            for name, status in (("test_not", 77), ("test_good", 0)):
                done = subprocess.run([sys.executable, str(ROOT / "tools/run_python_tests.py"), folder,
                                       "-k", name], env={}, capture_output=True)
                self.assertEqual(done.returncode, status, done.stderr)


if __name__ == "__main__":
    unittest.main()
