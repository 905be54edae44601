"""`lockstep gpu-check`: the bundle, and the build from it without a network."""

import os
import re
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]
from gpu_check import bundle, machine  # noqa: E402
from gpu_check_support import call, without_gpu  # noqa: E402

IN_DEBIAN = shutil.which("dpkg-query") and all(
    Path(path).exists() for path in ("/usr/bin/meson", "/usr/share/datasets/fashion-mnist"))
NOT_HERE = "package cache absent: the Debian packages that a bundle is made from are not here"


def copy_project(target):
    """The tree as it would be copied to another machine: no builds, no repository, no data."""
    target.mkdir()
    for path in ROOT.iterdir():
        if path.name in (".git", ".cache", "data", "bundle") or path.name.startswith("build"):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, target)


@unittest.skipUnless(IN_DEBIAN, NOT_HERE)
class TestBundle(unittest.TestCase):
    """One bundle of this machine's packages for all cases."""

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.made = Path(scratch.name) / "bundle"
        cls.done = call(ROOT / "tools/gpu-check", "--bundle", cls.made)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name) / "moved"  # a bundle does not depend on its place

    def copy(self):
        shutil.copytree(self.made, self.folder)
        return self.folder

    def assert_refused(self, text):
        with self.assertRaises(machine.CheckError) as caught:
            bundle.verified(self.folder)
        self.assertIn(text, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_is_under_64_mib_says_its_size_and_verifies(self):
        self.assertEqual((self.done.returncode, self.done.stderr), (0, ""))
        size = sum(path.stat().st_size for path in self.made.rglob("*") if path.is_file())
        self.assertLess(size, 64 * 2**20)
        self.assertIn(f"{size / 2**20:.1f} MiB, limit 64 MiB", self.done.stdout)
        manifest = bundle.verified(self.copy())
        self.assertEqual(set(manifest["packages"]), set(bundle.PACKAGES))
        self.assertEqual(4, sum(name.startswith("data/") for name in manifest["files"]))

    def test_a_changed_byte_is_reported_with_both_checksums(self):
        path = self.copy() / "data/fashion-mnist/t10k-labels-idx1-ubyte.gz"
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
        self.assert_refused("t10k-labels-idx1-ubyte.gz: sha256 ")

    def test_a_file_cut_short_and_a_missing_one_are_reported(self):
        path = self.copy() / bundle.ARCHIVE
        whole = path.stat().st_size
        os.truncate(path, 1000)
        self.assert_refused(f"{bundle.ARCHIVE}: 1000 bytes, expected {whole}")
        path.unlink()
        self.assert_refused(f"{bundle.ARCHIVE}: missing, expected {whole} bytes")

    def test_a_folder_that_is_no_bundle_is_reported_and_not_replaced(self):
        self.folder.mkdir()
        (self.folder / "thesis.txt").write_text("mine")
        self.assert_refused("no readable manifest.json there")
        done = call(ROOT / "tools/gpu-check", "--bundle", self.folder)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
        self.assertIn("is no bundle", done.stderr)
        self.assertEqual("mine", (self.folder / "thesis.txt").read_text())

    def test_one_that_would_be_too_large_is_not_written(self):
        def collect(prefix, data):
            (prefix / "lib").mkdir(parents=True)
            (prefix / "lib/library.so").write_bytes(os.urandom(2**21))

        with self.assertRaises(machine.CheckError) as caught, \
                mock.patch.object(bundle, "collect", collect):
            bundle.make(self.folder, limit=2**20)
        self.assertRegex(str(caught.exception), r"\d+\.\d MiB, expected less than 1 MiB")
        self.assertEqual([], list(self.folder.parent.iterdir()))

    def test_every_library_a_program_loads_is_in_it_or_the_compilers(self):
        prefix = bundle.unpack(self.made, bundle.verified(self.made), self.folder)
        inside = {path.name for path in (prefix / "lib").iterdir()}
        programs = [prefix / "bin/ninja", prefix / "bin/pkgconf"]
        for path in [*(prefix / "lib").glob("*.so.*"), *programs]:
            needed = re.findall(r"NEEDED.*\[(\S+)\]", call("readelf", "-d", path).stdout)
            strange = [name for name in needed if not bundle.FROM_THE_COMPILER.match(name)]
            self.assertLessEqual(set(strange), inside, path.name)


class TestMissingPackages(unittest.TestCase):
    def test_are_named_with_the_command_that_installs_them(self):
        answer = mock.Mock(stdout="catch2 2.13 installed\nlibfmt-dev 9 config-files\n")
        with mock.patch.object(bundle.subprocess, "run", return_value=answer):
            with self.assertRaises(machine.CheckError) as caught:
                bundle.installed_versions()
        self.assertIn("apt-get install libcli11-dev libfmt-dev", str(caught.exception))
        self.assertNotIn("catch2", str(caught.exception))


# Run as root in namespaces of its own: no network, and everything that a bundle contains is hidden
# from the compiler and the loader. The tree is always at the same path, so that ccache can help.
OFFLINE = r"""
set -e
ip link set lo up || true  # no network, but ranks of this host meet on 127.0.0.1
for folder in /usr/include/fmt /usr/include/CLI /usr/include/nlohmann /usr/include/catch2 \
    /usr/include/oneapi /usr/include/gloo /usr/share/pkgconfig /usr/lib/*/pkgconfig \
    /usr/lib/cmake /usr/lib/*/cmake /usr/share/cmake /usr/share/datasets \
    /usr/lib/python3/dist-packages; do
  [ ! -d $folder ] || mount -t tmpfs none $folder
done
for header in catch catch_test_macros; do  # version 2's and 3's: the machine may have another Catch2
  echo '#error this Catch2 is not of the bundle' > /usr/include/catch2/$header.hpp
done
for file in /usr/include/zlib.h /usr/lib/*/libfmt.so /usr/lib/*/libdnnl.so /usr/lib/libgloo.so \
    /usr/lib/*/libOpenCL.so.1 /usr/lib/libCatch2*.a /usr/lib/*/libpkgconf.so.3 \
    /usr/bin/meson /usr/bin/ninja /usr/bin/pkgconf /usr/bin/cmake; do
  [ ! -e $file ] || mount --bind /dev/null $(readlink -f $file)
done
mount -t tmpfs none /mnt
mkdir /mnt/lockstep /mnt/bundle
cp -r "$TREE"/. /mnt/lockstep
cp -r "$BUNDLE"/. /mnt/bundle
cd /mnt/lockstep
eval "$SCRIPT"
"""
BUILD = ("tools/gpu-check --offline /mnt/bundle --part build "
         "--meson=-Doptimization=g --meson=-Ddebug=false --meson=-Dunity=on --meson=-Dunity_size=40")
TRAIN = "build-gpu/01-single-gpu/01-single-gpu --devices cpu:0 --max-steps 1"
TEST = ("for program in $(find build-gpu/tests/{0} -maxdepth 1 -name '{0}-*' -type f -executable); do\n"
        "  $program || {{ echo $program failed; exit 1; }}\ndone; echo {0}: every program passed")
DATA = "export LOCKSTEP_DATA=/mnt/bundle/data"


@unittest.skipUnless(IN_DEBIAN, NOT_HERE)
class TestOffline(unittest.TestCase):
    def offline(self, *script):
        """Runs a script in an empty tree that holds the project and a bundle, and nothing else."""
        if call("unshare", "--mount", "--net", "true").returncode != 0:
            self.skipTest("namespaces not permitted: unshare --mount --net fails")
        with tempfile.TemporaryDirectory() as scratch:
            tree, made = Path(scratch) / "tree", Path(scratch) / "bundle"
            copy_project(tree)
            self.assertEqual("", call(ROOT / "tools/gpu-check", "--bundle", made).stderr)
            done = call("unshare", "--mount", "--net", "bash", "-c", OFFLINE, env={
                **without_gpu(), "TREE": str(tree), "BUNDLE": str(made),
                "SCRIPT": "\n".join(script)})
        self.assertEqual(0, done.returncode, done.stdout[-6000:] + done.stderr[-6000:])
        return done.stdout

    @unittest.skipUnless("LOCKSTEP_FULL" in os.environ, "takes minutes: the whole project is built")
    def test_everything_builds_trains_and_passes_its_tests_without_network_and_packages(self):
        kinds = ("unit", "parity", "convergence", "equivalence", "faults")
        output = self.offline(BUILD, DATA, TRAIN, *map(TEST.format, kinds))
        self.assertIn("* CPU engine: oneDNN", output)
        self.assertIn("* Gloo: YES", output)
        self.assertIn("for CPU devices only (no GPU: nvidia-smi is not on PATH)", output)
        self.assertIn("build: 1 passed, 0 failed", output)
        self.assertIn("fashion-mnist: 60000 training and 10000 test images", output)
        self.assertEqual(len(kinds), output.count(": every program passed"))
        # Unit tests are several programs, the other kinds one each.
        self.assertGreater(output.count("All tests passed"), len(kinds))


if __name__ == "__main__":
    unittest.main()
