"""The tree that was handed out, made anew by the repository that has the solutions, to grade with."""

import hashlib
import shutil

import exercise
from coursework import solutions, tree
from coursework.workshop import Workshop, compiler


def checksum(root, paths):
    """That of all files, and of the compiler."""
    whole = hashlib.sha256(str(compiler()).encode())
    for path in paths:
        whole.update(path.encode() + b"\0" + hashlib.sha256((root / path).read_bytes()).digest())
    return whole.hexdigest()


def handed_out_tree(root, workshop, say):
    """The folder with the tree, below the workshop's, which is locked; it is made if it is not there, or of
    other files."""
    build = workshop.folder
    folder, stamp = build / "handed-out", build / "handed-out.sum"
    files = exercise.choose_files(root, lambda text: None)
    wanted = checksum(root, files)
    if not (folder / solutions.MANIFEST).is_file() or not stamp.is_file() or stamp.read_text() != wanted:
        say("making the tree that students get, with its solutions")
        shutil.rmtree(folder, ignore_errors=True)
        own = Workshop(build)  # no sandbox: these sources are the teacher's
        own.is_locked = workshop.is_locked
        exercise.make_tree(root, folder, own, say)
        stamp.write_text(wanted)
    return folder


def is_teachers(root):
    """Whether this tree has the solutions' sources, and so can make the tree that students get."""
    return not (root / solutions.MANIFEST).is_file() and (root / tree.HIDDEN).is_dir()
