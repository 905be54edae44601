"""Steps as pictures: rows of bars (step_rows.py) below each other on one scale, as an SVG file by itself.
A place where nothing runs stays empty. For the lessons (figures.py), and for measured steps."""

import math
from dataclasses import dataclass
from html import escape

from palette import (ALONG, BLUE, DARK_GREY, GREEN, GREY, INK, ORANGE, PALE, PAPER, PINK, RED, RULE, SKY,
                     STEP)
from step_rows import MEMORY

WIDTH, MARGIN = 900, 12
TEXT, LETTER = 13, 7.4  # of all text: height, and width of a letter in the wider ones of usual fonts
LINE, BAR, CURVE, SPACE = 22, 24, 56, 5  # heights
NARROW = 1.5  # a bar is at least so wide
SLIVER = 4  # the colour of a bar that is narrower cannot be told
TICKS = 8  # about so many
ARROWS = 20  # height between two rows, where arrows stand

PHASE = "phase"
PURPOSES = {"scatter": PINK, "replicate": ORANGE, "gather": GREEN, "reduce": RED}  # of copies and messages
PARTS = ("part A", "part B", "part C", "part D")
KEPT = "always there"
FILLS = {**STEP, **ALONG, **PURPOSES, **dict(zip(PARTS, (ORANGE, SKY, GREEN, PINK))), KEPT: DARK_GREY}
CLASSES = {kind: f"k{number}" for number, kind in enumerate(FILLS)} | {PHASE: "phase"}
# Text, paper, pale text, lines.
LIGHT, DARK = zip(INK, PAPER, PALE, RULE)


@dataclass
class Panel:
    """A step, or a part of it."""

    title: str
    rows: list  # step_rows.Row
    end: float
    begin: float = 0.0
    names: bool = False  # of narrow bars stand below the row, unless the legend has them and the colour can be seen
    marks: tuple = ()  # bars of which only the names are drawn, below the first row
    arrows: tuple = ()  # moments at which something goes on to the next row, from the last one to the first
    notes: tuple = ()  # lines of text below the rows


def style(kinds):
    """A picture follows what its reader's system prefers. There are no variables, which some programs that
    show pictures do not know."""
    def coloured(ink, paper, pale, line):
        return (f"text{{fill:{ink}}}.paper,.phase{{fill:{paper}}}rect{{stroke:{ink}}}.paper{{stroke:none}}"
                f".pale{{fill:{pale}}}line{{stroke:{line}}}.lead{{stroke:{pale}}}path:not(.join){{stroke:{ink}}}")
    fills = "".join(f".{CLASSES[kind]}{{fill:{FILLS[kind][0]}}}text.{CLASSES[kind]}{{fill:{FILLS[kind][1]}}}"
                    for kind in FILLS if kind in kinds)
    return (f"<style>text{{font:{TEXT}px Helvetica,Arial,sans-serif}}.title{{font-weight:bold}}"
            f".name{{text-anchor:middle}}rect,path{{stroke-width:.7}}.arrow,.join{{fill:none;stroke-width:1.5}}"
            f".join{{stroke-width:5}}{coloured(*LIGHT)}"
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
    """What the colours mean, {kind: name}: at the left, where a small screen begins."""
    x = MARGIN
    for kind, name in kinds.items():
        yield f'<rect class="{CLASSES[kind]}" x="{number(x)}" y="{y - 11}" width="12" height="12"/>'
        yield text(x + 17, y, name)
        x += width_of(name) + 34


def in_lines(kinds):
    """A legend, as so many as fit into the width."""
    lines, used = [{}], 0
    for kind, name in kinds.items():
        used += width_of(name) + 34
        if used > WIDTH - 2 * MARGIN:
            lines.append({})
            used = width_of(name) + 34
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


def fits(bar, width):
    return bar.name and width > width_of(bar.name) + 2


def apart(found):
    """Where the middle of each name stands, of ([middles of bars], name) from left to right: near them, and
    not over another name."""
    heaps = []  # [where it is wanted, width, names] of names that stand side by side
    for xs, name in found:
        heap = [sum(xs) / len(xs), width_of(name) + LETTER, [name]]
        while heaps and heaps[-1][0] + heaps[-1][1] / 2 > heap[0] - heap[1] / 2:
            middle, width, names = heaps.pop()
            count = len(names) + len(heap[2])
            heap = [(middle * len(names) + heap[0] * len(heap[2])) / count, width + heap[1], names + heap[2]]
        half = heap[1] / 2
        heap[0] = min(max(heap[0], MARGIN + half), WIDTH - half)
        heaps.append(heap)
    for middle, width, names in heaps:
        left = middle - width / 2
        for name in names:
            yield left + (width_of(name) + LETTER) / 2
            left += width_of(name) + LETTER


@dataclass
class Groups:
    """The ranks of a mesh, a row for each host, drawn once for each axis: lines join those that send to each other."""

    title: str
    per_host: int  # ranks
    axes: dict  # {kind: [[rank, rank], ...]}

    SIDE, BETWEEN, TOP = 26, 22, 24  # of a rank; between ranks; above them

    def hosts(self):
        return max(rank for pairs in self.axes.values() for pair in pairs for rank in pair) // self.per_host + 1

    def height(self):
        return self.TOP + LINE + self.hosts() * (self.SIDE + self.BETWEEN)

    def middle(self, rank, x, y):
        host, place = divmod(rank, self.per_host)
        step = self.SIDE + self.BETWEEN
        return x + place * step + self.SIDE / 2, y + LINE + self.TOP + host * step + self.SIDE / 2

    def join(self, kind, one, other):
        """Straight, or over the rank between them."""
        (x, y), (to_x, to_y) = one, other
        bend = 0 if abs(to_x - x) <= self.SIDE + self.BETWEEN else 2 * self.SIDE - 6
        return (f'<path class="join" stroke="{FILLS[kind][0]}" '
                f'd="M{number(x)} {number(y)}Q{number((x + to_x) / 2)} {number((y + to_y) / 2 - bend)} '
                f'{number(to_x)} {number(to_y)}"/>')

    def svg(self, left, y, width):
        wide = (width - 60) / len(self.axes)
        for host in range(self.hosts()):
            yield text(left, self.middle(host * self.per_host, 0, y)[1] + 5, f"host {host}")
        for place, (kind, pairs) in enumerate(self.axes.items()):
            x = left + 70 + place * wide
            yield text(x, y + TEXT, kind)
            for one, other in pairs:
                yield self.join(kind, self.middle(one, x, y), self.middle(other, x, y))
            for rank in range(self.hosts() * self.per_host):
                at, height = self.middle(rank, x, y)
                yield (f'<rect class="{CLASSES[kind]}" x="{number(at - self.SIDE / 2)}" '
                       f'y="{number(height - self.SIDE / 2)}" width="{self.SIDE}" height="{self.SIDE}"/>')
                yield text(at, height + 5, str(rank), f"name {CLASSES[kind]}")


class Picture:
    """Panels below each other."""

    def __init__(self, title, panels, kinds, unit="", groups=None, heading=()):
        """`kinds`, {kind: name}, are explained above all panels, between which and these `groups` may stand, or lines
        of a heading."""
        self.title, self.panels, self.legend, self.unit, self.groups = title, panels, kinds, unit, groups
        self.heading = heading
        names = [row.name for panel in panels for row in panel.rows if not row.curve]
        self.left = MARGIN + max(map(width_of, names), default=0) + 14
        self.scale = (WIDTH - MARGIN - self.left) / max(panel.end - panel.begin for panel in panels)
        self.y = MARGIN + (LINE * len(in_lines(self.legend)) + SPACE) * bool(self.legend)

    def x(self, panel, moment):
        return self.left + self.scale * (moment - panel.begin)

    def bar(self, panel, bar):
        left, right = self.x(panel, bar.begin), self.x(panel, bar.end)
        title = f"<title>{escape(bar.text)}</title>" if bar.text else ""
        kind = CLASSES[bar.kind]
        yield (f'<rect class="{kind}" x="{number(left)}" y="{self.y}" width="{number(max(right - left, NARROW))}" '
               f'height="{BAR}"' + (f">{title}</rect>" if title else "/>"))
        if fits(bar, right - left):
            yield text((left + right) / 2, self.y + BAR - 7, bar.name, "name" if bar.kind == PHASE else f"name {kind}")

    def curve(self, panel, row):
        """An area, as high as the bars' levels."""
        bottom = self.y + CURVE
        top = bottom - CURVE * max(bar.level for bar in row.bars)
        for y, words in ((top, row.full), (bottom, "0" if row.full else "")):
            yield f'<line x1="{number(self.left - 4)}" x2="{WIDTH - MARGIN}" y1="{number(y)}" y2="{number(y)}"/>'
            yield text(self.left - 8, y + 4, words, "pale", "end")
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
            if panel.names:
                yield from self.names(panel, row)
            if panel.arrows:
                yield from self.arrows(panel, row)
        self.y += (CURVE if row.curve else BAR) + SPACE

    def names(self, panel, row):
        """Of the row's narrow bars, below them: a line leads from each bar to its name, and names that had no
        room are moved apart. The next row is lower by their height."""
        found = []  # of neighbours with one name: [middles of the bars, name]
        marks = panel.marks if row is panel.rows[0] else ()
        for bar in sorted([*row.bars, *marks], key=lambda bar: (bar.begin, bar.end)):
            left, right = self.x(panel, bar.begin), self.x(panel, bar.end)
            told = bar.name in self.legend.values() and right - left > SLIVER
            if bar.name and not told and not fits(bar, right - left):
                middle = (left + max(right, left + NARROW)) / 2
                if found and found[-1][1] == bar.name and middle - found[-1][0][-1] < width_of(bar.name):
                    found[-1][0].append(middle)
                else:
                    found.append([[middle], bar.name])
        for place, (xs, name) in zip(apart(found), found):
            for x in xs:
                yield (f'<line class="lead" x1="{number(x)}" x2="{number(place)}" y1="{self.y + BAR}" '
                       f'y2="{self.y + BAR + 8}"/>')
            yield text(place, self.y + BAR + 19, name, "name")
        self.y += 20 * bool(found)

    def arrows(self, panel, row):
        """Below a row."""
        top = self.y + BAR + 3
        for moment in panel.arrows if row.bars and row.name else ():
            x = self.x(panel, moment)
            yield f'<path class="arrow" d="M{number(x)} {top}v14m-4 -5l4 5l4 -5"/>'
            if row is panel.rows[-1]:
                words = f"to {next(row.name for row in panel.rows if row.name)}"
                yield text(min(x, WIDTH - MARGIN - width_of(words) / 2), top + 30, words, "pale name")
        self.y += ARROWS * bool(row.name) + 16 * (row is panel.rows[-1])

    def draw_panel(self, panel):
        if panel.title:
            yield text(MARGIN, self.y + TEXT, panel.title, "title")
            self.y += LINE
        for row in panel.rows:
            if row.bars or not row.curve:
                yield from self.row(panel, row)
        self.y += SPACE * bool(panel.notes)
        yield from self.lines(panel.notes)
        self.y += 2 * SPACE

    def lines(self, words):
        """Lines of text at the left."""
        for line in words:
            yield text(MARGIN, self.y + TEXT, line)
            self.y += LINE - 4

    def draw_groups(self, groups):
        yield text(MARGIN, self.y + TEXT, groups.title, "title")
        self.y += LINE
        yield from groups.svg(MARGIN, self.y, WIDTH - 2 * MARGIN)
        self.y += groups.height() + 4 * SPACE

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
        drawn = list(self.draw_groups(self.groups)) if self.groups else []
        lines = drawn + [part for place, kinds_of_line in enumerate(in_lines(self.legend))
                 for part in legend(kinds_of_line, MARGIN + TEXT + LINE * place)]
        if self.heading:
            lines += self.lines(self.heading)
            self.y += 2 * SPACE
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
    """Memory over a step, side by side on one scale, below the title; `kept` and `used` are what the two colours
    are called."""
    most = max(level for run in runs for _, level in run.changes)
    left, gap, high, first = MARGIN + 34, 18, 200, MARGIN + 2 * LINE
    top = first + LINE * max(len(run.lines) for run in runs) + 6
    wide = (WIDTH - MARGIN - left - gap * (len(runs) - 1)) / len(runs)
    lines = [text(MARGIN, MARGIN + TEXT, title, "title"), *legend({KEPT: kept, MEMORY: used}, MARGIN + LINE + TEXT)]
    for value in ticks(0, most):
        y = top + high * (1 - value / most)
        lines += [f'<line x1="{left - 4}" x2="{WIDTH - MARGIN}" y1="{number(y)}" y2="{number(y)}"/>',
                  text(left - 8, y + 4, f"{value:g}", "pale", "end")]
    lines.append(text(MARGIN, top - 10, unit, "pale"))
    for place, run in enumerate(runs):
        x = left + place * (wide + gap)
        lines += [text(x, first + LINE * line + TEXT, words, "title" if line == 0 else "")
                  for line, words in enumerate(run.lines)]
        path = [f"M{number(x)} {top + high}"]
        for (_, level), until in zip(run.changes, [*(at for at, _ in run.changes[1:]), 1]):
            path.append(f"V{number(top + high * (1 - level / most))}H{number(x + wide * until)}")
        lines.append(f'<path class="{CLASSES[MEMORY]}" d="{"".join(path)}V{top + high}Z"/>')
        base = high * run.kept / most
        lines.append(f'<rect class="{CLASSES[KEPT]}" x="{number(x)}" y="{number(top + high - base)}" '
                     f'width="{number(wide)}" height="{number(base)}"/>')
        lines.append(text(x + wide / 2, top + high + 18, "one step", "pale name"))
    return whole(title, top + high + 28, {KEPT, MEMORY}, lines)


# --- Lines -----------------------------------------------------------------------------------------

LINES = (BLUE, RED, GREEN, ORANGE, PINK, SKY, GREY)
DASHES = ("", "7 4", "2 3", "12 3", "10 3 2 3")


def looks(groups):
    """(heading, name, colour, dashes) of each line. A group has one colour, and its first line is not dashed; in
    one without a heading each line has a colour of its own, and after the last colour comes the first one again."""
    for number, (heading, series) in enumerate(groups.items()):
        for count, name in enumerate(series):
            colour, dash = (number, count) if heading else (count, count // len(LINES))
            yield heading if count == 0 else "", name, LINES[colour % len(LINES)][0], DASHES[dash % len(DASHES)]


def lines(title, groups, across, up, least=None):
    """A line for each of {heading: {name: {x: y}}}; the x, texts, have equal distances. The axis begins at
    `least`."""
    series = [points for group in groups.values() for points in group.values()]
    words = [word for heading, group in groups.items() for word in (heading, *group) if word]
    xs = list(dict.fromkeys(x for points in series for x in points))
    values = [y for points in series for y in points.values()]
    bottom, most = min(values) if least is None else least, max(values)
    most = most if most > bottom else bottom + 1
    left, right = MARGIN + 44, WIDTH - MARGIN - max(map(width_of, words)) - 56
    top, high = MARGIN + LINE, max(260, LINE * len(words))

    def place(x, y):
        return left + (xs.index(x) + 0.5) * (right - left) / len(xs), top + high * (most - y) / (most - bottom)

    drawn = [text(MARGIN, MARGIN + TEXT - 4, up, "pale"),
             text((left + right) / 2, top + high + 40, across, "pale name")]
    for value in ticks(bottom, most):
        _, y = place(xs[0], value)
        drawn += [f'<line x1="{left}" x2="{number(right)}" y1="{number(y)}" y2="{number(y)}"/>',
                  text(left - 6, y + 4, f"{value:g}", "pale", "end")]
    drawn += [text(place(x, bottom)[0], top + high + 20, x, "pale name") for x in xs]
    y = top + 8
    for (heading, name, colour, dash), points in zip(looks(groups), series):
        if heading:
            drawn.append(text(right + 16, y + 4, heading, "title"))
            y += LINE
        look = f'fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash or "none"}"'
        found = [place(*point) for point in points.items()]
        joined = " ".join(f"{number(x)},{number(y)}" for x, y in found)
        drawn += [f'<polyline points="{joined}" {look}/>', *(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="3.5" fill="{colour}"/>' for x, y in found),
            f'<polyline points="{number(right + 16)},{y} {number(right + 46)},{y}" {look}/>',
            text(right + 52, y + 4, name)]
        y += LINE
    return whole(title, top + high + 50, set(), drawn)
