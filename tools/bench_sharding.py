"""Stage 06 in `lockstep bench`: what sharing out costs a step, beside stage 04's DDP and PyTorch's FSDP2."""

import subprocess

import bench_runs
from bench_plan import Group, NotHere, Run, all_rounds, medians
from bench_runs import expected

SHARDED, DDP = "06-fully-sharded", "04-ddp"
WAYS = ("none", "optimizer", "gradients", "parameters")
MODEL, BATCH, STEPS = "resnet18", 64, 6
# At most so many times stage 04's step.
LIMITS = {"optimizer": 1.05, "parameters": 1.25}
ADAMW = ("--optimizer", "adamw", "--order", "sampler")


def sharding(options):
    """Two ranks of one thread with AdamW; PyTorch's FSDP2 over Gloo where --python has it."""
    if MODEL not in options.models:
        return []
    seconds = expected(MODEL, BATCH, STEPS, 2)

    def ours(stage, *more):
        return lambda: bench_runs.run_ours(MODEL, BATCH, 1, STEPS, *ADAMW, *more, stage=stage,
                                           devices="cpu:0,cpu:1")
    runs = {"DDP, stage 04": Run("DDP", seconds, ours(DDP))}
    for way in WAYS:
        # Its batch normalisation sees a rank's part only, as that of the others does.
        runs[way] = Run(f"--shard {way}", seconds, ours(SHARDED, "--shard", way, "--no-sync-bn"))
    if options.torch:
        runs["PyTorch FSDP2"] = Run("PyTorch FSDP2", expected(MODEL, BATCH, STEPS, 2, torch=True),
                                    lambda: torch_round(options.python))

    def figures(found):
        return {"model": MODEL, "batch_size": BATCH, "step_seconds": medians(found),
                "peak_memory_bytes": {way: found[way][-1]["peak_memory_bytes"][0]
                                      for way in WAYS if way in found},
                "all_rounds": all_rounds(found)}
    return [Group("sharding", runs, options.rounds, lambda found: lines(figures(found)), figures)]


def torch_round(python):
    try:
        return bench_runs.run_torch(python, MODEL, BATCH, 1, STEPS, False, ranks=2, fsdp=True)
    except subprocess.CalledProcessError as error:
        raise NotHere("PyTorch's fully_shard() does not run here") from error


def lines(result):
    step = result["step_seconds"]
    ddp, rival = step["DDP, stage 04"], step.get("PyTorch FSDP2")
    rows = [f"{result['model']}, global batch {result['batch_size']}, AdamW, 2 ranks:"]
    for name, seconds in step.items():
        text = f"  {name:<14} {seconds * 1e3:9.2f} ms/step  {seconds / ddp:5.2f} times DDP's"
        if name in LIMITS:
            text += f" (at most {LIMITS[name]:.2f})"
        if name in result["peak_memory_bytes"]:
            text += f"; peak {result['peak_memory_bytes'][name] / 2**20:.1f} MiB"
        if rival and name in WAYS:
            text += f"; {rival / seconds:.2f} times as fast as PyTorch's FSDP2"
        rows.append(text)
    return rows
