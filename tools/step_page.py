#!/usr/bin/env python3
"""Write an HTML page that steps through one training step. The page is one file and opens from disk.

The upper half shows the plan: the operations that the stage's program enqueues on simulated devices.
A matrix product or convolution takes one unit of time, every other operation a tenth of a unit. In a
pipeline all stages take equally long. With --devices sim:h100x2 the times come from a profile, a file
of costs. Options that are not listed below go to the stage's program:

  ./lockstep show --schedule gpipe --devices 4 --micro-batches 8
  ./lockstep show --schedule interleaved --devices 4 --chunks 2
  ./lockstep show --stage 06 --model resnet18 --unit block --prefetch 0 -o fsdp.html

For stage 07 the page also shows the mesh: each axis has a colour for its groups of ranks:

  ./lockstep show --stage 07 --devices 4 --nodes 2 --mesh data=2,shard=2,tensor=2

With --trace the lower half shows a measured step and each device's memory. It outlines the operation
that runs in the plan. The plan then has the options of the run that wrote the trace:

  ./lockstep show --trace trace.json -o ddp.html

With --flight it writes no page. It reads the last collectives that the ranks recorded with their own
option --flight FILE. It prints which rank is late, since when, and where the ranks' calls differ:

  ./lockstep show --flight flight.rec"""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mesh_drawing
import step_drawing
import step_plan
import step_rows
from command_line import Parser, one_line, run_command
from compare import Refused
from draw_step import read_step
from plain_files import write_whole
from sim_devices import devices_of as simulated_devices

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).resolve().parent / "page"
MOST_UNITS = 10**6  # of a message's MiB
MOST_DEVICES = 64  # lanes that one can still tell apart


def fail(text):
    sys.exit(f"show: {one_line(text)}")


def show_flight(program, file):
    """Joins the ranks' flight recordings. The program that does so is the launcher's neighbour: after a
    failure the launcher prints the same table."""
    if not program.exists():
        fail(f"--flight: there is no {program}; compile the programs first")
    sys.exit(subprocess.run([program, "--", file]).returncode)


def trace_in(path):
    """The trace itself, or the one in a folder: that of rank 0."""
    if not path.is_dir():
        return path
    files = sorted(file for file in path.iterdir() if file.is_file() and ".rank" not in file.name)
    if len(files) != 1:
        fail(f"--trace {path}: found {len(files)} files in the folder, expected one trace (and other "
             "ranks' .rankN beside it); name the file")
    return files[0]


def facts_of(step, run):
    """What the page's script needs to count along, and which bars of the run mean the same."""
    same = step_rows.numbers_of_same(step, run) if run else [[] for _ in step.bars()]
    bars = [{"row": row, "begin": bar.begin, "end": bar.end, "name": bar.name, "text": bar.text,
             "after": bar.after, "takes": bar.takes, "gives": bar.gives}
            for row, lane in enumerate(step.rows) for bar in lane.bars]
    for bar, numbers in zip(bars, same, strict=True):
        bar["same"] = numbers
    rows = [{"name": row.name, "predicted_most": row.predicted_most, "works": not row.curve}
            for row in step.rows]
    return {"bars": bars, "rows": rows, "end": step.end, "unit": step.unit, "counted": step.counted,
            "formula": step.formula}


def fill(template, **texts):
    return re.sub(rf"{{({'|'.join(texts)})}}", lambda name: texts[name[1]], template)


def about(plan, run, is_plan_of_run):
    """What stands above the run. Its axis has nothing to do with the plan's."""
    unknown = "" if is_plan_of_run else ("The trace does not say what its run was: whether the plan is of the same "
                                         "options, only you know. ")
    return (f"<h2>{step_drawing.escape(run.title)}</h2><p>Each drawing fills the width: the plan counts in "
            f"{step_drawing.escape(plan.unit)}, the run in {run.unit}, so compare lengths within one of them. {unknown}"
            "What runs in the plan at its moment is outlined in the run, where it has the same name.</p>")


def page(plan, run=None, is_plan_of_run=True):
    """The whole page, with a measured step or without."""
    colours = {"light": step_drawing.variables(0), "dark": step_drawing.variables(1)}
    style = fill((PAGE / "page.css").read_text(), **colours) + step_drawing.RULES
    # "</" would end the element that the facts stand in
    facts = json.dumps(facts_of(plan, run)).replace("</", "<\\/")
    drawings = [step_drawing.Drawing(step, prefix)
                for step, prefix in ((plan, "plan-"), (run, "run-")) if step]
    return fill((PAGE / "page.html").read_text(), title=step_drawing.escape(plan.title), style=style,
                note=step_drawing.escape(plan.note), legend=step_drawing.legend_of(drawings),
                plan=drawings[0].svg(), run=drawings[1].svg() if run else "",
                about_run=about(plan, run, is_plan_of_run) if run else "",
                mesh=mesh_drawing.section(plan.mesh) if plan.mesh else "",
                script=(PAGE / "page.js").read_text(), facts=facts)


def devices_of(text):
    """(number of devices, profile or None) of "4", "cpu:0,cpu:1" or "sim:h100x4"."""
    if text.startswith("sim:"):
        profile, count = simulated_devices(text)
        return count, profile
    if text.isdecimal() and 1 <= int(text) <= MOST_DEVICES:
        return int(text), None
    if ":" in text:
        return text.count(",") + 1, None
    raise Refused(f"--devices '{text}', expected a number from 1 to {MOST_DEVICES}, or simulated devices such as "
                  "sim:h100x4")


def asked_by(options, words, run=None):
    """What the command line asks for; the plan of a trace's run, where there is one that says what it was."""
    count, profile = devices_of(options.devices) if options.devices else (0, None)
    asked = step_plan.Asked(step_plan.stage_of(options.stage or "03"), count, profile, options.units_per_mib,
                            step_plan.options_in(words))
    if run is None:
        return asked
    given = {**({"--stage": asked.stage} if options.stage else {}), **({"--devices": count} if count else {}),
             **asked.options}
    was = {"--stage": run.stage, "--devices": run.devices, **run.options}
    for name, value in given.items():
        if name not in was or value != was[name]:
            raise Refused(f"--trace {options.trace} is of a run {with_option(name, was)}, found "
                          f"{with_option(name, given)}; leave {name} out, and the plan is the run's")
    kept = run.options
    if run.stage == step_plan.PIPELINE and profile is None:
        kept = {name: value for name, value in kept.items() if name in step_plan.OF_EQUAL_STAGES}
    return replace(run, profile=profile, units_per_mib=options.units_per_mib, options=kept)


def pace(text):
    value = float(text)
    if not 0 <= value <= MOST_UNITS:
        raise argparse.ArgumentTypeError(f"'{text}', expected a number from 0 to {MOST_UNITS}")
    return value


def with_option(name, options):
    """ "with --width 8", "with --graph", "without --width"."""
    if name not in options:
        return f"without {name}"
    return f"with {name}" if options[name] is None else f"with {name} {options[name]}"


def main(argv):
    parser = Parser(prog="lockstep show", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", help="01 to 07, or tensor-split (default: 03, or the stage of the trace)")
    parser.add_argument("--devices",
                        help="number of devices, or simulated devices such as sim:h100x2 (default: 2; for a pipeline 4)")
    parser.add_argument("--units-per-mib", type=pace, default=0, metavar="N",
                        help="units of time for a message of one MiB; 0: all messages together take a third of the "
                             "passes' time")
    parser.add_argument("--trace", type=Path,
                        help="file that a stage wrote with --trace, or the folder of this file")
    parser.add_argument("--flight", metavar="FILE",
                        help="file that ranks wrote with --flight: say which rank is late; other options have no effect")
    parser.add_argument("-o", dest="target", type=Path, default=Path("step.html"), metavar="FILE",
                        help="page to write (default: step.html)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help=argparse.SUPPRESS)
    options, words = parser.parse_known_args(argv)
    if options.flight is not None:
        return show_flight(options.build / "common/launch/flight", options.flight)
    try:
        options.trace = options.trace and trace_in(options.trace)
        step = read_step(options.trace) if options.trace else None
        run = step_plan.run_of(options.trace) if options.trace else None
        plan = step_plan.planned(asked_by(options, words, run), options.build)
        write_whole(options.target, page(plan, step, run is not None))
    except OSError as error:
        fail(f"-o {options.target}: {error.strerror}; name another file")
    except (ValueError, Refused) as error:
        fail(error)
    print(f"{options.target}: open it in a browser")


if __name__ == "__main__":
    run_command(main)
