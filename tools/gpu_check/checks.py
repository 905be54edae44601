"""The parts ops, stages and sanitizer: test cases on the GPU, and whole training runs."""

import json
import math
import re
import shutil
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from case_records import Case, read_cases
from child_processes import run
from gpu_check import build
from gpu_check.machine import ROOT
from stages import all_stages, path_of

GPU_TEST = "tests/gpu/gpu-test"  # below the build folder
PROGRAMS = "programs"  # Ninja's name for all of them and the libraries that they open when they run
# What a part runs, as Ninja's targets.
TARGETS = {"ops": [PROGRAMS, GPU_TEST], "stages": [PROGRAMS, GPU_TEST],
           "sanitizer": [PROGRAMS, GPU_TEST], "bench": [PROGRAMS]}


# --- Test cases ------------------------------------------------------------------------------

def judged_here(case):
    """A case fails if it says that it saw no GPU: nvidia-smi showed one."""
    if case.status == "skipped" and case.reason.startswith("no GPU: "):
        return Case(case.where, case.name, "failed",
                    f"skipped ('{case.reason}') although nvidia-smi shows a GPU", case.seconds)
    return case


def run_cases(setup, tags, limit, wrapper=()):
    """The cases of gpu-test that pass the filter, and what the process wrote."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "cases.jsonl"
        environment = {**setup.environment, "OMP_NUM_THREADS": "1", "LOCKSTEP_TEST_LOG": str(log),
                       "LOCKSTEP_BUILD_DIR": str(build.FOLDER)}
        try:
            ended, output = run((*wrapper, build.FOLDER / GPU_TEST, tags), limit, cwd=ROOT,
                                env=environment)
        except OSError as error:
            ended, output = f"could not be started: {error.strerror}", ""
        return [judged_here(case) for case in read_cases(tags, log, ended)], output


def tail(output, number=12):
    return [f"      {line}" for line in output.rstrip().splitlines()[-number:]]


def report_cases(section, tags, cases, output):
    """Counts the cases; names the failed ones, and the reasons of those that were skipped."""
    for case in cases:
        section.add(case.status)
        if case.status == "failed":
            section.say(f"* failed: {case.name}: {case.reason or 'see below'}")
    for reason, number in Counter(c.reason for c in cases if c.status == "skipped").items():
        section.say(f"* skipped, {number}: {reason}")
    if any(case.status == "failed" for case in cases):
        section.say("\n".join(["", *tail(output, 40), ""]))
    slowest = max(cases, key=lambda case: case.seconds)
    section.say(f"gpu-test `{tags}`: {len(cases)} cases, slowest {slowest.seconds:.1f} s "
                f"({slowest.name})")


def ops(section, setup, _options):
    """Every operation on the GPU against the CPU."""
    report_cases(section, "[cuda]~[stage]", *run_cases(setup, "[cuda]~[stage]", section.remaining()))


# --- Training runs ---------------------------------------------------------------------------

SEED_FLOORS = (0.70, 0.80)  # accuracy after one epoch and after two, at the default learning rate
TEXT_FLOORS = (None, 0.70)  # of the seed texts' own run: it must learn
AMPERE = ("--tf32", "--precision bf16")  # what products are rounded to on GPUs that came with it or later


@dataclass(frozen=True)
class Training:
    """One run of a stage's program on the GPU."""

    stage: str
    options: tuple
    floors: tuple  # accuracy after each of the first epochs; None: any
    variant: str = ""  # --graph, --precision bf16: only some stages have all of them
    devices: str = "cuda:0"

    @property
    def command_line(self):
        return (*self.options, *self.variant.split())


def trainings(setup, full):
    """Every stage that is here, and ResNet-18 as the seed texts trained it: batch 256, lr 0.1.
    The first stage has every variant; a later one a graph, if its help lists that, and 16 bits."""
    stages = all_stages()
    variants = ("", "--graph", "--precision fp16", *(AMPERE if setup.tensor_cores else ()))
    later = ("", "--graph", variants[-1])
    text = ("--model", "resnet18", "--batch-size", "256", "--lr", "0.1", "--epochs",
            "10" if full else "2")
    runs = [Training(stage, ("--epochs", "2"), SEED_FLOORS, variant)
            for stage in stages for variant in (variants if stage == stages[0] else later)]
    runs += [Training(stage, ("--epochs", "2"), SEED_FLOORS, devices=several_gpus(setup.gpus, stage))
             for stage in stages[1:] if setup.gpus > 1]
    runs += [Training(stage, text, TEXT_FLOORS, variant)
             for stage in stages[:1] for variant in later]
    return [run for run in runs
            if run.stage == stages[0] or not run.variant or knows(setup, run.stage, run.variant.split()[0])]


def several_gpus(count, stage):
    """The GPUs that a stage is tried on together: the seed network cannot be cut into many parts."""
    most = 2 if stage.startswith("03") or stage.startswith("tensor") else 8
    return ",".join(f"cuda:{number}" for number in range(min(count, most)))


def program(stage):
    return build.FOLDER / path_of(stage)


def knows(setup, stage, option):
    """Whether a stage's program lists this option in its help."""
    _, text = run((program(stage), "--help"), 60, cwd=ROOT, env=setup.environment)
    return option in text


def run_metrics(setup, stage, options, limit, devices="cuda:0"):
    """The metrics of a run and "", or None and what went wrong in one line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.json"
        try:
            ended, output = run((program(stage), "--devices", devices, *options, "--metrics", path),
                                limit, cwd=ROOT, env=setup.environment)
        except OSError as error:
            return None, f"could not be started: {error.strerror}"
        if ended:
            said = output.rstrip().splitlines()
            return None, f"{ended}: {said[-1] if said else 'without a word'}"
        return json.loads(path.read_text()), ""


def epoch_losses(metrics):
    """Mean training loss of each epoch."""
    losses, epochs = metrics["losses"], metrics["epochs"]
    size = math.ceil(len(losses) / epochs)
    return [statistics.fmean(losses[i:i + size]) for i in range(0, len(losses), size)]


def below_floor(accuracy, floors):
    """What is below its floor, in words; "" if nothing is."""
    low = [f"accuracy {found:.4f} after epoch {epoch + 1}, expected at least {floor}"
           for epoch, (found, floor) in enumerate(zip(accuracy, floors))
           if floor is not None and not found >= floor]
    return "; ".join(low)


def training_row(name, metrics):
    def per_epoch(values):
        return ", ".join(f"{value:.4f}" for value in values)
    peak = max(metrics["peak_memory_bytes"]) / 2**20
    return (f"| `{name}` | {per_epoch(metrics['accuracy'])} | {per_epoch(metrics['test_loss'])} | "
            f"{per_epoch(epoch_losses(metrics))} | {metrics['samples_per_second']:.0f} | "
            f"{metrics['epoch_seconds'][-1]:.2f} | {peak:.0f} |")


def train(section, setup, training):
    """Runs one training, prints its row, and returns its name and what is wrong with it."""
    options, name = training.command_line, " ".join((training.stage, *training.command_line))
    if training.devices != "cuda:0":
        name += f" --devices {training.devices}"
    metrics, fault = run_metrics(setup, training.stage, options, section.remaining(), training.devices)
    if metrics:
        section.say(training_row(name, metrics))
        fault = below_floor(metrics["accuracy"], training.floors)
    return name, fault


def stages(section, setup, options):
    """The cases of whole steps, then whole runs on Fashion-MNIST."""
    report_cases(section, "[stage]", *run_cases(setup, "[stage]", section.remaining()))
    section.say("\n| run, on cuda:0 if it does not say | accuracy per epoch | test loss | training loss | samples/s | "
                "last epoch, s | peak MiB |\n|---|---|---|---|---|---|---|")
    faults = [train(section, setup, training) for training in trainings(setup, options.full)]
    section.say()
    for name, fault in faults:
        section.check(name, fault)
    section.say("The seed texts report a test accuracy of 0.93 for their 10 epochs of ResNet-18, "
                "batch 256, learning rate 0.1.")


# --- compute-sanitizer -----------------------------------------------------------------------

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Cases that a tool leaves out, which its line says. What cuDNN's kernels wrote looks unwritten to the kernels
# that initcheck watches. racecheck of CUDA 13.0 ended where cuDNN multiplied numbers of 16 bits on an H200, with
# "failed to handle a hardware exception"; memcheck found nothing there.
LEFT_OUT = {"initcheck": "~[convolution]", "racecheck": "~[tensor-cores]"}
REFUSES = "sanitizer refuses the device"
ERROR_STATUS = 9


def find_sanitizer():
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer")


def complaints(output, number=8):
    """The first lines that compute-sanitizer itself wrote, and its summary."""
    lines = output.splitlines()
    own = [line for line in lines if line.startswith("=========") and line[9:].strip()]
    summary = [line for line in own if "SUMMARY" in line]
    return [f"      {line}" for line in [*own[1:number + 1], *summary]]


def sanitize(section, setup, sanitizer, tool, limit):
    """One tool over the operations' cases."""
    # Libraries try calls that may fail, and have hazards and unread padding of their own. Memory errors
    # count wherever they are.
    ours = () if tool == "memcheck" else ("--kernel-name", "kernel_substring=lockstep")
    wrapper = (sanitizer, "--tool", tool, "--error-exitcode", str(ERROR_STATUS), "--report-api-errors", "no",
               *ours)
    cases, output = run_cases(setup, "[ops]" + LEFT_OUT.get(tool, ""), limit, wrapper)
    if re.search(r"[Dd]evice not supported", output):
        section.check(tool, f"{REFUSES}: Device not supported", "skipped")
        return
    faults = [case for case in cases if case.status == "failed"]
    section.check(tool, "; ".join(f"{case.name}: {case.reason or 'failed'}" for case in faults[:4]))
    section.say(f"{tool}: {len(cases)} cases, {len(faults)} with faults"
                + (f"; cases left out: {LEFT_OUT[tool][1:]}" if tool in LEFT_OUT else ""))
    if faults:
        section.say("\n".join(complaints(output) or tail(output)))


def sanitizer(section, setup, _options):
    """Memory errors, races inside a block, reads before writes and wrong barriers."""
    path = find_sanitizer()
    for number, tool in enumerate(TOOLS):
        if path:
            sanitize(section, setup, path, tool, section.remaining() / (len(TOOLS) - number))
        else:
            section.check(tool, "no compute-sanitizer on PATH or with the toolkit",
                          "skipped")
