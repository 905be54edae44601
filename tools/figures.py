#!/usr/bin/env python3
"""Make the simulated pictures of the README and the lessons: all of them, or those that are named.

  ./lockstep figures
  ./lockstep figures ring buckets --to FOLDER

A stage's program runs on simulated devices (docs/simulation.md). Their times are those of
tools/profiles/figures.json, chosen so that one sees what the stage is about. The same tree gives the same files.
--measured trains all stages for three epochs on this machine, and draws the figures of docs/figures that
`./lockstep compare` measures. That takes minutes."""

import argparse
import copy
import re
import subprocess
import tempfile
from functools import cached_property
from pathlib import Path

import step_plan
import step_rows
from command_line import Parser, complain, one_line, run_command
from compare import Refused
from figure_drawing import PARTS, PHASE, PURPOSES, Column, Groups, Panel, Picture, columns
from mesh_drawing import Mesh
from plain_files import write_whole
from sim_devices import path_of_profile, read_profile
from stages import ROOT
from step_rows import HOST, MEMORY, MESSAGES, OTHER, Bar, Row

PROFILE = path_of_profile("figures")
SLOW_CABLE = 1.25e7  # bytes per second: 100 Mbit/s
TOUCHING = 1e-3  # between two bars that are drawn as one
MOMENT = 2e-3  # of a step: what ends sooner cannot be seen
SIMULATED = "milliseconds, simulated"
FINITE = "all finite?"
ASKED = "The ranks tell each other whether the last training step had an infinite number, or NaN. If so, all of them stop."


def named(*kinds):
    """A legend of kinds that are called what they are."""
    return dict(zip(kinds, kinds))


PASSES = named("forward", "backward")
BUCKETS = {**PASSES, MESSAGES: "messages"}
UPDATE = {OTHER: "update"}
# Four equal layers of 784 features, and a small last one.
EQUAL_LAYERS = "--model mlp --width 196"
SYNCHRONISED = "--model seed-bn --nodes 2 --no-broadcast-buffers"


# --- Runs ------------------------------------------------------------------------------------------


class Run:
    """A step of a stage's program on simulated devices."""

    def __init__(self, build, stage, devices, words="", cable=None, launch=None):
        """`cable`: bytes per second between hosts, `launch`: seconds for an operation, if not the profile's."""
        options = step_plan.options_in(words.split())
        asked = step_plan.Asked(step_plan.stage_of(stage), devices, PROFILE, options=options)
        costs = read_profile(PROFILE)
        if cable:
            costs["links"]["network"]["bytes"] = cable
        if launch:
            costs["launch_seconds"] = launch
        self.enqueued = step_plan.run(asked, build, costs)
        self.step, self.end = self.enqueued.step, self.enqueued.step["milliseconds"]

    @cached_property
    def rows(self):
        """By names: "compute" and "communication" of a rank, "device 0", ... of a process with several."""
        return {row.name: row for row in step_plan.rows_of(self.enqueued, step_plan.MEBIBYTES)}

    def memory(self):
        """[ms, bytes in use from then on], without moments, as between a layer's free and the next one's gather."""
        changes = self.step["memory"][0]["changes"]
        until = [*(at for at, _ in changes[1:]), self.end]
        return [change for change, end in zip(changes, until) if end - change[0] > MOMENT * self.end]

    def kept(self):
        """Bytes that are always in use."""
        return min(used for _, used in self.memory())

    def most(self):
        """The most bytes beyond these."""
        return max(used for _, used in self.memory()) - self.kept()

    def messages(self):
        """[ms, length, operation, range] of each."""
        [lane] = [lane for lane in self.step["lanes"] if lane["stream"] == "communication"]
        return [part for part in lane["slices"] if part[1] > 0]


def bar_of(bar, **changes):
    """A copy for a picture, without the words of a page."""
    bar = copy.copy(bar)
    bar.text, bar.after = "", ()
    for name, value in changes.items():
        setattr(bar, name, value)
    return bar


def joined(row, same, name=None):
    """The row with one bar for neighbours of the same kind and same(bar), which is its name."""
    bars = []
    for bar in row.bars:
        bar = bar_of(bar, name=same(bar))
        last = bars[-1] if bars else None
        if last and (last.kind, last.name) == (bar.kind, bar.name) and bar.begin - last.end < TOUCHING:
            last.end = bar.end
        else:
            bars.append(bar)
    return Row(name or row.name, bars)


def by_pass(row, name=None):
    """Bars are whole passes, as far as nothing comes between their layers."""
    return joined(row, lambda bar: bar.kind if bar.kind in PASSES else bar.name, name)


def by_block(row, name=None):
    """Backward's bars are blocks of layers: "block4" of block4.0 and block4.1, "stem" of stem_bn and stem_conv."""
    return joined(row, lambda bar: bar.kind if bar.kind == "forward" else re.split(r"[._]", bar.name)[0], name)


def plain(row, name=None):
    return joined(row, lambda bar: bar.name, name)


def with_layers(passes, layers, narrow):
    """Passes as of by_pass(), with the names of their layers, and of bars shorter than `narrow` also that of the pass."""
    def name(bar):
        inside = [layer.name for layer in layers.bars if bar.begin <= layer.begin < bar.end]
        if bar.kind not in PASSES:
            return bar.name
        names = ", ".join(inside) if len(inside) < 3 else f"{inside[0]} to {inside[-1]}"
        return f"{bar.kind} {names}" if bar.end - bar.begin < narrow else names
    return Row(passes.name, [bar_of(bar, name=name(bar)) for bar in passes.bars])


def for_layers(messages, compute):
    """Messages in the middle of a pass, each with the names of the layer that waits for it and of the pass."""
    def layer(bar):
        if bar.name.startswith("bucket"):
            return bar.name
        waits = next(other for other in compute.bars if other.begin >= bar.end - TOUCHING)
        return f"{waits.name} {waits.kind}"
    return joined(messages, layer, "messages")


def by_purpose(row, name=None):
    """Copies and messages are what they are for: "gather" of "gather fc1"."""
    bars = [bar_of(bar, kind=word, name=word) if (word := bar.name.partition(" ")[0]) in PURPOSES else bar_of(bar)
            for bar in row.bars]
    return Row(name or row.name, bars)


def with_first_names(row, words):
    """The first bars of a kind of message get these words, {name: [words, ...]}; later ones have no name."""
    left = {name: iter(each) for name, each in words.items()}
    return Row(row.name, [bar_of(bar, name=next(left[bar.name], "") if bar.name in left else bar.name) for bar in row.bars])


def of_layers(rows, letters, of_sum):
    """The messages of layers fc1, fc2, ...: G1 of "gather fc1" by letters {"gather": "G"}. A sum in the middle of a pass
    has the name of_sum(the layer's bar before it). At first, the ranks tell each other whether the numbers of the last
    step were finite, and at the end their losses."""
    passes = [bar for bar in rows["compute"].bars if bar.kind in PASSES]

    def name(bar):
        word, _, layer = bar.name.partition(" ")
        before = [other for other in passes if other.end < bar.begin + TOUCHING]
        if word in letters:
            return letters[word] + layer.removeprefix("fc")
        return FINITE if not before else "mean of the losses" if len(before) == len(passes) else of_sum(before[-1])
    return Row("messages", [bar_of(bar, kind=MESSAGES, name=name(bar)) for bar in rows["communication"].bars])


def each_rank(rows):
    """What every rank computes, layer by layer."""
    return plain(rows["compute"], "each rank")


def curve(words, run, most):
    """A row with the height of what is in use beyond what is always kept; `most` bytes fill it."""
    changes, kept = run.memory(), run.kept()
    until = [*(at for at, _ in changes[1:]), run.end]
    return Row(f"memory of rank 0 beyond {kept / 2**20:.0f} MiB, which are always there; {words}",
               [Bar(at, to, "", MEMORY, level=(used - kept) / most) for (at, used), to in zip(changes, until)],
               curve=True, full=f"{run.most() / 2**20:.1f} MiB")


# --- Pictures --------------------------------------------------------------------------------------


def picture(title, panels, kinds, **other):
    return Picture(title, panels, kinds, SIMULATED, **other).svg()


def stages(build):
    """The step of every stage."""
    batch = f"{EQUAL_LAYERS} --batch-size 64"
    two_hosts = f"{batch} --nodes 2"
    panels = []

    def add(title, run, *rows):
        panels.append(Panel(title, rows, run.end, names=True))

    run = Run(build, "01", 1, batch)
    [row] = run.rows.values()
    add("01  one device", run, by_pass(row, "device 0"))
    run = Run(build, "02", 2, batch)
    words = {"scatter": ["scatter images", "scatter their gradients"], "gather": ["gather outputs"]}
    add("02  DataParallel, 2 devices: device 0 copies its weights (replicate), and adds up the gradients (reduce)", run,
        *(with_first_names(by_pass(row), words) for row in run.rows.values()))
    run = Run(build, "03", 2, f"{batch} --micro-batches 4")
    add("03a  pipeline, 2 devices, each with half of the layers. F0 is the forward of part 0 of the batch, B0 its backward",
        run, *(with_first_names(row, {"copy": [f"send {what}"]})
               for row, what in zip(run.rows.values(), ("outputs", "gradients"))))
    run = Run(build, "tensor-split", 1, two_hosts)
    add("03b  split layers, 2 ranks: each has half of fc1 to fc4. The outputs of fc2 and of fc4 are added up (sum)", run,
        each_rank(run.rows), of_layers(run.rows, {}, lambda layer: "sum" if layer.kind == "forward" else "sum of gradients"))
    run = Run(build, "04", 1, f"{two_hosts} --bucket-mb 2")
    add("04  DDP, 2 ranks, each with half of the batch: buckets of gradients are averaged while backward runs", run,
        by_pass(run.rows["compute"], "each rank"), plain(run.rows["communication"], "messages"))
    run = Run(build, "05", 1, SYNCHRONISED)
    compute, sent = run.rows["compute"], run.rows["communication"]
    add("05  SyncBatchNorm, 2 ranks: layers bn1 and bn2 wait for sums over the images of both ranks", run,
        with_layers(by_pass(compute, "each rank"), compute, 0.05 * run.end),
        with_first_names(for_layers(sent, compute), {"bucket 0": ["average gradients"]}))
    run = Run(build, "06", 1, two_hosts)
    add("06  FSDP, 2 ranks: each keeps half of the weights. G1 gathers all of fc1 for a moment, R1 averages its gradients",
        run, each_rank(run.rows), of_layers(run.rows, {"gather": "G", "reduce": "R"}, None))
    run = Run(build, "07", 2, f"{two_hosts} --mesh data=2,tensor=2")
    add("07  mesh of 2 x 2 ranks: two share each layer (T: sums as in 03b), two the batch (D2 averages fc2's gradients)", run,
        each_rank(run.rows), of_layers(run.rows, {"reduce": "D"}, lambda layer: (
            layer.name.replace("fc", "T") + " of gradients" * (layer.kind == "backward"))))
    return picture("A training step of each stage", panels, {**BUCKETS, **UPDATE}, heading=(
        "Simulated, on one scale of time; a message takes 0.1 ms or more. All but 05 train one network: layers fc1 to fc4,",
        "and fc5, which is small. fc1's backward is short, for nobody needs the gradients of its inputs, the images.",
        "One process drives devices 0 and 1. A rank is a process with a device of its own. All ranks do the same together.",
        f"{FINITE} {ASKED}"))


def step_01(build):
    """The host is a step ahead of its device."""
    run = Run(build, "01", 1, launch=5e-5)
    [row] = run.rows.values()
    moments = [at for at, *_ in run.step["hosts"][0]["enqueued"]]
    host = Row("host", [Bar(min(moments), max(moments), "the next step", HOST),
                        Bar(max(moments), run.end, "waits until the device has ended this step", PHASE)])
    return picture("A step of one device, and what its host enqueues meanwhile",
                   [Panel("The host enqueued this step while the device computed the step before",
                          [host, plain(row, "device")], run.end, names=True)],
                   {HOST: "host enqueues", **PASSES, **UPDATE})


def step_02(build):
    """Device 0 serves the others."""
    run = Run(build, "02", 4, f"{EQUAL_LAYERS} --batch-size 256")
    return picture("A step of DataParallel on four devices",
                   [Panel("", [by_pass(by_purpose(row)) for row in run.rows.values()], run.end, names=True)],
                   {**named("forward", "backward", *PURPOSES), **UPDATE})


def pipeline(build):
    """The bubble is what is empty."""
    panels = []
    for schedule, micro_batches in (("gpipe", 4), ("gpipe", 8), ("1f1b", 8)):
        options = {"--schedule": schedule, "--micro-batches": str(micro_batches)}
        step = step_plan.planned(step_plan.Asked(step_plan.PIPELINE, 4, options=options), build)
        share = 8 / micro_batches  # of the same batch
        rows = [Row(row.name, [bar_of(bar, begin=share * bar.begin, end=share * bar.end) for bar in row.bars])
                for row in step.rows]
        size = "half-size micro-batches" if share < 2 else "micro-batches"
        panels.append(Panel(f"{schedule}, {micro_batches} micro-batches: {100 * step.formula['value']:.0f} % idle (bubble); "
                            f"stage 0 keeps the activations of {step.rows[0].predicted_most} {size}",
                            rows, share * step.end))
    return Picture("A pipeline of four stages: one batch in four and in eight micro-batches", panels, PASSES).svg()


def complete(run):
    """A mark for each bucket: where the last operation has ended that its message waits for."""
    lanes, found = {tuple(lane["place"]): lane for lane in run.step["lanes"]}, {}
    for place, lane in lanes.items():
        for number, (*_, layer) in enumerate(lane["slices"], lane["first"]):
            for *other, waited in run.enqueued.arguments[place][number].get("after", ()):
                if layer.startswith("bucket") and tuple(other) in lanes:
                    before = lanes[tuple(other)]
                    begin, length, *_ = before["slices"][waited - before["first"]]
                    found[layer] = max(found.get(layer, 0), begin + length)
    return [Bar(at, at, name, "backward") for name, at in found.items()]


def buckets(build):
    """The same step, with and without overlap."""
    panels = []
    for title, words in (("--no-overlap: messages begin when backward has ended", "--no-overlap"),
                         ("with overlap: a bucket is sent when it is complete (below rank 0), and after the bucket before", "")):
        run = Run(build, "04", 1, "--nodes 2 --model resnet18 --batch-size 64 --bucket-mb 16 --no-broadcast-buffers "
                  f"{words}", SLOW_CABLE)
        rows = run.rows
        panels.append(Panel(title, [by_block(rows["compute"], "rank 0"), plain(rows["communication"], "messages")],
                            run.end, names=True, marks=() if words else complete(run)))
    return picture("A step of stage 04 without overlap, and with it", panels, {**BUCKETS, **UPDATE})


def ring(build):
    """What each rank sends, and adds. A part keeps its colour: each rank passes on what it has got."""
    run = Run(build, "04", 4, f"--all-reduce ring {EQUAL_LAYERS} --bucket-mb 1000")
    bars = [bar for bar, _ in step_rows.lane_bars(run.messages(), step_rows.operations_of)]
    first = bars[0].begin
    for bar in bars:
        bar.begin, bar.end = bar.begin - first, bar.end - first
    phases = [Bar(min(bar.begin for bar in half), max(bar.end for bar in half), name, PHASE)
              for name, half in (("reduce-scatter: send a part (A to D), add what came (+)", bars[:6]),
                                ("all-gather: send; then all have all sums", bars[6:]))]
    rows = [Row("", phases), *(Row(f"rank {rank}", []) for rank in range(4))]
    passed = list(PARTS)
    for bar in bars:
        if bar.kind == MESSAGES:
            drawn, passed = passed, passed[-1:] + passed[:-1]
        else:
            drawn = passed
        for row, part in zip(rows[1:], drawn):
            row.bars.append(bar_of(bar, kind=part, name=part[-1] if bar.kind == MESSAGES else "+"))
    arrived = tuple(bar.end for bar in bars if bar.kind == MESSAGES)
    return picture("An all-reduce of four ranks in a ring", [Panel("", rows, bars[-1].end, arrows=arrived)],
                   named(*PARTS))


def syncbn(build):
    """The passes wait for the messages of bn1 and bn2."""
    run = Run(build, "05", 1, SYNCHRONISED)
    rows = run.rows
    return picture("A step of stage 05",
                   [Panel("", [plain(rows["compute"], "rank 0"), for_layers(rows["communication"], rows["compute"])],
                          run.end, names=True)], {**BUCKETS, **UPDATE})


def pairs(rows, messages, layers):
    """A bar over each pair of `layers` in each pass, with the sum that follows."""
    for kind in PASSES:
        for pair in layers:
            first, second = (bar for bar in rows["compute"].bars if bar.kind == kind and bar.name in pair)
            sent = [bar for bar in messages.bars if abs(bar.begin - second.end) < TOUCHING]
            yield Bar(first.begin, max(bar.end for bar in (second, *sent)),
                      f"{first.name}, {second.name}{', and a sum' if sent else ': no sum'}", PHASE)


def tensor(build):
    """Two pairs of layers: forward waits for the sum of each, backward for the second pair's."""
    run = Run(build, "tensor-split", 1, f"{EQUAL_LAYERS} --nodes 2 --batch-size 64")
    messages = of_layers(run.rows, {}, lambda layer: "add up " + (
        f"{layer.name}'s outputs" if layer.kind == "forward" else f"the gradients of {layer.name}'s inputs"))
    over = Row("pairs", [*pairs(run.rows, messages, (("fc1", "fc2"), ("fc3", "fc4")))])
    panel = Panel("A step of two ranks: each has half of fc1 to fc4, and all of fc5, which is small",
                  [over, each_rank(run.rows), messages], run.end, names=True, notes=(
        "A rank has half of fc1's outputs. Its half of fc2 reads only these, so between these two layers nothing is sent.",
        "It computes one of two summands of each of fc2's outputs. These are added up over both ranks. So are fc4's.",
        "Backward adds up once: nobody needs the gradients of fc1's inputs, the images. So fc1's backward takes half the time.",
        f"{FINITE} {ASKED}"))
    return picture("A step of tensor-split", [panel], {**BUCKETS, **UPDATE})


def sharded_step(build):
    """Gathers run ahead, units are freed."""
    panels = []
    runs = [Run(build, "06", 1, f"{EQUAL_LAYERS} --nodes 2 --batch-size 128 --prefetch {prefetch}")
            for prefetch in (0, 1)]
    most = max(run.most() for run in runs)
    for run, title in zip(runs, ("--prefetch 0: a layer is gathered when the passes need it",
                                 "--prefetch 1: a layer is gathered while the layer before computes")):
        messages = []
        for begin, length, _, words in run.messages():
            purpose, _, layer = words.partition(" ")
            messages.append(Bar(begin, begin + length, layer, purpose or MESSAGES))
        panels.append(Panel(title, [plain(run.rows["compute"], "rank 0"), Row("messages", messages),
                                    curve("gathered layers, and gradients until they are reduced", run, most)],
                            run.end, names=True))
    return picture("A step of stage 06 without gathering ahead, and with it", panels,
                   {**named("forward", "backward", "gather", "reduce"), MESSAGES: "loss", **UPDATE})


def sharded_memory(build):
    """The four ways of sharding."""
    runs = []
    for way, name in (("none", "none (DDP)"), ("optimizer", "optimizer (ZeRO-1)"), ("gradients", "gradients (ZeRO-2)"),
                      ("parameters", "parameters (FSDP)")):
        run = Run(build, "06", 4, f"--model mlp --width 256 --batch-size 128 --shard {way}")
        changes = [(at / run.end, used / 2**20) for at, used in run.memory()]
        kept, peak = run.kept() / 2**20, (run.kept() + run.most()) / 2**20
        runs.append(Column([name, f"kept {kept:.0f}, peak {peak:.0f} MiB"], changes, kept))
    return columns("Memory of one of four ranks over a step, sharded in four ways", runs, "MiB",
                   "always there (activations, too)", "during a step")


def groups(of_mesh):
    """Who sends to whom along each axis, the nearest ranks first; every axis has two ranks."""
    return Groups("Which ranks send to each other", of_mesh.per_host, {f"along {axis}": [
        list(of_mesh.group(rank, (axis,))) for rank in range(of_mesh.ranks()) if of_mesh.coordinate(rank, axis) == 0]
        for axis in reversed(of_mesh.long_axes())})


def mesh_letter(bar, end):
    """G of "gather fc1", R of "reduce fc1", S of a sum in the passes. Along tensor the step begins with the word
    whether the one before was finite; the last messages are the loss's sum."""
    purpose = bar.name.partition(" ")[0]
    if purpose in PURPOSES:
        return purpose[0].upper()
    if bar.along == "tensor":
        return "S" if "all_reduce" in bar.text else FINITE
    return "loss" if bar.begin > 0.9 * end else ""


def mesh(build):
    """Whom each message goes to."""
    run = Run(build, "07", 4, f"{EQUAL_LAYERS} --nodes 2 --batch-size 320 --mesh data=2,shard=2,tensor=2")
    rows, of_mesh = run.rows, Mesh.of(run.enqueued.metrics["mesh"])
    lanes = [plain(rows["compute"], "rank 0")]
    for axis in reversed(of_mesh.long_axes()):
        bars = [bar for bar in rows["communication"].bars if bar.along == axis]
        lanes.append(Row(f"along {axis}", [bar_of(bar, name=mesh_letter(bar, run.end)) for bar in bars]))
    return picture("The groups of a mesh of eight ranks, and a step of one",
                   [Panel("A step of rank 0: G gathers a layer, R reduces gradients, S sums activations; the passes wait for S",
                          lanes, run.end, names=True)],
                   {**PASSES, **UPDATE}, groups=groups(of_mesh))


# File in docs/figures, without its ending: what draws it.
PICTURES = {"stages": stages, "step-01": step_01, "step-02": step_02, "pipeline": pipeline, "tensor": tensor,
            "buckets": buckets, "ring": ring, "syncbn": syncbn, "sharded-step": sharded_step,
            "sharded-memory": sharded_memory, "mesh": mesh}
MEASURED = ("accuracy", "epoch-time", "memory")  # by `compare`


def measure(folder):
    """Makes those of MEASURED."""
    with tempfile.TemporaryDirectory() as found:
        done = subprocess.run([ROOT / "lockstep", "compare", "--epochs", "3", "--figures", found])
        if done.returncode == 0:
            for name in MEASURED:
                write_whole(folder / f"{name}.svg", (Path(found) / f"{name}.svg").read_text())
    return done.returncode


def main(argv):
    parser = Parser(prog="lockstep figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a picture, of {', '.join(PICTURES)} (default: all)")
    parser.add_argument("--to", dest="folder", type=Path, default=ROOT / "docs/figures", metavar="FOLDER",
                        help="where they are written (default: docs/figures)")
    parser.add_argument("--measured", action="store_true", help=f"only what is measured: {', '.join(MEASURED)}")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        if options.measured:
            return measure(options.folder)
        for name in options.names or PICTURES:
            if name not in PICTURES:
                raise Refused(f"'{name}', expected one of {', '.join(PICTURES)}")
            target = options.folder / f"{name}.svg"
            write_whole(target, PICTURES[name](options.build))
            print(target)
    except (OSError, ValueError, Refused) as error:
        complain("lockstep figures", one_line(error))
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
