#!/usr/bin/env python3
"""Draw one training step from a stage's trace, as SVG: `tools/draw_step.py TRACE FILE.svg`.

TRACE is what a stage wrote with --trace; the other ranks' files next to it (TRACE.rank1, ...) are
drawn below it. The step is the one of median length, or the part of it between --from and --to, or
that in which a --range runs. A bar is an operation, or, with --parts, a layer, a micro-batch's pass (F0, B0) or a
bucket. It has its name in it if there is room. `./lockstep show` draws the same step on a page, below the plan."""

import argparse
from pathlib import Path

import compare_timeline
import step_rows
from command_line import Parser, complain, run_command
from figure_drawing import measured
from plain_files import write_whole


def time_of(step, name):
    """From when to when a range runs, on any lane: "bucket 0", or all that begin so."""
    times = [(begin, begin + length) for lane in step["lanes"]
             for begin, length, _, layer in lane["slices"] if layer.startswith(name)]
    if not times:
        layers = sorted({step_rows.outermost(part[3]) for lane in step["lanes"]
                         for part in lane["slices"]} - {""})
        raise ValueError(f"--range '{name}': found none, expected one of {', '.join(layers)}")
    # A slice's begin and length are rounded, each for itself.
    return min(begin for begin, _ in times), min(max(end for _, end in times), step["milliseconds"])


def read_step(path, bars_of=step_rows.parts_of, begin=0.0, end=None, within=None, alone=False):
    """A trace's step, or a part of it. ValueError in words if there is none."""
    whole = compare_timeline.given_step(path, alone)
    if within is not None:
        begin, end = time_of(whole, within)
    last = whole["milliseconds"] if end is None else end
    if not 0 <= begin < last <= whole["milliseconds"]:
        raise ValueError(f"--from {begin} --to {last}: expected a part of the step's "
                         f"{whole['milliseconds']:.2f} ms")
    return step_rows.measured(whole, bars_of, begin, last)


def main(argv):
    parser = Parser(description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="written by a stage's --trace")
    parser.add_argument("target", type=Path, metavar="FILE.svg")
    parser.add_argument("--parts", action="store_true", help="bars are layers, passes, buckets")
    parser.add_argument("--from", dest="begin", type=float, metavar="MS", default=0.0)
    parser.add_argument("--to", dest="end", type=float, metavar="MS")
    parser.add_argument("--range", dest="within", metavar="NAME", help="a layer, \"bucket 0\", ...")
    parser.add_argument("--alone", action="store_true", help="without the other ranks' traces beside it")
    options = parser.parse_args(argv)
    bars_of = step_rows.parts_of if options.parts else step_rows.operations_of
    try:
        step = read_step(options.trace, bars_of, options.begin, options.end, options.within,
                         options.alone)
        write_whole(options.target, measured([step]))
    except OSError as error:
        complain("draw_step", f"cannot write {options.target}: {error.strerror}")
        return 1
    except ValueError as error:
        complain("draw_step", error)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
