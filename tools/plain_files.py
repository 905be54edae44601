"""Files that come from elsewhere, or go to a place that a user names."""

import errno
import json
import os
import stat
import tempfile
from pathlib import Path

LARGEST = 2**63  # of a number in a file: nanoseconds since 1970 and bytes are smaller


def number(text, kind, largest):
    if not abs(float(text)) <= largest:
        raise ValueError(f"the number {text[:20]} is out of range")
    return kind(text)


def refuse(text):
    raise ValueError(f"{text} is no number of JSON")


def read_json(path, largest=LARGEST):
    """The file's content. Raises ValueError for what is no JSON, and for numbers that no measurement
    gives: 1e999, which Python takes for infinity, NaN, an integer of 400 digits. Raises OSError, also
    for a pipe or a device, whose end may never come."""
    path = Path(path)
    if not (path.is_dir() or stat.S_ISREG(path.stat().st_mode)):
        raise OSError(0, "it is not a regular file")
    try:
        return json.loads(path.read_text(), parse_float=lambda text: number(text, float, largest),
                          parse_int=lambda text: number(text, int, largest), parse_constant=refuse)
    except RecursionError as error:
        raise json.JSONDecodeError("too many lists in each other", "", 0) from error


def require_writable(path):
    """Whether write_whole() can write there is found out before hours of work. Raises OSError."""
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise OSError(0, "it is a folder; name a file")
    if path.exists() and not path.is_file():
        raise OSError(0, "it exists and is not a regular file")
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_whole(path, text):
    """Writes a file under another name, then renames it: the file is whole, or is still the old one,
    with its mode. A link leads to its target. Raises OSError, also for what is no regular file."""
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, "its links lead in a circle")
    mode = None
    if path.exists():
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "it exists and is not a regular file")
        mode = stat.S_IMODE(found.st_mode)
    beside = path.parent / f".{os.getpid()}.tmp"  # no longer than any name may be
    try:
        beside.write_text(text)
        if mode is not None:
            beside.chmod(mode)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
