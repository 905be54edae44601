"""The bundle: what a build needs on a machine without a package registry, in one folder.

    manifest.json     packages with versions, the commit, size and sha256 of every other file
    prefix.tar.gz     include/ lib/ bin/ pkgconfig/ python/, to be unpacked anywhere
    data/             Fashion-MNIST, as the programs read it

Made from the files of installed Debian packages. Nothing in it depends on its place: the .pc files
start from their own folder, and the Meson file with full paths is written on unpacking.
"""

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from fetch_data import file_digest
from gpu_check.machine import CheckError, ROOT, commit

LIMIT = 64 * 2**20
ARCHIVE, MANIFEST = "prefix.tar.gz", "manifest.json"

# Debian package -> the .pc module to write and its flags other than -I; None: found as a library.
LIBRARIES = {
    "libcli11-dev": ("CLI11", ""),
    "libfmt-dev": ("fmt", "-lfmt"),
    "nlohmann-json3-dev": ("nlohmann_json", ""),
    "catch2": ("catch2", ""),
    "zlib1g-dev": ("zlib", "-lz"),
    "libsodium-dev": ("libsodium", "-lsodium"),
    "libdnnl-dev": None,
    "libgloo-dev": None,
}
# In Debian 13 `catch2` only depends on this: version 3, whose main is a separate library.
CATCH2_3 = {"libcatch2-dev": ("catch2-with-main", "-lCatch2Main -lCatch2")}
PROGRAMS = {"ninja-build": "ninja", "pkgconf-bin": "pkgconf"}
MESON, DATA = "meson", "dataset-fashion-mnist"
PACKAGES = (*LIBRARIES, *PROGRAMS, MESON, DATA)

# Every machine with a C++ compiler has these, and they must fit its own loader.
FROM_THE_COMPILER = re.compile(
    r"(linux-vdso|ld-linux.*|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp))\.so(\.\d+)*$")


# --- Collecting ------------------------------------------------------------------------------

def ask(*command):
    """What a command prints; CheckError in one line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CheckError(f"{command[0]}: {error.strerror}; --bundle is for Debian, where the "
                         "packages are; elsewhere take a bundle made there") from error
    if done.returncode != 0:
        raise CheckError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def installed_versions():
    """Version by package; CheckError names those that are missing and how to install them."""
    try:
        done = subprocess.run(["dpkg-query", "-W", "-f",
                               "${Package} ${Version} ${db:Status-Status}\n", *PACKAGES],
                              capture_output=True, text=True)
    except OSError as error:
        raise CheckError("dpkg-query: not found; --bundle is for Debian, where the packages are; "
                         "elsewhere take a bundle made there") from error
    rows = [line.split() for line in done.stdout.splitlines()]
    versions = {row[0]: row[1] for row in rows if len(row) == 3 and row[2] == "installed"}
    missing = [package for package in PACKAGES if package not in versions]
    if missing:
        raise CheckError(f"not installed: {', '.join(missing)}; "
                         f"apt-get install {' '.join(missing)}, then try again")
    return versions


def files_of(package):
    return [Path(line) for line in ask("dpkg", "-L", package).splitlines() if Path(line).is_file()]


def libraries():
    """LIBRARIES, by the packages that hold them in this release of Debian."""
    if any(path.suffix == ".hpp" for path in files_of("catch2")):
        return LIBRARIES
    return {name: module for name, module in LIBRARIES.items() if name != "catch2"} | CATCH2_3


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def copy_needed_libraries(program, lib):
    """The shared libraries that `ldd` names, each under the name it is loaded by."""
    for name, path in re.findall(r"^\s*(\S+) => (/\S+)", ask("ldd", str(program)), re.MULTILINE):
        if not FROM_THE_COMPILER.match(name) and not (lib / name).exists():
            copy(Path(path).resolve(), lib / name)


def soname(library):
    """The name a program that is linked with `library` loads, for instance libfmt.so.9."""
    found = re.search(r"SONAME.*\[(\S+)\]", ask("readelf", "-d", str(library)))
    return found.group(1) if found else library.name


def copy_library(path, lib):
    """A static library, or a shared one under its loaded name with the link that -l looks for."""
    if path.name.endswith(".a"):
        copy(path, lib / path.name)
        return
    loaded = soname(path)
    copy(path.resolve(), lib / loaded)
    if path.name != loaded:
        (lib / path.name).symlink_to(loaded)
    copy_needed_libraries(path, lib)


def collect_library(package, prefix):
    """Headers and libraries of a -dev package; the static library only if there is no shared
    one."""
    files = files_of(package)
    shared = [path for path in files if path.name.endswith(".so")]
    for path in files:
        if path.is_relative_to("/usr/include"):
            copy(path, prefix / path.relative_to("/usr"))
        elif path in shared or (path.suffix == ".a" and not shared):
            copy_library(path, prefix / "lib")


PC_FILE = """prefix=${{pcfiledir}}/..
Name: {name}
Description: {name} of a Lockstep bundle
Version: {version}
Cflags: -I${{prefix}}/include
Libs: -L${{prefix}}/lib {libs}
"""


def write_pc_file(name, libs, prefix):
    version = ask("pkg-config", "--modversion", name).strip()
    text = PC_FILE.format(name=name, version=version, libs=libs)
    (prefix / "pkgconfig").mkdir(exist_ok=True)
    (prefix / f"pkgconfig/{name}.pc").write_text(text)


def collect_program(package, name, prefix):
    path = next((path for path in files_of(package) if path.name == name), None)
    if path is None:
        raise CheckError(f"{package}: holds no program {name}; reinstall it with apt-get")
    copy(path, prefix / "bin" / name)
    copy_needed_libraries(path, prefix / "lib")


def collect_meson(prefix):
    """Meson is Python: its package and the starting script, which looks for the package next to
    itself."""
    for path in files_of(MESON):
        if "mesonbuild" in path.parts:
            copy(path, prefix / "python" / Path(*path.parts[path.parts.index("mesonbuild"):]))
        elif path == Path("/usr/bin/meson"):
            copy(path, prefix / "python/meson.py")


def collect(prefix, data):
    """Fills the two folders from the installed packages."""
    for package, module in libraries().items():
        collect_library(package, prefix)
        if module:
            write_pc_file(*module, prefix)
    for package, name in PROGRAMS.items():
        collect_program(package, name, prefix)
    collect_meson(prefix)
    for path in files_of(DATA):
        if path.name.endswith("-ubyte.gz"):
            copy(path, data / "fashion-mnist" / path.name)


# --- Writing ---------------------------------------------------------------------------------

def sha256(path):
    return file_digest(path, "sha256")


def contents(folder):
    """Size and sha256 of every file below `folder` except the manifest, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in files}


def write_manifest(folder, versions):
    manifest = {"about": "made by `./lockstep gpu-check --bundle`", "commit": commit(),
                "packages": versions, "files": contents(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def may_replace(folder):
    """Whether `folder` is absent, empty or a bundle."""
    return not folder.exists() or folder.is_dir() and (
        (folder / MANIFEST).is_file() or not any(folder.iterdir()))


def make(folder, limit=LIMIT):
    """Makes or renews the bundle in `folder`; returns its size in bytes. The old one stays until
    the new one is whole, and within the limit."""
    folder = folder.resolve()
    if not may_replace(folder):
        raise CheckError(f"--bundle {folder}: this is there and is no bundle (it has no "
                         f"{MANIFEST}); name a new folder")
    versions = installed_versions()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=folder.parent) as scratch:
        prefix, fresh = Path(scratch) / "prefix", Path(scratch) / "bundle"
        fresh.mkdir()
        collect(prefix, fresh / "data")
        with tarfile.open(fresh / ARCHIVE, "w:gz", compresslevel=6) as tar:
            for name in sorted(path.name for path in prefix.iterdir()):
                tar.add(prefix / name, name)
        write_manifest(fresh, versions)
        size = size_of(fresh)
        if size >= limit:
            raise CheckError(f"--bundle {folder}: {size / 2**20:.1f} MiB, expected less than "
                             f"{limit / 2**20:.0f} MiB; nothing was written, leave a package out")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.replace(folder)
    return size


# --- Using -----------------------------------------------------------------------------------

def verified(folder):
    """The manifest of a bundle whose files are unchanged; CheckError names the files that are
    not."""
    again = "make it again with --bundle and copy all of it"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        expected = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckError(f"--offline {folder}: no readable {MANIFEST} there ({error}); "
                         "name a folder that --bundle made") from error
    for name, entry in expected.items():
        path = folder / name
        if not path.is_file():
            raise CheckError(f"{path}: missing, expected {entry['bytes']} bytes; {again}")
        if path.stat().st_size != entry["bytes"]:
            raise CheckError(f"{path}: {path.stat().st_size} bytes, expected {entry['bytes']}; "
                             f"{again}")
        if (found := sha256(path)) != entry["sha256"]:
            raise CheckError(f"{path}: sha256 {found}, expected {entry['sha256']}; {again}")
    if ARCHIVE not in expected:
        raise CheckError(f"{folder / MANIFEST}: lists no {ARCHIVE}; {again}")
    return manifest


NATIVE_FILE = """[binaries]
{binaries}
[built-in options]
cpp_args = ['-isystem', '{prefix}/include']
cpp_link_args = ['-L{prefix}/lib', '-Wl,-rpath,{prefix}/lib', '-Wl,--disable-new-dtags']
"""
# The old kind of rpath also leads the bundled libraries to the libraries that they need themselves.

PKG_CONFIG = """#!/bin/sh
LD_LIBRARY_PATH='{prefix}/lib' exec '{prefix}/bin/pkgconf' "$@"
"""


def write_native_file(prefix):
    """What Meson must know: where headers and libraries are, and a pkg-config if there is none."""
    script = prefix / "bin/pkg-config"
    script.write_text(PKG_CONFIG.format(prefix=prefix))
    script.chmod(0o755)
    binaries = "" if shutil.which("pkg-config") else f"pkgconfig = '{script}'\n"
    (prefix / "native.ini").write_text(NATIVE_FILE.format(prefix=prefix, binaries=binaries))


def unpack(folder, manifest, cache=ROOT / ".cache/gpu-check"):
    """Unpacks a verified bundle, once per content and place; returns the folder of its prefix."""
    prefix = cache / manifest["files"][ARCHIVE]["sha256"][:16]
    if not prefix.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=cache) as scratch:
            whole = Path(scratch) / "prefix"
            with tarfile.open(folder / ARCHIVE) as tar:
                tar.extractall(whole)  # its checksum was verified
            whole.replace(prefix)
    write_native_file(prefix)
    return prefix


def meson_options(prefix):
    return (f"--native-file={prefix}/native.ini", f"-Dpkg_config_path={prefix}/pkgconfig",
            "--wrap-mode=nodownload")
