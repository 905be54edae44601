"""The wraps: libraries' own release archives, pinned, and enough to configure without packages."""

import configparser
import hashlib
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUBPROJECTS = ROOT / "subprojects"
CACHE = SUBPROJECTS / "packagecache"
PROVIDED = {"CLI11": "CLI11", "nlohmann_json": "nlohmann_json", "fmt": "fmt",
            "catch2": "catch2-with-main"}


def read_wrap(path):
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(path)
    return parser


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
    def test_configures_with_nothing_but_the_wraps(self):
        wraps = [read_wrap(path)["wrap-file"] for path in SUBPROJECTS.glob("*.wrap")]
        names = [wrap["source_filename"] for wrap in wraps]
        absent = [name for name in names if not (CACHE / name).is_file()]
        if absent:
            self.skipTest(f"package cache absent: no {absent[0]} in subprojects/packagecache")
        for wrap in wraps:
            content = (CACHE / wrap["source_filename"]).read_bytes()
            self.assertEqual(hashlib.sha256(content).hexdigest(), wrap["source_hash"])
        with tempfile.TemporaryDirectory() as folder:
            self.configure(Path(folder))

    def configure(self, folder):
        """Configures a copy of the sources, so that no archive is unpacked in the checkout."""
        source = folder / "source"
        at_the_top = shutil.ignore_patterns(".git", "build", "build-*", "data", "bundle", ".cache")
        shutil.copytree(ROOT, source, ignore=lambda here, names: (
            at_the_top(here, names) if Path(here) == ROOT else ()))
        for path in (source / "subprojects").iterdir():  # unpacked by an earlier build
            if path.is_dir() and path.name not in ("packagecache", "packagefiles"):
                shutil.rmtree(path)
        done = subprocess.run(
            ["meson", "setup", str(folder / "build"), str(source), "--wrap-mode=forcefallback",
             "-Dtests=enabled", "-Dcuda=disabled"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
            env={**os.environ, "http_proxy": "http://127.0.0.1:1",
                 "https_proxy": "http://127.0.0.1:1"})
        self.assertEqual(done.returncode, 0, done.stdout[-3000:])
        for name in PROVIDED:
            self.assertRegex(done.stdout, rf"{name}\s*: YES", f"{name} did not come from its wrap")


if __name__ == "__main__":
    unittest.main()
