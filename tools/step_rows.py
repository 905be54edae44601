"""A training step as rows of bars, for drawings: what a stage's --trace holds."""

import itertools
import re
from dataclasses import dataclass, field

# Label, words (the name contains one of them).
MESSAGES = "copies and collectives"
PRODUCTS = "convolutions and products"
OTHER = "other operations"
KINDS = (
    (MESSAGES,
     ("copy", "all_reduce", "all_gather", "broadcast", "reduce_scatter", "send", "recv", "receive", "transfers")),
    (PRODUCTS, ("conv2d", "matmul")),
    (OTHER, ("",)),
)

HOST, WAITING, MEMORY = "host", "waiting", "memory"
AXES = ("data", "shard", "tensor", "pipeline")  # of stage 07's mesh
SEVERAL = "along several axes"
ALONG_AXES = {axis: f"along {axis}" for axis in AXES}  # kinds of messages, too
GAP = 0.02  # ms; shorter ones are a queue's own
HOST_GAP = 0.05  # ms; a host that enqueues nothing for so long does something else
COMPUTE = "compute"  # a device's stream of computation
OF_BACKWARD = ("backward", "column_sums")  # one of these is in every layer's backward
OF_MESSAGES = ("bucket", "scatter", "replicate", "gather", "reduce", "receive")  # ranges of stages 02 to 07
TRANSFERS = ("send", "receive")  # of ranks
OF_A_BUCKET = re.compile(r"bucket \d+/")
MOST_TOLD = 8  # operations of a bar that are told one by one


def kind_of(operation):
    return next(label for label, words in KINDS if any(word in operation for word in words))


def along(layer):
    """The axes of a mesh along which a message goes, "data and shard"; "" of all other operations. Its
    innermost range says so: "reduce conv1/along data"."""
    innermost = layer.rpartition("/")[2]
    return innermost.removeprefix("along ") if innermost.startswith("along ") else ""


def kind_along(axes):
    return ALONG_AXES.get(axes, SEVERAL)


@dataclass
class Bar:
    """Something that a lane does: "F0", "conv1", a wait."""

    begin: float
    end: float
    name: str  # written into the bar, where there is room
    kind: str  # its colour: see step_drawing
    text: str = ""  # what it is, in words
    after: tuple = ()  # numbers of the bars (in Step.bars()) that have to end before it begins
    takes: float = 0.0  # by how much the row's count grows when it begins
    gives: float = 0.0  # and shrinks when it ends
    level: float = 1.0  # how high it is, of the row's height
    along: str = ""  # of a message in a mesh, its axes: see along()


@dataclass
class Row:
    name: str
    bars: list = field(default_factory=list)
    predicted_most: float | None = None  # of its count, by a formula
    curve: bool = False  # the bars' levels are what is shown
    full: str = ""  # what a curve's full height is, in a picture
    computes: bool = False  # it should never stand still: a pause is a wait

    def waits(self, begin, end, unit):
        """Bars for the time in which a lane that computes does nothing. A host, or a lane of messages, is then
        free."""
        if not self.computes:
            return []
        found, free = [], begin
        for bar in [*sorted(self.bars, key=lambda bar: bar.begin),
                    Bar(end, end, "the end", WAITING)]:
            if bar.begin - free >= GAP:
                found.append(Bar(free, bar.begin, "", WAITING,
                                 f"nothing for {bar.begin - free:.3g} {unit}, "
                                 f"before {bar.name or bar.text}"))
            free = max(free, bar.end)
        return found


@dataclass
class Step:
    title: str
    unit: str
    end: float
    rows: list
    begin: float = 0.0
    counted: str = ""  # what the rows' counts are; "" if nothing is counted
    formula: dict | None = None  # {"text", "value": the share of all rows' time that is idle}
    note: str = ""  # what the names in the bars mean, and the unit
    mesh: object = None  # of stage 07, a mesh_drawing.Mesh

    def bars(self):
        """All bars, row by row; dependencies name their numbers here."""
        return [bar for row in self.rows for bar in row.bars]


# --- Measured ------------------------------------------------------------------------------------


def outermost(layer):
    return layer.partition("/")[0]


def kind_of_part(name, operations):
    """What a range's operations do; outside of ranges there are messages and other operations."""
    if name.startswith(OF_MESSAGES):
        return MESSAGES
    if not name:
        return MESSAGES if kind_of(operations[0]) == MESSAGES else OTHER
    passes = [word for word in ("forward", "backward") if name.startswith(word)]
    if passes:  # the loss's backward belongs to the last stage's forward
        return passes[0]
    backward = any(word in operation for word in OF_BACKWARD for operation in operations)
    return "backward" if backward else "forward"


def has_been_passed(label, bars):
    """Whether a layer's forward, or that of a layer in it, is there already, and backward has begun since: the
    operations of some layers are the same both ways (flatten's, and a residual's add)."""
    passed = [name == label or name.startswith(f"{label}.") for _, _, name, *_ in bars]
    first = next((place for place, bar in enumerate(bars) if passed[place] and bar[3] == "forward"), len(bars))
    return any(bar[3] == "backward" for bar in bars[first:])


def label_of(name):
    """ "forward 2" is F2 for short, "backward 2" B2; of chunk 1, "forward 2.1" is F2.1."""
    return re.sub(r"^(f|b)(?:or|ack)ward (\d+(?:\.\d+)?)$", lambda m: m[1].upper() + m[2], name)


def axes_of(group):
    """Along which axes each slice of a range goes. What prepares a message belongs to it: a check, a
    multiplication."""
    axes, last = [], ""
    for *_, layer in reversed(group):
        last = along(layer) or last
        axes.append(last)
    return axes[::-1]


def parts_of(slices):
    """Bars (begin, length, name, kind, number of slices): neighbours within one outermost range are one
    bar, unless there is a gap between them, or the messages go along other axes of a mesh."""
    bars = []
    for name, group in itertools.groupby(slices, key=lambda part: outermost(part[3])):
        group = list(group)
        label = label_of(name)
        kind = kind_of_part(name, [operation for _, _, operation, _ in group]) if name else ""
        if kind == "forward" and has_been_passed(label, bars):
            kind = "backward"
        for (begin, length, operation, _), axes in zip(group, axes_of(group)):
            kind_here = kind_along(axes) if axes else kind or kind_of_part("", [operation])
            same = label or (operation if kind_here == MESSAGES else ""), kind_here
            count = 1
            if (bars and bars[-1][2:4] == same and begin - sum(bars[-1][:2]) < GAP
                    and operation not in TRANSFERS):  # each has a partner on another rank
                first, _, _, _, before = bars.pop()
                begin, length, count = first, begin + length - first, before + 1
            bars.append((begin, length, *same, count))
    return bars


def operations_of(slices):
    """Bars as those of parts_of(), one for each operation. A bucket's message has the name of the range
    that it is in: "reduce-scatter"."""
    return [(begin, length, OF_A_BUCKET.sub("", layer) if OF_A_BUCKET.match(layer) else name,
             kind_along(along(layer)) if along(layer) else kind_of(name), 1)
            for begin, length, name, layer in slices]


def told(name, length, slices):
    """A bar in words: its time, and the operations in it with their layers and times."""
    each = [f"{operation}{f' ({layer})' if layer else ''} {time:.3f} ms"
            for _, time, operation, layer in slices[:MOST_TOLD]]
    more = [f"and {len(slices) - MOST_TOLD} more"] if len(slices) > MOST_TOLD else []
    return f"{name + ': ' if name else ''}{length:.3f} ms; " + ", ".join(each + more)


def lane_bars(slices, bars_of):
    """The bars of a lane, each with the range of numbers of its slices."""
    first = 0
    for begin, length, name, kind, count in bars_of(slices):
        text = told(name, length, slices[first:first + count])
        axes = along(slices[first + count - 1][3])
        yield Bar(begin, begin + length, name, kind, text, along=axes), range(first, first + count)
        first += count


def host_bars(enqueued):
    """The host's bars: what it enqueues without a pause, `enqueued` being (ms, layer, whether it runs in
    a later step) of each operation."""
    bars = []
    for at, layer, later in sorted(enqueued):
        name = label_of(outermost(layer))
        if bars and bars[-1][2:4] == [name, later] and at - bars[-1][1] < HOST_GAP:
            bars[-1][1:2] = [at]
            bars[-1][4] += 1
        else:
            bars.append([at, at, name, later, 1])
    return [Bar(begin, end, name, HOST, f"the host enqueues {count} operation{'s' * (count > 1)}"
                + (f" of {name}" if name else "") + (", of a later step" if later else ""))
            for begin, end, name, later, count in bars]


def mebibytes(bytes_used):
    return f"{bytes_used / 2**20:.2f} MiB"


def memory_pieces(changes, begin, end):
    """The bytes in use over time: a bar from each of (ms, bytes from then on) to the next, whose level
    is the bytes; and the most of them."""
    moments = [*(at for at, _ in changes[1:]), max(end, changes[-1][0])]
    pieces = cut([Bar(at, until, "", MEMORY, f"{mebibytes(used)} in use from {at:.3f} ms on", level=used)
                  for (at, used), until in zip(changes, moments) if until > at], begin, end)
    return pieces, max((piece.level for piece in pieces), default=0)


def memory_row(device, changes, begin, end):
    """The row that shows them, as high as the most."""
    pieces, most = memory_pieces(changes, begin, end)
    for piece in pieces:
        piece.level /= max(most, 1)
    return Row(f"{device} memory, from 0 to {mebibytes(most)}", pieces, curve=True)


def cut(bars, begin, end):
    """The bars in a part of the step."""
    inside = [bar for bar in bars if bar.begin < end and bar.end > begin]
    for bar in inside:
        bar.begin, bar.end = max(bar.begin, begin), min(bar.end, end)
    return inside


def measured(step, bars_of=parts_of, begin=0.0, end=None):
    """What compare_timeline.one_step() found, or the part of it between two moments in ms."""
    end = step["milliseconds"] if end is None else end
    rows = []
    for lane in step["lanes"]:
        bars = [bar for bar, _ in lane_bars(lane["slices"], bars_of)]
        rows.append(Row(f"{lane['device']} {lane['stream']}", cut(bars, begin, end),
                        computes=lane["stream"] == COMPUTE))
    hosts = [Row("host" if len(step["hosts"]) == 1 else f"host of {host['device']}",
                 cut(host_bars(host["enqueued"]), begin, end)) for host in step["hosts"]]
    curves = [memory_row(one["device"], one["changes"], begin, end) for one in step["memory"]]
    return Step(f"measured: a step of {step['milliseconds']:.2f} ms", "ms", end,
                [row for row in hosts if row.bars] + rows + curves, begin)


# --- The plan beside the run -----------------------------------------------------------------------


def means_the_same(planned, measured):
    """Whether these bars have one name: F0, "bucket 0", conv1's backward; "scatter: ..." and "scatter"."""
    if HOST in (planned.kind, measured.kind) or not measured.name:
        return False
    if {planned.kind, measured.kind} == {"forward", "backward"} or planned.along != measured.along:
        return False
    return (measured.name in (planned.name, planned.text.partition(":")[0])
            or planned.name.startswith(measured.name + "."))  # a layer of that block


def numbers_of_same(plan, run):
    """For each bar of the plan, the numbers of the run's bars that mean the same: on the stage's own
    device where a name is on as many lanes of both, on all where the plan shows one rank for all."""
    first = list(itertools.accumulate((len(row.bars) for row in run.rows), initial=0))
    found = []
    for place, row in enumerate(plan.rows):
        for bar in row.bars:
            lanes = [[first[lane] + number for number, other in enumerate(run.rows[lane].bars)
                      if means_the_same(bar, other)] for lane in range(len(run.rows))]
            lanes = [lane for lane in lanes if lane]
            planned = [i for i, other in enumerate(plan.rows)
                       if any((one.name, one.kind) == (bar.name, bar.kind) for one in other.bars)]
            if len(planned) == len(lanes):
                lanes = [lanes[planned.index(place)]]
            elif len(planned) > 1:
                lanes = []
            found.append(sum(lanes, []))
    return found
