"""What operations cost: their multiplications and bytes, counted on simulated devices, beside their times
in a trace; and the figures of a profile (tools/profiles/) that fit to them."""

import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from child_processes import run

UPDATES = ("sgd_update", "adam_update")  # a step ends with its update of the weights
NEVER = 1e30  # a rate that costs nothing
CONVOLUTIONS = ("conv2d", "conv2d_backward_input", "conv2d_backward_parameters")
WINDOWS = (1, 3, 5, 7)  # pixels of a convolution's side, that are told apart
PER_NANOSECOND = 1e9
NOTHING = {"seconds": 0, "flops": NEVER, "bytes": NEVER}
# What is counted: an operation takes a nanosecond for each FLOP, or for each byte, or a second for each pixel of
# its window's side.
COUNTERS = {"flops": {"default": {**NOTHING, "flops": PER_NANOSECOND}},
            "bytes": {"default": {**NOTHING, "bytes": PER_NANOSECOND}},
            "window": {"default": NOTHING, **{f"{name} {side}x{side}": {**NOTHING, "seconds": side}
                                              for name in CONVOLUTIONS for side in WINDOWS}}}


class CostError(Exception):
    """Something cannot be counted or measured; the message is the one line to show."""


@dataclass
class Sample:
    """One operation of a step."""

    name: str
    layer: str
    flops: float
    bytes: float
    seconds: float = 0
    window: int = 0  # pixels of a convolution's side

    @property
    def kind(self):
        """The operation's name in a profile."""
        return f"{self.name} {self.window}x{self.window}" if self.window else self.name


# --- Steps of a trace -----------------------------------------------------------------------------

def steps_of(path):
    """The steps of a trace but its first, which is not like the others: lists of (name, layer,
    seconds)."""
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    ends = [i + 1 for i, span in enumerate(spans) if span["name"] in UPDATES]
    steps = [[(span["name"], span["args"].get("layer", ""), 1e-6 * span["dur"]) for span in spans[a:b]]
             for a, b in zip(ends, ends[1:])]
    if len(steps) < 2:
        raise CostError(f"{path}: {len(steps) + 1} steps, expected 3 or more")
    return steps


def launch_seconds(path):
    """What the host takes from one operation to the next, where nothing holds it up: the lower quartile
    over a trace."""
    queued = [1e-6 * event["args"]["queued"] for event in json.loads(path.read_text())["traceEvents"]
              if event["ph"] == "X" and "queued" in event["args"]]
    gaps = sorted(b - a for a, b in zip(queued, queued[1:]) if b > a)
    return gaps[len(gaps) // 4] if gaps else 0.0


def traced(program, words, path, env=None):
    ended, output = run((program, *words, "--trace", path), 600, env=env)
    if ended:
        said = output.rstrip().splitlines()
        raise CostError(f"{program.name}: {ended}: {said[-1] if said else 'without a word'}")
    return steps_of(path)


# --- Counting -------------------------------------------------------------------------------------

def counting_profile(operations, lanes):
    """A device on which operations take such times, and nothing else takes any."""
    return {"device": "a counter", "source": "counts", "memory_bytes": 10**18, "lanes": lanes,
            "operations": operations, "launch_seconds": 0, "batch_seconds": 0,
            "links": {link: {"seconds": 0, "bytes": PER_NANOSECOND} for link in ("host", "device", "network")}}


def counted(program, words, batch, folder, env=None, lanes=1):
    """The operations of a step of these options, without times. A convolution computes for so many channels at once."""
    found = {}
    for what, operations in COUNTERS.items():
        profile = Path(folder) / f"{what}.json"
        profile.write_text(json.dumps(counting_profile(operations, lanes)))
        found[what] = traced(program, ("--devices", f"sim:{profile}x1", "--data", f"blank:{4 * batch}:64",
                                       "--batch-size", batch, "--max-steps", 4, *words),
                             Path(folder) / f"{what}.trace", env)[-1]
    return [Sample(name, layer, 1e9 * flops, 1e9 * moved, window=round(side))
            for (name, layer, flops), (_, _, moved), (_, _, side) in zip(*found.values(), strict=True)]


def measured(program, device, words, batch, steps, folder, env=None):
    """The same with the median of their times on a real device. What only that device does, such as a
    bias that its library does not add, belongs to the operation before it."""
    samples = counted(program, words, batch, folder, env)
    times = defaultdict(list)
    for step in traced(program, ("--devices", device, "--data", f"synthetic:{(steps + 1) * batch}:64",
                                 "--batch-size", batch, "--max-steps", steps, *words),
                       Path(folder) / "measured.trace", env):
        for place, seconds in enumerate(aligned(step, samples)):
            times[place].append(seconds)
    for place, sample in enumerate(samples):
        sample.seconds = statistics.median(times[place])
    return samples


def aligned(step, samples):
    """The seconds of each of the samples in a step."""
    seconds, place = [0.0] * len(samples), -1
    for name, layer, took in step:
        following = samples[place + 1] if place + 1 < len(samples) else None
        if following and (following.name, following.layer) == (name, layer):
            place += 1
        if place >= 0:
            seconds[place] += took
    if place + 1 < len(samples):
        missing = samples[place + 1]
        raise CostError(f"a step has no {missing.name} of '{missing.layer}', which the simulated one has")
    return seconds


# --- Fitting --------------------------------------------------------------------------------------

def cost(figures, sample):
    return figures["seconds"] + max(sample.flops / figures["flops"], sample.bytes / figures["bytes"])


def misfit(figures, samples):
    """Half of Poisson's deviance. Where it is least, the samples' costs add up to their times; squared relative
    errors would make costs too small, because a cost cannot be more than 100 % too small."""
    pairs = [(cost(figures, s), s.seconds) for s in samples]
    if min(costs for costs, _ in pairs) <= 0:
        return math.inf
    return math.fsum(costs - seconds + seconds * math.log(seconds / costs) for costs, seconds in pairs)


def solved(rows, targets):
    """The least squares solution of rows * x = targets, by the normal equations; None if there is none."""
    size = len(rows[0])
    matrix = [[math.fsum(row[i] * row[j] for row in rows) for j in range(size)]
              + [math.fsum(row[i] * target for row, target in zip(rows, targets))] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-30:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [x - factor * y for x, y in zip(matrix[k], matrix[i])]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]


def bounded_fit(samples, by_flops, costs):
    """The figures if it is known of each sample whether its FLOPs or its bytes take the time, and about what it
    costs. None may be negative: of all choices of columns the best such solution."""
    rows, targets = [], []
    scales = [max(getattr(s, what) for s in samples) or 1 for what in ("flops", "bytes")]
    for sample, multiplies, expected in zip(samples, by_flops, costs):
        weight = 1 / math.sqrt(expected)
        rows.append([weight, weight * multiplies * sample.flops / scales[0],
                     weight * (not multiplies) * sample.bytes / scales[1]])
        targets.append(weight * sample.seconds)
    found = []
    for columns in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        solution = solved([[row[i] for i in columns] for row in rows], targets)
        if solution and min(solution) >= 0:
            per = dict(zip(columns, solution))
            found.append({"seconds": per.get(0, 0.0),
                          "flops": scales[0] / per[1] if per.get(1) else NEVER,
                          "bytes": scales[1] / per[2] if per.get(2) else NEVER})
    return min(found, key=lambda figures: misfit(figures, samples), default=None)


def fit(samples):
    """{"seconds", "flops", "bytes"} for which the samples' costs are nearest to their times. Which samples
    are bound by their FLOPs follows from the figures, and the figures from that: both in turn, from several
    guesses."""
    samples = [sample for sample in samples if sample.seconds > 0]
    best = {"seconds": statistics.fmean(s.seconds for s in samples), "flops": NEVER, "bytes": NEVER}
    most = [max(getattr(s, what) / s.seconds for s in samples) for what in ("flops", "bytes")]
    for ratio in (0, 0.1, 0.3, 1, 3, 10, math.inf):  # of a FLOP's time to a byte's, beside the extremes
        by_flops = [s.flops * most[1] * ratio >= s.bytes * most[0] if math.isfinite(ratio) else True
                    for s in samples]
        costs = [s.seconds for s in samples]
        for _ in range(20):
            figures = bounded_fit(samples, by_flops, costs)
            if figures is None:
                break
            best = min(best, figures, key=lambda each: misfit(each, samples))
            following = [s.flops / figures["flops"] >= s.bytes / figures["bytes"] for s in samples]
            before, costs = costs, [cost(figures, s) for s in samples]
            if min(costs) <= 0 or following == by_flops and all(map(math.isclose, before, costs)):
                break
            by_flops = following
    return best


def groups(samples, key):
    """Those that were measured, by their keys."""
    found = defaultdict(list)
    for sample in samples:
        if sample.seconds > 0:
            found[key(sample)].append(sample)
    return dict(sorted(found.items()))


def total_misfit(samples):
    """That of all operations which multiply, each with figures of its own."""
    return math.fsum(misfit(fit(alike), alike) for alike in groups(samples, lambda sample: sample.kind).values()
                     if any(sample.flops > 0 for sample in alike))


def fit_all(samples):
    """Figures by the operations' names, and by the windows of convolutions; "default" fits all but those that
    multiply."""
    alike = groups(samples, lambda sample: sample.name) | groups(samples, lambda sample: sample.kind)
    simple = [s for s in samples if s.flops <= s.bytes]
    return {"default": fit(simple or samples), **{kind: fit(found) for kind, found in alike.items()}}
