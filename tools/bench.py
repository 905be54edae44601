#!/usr/bin/env python3
"""Measures the stages: `./lockstep bench [--quick] [--model seed|resnet18] [--json FILE]`.

Stage 01, for each network, number of compute threads and batch size: the median step time of
several rounds, samples per second and GFLOP/s; next to PyTorch, in alternating rounds, if --python
has torch; where a step's time goes, and how long a start takes. Then the stages on several devices,
next to stage 01 on one, in alternating rounds; processes, next to one process and PyTorch's DDP,
and all-reduces by message size; pipelines: their bubbles with equal layers, their times and memory
with ResNet-18. Machines are shared and noisy: compare the ratios of one run, not figures of
different days.
"""

import argparse
import collections
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import bench_pipelines
import bench_ranks
import bench_runs
from bench_runs import ROOT, STAGE
from stages import all_stages, label

EPOCH_SAMPLES = 60000  # of Fashion-MNIST, for seconds per epoch
MODELS = ("seed", "resnet18")


def machine():
    """The machine on which these figures were measured."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def steps_of(model, batch):
    """Steps per round: enough that a round lasts a second or more."""
    return 300 * 64 // batch if model == "seed" else max(3, 4 * 64 // batch)


def torch_version(python):
    """The version of torch that `python` has, or an empty string."""
    try:
        result = subprocess.run([python, "-c", "import torch; print(torch.__version__)"],
                                capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def measure(model, batch, threads, options, has_torch):
    """One line of the table: rounds of every contender in turn."""
    steps = steps_of(model, batch)
    times, flops = collections.defaultdict(list), 0.0
    backend = ""
    for _ in range(options.rounds):
        ours = bench_runs.run_ours(model, batch, threads, steps)
        times["ours"].append(bench_runs.round_time(ours["step_seconds"]))
        backend = ours["backend"]
        flops = ours["training_flops"] / ours["steps"]
        if has_torch:
            for name, channels_last in (("torch", False), ("torch channels_last", True)):
                result = bench_runs.run_torch(options.python, model, batch, threads, steps, channels_last)
                times[name].append(bench_runs.round_time(result["step_seconds"]))
    return {"model": model, "batch_size": batch, "threads": threads, "world_size": 1,
            "backend": backend, "rounds": options.rounds, "flops_per_step": flops,
            "step_seconds": {name: statistics.median(rounds) for name, rounds in times.items()},
            "all_rounds": times}


def print_line(result):
    step = result["step_seconds"]
    ours = step["ours"]
    text = (f"{result['model']:<9} W {result['world_size']}  batch {result['batch_size']:>4}  "
            f"threads {result['threads']}  {ours * 1e3:9.2f} ms/step  "
            f"{result['batch_size'] / ours:9.0f} samples/s  "
            f"{EPOCH_SAMPLES / result['batch_size'] * ours:8.1f} s/epoch  "
            f"{result['flops_per_step'] / ours / 1e9:6.1f} GFLOP/s")
    torch = {name: seconds for name, seconds in step.items() if name != "ours"}
    if torch:
        best = min(torch.values())
        text += (f"   PyTorch {torch['torch'] * 1e3:.2f}, channels_last "
                 f"{torch['torch channels_last'] * 1e3:.2f} ms: {best / ours:.2f} times as fast "
                 "as the better")
    print(text, flush=True)


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


def print_layers(model, operations, rows=14):
    total = sum(operations.values())
    print(f"\nWhere a step of {model} goes (batch 64, 1 thread): {total:.2f} ms, the largest:")
    ranked = sorted(operations.items(), key=lambda item: -item[1])
    for (layer, operation), time in ranked[:rows]:
        print(f"  {layer:<18} {operation:<28} {time:9.3f} ms  {100 * time / total:5.1f} %")
    rest = sum(time for _, time in ranked[rows:])
    print(f"  {'others':<47} {rest:9.3f} ms  {100 * rest / total:5.1f} %")


def start_up(options):
    """Start of a real run: seconds to its first step and peak memory, medians."""
    runs = [bench_runs.run_stage(STAGE, "--max-steps", 20, "--devices", "cpu:0", "--data", options.data)
            for _ in range(options.rounds)]
    seconds = statistics.median(run["startup_seconds"] for run in runs)
    memory = statistics.median(run["peak_rss_bytes"] for run in runs)
    return {"startup_seconds": seconds, "peak_rss_bytes": memory}


# Stage 01 on one device against the other stages on several: network, its options, batch, steps.
SCALING = (("seed", (), 64, 200), ("resnet18", ("--width", 16), 128, 6))
WORLDS = (2, 4)


def other_stages():
    return [stage for stage in all_stages() if stage != STAGE]


def measure_scaling(model, more, batch, steps, rounds):
    """Median step times of stage 01 on one device of one thread, and of every other stage on each
    number of such devices, in alternating rounds."""
    contenders = {(STAGE, 1): "cpu:0"}
    for stage in other_stages():
        for world in WORLDS:
            contenders[stage, world] = ",".join(f"cpu:{rank}" for rank in range(world))
    times = collections.defaultdict(list)
    for _ in range(rounds):
        for (stage, world), devices in contenders.items():
            metrics = bench_runs.run_ours(model, batch, 1, steps, *more, stage=stage, devices=devices)
            times[stage, world].append(bench_runs.round_time(metrics["step_seconds"]))
    one = statistics.median(times[STAGE, 1])
    return [{"model": " ".join(map(str, (model, *more))), "batch_size": batch, "stage": stage,
             "world_size": world, "rounds": rounds, "step_seconds": statistics.median(all_rounds),
             "speedup": one / statistics.median(all_rounds), "all_rounds": all_rounds}
            for (stage, world), all_rounds in times.items()]


def print_scaling(results):
    for row in results:
        print(f"{row['model']:<20} {label(row['stage']):<18} W {row['world_size']}  batch "
              f"{row['batch_size']:>4}  {row['step_seconds'] * 1e3:9.2f} ms/step  "
              f"{row['batch_size'] / row['step_seconds']:9.0f} samples/s  {row['speedup']:5.2f} times "
              f"one device, efficiency {100 * row['speedup'] / row['world_size']:.0f} %", flush=True)


def parse_options():
    parser = argparse.ArgumentParser(prog="lockstep bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="batch 64 and one thread only")
    parser.add_argument("--model", choices=MODELS, help="one network instead of both")
    parser.add_argument("--batch", type=int, help="one batch size instead of 64 and 256")
    parser.add_argument("--threads", type=int, help="one number of threads instead of 1 and 2")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 (default)")
    parser.add_argument("--data", default="fashion-mnist", help="for the start-up measurement")
    parser.add_argument("--python", default="python3", help="a Python that may have torch")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error(f"--rounds {options.rounds}: a median needs 5 or more")
    if options.json and not Path(options.json).resolve().parent.is_dir():
        parser.error(f"--json {options.json}: no such folder; create it first")
    return options


def main():
    options = parse_options()
    torch = torch_version(options.python)
    print(f"{machine()}, {datetime.date.today()}; medians of {options.rounds} rounds; "
          + (f"PyTorch {torch}, alternating" if torch else
             f"no PyTorch in {options.python} (--python names another)"), flush=True)
    models = (options.model,) if options.model else MODELS
    batches = (options.batch,) if options.batch else (64,) if options.quick else (64, 256)
    threads = (options.threads,) if options.threads else (1,) if options.quick else (1, 2)
    results = []
    for model in models:
        for count in threads:
            for batch in batches:
                results.append(measure(model, batch, count, options, bool(torch)))
                if len(results) == 1:
                    print(f"backend: {results[0]['backend']}", flush=True)
                print_line(results[-1])
    print("\nStages on several devices of one thread, beside stage 01 on one:", flush=True)
    scaling = []
    for model, more, batch, steps in SCALING:
        if model in models:
            scaling.append(measure_scaling(model, more, batch, steps, options.rounds))
            print_scaling(scaling[-1])
    ranks = bench_ranks.measure_process_group(models, options, bool(torch))
    pipelines = bench_pipelines.measure_pipelines(models, options.rounds)
    layers = {model: layer_times(model) for model in models}
    for model in models:
        print_layers(model, layers[model])
    start = start_up(options)
    print(f"\nStart to first step {start['startup_seconds']:.2f} s, peak memory of the process "
          f"{start['peak_rss_bytes'] / 2**20:.0f} MiB (seed, {options.data})")
    if options.json:
        flat = {model: {f"{layer} {operation}": time for (layer, operation), time in ops.items()}
                for model, ops in layers.items()}
        Path(options.json).write_text(json.dumps(
            {"machine": machine(), "date": str(datetime.date.today()), "torch": torch,
             "results": results, "scaling": sum(scaling, []),
             "process_group": ranks, "pipelines": pipelines, "layer_milliseconds": flat,
             "start": start}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"bench: {' '.join(map(str, error.cmd))} ended with status {error.returncode}")
    except KeyboardInterrupt:
        sys.exit(130)
