"""`./lockstep predict --check`: predictions of this machine's steps, by simulated devices, beside the times that
the steps really take. The networks' sizes are others than those that `calibrate` has seen."""

import json
import math
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import bench_ranks
from bench_rounds import NotHere
from bench_runs import round_time
from calibrate import Size
from compare import Refused, measured_run
from progress import CORES
from stages import label, path_of

STEPS = 56  # of which 50 count
ROUNDS = 5
MEDIAN, NINE_IN_TEN = 0.10, 0.20  # the errors that are aimed at, where each device has a core
SIZES = (Size("seed", 96), Size("mlp", 80), Size("resnet18", 24, 12))
CABLES = {"100mbit": 12.5e6, "1gbit": 125e6, "10gbit": 1.25e9}  # bytes per second


@dataclass(frozen=True)
class Configuration:
    stage: str
    size: Size
    devices: int
    way: str = ""  # between ranks: "shm", "tcp", or a cable's rate

    @property
    def name(self):
        return f"{label(self.stage)}, {self.size.name}, {self.devices} x{', ' + self.way if self.way else ''}"

    @property
    def counts(self):
        """Whether it is held to the aim: devices that share cores are only shown."""
        return self.devices <= CORES

    def words(self):
        return ["--batch-size", self.size.batch, *self.size.words, "--max-steps", STEPS, "--optimizer", "sgd",
                "--lr", "0.001"]

    def real(self, build):
        samples = f"synthetic:{(STEPS + 1) * self.size.batch}:64"
        program, words = build / path_of(self.stage), [*self.words(), "--data", samples]
        if self.way in CABLES:
            try:
                return bench_ranks.through_cable(self.way, program, *words, "--devices", "cpu:0")
            except subprocess.CalledProcessError as error:
                raise Refused(f"--check: {self.name}: ended with status {error.returncode}") from error
        devices = ",".join(f"cpu:{i}" for i in range(self.devices))
        backend = ["--backend", self.way] if self.way else []
        return metrics_of(self, program, [*words, "--devices", devices, *backend])

    def simulated(self, build, figures, folder):
        """Over TCP or a cable, devices are on hosts of their own, which share this machine all the same."""
        network, crowded = figures["links"]["network"], figures.get("crowded", [1])
        rate = min(network["bytes"], CABLES.get(self.way, network["bytes"]))
        figures = {**figures, "links": {**figures["links"], "network": {**network, "bytes": rate}}}
        apart = self.way in ("tcp", *CABLES)
        if apart:
            figures["crowded"] = [crowded[min(self.devices, len(crowded)) - 1]]
        profile = Path(folder) / "profile.json"
        profile.write_text(json.dumps(figures))
        hosts = ["--nodes", self.devices] if apart else []
        return metrics_of(self, build / path_of(self.stage),
                          [*self.words(), "--data", f"blank:{(STEPS + 1) * self.size.batch}:64", "--devices",
                           f"sim:{profile}x{1 if apart else self.devices}", *hosts])


def metrics_of(configuration, program, words):
    _, reason, metrics = measured_run(program, [str(word) for word in words], quiet=True)
    if not metrics:
        raise Refused(f"--check: {configuration.name}: {reason}")
    return metrics


def configurations():
    for size in SIZES:
        yield Configuration("01-single-gpu", size, 1)
        yield Configuration("02-dataparallel", size, 2)
        yield Configuration("03-model-split", size, 2)
        yield Configuration("03-model-split/tensor-split", size, 2, "shm")
        for stage in ("04-ddp", "05-syncbn-checkpoint", "06-fully-sharded"):
            yield Configuration(stage, size, 2, "shm")
        yield Configuration("04-ddp", size, 2, "tcp")
        yield Configuration("06-fully-sharded", size, 2, "tcp")
        yield Configuration("04-ddp", size, 4, "shm")
    for rate in CABLES:
        for stage in ("04-ddp", "06-fully-sharded"):
            yield Configuration(stage, SIZES[1], 2, rate)


@dataclass
class Compared:
    configuration: Configuration
    measured: float  # seconds of a step
    predicted: float
    more_sent: float  # bytes that the real rank 0 sends in a step beyond those of the simulated one
    more_memory: int  # bytes of buffers that the real devices had at most, likewise; workspaces apart
    workspaces: int

    @property
    def error(self):
        return self.predicted / self.measured - 1


def sent_bytes(metrics):
    moved = metrics.get("bytes_moved") or {}
    return (metrics.get("bytes_per_step") or {}).get("sent", moved.get("per_step", 0))


def buffers(metrics):
    """The most bytes that a device had, without the workspaces of libraries."""
    return max(peak - workspaces for peak, workspaces
               in zip(metrics["peak_memory_bytes"], metrics["workspace_bytes"]))


def difference(count):
    return f"{count:+.0f}" if count else "equal"


def compare(configuration, rounds, simulated):
    """A configuration's rounds beside its simulation."""
    metrics = rounds[-1]
    return Compared(configuration, statistics.median(round_time(each["step_seconds"]) for each in rounds),
                    statistics.median(simulated["step_seconds"][1:]),
                    sent_bytes(metrics) - sent_bytes(simulated),
                    buffers(metrics) - buffers(simulated), max(metrics["workspace_bytes"]))


def measure(build, figures, rounds):
    """All configurations in turn, `rounds` times; says how far it is."""
    chosen, found = list(configurations()), {}
    with tempfile.TemporaryDirectory() as folder:
        simulated = {each: each.simulated(build, figures, folder) for each in chosen}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        for each in chosen:
            try:
                found.setdefault(each, []).append(each.real(build))
            except NotHere:
                found.pop(each, None)
    return [compare(each, measured, simulated[each]) for each, measured in found.items()], len(chosen) - len(found)


def report(results):
    """Prints the table; returns whether the aims were reached."""
    width = max(len(each.configuration.name) for each in results)
    print(f"\n{'step of':<{width}}{'measured, ms':>14}{'predicted, ms':>15}{'error':>9}{'sent':>8}{'buffers':>9}"
          f"{'workspaces':>13}")
    for each in results:
        print(f"{each.configuration.name:<{width}}{1e3 * each.measured:>14.3f}{1e3 * each.predicted:>15.3f}"
              f"{100 * each.error:>+7.1f} %{difference(each.more_sent):>8}{difference(each.more_memory):>9}"
              f"{each.workspaces / 2**20:>9.2f} MiB"
              + ("" if each.configuration.counts else "  shares cores"))
    counted = [each for each in results if each.configuration.counts]
    errors = sorted(abs(each.error) for each in counted)
    median, most = statistics.median(errors), errors[math.ceil(0.9 * len(errors)) - 1]
    print(f"\n{len(errors)} with a core for each device: median error {100 * median:.1f} % (aim: {100 * MEDIAN:.0f}), "
          f"nine in ten within {100 * most:.1f} % (aim: {100 * NINE_IN_TEN:.0f})")
    exact = not any(each.more_sent or each.more_memory for each in counted)
    return median <= MEDIAN and most <= NINE_IN_TEN and exact


def check(options):
    print(f"{options.figures['device']}, {options.figures['source']}; medians of {options.rounds or ROUNDS} alternating "
          f"rounds of {STEPS} steps")
    results, left_out = measure(options.build, options.figures, options.rounds or ROUNDS)
    reached = report(results)
    if left_out:
        print(f"{left_out} through a cable: not measured, this user may make no network namespaces")
    return 0 if reached else 1
