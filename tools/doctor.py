#!/usr/bin/env python3
"""Say what this machine has for Lockstep, what is too old, and what each missing thing would add.

`./lockstep doctor` needs nothing but Python, also one that is too old for the rest (3.6), and changes nothing; its
exit status is always 0.
"""

import glob
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from command_line import run_command

ROOT = Path(__file__).resolve().parent.parent
INCLUDE_FOLDERS = ["/usr/include", "/usr/local/include", "/usr/include/x86_64-linux-gnu",
                   "/usr/include/aarch64-linux-gnu", "/opt/cuda/include"]
CUDA_DOWNLOADS = "https://developer.nvidia.com/cuda-downloads"


def output_of(*command, patience=20):
    """What a command prints, or None where it is absent, fails or hangs, for so many seconds."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True,
                              timeout=patience, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def first_line(*command):
    text = output_of(*command)
    return text.splitlines()[0] if text else None


def version_of(*command):
    """The version number in a command's first line, else the line itself."""
    line = first_line(*command)
    number = re.search(r"\d+(\.\d+)+", line or "")
    return number.group() if number else line


def cuda_root():
    nvcc = nvcc_path()
    return Path(nvcc).resolve().parent.parent if nvcc else None


def nvcc_path():
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin:/opt/cuda/bin")


def nvcc():
    path = nvcc_path()
    release = re.search(r"release ([\d.]+)", output_of(path, "--version") or "") if path else None
    return f"nvcc {release.group(1)} in {cuda_root()}" if release else None


def header(name, *version_macros):
    """The version that a header's macros give, and where the header is."""
    folders = INCLUDE_FOLDERS + ([str(cuda_root() / "include")] if cuda_root() else [])
    for package in ("cudnn", "nccl"):  # as Python packages carry them
        folders += glob.glob(f"{glob.escape(sys.prefix)}/lib/python3*/site-packages/nvidia/{package}/include")
    for folder in folders:
        path = Path(folder) / name
        if path.is_file():
            return f"{macros(path, version_macros)} ({path})".strip()
    return None


def macros(path, names):
    """Joins the numbers of `#define NAME number`, for instance 9.19.0; libraries keep them in the
    header itself or in another one next to it."""
    beside = [*path.parent.glob("*version*.h*"), *path.parent.glob("config.h")]
    texts = [file.read_text(errors="replace") for file in [path, *beside]]
    found = []
    for name in names:
        hits = [re.search(rf"#\s*define\s+{name}\s+(\d+)", text) for text in texts]
        found += [hit.group(1) for hit in hits if hit][:1]
    return ".".join(found)


def gpus():
    listing = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version",
                        "--format=csv,noheader")
    return "; ".join(listing.splitlines()) if listing else None


def cores():
    """Those that this process may use; only Linux can be asked for that."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count()


def memory():
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):  # a system without these names
        return "unknown"


def system():
    """The system's name, and what Lockstep makes of it."""
    release = getattr(platform, "freedesktop_os_release", None)  # from Python 3.10 on
    try:
        name = release()["PRETTY_NAME"] if release else platform.system()
    except (OSError, KeyError):
        name = platform.system()
    if platform.system() != "Linux":
        return f"{name}: Lockstep runs on Linux only; a container does it here (docs/machines.md)"
    return f"{name}, WSL" if "microsoft" in platform.release().lower() else name


def data_set(name, *markers):
    """The first folder that holds one of a data set's files."""
    given = os.environ.get("LOCKSTEP_DATA")
    folders = [Path(given), Path(given) / name] if given else []
    folders += [ROOT / "data" / name, Path("/usr/share/datasets") / name]
    for folder in folders:
        if any((folder / marker).is_file() for marker in markers):
            return str(folder)
    return None


def python_module(name):
    """The version of a module of the python3 that the tools run with."""
    return first_line(sys.executable, "-c", f"import {name}; print({name}.__version__)")


IDX = ["train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"]
CIFAR = ["cifar-10-batches-bin/data_batch_1.bin", "data_batch_1.bin"]


def version_macros(prefix):
    return [f"{prefix}_VERSION_{part}" for part in ("MAJOR", "MINOR", "PATCH")]


def catch2():
    """Version 3, or the single header of version 2."""
    names = ["catch2/catch_test_macros.hpp", "catch2/catch.hpp"]
    found = [header(name, *version_macros("CATCH")) for name in names]
    return found[0] or found[1]


def apt(package):
    return f"apt-get install {package}"


def gcc():
    """The version of the g++ that Meson would take: CXX names it, unless that is another compiler."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    return (chosen and version_of(*chosen, "-dumpfullversion")) or version_of("g++", "-dumpfullversion")


# The least that suffices, by the names below; README.md, "Requirements", has the same.
LEAST = {"g++": "12", "clang++": "14", "meson": "1.0", "ninja": "1.8.2", "python3": "3.10", "CUDA Toolkit": "12",
         "cuDNN": "9", "oneDNN": "2.6", "Catch2": "2.13"}
# How to get a newer one than the system's, and how without root; docs/machines.md has the rest.
NEWER = {"g++": "apt-get install g++-12, where that is on offer (Ubuntu 22.04), then 'export CXX=g++-12'"}
VENV = ("python3 -m venv ~/lockstep-tools && ~/lockstep-tools/bin/pip install meson ninja && "
        "export PATH=~/lockstep-tools/bin:$PATH")
WITHOUT_ROOT = {
    "g++": "'module load gcc/12' or newer on a cluster ('module avail gcc' lists them), then 'export CXX=g++'; "
           "or conda: 'conda create -n lockstep -c conda-forge gxx', then 'conda activate lockstep'",
    "meson": VENV, "ninja": VENV,
    "python3": "conda: 'conda create -n lockstep -c conda-forge python', then 'conda activate lockstep'"}

# Heading, then for each thing: name, what was found, what it adds, the command that installs it.
SECTIONS = [
    ("Machine", [
        ("system", system, "", ""),
        ("processor", lambda: f"{platform.machine()}, {cores()} cores", "", ""),
        ("memory", memory, "", ""),
        ("GPUs", gpus, "devices cuda:0, cuda:1, ... beside cpu:0",
         "an NVIDIA GPU and its driver (Debian: apt-get install nvidia-driver)"),
    ]),
    ("Build", [
        ("g++", gcc, f"C++20 compiler ({LEAST['g++']} or newer)",
         apt("g++")),
        ("clang++", lambda: version_of("clang++", "--version"),
         "a second compiler's opinion; not needed", apt("clang")),
        ("meson", lambda: version_of("meson", "--version"), f"build system ({LEAST['meson']} or newer)",
         apt("meson")),
        ("ninja", lambda: version_of("ninja", "--version"), f"runs the build ({LEAST['ninja']} or newer)",
         apt("ninja-build")),
        ("pkg-config", lambda: version_of("pkg-config", "--version"), "finds the libraries",
         apt("pkg-config")),
        ("ccache", lambda: version_of("ccache", "--version"), "rebuilds in seconds; not needed",
         apt("ccache")),
    ]),
    ("GPU libraries", [
        ("CUDA Toolkit", nvcc, "the CUDA backend (12 or newer)", f"see {CUDA_DOWNLOADS}"),
        ("cuDNN", lambda: header("cudnn.h", "CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL"),
         "convolutions of the CUDA backend", "apt-get install cudnn (NVIDIA's package source)"),
        ("NCCL", lambda: header("nccl.h", "NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"),
         "collectives between GPUs", "apt-get install libnccl-dev (NVIDIA's package source)"),
    ]),
    ("CPU libraries", [
        ("oneDNN", lambda: header("oneapi/dnnl/dnnl.hpp", *version_macros("DNNL")),
         "fast convolutions; without it the reference engine, several times slower",
         apt("libdnnl-dev")),
        ("Gloo", lambda: header("gloo/context.h", *version_macros("GLOO")),
         "--backend gloo; without it shm and tcp, our own, remain", apt("libgloo-dev")),
        ("libsodium", lambda: header("sodium.h"),
         "ranks prove that they know their job's secret; without it a job trusts its network",
         apt("libsodium-dev")),
        ("Catch2", catch2, "the tests", apt("catch2")),
    ]),
    ("Data", [
        ("fashion-mnist", lambda: data_set("fashion-mnist", *IDX),
         "the data that every stage trains on by default",
         f"{apt('dataset-fashion-mnist')} (or ./lockstep data fashion-mnist)"),
        ("mnist", lambda: data_set("mnist", *IDX), "--data mnist", "./lockstep data mnist"),
        ("cifar10", lambda: data_set("cifar10", *CIFAR), "--data cifar10",
         "./lockstep data cifar10"),
    ]),
    ("Grading", [
        ("bubblewrap", lambda: version_of("bwrap", "--version"),
         "the sandbox of grade; without it namespaces of the kernel", apt("bubblewrap")),
    ]),
    ("Python", [
        ("python3", lambda: platform.python_version(), "", apt("python3")),
        ("torch", lambda: python_module("torch"), "PyTorch's figures beside ours in bench",
         "python3 -m pip install torch"),
    ]),
]


def numbers(version):
    """(11, 4, 0) of "11.4.0"; () of a text that does not begin with a number."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def is_too_old(name, found):
    """Whether a version is known, and less than the least that suffices."""
    version = numbers(re.sub("^nvcc ", "", found))
    return bool(version) and version < numbers(LEAST.get(name, "0"))


def describe(name, find, adds, command):
    """One thing's lines: what was found; if that is missing or too old, also how to get it."""
    found = find()
    if found and not is_too_old(name, found):
        return f"  {name:<14} {found}"
    if found:
        what, ways = f"{found} is too old, {LEAST[name]} or newer is needed", [("newer", NEWER.get(name, ""))]
        ways += [] if name in WITHOUT_ROOT else [("to get it", command)]
    else:
        what, ways = f"missing. It would add: {adds}", [("to get it", command)]
    ways.append(("without root", WITHOUT_ROOT.get(name, "")))
    return "\n".join([f"  {name:<14} {what}", *(f"  {'':<14} {how}: {text}" for how, text in ways if text)])


def main():
    for heading, things in SECTIONS:
        print(heading)
        for thing in things:
            print(describe(*thing), flush=True)
    return 0


if __name__ == "__main__":
    run_command(lambda _: main())
