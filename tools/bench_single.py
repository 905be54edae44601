"""Stage 01 in `lockstep bench`: samples per second beside PyTorch, where a step's time goes, and
how long a start takes."""

import collections
import json
import statistics
import tempfile
from pathlib import Path

import bench_runs
from bench_rounds import Group, Run, all_rounds, medians
from bench_runs import STAGE, expected

EPOCH_SAMPLES = 60000  # of Fashion-MNIST, for seconds per epoch
LAYER_ROWS = 14


def steps_of(model, batch):
    """Steps per round: enough that a round lasts a second or more."""
    return 300 * 64 // batch if model == "seed" else max(3, 4 * 64 // batch)


# --- One device --------------------------------------------------------------------------------

def one_device(options):
    """A line for each network, number of threads and batch size."""
    batches = (options.batch,) if options.batch else (64, 256) if options.thorough else (64,)
    threads = (options.threads,) if options.threads else (1, 2) if options.thorough else (1,)
    return [device_group(model, batch, count, options)
            for model in options.models for count in threads for batch in batches]


def device_group(model, batch, threads, options):
    steps = steps_of(model, batch)
    what = f"{model}, batch {batch}, threads {threads}"
    runs = {"ours": Run(what, expected(model, batch, steps),
                        lambda: bench_runs.run_ours(model, batch, threads, steps))}
    if options.torch:
        for name, last in (("PyTorch", False), ("PyTorch channels_last", True)):
            runs[name] = Run(f"{what}, {name}", expected(model, batch, steps, torch=True),
                             lambda last=last: bench_runs.run_torch(options.python, model, batch,
                                                                    threads, steps, last))

    def figures(found):
        first = found["ours"][0]
        return {"model": model, "batch_size": batch, "threads": threads, "world_size": 1,
                "backend": first["backend"], "step_seconds": medians(found),
                "flops_per_step": first["training_flops"] / first["steps"],
                "all_rounds": all_rounds(found)}
    return Group("one-device", runs, options.rounds, lambda found: [device_line(figures(found))],
                 figures)


def device_line(result):
    step = result["step_seconds"]
    ours = step["ours"]
    text = (f"{result['model']:<9} W {result['world_size']}  batch {result['batch_size']:>4}  "
            f"threads {result['threads']}  {ours * 1e3:9.2f} ms/step  "
            f"{result['batch_size'] / ours:9.0f} samples/s  "
            f"an epoch of {EPOCH_SAMPLES} about {EPOCH_SAMPLES / result['batch_size'] * ours:.1f} s  "
            f"{result['flops_per_step'] / ours / 1e9:6.1f} GFLOP/s (operations by shapes)  "
            f"{result['backend']}")
    rivals = {name: seconds for name, seconds in step.items() if name != "ours"}
    if rivals:
        text += ("   " + ", ".join(f"{name} {time * 1e3:.2f}" for name, time in rivals.items())
                 + f" ms: {min(rivals.values()) / ours:.2f} times as fast as the better")
    return text


# --- Where a step's time goes ------------------------------------------------------------------

def layers(options):
    """A short traced run of each network."""
    return [Group("layers", {"trace": Run(model, expected(model, 64, steps_of(model, 64)),
                                          lambda model=model: layer_times(model))}, 1,
                  lambda found, model=model: layer_lines(model, found["trace"][0]),
                  lambda found, model=model: {"model": model, "layer_milliseconds": {
                      " ".join(key): time for key, time in found["trace"][0].items()}})
            for model in options.models]


def layer_times(model):
    """Milliseconds of one step by (layer, operation), from the trace of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        steps = steps_of(model, 64)
        bench_runs.run_ours(model, 64, 1, steps, "--trace", trace)
        events = json.loads(trace.read_text())["traceEvents"]
    slices = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["args"]["layer"] or "(step)", event["name"]].append(event["dur"] / 1e3)
    # A run has one evaluation at its end; operations of training appear at least once per step.
    return {key: statistics.median(times) * round(len(times) / steps)
            for key, times in slices.items() if len(times) >= steps}


def layer_lines(model, operations):
    total = sum(operations.values())
    ranked = sorted(operations.items(), key=lambda item: -item[1])
    rest = sum(time for _, time in ranked[LAYER_ROWS:])
    return [f"A step of {model}: {total:.2f} ms, the largest:",
            *(f"  {layer:<18} {operation:<28} {time:9.3f} ms  {100 * time / total:5.1f} %"
              for (layer, operation), time in ranked[:LAYER_ROWS]),
            f"  {'others':<47} {rest:9.3f} ms  {100 * rest / total:5.1f} %"]


# --- Start -------------------------------------------------------------------------------------

def start(options):
    """A real run's start: seconds to its first step, and peak memory."""
    words = ("--max-steps", 20, "--devices", "cpu:0", "--data", options.data)
    run = Run(f"seed, {options.data}", 1.0, lambda: bench_runs.run_stages((STAGE, words))[0])

    def figures(found):
        return {key: statistics.median(metrics[key] for metrics in found["start"])
                for key in ("startup_seconds", "peak_rss_bytes")}

    def lines(found):
        middle = figures(found)
        return [f"Start to first step {middle['startup_seconds']:.2f} s, peak memory of the "
                f"process {middle['peak_rss_bytes'] / 2**20:.0f} MiB (seed, {options.data})"]
    return [Group("start", {"start": run}, options.rounds, lines, figures)]
