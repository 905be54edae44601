"""Runs of the stages' programs and of PyTorch, for `lockstep bench`."""

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from stages import ROOT, path_of

STAGE = "01-single-gpu"


def program(stage):
    return ROOT / "build" / path_of(stage)


def run_stage(stage, *options):
    """Runs a stage's program and returns its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.json"
        subprocess.run([program(stage), *map(str, options), "--metrics", path],
                       check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def run_ours(model, batch, threads, steps, *more, stage=STAGE, devices="cpu:0"):
    """A run of `steps` steps on synthetic images."""
    samples = (steps + 1) * batch
    return run_stage(stage, "--data", f"synthetic:{samples}:{min(batch, 64)}", "--model", model,
                     "--batch-size", batch, "--threads-per-device", threads, "--max-steps", steps,
                     "--devices", devices, "--lr", 0.01, *more)


def run_torch(python, model, batch, threads, steps, channels_last, ranks=0):
    command = [python, ROOT / "tools/bench_torch.py", "--model", model, "--batch", str(batch),
               "--threads", str(threads), "--steps", str(steps), "--ranks", str(ranks)]
    result = subprocess.run(command + ["--channels-last"] * channels_last, check=True,
                            stdout=subprocess.PIPE)
    return json.loads(result.stdout)


def round_time(step_seconds):
    """Median step of one round, without the first steps, which make plans and touch new memory."""
    return statistics.median(step_seconds[max(1, len(step_seconds) // 10):])
