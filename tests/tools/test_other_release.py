"""With --full: the tests on the other release of Debian, as a newcomer has it, so that what only its
compiler, libraries and programs show is known before a release.

The system and its compiler cache stay in /var/cache/lockstep: the next run makes and compiles only
what is new."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path("/var/cache/lockstep")
GIB_NEEDED = 6
MINUTES = 140  # beside the other tests of --full, where nothing is in the cache yet
# Meson takes ccache where it is.
SCRIPT = """
apt-get update -q && apt-get install -q -y --no-install-recommends ccache
./lockstep test
"""


def other_release(about_system):
    """trixie, and on trixie bookworm."""
    return "bookworm" if "VERSION_CODENAME=trixie" in about_system else "trixie"


def why_not(done):
    """Why no other release could be made here; "" if it could."""
    told = (done.stdout + done.stderr).splitlines()
    refused = [line for line in told if "debootstrap could not make" in line]
    if done.returncode == 77 or refused:
        return "no other release: " + (refused or told or ["no reason given"])[-1].removeprefix("try-release: ")
    return ""


def try_release(folder, name, *command, **environment):
    return subprocess.run([sys.executable, ROOT / "tools/try-release", "--keep", folder, name, *command],
                          capture_output=True, text=True, errors="replace", timeout=60 * MINUTES,
                          env={**os.environ, **environment})


class TestChoice(unittest.TestCase):
    def test_each_release_tries_the_other(self):
        for own, other in (("bookworm", "trixie"), ("trixie", "bookworm"), ("forky", "trixie")):
            self.assertEqual(other, other_release(f"ID=debian\nVERSION_CODENAME={own}\n"))

    def test_where_none_can_be_made_the_reason_is_told(self):
        with tempfile.TemporaryDirectory() as folder:
            done = try_release(f"{folder}/kept", "trixie", "true", PATH=folder)
        self.assertRegex(why_not(done), "^no other release: (no git|no debootstrap|needs root)")
        done = subprocess.CompletedProcess((), 1, "", "W: x\ntry-release: debootstrap could not make trixie: y\n")
        self.assertRegex(why_not(done), "^no other release: debootstrap could not make trixie")
        self.assertEqual("", why_not(subprocess.CompletedProcess((), 1, "3 passed, 1 failed, 0 skipped\n", "")))


class TestOtherRelease(unittest.TestCase):
    @unittest.skipUnless("LOCKSTEP_FULL" in os.environ, "only with --full: tests on another release of Debian")
    def test_the_tests_pass_there(self):
        name = other_release(Path("/etc/os-release").read_text())
        if os.geteuid() != 0:
            self.skipTest("no other release: needs root, for mounts and chroot")
        KEPT.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(KEPT).free < GIB_NEEDED << 30:
            self.skipTest(f"no other release: {KEPT} has no room for {GIB_NEEDED} GiB")
        with open(KEPT / "lock", "w") as lock:  # two trees may be tested at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = try_release(KEPT / name, name, "sh", "-c", SCRIPT)
        if why_not(done):
            self.skipTest(why_not(done))
        failed = re.findall(r"^Failed:\n(?:.+\n)+", done.stdout, re.M)
        self.assertEqual(0, done.returncode, f"on {name}:\n" + ("".join(failed) or (done.stdout + done.stderr)[-3000:]))


if __name__ == "__main__":
    unittest.main()
