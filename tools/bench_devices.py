"""Several devices beside one in `lockstep bench`: every stage (part `stages`), two devices with floors
(`devices`), and what it brings to keep threads to their device's part of the cores (`cores`).

The part `devices` shows each figure beside its floor, which says what two
cores should reach. A floor that is not met is information, no failure.

The machine's limit is measured, too: "2 processes apart" are two runs of stage 01 that share
nothing, each with half of the batch. All ratios are of one run, of alternating rounds.
"""

import contextlib
import os
import statistics
import subprocess
import time
from dataclasses import dataclass

import bench_runs
from bench_rounds import Group, Run, all_rounds, medians
from bench_ranks import message_rows
from bench_runs import STAGE, expected, speed_up
from child_processes import started
from stages import all_stages, label

ONE, APART = "stage 01", "2 processes apart"
DATA_PARALLEL, PIPELINE, DDP, SYNC = "stage 02", "stage 03", "stage 04", "stage 05"
PROGRAMS = {DATA_PARALLEL: "02-dataparallel", PIPELINE: "03-model-split", DDP: "04-ddp",
            SYNC: "05-syncbn-checkpoint"}
MICRO = 8  # micro-batches of ResNet-18's pipeline
SCHEDULE = ("--schedule", "1f1b", "--micro-batches", MICRO)
SPLIT, WHOLE = f"2 stages, 1f1b, {MICRO} micro-batches", f"1 stage, 1f1b, {MICRO} micro-batches"


@dataclass(frozen=True)
class Floor:
    """How many times as fast as `beside` a run should at least be; `of_apart`: as a share of what
    2 processes apart reach beside stage 01."""

    run: str
    beside: str
    least: float
    of_apart: bool = False


@dataclass(frozen=True)
class Work:
    """A network: what runs besides stage 01 and 2 processes apart, and the floors."""

    model: str
    batch: int
    steps: int
    floors: tuple[Floor, ...]
    width: int = 64

    def name(self):
        return self.model + f", width {self.width}" * (self.width != 64) + f", batch {self.batch}"


# In p stages with m micro-batches each, m / (m + p - 1) of the time is not bubble.
NO_BUBBLE = MICRO / (MICRO + 1)
WORK = (
    Work("seed", 64, 400, (Floor(DATA_PARALLEL, APART, 0.93), Floor(DDP, APART, 0.95),
                           Floor(PIPELINE, ONE, 1.25))),
    Work("seed", 256, 150, (Floor(DATA_PARALLEL, APART, 0.95), Floor(DDP, APART, 0.95))),
    Work("seed-bn", 64, 400, (Floor(SYNC, APART, 0.85),)),
    Work("resnet18", 64, 4, (Floor(DDP, APART, 0.93),)),
    Work("resnet18", 128, 8, (Floor(SPLIT, ONE, 1.7),
                              Floor(SPLIT, WHOLE, 0.95 * NO_BUBBLE, of_apart=True)), 16),
)


def devices(options):
    return [*(training_group(work, options.rounds) for work in WORK
              if work.model.removesuffix("-bn") in options.models), messages_group(options.rounds)]


# --- Training ----------------------------------------------------------------------------------

def training_group(work, rounds):
    def run(stage, count, *more):
        devices = ",".join(f"cpu:{rank}" for rank in range(count))
        return lambda: bench_runs.run_ours(work.model, work.batch, 1, work.steps, *shared, *more,
                                           stage=stage, devices=devices)

    shared = ("--order", "sampler", *(("--width", work.width) if work.width != 64 else ()))
    calls = {ONE: run(STAGE, 1), APART: lambda: bench_runs.run_apart(
        work.model, work.batch, work.steps, *shared)}
    for floor in work.floors:
        if floor.beside == WHOLE:
            calls[WHOLE] = run(PROGRAMS[PIPELINE], 1, *SCHEDULE)
        elif floor.run == SPLIT:
            calls[SPLIT] = run(PROGRAMS[PIPELINE], 2, *SCHEDULE)
        else:
            calls[floor.run] = run(PROGRAMS[floor.run], 2)
    runs = {name: Run(f"{work.name()}, {name}", expected(
        work.model, work.batch, work.steps, 1 if name in (ONE, WHOLE) else 2, work.width), call)
        for name, call in calls.items()}

    def figures(found):
        return {"work": work.name(), "step_seconds": medians(found),
                "floors": floors_of(work.floors, medians(found)), "all_rounds": all_rounds(found)}
    return Group("devices", runs, rounds, lambda found: training_lines(work, figures(found)),
                 figures)


def floors_of(floors, step):
    """Each floor beside what was measured; none for runs that are missing."""
    rows = []
    for floor in floors:
        if {floor.run, floor.beside, ONE, APART} <= step.keys():
            least = floor.least * (step[ONE] / step[APART] if floor.of_apart else 1)
            times = step[floor.beside] / step[floor.run]
            rows.append({"run": floor.run, "beside": floor.beside, "times": times,
                         "floor": least, "met": times >= least})
    return rows


def training_lines(work, figures):
    step = figures["step_seconds"]
    lines = [f"{work.name()}:"]
    for name, seconds in step.items():
        rounds = [1e3 * each for each in figures["all_rounds"][name]]
        text = (f"  {name:<31} {seconds * 1e3:9.2f} ms/step "
                f"({min(rounds):.2f} to {max(rounds):.2f})  "
                f"{step[ONE] / seconds:5.2f} times stage 01")
        for row in figures["floors"]:
            if row["run"] == name:
                text += (f"; {row['times']:.2f} times {row['beside']}, floor {row['floor']:.2f}: "
                         + verdict(row))
        lines.append(text)
    return lines


def verdict(row):
    return "met" if row["met"] else "NOT MET"


# --- Messages ----------------------------------------------------------------------------------

SMALL, LARGE = 1, 43945  # KiB; the second are 45 MB, about ResNet-18's gradients
SMALL_MOST = 5e-6  # seconds of an all-reduce between two cores
LARGE_MOST = 18 / 8  # times a copy of as many bytes
COPIES = 20


def messages_group(rounds):
    """An all-reduce of two ranks with the default transport, beside a copy in one process."""
    runs = {"all-reduce": Run("all-reduce", 5.0, lambda: message_rows(
                "--all-reduce", "library", "--kib", f"{SMALL},{LARGE}", "--rounds", 50)),
            "copy": Run("copy of 45 MB", 0.5, copy_seconds)}

    def figures(found):
        small, large = (statistics.median(rows[place]["seconds"] for rows in found["all-reduce"])
                        for place in (0, 1))
        result = {"work": "messages", "backend": found["all-reduce"][0][0]["backend"], "floors": [
            {"run": "all-reduce of 1 KiB", "seconds": small, "most": SMALL_MOST,
             "met": small <= SMALL_MOST}]}
        if "copy" in found:
            copy = statistics.median(found["copy"])
            result["copy_seconds"] = copy
            result["floors"].append({"run": "all-reduce of 45 MB", "seconds": large,
                                     "most": LARGE_MOST * copy, "met": large <= LARGE_MOST * copy})
        return result
    return Group("devices", runs, rounds, lambda found: messages_lines(figures(found)), figures)


def copy_seconds():
    """Seconds of a copy of 45 MB in memory that was touched before: the median."""
    source, target = bytearray(1024 * LARGE), bytearray(1024 * LARGE)
    seconds = []
    for _ in range(COPIES):
        begin = time.perf_counter()
        memoryview(target)[:] = source
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def messages_lines(figures):
    lines = [f"Messages of two ranks, {figures['backend']}:"]
    for row in figures["floors"]:
        lines.append(f"  {row['run']:<31} {row['seconds'] * 1e6:9.1f} us, at most "
                     f"{row['most'] * 1e6:.1f}: {verdict(row)}")
    if "copy_seconds" in figures:
        lines.append(f"  {'copy of 45 MB, one process':<31} "
                     f"{figures['copy_seconds'] * 1e6:9.1f} us")
    return lines


# --- Every stage ---------------------------------------------------------------------------------

# Network, its options, batch, steps.
STAGES_WORK = (("seed", (), 64, 200), ("resnet18", ("--width", 16), 128, 6))


def other_stages():
    return [stage for stage in all_stages() if stage != STAGE]


def stages(options):
    """Every other stage on 2 devices of one thread (--thorough: on 4, too)."""
    worlds = (2, 4) if options.thorough else (2,)
    return [stages_group(*work, worlds, options.rounds)
            for work in STAGES_WORK if work[0] in options.models]


def stages_group(model, more, batch, steps, worlds, rounds):
    contenders = [(STAGE, 1), *((stage, world) for stage in other_stages() for world in worlds)]
    name = " ".join(map(str, (model, *more)))
    runs = {}
    for stage, world in contenders:
        devices = ",".join(f"cpu:{rank}" for rank in range(world))
        runs[stage, world] = Run(
            f"{label(stage)} on {world}, {name}",
            expected(model, batch, steps, world, more[1] if more else 64),
            lambda stage=stage, devices=devices: bench_runs.run_ours(
                model, batch, 1, steps, *more, stage=stage, devices=devices))

    def figures(found):
        step, rounds_of = medians(found), all_rounds(found)
        return [{"model": name, "batch_size": batch, "stage": stage, "world_size": world,
                 "step_seconds": seconds, **speed_up(seconds, step[STAGE, 1], world),
                 "all_rounds": rounds_of[stage, world]}
                for (stage, world), seconds in step.items()]
    return Group("stages", runs, rounds, lambda found: list(map(stage_line, figures(found))),
                 figures)


def stage_line(row):
    return (f"{row['model']:<20} {label(row['stage']):<19} W {row['world_size']}  batch "
            f"{row['batch_size']:>4}  {row['step_seconds'] * 1e3:9.2f} ms/step  "
            f"{row['batch_size'] / row['step_seconds']:9.0f} samples/s  {row['speedup']:5.2f} "
            f"times one device, efficiency {100 * row['efficiency']:.0f} %")


# --- Cores ---------------------------------------------------------------------------------------

# Program, network, batch, steps.
CORES_WORK = (("02-dataparallel", "seed", 64, 300), ("02-dataparallel", "seed", 256, 100),
        ("03-model-split", "seed", 64, 300), ("03-model-split/tensor-split", "seed", 64, 300),
        ("04-ddp", "seed", 64, 300), ("04-ddp", "seed", 256, 100),
        ("05-syncbn-checkpoint", "seed-bn", 64, 300))
ENDLESS = ("sh", "-c", "while :; do :; done")
QUIET, ANYWHERE, ON_ONE = "quiet", "beside a loop", "beside a loop on one core"
SLOWER = {QUIET: 0.7, ANYWHERE: 1.1, ON_ONE: 1.2}  # about, beside what is expected
CHOICES = {"bound": "--bind", "free": "--no-bind"}


def cores(options):
    return [cores_group(*work, options.rounds) for work in CORES_WORK
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
