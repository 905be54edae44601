"""What a GPU machine has: the device, the tools, the folders of CUDA libraries, the versions."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import doctor
from bench_runs import processor
from progress import CORES
from stages import ROOT


class CheckError(Exception):
    """gpu-check cannot continue; the message is the one line to show."""


@dataclass(frozen=True)
class Gpu:
    name: str  # "NVIDIA H100 80GB HBM3"
    capability: str  # compute capability, "9.0"
    driver: str
    mode: str = "Default"  # compute mode: whether several processes may use it
    count: int = 1  # of the GPUs of this machine
    capabilities: tuple = ()  # of all of them, each once
    part: str = ""  # of it, if CUDA_VISIBLE_DEVICES names a part: "MIG 1g.10gb"

    @property
    def archs(self):
        """In the form of the Meson option gpu_archs: "86,90"."""
        return ",".join(each.replace(".", "") for each in self.capabilities or (self.capability,))

    @property
    def has_tensor_cores(self):
        """For TF32 and bf16."""
        return float(self.capability) >= 8

    @property
    def slower(self):
        """By how much it may be slower than the GPUs for which the limits are: the compute capabilities
        of large GPUs are few, and any other may belong to a small one. A part of a GPU is small, too."""
        return 4 if self.part else {"9.0": 1, "10.0": 1, "8.0": 2}.get(self.capability, 4)


def nvidia_smi():
    """The path of nvidia-smi, or None."""
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/local/nvidia/bin")


def has_driver():
    """Whether anything of NVIDIA's driver is here, also if no GPU can be found with it."""
    return bool(nvidia_smi()) or Path("/dev/nvidiactl").exists()


CAPABILITY = re.compile(r"\d+\.\d+")  # as nvidia-smi prints it; a broken driver's is "[N/A]"


def find_gpu():
    """The first GPU of this machine and "", or None and the reason in one line."""
    tool = nvidia_smi()
    if not tool:
        return None, "no GPU: nvidia-smi is not on PATH"
    only, part = os.environ.get("CUDA_VISIBLE_DEVICES", ""), ""
    if not only and "CUDA_VISIBLE_DEVICES" in os.environ:
        return None, "no GPU: CUDA_VISIBLE_DEVICES is empty, which hides all of them; unset it, or name one"
    try:
        if "GPU-" in only or "MIG-" in only:
            only, part = smi_ids(only, asked(tool, "-L")[1])
        status, lines = asked(tool, "--query-gpu=name,compute_cap,driver_version,compute_mode",
                              "--format=csv,noheader", *((f"--id={only}",) if only else ()))
    except subprocess.TimeoutExpired:
        return None, "no GPU: nvidia-smi did not answer within 60 s"
    except CheckError as error:
        return None, f"no GPU: {error}"
    rows = [[field.strip() for field in line.split(",")] for line in lines]
    if status != 0 or not rows or len(rows[0]) != 4:
        return None, f"no GPU: nvidia-smi says '{lines[0] if lines else ''}'"
    name, capability = rows[0][:2]
    if not CAPABILITY.fullmatch(capability):
        return None, (f"no GPU: the compute capability of {name} is '{capability}' for nvidia-smi, expected a "
                      "number like 9.0; reinstall or update NVIDIA's driver")
    known = tuple(sorted({row[1] for row in rows if CAPABILITY.fullmatch(row[1])}))
    return Gpu(*rows[0], len(rows), known, part), ""


def asked(tool, *words):
    """The exit status of nvidia-smi with these words, and its lines."""
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


LISTED = re.compile(r"^(?:GPU \d+:|  (?P<part>MIG \S+)) .*\(UUID: (?P<id>\S+)\)$")


def smi_ids(only, listing):
    """CUDA_VISIBLE_DEVICES in a form that `nvidia-smi --id` takes, and which part of a GPU it names, if
    any. CUDA takes the first letters of an id, too; nvidia-smi takes whole ones, and none of parts."""
    found, gpu = {}, ""  # id: GPU that it belongs to, part
    for match in filter(None, map(LISTED.match, listing)):
        gpu = gpu if match["part"] else match["id"]
        found[match["id"]] = gpu, match["part"] or ""
    ids, part = [], ""
    for word in only.split(","):
        id_ = next((each for each in found if each.startswith(word)), word)
        if id_ not in found and not word.isdigit():
            raise CheckError(f"CUDA_VISIBLE_DEVICES names {word}, which is not in the list of `nvidia-smi -L`")
        gpu, its_part = found.get(id_, (word, ""))
        ids.append(gpu)
        part = part or its_part
    return ",".join(dict.fromkeys(ids)), part


def in_folders(name, *folders):
    """A program on PATH, or else in one of these folders; None if it is in neither."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def python_answer(python, code):
    """The JSON that this Python prints for `code`, or None if it fails. The first import of torch, and
    several GPUs that wake up, take their time."""
    text = doctor.output_of(python, "-c", f"import json, sys; {code}", patience=180)
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None


def library_roots(python):
    """The folders of site-packages/nvidia/* that have include/ or lib/: cuDNN, NCCL and CUDA as
    Python packages carry them."""
    folders = [Path(folder) for folder in python_answer(python, "print(json.dumps(sys.path))") or [] if folder]
    roots = [root for folder in folders for root in sorted(folder.glob("nvidia/*"))
             if not for_other_cuda(folder, root.name)]
    return [str(root) for root in dict.fromkeys(roots)
            if (root / "include").is_dir() or (root / "lib").is_dir()]


def for_other_cuda(folder, name):
    """Whether the package of this library (cudnn, nccl) is for another CUDA than the compiler's: the
    library's own name does not say it."""
    ours = re.search(r"nvcc (\d+)", doctor.nvcc() or "")
    majors = {match[1] for path in folder.glob(f"nvidia_{name}_cu*.dist-info")
              if (match := re.match(rf"nvidia_{name}_cu(\d+)-", path.name))}
    return bool(ours and majors and ours[1] not in majors)


def torch_version(python):
    """The version of torch of a Python, if that torch sees a GPU; else ""."""
    return python_answer(python, "import torch; print(json.dumps("
                                 "torch.__version__ if torch.cuda.is_available() else ''))") or ""


@dataclass(frozen=True)
class Tools:
    """The programs that a build runs, and the environment they need."""

    meson: tuple  # a command
    ninja: str
    environment: dict


def find_meson(bundled):
    """Meson as a program, as a module of this Python, or from the bundle; None without any."""
    program = in_folders("meson", Path(sys.executable).parent)
    if program:
        return (program,)
    if python_answer(sys.executable, "import mesonbuild.mesonmain; print('true')"):
        return (sys.executable, "-m", "mesonbuild.mesonmain")
    return (sys.executable, str(bundled / "python/meson.py")) if bundled else None


def find_ninja(bundled):
    """Ninja as a program, in the Python package of that name, or from the bundle; or None."""
    package = python_answer(sys.executable, "import ninja; print(json.dumps(ninja.BIN_DIR))")
    folders = [folder for folder in (Path(sys.executable).parent, package,
                                     bundled and bundled / "bin") if folder]
    return in_folders("ninja", *folders)


def find_tools(bundled=None):
    """Meson, Ninja and a PATH that has nvcc; `bundled` is the folder of an unpacked bundle."""
    meson, ninja = find_meson(bundled), find_ninja(bundled)
    for name, found, package in (("meson", meson, "meson"), ("ninja", ninja, "ninja-build"),
                                 ("c++", shutil.which("c++"), "g++")):
        if not found:
            raise CheckError(f"{name}: not on PATH and no module of {sys.executable}; install it "
                             f"(Debian: apt-get install {package}) or give --offline with a bundle")
    environment = {**os.environ, "NINJA": ninja}
    if doctor.nvcc_path():
        environment["PATH"] += os.pathsep + str(Path(doctor.nvcc_path()).parent)
    return Tools(meson, ninja, environment)


# --- For the head of the result file ---------------------------------------------------------

def library_version(roots, header, prefix):
    """From a header's macros, in the folders that the build uses: "9.19.0", or "not found"."""
    toolkit = [doctor.cuda_root()] if doctor.cuda_root() else []
    folders = [f"{root}/include" for root in [*roots, *toolkit]] + doctor.INCLUDE_FOLDERS
    last = "PATCH" if prefix == "NCCL" else "PATCHLEVEL"
    for folder in folders:
        path = Path(folder) / header
        if path.is_file():
            return doctor.macros(path, [f"{prefix}_{part}" for part in ("MAJOR", "MINOR", last)])
    return "not found"


def commit(bundled_commit=""):
    """The commit of this tree, marked if files differ from it."""
    git = ("git", "-C", str(ROOT))
    if (ROOT / ".git").exists():
        name = doctor.output_of(*git, "rev-parse", "HEAD")
        changed = doctor.output_of(*git, "status", "--porcelain")
        if name:
            return name + (" with uncommitted changes" if changed else "")
    return f"{bundled_commit} (when the bundle was made)" if bundled_commit else "unknown: no .git"


def describe(gpu, python, bundled_commit=""):
    """Rows (name, value) that say where the figures were measured."""
    roots = library_roots(python)
    return [
        ("device", f"{gpu.name}, compute capability {gpu.capability}" if gpu else "none"),
        *([("part of it", gpu.part)] if gpu and gpu.part else []),
        *([("GPUs", f"{gpu.count}")] if gpu and gpu.count > 1 else []),
        *([("compute mode", f"{gpu.mode}: the checks need several processes on a GPU; without MPS they "
            "fail, and `nvidia-smi -c 0` as root sets Default")] if gpu and gpu.mode != "Default" else []),
        ("driver", gpu.driver if gpu else "none"),
        ("CUDA Toolkit", doctor.nvcc() or "not found"),
        ("cuDNN", library_version(roots, "cudnn.h", "CUDNN")),
        ("NCCL", library_version(roots, "nccl.h", "NCCL")),
        ("PyTorch", torch_version(python) or f"none that sees a GPU in {Path(python).name}"),
        ("commit", commit(bundled_commit)),
        ("processor", f"{processor()}, {CORES} cores"),
    ]
