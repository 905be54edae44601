"""The wraps: libraries' own release archives, pinned, and enough to build without packages."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUBPROJECTS = ROOT / "subprojects"
PROVIDED = {"CLI11": "CLI11", "nlohmann_json": "nlohmann_json", "fmt": "fmt",
            "catch2": "catch2-with-main"}
STAGE = "01-single-gpu/01-single-gpu"
PARITY = "tests/parity/parity-test"

# Everything of Catch2 that tests use.
NAMES = """#include "tests/support/catch.h"
#include <stdexcept>
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using Catch::Matchers::StartsWith;
TEST_CASE("names", "[names]") {
  const int one = GENERATE(0, 1);
  INFO(one); UNSCOPED_INFO(one); CAPTURE(one);
  SECTION("section") { CHECK(one == Approx(1).margin(1)); CHECK_FALSE(one == 2); }
  CHECK_THAT("text", !(ContainsSubstring("x") && StartsWith("t")) || EndsWith("t"));
  CHECK_THROWS_WITH(throw std::runtime_error("text"), ContainsSubstring("ex"));
  CHECK_THROWS_AS(throw 1, int);
  CHECK_NOTHROW(one);
  if (one == 2) FAIL("two");
  LOCKSTEP_SKIP("reason");
}
"""

specification = importlib.util.spec_from_file_location("try_wraps", ROOT / "tools/try_wraps.py")
try_wraps = importlib.util.module_from_spec(specification)
specification.loader.exec_module(try_wraps)
read_wrap = try_wraps.read_wrap


def provided_names(wrap):
    provide = dict(wrap["provide"])
    names = provide.pop("dependency_names", "")
    return {name.strip() for name in names.split(",") if name.strip()} | provide.keys()


class TestWrapFiles(unittest.TestCase):
    def test_every_library_has_its_wrap(self):
        self.assertEqual({path.stem for path in SUBPROJECTS.glob("*.wrap")}, set(PROVIDED))
        for stem, dependency in PROVIDED.items():
            self.assertIn(dependency, provided_names(read_wrap(SUBPROJECTS / f"{stem}.wrap")))

    def test_every_wrap_is_pinned_to_a_release(self):
        for path in SUBPROJECTS.glob("*.wrap"):
            with self.subTest(path.name):
                wrap = read_wrap(path)["wrap-file"]
                self.assertRegex(wrap["source_hash"], "^[0-9a-f]{64}$")
                self.assertRegex(wrap["source_url"], r"^https://github\.com/.*\d+\.\d+\.\d+")
                version = wrap["directory"].rsplit("-", 1)[1]
                self.assertIn(version, wrap["source_url"])
                self.assertIn(version, wrap["source_filename"])
                if "patch_directory" in wrap:
                    patch = SUBPROJECTS / "packagefiles" / wrap["patch_directory"]
                    text = (patch / "meson.build").read_text()
                    self.assertIn(f"version: '{version}'", text)


class TestFallback(unittest.TestCase):
    """With the archives in subprojects/packagecache, or in that of $LOCKSTEP_SUBPROJECTS, which
    then replaces subprojects/ (tools/try_wraps.py makes such a folder)."""

    def setUp(self):
        self.subprojects = Path(os.environ.get("LOCKSTEP_SUBPROJECTS", SUBPROJECTS))
        cache = self.subprojects / "packagecache"
        wraps = [read_wrap(path)["wrap-file"] for path in self.subprojects.glob("*.wrap")]
        absent = [wrap["source_filename"] for wrap in wraps
                  if not (cache / wrap["source_filename"]).is_file()]
        if absent or not wraps:
            self.skipTest(f"package cache absent: {', '.join(absent)}: see tests/README.md")
        for wrap in wraps:
            content = (cache / wrap["source_filename"]).read_bytes()
            self.assertEqual(hashlib.sha256(content).hexdigest(), wrap["source_hash"])
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.source, self.build = Path(folder.name) / "source", Path(folder.name) / "build"

    def test_a_stage_and_its_parity_with_nothing_but_the_wraps(self):
        self.copy_sources()
        # Neither oneDNN nor Gloo: they have no wraps.
        self.call(240, "meson", "setup", self.build, self.source, "--wrap-mode=forcefallback",
                  "-Dtests=enabled", "-Dcuda=disabled", "-Dcpu_engine=reference",
                  "-Dgloo=disabled", "-Dwerror=true", "-Doptimization=1", "-Dunity=on",
                  "-Dunity_size=8")
        told = self.call(60, "meson", "introspect", self.build, "--projectinfo")
        self.assertEqual({project["name"] for project in json.loads(told)["subprojects"]},
                         set(PROVIDED), "libraries that came from their wraps")
        self.compile_the_names_of_version_3()
        if "LOCKSTEP_FULL" not in os.environ:
            return
        self.call(3000, "ninja", "-C", self.build, STAGE, PARITY)
        trained = self.call(240, self.build / STAGE, "--data", "synthetic:256:64", "--devices",
                            "cpu:0", "--log-interval", "1", "--max-steps", "3")
        self.assertEqual(trained.count("Train Epoch: 1"), 3, trained)
        self.assertIn("All tests passed", self.call(1200, self.build / PARITY))

    def compile_the_names_of_version_3(self):
        """Debian 12's version 2 has these names; version 3 gets them from tests/support/catch.h."""
        (self.source / "names.cpp").write_text(NAMES)
        folders = [self.source, *self.source.glob("subprojects/Catch2-*/src"),
                   *self.build.glob("subprojects/Catch2-*/src")]
        self.call(120, "c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                  *(f"-I{folder}" for folder in folders), "names.cpp")

    def copy_sources(self):
        """A copy, so that no archive is unpacked in the checkout."""
        at_the_top = shutil.ignore_patterns(".git", "build", "build-*", "data", "bundle", ".cache",
                                            "subprojects")
        shutil.copytree(ROOT, self.source, ignore=lambda here, names: (
            at_the_top(here, names) if Path(here) == ROOT else ()))
        (self.source / "subprojects").mkdir()
        for path in self.subprojects.iterdir():
            if path.is_file():
                shutil.copy(path, self.source / "subprojects")
            elif path.name in ("packagecache", "packagefiles"):  # no library, unpacked
                shutil.copytree(path, self.source / "subprojects" / path.name)

    def call(self, seconds, *command):
        """What a command prints; it must end well, and it finds no way out of this machine."""
        nowhere = "http://127.0.0.1:1"
        done = subprocess.run(
            command, cwd=self.source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=seconds, env={**os.environ, "LOCKSTEP_BUILD_DIR": str(self.build),
                                  "http_proxy": nowhere, "https_proxy": nowhere})
        self.assertEqual(done.returncode, 0, f"{command[0]}: {done.stdout[-3000:]}")
        return done.stdout


def stanza(package, version, archive, sha256):
    return (f"Package: {package}\nVersion: {version}\nFiles:\n {'0' * 32} 1 {archive}\n"
            f"Checksums-Sha256:\n {sha256} 1 {archive}\n {'e' * 64} 1 other.debian.tar.xz\n")


class TestTryWraps(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "packagecache").mkdir()
        shutil.copytree(SUBPROJECTS / "packagefiles", self.folder / "packagefiles")

    def wrap(self, stem):
        shutil.copy(SUBPROJECTS / f"{stem}.wrap", self.folder)
        return read_wrap(self.folder / f"{stem}.wrap")

    def archive(self, *names):
        """A package's sources: below one folder, each file with its own name in it."""
        path = self.folder / "sources.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                (self.folder / "file").write_text(name)
                archive.add(self.folder / "file", f"somebody-123/{name}")
        return path

    def test_reads_the_versions_on_offer(self):
        text = "\n".join([
            stanza("fmtlib", "9.1.0+ds1-2", "fmtlib_9.1.0+ds1.orig.tar.gz", "a" * 64),
            stanza("json", "1:3.12.0.really.3.11.3-3", "json_3.11.3.orig.tar.xz", "b" * 64),
            "Package: native\nVersion: 1\n"])
        first, second = try_wraps.read_sources(text)
        self.assertEqual((first.version, first.archive, first.sha256),
                         ("9.1.0", "fmtlib_9.1.0+ds1.orig.tar.gz", "a" * 64))
        self.assertEqual((second.package, second.version, second.full_version),
                         ("json", "3.11.3", "1:3.12.0.really.3.11.3-3"))

    def test_takes_the_recorded_bytes_then_the_release_then_the_newest(self):
        wrap = self.wrap("fmt")
        recorded = wrap["wrap-file"]["source_hash"]
        offers = [try_wraps.Source("fmtlib", version, "", sha256) for version, sha256 in (
            ("9.1.0-1", "a"), ("12.0.0+ds1-1", "b"), ("10.1.1-1", "c"), ("12.0.0-1", recorded))]
        self.assertEqual([source.full_version for source in try_wraps.in_order(offers, wrap)],
                         ["12.0.0-1", "12.0.0+ds1-1", "10.1.1-1", "9.1.0-1"])

    def test_the_recorded_bytes_are_taken_as_they_are(self):
        wrap, archive = self.wrap("catch2"), self.archive("meson.build")
        source = try_wraps.Source("catch2", "3.7.1-1", "", wrap["wrap-file"]["source_hash"])
        self.assertIn("recorded bytes",
                      try_wraps.fill_in(self.folder, "catch2", source, archive))
        copied = self.folder / "packagecache" / wrap["wrap-file"]["source_filename"]
        self.assertEqual(copied.read_bytes(), archive.read_bytes())
        self.assertEqual((self.folder / "catch2.wrap").read_bytes(),
                         (SUBPROJECTS / "catch2.wrap").read_bytes())

    def test_another_release_has_its_version_and_hash_in_the_copy(self):
        self.wrap("fmt")
        source = try_wraps.Source("fmtlib", "11.1.1+ds1-2", "", "a" * 64)
        archive = self.archive("include/fmt/base.h", "src/os.cc")
        self.assertEqual(try_wraps.fill_in(self.folder, "fmt", source, archive),
                         "11.1.1, in place of 12.0.0")
        made = self.folder / "packagecache/fmt-11.1.1.tar.gz"
        with tarfile.open(made) as packed:
            self.assertIn("fmt-11.1.1/src/os.cc", packed.getnames())
        wrap = read_wrap(self.folder / "fmt.wrap")["wrap-file"]
        self.assertEqual((wrap["directory"], wrap["source_filename"], wrap["source_hash"]),
                         ("fmt-11.1.1", "fmt-11.1.1.tar.gz", try_wraps.hash_of(made)))
        text = (self.folder / "packagefiles/fmt/meson.build").read_text()
        self.assertIn("version: '11.1.1'", text)

    def test_sources_without_a_meson_file_get_one(self):
        self.wrap("CLI11")
        source = try_wraps.Source("cli11", "2.6.1+ds-1", "", "a" * 64)
        try_wraps.fill_in(self.folder, "CLI11", source, self.archive("include/CLI/CLI.hpp"))
        with tarfile.open(self.folder / "packagecache/CLI11-2.6.1.tar.gz") as packed:
            text = packed.extractfile("CLI11-2.6.1/meson.build").read().decode()
        self.assertIn("project('CLI11', 'cpp', version: '2.6.1')", text)
        self.assertIn("override_dependency('CLI11'", text)

    def test_headers_without_a_folder_around_them_are_packed_so(self):
        self.wrap("nlohmann_json")
        source = try_wraps.Source("nlohmann-json3", "3.11.3-2", "", "a" * 64)
        archive = self.archive("include/json.hpp", "meson.build", "tests/huge.json")
        self.assertEqual(try_wraps.fill_in(self.folder, "nlohmann_json", source, archive),
                         "3.11.3, packed anew")
        with zipfile.ZipFile(self.folder / "packagecache/nlohmann_json-3.11.3.zip") as packed:
            names = {name for name in packed.namelist() if not name.endswith("/")}
        self.assertEqual(names, {"include/json.hpp", "meson.build"})

    def test_says_in_one_line_why_nothing_can_be_tried(self):
        done = subprocess.run([ROOT / "tools/try_wraps.py", "--mirror", "http://127.0.0.1:1"],
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 77)
        self.assertRegex(done.stderr, r"^try_wraps: package cache absent: .+\n$")
        (self.folder / "mine").write_text("mine")
        done = subprocess.run([ROOT / "tools/try_wraps.py", "--folder", self.folder],
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"^try_wraps.py: .*name a new one.*\n$")
        self.assertEqual((self.folder / "mine").read_text(), "mine")


if __name__ == "__main__":
    unittest.main()
