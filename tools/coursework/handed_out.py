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


def handed_out_tree(root, build, say):
    """The folder with the tree; it is made if it is not there, or of other files. Whoever calls holds the
    build's lock."""
    folder, stamp = build / "handed-out", build / "handed-out.sum"
    files = exercise.choose_files(root, lambda text: None)
    wanted = checksum(root, files)
    if not (folder / solutions.MANIFEST).is_file() or not stamp.is_file() or stamp.read_text() != wanted:
        say("making the tree that students get, with its solutions")
        shutil.rmtree(folder, ignore_errors=True)
        build.mkdir(parents=True, exist_ok=True)
        exercise.make_tree(root, folder, Workshop(build), say)
        stamp.write_text(wanted)
    return folder


def is_teachers(root):
    """Whether this tree has the solutions' sources, and so can make the tree that students get."""
    return not (root / solutions.MANIFEST).is_file() and (root / tree.HIDDEN).is_dir()
