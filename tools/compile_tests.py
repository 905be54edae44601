"""How `./lockstep test` configures a build and compiles what its tests need."""

import fcntl
import functools
import os
import platform
import shutil
import subprocess
import tempfile

from child_processes import run
from coursework import SOLUTIONS
from ninja_build import failure, linking, run_ninja


def install_cuda_model(folder, root):
    """Builds tests/cuda_model and installs it into `folder` as a toolkit; returns the output of an
    error or "". Another caller waits meanwhile, and then finds it there."""
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return install_cuda_model_alone(folder, root)


def install_cuda_model_alone(folder, root):
    build = folder / "build"
    steps = [("meson", "install", "-C", str(build), "--only-changed")]  # avoids relinking
    if not (build / "build.ninja").is_file():
        steps.insert(0, ("meson", "setup", str(build), str(root / "tests/cuda_model"),
                         f"--prefix={folder}", "--libdir=lib", "-Dbuildtype=release"))
    for step in steps:
        ended, output = run(step, cwd=root)
        if ended:
            return output
    return ""


def configure(build, root):
    """Runs Meson unless the folder was configured with these options; returns an error's output."""
    folder = root / build.folder
    # A student's open tasks leave parameters unused, and their kernels throw.
    strict = "false" if (root / SOLUTIONS).is_dir() else "true"
    options = (f"-Dwerror={strict}", "-Dtests=enabled", *linking(), *build.options)
    if build.cuda_model:
        error = install_cuda_model(root / build.cuda_model, root)
        if error:
            return error
        options += ("-Dcuda=enabled", f"-Dgpu_roots={root / build.cuda_model}")
    stamp = folder / "lockstep-options"
    if stamp.is_file() and stamp.read_text() == "\n".join(options):
        ended, output = run(("ninja", "-C", folder, "build.ninja"), cwd=root)
        return ended and (output or "ninja failed without a word")
    anew = ("--wipe",) if (folder / "build.ninja").is_file() else ()
    ended, output = run(("meson", "setup", *anew, folder, root, *options), cwd=root)
    if not ended:
        stamp.write_text("\n".join(options))
    return ended and (output or "meson failed without a word")


def targets_of(rows, folder):
    """What rows need, by ninja's names."""
    return sorted({os.path.relpath(target, folder) for row in rows for target in row.targets})


def compile_rows(build, rows, root, how_far):
    """Compiles what the rows of a configured build need; returns an error's output or ""."""
    folder = root / build.folder
    targets = targets_of(rows, folder)
    if not targets:
        return ""
    status, output = run_ninja(folder, targets, how_far)
    return "" if status == 0 else failure(output) or "ninja failed without a word"


@functools.cache
def tsan_wrapper():
    """The command to put before a TSan executable, or None where TSan cannot run: if a kernel
    randomises addresses widely, mappings end up where TSan's shadow must be, unless `setarch -R`
    stops it."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/probe"
        source = "#include <thread>\nint main() { std::thread([] {}).join(); }\n"
        subprocess.run(["c++", "-fsanitize=thread", "-pthread", "-x", "c++", "-", "-o", program],
                       input=source, text=True, capture_output=True)
        if not os.path.exists(program):
            return ()  # no TSan in this compiler: the build's own error is clearer
        for wrapper in ((), ("setarch", platform.machine(), "-R")):
            if wrapper and not shutil.which(wrapper[0]):
                continue
            tries = [subprocess.run([*wrapper, program], capture_output=True) for _ in range(3)]
            if all(done.returncode == 0 for done in tries):
                return wrapper
    return None
