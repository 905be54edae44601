"""Stage 06 in `lockstep bench`: what sharing out costs a step, beside stage 04's DDP and PyTorch's FSDP2."""

import subprocess

import bench_ranks
import bench_runs
from bench_plan import Group, NotHere, Run, all_rounds, medians
from bench_runs import expected

SHARDED, DDP = "06-fully-sharded", "04-ddp"
WAYS = ("none", "optimizer", "gradients", "parameters")
BATCH = 64
# Network, width, steps of a round, whether PyTorch has it too. Activations take the memory of the
# first, parameters that of the second: five linear layers, four of 2048 features.
WORK = (("resnet18", 64, 6, True), ("mlp", 512, 12, False))
# At most so many times stage 04's step, on ResNet-18.
LIMITS = {"optimizer": 1.05, "parameters": 1.25}
ADAMW = ("--optimizer", "adamw", "--order", "sampler")
PREFETCH = {"prefetch 0": ("--no-sync-bn", "--prefetch", "0"), "prefetch 1": ("--no-sync-bn",),
            "prefetch 3": ("--no-sync-bn", "--prefetch", "3"),
            "kept whole": ("--no-sync-bn", "--reshard-after-forward", "no")}


def sharding(options):
    """Two ranks of one thread with AdamW; PyTorch's FSDP2 over Gloo where --python has it."""
    return [group_of(options, *work) for work in WORK if options.model in (None, work[0])]


def group_of(options, model, width, steps, in_torch):
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
    return Group("sharding", runs, options.rounds, lambda found: lines(figures(found)), figures)


def torch_round(python, model, steps):
    try:
        return bench_runs.run_torch(python, model, BATCH, 1, steps, False, ranks=2, fsdp=True)
    except subprocess.CalledProcessError as error:
        raise NotHere("PyTorch's fully_shard() does not run here") from error


def lines(result):
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
    return bench_ranks.cable_group("prefetch", options, SHARDED, PREFETCH)
