"""Ranks in `lockstep bench`: stage 04, one process per device, next to one process and PyTorch's DDP;
all-reduces by message size; what overlap hides of a slow network; and stage 06, what sharing out costs
a step, beside DDP and PyTorch's FSDP2."""

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

import bench_runs
from bench_rounds import Group, NotHere, Run, all_rounds, medians
from bench_runs import ROOT, STAGE, expected
from child_processes import SKIPPED

DDP = "04-ddp"
# Network, global batch, steps of a round.
QUICK_WORK = (("seed", 64, 200),)
WORK = (("seed", 64, 400), ("seed", 256, 150), ("resnet18", 64, 4))
# The seconds that message-sizes takes with each; the first is the default on one host.
BACKENDS = {"shm": 1.0, "tcp": 2.0, "gloo": 3.0}


def backends():
    """BACKENDS, without Gloo where the programs are not linked with it."""
    file = ROOT / "build/build.ninja"
    without_gloo = file.is_file() and "libgloo" not in file.read_text()
    return {name: seconds for name, seconds in BACKENDS.items()
            if name != "gloo" or not without_gloo}


# --- Training ----------------------------------------------------------------------------------

def ranks(options):
    """Two ranks of one thread next to one process, with the same global batch everywhere;
    --thorough: and next to PyTorch's DDP over Gloo."""
    work = WORK if options.thorough else QUICK_WORK
    return [ranks_group(*each, options) for each in work if each[0] in options.models]


def ranks_group(model, batch, steps, options):
    what = f"{model}, batch {batch}"

    def ours(stage, *more, devices="cpu:0,cpu:1"):
        return lambda: bench_runs.run_ours(model, batch, 1, steps, "--order", "sampler", *more,
                                           stage=stage, devices=devices)

    two = expected(model, batch, steps, 2)
    runs = {"one process": Run(what, expected(model, batch, steps), ours(STAGE, devices="cpu:0")),
            "2 processes apart": Run(f"{what}, apart", two, lambda: bench_runs.run_apart(
                model, batch, steps, "--order", "sampler")),
            "2 devices, stage 02": Run(f"{what}, stage 02", two, ours("02-dataparallel"))}
    for backend in backends():
        for more in ((), ("--no-bind",)) if options.thorough else ((),):
            name = ", ".join(("2 ranks", backend, *more))
            runs[name] = Run(f"{what}, {name}", two, ours(DDP, "--backend", backend, *more))
    for last in (False, True) if options.torch and options.thorough else ():
        name = "PyTorch DDP" + ", channels_last" * last
        runs[name] = Run(f"{what}, {name}", expected(model, batch, steps, 2, torch=True),
                         lambda last=last: bench_runs.run_torch(options.python, model, batch, 1,
                                                                steps, last, ranks=2))

    def figures(found):
        return {"model": model, "batch_size": batch, "step_seconds": medians(found),
                "per_step": per_step(found), "all_rounds": all_rounds(found)}
    return Group("ranks", runs, options.rounds, lambda found: rank_lines(figures(found)), figures)


def per_step(found):
    """What the last round of each contender says about its messages."""
    last = {name: rounds[-1] for name, rounds in found.items()}
    return {name: {**metrics["per_step_seconds"], **metrics["bytes_per_step"]}
            for name, metrics in last.items()
            if "exposed_communication" in metrics.get("per_step_seconds", {})}


def rank_lines(result):
    step = result["step_seconds"]
    lines = [f"{result['model']}, global batch {result['batch_size']}:"]
    rivals = [seconds for name, seconds in step.items() if name.startswith("PyTorch")]
    for name, seconds in step.items():
        text = (f"  {name:<28} {seconds * 1e3:9.2f} ms/step  "
                f"{step['one process'] / seconds:5.2f} times one process")
        if name in result["per_step"]:
            parts = result["per_step"][name]
            text += (f"; communication {parts['communication'] * 1e3:.2f} ms, exposed "
                     f"{parts['exposed_communication'] * 1e3:.2f}; {parts['sent']:.0f} bytes sent "
                     f"(formula {parts['predicted']:.0f})")
            if rivals:
                text += f"; {min(rivals) / seconds:.2f} times PyTorch's better DDP"
        lines.append(text)
    return lines


# --- Messages ----------------------------------------------------------------------------------

def messages(options):
    """The all-reduce over message sizes, with each backend."""
    runs = {backend: Run(backend, seconds,
                         lambda backend=backend: message_rows("--backend", backend))
            for backend, seconds in backends().items()}

    def figures(found):
        return [median_row(rows) for runs in found.values() for rows in zip(*runs)]
    return [Group("messages", runs, options.rounds, lambda found: message_lines(figures(found)),
                  figures)]


def message_rows(*more):
    """The rows of one run of message-sizes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        sizes = bench_runs.program(DDP).parent / "message-sizes"
        bench_runs.run_together([sizes, *more, "--metrics", path], stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def median_row(rows):
    """One row for all rounds of the same message."""
    seconds = statistics.median(row["seconds"] for row in rows)
    return {**rows[0], "seconds": seconds, "bus_bytes_per_second":
            rows[0]["bus_bytes_per_second"] * rows[0]["seconds"] / seconds}


def message_lines(rows):
    return [f"  {row['backend']:<5} {row['all_reduce']:<8} {row['bytes'] // 1024:>7} KiB "
            f"{row['seconds'] * 1e6:10.1f} us  {row['bus_bytes_per_second'] / 1e9:6.2f} GB/s of a ring's "
            f"formula; {row['sent_bytes'] / 1024:.1f} KiB sent, counted in {row['counted_in']}"
            for row in rows]


# --- Overlap -----------------------------------------------------------------------------------

# ResNet-18 over a cable of 1 Gbit/s: its 44.7 MB of gradients take about 370 ms to pass.
CABLE = "1gbit"
CABLE_RUN = ("--data", "synthetic:256:10", "--model", "resnet18", "--batch-size", "64", "--lr",
             "0.01", "--log-interval", "1000")


def overlap(options):
    """What overlap hides of a slow network's time, between two hosts."""
    return cable_group("overlap", options, DDP, {"overlap": (), "no overlap": ("--no-overlap",)})


def cable_group(part, options, stage, contenders):
    """One stage on two hosts, with the options of each contender."""
    if "resnet18" not in options.models:
        return []
    runs = {name: Run(name, 10.0, lambda more=more: cable_round(stage, *more))
            for name, more in contenders.items()}

    def figures(found):
        return {name: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
                for name, rounds in found.items()}
    return [Group(part, runs, options.rounds, lambda found: cable_lines(figures(found)), figures)]


def cable_round(stage, *more):
    """Seconds per step of two ranks on two hosts, by part."""
    return through_cable(CABLE, bench_runs.program(stage), *CABLE_RUN, *more)["per_step_seconds"]


def through_cable(rate, program, *words, ranks=1):
    """The metrics of a program with so many ranks on each of two hosts of this machine; without a rate the
    cable is as fast as it can be. NotHere where it may not make hosts."""
    cable = ["--rate", rate] * bool(rate) + ["--nproc-per-node", ranks]
    launcher = program.parents[1] / "common/launch/launch"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        path = Path(folder) / "metrics.json"
        try:
            bench_runs.run_together([ROOT / "tools/two-hosts", *cable, program, *words, "--metrics", path],
                                    stdout=subprocess.DEVNULL, stderr=errors,
                                    env={**os.environ, "LOCKSTEP_LAUNCHER": str(launcher)})
        except subprocess.CalledProcessError as error:
            if error.returncode != SKIPPED:
                raise
            errors.seek(0)
            raise NotHere(errors.read().strip()) from error
        return json.loads(path.read_text())


def cable_lines(figures):
    lines = []
    for name, parts in figures.items():
        hidden = 1 - parts["exposed_communication"] / parts["communication"]
        lines.append(f"  {name:<11} compute {parts['compute'] * 1e3:.0f} ms, communication "
                     f"{parts['communication'] * 1e3:.0f}, exposed "
                     f"{parts['exposed_communication'] * 1e3:.0f}: "
                     f"{100 * max(0, hidden):.0f} % hidden")
    return lines


# --- Sharding ------------------------------------------------------------------------------------

SHARDED = "06-fully-sharded"
WAYS = ("none", "optimizer", "gradients", "parameters")
BATCH = 64
# Network, width, steps of a round, whether PyTorch has it too. Activations take the memory of the
# first, parameters that of the second: five linear layers, four of 2048 features.
SHARDING_WORK = (("resnet18", 64, 6, True), ("mlp", 512, 12, False))
# At most so many times stage 04's step, on ResNet-18.
LIMITS = {"optimizer": 1.05, "parameters": 1.25}
ADAMW = ("--optimizer", "adamw", "--order", "sampler")
PREFETCH = {"prefetch 0": ("--no-sync-bn", "--prefetch", "0"), "prefetch 1": ("--no-sync-bn",),
            "prefetch 3": ("--no-sync-bn", "--prefetch", "3"),
            "kept whole": ("--no-sync-bn", "--reshard-after-forward", "no")}


def sharding(options):
    """Two ranks of one thread with AdamW; PyTorch's FSDP2 over Gloo where --python has it."""
    return [sharding_group(options, *work) for work in SHARDING_WORK if options.model in (None, work[0])]


def sharding_group(options, model, width, steps, in_torch):
    seconds = expected(model, BATCH, steps, 2, width)

    def ours(stage, *more):
        return lambda: bench_runs.run_ours(model, BATCH, 1, steps, "--width", width, *ADAMW, *more,
                                           stage=stage, devices="cpu:0,cpu:1")
    runs = {"DDP, stage 04": Run("DDP", seconds, ours(DDP))}
    for way in WAYS:
        # Its batch normalisation sees a rank's part only, as that of the others does.
        runs[way] = Run(f"--shard {way}", seconds, ours(SHARDED, "--shard", way, "--no-sync-bn"))
    if options.torch and in_torch:
        runs["PyTorch FSDP2"] = Run("PyTorch FSDP2", expected(model, BATCH, steps, 2, torch=True),
                                    lambda: torch_round(options.python, model, steps))

    def figures(found):
        return {"model": model, "width": width, "batch_size": BATCH, "step_seconds": medians(found),
                "peak_memory_bytes": {way: results[-1]["peak_memory_bytes"][0]
                                      for way, results in found.items() if "FSDP2" not in way},
                "all_rounds": all_rounds(found)}
    return Group("sharding", runs, options.rounds, lambda found: sharding_lines(figures(found)), figures)


def torch_round(python, model, steps):
    try:
        return bench_runs.run_torch(python, model, BATCH, 1, steps, False, ranks=2, fsdp=True)
    except subprocess.CalledProcessError as error:
        raise NotHere("PyTorch's fully_shard() does not run here") from error


def sharding_lines(result):
    step = result["step_seconds"]
    ddp, rival = step["DDP, stage 04"], step.get("PyTorch FSDP2")
    rows = [f"{result['model']}, width {result['width']}, global batch {result['batch_size']}, "
            "AdamW, 2 ranks:"]
    for name, seconds in step.items():
        text = f"  {name:<14} {seconds * 1e3:9.2f} ms/step  {seconds / ddp:5.2f} times DDP's"
        if name in LIMITS and result["model"] == "resnet18":
            text += f" ({'at most' if seconds <= LIMITS[name] * ddp else 'more than'} {LIMITS[name]:.2f})"
        if name in result["peak_memory_bytes"]:
            text += f"; peak {result['peak_memory_bytes'][name] / 2**20:.1f} MiB"
        if rival and name in WAYS:
            text += f"; {rival / seconds:.2f} times as fast as PyTorch's FSDP2"
        rows.append(text)
    return rows


def prefetch(options):
    """What fetching ahead hides of the gathers, between two hosts."""
    return cable_group("prefetch", options, SHARDED, PREFETCH)
