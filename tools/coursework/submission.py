"""Finds what a student submitted, in whatever form, and lays it over the tree that was handed out.

A submission is a whole tree, a few of its files, one file, an archive (zip, tar) of one of these, or a folder with
nothing but such an archive.
Only regular files of moderate size are read; names that lead out of the submission are not taken. git is
never asked about a submission: its settings might start programs.
"""

import bz2
import gzip
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, TemporaryFile

from coursework import OPEN_FILES, SubmissionError, tree

LARGEST = 1 << 18  # bytes of a file, in a submission: the largest handed-out one has less than a tenth
MOST_FILES = 20_000
MOST_BYTES = 64 << 20  # of an archive, packed or unpacked
LONGEST_NOTE = 1 << 16  # bytes of a header beside a member's own
DEEPEST = 20  # folders in each other
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
PRESSED = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ": lzma}  # by the first bytes
LINKS = "not taken, they are links, or no files"
ELSEWHERE = f"not taken, their names lead elsewhere, or have more than {DEEPEST} parts"
TWICE = "more than once in the archive, the last one counts"


@dataclass
class Submission:
    """The files of a student that have a place in the tree: texts by path."""

    files: dict = field(default_factory=dict)
    notes: list = field(default_factory=list)


def name_of(path):
    """A student's name: that of the folder, archive or file."""
    name = Path(path).name
    ending = next((ending for ending in sorted(ARCHIVES, key=len, reverse=True) if name.lower().endswith(ending)), "")
    return name[:len(name) - len(ending)] if ending else name


def is_archive(path):
    return path.is_file() and str(path).lower().endswith(ARCHIVES)


def read_submission(path, places, teachers=()):
    """Reads the submission at `path`. `places` are the paths of files that students may change; `teachers` are the
    other files of the tree by their paths. Raises SubmissionError if nothing in it belongs to the tree."""
    path = Path(path)
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
        raise SubmissionError(f"{path}: expected a folder, a file or an archive ({', '.join(ARCHIVES)})")
    members = defaultdict(list)
    with unpacked(path, members) as folder:
        submission = lay(folder, places, teachers, members.pop(LINKS, ()))
    submission.notes += notes_of(members)
    if not submission.files:
        notes = "".join(f"; {note}" for note in submission.notes)
        raise SubmissionError(f"{path} has no file of the tree that was handed out: expected a tree, or files of it "
                              f"under their names{notes}")
    return submission


@contextmanager
def unpacked(path, members):
    """The folder with what was submitted. Of an archive, `members` gets the names that are left out or there twice, by
    what is to be said of them."""
    if path.is_dir():
        paths = list_plain(path)
        if len(paths) != 1 or not is_archive(path / paths[0]):
            yield path
            return
        path = path / paths[0]  # as course systems hand out what was uploaded
    with TemporaryDirectory(prefix="lockstep-submission-") as folder:
        if is_archive(path):
            try:
                if path.stat().st_size > MOST_BYTES:
                    raise too_much()
                (unzip if path.suffix.lower() == ".zip" else untar)(path, Path(folder), members)
            except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, ValueError, RuntimeError,
                    NotImplementedError, zlib.error, lzma.LZMAError) as error:
                raise SubmissionError(f"{path} cannot be unpacked: {error}; expected a whole archive") from error
        else:
            tree.copy_file(path, Path(folder) / path.name)
        yield Path(folder)


def unzip(path, folder, members):
    with zipfile.ZipFile(path) as archive:
        for member in checked(archive.infolist(), lambda member: (member.filename, member.file_size)):
            if member.is_dir():
                continue
            if stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG):
                with archive.open(member) as content:
                    write(folder, member.filename, content, members)
            else:
                members[LINKS].append(str(path_in(member.filename)))


def untar(path, folder, members):
    with TemporaryFile() as plain:
        unpress(path, plain)
        untar_plain(plain, folder, members)


def unpress(path, plain):
    """Writes the archive without its compression, as long as it is not too large: tarfile reads a header of any
    size into memory."""
    with open(path, "rb") as file:
        begin = file.read(6)
    opened = next((kind.open for magic, kind in PRESSED.items() if begin.startswith(magic)), open)
    with opened(path, "rb") as content:
        while piece := content.read(1 << 20):
            plain.write(piece)
            if plain.tell() > MOST_BYTES + 2048 * MOST_FILES:
                raise too_much()
    plain.seek(0)


def untar_plain(plain, folder, members):
    check_headers(plain)
    with tarfile.open(fileobj=plain) as archive:
        for member in checked(archive, lambda member: (member.name, member.size)):
            if member.isfile():
                write(folder, member.name, archive.extractfile(member), members)
            elif not member.isdir():
                members[LINKS].append(str(path_in(member.name)))


def check_headers(plain):
    """Refuses long names and notes of members ("x", "g", "L", "K"): tarfile takes hours for some of a few MiB."""
    while len(header := plain.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE:
        size = tarfile.nti(header[124:136])
        if size < 0 or header[156:157] in b"xgXLK" and size > LONGEST_NOTE:
            raise ValueError(f"a header of {size} bytes")
        plain.seek(-(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE, 1)
    plain.seek(0)


def checked(members, facts):
    """The members of an archive, as long as they are not too many or too large."""
    bytes_so_far = 0
    for number, member in enumerate(members, 1):
        bytes_so_far += facts(member)[1]
        if number > MOST_FILES or bytes_so_far > MOST_BYTES:
            raise too_much()
        yield member


def too_much():
    return ValueError(f"more than {MOST_FILES} files, or more than {MOST_BYTES >> 20} MiB")


def write(folder, name, content, members):
    """Writes a member below the folder, as tar does with names from the root; one whose name leads elsewhere is left
    out."""
    path = path_in(name)
    if ".." in path.parts or len(path.parts) not in range(1, DEEPEST + 1):
        members[ELSEWHERE].append(name)
        return
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        members[TWICE].append(name)
    target.write_bytes(content.read())


def path_in(name):
    """Where an archive's member of this name is, below the archive's folder."""
    return PurePosixPath(name.replace("\\", "/").lstrip("/"))


# --- Where its files belong ----------------------------------------------------------------------

def lay(folder, places, teachers=(), links=()):
    """Finds the place of each file. What has none in the tree, and the teacher's files that were changed, are named
    in the notes. `links`: paths of an archive's links, which are not in the folder."""
    found = Submission()
    paths = list_plain(folder)
    root = root_of(paths, places)
    strange, changed, second = [], [], []
    # Files in their places come first: a backup does not count beside them.
    for path in sorted(paths, key=lambda path: path.removeprefix(root or "") not in places):
        place = place_of(path, root, places)
        if place in places and place not in found.files:
            text = read_text(folder / path)
            if text is None:
                found.notes.append(f"not taken: {printable(path)} has more than {LARGEST >> 10} KiB, or is no text in UTF-8")
            else:
                found.files[place] = text
        elif any(end in places for end in ends_of(path)):
            second.append(path)
        elif place in teachers:
            if not tree.same_text(folder / path, teachers[place]):
                changed.append(path)
        elif tree.is_students(place) or teachers and not tree.is_made(place):
            strange.append(path)
    links = [path for path in sorted(tree.walk(folder)) if not tree.is_plain(folder, path)] + [
        path for path in links if not tree.is_made(path.removeprefix(root or "")) and not tree.is_litter(path)]
    found.notes += notes_of({"not taken, they have no place in the tree": strange,
                             "not taken, they are the teacher's, and changed": changed,
                             "not taken, their places are taken by other files of this submission": second,
                             LINKS: links})
    return found


def notes_of(names):
    """A line for each thing that is to be said of files, with the names of the first five."""
    return [f"{what}: {', '.join(map(printable, some[:5]))}{f' and {len(some) - 5} more' if len(some) > 5 else ''}"
            for what, some in names.items() if some]


def place_of(path, root, places):
    """Where a file of a submission belongs: below `root` at its path. A file beside that is known by its name, and so
    are all if no file has its path (root None), which may also be the end of one."""
    inside = path.removeprefix(root or "")
    if inside in places:
        return inside
    if not root and (whole := next((place for place in places if path.endswith("/" + place)), None)):
        return whole
    for known in (inside, path.rsplit("/", 1)[-1]) if root is None or "/" not in inside else ():
        fitting = [place for place in places if place.endswith("/" + known)]
        if len(fitting) == 1:
            return fitting[0]
    return inside


def ends_of(path):
    """a/b/c, b/c and c of a/b/c."""
    parts = path.split("/")
    return ("/".join(parts[begin:]) for begin in range(len(parts)))


def printable(name):
    """A file's name as a report may show it: students choose their names, which may hold any byte."""
    return "".join(character if character.isprintable() else "?" for character in name[:300])


def list_plain(folder):
    """Paths of the regular files in a folder; git, links, what is built, and handed-out files of the solutions are left
    out."""
    paths = []
    for path in sorted(tree.walk(folder)):
        if len(paths) > MOST_FILES:
            raise SubmissionError(f"{folder} has more than {MOST_FILES} files, expected a tree or files of it")
        if f"/{OPEN_FILES}/" not in f"/{path}" and tree.is_plain(folder, path):
            paths.append(path)
    return paths


def root_of(paths, places):
    """The folder, as "a/b/", below which most files have their places; None if none has."""
    best, most = None, 0
    counts = {}
    for path in paths:
        parts = path.split("/")
        for depth in range(min(len(parts), 6)):
            if "/".join(parts[depth:]) in places:
                root = "".join(part + "/" for part in parts[:depth])
                counts[root] = counts.get(root, 0) + 1
    for root, count in sorted(counts.items(), key=lambda item: len(item[0])):
        if count > most:
            best, most = root, count
    return best


def read_text(path):
    """A file's text; None if it is too large, or has a zero byte, as UTF-16 has. For g++ a line ends at a carriage return, too."""
    with open(path, "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST or b"\0" in content:
        return None
    return content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
