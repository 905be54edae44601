#!/usr/bin/env python3
"""Builds and runs a stage with nothing but the libraries of subprojects/*.wrap.

The wraps name archives on hosts that not every machine reaches. Debian's source packages have the
same releases or near ones. From them this script makes a `subprojects/` with these archives in its
packagecache, and runs tests/tools/test_wraps.py with it. If an archive's bytes differ from the
recorded ones, the copy's wrap gets its version and hash; the project's own wraps stay as they are.

    tools/try_wraps.py [--mirror URL] [--folder DIR]
"""

import configparser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from child_processes import SKIPPED, started
from command_line import Parser, run_command

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"CLI11": "cli11", "catch2": "catch2", "fmt": "fmtlib", "nlohmann_json": "nlohmann-json3"}
SUITES = ("stable", "unstable", "experimental")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# The files in the JSON library's own archive of headers, out of its sources.
HEADERS = ("include", "single_include", "meson.build", "LICENSE.MIT")
# Debian leaves CLI11's meson.build out; this one does the same for us.
MESON = """project('{name}', 'cpp', version: '{version}')
meson.override_dependency('{name}',
  declare_dependency(include_directories: include_directories('include')))
"""


class Unavailable(Exception):
    """Why nothing could be tried here."""


@dataclass(frozen=True)
class Source:
    """A source package on offer."""

    package: str
    full_version: str  # Debian's: 9.1.0+ds1-2
    archive: str  # name of the file with the library's sources
    sha256: str

    @property
    def version(self):
        """The library's own."""
        return re.sub(r"^\d+:|.*really\.|\+.*|-[^-]*$", "", self.full_version)


def read_wrap(path):
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(path)
    return parser


def wrap_version(wrap):
    return wrap["wrap-file"]["directory"].rsplit("-", 1)[1]


# --- Debian's archive ----------------------------------------------------------------------------


def system_mirror():
    """The mirror that this system's apt takes Debian's packages from."""
    done = subprocess.run(["apt-get", "indextargets", "--format", "$(ORIGIN) $(SITE)",
                           "Created-By: Packages"], capture_output=True, text=True)
    sites = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("Debian ")]
    sites = [site for site in sites if not site.endswith("-security")]
    if not sites:
        raise Unavailable("apt knows no mirror of Debian: give one with --mirror URL")
    return sites[0]


class Apt:
    """apt with lists of its own: the system's are left as they are."""

    def __init__(self, folder, mirror):
        self.folder = folder
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "sources.list").write_text("".join(
            f"deb-src [signed-by={KEYRING}] {mirror} {suite} main\n" for suite in SUITES))
        (folder / "apt.conf").write_text(
            f'Dir::Etc::sourcelist "{folder}/sources.list";\nDir::Etc::sourceparts "-";\n'
            f'Dir::State::lists "{folder}/lists";\nDir::Cache "{folder}/cache";\n'
            'APT::Sandbox::User "root";\n')

    def call(self, *command):
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True,
                              env={**os.environ, "APT_CONFIG": str(self.folder / "apt.conf")})

    def update(self):
        """Reads the lists that the mirror has; packages that are in none of them are reported
        later."""
        self.call("apt-get", "update")

    def sources(self, package):
        return read_sources(self.call("apt-cache", "showsrc", "--only-source", package).stdout)

    def download(self, source):
        """The archive's path, or None if the mirror lacks it or has another."""
        self.call("apt-get", "source", "--download-only", "--tar-only",
                  f"{source.package}={source.full_version}")
        path = self.folder / source.archive
        if not path.is_file() or hash_of(path) != source.sha256:
            return None
        return path


def read_sources(text):
    """The packages in what `apt-cache showsrc` prints."""
    found = []
    for stanza in text.split("\n\n"):
        package = re.search(r"^Package: (.+)$", stanza, re.M)
        version = re.search(r"^Version: (.+)$", stanza, re.M)
        archive = re.search(r"^ ([0-9a-f]{64}) \d+ (\S+\.orig\.tar\.\w+)$", stanza, re.M)
        if package and version and archive:
            found.append(Source(package[1], version[1], archive[2], archive[1]))
    return found


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def in_order(sources, wrap):
    """Best first: the recorded bytes, the same release, then the newest of the others."""
    def rank(source):
        numbers = [int(number) for number in re.findall(r"\d+", source.version)]
        return (source.sha256 == wrap["wrap-file"]["source_hash"],
                source.version == wrap_version(wrap), numbers)
    return sorted(sources, key=rank, reverse=True)


# --- The copy of subprojects/ --------------------------------------------------------------------


def pack(archive, wrap, target):
    """Writes the sources in `archive` as the archive that the wrap names, below `target`."""
    section = wrap["wrap-file"]
    bare = section.get("lead_directory_missing") == "true"
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder) / section["directory"]
        top.mkdir()
        subprocess.run(["tar", "-xf", archive, "-C", top, "--strip-components=1"], check=True)
        if bare:
            for path in top.iterdir():
                if path.name not in HEADERS:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if "patch_directory" not in section and not (top / "meson.build").exists():
            name, version = section["directory"].rsplit("-", 1)
            (top / "meson.build").write_text(MESON.format(name=name, version=version))
        name, kind = re.fullmatch(r"(.*?)\.(tar\.gz|zip)", section["source_filename"]).groups()
        made = shutil.make_archive(str(target / name), {"tar.gz": "gztar", "zip": "zip"}[kind],
                                   root_dir=top if bare else folder,
                                   base_dir="." if bare else section["directory"])
    return Path(made)


def change_version(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def fill_in(folder, stem, source, archive):
    """Adds this library to the copy of subprojects/; returns how near it is to the recorded one."""
    path = folder / f"{stem}.wrap"
    wrap = read_wrap(path)
    recorded, wanted = wrap["wrap-file"]["source_hash"], wrap_version(wrap)
    if source.sha256 == recorded:
        shutil.copy(archive, folder / "packagecache" / wrap["wrap-file"]["source_filename"])
        return f"{wanted}, the recorded bytes"
    change_version(path, wanted, source.version)
    patch = folder / "packagefiles" / wrap["wrap-file"].get("patch_directory", "none")
    if patch.is_dir():
        change_version(patch / "meson.build", wanted, source.version)
    made = pack(archive, read_wrap(path), folder / "packagecache")
    change_version(path, recorded, hash_of(made))
    same = source.version == wanted
    return f"{source.version}, " + ("packed anew" if same else f"in place of {wanted}")


def prepare(folder, apt):
    """Makes the copy of subprojects/ in `folder`."""
    (folder / "packagecache").mkdir(parents=True)
    for wrap in (ROOT / "subprojects").glob("*.wrap"):
        shutil.copy(wrap, folder)
    shutil.copytree(ROOT / "subprojects/packagefiles", folder / "packagefiles")
    for stem, package in PACKAGES.items():
        for source in in_order(apt.sources(package), read_wrap(folder / f"{stem}.wrap")):
            if archive := apt.download(source):
                print(f"{stem}: {fill_in(folder, stem, source, archive)}", flush=True)
                break
        else:
            raise Unavailable(f"the mirror has no sources of {package}")


def main(arguments):
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mirror", help="of Debian; default: the one that this system's apt uses")
    parser.add_argument("--folder", type=Path,
                        help="a new folder, to keep the archives; default: they are not kept")
    options = parser.parse_args(arguments)
    if options.folder and options.folder.exists():
        parser.error(f"--folder {options.folder} is there already: name a new one, or remove it")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch) / "subprojects").resolve()
        try:
            if not shutil.which("apt-get"):
                raise Unavailable("no apt-get on this system")
            apt = Apt(Path(scratch), options.mirror or system_mirror())
            apt.update()
            prepare(folder, apt)
        except Unavailable as error:
            print(f"try_wraps: package cache absent: {error}", file=sys.stderr)
            return SKIPPED
        with started([sys.executable, ROOT / "tools/run_python_tests.py", ROOT / "tests/tools", "-k",
                      "TestFallback"], cwd=ROOT,
                     env={**os.environ, "LOCKSTEP_SUBPROJECTS": str(folder), "LOCKSTEP_FULL": "1"}) as tests:
            return tests.wait()


if __name__ == "__main__":
    run_command(main)
