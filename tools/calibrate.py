#!/usr/bin/env python3
"""Measure what this machine's operations cost, for simulated devices: `./lockstep calibrate`.

Trains three networks at several sizes on one device, each with a trace; counts the same steps'
multiplications and bytes on a simulated device; and fits a profile's figures to both. Then it predicts the
steps and says how far each prediction is from what was measured. The links between CPU devices are measured,
too; those of GPUs, and to the host, are those of default.json, unless --links names another profile. Last comes
this machine's roofline: which operations of a small network's step are bound by memory, and which by computing.
"""

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bench_runs import ROOT, STAGE, processor, round_time
from child_processes import run
from command_line import Parser, complain, run_command
from compare import Refused, measured_run
from operation_costs import NEVER, CostError, Sample, counted, fit, fit_all, launch_seconds, measured, total_misfit
from plain_files import require_writable, write_whole
from progress import CORES
from roofline import roofline_lines
from sim_devices import PROFILES, path_of_profile, read_profile
from stages import path_of

STEPS = 40  # with a trace, and without one
ROUNDS = 5
MOST_DEVICES = 8  # whose crowding is measured
LANES = {"cpu": (4, 8, 16), "cuda": ()}  # float32 numbers of the vectors that processors have


@dataclass(frozen=True)
class Size:
    model: str
    batch: int
    width: int = 0  # 0: the network's own

    @property
    def words(self):
        return ("--model", self.model, *(("--width", str(self.width)) if self.width else ()))

    @property
    def name(self):
        return f"{self.model}{f', width {self.width}' if self.width else ''}, batch {self.batch}"


SIZES = {
    "cpu": (Size("seed", 16), Size("seed", 64), Size("seed", 256), Size("seed-bn", 32),
            Size("seed-bn", 128), Size("mlp", 32), Size("mlp", 128), Size("mlp", 64, 128),
            Size("resnet18", 8, 8), Size("resnet18", 32, 8), Size("resnet18", 16, 16)),
    "cuda": (Size("seed", 64), Size("seed", 1024), Size("seed-bn", 256), Size("mlp", 64),
             Size("mlp", 1024), Size("mlp", 256, 512), Size("resnet18", 32), Size("resnet18", 128),
             Size("resnet18", 256, 32)),
}

WAITING = (Size("seed", 64), Size("resnet18", 8, 8))  # the work of devices that wait for each other
MANY_AND_FEW = "06-fully-sharded", "04-ddp"  # messages that a step waits for
MOST_WAKING = 2e-4  # seconds

CROWDED = Size("seed", 64)  # the work of devices that are side by side, and of the roofline


def parse_options(argv):
    parser = Parser(prog="lockstep calibrate", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cpu:0", help="for instance cuda:0; default: %(default)s")
    add("--links", default="default", metavar="PROFILE",
        help="profile that gives the links that are not measured; default: %(default)s")
    add("-o", dest="target", type=Path, default=PROFILES / "this-machine.json", metavar="FILE",
        help="default: tools/profiles/this-machine.json, which --devices sim:this-machinex2 names")
    add("--build", metavar="DIR", type=Path, default=ROOT / "build", help="where the programs are")
    options = parser.parse_args(argv)
    kind, _, number = options.device.partition(":")
    if kind not in SIZES or not number.isdigit():
        raise CostError(f"--device: '{options.device}', expected one device such as cpu:0 or cuda:0")
    try:
        options.links = read_profile(path_of_profile(options.links))["links"]
    except (Refused, KeyError, TypeError) as error:
        raise CostError(f"--links: '{options.links}', expected a profile of tools/profiles") from error
    options.kind, options.program = kind, options.build / path_of(STAGE)
    if not os.access(options.program, os.X_OK):
        raise CostError(f"--build: no program {options.program}; ./lockstep calibrate compiles it")
    return options


def step_seconds(options, device, data, size, steps):
    """A warm step's seconds, and the metrics of its run."""
    words = ["--devices", device, "--data", data, "--batch-size", size.batch, "--max-steps", steps, *size.words]
    _, reason, metrics = measured_run(options.program, [str(word) for word in words], quiet=True)
    if not metrics:
        raise CostError(f"{size.name} on {device}: {reason}")
    return round_time(metrics["step_seconds"]), metrics


def real_step(options, size):
    return step_seconds(options, options.device, f"synthetic:{(STEPS + 1) * size.batch}:64", size, STEPS)


def predicted_step(options, profile, size, folder):
    path = Path(folder) / "predicted.json"
    path.write_text(json.dumps(profile))
    return step_seconds(options, f"sim:{path}x1", f"blank:{4 * size.batch}:64", size, 4)[0]


def measure(options, folder):
    """The samples of each size, their steps without a trace, the device's name, and what the host pays for an
    operation. All are medians of rounds: a machine's speed changes while it is measured."""
    sizes, launches, device = SIZES[options.kind], [], ""
    runs, steps = {size: [] for size in sizes}, {size: [] for size in sizes}
    for number in range(1, ROUNDS + 1):
        for place, size in enumerate(sizes, 1):
            print(f"round {number} of {ROUNDS}, {place} of {len(sizes)}: {size.name}", flush=True)
            runs[size].append(measured(options.program, options.device, size.words, size.batch, STEPS, folder))
            launches.append(launch_seconds(Path(folder) / "measured.trace"))
            seconds, metrics = real_step(options, size)
            steps[size].append(seconds)
            device = metrics["backend"]
    samples = {size: [replace(each[0], seconds=statistics.median(one.seconds for one in each)) for each in zip(*of_size)]
               for size, of_size in runs.items()}
    return samples, {size: statistics.median(each) for size, each in steps.items()}, device, min(launches)


def fitting_lanes(options, samples, folder):
    """The number of a vector's lanes for which the times of convolutions fit best to what they multiply, and all
    samples, counted with it."""
    found = {1: [sample for of_size in samples.values() for sample in of_size]}
    for lanes in LANES[options.kind]:
        counts = [count for size in samples
                  for count in counted(options.program, size.words, size.batch, folder, lanes=lanes)]
        found[lanes] = [replace(sample, flops=count.flops) for sample, count in zip(found[1], counts, strict=True)]
    lanes = min(found, key=lambda lanes: total_misfit(found[lanes]))
    return lanes, found[lanes]


def job_step(options, stage, size, devices):
    """The seconds of a stage's warm step on so many devices of this machine, and of its work; each device has the batch
    of `size`."""
    words = ["--devices", ",".join(f"cpu:{i}" for i in range(devices)), "--data",
             f"synthetic:{(STEPS + 1) * size.batch * devices}:64"]
    metrics = job_metrics(options, stage, size, devices, words, STEPS)
    return round_time(metrics["step_seconds"]), metrics["per_step_seconds"]["compute"]


def job_metrics(options, stage, size, devices, words, steps):
    words = [*words, "--batch-size", size.batch * devices, "--max-steps", steps, *size.words]
    _, reason, metrics = measured_run(options.build / path_of(stage), [str(word) for word in words], quiet=True)
    if not metrics:
        raise CostError(f"{size.name} on {devices} devices: {reason}")
    return metrics


def crowding(options):
    """How many times as long a step's work takes where one, two, ... devices of this machine are at work: of
    stage 04's ranks, each with the same batch. Of GPUs it is not measured."""
    if options.kind != "cpu":
        return [1.0]
    seconds = []
    for devices in range(1, min(CORES, MOST_DEVICES) + 1):
        found = min(job_step(options, "04-ddp", CROWDED, devices)[1] for _ in range(ROUNDS))  # others only add to it
        seconds.append(max([found, *seconds[-1:]]))
    return [each / seconds[0] for each in seconds]


def waking(options, profile, folder):
    """What a stream pays when an event comes that it waited for. A step of stage 06 waits for many messages, a step of
    stage 04 for few: how much longer it takes, is what simulated devices have to say, too. The mean of two networks."""
    if options.kind != "cpu" or CORES < 2:
        return 0.0
    return statistics.fmean(waking_of(options, profile, size, folder) for size in WAITING)


def waking_of(options, profile, size, folder):
    pairs = [[job_step(options, stage, size, 2)[0] for stage in MANY_AND_FEW] for _ in range(ROUNDS)]
    longer = statistics.median(many - few for many, few in pairs)
    path, low, high = Path(folder) / "waking.json", 0.0, MOST_WAKING
    while high - low > MOST_WAKING / 1000:
        middle = (low + high) / 2
        path.write_text(json.dumps({**profile, "wake_seconds": middle}))
        words = "--devices", f"sim:{path}x2", "--data", f"blank:{8 * size.batch}:64"
        many, few = (round_time(job_metrics(options, stage, size, 2, words, 4)["step_seconds"]) for stage in MANY_AND_FEW)
        low, high = (middle, high) if many - few < longer else (low, middle)
    return low


def message_times(options, backend):
    """(bytes, seconds) of all-reduces of two ranks: of each size the median of the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        path, rounds = Path(folder) / "sizes", []
        for _ in range(ROUNDS):
            ended, output = run((options.build / "04-ddp/message-sizes", "--devices", "cpu:0,cpu:1", "--backend", backend,
                                 "--all-reduce", "library", "--metrics", path), 120)
            if ended:
                raise CostError(f"message-sizes over {backend}: {ended}: {(output.rstrip().splitlines() or [''])[-1]}")
            rounds.append(json.loads(path.read_text()))
    return [(rows[0]["bytes"], statistics.median(row["seconds"] for row in rows)) for rows in zip(*rounds)]


def links(options):
    """Those of the profile that --links names; between CPU devices of a host, shared memory, and between hosts
    TCP without a cable, as all-reduces of two ranks are: two rounds, each of half of the bytes."""
    if options.kind != "cpu":
        return options.links
    measured_links = {}
    for link, backend in (("device", "shm"), ("network", "tcp")):
        samples = [Sample("message", "", 0, size / 2, seconds / 2) for size, seconds in message_times(options, backend)]
        figures = fit(samples)
        if figures["bytes"] >= NEVER:  # a busy machine: all sizes took as long
            figures["bytes"] = max(sample.bytes / sample.seconds for sample in samples)
        measured_links[link] = {"seconds": figures["seconds"], "bytes": figures["bytes"]}
    return {**options.links, **measured_links}


def profile_of(options, lanes, samples, device, launch):
    return {"device": f"{device} of {processor()}" if options.kind == "cpu" else device,
            "source": f"measured on {options.device} by ./lockstep calibrate",
            "memory_bytes": memory_bytes(), "operations": fit_all(samples), "lanes": lanes,
            "crowded": crowding(options), "launch_seconds": launch, "batch_seconds": 0, "links": links(options)}


def memory_bytes():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return 1024 * int(line.split()[1])
    raise CostError("/proc/meminfo has no MemTotal")


def add_host(options, profile, steps, folder):
    """What a step takes besides its operations: so much for each batch, and so much for each sample."""
    rest = [Sample("batch", "", size.batch, 0, seconds - predicted_step(options, profile, size, folder))
            for size, seconds in steps.items()]
    if any(sample.seconds > 0 for sample in rest):
        figures = fit(rest)
        profile.update(batch_seconds=figures["seconds"], sample_seconds=1 / figures["flops"])


def report(options, profile, steps, folder):
    print(f"\n{'step of':<34}{'measured, ms':>14}{'predicted, ms':>15}{'error':>9}")
    errors = []
    for size, seconds in steps.items():
        found = predicted_step(options, profile, size, folder)
        errors.append(abs(found / seconds - 1))
        print(f"{size.name:<34}{1e3 * seconds:>14.3f}{1e3 * found:>15.3f}{100 * (found / seconds - 1):>+8.1f} %")
    print(f"median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %")


def calibrate(options):
    require_writable(options.target)
    with tempfile.TemporaryDirectory() as folder:
        samples, steps, device, launch = measure(options, folder)
        profile = profile_of(options, *fitting_lanes(options, samples, folder), device, launch)
        add_host(options, profile, steps, folder)
        profile["wake_seconds"] = waking(options, profile, folder)
        report(options, profile, steps, folder)
    shown = CROWDED if CROWDED in samples else next(iter(samples))
    print("", *roofline_lines(samples[shown], shown.name), "", sep="\n")
    write_whole(options.target, json.dumps(profile, indent=2) + "\n")
    print(f"{options.target}: try ./lockstep predict --devices sim:{options.target.stem}x2")
    return 0


def main(argv):
    try:
        return calibrate(parse_options(argv))
    except (CostError, OSError) as error:
        complain("lockstep calibrate", error)
        return 1


if __name__ == "__main__":
    run_command(main)
