"""Stage 03's pipelines in `lockstep bench`: bubbles with equal layers, next to the formula; times
and memory with ResNet-18."""

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import bench_runs
from bench_rounds import Group, Run
from bench_runs import expected

# Pipelines of equal layers: those that compute need a core each, the others only sleep. Each kind
# is one run of the program, of so many seconds.
BUBBLES = (("computing", 20, ("--stages", "1,2", "--devices", "cpu:0,cpu:1")),
           ("sleeping", 20, ("--stages", "4", "--devices", "cpu:0,cpu:1,cpu:2,cpu:3", "--sleep", 16,
                             "--steps", 5)))
PIPELINE = "03-model-split"
# Pipelines of ResNet-18: stages, schedule, micro-batches.
FEW = ((1, "naive", 1), (1, "1f1b", 8), (2, "naive", 1), (2, "gpipe", 8), (2, "1f1b", 8),
       (2, "interleaved", 8))
WIDTH, BATCH, STEPS = 16, 128, 6


def every_pipeline():
    """Stages, or devices of two each, every schedule, and the micro-batches that it can have."""
    for stages in (1, 2, 4):
        yield stages, "naive", 1
        for schedule in ("gpipe", "1f1b", "interleaved"):
            for m in (1, 2, 4, 8, 16):
                if schedule != "interleaved" or stages > 1 and m % stages == 0:
                    yield stages, schedule, m


def median_row(rows):
    """One row for all rounds of the same pipeline."""
    row = {key: rows[0][key] for key in ("stages", "schedule", "micro_batches")}
    row["predicted_bubble"] = rows[0]["bubble"]["predicted"]
    row["bubble"] = statistics.median(each["bubble"]["measured"] for each in rows)
    row["step_seconds"] = statistics.median(each["step_seconds"] for each in rows)
    row["peak_memory_bytes"] = rows[0]["peak_memory_bytes"]
    return row


def row_lines(rows):
    return [f"  {row['stages']} stages  {row['schedule']:<11}  "
            f"{row['micro_batches']:>2} micro-batches  "
            f"{row['step_seconds'] * 1e3:8.2f} ms/step  bubble {100 * row['bubble']:5.1f} %, "
            f"formula {100 * row['predicted_bubble']:5.1f} %  "
            + ", ".join(f"{size / 2**20:.1f}" for size in row["peak_memory_bytes"]) + " MiB"
            for row in rows]


# --- Equal layers ------------------------------------------------------------------------------

def bubbles(options):
    return [bubble_group(*kind, options.rounds) for kind in BUBBLES]


def bubble_group(kind, seconds, more, rounds):
    """One run measures all pipelines of a kind."""
    def figures(found):
        return {"layers": kind, "rows": [median_row(rows) for rows in zip(*found["rows"])]}

    def lines(found):
        return [f"Eight equal {kind} layers, batch 64:", *row_lines(figures(found)["rows"])]
    runs = {"rows": Run(f"{kind} layers", seconds, lambda: bubble_rows(more))}
    return Group("bubbles", runs, rounds, lines, figures)


def bubble_rows(more):
    """The rows of one run of the program of equal layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        bubble = bench_runs.program(PIPELINE).parent / "bubble"
        bench_runs.run_together([bubble, *more, "--metrics", path], stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


# --- ResNet-18 ---------------------------------------------------------------------------------

def pipelines(options):
    """Some of the schedules; --thorough: all."""
    if "resnet18" not in options.models:
        return []
    runs = {how: Run(f"{how[0]} stages, {how[1]}, {how[2]} micro-batches",
                     expected("resnet18", BATCH, STEPS, how[0], WIDTH),
                     lambda how=how: resnet_round(*how))
            for how in (every_pipeline() if options.thorough else FEW)}

    def rows(found):
        return [median_row(each) for each in found.values()]
    return [Group("pipelines", runs, options.rounds, lambda found: row_lines(rows(found)), rows)]


def resnet_round(stages, schedule, micro_batches):
    """A row like that of equal layers."""
    devices = ",".join(f"cpu:{rank}" for rank in range(stages))
    metrics = bench_runs.run_ours("resnet18", BATCH, 1, STEPS, "--width", WIDTH,
                                  "--schedule", schedule, "--micro-batches", micro_batches,
                                  stage=PIPELINE, devices=devices)
    return {"stages": stages, "schedule": schedule, "micro_batches": micro_batches,
            "bubble": metrics["bubble"], "step_seconds": metrics["seconds"],
            "peak_memory_bytes": metrics["peak_memory_bytes"]}
