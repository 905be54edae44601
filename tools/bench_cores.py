"""What binding brings in `lockstep bench`: threads of CPU devices that keep to their device's part of
the cores beside threads that are free, on this machine as it is and beside a loop that never ends."""

import contextlib
import os
import subprocess

import bench_runs
from bench_plan import Group, Run, all_rounds, medians
from bench_runs import expected
from child_processes import started
from stages import label

# Program, network, batch, steps.
WORK = (("02-dataparallel", "seed", 64, 300), ("02-dataparallel", "seed", 256, 100),
        ("03-model-split", "seed", 64, 300), ("03-model-split/tensor-split", "seed", 64, 300),
        ("04-ddp", "seed", 64, 300), ("04-ddp", "seed", 256, 100),
        ("05-syncbn-checkpoint", "seed-bn", 64, 300))
ENDLESS = ("sh", "-c", "while :; do :; done")
QUIET, ANYWHERE, ON_ONE = "quiet", "beside a loop", "beside a loop on one core"
SLOWER = {QUIET: 0.7, ANYWHERE: 1.1, ON_ONE: 1.2}  # about, beside what is expected
CHOICES = {"bound": "--bind", "free": "--no-bind"}


def cores(options):
    return [cores_group(*work, options.rounds) for work in WORK
            if work[1].removesuffix("-bn") in options.models]


def cores_group(stage, model, batch, steps, rounds):
    def run(beside, option):
        def call():
            with busy(beside):
                return bench_runs.run_ours(model, batch, 1, steps, option, stage=stage,
                                           devices="cpu:0,cpu:1")
        return call

    name = f"{label(stage)}, {model}, batch {batch}"
    seconds = expected(model, batch, steps, 2)
    runs = {(beside, choice): Run(f"{name}, {beside}, {choice}", SLOWER[beside] * seconds,
                                  run(beside, option))
            for beside in SLOWER for choice, option in CHOICES.items()}

    def figures(found):
        step, each = medians(found), all_rounds(found)
        return {"work": name, "runs": [
            {"beside": beside, "threads": choice, "step_seconds": step[beside, choice],
             "all_rounds": each[beside, choice]} for beside, choice in step]}
    return Group("cores", runs, rounds, lambda found: lines_of(figures(found)), figures)


@contextlib.contextmanager
def busy(beside):
    """Something else that computes as long as the block lasts."""
    if beside == QUIET:
        yield
        return
    last = str(max(os.sched_getaffinity(0)))
    pinned = ("taskset", "-c", last) if beside == ON_ONE else ()
    with started([*pinned, *ENDLESS], stdout=subprocess.DEVNULL):
        yield


def lines_of(figures):
    lines = [f"{figures['work']}:"]
    for row in figures["runs"]:
        rounds = [1e3 * seconds for seconds in row["all_rounds"]]
        lines.append(f"  {row['beside']:<26} {row['threads']:<6} {row['step_seconds'] * 1e3:9.2f} "
                     f"ms/step ({min(rounds):.2f} to {max(rounds):.2f})")
    return lines
