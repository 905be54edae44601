"""Stage 03's pipelines in `lockstep bench`: bubbles with equal layers, next to the formula; times
and memory with ResNet-18."""

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import bench_runs

# Pipelines of equal layers: those that compute need a core each, the others only sleep.
BUBBLES = (("computing", ("--stages", "1,2", "--devices", "cpu:0,cpu:1")),
           ("sleeping", ("--stages", "4", "--devices", "cpu:0,cpu:1,cpu:2,cpu:3", "--sleep", 16,
                         "--steps", 5)))
PIPELINE = "03-model-split"
PIPELINE_STAGES = (1, 2, 4)
SCHEDULES = (("naive", 1), *((kind, m) for kind in ("gpipe", "1f1b") for m in (1, 2, 4, 8, 16)))


def bubble_rounds(more, rounds):
    """The rows of `rounds` runs of the program of equal layers, each with the medians."""
    runs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            bubble = bench_runs.program(PIPELINE).parent / "bubble"
            subprocess.run([bubble, *map(str, more), "--metrics", path],
                           check=True, stdout=subprocess.DEVNULL)
            runs.append(json.loads(path.read_text()))
    return [median_row(rows) for rows in zip(*runs)]


def median_row(rows):
    """One row for all rounds of the same pipeline."""
    row = {key: rows[0][key] for key in ("stages", "schedule", "micro_batches")}
    row["predicted_bubble"] = rows[0]["bubble"]["predicted"]
    row["bubble"] = statistics.median(each["bubble"]["measured"] for each in rows)
    row["step_seconds"] = statistics.median(each["step_seconds"] for each in rows)
    row["peak_memory_bytes"] = rows[0]["peak_memory_bytes"]
    return row


def resnet_round(stages, schedule, micro_batches):
    """ResNet-18 (width 16, batch 128) in a pipeline: a row like that of equal layers."""
    devices = ",".join(f"cpu:{rank}" for rank in range(stages))
    metrics = bench_runs.run_ours("resnet18", 128, 1, 6, "--width", 16, "--schedule", schedule,
                                  "--micro-batches", micro_batches, stage=PIPELINE, devices=devices)
    return {"stages": stages, "schedule": schedule, "micro_batches": micro_batches,
            "bubble": metrics["bubble"],
            "step_seconds": bench_runs.round_time(metrics["step_seconds"]),
            "peak_memory_bytes": metrics["peak_memory_bytes"]}


def resnet_rounds(rounds):
    runs = [[resnet_round(stages, *how) for stages in PIPELINE_STAGES for how in SCHEDULES]
            for _ in range(rounds)]
    return [median_row(rows) for rows in zip(*runs)]


def print_pipelines(title, rows):
    print(f"\n{title}:")
    for row in rows:
        memory = ", ".join(f"{size / 2**20:.1f}" for size in row["peak_memory_bytes"])
        print(f"  {row['stages']} stages  {row['schedule']:<5}  "
              f"{row['micro_batches']:>2} micro-batches  "
              f"{row['step_seconds'] * 1e3:8.2f} ms/step  bubble {100 * row['bubble']:5.1f} %, "
              f"formula {100 * row['predicted_bubble']:5.1f} %  {memory} MiB", flush=True)


def measure_pipelines(models, rounds):
    """Prints and returns the rows, by the kind of layers in the pipelines."""
    found = {}
    for kind, more in BUBBLES:
        found[kind] = bubble_rounds(more, rounds)
        print_pipelines(f"Pipelines of eight equal {kind} layers, batch 64", found[kind])
    if "resnet18" in models:
        found["resnet18"] = resnet_rounds(rounds)
        print_pipelines("Pipelines of ResNet-18, width 16, batch 128", found["resnet18"])
    return found
