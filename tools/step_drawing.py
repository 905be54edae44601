"""A step's rows (step_rows.py) as SVG: for the pictures in the READMEs, and for the page of
`lockstep show`, which steps through the same drawing."""

import math
from html import escape

from compare_figures import COLOURS, MESSAGES, OTHER, PRODUCTS
from step_rows import HOST, MEMORY, WAITING

WIDTH = 960  # of a picture, in pixels; the page stretches it
MARGIN = 8  # above and below
TITLE, NAME, BAR, CURVE, SPACE, AXIS = 24, 16, 24, 60, 6, 34  # heights
LETTER = 6.8  # width of a bar's letters
TICKS = 8  # about so many

# Light and dark; white letters are read on every fill but those of "other".
FILLS = {"forward": ("#1b6ca8", "#2f86c8"), "backward": ("#2f7d4f", "#3d9a64"),
         MESSAGES: (COLOURS[MESSAGES], COLOURS[MESSAGES]),
         PRODUCTS: (COLOURS[PRODUCTS], "#9a7fd1"),
         OTHER: (COLOURS[OTHER], "#7d848c"), HOST: ("#6b4a1f", "#a37b3f"),
         MEMORY: ("#8a5a9e", "#a678b8")}
CLASSES = {kind: {MESSAGES: "messages", PRODUCTS: "products", OTHER: "other"}.get(kind, kind)
           for kind in (*FILLS, WAITING)}
PAPER = {"ink": ("#1c1e21", "#e8eaed"), "paper": ("#ffffff", "#17191c"),
         "faint": ("#6b7178", "#9aa0a6"), "line": ("#d5d9dd", "#3a3e43")}


def variables(mode):
    """The colours of a mode (0: light, 1: dark), as CSS."""
    fills = [f"--{CLASSES[kind]}:{colours[mode]}" for kind, colours in FILLS.items()]
    return ";".join(fills + [f"--{name}:{colours[mode]}" for name, colours in PAPER.items()])


RULES = """
.step text { font: 12px sans-serif; fill: var(--ink); }
.step .title { font-weight: bold; font-size: 14px; }
.step .bar text { fill: #fff; text-anchor: middle; pointer-events: none; }
.step .bar.other text { fill: #000; }
.step .bar text.long { display: none; }
.step .tick { fill: var(--faint); text-anchor: middle; }
.step line { stroke: var(--line); }
.step rect { stroke: var(--paper); stroke-width: 0.5; }
.step .waiting rect { fill: url(#waiting); stroke: none; }
.step .host rect { stroke: var(--host); stroke-width: 1; }
.step .memory rect { stroke: var(--memory); }
""" + "".join(f".step .{CLASSES[kind]} rect {{ fill: var(--{CLASSES[kind]}); }}\n" for kind in FILLS)
HATCH = ('<defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" '
         'patternTransform="rotate(45)"><rect width="1.5" height="6" style="fill:var(--faint);stroke:none"/>'
         "</pattern></defs>")


def style():
    """For a picture by itself: it follows what its reader's system prefers."""
    return (f"<style>.step {{{variables(0)}}}\n@media (prefers-color-scheme: dark) "
            f"{{ .step {{{variables(1)}}} }}{RULES}</style>"
            '<rect width="100%" height="100%" style="fill:var(--paper)"/>')


def ticks(begin, end):
    """Round numbers on an axis, about TICKS of them."""
    if end <= begin:
        return []
    rough = (end - begin) / TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(begin / step - 1e-9)
    return [number * step for number in range(first, math.floor(end / step + 1e-9) + 1)]


class Drawing:
    """One step. Places along the time are percentages, so that a page can stretch it."""

    def __init__(self, step, prefix=""):
        self.step, self.prefix = step, prefix
        self.height = MARGIN + TITLE + sum(map(self.height_of, step.rows)) + AXIS

    @staticmethod
    def height_of(row):
        return NAME + (CURVE if row.curve else BAR) + SPACE

    def percent(self, moment):
        return f"{100 * (moment - self.step.begin) / (self.step.end - self.step.begin):.3f}%"

    def width(self, bar):
        return f"{100 * (bar.end - bar.begin) / (self.step.end - self.step.begin):.3f}%"

    def bar(self, bar, top, row, number):
        whole = CURVE if row.curve else BAR
        height = round(bar.level * whole)
        top += whole - height
        long = (bar.end - bar.begin) / (self.step.end - self.step.begin) * WIDTH < LETTER * len(bar.name)
        label = f"{row.name}: {bar.text or bar.name}"
        mark = f' id="{self.prefix}{number}"' if number is not None and self.prefix else ""
        text = (f'<text x="{self.percent((bar.begin + bar.end) / 2)}" y="{top + BAR - 7}"'
                f'{" class=" + chr(34) + "long" + chr(34) if long else ""}>{escape(bar.name)}</text>'
                ) if bar.name else ""
        return (f'<g class="bar {CLASSES[bar.kind]}"{mark} role="img" aria-label="{escape(label)}">'
                f"<title>{escape(label)}</title>"
                f'<rect x="{self.percent(bar.begin)}" y="{top}" width="{self.width(bar)}" '
                f'height="{height}"/>{text}</g>')

    def rows(self):
        number, top = 0, MARGIN + TITLE
        for row in self.step.rows:
            yield f'<g class="row"><text x="0" y="{top + NAME - 4}">{escape(row.name)}</text>'
            for wait in row.waits(self.step.begin, self.step.end, self.step.unit):
                yield self.bar(wait, top + NAME, row, None)
            for bar in row.bars:
                yield self.bar(bar, top + NAME, row, number)
                number += 1
            yield "</g>"
            top += self.height_of(row)

    def axis(self):
        top = self.height - AXIS
        yield f'<line x1="0" x2="100%" y1="{top}" y2="{top}"/>'
        for moment in ticks(self.step.begin, self.step.end):
            x = self.percent(moment)
            # the first and the last one would stand half outside
            at = {"0.000%": ' style="text-anchor:start"', "100.000%": ' style="text-anchor:end"'}.get(x, "")
            yield f'<line x1="{x}" x2="{x}" y1="{top}" y2="{top + 4}"/>'
            yield f'<text class="tick" x="{x}" y="{top + 16}"{at}>{moment:g}</text>'
        yield (f'<text class="tick" x="50%" y="{top + 30}">{escape(self.step.unit)} since the step '
               "began</text>")

    def legend(self):
        """The title, and what the colours mean, from the right end to the left."""
        kinds = {bar.kind for bar in self.step.bars()}
        waits = any(row.waits(self.step.begin, self.step.end, "") for row in self.step.rows)
        shown = [kind for kind in FILLS if kind in kinds] + [WAITING] * waits
        yield f'<text class="title" x="0" y="{MARGIN + 8}">{escape(self.step.title)}</text>'
        yield f'<svg x="100%" y="{MARGIN - 2}" overflow="visible">'
        x = 0
        for kind in reversed(shown):
            x -= LETTER * len(kind) + 28
            yield (f'<g class="{CLASSES[kind]}"><rect x="{x:.0f}" width="11" height="11"/>'
                   f'<text x="{x + 15:.0f}" y="10">{escape(kind)}</text></g>')
        yield "</svg>"

    def svg(self, alone=True):
        """The drawing as a file by itself, or as a part of a page that has the colours."""
        size = f'width="{WIDTH}" viewBox="0 0 {WIDTH} {self.height}"' if alone else 'width="100%"'
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" class="step" {size} height="{self.height}" '
                 f'role="group" aria-label="{escape(self.step.title)}">']
        lines += [style()] if alone else []
        return "\n".join([*lines, HATCH, *self.legend(), *self.rows(), *self.axis(), "</svg>"]) + "\n"
