#!/usr/bin/env python3
"""Find or fetch a data set: `./lockstep data fashion-mnist|mnist|cifar10|synthetic [--dir DIR]`.

Addresses and checksums are in tools/datasets.json. A file is downloaded next to its place,
verified, and only then renamed: a file with a data set's name is always whole. Exit status: 0 the
data set is there, 1 it is not (one line on stderr says why).
"""

import contextlib
import gzip
import hashlib
import http.client
import os
import re
import shutil
import stat
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from pathlib import Path

from child_processes import signals_held
from command_line import Parser, complain, run_command
from plain_files import read_json

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).resolve().parent / "datasets.json"
TIMEOUT_SECONDS = 60
SUMS = "SHA256SUMS"  # written next to the files of an unpacked archive, once it was verified
CHUNK = 1 << 20
LARGEST = 1 << 29  # bytes of a file: more than any set has, so that no server fills the disk


class DataError(Exception):
    """The data set is not available; the message is the one line to show."""


def digest(stream, algorithm):
    """Hexadecimal digest of what is left in a binary stream."""
    sum_ = hashlib.new(algorithm)
    while block := stream.read(CHUNK):
        sum_.update(block)
    return sum_.hexdigest()


def file_digest(path, algorithm):
    with open(path, "rb") as stream:
        return digest(stream, algorithm)


def content_is_right(path, entry):
    """Whether a file, of whatever name, holds the entry's content. Two .gz files may differ in their
    header alone (Debian's do: no name, another date), so the digest of the unpacked bytes decides. An
    archive is one file, as it comes."""
    try:
        with open(path, "rb") as stream:
            packed = "unpack" not in entry and stream.read(2) == b"\x1f\x8b"
        opened = gzip.open if packed else open
        with opened(path, "rb") as stream:
            return digest(stream, "sha256") == entry["content_sha256"]
    except (OSError, EOFError, zlib.error):
        return False


def unpacked_is_right(folder, entry):
    """Whether an archive's files are in `folder`, unchanged since they were verified."""
    if not (folder / SUMS).is_file():
        return False
    try:
        lines = (folder / SUMS).read_text(errors="replace").splitlines()
    except OSError:
        return False
    sums = {name: sum_ for sum_, _, name in (line.partition("  ") for line in lines)}
    return all(
        (folder / name).is_file() and file_digest(folder / name, "sha256") == sums.get(name)
        for name in entry["unpack"]
    )


def candidates(folder, entry):
    """The files that may hold an entry: as published, and without the .gz."""
    name = entry["name"]
    plain = [folder / name[:-3]] if name.endswith(".gz") and "unpack" not in entry else []
    return [path for path in [folder / name, *plain] if path.is_file()]


def is_present(folder, entry):
    """Whether files of the right names are there; says nothing about their content."""
    if "unpack" in entry:
        return all((folder / name).is_file() for name in entry["unpack"])
    return bool(candidates(folder, entry))


def is_right(folder, entry):
    """Whether `folder` holds the entry with the right checksum."""
    if "unpack" in entry:
        return unpacked_is_right(folder, entry)
    return any(content_is_right(path, entry) for path in candidates(folder, entry))


def search_folders(name, data_set, directory):
    """Where the programs look, in their order (see common/data), or `directory` alone."""
    if directory:
        return [directory]
    folders = []
    if os.environ.get("LOCKSTEP_DATA"):
        given = Path(os.environ["LOCKSTEP_DATA"])
        folders += [given / name, given]
    folders += [Path("data") / name, ROOT / "data" / name]
    if "debian_folder" in data_set:
        folders.append(Path(data_set["debian_folder"]))
    return folders


def download(url, path):
    """Writes what `url` serves to `path`; refuses a transfer that ends early, or does not end."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            expected = answer.headers.get("Content-Length")
            with open(path, "wb") as out:
                while out.tell() <= LARGEST and (block := answer.read(CHUNK)):
                    out.write(block)
    except urllib.error.HTTPError as error:
        raise DataError(f"{url}: the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        raise DataError(f"{url}: {reason}; check the connection and try again") from error
    got = path.stat().st_size
    if got > LARGEST:
        raise DataError(f"{url}: more than {LARGEST} bytes came, and no file of a data set has so many; "
                        "set LOCKSTEP_DATA_URL to a mirror")
    if expected is not None and str(got) != expected.strip():
        raise DataError(
            f"{url}: the connection ended after {got} of {expected} bytes; try again"
        )


@contextlib.contextmanager
def beside(path):
    """A file to be filled, next to where `path` leads. It then replaces, whole, what is there, with its mode."""
    target = Path(os.path.realpath(path))
    if os.path.islink(path) and target.exists() and not target.is_file():  # root could replace a device
        raise DataError(f"{path}: what this link leads to is not a regular file; remove the link")
    part = None
    try:
        with signals_held():  # one between the file and its name would leave the file
            handle, name = tempfile.mkstemp(prefix=".download-", dir=target.parent)
            os.close(handle)
            part = Path(name)
        yield part
        part.chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644)
        part.replace(target)
    finally:
        if part:
            part.unlink(missing_ok=True)


def unpack(archive, folder, entry):
    """Puts an archive's files into `folder`, each renamed into place, their digests last."""
    sums = []
    with tarfile.open(archive) as tar:
        for name in entry["unpack"]:
            try:
                member = tar.extractfile(name)
            except KeyError:
                member = None
            if member is None:
                raise DataError(f"{entry['name']}: holds no file {name}")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with beside(folder / name) as part:
                with member, open(part, "wb") as out:
                    shutil.copyfileobj(member, out, CHUNK)
                sums.append(f"{file_digest(part, 'sha256')}  {name}\n")
    with beside(folder / SUMS) as part:
        part.write_text("".join(sums))


def verify(part, entry, url):
    """Refuses what is not the entry: by MD5, which finds what was cut short, and by SHA-256, which
    nobody can meet with another file."""
    found = file_digest(part, "md5")
    if found != entry["md5"]:
        raise DataError(
            f"{url}: md5 {found}, expected {entry['md5']} ({part.stat().st_size} bytes came): "
            "truncated or another file; try again or set LOCKSTEP_DATA_URL to a mirror"
        )
    if not content_is_right(part, entry):
        raise DataError(
            f"{url}: the MD5 sum is right and the content's SHA-256 is not {entry['content_sha256']}: "
            "somebody has made another file with that sum; set LOCKSTEP_DATA_URL to a mirror"
        )


def fetch(entry, base_url, folder):
    """Downloads one entry into `folder`, verified before it gets its name."""
    url = base_url.rstrip("/") + "/" + entry["name"]
    print(f"fetching {url}", flush=True)
    if "unpack" in entry:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            archive = Path(scratch) / "archive"
            download(url, archive)
            verify(archive, entry, url)
            unpack(archive, folder, entry)
        return
    with beside(folder / entry["name"]) as part:
        download(url, part)
        verify(part, entry, url)


def is_within(name):
    """Whether a name stays in the folder in which it is looked up."""
    return isinstance(name, str) and ".." not in Path(name).parts and Path(name).parts[:1] not in ((), ("/",))


def is_entry(entry):
    return (isinstance(entry, dict) and isinstance(entry.get("md5"), str)
            and isinstance(entry.get("unpack", []), list)
            and all(map(is_within, [entry.get("name"), *entry.get("unpack", [])])))


def is_data_set(value):
    return (isinstance(value, dict) and isinstance(value.get("files"), list)
            and all(map(is_entry, value["files"]))
            and all(isinstance(value.get(key, ""), str) for key in ("url", "debian_folder", "debian_package")))


def read_table(path):
    """Addresses and checksums, as in tools/datasets.json."""
    try:
        table = read_json(path)
    except OSError as error:
        raise DataError(f"--table {path}: {error.strerror}; expected a table like {TABLE}") from error
    except ValueError as error:
        raise DataError(f"--table {path} is no JSON; expected a table like {TABLE}") from error
    if not isinstance(table, dict) or not all(map(is_data_set, table.values())):
        raise DataError(f"--table {path}: expected, as in {TABLE}, data sets with a url and files; of each a "
                        "name that stays in the data set's folder, md5 and content_sha256")
    return table


def require_digests(name, files):
    """Without them anybody on the way could send other files: plain http has no other proof, and MD5
    is none."""
    for entry in files:
        if not re.fullmatch("[0-9a-f]{64}", str(entry.get("content_sha256"))):
            raise DataError(f"{name}: the table has no content_sha256 of {entry['name']}; add it")


def provide(name, data_set, directory, unless_present):
    """Finds the data set or fetches the missing part; prints where it is."""
    files = data_set["files"]
    for folder in search_folders(name, data_set, directory):
        if unless_present and all(is_present(folder, entry) for entry in files):
            return
        if all(is_right(folder, entry) for entry in files):
            print(f"{name}: found in {folder}, checksums right")
            return
    if "debian_package" in data_set and not directory:
        package = data_set["debian_package"]
        print(f"{name}: not here (on Debian: apt-get install {package}); fetching it")
    folder = directory or ROOT / "data" / name
    folder.mkdir(parents=True, exist_ok=True)
    base_url = os.environ.get("LOCKSTEP_DATA_URL") or data_set.get("url", "")
    require_digests(name, files)
    for entry in files:
        if is_right(folder, entry):
            continue
        if is_present(folder, entry):
            print(f"{folder / entry['name']}: wrong checksum, fetching it again", flush=True)
        fetch(entry, base_url, folder)
    print(f"{name}: in {folder}, checksums right")


def parse_arguments(argv, table):
    parser = Parser(prog="lockstep data", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="one of: " + ", ".join([*table, "synthetic"]))
    parser.add_argument("--dir", type=Path, help="folder to look in and fetch to")
    parser.add_argument("--table", help="addresses and checksums (default: tools/datasets.json)")
    parser.add_argument("--unless-present", action="store_true",
                        help="if files of the right names are there: do not check them, print nothing")
    return parser.parse_args(argv)


def main(argv):
    options = parse_arguments(argv, read_table(TABLE))
    try:
        table = read_table(options.table or TABLE)
        if options.name == "synthetic":
            print("synthetic: made by the programs themselves, nothing to fetch")
        elif options.name not in table:
            names = ", ".join([*table, "synthetic"])
            raise DataError(f"unknown data set '{options.name}', expected one of: {names}")
        else:
            provide(options.name, table[options.name], options.dir, options.unless_present)
    except (DataError, OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError) as error:
        complain("lockstep data", error)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
