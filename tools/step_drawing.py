"""A step's rows (step_rows.py) as SVG for the page of `lockstep show`, which steps through them."""

from html import escape

from figure_drawing import ticks
from palette import ALONG, INK, MARK, PALE, PAPER, RULE, STEP
from step_rows import ALONG_AXES, MESSAGES, OTHER, PRODUCTS, SEVERAL, WAITING

WIDTH = 960  # about that of a page, which stretches the drawing
NAME, BAR, CURVE, SPACE, AXIS = 16, 24, 60, 6, 34  # heights
LETTER = 6.8  # width of a bar's letters
EDGE = 0.01  # of the width: half a number

FILLS = {**STEP, **ALONG}
CLASSES = {MESSAGES: "messages", PRODUCTS: "products", OTHER: "other", SEVERAL: "several",
           **{kind: axis for axis, kind in ALONG_AXES.items()}}
CLASSES = {kind: CLASSES.get(kind, kind) for kind in (*FILLS, WAITING)}


def variables(mode):
    """The colours of a mode (0: light, 1: dark), as CSS."""
    fills = [f"--{CLASSES[kind]}:{fill}" for kind, (fill, _) in FILLS.items()]
    paper = {"ink": INK, "paper": PAPER, "faint": PALE, "line": RULE, "mark": MARK}
    return ";".join(fills + [f"--{name}:{colours[mode]}" for name, colours in paper.items()])


RULES = """
.step text { fill: var(--ink); }
.step .tick { fill: var(--faint); }
.step line { stroke: var(--line); }
.step rect { stroke: var(--ink); }
.step .hatch { fill: var(--faint); }
""" + "".join(f".step .{CLASSES[kind]} rect {{ fill: var(--{CLASSES[kind]}); }}\n"
              f".step .bar.{CLASSES[kind]} text {{ fill: {letters}; }}\n" for kind, (_, letters) in FILLS.items()) + "".join(
    f".{CLASSES[kind]} {{ --axis: {fill}; --letters: {letters}; }}\n" for kind, (fill, letters) in ALONG.items()) + """
.step text { font: 12px sans-serif; }
.step .bar text { text-anchor: middle; pointer-events: none; }
.step .bar text.long { display: none; }
.step .tick { text-anchor: middle; }
.step rect { stroke-width: 0.5; }
.step .waiting rect { fill: url(#waiting); stroke: none; }
.step .hatch { stroke: none; }
.step .host rect { stroke-width: 1; }
.step .memory rect { stroke: var(--memory); }
"""
HATCH = ('<defs><pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" '
         'patternTransform="rotate(45)"><rect class="hatch" width="1.5" height="6"/></pattern></defs>')


class Drawing:
    """One step. Places along the time are percentages, so that a page can stretch it. Its bars have names:
    `prefix` and their numbers in Step.bars()."""

    def __init__(self, step, prefix):
        self.step, self.prefix = step, prefix
        self.bottom = sum(map(self.height_of, step.rows))
        self.height = self.bottom + AXIS

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
        mark = f' id="{self.prefix}{number}"' if number is not None else ""
        text = (f'<text x="{self.percent((bar.begin + bar.end) / 2)}" y="{top + BAR - 7}"'
                f'{" class=" + chr(34) + "long" + chr(34) if long else ""}>{escape(bar.name)}</text>'
                ) if bar.name else ""
        return (f'<g class="bar {CLASSES[bar.kind]}"{mark} role="img" aria-label="{escape(label)}">'
                f"<title>{escape(label)}</title>"
                f'<rect x="{self.percent(bar.begin)}" y="{top}" width="{self.width(bar)}" '
                f'height="{height}"/>{text}</g>')

    def rows(self):
        number, top = 0, 0
        for row in self.step.rows:
            yield (f'<g class="row"><text class="lane" x="0" y="{top + NAME - 4}">{escape(row.name)}'
                   "</text>")
            for wait in row.waits(self.step.begin, self.step.end, self.step.unit):
                yield self.bar(wait, top + NAME, row, None)
            for bar in row.bars:
                yield self.bar(bar, top + NAME, row, number)
                number += 1
            yield "</g>"
            top += self.height_of(row)

    def axis(self):
        top, length = self.bottom, self.step.end - self.step.begin
        yield f'<line x1="0" x2="100%" y1="{top}" y2="{top}"/>'
        for moment in ticks(self.step.begin, self.step.end):
            x, share = self.percent(moment), (moment - self.step.begin) / length
            # numbers near an end would stand half outside
            anchor = "start" if share < EDGE else "end" if share > 1 - EDGE else ""
            at = f' style="text-anchor:{anchor}"' if anchor else ""
            yield f'<line x1="{x}" x2="{x}" y1="{top}" y2="{top + 4}"/>'
            yield f'<text class="tick" x="{x}" y="{top + 16}"{at}>{moment:g}</text>'
        yield (f'<text class="tick unit" x="50%" y="{top + 30}">{escape(self.step.unit)} since the step '
               "began</text>")

    def kinds(self):
        """What the colours can mean here."""
        kinds = {bar.kind for bar in self.step.bars()}
        waits = any(row.waits(self.step.begin, self.step.end, "") for row in self.step.rows)
        return [kind for kind in FILLS if kind in kinds] + [WAITING] * waits

    def svg(self):
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" class="step" width="100%" height="{self.height}" '
                 f'role="group" aria-label="{escape(self.step.title)}">', HATCH]
        return "\n".join([*lines, *self.rows(), *self.axis(), "</svg>"]) + "\n"


def legend_of(drawings):
    """What the colours of several drawings mean, for a page."""
    kinds = [kind for kind in CLASSES if any(kind in drawing.kinds() for drawing in drawings)]
    return "".join(f'<span><svg class="step" width="12" height="12"><g class="{CLASSES[kind]}">'
                   f'<rect width="12" height="12"/></g></svg> {escape(kind)}</span> ' for kind in kinds)
