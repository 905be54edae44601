"""Configures and compiles build-gpu/: from scratch if the options changed, else what is out of
date."""

import json
import re
from dataclasses import dataclass

import child_processes
from gpu_check import bundle
from gpu_check.machine import CORES, CheckError, ROOT, Tools, library_roots

FOLDER = ROOT / "build-gpu"
STAMP = "gpu-check.json"  # the options, and what Meson found with them
TAIL_LINES = 40


class BuildError(CheckError):
    """The build failed; `output` is what the tool wrote."""

    def __init__(self, message, output):
        super().__init__(message)
        self.output = "\n".join(output.rstrip().splitlines()[-TAIL_LINES:])


@dataclass(frozen=True)
class Setup:
    """How to build and run here."""

    tools: Tools
    options: tuple  # of Meson
    environment: dict  # of the programs that the build runs
    tensor_cores: bool = True  # for TF32 and bf16: the first GPU with them was Ampere
    gpus: int = 1  # of this machine


def options_for(gpu, python, prefix):
    """Meson's options: for the one GPU found, or for CPU devices where there is none."""
    options = ["-Dtests=enabled", "-Dcuda=disabled"]
    if gpu:
        roots = ",".join(library_roots(python))
        options = ["-Dtests=enabled", "-Dcuda=enabled", f"-Dgpu_archs={gpu.archs}",
                   f"-Dgpu_roots={roots}"]
    return (*options, *(bundle.meson_options(prefix) if prefix else ()))


def summary_of(output):
    """The lines `name: value` of the summary that ends Meson's output."""
    lines = output.splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip() == "Lockstep"]
    rows = []
    for line in lines[starts[-1] + 1:] if starts else []:
        found = re.match(r"\s+(\S.*?)\s*: (.*)", line)
        if not found:
            break
        rows.append(f"{found.group(1)}: {found.group(2)}")
    return rows


def run(setup, command, limit):
    """The output of one of the build's tools. Throws BuildError if it fails or takes too long."""
    ended, output = child_processes.run(command, limit, cwd=ROOT, env=setup.tools.environment)
    if ended:
        raise BuildError(f"{' '.join(map(str, command[:3]))}: {ended}", output)
    return output


def configure(setup, limit):
    """Runs Meson unless the folder was configured with these options; returns its summary."""
    stamp = FOLDER / STAMP
    if stamp.is_file() and (FOLDER / "build.ninja").is_file():
        known = json.loads(stamp.read_text())
        if known["options"] == list(setup.options):
            return known["summary"]
    anew = ("--wipe",) if (FOLDER / "build.ninja").is_file() else ()
    output = run(setup, (*setup.tools.meson, "setup", *anew, FOLDER, ROOT, *setup.options), limit)
    known = {"options": list(setup.options), "summary": summary_of(output)}
    stamp.write_text(json.dumps(known, indent=1) + "\n")
    return known["summary"]


def compile_targets(setup, targets, limit):
    """Compiles what is out of date of these targets, or of everything if there are none; returns
    Meson's summary. Throws BuildError."""
    summary = configure(setup, limit)
    run(setup, (setup.tools.ninja, "-C", FOLDER, "-j", str(CORES), *targets), limit)
    return summary
