#!/usr/bin/env python3
"""Step through a step: writes one HTML file that opens from disk and needs nothing else.

The upper half is the plan, from the stage's own lists: 02 the phases of DataParallel, 03 a
pipeline's schedule, 04 DistributedDataParallel's buckets, 06 the units of sharded training. The lower
half, with --trace, is a measured step, with each device's memory; what runs in the plan is outlined
there, too. Further options go to the stage's program `plan`:

  ./lockstep show --schedule gpipe --stages 4 --micro-batches 8
  ./lockstep show --schedule interleaved --stages 4 --chunks 2 --micro-batches 8
  ./lockstep show --stage 04 --model resnet18 --trace trace.json -o ddp.html

With --flight it writes no page: it joins the last calls that ranks left with their --flight FILE, and
says which rank is late, since when, and where the ranks called different things:

  ./lockstep show --flight flight.rec"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import step_drawing
import step_rows
from command_line import Parser, one_line, run_command
from draw_step import read_step
from plain_files import write_whole

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).resolve().parent / "page"


def fail(text):
    sys.exit(f"show: {one_line(text)}")


def plans(build):
    """The programs that print plans, by stage."""
    return {program.parent.name[:2]: program for program in sorted(build.glob("[0-9][0-9]-*/plan"))}


def plan_of(program, words):
    """What a stage's program prints for these options. It refuses what it does not know itself."""
    done = subprocess.run([program, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return step_rows.planned(json.loads(done.stdout))


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
    rows = [{"name": row.name, "predicted_most": row.predicted_most} for row in step.rows]
    return {"bars": bars, "rows": rows, "end": step.end, "unit": step.unit, "counted": step.counted,
            "formula": step.formula}


def fill(template, **texts):
    return re.sub(rf"{{({'|'.join(texts)})}}", lambda name: texts[name[1]], template)


def about(plan, run):
    """What stands above the run. Its axis has nothing to do with the plan's."""
    return (f"<h2>{step_drawing.escape(run.title)}</h2><p>Each drawing fills the width: the plan counts in "
            f"{step_drawing.escape(plan.unit)}, the run in {run.unit}, so compare lengths within one of them. "
            "What runs in the plan at its moment is outlined in the run, where it has the same name.</p>")


def page(plan, run):
    """The whole page, with a measured step or without (None)."""
    colours = {"light": step_drawing.variables(0), "dark": step_drawing.variables(1)}
    style = fill((PAGE / "page.css").read_text(), **colours) + step_drawing.RULES
    # "</" would end the element that the facts stand in
    facts = json.dumps(facts_of(plan, run)).replace("</", "<\\/")
    drawings = [step_drawing.Drawing(step, prefix)
                for step, prefix in ((plan, "plan-"), (run, "run-")) if step]
    return fill((PAGE / "page.html").read_text(), title=step_drawing.escape(plan.title), style=style,
                note=step_drawing.escape(plan.note), legend=step_drawing.legend_of(drawings),
                plan=drawings[0].svg(), run=drawings[1].svg() if run else "",
                about_run=about(plan, run) if run else "", script=(PAGE / "page.js").read_text(), facts=facts)


def print_help(parser, programs):
    """This program's options, and those of the stages' plans."""
    parser.print_help()
    for stage, program in programs.items():
        told = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
        print(f"\n--stage {stage}: {told.rstrip()}")


def main(argv):
    parser = Parser(prog="lockstep show", description=__doc__, add_help=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-h", "--help", action="store_true", help="this text")
    parser.add_argument("--stage", default="03", help="02, 03, 04 or 06 (default: 03)")
    parser.add_argument("--trace", type=Path, help="what a stage wrote with --trace, or its folder")
    parser.add_argument("--flight", metavar="FILE",
                        help="what ranks wrote with --flight: who is late (no page; all else is left out)")
    parser.add_argument("-o", dest="target", type=Path, default=Path("step.html"), metavar="FILE",
                        help="default: step.html")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help=argparse.SUPPRESS)
    options, words = parser.parse_known_args(argv)
    programs = plans(options.build)
    if options.help:
        return print_help(parser, programs)
    if options.flight is not None:
        return show_flight(options.build / "common/launch/flight", options.flight)
    if options.stage not in programs:
        fail(f"--stage '{options.stage}', expected one of {', '.join(programs)}")
    try:
        run = read_step(trace_in(options.trace)) if options.trace else None
        plan = plan_of(programs[options.stage], words)
        write_whole(options.target, page(plan, run))
    except OSError as error:
        fail(f"-o {options.target}: {error.strerror}; name another file")
    except ValueError as error:
        fail(error)
    print(f"{options.target}: open it in a browser")


if __name__ == "__main__":
    run_command(main)
