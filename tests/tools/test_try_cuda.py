"""tools/try-cuda: what it refuses; and with --full, the CUDA backend with four pairs of compilers."""

import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 45


def call(*words, **changed):
    return subprocess.run([ROOT / "tools/try-cuda", *words], capture_output=True, text=True,
                          timeout=60 * MINUTES, env={**os.environ, **changed})


class TestRefusals(unittest.TestCase):
    def test_wrong_options_are_one_line(self):
        for words in (("--speed",), ("--keep",), ("--here", "x"), ("\x1b[31m\a",)):
            done = call(*words)
            shown = " ".join(words).replace("\x1b", "?").replace("\a", "?")
            self.assertEqual((1, "", f"try-cuda: '{shown}': expected nothing, --keep DIR or --here\n"),
                             (done.returncode, done.stdout, done.stderr))

    @unittest.skipIf("VERSION_CODENAME=trixie" in Path("/etc/os-release").read_text(),
                     "no packages of CUDA: this Debian 13 would get them from --here")
    def test_here_installs_nothing_on_another_release(self):
        with tempfile.TemporaryDirectory() as folder:
            done = call("--here", LOCKSTEP_TRY_CUDA=folder)
            self.assertEqual([], os.listdir(folder))
        self.assertEqual((77, 1), (done.returncode, done.stdout.count("\n")), done.stdout)
        self.assertRegex(done.stdout, "needs root|GiB, 20 are needed|--here is for Debian 13")


class TestPairs(unittest.TestCase):
    @unittest.skipUnless("LOCKSTEP_FULL" in os.environ, "only with --full: CUDA compiled four times")
    def test_both_releases_compile_and_link_with_both_compilers(self):
        done = call()
        told = done.stdout + done.stderr
        if done.returncode == 77 or "debootstrap could not make" in told:
            self.skipTest("no packages of CUDA: " + told.splitlines()[-1])
        self.assertEqual(0, done.returncode, told[-3000:])
        pairs = re.findall(r"^try-cuda: CUDA (\d+)\.\d+, for [\d ]+, g\+\+ (\d+): compiled and linked$",
                           done.stdout, re.M)
        self.assertEqual([("12", "12"), ("13", "12"), ("12", "14"), ("13", "14")], pairs)


if __name__ == "__main__":
    unittest.main()
