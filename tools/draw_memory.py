#!/usr/bin/env python3
"""Draws the memory of one rank over one training step, several runs side by side on one scale, each as
NAME=TRACE (what a stage wrote with --trace):

  tools/draw_memory.py memory.svg "none=ddp.json" "parameters=fsdp.json"

A run's name stands above its step, and the most that it had. Drawn is the first device of the trace."""

import argparse
from html import escape
from pathlib import Path

import compare_timeline
import step_rows
from command_line import Parser, complain, one_line, run_command
from plain_files import write_whole
from step_drawing import MARGIN, WIDTH, style, ticks

LEFT, GAP = 44, 16  # of the axis with its numbers; between two runs
HEAD, CURVE, AXIS = 40, 180, 36  # heights
MEBIBYTE = 2**20


def read_run(text):
    """The name, the pieces of one step, the most bytes in use and the step's length in ms."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError(f"'{text}': expected NAME=TRACE")
    step = compare_timeline.given_step(path, alone=True)
    if not step["memory"]:
        raise ValueError(f"{path} holds no whole step with its memory; train a few (--max-steps 12)")
    milliseconds = step["milliseconds"]
    return one_line(name), *step_rows.memory_pieces(step["memory"][0]["changes"], 0.0, milliseconds), milliseconds


def panel(run, left, width, top_of_scale):
    """One run: its step fills the width, `top_of_scale` bytes the height."""
    name, pieces, most, milliseconds = run
    bottom = MARGIN + HEAD + CURVE
    yield f'<text class="title" x="{left:.0f}" y="{MARGIN + 10}">{escape(name)}</text>'
    yield f'<text x="{left:.0f}" y="{MARGIN + 28}">at most {step_rows.mebibytes(most)}</text>'
    yield (f'<svg class="memory" x="{left:.0f}" y="{MARGIN + HEAD}" width="{width:.0f}" '
           f'height="{CURVE}">')
    for piece in pieces:
        height = piece.level / top_of_scale * CURVE
        yield (f'<rect x="{100 * piece.begin / milliseconds:.3f}%" y="{CURVE - height:.2f}" '
               f'width="{100 * (piece.end - piece.begin) / milliseconds:.3f}%" height="{height:.2f}">'
               f"<title>{escape(piece.text)}</title></rect>")
    yield "</svg>"
    yield (f'<text class="tick" x="{left + width / 2:.0f}" y="{bottom + 16}">one step, '
           f"{milliseconds:.1f} ms</text>")


def scale(top_of_scale):
    """MiB on the left, a line through all runs for each number."""
    for number in ticks(0, top_of_scale / MEBIBYTE):
        y = MARGIN + HEAD + CURVE - number * MEBIBYTE / top_of_scale * CURVE
        yield f'<line x1="{LEFT - 4}" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" style="text-anchor:end">{number:g}</text>'
    yield f'<text class="tick" x="{LEFT - 8}" y="{MARGIN + 28}" style="text-anchor:end">MiB</text>'


def picture(runs):
    height = MARGIN + HEAD + CURVE + AXIS
    width = (WIDTH - LEFT - GAP * (len(runs) - 1)) / len(runs)
    top_of_scale = 1.02 * max(max(most for _, _, most, _ in runs), 1)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" class="step" width="{WIDTH}" '
             f'viewBox="0 0 {WIDTH} {height}" height="{height}" role="img" '
             f'aria-label="Memory of one rank over one step: {escape(", ".join(run[0] for run in runs))}">',
             style(), *scale(top_of_scale)]
    for place, run in enumerate(runs):
        lines += panel(run, LEFT + place * (width + GAP), width, top_of_scale)
    return "\n".join([*lines, "</svg>"]) + "\n"


def main(argv):
    parser = Parser(description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="FILE.svg")
    parser.add_argument("runs", nargs="+", metavar="NAME=TRACE")
    options = parser.parse_args(argv)
    try:
        write_whole(options.target, picture([read_run(run) for run in options.runs]))
    except OSError as error:
        complain("draw_memory", f"cannot write {options.target}: {error.strerror}")
        return 1
    except ValueError as error:
        complain("draw_memory", error)
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
