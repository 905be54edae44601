"""Files of a repository or of a student's tree."""

import os
import re
import shutil
import subprocess

from coursework import SOLUTIONS

# Students write here; everything else of a tree is the teacher's.
STAGE = re.compile(r"\d\d-[\w-]+")
SOURCES = (".h", ".cpp", ".inl", ".cuh", ".cu")
# Not part of a tree, where no git says what is: at its top, and anywhere.
MADE = re.compile(r"build(-.*)?|data|bundle|\.cache")
LITTER = re.compile(r"__pycache__|\.git|.*\.pyc|\..*\.swp|.*~")


def is_students(path):
    """Whether a file, by its path in the tree, is one that students may change."""
    top = path.split("/")[0]
    return top == "common" or bool(STAGE.fullmatch(top))


def list_files(root):
    """Paths of a tree's files: those that git does not ignore, or where git does not say all that
    are not built or fetched."""
    listed = ask_git(root, "--cached", "--others")
    if listed is None:
        return sorted(walk(root))
    # A student's git may ignore all objects.
    listed |= {path for path in walk(root) if path.startswith(SOLUTIONS + "/")}
    return [path for path in sorted(listed) if os.path.lexists(root / path)]


def list_unknown(root):
    """Those of a tree's files that git was not told of yet; none where git does not say."""
    return sorted(ask_git(root, "--others") or ())


def ask_git(root, *which):
    """Paths that git lists, but for those that it ignores. None: it does not, as in another user's
    folder."""
    if not (root / ".git").exists():
        return None
    done = subprocess.run(["git", "-C", str(root), "ls-files", "-z", *which, "--exclude-standard"],
                          capture_output=True, text=True)
    return set(done.stdout.split("\0")) - {""} if done.returncode == 0 else None


def walk(root):
    """Paths of a folder's files, but for litter and what is built or fetched."""
    found = []
    for folder, folders, files in os.walk(str(root)):
        at_top = folder == str(root)
        folders[:] = [name for name in folders if not LITTER.fullmatch(name)
                      and not (at_top and MADE.fullmatch(name))]
        below = os.path.relpath(folder, root)
        found += [os.path.normpath(os.path.join(below, name)) for name in files
                  if not LITTER.fullmatch(name)]
    return found


def read_sources(root):
    """The texts of all source files that students may change, by path."""
    return {path: (root / path).read_text(errors="replace") for path in list_files(root)
            if is_students(path) and path.endswith(SOURCES)}


def copy_file(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        target.unlink()
    shutil.copy(source, target, follow_symlinks=False)


def mirror(files, folder):
    """Makes `folder` hold these files and no others; `files` maps paths to a file or to a text.
    What is right is not touched, so that a build sees what changed."""
    for path, content in files.items():
        target = folder / path
        if isinstance(content, str):
            if not target.is_file() or target.read_text() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(content)
        elif not same_file(content, target):
            copy_file(content, target)
    for path in list_files(folder):
        # What a missing library was downloaded to stays.
        if path not in files and not path.startswith("subprojects/"):
            (folder / path).unlink()


def same_file(source, target):
    if source.is_symlink() or target.is_symlink():
        return (source.is_symlink() and target.is_symlink()
                and os.readlink(source) == os.readlink(target))
    return (target.is_file() and source.stat().st_mode == target.stat().st_mode
            and source.read_bytes() == target.read_bytes())
