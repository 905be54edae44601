"""Stage 04 in `lockstep bench`: one process per device, next to one process and PyTorch's DDP;
all-reduces by message size; and what overlap hides of a slow network."""

import collections
import concurrent.futures
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import bench_runs
from bench_runs import ROOT


DDP = "04-ddp"
# Network, global batch, steps of a round.
DDP_WORK = (("seed", 64, 400), ("seed", 256, 150), ("resnet18", 64, 4))
BACKENDS = ("gloo", "tcp")


def run_apart(model, batch, steps):
    """Two processes that share nothing but the machine, each with half of the batch: the time that
    two ranks would take if communication cost nothing. Each step counts the slower process's
    time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: bench_runs.run_ours(model, batch // 2, 1, steps, "--order",
                                                           "sampler"), range(2)))
    return {"step_seconds": [max(both) for both in zip(*(run["step_seconds"] for run in runs))]}


def measure_ranks(model, batch, steps, options, has_torch):
    """Two ranks of one thread next to one process, and next to PyTorch's DDP over Gloo: medians of
    alternating rounds, with the same global batch everywhere."""
    def ours(stage, *more, devices="cpu:0,cpu:1"):
        return lambda: bench_runs.run_ours(model, batch, 1, steps, "--order", "sampler", *more,
                                           stage=stage, devices=devices)

    contenders = {"one process": ours(bench_runs.STAGE, devices="cpu:0"),
                  "2 processes apart": lambda: run_apart(model, batch, steps),
                  "2 devices, stage 02": ours("02-dataparallel")}
    for backend in BACKENDS:
        contenders[f"2 ranks, {backend}"] = ours(DDP, "--backend", backend)
        contenders[f"2 ranks, {backend}, --no-bind"] = ours(DDP, "--backend", backend, "--no-bind")
    if has_torch:
        for name, channels_last in (("PyTorch DDP", False), ("PyTorch DDP, channels_last", True)):
            contenders[name] = lambda last=channels_last: bench_runs.run_torch(
                options.python, model, batch, 1, steps, last, ranks=2)
    times, per_step = collections.defaultdict(list), {}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            found = run()
            times[name].append(bench_runs.round_time(found["step_seconds"]))
            if "exposed_communication" in found.get("per_step_seconds", {}):
                per_step[name] = {**found["per_step_seconds"], **found["bytes_per_step"]}
    return {"model": model, "batch_size": batch, "all_rounds": times, "per_step": per_step,
            "step_seconds": {name: statistics.median(rounds) for name, rounds in times.items()}}


def print_ranks(result):
    step = result["step_seconds"]
    print(f"{result['model']}, global batch {result['batch_size']}:")
    for name, seconds in step.items():
        text = (f"  {name:<28} {seconds * 1e3:9.2f} ms/step  "
                f"{step['one process'] / seconds:5.2f} times one process")
        if name in result["per_step"]:
            parts = result["per_step"][name]
            text += (f"; communication {parts['communication'] * 1e3:.2f} ms, exposed "
                     f"{parts['exposed_communication'] * 1e3:.2f}; {parts['sent']:.0f} bytes sent")
            rivals = [other for key, other in step.items() if key.startswith("PyTorch")]
            if rivals:
                text += f"; {min(rivals) / seconds:.2f} times PyTorch's better DDP"
        print(text, flush=True)


def message_sizes(rounds):
    """The rows of the all-reduce over message sizes, medians over `rounds` runs of each backend."""
    rows = []
    for backend in BACKENDS:
        runs = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "rows.json"
                subprocess.run([bench_runs.program(DDP).parent / "message-sizes", "--backend", backend,
                                "--metrics", path], check=True, stdout=subprocess.DEVNULL)
                runs.append(json.loads(path.read_text()))
        for same in zip(*runs):
            seconds = statistics.median(row["seconds"] for row in same)
            rows.append({**same[0], "seconds": seconds, "bus_bytes_per_second":
                         same[0]["bus_bytes_per_second"] * same[0]["seconds"] / seconds})
    return rows


def print_message_sizes(rows):
    print("\nAll-reduce of two ranks by message size, microseconds:")
    for row in rows:
        print(f"  {row['backend']:<5} {row['all_reduce']:<8} {row['bytes'] // 1024:>7} KiB "
              f"{row['seconds'] * 1e6:10.1f} us  {row['bus_bytes_per_second'] / 1e9:6.2f} GB/s",
              flush=True)


# ResNet-18 over a cable of 1 Gbit/s: its 44.7 MB of gradients take about 370 ms to pass.
CABLE = "1gbit"
OVERLAP_RUN = ("--data", "synthetic:256:10", "--model", "resnet18", "--batch-size", "64", "--lr",
               "0.01", "--log-interval", "1000")


def overlap_round(*more):
    """Seconds per step of two ranks on two hosts, by part; or a text with the reason, if the
    machine does not permit it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.json"
        done = subprocess.run([ROOT / "tools/two-hosts", "--rate", CABLE, bench_runs.program(DDP),
                               *OVERLAP_RUN, *more, "--metrics", path],
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode == 77:
            return done.stderr.strip()
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, done.args)
        return json.loads(path.read_text())["per_step_seconds"]


def measure_overlap(rounds):
    print(f"\nResNet-18, batch 64, two ranks on two hosts joined by {CABLE}:")
    found = {}
    for name, more in (("overlap", ()), ("no overlap", ("--no-overlap",))):
        all_rounds = [overlap_round(*more) for _ in range(rounds)]
        if isinstance(all_rounds[0], str):
            print(f"  not measured: {all_rounds[0]}", flush=True)
            return {}
        parts = {key: statistics.median(each[key] for each in all_rounds) for key in all_rounds[0]}
        hidden = 1 - parts["exposed_communication"] / parts["communication"]
        print(f"  {name:<11} compute {parts['compute'] * 1e3:.0f} ms, communication "
              f"{parts['communication'] * 1e3:.0f}, exposed "
              f"{parts['exposed_communication'] * 1e3:.0f}: {100 * max(0, hidden):.0f} % hidden",
              flush=True)
        found[name] = parts
    return found


def measure_process_group(models, options, has_torch):
    print("\nTwo ranks, a process each of one thread:", flush=True)
    results = []
    for model, batch, steps in DDP_WORK:
        if model in models:
            results.append(measure_ranks(model, batch, steps, options, has_torch))
            print_ranks(results[-1])
    rows = message_sizes(options.rounds)
    print_message_sizes(rows)
    hidden = measure_overlap(options.rounds) if "resnet18" in models else {}
    return {"training": results, "message_sizes": rows, "overlap": hidden}
