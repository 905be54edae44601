"""Runs of the stages' programs and of PyTorch, for `lockstep bench`."""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
from pathlib import Path

from child_processes import started
from stages import ROOT, path_of

STAGE = "01-single-gpu"
# What a run takes on a core of an Intel Xeon (AVX-512, 2026), in seconds: the start of a process,
# and one sample by network and width. So it can say before the first run how long all will take.
START, TORCH_START = 0.3, 5.0
SAMPLE = {"seed": 4.5e-5, "seed-bn": 6e-5, "resnet18": 0.024, "resnet18 16": 0.002,
          "mlp 512": 1.2e-3}
TORCH_SLOWER = {"seed": 2.2, "resnet18": 1.2}


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def machine():
    """The machine on which these figures were measured."""
    return f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def program(stage):
    return ROOT / "build" / path_of(stage)


def run_together(*commands, **options):
    """Runs programs at the same time, to their ends: none is left, whatever ends this."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(list(map(str, command)), **options))
                     for command in commands]
        for process in processes:
            if process.wait() != 0:
                raise subprocess.CalledProcessError(process.returncode, process.args)


def run_stages(*runs):
    """Runs stages' programs at the same time, each as (stage, options); returns their metrics."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"metrics{number}.json" for number in range(len(runs))]
        run_together(*([program(stage), *options, "--metrics", path]
                       for (stage, options), path in zip(runs, paths)), stdout=subprocess.DEVNULL)
        return [json.loads(path.read_text()) for path in paths]


def ours(model, batch, threads, steps, *more, stage=STAGE, devices="cpu:0"):
    """Stage and options of a run of `steps` steps on synthetic images."""
    samples = (steps + 1) * batch
    return stage, ("--data", f"synthetic:{samples}:{min(batch, 64)}", "--model", model,
                   "--batch-size", batch, "--threads-per-device", threads, "--max-steps", steps,
                   "--devices", devices, "--lr", 0.01, *more)


def run_ours(*work, **where):
    """One round of a stage: its metrics, `seconds` being the median step."""
    metrics, = run_stages(ours(*work, **where))
    return {**metrics, "seconds": round_time(metrics["step_seconds"])}


def run_apart(model, batch, steps, *more, processes=2):
    """Processes that share nothing but the machine, each with an equal part of the batch: `seconds` is a
    whole batch at the samples per second of all. As many ranks would reach that if their messages
    cost nothing."""
    part = batch // processes
    each = run_stages(*processes * [ours(model, part, 1, steps, *more)])
    per_second = sum(part / round_time(metrics["step_seconds"]) for metrics in each)
    return {"seconds": batch / per_second}


def run_torch(python, model, batch, threads, steps, channels_last, ranks=0, fsdp=False):
    command = [python, ROOT / "tools/bench_torch.py", "--model", model, "--batch", batch,
               "--threads", threads, "--steps", steps, "--ranks", ranks]
    with tempfile.TemporaryFile("w+") as output:
        run_together(command + ["--channels-last"] * channels_last + ["--fsdp"] * fsdp,
                     stdout=output)
        output.seek(0)
        metrics = json.load(output)
    return {**metrics, "seconds": round_time(metrics["step_seconds"])}


def speed_up(seconds, alone, devices):
    """How many times as fast as a device alone, and how much of that each device brings."""
    return {"speedup": alone / seconds, "efficiency": alone / seconds / devices}


def round_time(step_seconds):
    """Median step of one round, without the first steps: libraries choose algorithms then, and memory is new."""
    return statistics.median(step_seconds[max(1, len(step_seconds) // 10):])


def expected(model, batch, steps, devices=1, width=64, torch=False):
    """About how many seconds a run will take on two cores."""
    work = steps * batch * SAMPLE[model if width == 64 else f"{model} {width}"]
    work /= 1 if devices == 1 else 1.5
    return TORCH_START + work * TORCH_SLOWER[model] if torch else START + work
