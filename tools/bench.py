#!/usr/bin/env python3
"""Measures the stages: `./lockstep bench [--quick | --thorough] [--part NAME] [--json FILE]`.

By default most parts, in about 5 minutes on two cores, medians of three rounds; --thorough measures
everything, medians of five. Contenders alternate: each runs once per round. Ctrl-C keeps and prints
what was measured until then. Machines are shared and noisy: compare the ratios of one run, not
figures of different days.
"""

import argparse
import datetime
import json
import subprocess
import sys

import bench_devices
import bench_meshes
import bench_pipelines
import bench_ranks
import bench_single
from bench_rounds import Measuring, Terminal
from bench_runs import machine
from command_line import Parser, complain, run_command
from plain_files import require_writable, write_whole
from progress import in_words

MODELS = ("seed", "resnet18")
# The parts by name: what each is about, and its groups of runs.
PARTS = {
    "one-device": ("Stage 01 on one device, beside PyTorch where --python has it",
                   bench_single.one_device),
    "stages": ("Stages on several devices of one thread, beside stage 01 on one",
               bench_devices.stages),
    "ranks": ("Two ranks, a process each of one thread, beside one process", bench_ranks.ranks),
    "messages": ("All-reduce of two ranks by message size", bench_ranks.messages),
    "overlap": (f"ResNet-18, batch 64, two ranks on two hosts joined by {bench_ranks.CABLE}",
                bench_ranks.overlap),
    "sharding": ("What ranks share out, and what that costs a step", bench_ranks.sharding),
    "prefetch": (f"Stage 06 with ResNet-18, batch 64, two ranks on two hosts joined by {bench_ranks.CABLE}",
                 bench_ranks.prefetch),
    "meshes": ("Four ranks as meshes, beside stages 04 and 06 and the same messages by hand",
               bench_meshes.meshes),
    "queues": ("One stream for the messages of all axes, beside a stream for each, on simulated devices",
               bench_meshes.queues),
    "bubbles": ("Pipelines of equal layers, beside the formula", bench_pipelines.bubbles),
    "pipelines": ("Pipelines of ResNet-18, width 16, batch 128", bench_pipelines.pipelines),
    "layers": ("Where a step goes (batch 64, 1 thread)", bench_single.layers),
    "start": ("From the start of a process to its first step", bench_single.start),
    "devices": ("Two devices beside one, and the least that they should reach",
                bench_devices.devices),
    "cores": ("Two CPU devices whose threads keep to their cores or are free, on a busy machine, too",
              bench_devices.cores),
}
QUICK = ("one-device", "layers")
DEFAULT = ("one-device", "stages", "ranks", "messages", "pipelines", "layers", "start")
ROUNDS, THOROUGH_ROUNDS = 3, 5


def torch_version(python):
    """The version of torch that `python` has, or an empty string."""
    try:
        result = subprocess.run([python, "-c", "import torch; print(torch.__version__)"],
                                capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def parse_options(argv):
    listed = "\n".join(f"  {name:<11} {about}" for name, (about, _) in PARTS.items())
    parser = Parser(
        prog="lockstep bench", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__.partition("\n\n")[2], epilog=f"parts:\n{listed}")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    size.add_argument("--thorough", action="store_true",
                      help="all parts, more batch sizes, threads and devices, five rounds")
    parser.add_argument("--part", action="append", metavar="NAME", choices=PARTS,
                        help="only this part (see below); may be given again")
    parser.add_argument("--model", choices=MODELS, help="one network instead of both")
    parser.add_argument("--batch", type=int, help="one-device: this batch size only")
    parser.add_argument("--threads", type=int, help="one-device: this number of threads only")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: 3; with --thorough: 5)")
    parser.add_argument("--data", default="fashion-mnist", help="data set for the part named start")
    parser.add_argument("--python", default="python3", help="a Python that may have torch")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    options = parser.parse_args(argv)
    least = THOROUGH_ROUNDS if options.thorough else ROUNDS
    options.rounds = least if options.rounds is None else options.rounds
    if options.rounds < least:
        parser.error(f"--rounds {options.rounds}: expected {least} or more, for a median")
    try:
        if options.json:
            require_writable(options.json)
    except OSError as error:
        parser.error(f"--json {options.json}: {error.strerror}; choose another place")
    if options.quick and options.part:
        parser.error(f"--quick: chooses {' and '.join(QUICK)}, and --part {' '.join(options.part)} chooses, too; "
                     "leave one of them out")
    for name in ("batch", "threads"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    options.models = (options.model,) if options.model else MODELS
    options.parts = (options.part or (QUICK if options.quick else PARTS if options.thorough
                                      else DEFAULT))
    return options


def announce(options, groups):
    """What will be measured, and about how long that takes."""
    names = ", ".join(dict.fromkeys(group.part for group in groups))
    runs = sum(len(group.steps()) for group in groups)
    seconds = sum(group.seconds() for group in groups)
    torch = (f"PyTorch {options.torch}, alternating" if options.torch else
             f"no PyTorch in {options.python} (--python names another)")
    print(f"{machine()}, {datetime.date.today()}; medians of {options.rounds} rounds; {torch}\n"
          f"{names}: {runs} runs, about {in_words(seconds)} on two cores; Ctrl-C keeps and prints "
          "what was measured until then", flush=True)


def measure(measuring):
    """Makes all runs. Returns the exit status, and why it did not make all of them."""
    try:
        measuring.run()
    except KeyboardInterrupt:
        return 130, "Ctrl-C"
    except SystemExit as end:  # a signal, by child_processes
        return end.code, f"signal {end.code - 128}"
    except subprocess.CalledProcessError as error:
        return 1, f"{' '.join(map(str, error.cmd))} ended with status {error.returncode}"
    return 0, ""


def write_json(options, groups, stopped):
    parts = {}
    for group in groups:
        if group.found:
            parts.setdefault(group.part, []).append(group.figures(group.found))
    write_whole(options.json, json.dumps(
        {"machine": machine(), "date": str(datetime.date.today()), "torch": options.torch,
         "rounds": options.rounds, "stopped": stopped, "parts": parts}, indent=1) + "\n")


def main(argv):
    options = parse_options(argv)
    options.torch = torch_version(options.python)
    titles = {name: PARTS[name][0] + ":" for name in options.parts}
    groups = [group for name in titles for group in PARTS[name][1](options)]
    if not groups:
        sys.exit(f"bench: --part {' '.join(options.parts)} has nothing to measure with --model "
                 f"{options.model}; leave out --model")
    announce(options, groups)
    status, stopped = measure(Measuring(groups, titles, Terminal()))
    if options.json:
        try:
            write_json(options, groups, stopped)
        except OSError as error:
            complain("bench", f"--json: cannot write {options.json}: {error.strerror}; what was measured "
                     "stands above")
            return 1
    if stopped:
        complain("bench", f"stopped before the end: {stopped}")
    return status


if __name__ == "__main__":
    run_command(main)
