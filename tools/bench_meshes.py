"""Stage 07 in `lockstep bench`: four ranks as meshes, beside stages 04 and 06 and beside the same messages by
hand; and what it costs that all axes' messages have one stream, on simulated devices."""

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import axis_queues
import bench_ranks
import bench_runs
from bench_rounds import Group, Run, all_rounds
from bench_runs import expected

MESH = "07-mesh"
BY_HAND = "mesh-messages"
APART = "4 processes apart"
ADAMW = ("--optimizer", "adamw", "--order", "sampler")
RANKS = 4
BATCH = 64
MICRO_BATCHES = 4  # of a pipeline
MESHES = ("data=2,shard=2", "data=2,tensor=2", "shard=2,tensor=2", "data=2,pipeline=2")
# Network, width, steps of a round on one host, between two, and by hand.
WORK = (("resnet18", 16, 30, 10, 30), ("mlp", 512, 12, 4, 12))
CABLE = "1gbit"
CABLE_SECONDS = 5.0  # of a run's messages on it
HOSTS = {"one host": None, "two hosts": "", f"two hosts, {CABLE}": CABLE}  # the cable's rate


def path_of_program(name):
    """A stage, or the bare loop that sends its messages."""
    return bench_runs.program(MESH).parent / BY_HAND if name == BY_HAND else bench_runs.program(name)


def options_of(mesh):
    return ("--mesh", mesh, *(("--accumulate", MICRO_BATCHES) if "pipeline" in mesh else ()), "--no-sync-bn")


def meshes(options):
    """Four ranks of one thread. Batch normalisation sees a rank's part only, in all of them. A step should
    take no longer than its computing without messages (processes apart) and its messages without computing
    (by hand), one after the other. Layers that `tensor` does not split are computed more often than apart."""
    return [mesh_group(options, where, *work) for work in WORK if options.model in (None, work[0])
            for where in HOSTS]


def mesh_group(options, where, model, width, on_one, on_two, by_hand):
    steps = on_one if HOSTS[where] is None else on_two
    on_cable = CABLE_SECONDS if HOSTS[where] == CABLE else 0
    seconds = on_cable + expected(model, BATCH, steps, 2, width)

    def ours(program, count, *more):
        return lambda: training_round(where, program, model, width, count, *more)
    runs = {"stage 04": Run("stage 04", seconds, ours(bench_ranks.DDP, steps)),
            APART: Run("apart", seconds, lambda: bench_runs.run_apart(
                model, BATCH, steps, "--width", width, *ADAMW, processes=RANKS)),
            "stage 06": Run("stage 06", seconds, ours(bench_ranks.SHARDED, steps, "--no-sync-bn"))}
    for mesh in MESHES:
        runs[mesh] = Run(mesh, seconds, ours(MESH, steps, *options_of(mesh)))
        runs[mesh, "by hand"] = Run(f"messages of {mesh}", 2.0 + on_cable, lambda mesh=mesh: by_hand_round(
            where, model, width, by_hand, *options_of(mesh)))

    def figures(found):
        return mesh_figures(where, model, width, found)
    return Group("meshes", runs, options.rounds, lambda found: mesh_lines(figures(found)), figures)


def training_round(where, program, model, width, steps, *more):
    """The metrics of a run, `seconds` being the median step."""
    metrics = run_where(where, path_of_program(program), model, width, steps, *more)
    return {**metrics, "seconds": bench_runs.round_time(metrics["step_seconds"])}


def by_hand_round(where, model, width, steps, *more):
    """{axis: {"seconds_per_step", "sent"}} of the bare loop."""
    return run_where(where, path_of_program(BY_HAND), model, width, steps, *more)


def run_where(where, program, model, width, steps, *more):
    """What a program of four ranks writes with --metrics, on one host or two."""
    words = ["--data", f"synthetic:{(steps + 1) * BATCH}:{BATCH}", "--model", model, "--width", width,
             "--batch-size", BATCH, "--max-steps", steps, "--lr", 0.01, *ADAMW, *more]
    if HOSTS[where] is not None:
        return bench_ranks.through_cable(HOSTS[where], program, *words, ranks=RANKS // 2)
    devices = ",".join(f"cpu:{rank}" for rank in range(RANKS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.json"
        bench_runs.run_together([program, "--devices", devices, *words, "--metrics", path],
                                stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


def median_of(rounds, *path):
    """The median of a figure of all rounds."""
    values = []
    for found in rounds:
        for name in path:
            found = found[name]
        values.append(found)
    return statistics.median(values)


def mesh_figures(where, model, width, found):
    trained = {name: rounds for name, rounds in found.items() if isinstance(name, str)}
    axes = {mesh: {axis: {
        "waited_seconds": median_of(rounds, "along", axis, "waited_seconds_per_step"),
        **({"queued_seconds": median_of(rounds, "along", axis, "queued_seconds_per_step")}
           if "queued_seconds_per_step" in rounds[0]["along"][axis] else {}),
        "sent_bytes": median_of(rounds, "along", axis, "sent"),
        **({"by_hand_seconds": median_of(found[mesh, "by hand"], axis, "seconds_per_step")}
           if (mesh, "by hand") in found else {})} for axis in rounds[0]["along"]}
        for mesh, rounds in trained.items() if mesh in MESHES}
    return {"where": where, "model": model, "width": width, "batch_size": BATCH, "axes": axes,
            "step_seconds": {name: median_of(rounds, "seconds") for name, rounds in trained.items()},
            "exposed_seconds": {name: median_of(rounds, "per_step_seconds", "exposed_communication")
                                for name, rounds in trained.items() if name != APART},
            "all_rounds": all_rounds(trained)}


def mesh_lines(result):
    step = result["step_seconds"]
    rows = [f"{result['model']}, width {result['width']}, global batch {result['batch_size']}, AdamW, {RANKS} "
            f"ranks, {result['where']}:"]
    for name, seconds in step.items():
        axes = result["axes"].get(name, {})
        text = f"  {name:<18} {seconds * 1e3:9.2f} ms/step  {seconds / step['stage 04']:5.2f} times stage 04's"
        if axes and APART in step and all("by_hand_seconds" in row for row in axes.values()):
            both = step[APART] + sum(row["by_hand_seconds"] for row in axes.values())
            text += f"; apart and by hand {both * 1e3:.2f}: {'no longer' if seconds <= both else 'LONGER'}"
        elif name in result["exposed_seconds"]:
            text += f"; waits {result['exposed_seconds'][name] * 1e3:.2f} ms"
        rows += [text, *(axis_line(axis, row) for axis, row in axes.items())]
    return rows


def axis_line(axis, row):
    """What a step waits along an axis, and what the same messages take by hand."""
    text = f"    {axis:<9} waits {row['waited_seconds'] * 1e3:9.2f} ms"
    if "queued_seconds" in row:
        text += f", {row['queued_seconds'] * 1e3:.2f} of it before its sums began"
    if "by_hand_seconds" in row:
        text += f"; by hand {row['by_hand_seconds'] * 1e3:.2f} ms"
    return f"{text}; {row['sent_bytes']:.0f} bytes sent"


# --- One stream ------------------------------------------------------------------------------------

# Profile of the devices of a host, hosts, and the mesh.
QUEUE_WORK = tuple(((profile, hosts), mesh) for profile, hosts in (("h100x4", 1), ("h100x2", 2), ("laptopx2", 2))
                   for mesh in ("data=2,shard=2", "data=2,tensor=2", "shard=2,tensor=2"))


def queues(options):
    """What a stream for each axis would change. A simulated step takes the same time in every round: one is
    enough."""
    return [queue_group(options, model) for model in ("resnet18", "mlp") if options.model in (None, model)]


def queue_group(options, model):
    runs = {(*devices, mesh): Run(f"{mesh} on {devices[0]}", 1.0,
                                  lambda devices=devices, mesh=mesh: queue_round(model, *devices, mesh))
            for devices, mesh in QUEUE_WORK}

    def figures(found):
        return [{"model": model, "devices": key[0], "nodes": key[1], "mesh": key[2], **rounds[0]}
                for key, rounds in found.items()]
    return Group("queues", runs, 1, lambda found: queue_lines(model, figures(found)), figures)


def queue_round(model, devices, hosts, mesh):
    """One simulated run, and what its trace says."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        samples = axis_queues.STEPS * BATCH
        bench_runs.run_together([bench_runs.program(MESH), "--devices", f"sim:{devices}", "--nodes", hosts, "--model",
                                 model, "--mesh", mesh, "--batch-size", BATCH, "--data", f"blank:{samples}:64",
                                 "--max-steps", axis_queues.STEPS, "--trace", trace, "--no-sync-bn"],
                                stdout=subprocess.DEVNULL)
        return axis_queues.compared(trace)


def queue_lines(model, rows):
    lines = [f"{model}, batch {BATCH}:"]
    for row in rows:
        one, each = row["one_stream_seconds"], row["stream_each_seconds"]
        lines.append(f"  {row['mesh']:<17} {row['nodes']} x {row['devices']:<9} {one * 1e3:9.3f} ms/step; with a "
                     f"stream for each axis {each * 1e3:.3f}: {100 * (one / each - 1):.1f} % longer")
    return lines
