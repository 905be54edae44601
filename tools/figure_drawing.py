"""Steps as pictures: rows of bars (step_rows.py) below each other on one scale, as an SVG file by itself.
A place where nothing runs stays empty. For the lessons (figures.py), and for measured steps."""

import math
from dataclasses import dataclass, field
from html import escape

from step_rows import ALONG_AXES, HOST, MEMORY, MESSAGES, OTHER, PRODUCTS, SEVERAL

WIDTH, MARGIN = 900, 12
TEXT, LETTER = 13, 6.9  # of all text: height, and width of a letter in the middle
LINE, BAR, CURVE, SPACE = 22, 24, 56, 5  # heights
NARROW = 1.5  # a bar is at least so wide
TICKS = 8  # about so many

# Colour and letters. The first ones are those of Okabe and Ito (2008), which readers tell apart who see red and
# green alike. All are the same in light and in dark mode, where a bar's edge has the colour of the text.
BLUE, SKY, ORANGE, GREEN, PINK, RED, YELLOW = (
    ("#0072b2", "#ffffff"), ("#56b4e9", "#000000"), ("#e69f00", "#000000"), ("#009e73", "#000000"),
    ("#cc79a7", "#000000"), ("#d55e00", "#000000"), ("#f0e442", "#000000"))
WHITE, GREY, DARK_GREY, WINE = (
    ("#ffffff", "#000000"), ("#b8bec4", "#000000"), ("#4d4d4d", "#ffffff"), ("#882255", "#ffffff"))
PHASE = "phase"
PURPOSES = {"scatter": PINK, "replicate": ORANGE, "gather": GREEN, "reduce": RED}  # of copies and messages
PARTS = ("part A", "part B", "part C", "part D")
FILLS = {"forward": SKY, "backward": BLUE, MESSAGES: ORANGE, PRODUCTS: BLUE, OTHER: GREY, HOST: WHITE,
         MEMORY: YELLOW, SEVERAL: WINE,
         **dict(zip(map(ALONG_AXES.get, ("data", "shard", "tensor", "pipeline")), (RED, GREEN, PINK, DARK_GREY))),
         **PURPOSES, **dict(zip(PARTS, (ORANGE, SKY, GREEN, PINK)))}
CLASSES = {kind: f"k{number}" for number, kind in enumerate(FILLS)} | {PHASE: "phase"}
# Text, paper, pale text, lines.
LIGHT, DARK = ("#1c1e21", "#ffffff", "#57606a", "#c8ced4"), ("#e8eaed", "#17191c", "#a9b1b9", "#454b52")


@dataclass
class Panel:
    """A step, or a part of it."""

    title: str
    rows: list  # step_rows.Row
    end: float
    begin: float = 0.0
    legend: dict = field(default_factory=dict)  # {kind: name}, beside the title


def style(kinds):
    """A picture follows what its reader's system prefers. There are no variables, which some programs that
    show pictures do not know."""
    def coloured(ink, paper, pale, line):
        return (f"text{{fill:{ink}}}.paper,.phase{{fill:{paper}}}rect{{stroke:{ink}}}.paper{{stroke:none}}"
                f".pale{{fill:{pale}}}line{{stroke:{line}}}path{{stroke:{ink}}}")
    fills = "".join(f".{CLASSES[kind]}{{fill:{FILLS[kind][0]}}}text.{CLASSES[kind]}{{fill:{FILLS[kind][1]}}}"
                    for kind in FILLS if kind in kinds)
    return (f"<style>text{{font:{TEXT}px Helvetica,Arial,sans-serif}}.title{{font-weight:bold}}"
            f".name{{text-anchor:middle}}rect,path{{stroke-width:.7}}{coloured(*LIGHT)}"
            f"@media (prefers-color-scheme: dark){{{coloured(*DARK)}}}{fills}</style>"
            '<rect class="paper" width="100%" height="100%"/>')


def number(value):
    return f"{value:.1f}".removesuffix(".0")


def text(x, y, words, classes="", anchor=""):
    anchor = f' text-anchor="{anchor}"' if anchor else ""
    classes = f' class="{classes}"' if classes else ""
    return f'<text x="{number(x)}" y="{number(y)}"{classes}{anchor}>{escape(words)}</text>'


def width_of(words):
    return LETTER * len(words)


def legend(kinds, y):
    """What the colours mean, {kind: name}, from the right end to the left."""
    x = WIDTH - MARGIN
    for kind, name in reversed(kinds.items()):
        x -= width_of(name) + 28
        yield f'<rect class="{CLASSES[kind]}" x="{number(x)}" y="{y - 11}" width="12" height="12"/>'
        yield text(x + 17, y, name)


def in_lines(kinds):
    """A legend, as so many as fit into the width."""
    lines, used = [{}], 0
    for kind, name in kinds.items():
        used += width_of(name) + 28
        if used > WIDTH - 2 * MARGIN:
            lines.append({})
            used = width_of(name) + 28
        lines[-1][kind] = name
    return lines


def ticks(begin, end):
    """Round numbers on an axis, about TICKS of them."""
    if end <= begin:
        return []
    rough = (end - begin) / TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [count * step for count in range(math.ceil(begin / step - 1e-9), math.floor(end / step + 1e-9) + 1)]


class Picture:
    """Panels below each other."""

    def __init__(self, title, panels, kinds, unit=""):
        """`kinds`, {kind: name}, are explained above all panels."""
        self.title, self.panels, self.legend, self.unit = title, panels, kinds, unit
        names = [row.name for panel in panels for row in panel.rows if not row.curve]
        self.left = MARGIN + max(map(width_of, names), default=0) + 8
        self.scale = (WIDTH - MARGIN - self.left) / max(panel.end - panel.begin for panel in panels)
        self.y = MARGIN + LINE * len(in_lines(self.legend)) * bool(self.legend)

    def x(self, panel, moment):
        return self.left + self.scale * (moment - panel.begin)

    def bar(self, panel, bar):
        left, right = self.x(panel, bar.begin), self.x(panel, bar.end)
        title = f"<title>{escape(bar.text)}</title>" if bar.text else ""
        kind = CLASSES[bar.kind]
        yield (f'<rect class="{kind}" x="{number(left)}" y="{self.y}" width="{number(max(right - left, NARROW))}" '
               f'height="{BAR}"' + (f">{title}</rect>" if title else "/>"))
        if bar.name and right - left > width_of(bar.name):
            yield text((left + right) / 2, self.y + BAR - 7, bar.name, "name" if bar.kind == PHASE else f"name {kind}")

    def curve(self, panel, row):
        """An area, as high as the bars' levels."""
        bottom = self.y + CURVE
        points = [f"M{number(self.x(panel, row.bars[0].begin))} {bottom}"]
        for bar in row.bars:
            points.append(f"V{number(bottom - bar.level * CURVE)}H{number(self.x(panel, bar.end))}")
        yield f'<path class="{CLASSES[row.bars[0].kind]}" d="{"".join(points)}V{bottom}Z"/>'

    def row(self, panel, row):
        if row.curve:
            yield text(self.left, self.y + TEXT, row.name)
            self.y += LINE - 3
            yield from self.curve(panel, row)
        else:
            yield text(MARGIN, self.y + BAR - 7, row.name)
            for bar in row.bars:
                yield from self.bar(panel, bar)
        self.y += (CURVE if row.curve else BAR) + SPACE

    def draw_panel(self, panel):
        if panel.title or panel.legend:
            yield text(MARGIN, self.y + TEXT, panel.title, "title")
            yield from legend(panel.legend, self.y + TEXT)
            self.y += LINE
        for row in panel.rows:
            if row.bars or not row.curve:
                yield from self.row(panel, row)
        self.y += 2 * SPACE

    def axis(self):
        """With numbers, where the unit says something."""
        longest = max(self.panels, key=lambda panel: panel.end - panel.begin)
        yield f'<line x1="{number(self.left)}" x2="{WIDTH - MARGIN}" y1="{self.y}" y2="{self.y}"/>'
        for moment in ticks(longest.begin, longest.end) if self.unit else ():
            x = self.x(longest, moment)
            yield f'<line x1="{number(x)}" x2="{number(x)}" y1="{self.y}" y2="{self.y + 4}"/>'
            yield text(min(x, WIDTH - MARGIN - 8), self.y + 18, f"{moment:g}", "pale name")
        self.y += (LINE - 4) * bool(self.unit)
        yield text((self.left + WIDTH) / 2, self.y + 16, self.unit or "time", "pale name")
        self.y += LINE

    def svg(self):
        kinds = {bar.kind for panel in self.panels for row in panel.rows for bar in row.bars}
        lines = [part for place, kinds_of_line in enumerate(in_lines(self.legend))
                 for part in legend(kinds_of_line, MARGIN + TEXT + LINE * place)]
        for panel in self.panels:
            lines += self.draw_panel(panel)
        lines += self.axis()
        return whole(self.title, self.y, {*kinds, *self.legend}, lines)


def whole(title, height, kinds, lines):
    """The file, of its parts."""
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{number(height)}" '
                      f'viewBox="0 0 {WIDTH} {number(height)}" role="img" aria-label="{escape(title)}">',
                      style(kinds), *lines, "</svg>"]) + "\n"


def measured(steps):
    """The picture of steps that step_rows.measured() read from traces, on one scale."""
    kinds = {bar.kind for step in steps for row in step.rows for bar in row.bars}
    return Picture(steps[0].title, [Panel(step.title, step.rows, step.end, step.begin) for step in steps],
                   {kind: kind for kind in FILLS if kind in kinds}, f"{steps[0].unit} since the step began").svg()


# --- Memory ----------------------------------------------------------------------------------------


@dataclass
class Column:
    """The memory of a step: (share of the step, how much from then on)."""

    lines: list  # of text above it
    changes: list
    kept: float  # between steps


def columns(title, runs, unit, kept, used):
    """Memory over a step, side by side on one scale; `kept` and `used` are what the two colours are called."""
    most = max(level for run in runs for _, level in run.changes)
    left, gap, high, top = MARGIN + 34, 18, 200, MARGIN + LINE + LINE * max(len(run.lines) for run in runs) + 6
    wide = (WIDTH - MARGIN - left - gap * (len(runs) - 1)) / len(runs)
    lines = [*legend({"backward": kept, MEMORY: used}, MARGIN + TEXT)]
    for value in ticks(0, most):
        y = top + high * (1 - value / most)
        lines += [f'<line x1="{left - 4}" x2="{WIDTH - MARGIN}" y1="{number(y)}" y2="{number(y)}"/>',
                  text(left - 8, y + 4, f"{value:g}", "pale", "end")]
    lines.append(text(MARGIN, top - 10, unit, "pale"))
    for place, run in enumerate(runs):
        x = left + place * (wide + gap)
        lines += [text(x, MARGIN + LINE + LINE * line + TEXT, words, "title" if line == 0 else "")
                  for line, words in enumerate(run.lines)]
        path = [f"M{number(x)} {top + high}"]
        for (_, level), until in zip(run.changes, [*(at for at, _ in run.changes[1:]), 1]):
            path.append(f"V{number(top + high * (1 - level / most))}H{number(x + wide * until)}")
        lines.append(f'<path class="{CLASSES[MEMORY]}" d="{"".join(path)}V{top + high}Z"/>')
        base = high * run.kept / most
        lines.append(f'<rect class="{CLASSES["backward"]}" x="{number(x)}" y="{number(top + high - base)}" '
                     f'width="{number(wide)}" height="{number(base)}"/>')
        lines.append(text(x + wide / 2, top + high + 18, "one step", "pale name"))
    return whole(title, top + high + 28, {"backward", MEMORY}, lines)


# --- Lines -----------------------------------------------------------------------------------------

LINES = (BLUE, RED, GREEN, ORANGE, PINK, SKY, GREY)
DASHES = ("", "7 4", "2 3")  # after the last colour, the first one again


def lines(title, series, across, up, least=None):
    """A line for each of {name: {x: y}}; the x, texts, have equal distances. The axis begins at `least`."""
    xs = list(dict.fromkeys(x for points in series.values() for x in points))
    values = [y for points in series.values() for y in points.values()]
    bottom, most = min(values) if least is None else least, max(values)
    most = most if most > bottom else bottom + 1
    left, right = MARGIN + 44, WIDTH - MARGIN - max(map(width_of, series)) - 56
    top, high = MARGIN + LINE, max(260, LINE * len(series))

    def place(x, y):
        return left + (xs.index(x) + 0.5) * (right - left) / len(xs), top + high * (most - y) / (most - bottom)

    drawn = [text(MARGIN, MARGIN + TEXT - 4, up, "pale"),
             text((left + right) / 2, top + high + 40, across, "pale name")]
    for value in ticks(bottom, most):
        _, y = place(xs[0], value)
        drawn += [f'<line x1="{left}" x2="{number(right)}" y1="{number(y)}" y2="{number(y)}"/>',
                  text(left - 6, y + 4, f"{value:g}", "pale", "end")]
    drawn += [text(place(x, bottom)[0], top + high + 20, x, "pale name") for x in xs]
    for count, (name, points) in enumerate(series.items()):
        (colour, _), dash = LINES[count % len(LINES)], DASHES[count // len(LINES) % len(DASHES)]
        look = f'fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash or "none"}"'
        found, y = [place(x, value) for x, value in points.items()], top + LINE * count + 8
        joined = " ".join(f"{number(x)},{number(y)}" for x, y in found)
        drawn += [f'<polyline points="{joined}" {look}/>', *(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="3.5" fill="{colour}"/>' for x, y in found),
            f'<polyline points="{number(right + 16)},{y} {number(right + 46)},{y}" {look}/>',
            text(right + 52, y + 4, name)]
    return whole(title, top + high + 50, set(), drawn)
