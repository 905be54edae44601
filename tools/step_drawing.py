"""A step's rows (step_rows.py) as SVG for the page of `lockstep show`, which steps through them."""

from html import escape

from figure_drawing import ticks
from step_rows import ALONG_AXES, COLOURS, HOST, MEMORY, MESSAGES, OTHER, PRODUCTS, SEVERAL, WAITING

WIDTH = 960  # about that of a page, which stretches the drawing
NAME, BAR, CURVE, SPACE, AXIS = 16, 24, 60, 6, 34  # heights
LETTER = 6.8  # width of a bar's letters
EDGE = 0.01  # of the width: half a number

# Light and dark. The letters of bars are white, black on "other": 4.5 to 1 or more, as the Web Content
# Accessibility Guidelines ask for.
FILLS = {"forward": ("#1b6ca8", "#2878b8"), "backward": ("#2f7d4f", "#2e7d4f"),
         MESSAGES: (COLOURS[MESSAGES], COLOURS[MESSAGES]),
         PRODUCTS: (COLOURS[PRODUCTS], "#7d63c6"),
         OTHER: (COLOURS[OTHER], "#7d848c"), HOST: ("#6b4a1f", "#8f6835"),
         MEMORY: ("#8a5a9e", "#8d5fa0")}
# Messages along the axes of a mesh.
ALONG = {ALONG_AXES["data"]: ("#b8232f", "#c8333f"), ALONG_AXES["shard"]: ("#7d6200", "#857010"),
         ALONG_AXES["tensor"]: ("#5a4fcf", "#6a60d6"), ALONG_AXES["pipeline"]: ("#00757d", "#00797f"),
         SEVERAL: ("#a3266f", "#b8448a")}
CLASSES = {MESSAGES: "messages", PRODUCTS: "products", OTHER: "other", SEVERAL: "several",
           **{kind: axis for axis, kind in ALONG_AXES.items()}}
CLASSES = {kind: CLASSES.get(kind, kind) for kind in (*FILLS, *ALONG, WAITING)}
PAPER = {"ink": ("#1c1e21", "#e8eaed"), "paper": ("#ffffff", "#17191c"),
         "faint": ("#6b7178", "#9aa0a6"), "line": ("#d5d9dd", "#3a3e43")}


def variables(mode):
    """The colours of a mode (0: light, 1: dark), as CSS."""
    fills = [f"--{CLASSES[kind]}:{colours[mode]}" for kind, colours in {**FILLS, **ALONG}.items()]
    return ";".join(fills + [f"--{name}:{colours[mode]}" for name, colours in PAPER.items()])


RULES = """
.step text { fill: var(--ink); }
.step .tick { fill: var(--faint); }
.step line { stroke: var(--line); }
.step rect { stroke: var(--paper); }
.step .hatch { fill: var(--faint); }
.step .host rect { stroke: var(--host); }
""" + "".join(f".step .{CLASSES[kind]} rect {{ fill: var(--{CLASSES[kind]}); }}\n" for kind in (*FILLS, *ALONG)) + """
.step text { font: 12px sans-serif; }
.step .bar text { fill: #fff; text-anchor: middle; pointer-events: none; }
.step .bar.other text { fill: #000; }
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
        return [kind for kind in (*FILLS, *ALONG) if kind in kinds] + [WAITING] * waits

    def svg(self):
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" class="step" width="100%" height="{self.height}" '
                 f'role="group" aria-label="{escape(self.step.title)}">', HATCH]
        return "\n".join([*lines, *self.rows(), *self.axis(), "</svg>"]) + "\n"


def legend_of(drawings):
    """What the colours of several drawings mean, for a page."""
    kinds = [kind for kind in CLASSES if any(kind in drawing.kinds() for drawing in drawings)]
    return "".join(f'<span><svg class="step" width="12" height="12"><g class="{CLASSES[kind]}">'
                   f'<rect width="12" height="12"/></g></svg> {escape(kind)}</span> ' for kind in kinds)
