#!/usr/bin/env python3
"""Draw one training step from a stage's trace, as SVG: `tools/draw_step.py TRACE FILE.svg`.

TRACE is what a stage wrote with --trace; the other ranks' files next to it (TRACE.rank1, ...) are
drawn below it. The step is the one of median length, or the part of it between --from and --to. A
bar is an operation, or, with --parts, a layer, a micro-batch's pass (F0, B0) or a bucket. It has
its name in it if there is room. Needs matplotlib."""

import argparse
import itertools
import re
import sys
from pathlib import Path

import compare_figures
import compare_timeline
from compare_figures import COLOURS, MESSAGES, OTHER

INCHES, POINTS_PER_LETTER = 10, 4.2  # width of the figure; of a letter of the names in it


PART_COLOURS = {"forward": "#1b6ca8", "backward": "#3a8f5c",
                MESSAGES: COLOURS[MESSAGES], OTHER: COLOURS[OTHER]}
GAP = 0.02  # ms; shorter ones are a queue's own
OF_BACKWARD = ("backward", "column_sums")  # one of these is in every layer's backward


def outermost(layer):
    return layer.partition("/")[0]


def kind_of_part(name, operations):
    """What a range's operations do; outside of ranges there are messages and other operations."""
    if name.startswith("bucket"):
        return MESSAGES
    if not name:
        return MESSAGES if compare_figures.kind_of(operations[0]) == MESSAGES else OTHER
    passes = [word for word in ("forward", "backward") if name.startswith(word)]
    if passes:  # the loss's backward belongs to the last stage's forward
        return passes[0]
    backward = any(word in operation for word in OF_BACKWARD for operation in operations)
    return "backward" if backward else "forward"


def has_been_passed(label, bars):
    """Whether a layer's forward is there already, and backward has begun since: the operations of some
    layers (flatten's) are the same both ways."""
    kinds = [(name, kind) for _, _, name, kind in bars]
    if (label, "forward") not in kinds:
        return False
    return any(kind == "backward" for _, kind in kinds[kinds.index((label, "forward")):])


def parts_of(slices):
    """Bars (begin, length, name, kind): neighbours within one outermost range are one bar, unless
    there is a gap between them. "forward 2" is F2 for short, "backward 2" B2."""
    bars = []
    for name, group in itertools.groupby(slices, key=lambda part: outermost(part[3])):
        group = list(group)
        label = re.sub(r"^(f|b)(?:or|ack)ward (\d+)$", lambda m: m[1].upper() + m[2], name)
        kind = kind_of_part(name, [operation for _, _, operation, _ in group]) if name else ""
        if kind == "forward" and has_been_passed(label, bars):
            kind = "backward"
        for begin, length, operation, _ in group:
            bar = (begin, length, label, kind or kind_of_part("", [operation]))
            if bars and bars[-1][2:] == bar[2:] and begin - sum(bars[-1][:2]) < GAP:
                bar = (bars[-1][0], begin + length - bars.pop()[0], *bar[2:])
            bars.append(bar)
    return bars


def operations_of(slices):
    """Bars (begin, length, name, kind), one for each operation."""
    return [(begin, length, name, compare_figures.kind_of(name))
            for begin, length, name, _ in slices]


def add_names(axes, row, bars, milliseconds):
    """Writes the bars' names into them, where they fit."""
    letters = INCHES * 72 * 0.85 / POINTS_PER_LETTER  # that fit into the whole width
    for begin, length, name, kind in bars:
        if length / milliseconds * letters > len(name):
            axes.text(begin + length / 2, row, name, ha="center", va="center", fontsize=6,
                      color="black" if kind == OTHER else "white")


def cut(slices, first, last):
    """A lane's slices in a part of the step."""
    inside = [(max(begin, first), min(begin + length, last), *names)
              for begin, length, *names in slices if begin < last and begin + length > first]
    return [(begin, end - begin, *names) for begin, end, *names in inside]


def draw(step, begin, end, bars_of, colours, plt):
    lanes = step["lanes"]
    figure, axes = plt.subplots(figsize=(INCHES, 0.5 * len(lanes) + 1))
    for row, lane in enumerate(lanes):
        bars = bars_of(cut(lane["slices"], begin, end))
        compare_figures.draw_bars(axes, row, [(b, length, kind) for b, length, _, kind in bars],
                                  colours)
        add_names(axes, row, bars, end - begin)
    axes.set_yticks(range(len(lanes)), [f"{lane['device']} {lane['stream']}" for lane in lanes],
                    fontsize=8)
    axes.set(xlim=(begin, end), ylim=(len(lanes) - 0.5, -0.5), xlabel="ms since the step began")
    compare_figures.add_legend(plt, axes, colours)
    return figure


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="written by a stage's --trace")
    parser.add_argument("target", type=Path, metavar="FILE.svg")
    parser.add_argument("--parts", action="store_true", help="bars are layers, passes, buckets")
    parser.add_argument("--from", dest="begin", type=float, metavar="MS", default=0.0)
    parser.add_argument("--to", dest="end", type=float, metavar="MS")
    options = parser.parse_args(argv)
    if not compare_figures.use_matplotlib():
        sys.exit(f"draw_step: {compare_figures.NO_MATPLOTLIB}")
    try:
        step = compare_timeline.one_step(options.trace)
        if step is None:
            sys.exit(f"draw_step: {options.trace} holds no whole step; train a few (--max-steps 12)")
        plt = compare_figures.pyplot()
        end = step["milliseconds"] if options.end is None else options.end
        if not 0 <= options.begin < end:
            sys.exit(f"draw_step: --from {options.begin} --to {end}: expected a part of the "
                     f"step's {step['milliseconds']:.2f} ms")
        how = (parts_of, PART_COLOURS) if options.parts else (operations_of, COLOURS)
        compare_figures.save(draw(step, options.begin, end, *how, plt), options.target)
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"draw_step: {options.trace}: {error!r}; expected what --trace of a stage writes")


if __name__ == "__main__":
    main(sys.argv[1:])
