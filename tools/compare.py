#!/usr/bin/env python3
"""Train the stages side by side and print one table: `./lockstep run` and `./lockstep compare`.

`run` prints the table; `compare` is the same and also keeps everything measured in
build/comparison/, as JSON and as figures. Options not listed here are passed to every stage
(build/01-single-gpu/01-single-gpu --help lists them).

All stages do the same work: they train with the same options and the same order of samples (--order
sampler). A stage with another default network or optimizer (stage 05: seed-bn, stages 06 and 07: mlp,
adamw) is compared with a further run of stage 01 that has them, too. A speed-up is shown where ten
untimed steps (the stage's --baseline) proved that both train the same weights.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import compare_figures
import compare_timeline
import summary_table
from bench_runs import ROOT, STAGE, machine, round_time, speed_up
from child_processes import started
from command_line import Parser, complain as complain_as, run_command
from plain_files import require_writable, write_whole
from stages import all_stages, label, path_of

PROOF_STEPS = 10  # that --baseline compares; its timed runs are as short as possible
TIMED_STEPS = 2
TRACED_RUNS = 5  # of which a typical one is drawn
TRACED_SECONDS, TRACED_STEPS = 0.3, (12, 200)  # of each of them; at least and at most so many steps
RESERVED = {  # options of the stages that serve one run only
    "--metrics": "--json FILE keeps the metrics of all runs",
    "--trace": "--figures DIR draws one step of every stage",
    "--save": "every stage would write this file; start a stage itself for its weights",
    "--baseline": "the speed-up over stage 01 is always measured here",
}
MINE = ("--mine, in a student's tree: runs the student's own functions only, without the prebuilt "
        "solutions of what is open")


# --- Options -------------------------------------------------------------------------------------

class Refused(Exception):
    """The comparison cannot be made; the message is the one line to show."""


def chosen_stages(text, existing):
    """The stages of a list such as 01,04 (or full names), in their own order."""
    wanted = set()
    for word in text.split(","):
        found = [stage for stage in existing if word in (stage, stage[:2], label(stage))]
        if not found:
            raise Refused(f"--stages: '{word}' is no stage, expected some of: {', '.join(existing)}"
                          " (the number is enough)")
        wanted.update(found)
    return sorted(wanted)


def require_folder(option, folder):
    """Makes sure that a file can be written there, before anything is trained."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(f"{option}: cannot write into {folder}: {error.strerror}; "
                      "choose another place") from error


def prepare_outputs(options):
    if options.figures:
        try:
            options.figures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"--figures: cannot make the folder {options.figures}: {error.strerror}; "
                          "choose another place") from error
        require_folder("--figures", options.figures)
    if options.json:
        try:
            require_writable(options.json)
        except OSError as error:
            raise Refused(f"--json: cannot write {options.json}: {error.strerror}; choose another "
                          "place") from error


def parse_options(argv):
    parser = Parser(
        prog="lockstep run (or compare)", description=__doc__, epilog=MINE,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", metavar="LIST", help="for instance 01,04; default: all")
    add("--json", metavar="FILE", type=Path, help="write everything measured to this file")
    add("--figures", metavar="DIR", type=Path, help="draw the figures into this folder")
    add("--devices", metavar="LIST", help="devices of every stage; stage 01 takes the first")
    add("--data", help="the data set")
    add("--model", help="the network of every stage; default: each stage's own")
    add("--optimizer", help="the optimizer of every stage; default: each stage's own")
    add("--order", default="sampler", help="order of the samples, in every stage; default: %(default)s")
    add("--epochs", metavar="N", help="default: 1")
    add("--max-steps", metavar="N", help="stop after this many steps")
    add("--build", metavar="DIR", type=Path, default=ROOT / "build",
        help="where the programs were built")
    options, options.others = parser.parse_known_args(argv)
    for word in options.others:
        if reason := RESERVED.get(word.partition("=")[0]):
            raise Refused(f"{word}: belongs to one run, and this makes several; {reason}")
    existing = all_stages()
    options.stages = chosen_stages(options.stages, existing) if options.stages else existing
    return options


def arguments(options, **changes):
    """The command line of a stage: the user's options with changes (None: left out)."""
    named = {name: getattr(options, name)
             for name in ("devices", "data", "model", "optimizer", "order", "epochs", "max_steps")}
    named |= changes
    words = [word for name, value in named.items() if value is not None
             for word in ("--" + name.replace("_", "-"), str(value))]
    return words + options.others


# --- Running a stage -----------------------------------------------------------------------------

def program_of(stage, options):
    return options.build / path_of(stage)


def run_program(program, words, quiet):
    """Runs a program; returns its exit status and the line that says why it failed."""
    output = subprocess.DEVNULL if quiet else None
    lines = []
    try:
        with started([program, *words], stdout=output, stderr=subprocess.PIPE, text=True,
                     errors="replace") as process, process.stderr:
            for line in process.stderr:
                lines.append(line.rstrip())
                if not quiet:
                    print(lines[-1], file=sys.stderr, flush=True)
            status = process.wait()
    except OSError as error:
        return 127, f"cannot be started: {error.strerror}"
    if status < 0:
        return 128 - status, f"killed by {signal.Signals(-status).name}"
    if status == 0:
        return 0, ""
    reasons = [line for line in lines if line.startswith("error: ")] or lines
    return status, reasons[0].removeprefix("error: ") if reasons else "it gave no reason"


def measured_run(program, words, quiet=False):
    """Runs a stage; returns its exit status, why it failed, and its metrics (None if it failed)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.json"
        status, reason = run_program(program, [*words, "--metrics", str(path)], quiet)
        if status != 0:
            return status, reason, None
        try:
            return 0, "", json.loads(path.read_text())
        except (OSError, ValueError) as error:
            return 1, f"ended well but left no metrics ({error})", None


def train(stage, options, **changes):
    """A timed run, in the form that the JSON file has."""
    words = arguments(options, **changes)
    print(f"== {stage}" + "".join(f" {value}" for value in changes.values()), flush=True)
    status, reason, metrics = measured_run(program_of(stage, options), words)
    if status != 0:
        complain(f"{stage} failed (status {status}): {reason}")
    return {"stage": stage, "arguments": words, "status": status, "error": reason,
            "metrics": metrics}


def complain(text):
    complain_as("lockstep", text)


def stand_in_data(options, samples):
    """For short runs that need no accuracy: images of the same size, generated in no time.
    CIFAR-10's images are larger, so those are read."""
    return options.data if options.data == "cifar10" else f"synthetic:{samples}:64"


def check_devices(options):
    """Finds out before anything is trained whether the programs and every device exist."""
    if not os.access(program_of(STAGE, options), os.X_OK):
        raise Refused(f"--build: no program {program_of(STAGE, options)}; ./lockstep run builds it")
    for device in dict.fromkeys((options.devices or "").split(",")):
        if device:
            words = ["--devices", device, "--data", "synthetic:64:64", "--max-steps", "1"]
            status, reason = run_program(program_of(STAGE, options), words, quiet=True)
            if status != 0:
                raise Refused(f"--devices: {reason}")


# --- Comparing -----------------------------------------------------------------------------------

def work_of(run):
    """What a run trained: equal for two runs of the same work."""
    return {name: run["metrics"]["config"][name] for name in ("model", "optimizer", "order")}


def find_reference(run, runs):
    """The run of stage 01 that did the same work; None if there is none."""
    return next((other for other in runs if other["stage"] == STAGE and other["metrics"]
                 and work_of(other) == work_of(run)), None)


def add_missing_reference(run, runs, options):
    """Trains with stage 01 the work of another stage's run, if that has not been done."""
    failed = any(other["stage"] == STAGE and other["status"] != 0 for other in runs)
    if STAGE in options.stages and not failed and find_reference(run, runs) is None:
        work = work_of(run)
        runs.append(train(STAGE, options, model=work["model"], optimizer=work["optimizer"]))


def prove(run, reference, options):
    """Fills in the proof that a run's stage trains stage 01's weights, or why there is none."""
    if reference is run:
        return
    metrics = run["metrics"]
    if reference is None:
        run["no_speedup"] = f"no run of {STAGE} on {summary_table.network(metrics)} to compare with"
        return
    changes = {"data": stand_in_data(options, PROOF_STEPS * metrics["batch_size"]),
               **work_of(run), "epochs": 1, "max_steps": TIMED_STEPS}
    status, reason, proved = measured_run(program_of(run["stage"], options),
                                          ["--baseline", *arguments(options, **changes)], quiet=True)
    if status == 0:
        run["proof"] = {name: proved["baseline"][name]
                        for name in ("proof", "proof_value", "proof_limit")}
    else:
        run["no_speedup"] = reason


def seconds_per_sample(run):
    return 1 / run["metrics"]["samples_per_second"]


def trace_words(run, options):
    """The options of a short run to be traced. A timeline is one step: a few serve, and more where
    they are short."""
    metrics = run["metrics"]
    few, many = TRACED_STEPS
    steps = int(TRACED_SECONDS * metrics["samples_per_second"] / metrics["batch_size"])
    steps = min(max(steps, few), many)
    return arguments(options, data=stand_in_data(options, steps * metrics["batch_size"]),
                     **work_of(run), epochs=1, max_steps=steps)


def trace_step(run, options):
    """One typical step's timeline of a stage, from short runs with and without a trace, in turn;
    None if there is none."""
    program, words = program_of(run["stage"], options), trace_words(run, options)
    steps, untraced = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(TRACED_RUNS):
            trace = Path(folder) / f"trace{number}.json"
            status, reason, metrics = measured_run(program, words, quiet=True)
            if status == 0:
                status, reason = run_program(program, [*words, "--trace", str(trace)], quiet=True)
            if status != 0:
                break
            untraced.append(1e3 * round_time(metrics["step_seconds"]))
            steps.append(compare_timeline.one_step(trace))
    if status == 0:
        step, reason = compare_timeline.typical_step(steps, untraced)
    if reason:
        complain(f"{run['stage']}: no timeline: {reason}")
        return None
    return step


def train_all(options):
    """All timed runs, in the table's order."""
    runs = []
    for stage in options.stages:
        runs.append(train(stage, options))
        if runs[-1]["metrics"]:
            add_missing_reference(runs[-1], runs, options)
    return sorted(runs, key=lambda run: run["stage"])


def compare(options):
    """Measures all runs, proves those that can be compared, and gives these a speed-up."""
    runs = train_all(options)
    trained = [run for run in runs if run["metrics"] and run["metrics"]["epochs"] > 0]
    if len(trained) > 1 or options.json or options.figures:
        print("== short runs: do the weights agree, where does a step's time go", flush=True)
    for run in trained:
        prove(run, find_reference(run, trained), options)
    for run in trained:
        if "no_speedup" not in run:
            run["metrics"] |= speed_up(seconds_per_sample(run),
                                       seconds_per_sample(find_reference(run, trained)),
                                       len(run["metrics"]["devices"]))
        if options.json or options.figures:
            run["step"] = trace_step(run, options)
    return runs


# --- Reporting -----------------------------------------------------------------------------------

def report(runs):
    """Prints the table, and below it what all runs share, what is missing, and why."""
    rows = [run["metrics"] or {"stage": label(run["stage"])} for run in runs]
    print("\n".join(["", *summary_table.table(rows), "", *summary_table.computed_by(rows)]))
    if any("speedup" in row for row in rows):
        print(f"speed-up: compared with {STAGE}, after short runs had shown that both reach equal weights")
    if busy := summary_table.busy_machine(rows):
        print(busy)
    for run in runs:
        if run["status"] != 0:
            print(f"{run['stage']} failed (status {run['status']}): {run['error']}")
        elif "no_speedup" in run:
            print(f"{run['stage']}: no speed-up: {run['no_speedup']}")
    sys.stdout.flush()


def git_version():
    try:
        done = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"],
                              capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def results_of(argv, runs):
    return {"machine": machine(), "date": str(datetime.date.today()), "options": argv,
            "versions": {"lockstep": git_version(), "python": platform.python_version()},
            "runs": runs}


def write_outputs(options, results):
    if options.json:
        try:
            write_whole(options.json, json.dumps(results, indent=1) + "\n")
        except OSError as error:
            raise Refused(f"--json: cannot write {options.json}: {error.strerror}; choose another "
                          "place") from error
        print(f"everything measured: {options.json}")
    try:
        if options.figures:
            for path in compare_figures.draw(results, options.figures):
                print(f"figure: {path}")
    except OSError as error:
        raise Refused(f"--figures: cannot write into {options.figures}: {error.strerror}; "
                      "choose another place") from error


def main(argv):
    try:
        return run(argv)
    except Refused as refusal:
        complain(refusal)
        return 1


def run(argv):
    options = parse_options(argv)
    prepare_outputs(options)
    check_devices(options)
    runs = compare(options)
    report(runs)
    write_outputs(options, results_of(argv, runs))
    well = all(run["status"] == 0 for run in runs)
    proved = all("no_speedup" not in run for run in runs) or STAGE not in options.stages
    return 0 if well and proved else 1


if __name__ == "__main__":
    run_command(main)
