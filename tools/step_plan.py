"""A step of a stage as its program enqueues it, for the page of `lockstep show`: the program runs on
simulated devices (docs/simulation.md), and its trace says what every stream does and waits for."""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import compare_timeline
import step_rows
from compare import Refused
from mesh_drawing import Mesh
from plain_files import read_json
from sim_devices import PROFILES, read_profile
from stages import all_stages, label, path_of
from step_rows import MEMORY, Bar, Row, Step

UNITS = PROFILES / "units.json"
STEPS = 5  # two to warm up, then the one that is drawn begins and ends
PIPELINE = "03-model-split"
BUBBLE = Path("03-model-split/bubble")  # a pipeline of equal layers
NAMED = {"nll_loss": "loss", "sgd_update": "update", "adam_update": "update"}  # outside of all layers
UNIT_TIMES = "A convolution or a product takes a unit, all else a tenth, and a message as long as its bytes want."
SHARE = 1 / 3  # of the passes' time that all messages take, if nothing else is asked for
OF_EQUAL_STAGES = ("--schedule", "--chunks", "--micro-batches")
SET_HERE = ("--data", "--max-steps", "--metrics", "--trace")
# What a run may have been given that does not shape its step, or means nothing on simulated devices.
OF_THE_RUN = (*SET_HERE, "--devices", "--data-dir", "--epochs", "--log-interval", "--save", "--load", "--baseline",
              "--checkpoint-dir", "--save-every", "--keep", "--resume", "--allow-world-size-change", "--backend",
              "--init-method", "--rank", "--world-size", "--local", "--timeout", "--flight", "--workers",
              "--prefetch-factor", "--loader-timeout", "--bind", "--no-bind", "--threads-per-device")


@dataclass
class Asked:
    """What is to be drawn."""

    stage: str  # "04-ddp"
    devices: int = 0  # 0: two, of a pipeline four
    profile: Path | None = None  # None: units
    units_per_mib: float = 0  # with units, of a message; 0: all together take SHARE of the passes
    options: dict = field(default_factory=dict)  # the stage's own: {"--model": "seed", "--no-overlap": None}

    @property
    def equal_stages(self):
        """Whether it is a pipeline of equal layers: a unit each, as the bubble's formula assumes."""
        return self.stage == PIPELINE and self.profile is None

    def whole(self, name):
        """A whole number among the options; 0 where it is not given."""
        text = self.options.get(name, "0")
        if text is None or not text.isdecimal():
            raise Refused(f"{name}: found '{text or ''}', expected a whole number")
        return int(text)

    def count(self):
        return self.devices or (1 if self.stage.startswith("01") else 4 if self.stage == PIPELINE else 2)


def stage_of(text):
    """The program of "04" or "04-ddp"; "tensor-split" is stage 03's other one."""
    found = [stage for stage in all_stages() if text in (stage, stage[:2], label(stage))]
    if not found:
        raise Refused(f"--stage '{text}', expected one of {', '.join(label(stage) for stage in all_stages())}")
    return found[0]


def options_in(words):
    """{"--name": value, or None for a flag} of a command line's "--name value", "--name=value", and, with
    commas, of "--name value value"."""
    found, last = {}, None
    for word in words:
        if word.startswith("--"):
            last, equals, value = word.partition("=")
            found[last] = value if equals else None
        elif last is None:
            raise Refused(f"'{word}': expected an option, such as --model")
        else:
            found[last] = word if found[last] is None else f"{found[last]},{word}"
    return found


def words_of(options):
    return [word for pair in options.items() for word in pair if word is not None]


def run_of(trace):
    """What the run was that left this trace; None where the trace does not say."""
    files = [read_json(path) for path in compare_timeline.trace_files(trace)]
    command = files[0]["otherData"].get("command")
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        return None
    stages = [stage for stage in all_stages() if label(stage) == Path(command[0]).name]
    if not stages:
        return None
    devices = {event["pid"] for file in files for event in file["traceEvents"] if event["name"] == "process_name"}
    options = {name: value for name, value in options_in(command[1:]).items() if name not in OF_THE_RUN}
    return Asked(stages[0], len(devices), options=options)


# --- Running ---------------------------------------------------------------------------------------


@dataclass
class Enqueued:
    """What a run left."""

    step: dict  # compare_timeline.one_step()
    arguments: dict  # of the slices, by the place of their lane
    metrics: dict
    source: str  # of the times


def program_words(asked, profile):
    devices = ["--devices", f"sim:{profile}x{asked.count()}"]
    if asked.equal_stages:
        return [BUBBLE, *devices, *equal_stages(asked)]
    batch = asked.whole("--batch-size") or 64
    ranks = asked.count() * (asked.whole("--nodes") or 1)  # each has a test image
    return [path_of(asked.stage), *devices, "--data", f"blank:{STEPS * batch}:{max(64, ranks)}", "--max-steps", STEPS,
            *words_of(asked.options)]


def equal_stages(asked):
    """The words for a pipeline whose stages are a layer each. A micro-batch is a sample, which takes a
    layer a millisecond: the unit."""
    schedule = asked.options.get("--schedule", "1f1b")
    interleaved = schedule == "interleaved"
    micro_batches = asked.whole("--micro-batches") or (
        1 if schedule == "naive" else 2 * asked.count() if interleaved else 8)
    chunks = asked.whole("--chunks") or (2 if interleaved else 1)
    if chunks > 1 and not interleaved:
        raise Refused(f"--chunks: {schedule} has 1 chunk per device, found {chunks}; leave it out, or choose "
                      "--schedule interleaved")
    return ["--schedules", schedule, "--stages", asked.count(), "--layers", asked.count() * chunks,
            *(["--chunks", chunks] if interleaved else []), "--micro-batches", micro_batches,
            "--batch-size", micro_batches, "--sleep", micro_batches, "--steps", STEPS]


def run(asked, build, figures):
    """Runs the program on devices with these figures."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        profile, trace, metrics = folder / "profile.json", folder / "trace", folder / "metrics"
        profile.write_text(json.dumps(figures))
        program, *words = program_words(asked, profile)
        if not (build / program).exists():
            raise Refused(f"there is no {build / program}; ./lockstep show compiles it")
        done = subprocess.run([build / program, *map(str, words), "--trace", trace, "--metrics", metrics],
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.stderr.write(done.stderr.replace(str(profile), str(asked.profile or "units"))
                             .replace("--schedules:", "--schedule:"))
            sys.exit(done.returncode)
        arguments = {}
        for file in compare_timeline.trace_files(trace):  # one, or of each stage of a pipeline
            for event in json.loads(file.read_text())["traceEvents"]:
                if event["ph"] == "X":
                    arguments.setdefault((event["pid"], event["tid"]), []).append(event["args"])
        return Enqueued(compare_timeline.given_step(trace), arguments, json.loads(metrics.read_text()),
                        f"{figures['device']}, {figures['source']}")


def in_units(asked, build):
    """A run whose times are units: a product takes one, and messages by their size."""
    figures = json.loads(UNITS.read_text())
    if asked.equal_stages:  # only the layers take time
        figures["operations"] = {"default": {"seconds": 0, "flops": 1e30, "bytes": 1e30}}
        figures["links"] = dict.fromkeys(figures["links"], {"seconds": 0, "bytes": 1e30})
        return run(asked, build, figures)
    seconds_per_mib = 1e-3 * asked.units_per_mib
    if seconds_per_mib == 0:
        probe = run(asked, build, figures)
        rows = rows_of(probe, MEBIBYTES)
        sent = sum(bar.takes for row in rows for bar in row.bars)
        passes = sum(bar.end - bar.begin for bar in rows[0].bars if bar.kind in ("forward", "backward"))
        seconds_per_mib = 1e-3 * SHARE * passes / sent if sent else 0
    if seconds_per_mib > 0:
        for link in ("device", "network"):
            figures["links"][link]["bytes"] = 2**20 / seconds_per_mib
    return run(asked, build, figures)


# --- Rows ------------------------------------------------------------------------------------------


def in_words(bar, operations, sent):
    """ "forward of micro-batch 1 through chunk 0" of F1.0, "backward of conv1: relu_backward, ...", and what
    is sent."""
    found = re.fullmatch(r"[FB](\d+)(?:\.(\d+))?", bar.name)
    if found:
        return f"{bar.kind} of micro-batch {found[1]}" + (f" through chunk {found[2]}" if found[2] else "")
    name = f"{bar.kind} of {bar.name}" if bar.kind in ("forward", "backward") else bar.name
    others = ", ".join(operation for operation in dict.fromkeys(operations) if operation != name)
    return ": ".join(filter(None, (name, others))) + (f"; {sent} sent" if sent else "")


@dataclass(frozen=True)
class Counted:
    """In what bytes are counted."""

    name: str
    bytes: int

    def told(self, count):
        return f"{count / self.bytes:.4g} {self.name}"


KIBIBYTES, MEBIBYTES = Counted("KiB", 2**10), Counted("MiB", 2**20)
MANY = 10  # so many MiB are not told in KiB


@dataclass
class Lane:
    row: Row
    bar_of: dict  # of a slice, by its number in the trace; None for one that is not drawn
    waits: list  # (number of the slice, place of the other lane, number there)
    stream: str
    transfers: dict  # {("send" or "receive", when it begins): number of the slice}


def lane_of(lane, arguments, name, counted):
    """A lane with what its bars send; bars without length are left out."""
    drawn, bar_of, waits = [], {}, []
    for bar, numbers in step_rows.lane_bars(lane["slices"], step_rows.parts_of):
        own = [lane["first"] + number for number in numbers]
        sent = sum(arguments[number].get("sent_bytes", 0) for number in own)
        operations = [lane["slices"][number][2] for number in numbers]
        bar.begin, bar.end = round(bar.begin, 6), round(bar.end, 6)  # whole nanoseconds
        bar.takes = sent / counted.bytes
        bar.name = bar.name or next((NAMED[operation] for operation in operations if operation in NAMED), "")
        bar.text = in_words(bar, operations, counted.told(sent) if sent else "")
        if bar.along and not bar.name.startswith("along "):
            bar.text += f" along {bar.along}"
        if bar.end > bar.begin:
            drawn.append(bar)
        bar_of.update(dict.fromkeys(own, bar if bar.end > bar.begin else None))
        waits += [(number, tuple(place), other) for number in own
                  for *place, other in arguments[number].get("after", ())]
    transfers = {(operation, begin): lane["first"] + number
                 for number, (begin, _, operation, _) in enumerate(lane["slices"]) if operation in step_rows.TRANSFERS}
    row = Row(name, drawn, computes=lane["stream"] == step_rows.COMPUTE)
    return Lane(row, bar_of, waits, lane["stream"], transfers)


def drawn_before(lane, number):
    """The bar of a slice, or, where that is not drawn, the one before it on its lane."""
    return next((lane.bar_of[n] for n in range(number, -1, -1) if lane.bar_of.get(n)), None)


def drawn_after(lane, number):
    return next((lane.bar_of[n] for n in range(number, max(lane.bar_of) + 1) if lane.bar_of.get(n)), None)


def sends_of(lanes):
    """Of stages that are ranks, in their order: (lane, number of the receive, lane of the sender, number of the
    send). In a simulation the two begin together."""
    for stream, step in (("activations", 1), ("gradients", -1)):  # where to: 07-mesh/rank_pipeline.h
        stages = [lane for lane in lanes.values() if lane.stream == stream][::step]
        for sender, receiver in zip(stages, stages[1:]):
            for (operation, begin), number in receiver.transfers.items():
                sent = sender.transfers.get(("send", begin))
                if operation == "receive" and sent is not None:
                    yield receiver, number, sender, sent


def connect(lanes):
    """Gives the bars what they come after: the numbers that these bars have in Step.bars()."""
    numbers = {id(bar): number for number, bar in enumerate(bar for lane in lanes.values() for bar in lane.row.bars)}
    waits = [(lane, number, lanes[place], other) for lane in lanes.values()
             for number, place, other in lane.waits if place in lanes]
    for lane, number, other_lane, other in [*waits, *sends_of(lanes)]:
        bar, before = drawn_after(lane, number), drawn_before(other_lane, other)
        if bar and before:
            bar.after = tuple(sorted({*bar.after, numbers[id(before)]}))


def number_of(device):
    """ "1" of "sim:1": what is before it names a profile."""
    return device.rpartition(":")[2]


def name_of_lane(lane, lanes, what):
    """ "device 1", "compute", or both where both are several."""
    devices = {each["device"] for each in lanes}
    streams = [each["stream"] for each in lanes if each["device"] == lane["device"]]
    device = f"{what} {number_of(lane['device'])}"
    if len(devices) == 1:
        return lane["stream"]
    return device if len(streams) == 1 else f"{device} {lane['stream']}"


def rows_of(enqueued, counted, what="device"):
    used = [lane for lane in enqueued.step["lanes"] if lane["slices"]]
    lanes = {tuple(lane["place"]): lane_of(lane, enqueued.arguments[tuple(lane["place"])],
                                           name_of_lane(lane, used, what), counted) for lane in used}
    lanes = {place: lane for place, lane in lanes.items() if lane.row.bars}
    connect(lanes)
    return [lane.row for lane in lanes.values()]


def memory_row(changes, end, name, counted):
    """What is in use beyond the least of the step, which is always kept; None if that never changes."""
    least, most = (choose(used for _, used in changes) for choose in (min, max))
    if least == most:
        return None
    bars = []
    for (at, used), (until, _) in zip(changes, [*changes[1:], (end, 0)]):
        level = used - least
        bars.append(Bar(at, until, "", MEMORY, f"{counted.told(level)} more than is always kept",
                        takes=level / counted.bytes, gives=level / counted.bytes, level=level / (most - least)))
    return Row(f"{name}memory above {step_rows.mebibytes(least)}", [bar for bar in bars if bar.end > bar.begin],
               curve=True)


# --- Formulas --------------------------------------------------------------------------------------


def most_whole(enqueued, rows, asked):
    """Of sharded training, the most that a rank has whole at a time, beyond what it always has, in the
    rows' unit: while the backward of a unit runs, its gradients, those of the unit after it, whose
    reduction may still be under way, and its values with those that are fetched ahead."""
    kept, ranks = enqueued.metrics["kept_bytes"], enqueued.metrics["simulated_ranks"]
    mesh = Mesh.of(enqueued.metrics["mesh"]) if "mesh" in enqueued.metrics else None
    ranks = mesh.sizes.get("shard", 1) if mesh else ranks
    shares_values, shares_gradients = (kept[what] < kept["padded_model"] for what in ("parameters", "gradients"))
    reduced = [bar for row in rows for bar in row.bars
               if bar.name.startswith("reduce ") and (not mesh or bar.along == "shard")]
    sizes = [bar.takes * ranks / (ranks - 1) for bar in reduced[::-1]]  # of the units, in the order of forward
    prefetch = int(asked.options.get("--prefetch", "1"))
    reshard = asked.options.get("--reshard-after-forward", "yes") == "yes"

    def at(unit):
        ahead = min(unit, prefetch) if reshard else unit
        return (shares_values * sum(sizes[unit - ahead:unit + 1])
                + shares_gradients * sum(sizes[unit:unit + 2]))
    return max(map(at, range(len(sizes))), default=None)


def add_formulas(enqueued, rows, asked, counted):
    """What formulas say of the rows' counts, beside which they stand."""
    metrics = enqueued.metrics
    if "pipeline" in metrics.get("along", {}):
        return  # they are of one stage, and the rows of all
    sent = (metrics.get("bytes_per_step") or {}).get("predicted", (metrics.get("bytes_moved") or {})
                                                     .get("predicted_per_step"))
    if "along" in metrics:
        sent = sum(axis["predicted"] for axis in metrics["along"].values())
    sender = max((row for row in rows if not row.curve), key=lambda row: sum(bar.takes for bar in row.bars))
    if sent:
        sender.predicted_most = sent / counted.bytes
    memory = [row for row in rows if row.curve]
    if "kept_bytes" in metrics and memory:
        memory[0].predicted_most = most_whole(enqueued, rows, asked)


def in_bytes(count):
    """ "8 bytes", "1.3 KiB", "16.3 MiB"."""
    unit = MEBIBYTES if count >= MEBIBYTES.bytes else KIBIBYTES
    return f"{count / unit.bytes:,.1f} {unit.name}" if count >= KIBIBYTES.bytes else f"{count:.0f} bytes"


def sent_along(rows, counted):
    """By axes of a mesh, in words."""
    sent = {}
    for bar in (bar for row in rows for bar in row.bars if bar.along):
        sent[bar.along] = sent.get(bar.along, 0) + bar.takes
    return {axes: in_bytes(count * counted.bytes) for axes, count in sent.items()}


# --- A step ----------------------------------------------------------------------------------------


def pipeline(asked, build):
    """A pipeline of equal stages, its count the live activations."""
    enqueued = in_units(asked, build)
    [found] = enqueued.metrics
    p, m, chunks = found["stages"], found["micro_batches"], found["chunks"]
    what = "stage" if chunks == 1 else "device"
    rows = rows_of(enqueued, KIBIBYTES, what)
    for row, live in zip(rows, found["predicted_live_activations"], strict=True):
        row.predicted_most = live
        for bar in row.bars:
            bar.takes, bar.gives = float(bar.kind == "forward"), float(bar.kind == "backward")
    stages = f"{p} stages" if chunks == 1 else f"{p} devices of {chunks} chunks"
    formula, values = ("(p-1)/(m+p-1)", f"{p - 1}/{m + p - 1}") if chunks == 1 else (
        "(p-1)/(Vm+p-1)", f"{p - 1}/{chunks * m + p - 1}")
    return Step(f"{found['schedule']}: {stages}, {m} micro-batch{'es' * (m > 1)}", "forwards",
                enqueued.step["milliseconds"], rows, counted="live activations",
                formula={"text": f"bubble {formula} = {values}", "value": found["bubble"]["predicted"]},
                note="F0: forward of micro-batch 0, B0: its backward, which takes two forwards.")


def check(asked):
    if asked.units_per_mib and (asked.equal_stages or asked.profile):
        raise Refused("--units-per-mib: messages of equal stages take no time, and those of a profile its own; leave it "
                      "out")
    for name in asked.options:
        if name in SET_HERE:
            raise Refused(f"{name}: is set by show; leave it out")
        if asked.equal_stages and name not in OF_EQUAL_STAGES:
            raise Refused(f"{name}: a pipeline of equal stages has only {', '.join(OF_EQUAL_STAGES)}; for a real "
                          f"network's times give --devices sim:defaultx{asked.count()}, too")


def planned(asked, build):
    """The step that is asked for. Ends the program where the stage's refuses it."""
    check(asked)
    if asked.equal_stages:
        return pipeline(asked, build)
    units = asked.profile is None
    enqueued = in_units(asked, build) if units else run(asked, build, read_profile(asked.profile))
    end = enqueued.step["milliseconds"]
    large = any(sum(bar.takes for bar in row.bars) >= MANY for row in rows_of(enqueued, MEBIBYTES))
    counted = MEBIBYTES if large else KIBIBYTES
    rows = rows_of(enqueued, counted)
    memories = enqueued.step["memory"]
    rows += filter(None, (memory_row(one["changes"], end, "" if len(memories) == 1
                                     else f"device {number_of(one['device'])} ", counted) for one in memories))
    add_formulas(enqueued, rows, asked, counted)
    mesh = enqueued.metrics.get("mesh")
    ranks = enqueued.metrics.get("simulated_ranks", 1)
    of = f"rank 0 of {ranks}" if ranks > 1 else f"{asked.count()} device{'s' * (asked.count() > 1)}"
    if "pipeline" in enqueued.metrics:
        of = f"{ranks} ranks, the first one of each stage"
    model = enqueued.metrics["config"]["model"]
    given = " ".join(words_of(asked.options))
    times = UNIT_TIMES if units else f"Times are those of the profile: {enqueued.source}."
    title = f"{label(asked.stage)}: {model}, {of}" + (f", {given}" if given else "")
    return Step(title, "units" if units else "ms", end, rows, counted=f"{counted.name} sent by a stream, or in use",
                note=f"What {label(asked.stage)} enqueues on simulated devices. {times}",
                mesh=mesh and Mesh.of(mesh, sent_along(rows, counted)))
