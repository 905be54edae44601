#!/usr/bin/env python3
"""Predict the time of every stage on devices that this machine does not have: `./lockstep predict`.

Runs the stages' own programs on simulated devices (docs/simulation.md) and sets them side by side. The
same options give the same figures on any machine. Options not listed here go to the stages that have them:
--mesh pipeline=4 is for stage 07 alone.

--sweep devices=1,2,4,8 repeats it for each number of devices, on as many hosts as they need; --sweep
link=1gbit,10gbit for each bandwidth of the link between hosts.

--check compares such predictions with this machine's own steps, after ./lockstep calibrate:

  ./lockstep predict --check --devices sim:this-machinex2
"""

import argparse
import functools
import json
import re
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import figure_drawing
import prediction_check
import summary_table
from bench_runs import ROOT, STAGE
from command_line import Parser, complain, run_command
from compare import Refused, chosen_stages, measured_run
from plain_files import require_writable, write_whole
from sim_devices import devices_of, read_profile
from stages import all_stages, label, path_of

STEPS = 4  # the first is left out, as in measuring; all others take the same time
MOST_IMAGES = 1_000_000  # of a blank data set
IN_ONE_PROCESS = ("02-dataparallel", "03-model-split")  # their devices are one host's
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# What a table is about, and a check is not.
OF_TABLES = ("nodes", "stages", "model", "optimizer", "batch_per_device", "batch_size", "sweep", "json", "figure")
RESERVED = ("--metrics", "--max-steps", "--epochs", "--data", "--trace")


# --- What is asked --------------------------------------------------------------------------------

@dataclass(frozen=True)
class Job:
    """One simulated run."""

    stage: str
    profile: Path
    devices: int
    nodes: int
    batch: int  # of a step, over all devices
    options: tuple

    def words(self):
        steps = max(1, min(STEPS, MOST_IMAGES // self.batch))
        words = ["--devices", f"sim:{self.profile}x{self.devices // self.nodes}",
                 "--data", f"blank:{steps * self.batch}:{max(64, self.devices)}", "--batch-size", self.batch,
                 "--max-steps", STEPS, "--epochs", -(-STEPS // steps), *self.options]
        return [str(word) for word in (words + ["--nodes", self.nodes] if self.nodes > 1 else words)]


@dataclass
class Row:
    """What a run gave; without metrics, why there are none."""

    job: Job
    metrics: dict = None
    reason: str = ""
    reference: "Row" = field(default=None, repr=False)  # stage 01's on one device

    @property
    def seconds(self):
        return statistics.median(self.metrics["step_seconds"][1:])

    @property
    def rate(self):
        return self.job.batch / self.seconds

    @property
    def speed_up(self):
        return self.rate / self.reference.rate

    @property
    def peak_bytes(self):
        return max(self.metrics["peak_memory_bytes"])

    def share_of(self, flops):
        """Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B), of devices with this rate."""
        done = self.metrics["training_flops"] / self.metrics["steps"]
        return done / (self.seconds * self.job.devices * flops)


def positive(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}', expected a whole number from 1")
    return int(text)


def sweep_of(text):
    """("devices", [1, 2]) or ("link", [("1gbit", bytes per second)])."""
    kind, _, values = text.partition("=")
    words = values.split(",")
    if kind == "devices" and all(word.isdigit() and int(word) for word in words):
        return kind, [int(word) for word in words]
    rates = [re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", word) for word in words]
    if kind == "link" and all(rate and float(rate[1]) > 0 for rate in rates):
        return kind, [(rate[0], float(rate[1]) * BITS[rate[2]] / 8) for rate in rates]
    raise argparse.ArgumentTypeError(f"'{text}', expected devices=1,2,4 or link=100mbit,1gbit")


def parse_options(argv):
    parser = Parser(prog="lockstep predict", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--devices", default="sim:8", help="devices of a host, for instance sim:h100x8; default: %(default)s")
    add("--nodes", type=positive, default=1, metavar="N", help="hosts with so many devices each; default: 1")
    add("--stages", metavar="LIST", help="for instance 04,06; default: all")
    add("--model", default="resnet18", help="the network of every stage; default: %(default)s")
    add("--optimizer", default="sgd", help="the optimizer of every stage; default: %(default)s")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-per-device", type=positive, metavar="N", help="default: 64")
    batch.add_argument("--batch-size", type=positive, metavar="N", help="samples of a step, over all devices")
    add("--sweep", type=sweep_of, metavar="WHAT=LIST", help="devices=1,2,4 or link=100mbit,1gbit")
    add("--check", action="store_true", help="measure steps on this machine, beside their predictions; takes minutes")
    add("--rounds", type=positive, metavar="N", help="rounds of --check; default: 5")
    add("--json", metavar="FILE", type=Path, help="write everything to this file")
    add("--figure", metavar="FILE", type=Path, help="draw a sweep, as SVG")
    add("--build", metavar="DIR", type=Path, default=ROOT / "build", help="where the programs are")
    options, options.others = parser.parse_known_args(argv)
    for word in options.others:
        if word.partition("=")[0] in RESERVED:
            raise Refused(f"{word}: is set by predict; leave it out, or start the stage itself")
    if options.rounds and not options.check:
        raise Refused("--rounds: is of --check; give --check, too")
    of_table = [name for name in OF_TABLES if getattr(options, name) != parser.get_default(name)]
    if options.check and (options.others or of_table):
        raise Refused("--check: measures configurations of its own; give no more than --devices, --rounds and --build")
    if options.figure and not options.sweep:
        raise Refused("--figure: draws a sweep; give --sweep devices=... or link=..., too")
    options.profile, options.per_host = devices_of(options.devices)
    options.figures = read_profile(options.profile)
    options.stages = chosen_stages(options.stages, all_stages()) if options.stages else all_stages()
    return options


# --- Running --------------------------------------------------------------------------------------

def hosts_for(devices, options):
    """The number of hosts that hold so many devices."""
    if devices <= options.per_host:
        return 1
    if devices % options.per_host:
        raise Refused(f"--sweep: {devices} devices do not fill hosts of {options.per_host}; take "
                      f"multiples of {options.per_host}, or another --devices")
    return devices // options.per_host


def batch_of(devices, options):
    return options.batch_size or devices * (options.batch_per_device or 64)


@functools.cache
def options_known(program):
    """The options in its --help."""
    text = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    return set(re.findall(r"--[\w-]+", " ".join(re.findall(r"^ +(-\S+)", text, re.MULTILINE))))


def others_for(stage, options):
    """The further words without options that this stage does not have, but another one of the table has."""
    known = {each: options_known(options.build / path_of(each)) for each in {STAGE, stage, *options.stages}}
    words, goes_on = [], True
    for word in options.others:
        name = word.partition("=")[0]
        if name.startswith("--"):
            goes_on = name in known[stage] or not any(name in names for names in known.values())
        words += [word] * goes_on
    return words


def job_of(stage, devices, nodes, options):
    words = ("--model", options.model, "--optimizer", options.optimizer, *others_for(stage, options))
    return Job(stage, options.profile, devices, nodes, batch_of(devices, options), words)


def run(job, options, reference=None):
    if job.stage in IN_ONE_PROCESS and job.nodes > 1:
        return Row(job, reason=f"is one process: devices of one host, not of {job.nodes}")
    _, reason, metrics = measured_run(options.build / path_of(job.stage), job.words(), quiet=True)
    row = Row(job, metrics, reason)
    row.reference = reference or row
    return row


def rows_for(devices, nodes, options):
    """A row per stage, stage 01's on one device first."""
    reference = run(job_of(STAGE, 1, 1, options), options)
    if not reference.metrics:
        raise Refused(f"{STAGE} on one device: {reference.reason}")
    rows = [reference] if STAGE in options.stages else []
    return rows + [run(job_of(stage, devices, nodes, options), options, reference)
                   for stage in options.stages if stage != STAGE]


# --- The table ------------------------------------------------------------------------------------

COLUMNS = ("stage", "devices", "batch", "ms/step", "samples/s", "speed-up", "efficiency",
           "exposed", "bubble", "peak MiB", "MFU")


def cells(row, options):
    job, metrics = row.job, row.metrics
    if not metrics:
        return (label(job.stage), str(job.devices), str(job.batch), *["-"] * 8)
    exposed = summary_table.communication_share(metrics)
    bubble = (metrics.get("bubble") or {}).get("measured")
    if "pipeline" in metrics:  # of ranks: rank 0's
        bubble = metrics["pipeline"]["waited_seconds_per_step"] / row.seconds
    rate = max(each["flops"] for each in options.figures["operations"].values())
    fits = row.peak_bytes <= options.figures["memory_bytes"]
    return (label(job.stage), str(job.devices), str(job.batch), f"{1e3 * row.seconds:.3f}",
            f"{row.rate:.0f}", f"{row.speed_up:.2f}", f"{100 * row.speed_up / job.devices:.0f} %",
            summary_table.show("{:.0f} %", None if exposed is None else 100 * exposed),
            summary_table.show("{:.0f} %", None if bubble is None else 100 * bubble),
            f"{row.peak_bytes / 2**20:.1f}" + ("" if fits else " !"), f"{100 * row.share_of(rate):.1f} %")


def lines_of(table):
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                    zip(line[1:], widths[1:]))]) for line in table]


def fitting_batch(row, options):
    """The largest half, quarter ... of the batch per device that fits, or None."""
    batch = row.job.batch
    while batch // 2 >= row.job.devices:
        batch //= 2
        smaller = run(replace(row.job, batch=batch), options)
        if smaller.metrics and smaller.peak_bytes <= options.figures["memory_bytes"]:
            return batch // row.job.devices
    return None


def advice(rows, options):
    """What would make fit what does not."""
    memory = options.figures["memory_bytes"]
    ran = [row for row in rows if row.metrics]
    fitting = [label(row.job.stage) for row in ran if row.peak_bytes <= memory and row.job.devices > 1]
    for row in [row for row in ran if row.peak_bytes > memory]:
        batch = fitting_batch(row, options)
        ways = [f"--batch-per-device {batch}"] if batch else []
        ways += [f"with this batch in {', '.join(fitting)}"] if fitting else []
        yield (f"! {label(row.job.stage)} needs {row.peak_bytes / 2**20:.0f} MiB of {memory / 2**20:.0f}: it "
               + (f"fits {' or '.join(ways)}" if ways else "fits with no batch; take more devices"))


def report(rows, options):
    print("\n".join(lines_of([COLUMNS, *(cells(row, options) for row in rows)])))
    for row in rows:
        if row.reason:
            print(f"{label(row.job.stage)}: {row.reason}")
    for line in advice(rows, options):
        print(line)


def say_what_it_is(options):
    figures = options.figures
    batch = (f"a batch of {options.batch_size} in all (--batch-size)" if options.batch_size else
             f"{options.batch_per_device or 64} samples per device (--batch-per-device)")
    print(f"{options.model}, {options.optimizer}, {batch}; {figures['device']}, {figures['source']}")
    print(f"speed-up: samples/s over {STAGE}'s on one device; exposed: of a step, in which a device waits for "
          "others; MFU: of the profile's highest rate\n")


# --- Sweeps ---------------------------------------------------------------------------------------

def by_stage(sweep):
    """{stage: [row or None for each value]}."""
    stages = dict.fromkeys(row.job.stage for _, rows in sweep for row in rows if row.job.stage != STAGE)
    return {stage: [next((row for row in rows if row.job.stage == stage and row.metrics), None)
                    for _, rows in sweep] for stage in stages}


def say_reasons(sweep):
    for stage in dict.fromkeys(row.job.stage for _, rows in sweep for row in rows if row.reason):
        left_out = {name: row.reason for name, rows in sweep for row in rows if row.job.stage == stage}
        names = ", ".join(name for name, reason in left_out.items() if reason)
        print(f"{label(stage)}, {names}: {next(filter(None, left_out.values()))}")


def sweep_devices(values, options):
    sweep = [(str(n), rows_for(n, hosts_for(n, options), options)) for n in values]
    print("efficiency: samples/s per device, of one device's")
    table = [("devices", *(name for name, _ in sweep))]
    table += [(label(stage), *("-" if row is None else f"{100 * row.speed_up / row.job.devices:.0f} %"
                               for row in rows)) for stage, rows in by_stage(sweep).items()]
    print("\n".join(lines_of(table)))
    say_reasons(sweep)
    return sweep


def with_link(options, rate, folder):
    """The options with a profile whose hosts are linked at this rate, in bytes per second."""
    figures = json.loads(json.dumps(options.figures))
    figures["links"]["network"]["bytes"] = rate
    path = Path(folder) / f"{options.profile.stem}.json"
    path.write_text(json.dumps(figures))
    return argparse.Namespace(**{**vars(options), "profile": path, "figures": figures})


def sweep_links(values, options):
    if options.nodes < 2:
        raise Refused("--sweep link: the link is between hosts; give --nodes 2 or more, too")
    sweep = []
    with tempfile.TemporaryDirectory() as folder:
        for name, rate in values:
            linked = with_link(options, rate, folder)
            sweep.append((name, rows_for(options.per_host * options.nodes, options.nodes, linked)))
    print("milliseconds of a step; *: the fastest")
    stages = by_stage(sweep)
    fastest = [min((rows[i] for rows in stages.values() if rows[i]), key=lambda row: row.seconds,
                   default=None) for i in range(len(sweep))]
    table = [("link", *(name for name, _ in sweep))]
    table += [(label(stage), *("-" if row is None else f"{1e3 * row.seconds:.3f}"
                               + ("*" if row is fastest[i] else " ") for i, row in enumerate(rows)))
              for stage, rows in stages.items() if any(rows)]
    print("\n".join(lines_of(table)))
    say_reasons(sweep)
    for (before, was), (after, now) in zip(zip(sweep, fastest), list(zip(sweep, fastest))[1:]):
        if was and now and was.job.stage != now.job.stage:
            print(f"between {before[0]} and {after[0]} the fastest changes from "
                  f"{label(was.job.stage)} to {label(now.job.stage)}")
    return sweep


def draw(sweep, kind, path):
    series = {label(stage): {name: 100 * row.speed_up / row.job.devices if kind == "devices" else 1e3 * row.seconds
                             for (name, _), row in zip(sweep, rows) if row} for stage, rows in by_stage(sweep).items()}
    series = {name: points for name, points in series.items() if points}
    across, up = ("devices", "efficiency, %") if kind == "devices" else ("link between hosts", "ms per step")
    if series:
        write_whole(path, figure_drawing.lines(f"{up}, by {across}", {"": series}, across, up, least=0))


# --- Main -----------------------------------------------------------------------------------------

def as_json(sweep, options):
    runs = [{"value": name, "stage": row.job.stage, "devices": row.job.devices, "nodes": row.job.nodes,
             "batch_size": row.job.batch, "reason": row.reason, "metrics": row.metrics,
             **({"step_seconds": row.seconds, "samples_per_second": row.rate,
                 "speed_up": row.speed_up, "peak_memory_bytes": row.peak_bytes}
                if row.metrics else {})} for name, rows in sweep for row in rows]
    return json.dumps({"profile": options.figures, "runs": runs}, indent=1) + "\n"


def predict(options):
    for path in filter(None, (options.json, options.figure)):
        require_writable(path)
    say_what_it_is(options)
    kind, values = options.sweep or (None, None)
    if kind == "devices":
        sweep = sweep_devices(values, options)
    elif kind == "link":
        sweep = sweep_links(values, options)
    else:
        sweep = [("", rows_for(options.per_host * options.nodes, options.nodes, options))]
        report(sweep[0][1], options)
    if options.json:
        write_whole(options.json, as_json(sweep, options))
    if options.figure:
        draw(sweep, kind, options.figure)
    return 0 if any(row.metrics for _, rows in sweep for row in rows) else 1


def main(argv):
    try:
        options = parse_options(argv)
        return prediction_check.check(options) if options.check else predict(options)
    except (Refused, OSError) as error:
        complain("lockstep predict", error)
        return 1


if __name__ == "__main__":
    run_command(main)
