"""Files of a repository or of a student's tree."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from coursework import CourseworkError, SOLUTIONS

HIDDEN = "tests/coursework/hidden"  # cases that no student's tree has
# Students write here; everything else of a tree is the teacher's.
STAGE = re.compile(r"\d\d-[\w-]+")
SOURCES = (".h", ".cpp", ".inl", ".cuh", ".cu")
# Not part of a tree, if git is not there to say so: at its top, and anywhere.
MADE = re.compile(r"build(-.*)?|data|bundle|\.cache")
LITTER = re.compile(r"__pycache__|\.git|.*\.pyc|\..*\.swp|.*~|\.DS_Store|__MACOSX|\._.*|Thumbs\.db|desktop\.ini")


def is_students(path):
    """Whether a file, by its path in the tree, is one that students may change."""
    top = path.split("/")[0]
    return top == "common" or bool(STAGE.fullmatch(top))


def is_made(path):
    """Whether a file, by its path in the tree, is built, fetched, or one of the prebuilt solutions."""
    top = path.split("/")[0]
    return top == SOLUTIONS or bool(MADE.fullmatch(top))


def is_litter(path):
    """Whether a file, by its path, is one that systems and tools leave, or in a folder that they leave."""
    return any(map(LITTER.fullmatch, path.split("/")))


def list_files(root):
    """Paths of a tree's regular files: those that git does not ignore; without git, all that are
    not built or fetched."""
    return [path for path in list_entries(root) if is_plain(root, path)]


def list_refused(root):
    """Things of students' that cannot be taken for files: folders that are links, links that lead
    out of the tree or nowhere, pipes."""
    return [path for path in list_entries(root) if is_students(path) and not is_plain(root, path)]


def list_entries(root):
    listed = ask_git(root, "--cached", "--others")
    if listed is None:
        return sorted(walk(root))
    # A student's git may ignore all objects.
    listed |= {path for path in walk(root) if path.startswith(SOLUTIONS + "/")}
    return [path for path in sorted(listed) if os.path.lexists(root / path)]


def is_plain(root, path):
    """Whether this is a regular file or a link to one of the tree, in folders that are no links."""
    real = os.path.realpath(root)
    place = os.path.join(real, path)
    leads_to = os.path.realpath(place)
    return (os.path.realpath(os.path.dirname(place)) == os.path.dirname(place)
            and leads_to.startswith(real.rstrip("/") + "/") and os.path.isfile(leads_to))


def list_unknown(root):
    """Those of a tree's files that git does not track yet; none if git cannot say."""
    return sorted(ask_git(root, "--others") or ())


def ask_git(root, *which):
    """Paths that git lists, except those that it ignores. None if git lists nothing, as in another
    user's folder, or is not there."""
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    # Its settings may name programs for git to start.
    done = subprocess.run(["git", "-c", "core.fsmonitor=false", "-C", str(root), "ls-files", "-z", *which,
                           "--exclude-standard"], capture_output=True)
    names = os.fsdecode(done.stdout)  # names need not be UTF-8
    return set(names.split("\0")) - {""} if done.returncode == 0 else None


def walk(root):
    """Paths of everything in a folder and its folders, except litter and, in a tree, what is built or fetched."""
    is_tree = os.path.isdir(os.path.join(root, "common"))
    found = []
    for folder, folders, files in os.walk(str(root)):
        at_top = folder == str(root)
        folders[:] = [name for name in folders if not LITTER.fullmatch(name)
                      and not (at_top and is_tree and MADE.fullmatch(name))]
        below = os.path.relpath(folder, root)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [os.path.normpath(os.path.join(below, name)) for name in files + links
                  if not LITTER.fullmatch(name)]
    return found


def read_sources(root):
    """The texts of all source files that students may change, by path."""
    return {path: (root / path).read_text(errors="replace") for path in list_files(root)
            if is_students(path) and path.endswith(SOURCES)}


def check_tree(folder):
    """Raises CourseworkError for a folder in which students' files are not where they belong."""
    stages = [path for path in folder.iterdir() if STAGE.fullmatch(path.name) and path.is_dir()]
    if not stages or not (folder / "common").is_dir():
        raise CourseworkError(f"{folder} is no tree of Lockstep: it has no common/ with the "
                              "stages' folders beside it; name the folder that has them")


def copy_file(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(target)
    shutil.copy(source, target)


def remove(path):
    """Removes whatever has this name; never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mirror(files, folder):
    """Makes `folder` hold these files and no others; `files` maps paths to a file or to a text.
    Files that are right already are not touched, so that a build sees what changed. Returns the paths of the others."""
    remove_others(files, folder)
    changed = set()
    for path, content in files.items():
        target = folder / path
        if isinstance(content, str):
            if target.is_file() and target.read_bytes() == content.encode():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            remove(target)
            target.write_text(content, newline="")
        elif same_file(content, target):
            continue
        else:
            copy_file(content, target)
        changed.add(path)
    return changed


def remove_others(files, folder):
    """Removes all from a mirror but the regular files that belong to `files`, in their places, and
    the folders that hold such files. No link stays: later writes would go through it."""
    parents = {str(above) for path in files for above in Path(path).parents}
    for below, folders, names in os.walk(folder):
        inside = os.path.relpath(below, folder)
        if inside == "." and "subprojects" in folders:
            folders.remove("subprojects")  # a missing library that was downloaded to it stays
        for name in folders + names:
            path, wanted = Path(below, name), parents if name in folders else files
            if path.is_symlink() or os.path.normpath(os.path.join(inside, name)) not in wanted:
                remove(path)


def same_text(one, other):
    """Whether two files hold the same, whatever ends their lines."""
    return (one.stat().st_size <= 2 * other.stat().st_size
            and one.read_bytes().replace(b"\r\n", b"\n") == other.read_bytes().replace(b"\r\n", b"\n"))


def same_file(source, target):
    return (target.is_file() and source.stat().st_mode == target.stat().st_mode
            and source.read_bytes() == target.read_bytes())
