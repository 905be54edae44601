"""The mesh of stage 07 as grids of ranks, for the page of `lockstep show`: one for each axis, and for axes
that messages go along together. A rank's groups are drawn as lines from rank to rank."""

import itertools
import math
from dataclasses import dataclass, field
from html import escape

from step_drawing import CLASSES
from step_rows import kind_along

# What a rank sends, as the tables in 07-mesh/README.md have it.
SENDS = {"data": "gradients", "shard": "parameters, gradients", "tensor": "sums of activations, in the passes",
         "pipeline": "activations forward, their gradients back"}
SAMPLES = {"data", "shard"}  # along these they differ
MOST_DRAWN = 64  # ranks
MOST_ALONG = (16, 8, 4, 3, 2)  # ranks along an axis: the first that gives few enough
MOST_TOLD = 16  # ranks of a group
HEIGHT, DIGIT = 24, 8  # of a rank; width of a digit
GAP, BLOCK_GAP = 14, 38  # between ranks, between blocks of them
MARGIN, HEAD, SIDE = 8, 20, 66  # around them; for the coordinates above and at the left
ARC = 12  # how far the line to a rank in the next block bends
FRAME = 5  # how far a host's frame is from its ranks
PALE = 3  # degrees of it, by which groups beside each other differ


@dataclass(frozen=True)
class Mesh:
    """Names and sizes of the axes, outermost first, as MeshShape has them in 07-mesh/device_mesh.h."""

    sizes: dict
    per_host: int  # ranks
    sent: dict = field(default_factory=dict)  # by rank 0 in the step: {"data and shard": "2 KiB"}

    @staticmethod
    def of(metrics, sent=None):
        """Of what the program left: {"shape": "data=2,tensor=4", "ranks_per_host": 8}."""
        pairs = [axis.partition("=") for axis in metrics["shape"].split(",")]
        return Mesh({name: int(size) for name, _, size in pairs}, metrics["ranks_per_host"], sent or {})

    def text(self):
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())

    def ranks(self):
        return math.prod(self.sizes.values())

    def long_axes(self):
        return [axis for axis, size in self.sizes.items() if size > 1]

    def stride(self, axis):
        """How far apart neighbours along it are: the last axis is the nearest."""
        sizes = list(self.sizes.items())
        return math.prod(size for _, size in sizes[list(self.sizes).index(axis) + 1:])

    def coordinate(self, rank, axis):
        return rank // self.stride(axis) % self.sizes[axis]

    def rank(self, coordinates):
        """Of the coordinates along some axes; along the others they are 0."""
        return sum(place * self.stride(axis) for axis, place in coordinates.items())

    def place(self, rank):
        """ "data 1, tensor 0"; may be empty."""
        return ", ".join(f"{axis} {self.coordinate(rank, axis)}" for axis in self.long_axes())

    def first_of(self, rank, axes):
        """The first rank of its group along these axes, which names the group."""
        return rank - self.rank({axis: self.coordinate(rank, axis) for axis in self.sizes if axis in axes})

    def group(self, rank, axes):
        """The ranks that differ from this one along these axes only, one after another."""
        strides = [(size, self.stride(axis)) for axis, size in self.sizes.items() if axis in axes]
        steps = [range(0, size * stride, stride) for size, stride in strides]
        return (self.first_of(rank, axes) + sum(step) for step in itertools.product(*steps))

    def hosts(self):
        return math.ceil(self.ranks() / self.per_host)


# --- Which ranks are drawn, and where --------------------------------------------------------------


def first_and_last(size, most):
    """So many of an axis's coordinates: all, or the first ones and the last."""
    return list(range(size)) if size <= most else [*range(most - 1), size - 1]


def drawn_along(mesh):
    """The coordinates that are drawn along each long axis."""
    for most in MOST_ALONG:
        drawn = {axis: first_and_last(mesh.sizes[axis], most) for axis in mesh.long_axes()}
        if math.prod(map(len, drawn.values())) <= MOST_DRAWN:
            break
    return drawn  # at the least two of each of four axes


class Layout:
    """Where ranks stand. From the last axis to the first, an axis goes to the right, down, to the right in
    blocks, down in blocks."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.drawn = drawn_along(mesh)
        self.axes = list(reversed(self.drawn))  # the nearest first
        self.width = DIGIT * max(3, len(str(mesh.ranks() - 1))) + 8  # of a rank
        gap = GAP if mesh.hosts() == 1 else GAP + 2 * FRAME
        self.gaps = [gap, gap, BLOCK_GAP, BLOCK_GAP + MARGIN]
        self.steps, size = [], [self.width, HEIGHT]
        for level, axis in enumerate(self.axes):
            self.steps.append(size[level % 2] + self.gaps[level])
            size[level % 2] += self.along(level, len(self.drawn[axis]) - 1)
        self.heads = [8 + ARC * (len(self.axes) > 2), 8 + ARC + HEAD]  # of columns and blocks, above the first row
        self.left, self.top = MARGIN + SIDE, MARGIN + 10 + self.heads[len(self.axes) > 2]
        self.right, self.bottom = self.left + size[0] + 2 * MARGIN, self.top + size[1] + 2 * MARGIN

    def ranks(self):
        return [self.mesh.rank(dict(zip(self.drawn, places))) for places in itertools.product(*self.drawn.values())]

    def leaves_out(self, axis):
        return len(self.drawn[axis]) < self.mesh.sizes[axis]

    def along(self, level, number):
        """How far the number-th of an axis's drawn coordinates is from the first."""
        axis = self.axes[level]
        is_after_gap = self.leaves_out(axis) and number == len(self.drawn[axis]) - 1
        return number * self.steps[level] + self.gaps[level] * is_after_gap

    def corner(self, rank):
        """Left and top of a rank."""
        at = [self.left, self.top]
        for level, axis in enumerate(self.axes):
            at[level % 2] += self.along(level, self.drawn[axis].index(self.mesh.coordinate(rank, axis)))
        return at

    def box(self, ranks):
        """Left, top, right, bottom of what has all these ranks in it."""
        lefts, tops = zip(*map(self.corner, ranks))
        return min(lefts), min(tops), max(lefts) + self.width, max(tops) + HEIGHT


# --- The drawing -----------------------------------------------------------------------------------


def text(x, y, words, classes, anchor="start"):
    return f'<text x="{x:g}" y="{y:g}" class="{classes}" text-anchor="{anchor}">{escape(words)}</text>'


class Grid:
    """The groups along some axes."""

    def __init__(self, mesh, axes):
        self.mesh, self.axes, self.layout = mesh, axes, Layout(mesh)
        self.kind = CLASSES[kind_along(" and ".join(axes))]

    def marked(self, rank):
        """Rank 0's groups are marked until another rank is pointed at: the step that is drawn is its."""
        group = self.mesh.first_of(rank, self.axes)
        return f'{" together" if group == 0 else ""}" data-group="{group}'

    def host_boxes(self):
        """Left, top, right, bottom of each host, by its name; where its ranks are no rectangle, of each row."""
        layout, nearest = self.layout, self.layout.axes[0]
        for host, ranks in itertools.groupby(layout.ranks(), key=lambda rank: rank // self.mesh.per_host):
            ranks = list(ranks)
            left, top, right, bottom = layout.box(ranks)
            inside = [rank for rank in layout.ranks()
                      if left <= layout.corner(rank)[0] < right and top <= layout.corner(rank)[1] < bottom]
            rows = [ranks] if inside == ranks else [
                list(row) for _, row in itertools.groupby(ranks, key=lambda rank: rank // self.mesh.sizes[nearest])]
            for row in rows:
                yield f"host {host}", layout.box(row)

    def frames(self):
        for _, (left, top, right, bottom) in self.host_boxes():
            yield (f'<rect class="frame" x="{left - FRAME:g}" y="{top - FRAME:g}" rx="4" '
                   f'width="{right - left + 2 * FRAME:g}" height="{bottom - top + 2 * FRAME:g}"/>')

    def host_names(self):
        for name, (left, _, _, bottom) in self.host_boxes():
            yield text(left - 1, bottom + FRAME + 4, name, "host-name")

    def coordinates(self):
        """Above the columns and blocks, and at the left; of the axes of this grid in its colour."""
        layout = self.layout
        columns, rows = ([layout.along(level, number) for number in range(len(layout.drawn[layout.axes[level]]))]
                         if level < len(layout.axes) else [0] for level in (2, 3))  # where blocks begin
        for level, axis in enumerate(layout.axes):
            classes = f"coordinate {self.kind if axis in self.axes else ''}"
            if level == 0:
                yield text(MARGIN, layout.top - layout.heads[0], axis, classes)
            for number, place in enumerate(layout.drawn[axis]):
                at, name = layout.along(level, number), f"{axis} {place}"
                if level == 0:
                    middle = layout.left + at + layout.width / 2
                    yield from (text(middle + x, layout.top - layout.heads[0], str(place), classes, "middle")
                                for x in columns)
                elif level == 1:
                    yield from (text(MARGIN, layout.top + at + y + HEIGHT / 2 + 4, name, classes) for y in rows)
                elif level == 2:
                    yield text(layout.left + at, layout.top - layout.heads[1], name, classes)
                else:  # the name of the nearest axis stands beside the first block
                    yield text(MARGIN, layout.top + at - layout.heads[number == 0], name, classes)

    def dots(self):
        """In the place of ranks that are not drawn."""
        layout = self.layout
        for level, axis in enumerate(layout.axes):
            if layout.leaves_out(axis):
                at = layout.along(level, len(layout.drawn[axis]) - 1) - layout.gaps[level]
                x, y = layout.left + layout.width / 2, layout.top + HEIGHT / 2
                yield (text(layout.left + at, y + 4, "⋯", "dots", "middle") if level % 2 == 0 else
                       text(x, layout.top + at + 4, "⋮", "dots", "middle"))

    def lines(self):
        """From each rank to the next one of its group along an axis. Those to another block bend, as other
        ranks lie between."""
        layout, mesh = self.layout, self.mesh
        for axis in self.axes:
            level, drawn = layout.axes.index(axis), layout.drawn[axis]
            for rank in layout.ranks():
                number = drawn.index(mesh.coordinate(rank, axis))
                if number + 1 == len(drawn):
                    continue
                x, y = layout.corner(rank)
                far = layout.along(level, number + 1) - layout.along(level, number)
                path = {0: f"M{x + layout.width:g},{y + HEIGHT / 2:g} h{far - layout.width:g}",
                        1: f"M{x + layout.width / 2:g},{y + HEIGHT} v{far - HEIGHT}",
                        2: f"M{x + layout.width / 2:g},{y} c6,{-ARC} {far - 6:g},{-ARC} {far:g},0",
                        3: f"M{x + layout.width:g},{y + HEIGHT / 2:g} c{ARC},6 {ARC},{far - 6:g} 0,{far:g}"}[level]
                far = " far" if layout.leaves_out(axis) and number + 2 == len(drawn) else ""
                yield f'<path class="{self.kind}{far}{self.marked(rank)}" d="{path}"/>'

    def told(self, rank):
        members = [str(member) for member in itertools.islice(self.mesh.group(rank, self.axes), MOST_TOLD + 1)]
        members[MOST_TOLD:] = ["and so on"] * (len(members) > MOST_TOLD)
        host = f" on host {rank // self.mesh.per_host}" if self.mesh.hosts() > 1 else ""
        return (f"rank {rank}{host}: {self.mesh.place(rank)}; its group along {' and '.join(self.axes)}: "
                f"{', '.join(members)}")

    def cells(self):
        layout = self.layout
        down = sorted(layout.ranks(), key=lambda rank: layout.corner(rank)[::-1])
        for _, row in itertools.groupby(down, key=lambda rank: layout.corner(rank)[1]):
            yield '<g class="row">'
            for rank in row:
                x, y = layout.corner(rank)
                pale = sum(self.mesh.coordinate(rank, axis) for axis in layout.axes if axis not in self.axes) % PALE
                yield (f'<g class="bar {self.kind} pale-{pale}{self.marked(rank)}" data-rank="{rank}" '
                       f'role="img" aria-label="{escape(self.told(rank))}"><title>{escape(self.told(rank))}</title>'
                       f'<rect x="{x:g}" y="{y}" width="{layout.width}" height="{HEIGHT}" rx="5"/>'
                       f'<text x="{x + layout.width / 2:g}" y="{y + HEIGHT / 2 + 4:g}">{rank}</text></g>')
            yield "</g>"

    def svg(self):
        width, height = self.layout.right, self.layout.bottom
        label = f"The groups along {' and '.join(self.axes)}"
        frames, names = (self.frames(), self.host_names()) if self.mesh.hosts() > 1 else ((), ())
        return "\n".join([f'<svg class="step grid" width="{width:g}" height="{height:g}" role="group" '
                          f'aria-label="{label}">', *frames, *self.coordinates(), *self.lines(), *names, *self.dots(),
                          *self.cells(), "</svg>"])

    def sends(self):
        if len(self.axes) == 1:
            return SENDS[self.axes[0]]
        if set(self.axes) == SAMPLES:
            return "statistics of SyncBatchNorm, counts of samples"
        return "" if "data" in self.axes else "squares, for the gradient's norm"  # copies along data count once

    def caption(self):
        name, ranks = " and ".join(self.axes), math.prod(self.mesh.sizes[axis] for axis in self.axes)
        groups = self.mesh.ranks() // ranks
        sent = f"<br>rank 0 sends {self.mesh.sent[name]} in this step" if name in self.mesh.sent else ""
        return (f'<b class="{self.kind}">along {name}</b>: {groups:,} group{"s" * (groups > 1)} of {ranks:,}'
                f"<br>{self.sends()}{sent}")


def grids(mesh):
    """For each axis, for the samples' axes together, and for what else a message of the step goes along."""
    single = [(axis,) for axis in mesh.long_axes()]
    samples = tuple(axis for axis in mesh.long_axes() if axis in SAMPLES)  # one of them is there already, or both
    together = [tuple(name.split(" and ")) for name in mesh.sent]
    return [Grid(mesh, axes) for axes in dict.fromkeys([*single, samples, *together]) if axes]


def section(mesh):
    """The page's part about the mesh; nothing for a rank alone."""
    if not mesh.long_axes():
        return ""
    hosts, drawn = mesh.hosts(), len(Layout(mesh).ranks())
    on = f" on {hosts:,} hosts" if hosts > 1 else ""
    part = f" {drawn} of {mesh.ranks():,} ranks are drawn." if drawn < mesh.ranks() else ""
    figures = "\n".join(f"<figure><figcaption>{grid.caption()}</figcaption>{grid.svg()}</figure>"
                        for grid in grids(mesh))
    return (f"<h2>The mesh {escape(mesh.text())}: {mesh.ranks():,} ranks{on}</h2><p>Lines join the ranks of a group. "
            "Filled are the groups of rank 0, whose step is drawn, or of the rank that you point at. Messages have the "
            f"colour of their axis in the step, too.{part}</p><div>{figures}</div>")
