"""`meson setup` under the conditions that the options of this project distinguish."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def without_nvcc():
    """A PATH on which every program is found but nvcc."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(f for f in folders if not (Path(f) / "nvcc").exists())


@unittest.skipUnless(shutil.which("meson"), "meson is installed by `lockstep test`")
class TestConfigure(unittest.TestCase):
    def configure(self, *options, path=None):
        """Status and output of meson setup into a folder that goes afterwards."""
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PATH": path or os.environ["PATH"]}
            done = subprocess.run(["meson", "setup", folder, str(ROOT), "-Dtests=disabled",
                                   *options], env=environment, capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr

    def test_without_nvcc_on_the_path(self):
        status, output = self.configure(path=without_nvcc())
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"CUDA Toolkit *: NO")
        self.assertRegex(output, r"precision *: float")

    def test_cuda_asked_for_without_nvcc_is_refused(self):
        status, output = self.configure("-Dcuda=enabled", path=without_nvcc())
        self.assertNotEqual(0, status)
        self.assertIn("ERROR", output)

    def test_summary_names_the_engine(self):
        status, output = self.configure("-Dcuda=disabled", "-Dcpu_engine=reference")
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"CPU engine *: reference")

    def test_double_is_the_reference_engines(self):
        status, output = self.configure("-Dprecision=double")
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"precision *: double")
        self.assertRegex(output, r"CPU engine *: reference")
        self.assertRegex(output, r"CUDA Toolkit *: NO")

    def test_double_refuses_onednn_and_cuda(self):
        for option in ("-Dcpu_engine=onednn", "-Dcuda=enabled"):
            status, output = self.configure("-Dprecision=double", option)
            self.assertNotEqual(0, status, option)
            self.assertRegex(output, r"ERROR: .*precision=double .*give -D")


if __name__ == "__main__":
    unittest.main()
