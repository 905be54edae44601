#!/usr/bin/env python3
"""Draw one training step from a stage's trace, as SVG: `tools/draw_step.py TRACE FILE.svg`.

TRACE is what a stage wrote with --trace; ranks' files beside it (TRACE.rank1, ...) are drawn below
it. The step is the one of median length, or what --from and --to cut out of it. Every operation
that has the room bears its name. Needs matplotlib."""

import argparse
import sys
from pathlib import Path

import compare_figures
import compare_timeline

INCHES, POINTS_PER_LETTER = 10, 4.2  # width of the figure; of a letter of the names in it


def add_names(axes, row, slices, milliseconds):
    """Writes the operations' names into their slices, where they fit."""
    letters = INCHES * 72 * 0.85 / POINTS_PER_LETTER  # in the whole width
    for begin, length, name in slices:
        if length / milliseconds * letters > len(name):
            axes.text(begin + length / 2, row, name, ha="center", va="center", fontsize=6,
                      color="white" if "other" not in compare_figures.kind_of(name) else "black")


def cut(lane, first, last):
    """A lane's slices in a part of the step."""
    inside = [(max(begin, first), min(begin + length, last), name)
              for begin, length, name in lane["slices"] if begin < last and begin + length > first]
    return {**lane, "slices": [[begin, end - begin, name] for begin, end, name in inside]}


def draw(step, begin, end, plt):
    lanes = [cut(lane, begin, end) for lane in step["lanes"]]
    figure, axes = plt.subplots(figsize=(INCHES, 0.5 * len(lanes) + 1))
    for row, lane in enumerate(lanes):
        compare_figures.draw_lane(axes, row, lane)
        add_names(axes, row, lane["slices"], end - begin)
    axes.set_yticks(range(len(lanes)), [f"{lane['device']} {lane['stream']}" for lane in lanes],
                    fontsize=8)
    axes.set(xlim=(begin, end), ylim=(len(lanes) - 0.5, -0.5), xlabel="ms since the step began")
    compare_figures.add_legend(plt, axes)
    return figure


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="written by a stage's --trace")
    parser.add_argument("target", type=Path, metavar="FILE.svg")
    parser.add_argument("--from", dest="begin", type=float, metavar="MS", default=0.0)
    parser.add_argument("--to", dest="end", type=float, metavar="MS")
    options = parser.parse_args(argv)
    if not compare_figures.version():
        sys.exit("draw_step: this python3 has no matplotlib (Debian: apt-get install "
                 "python3-matplotlib)")
    try:
        step = compare_timeline.one_step(options.trace)
        if step is None:
            sys.exit(f"draw_step: {options.trace} holds no whole step; train a few (--max-steps 12)")
        plt = compare_figures.pyplot()
        end = step["milliseconds"] if options.end is None else options.end
        if not 0 <= options.begin < end:
            sys.exit(f"draw_step: --from {options.begin} --to {end}: expected a part of the "
                     f"step's {step['milliseconds']:.2f} ms")
        compare_figures.save(draw(step, options.begin, end, plt), options.target)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"draw_step: {options.trace}: {error!r}; expected what --trace of a stage writes")


if __name__ == "__main__":
    main(sys.argv[1:])
