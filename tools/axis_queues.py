#!/usr/bin/env python3
"""What it costs that the messages of all axes have one stream: tools/axis_queues.py TRACE

TRACE is what stage 07 writes with --trace on simulated devices. It says of every operation what it waited
for. So the same operations can be placed again, with a stream for the messages of each axis: a message
still comes after those that it needs, but no longer after those of other axes. The host's times stay.
"""

import argparse

from command_line import Parser, complain, run_command
from compare_timeline import BEFORE_UPDATES, END_OF_STEP, WARM_UP
from plain_files import read_json

STEPS = 6  # of a run: the first WARM_UP are not looked at
ALONG = "along "  # the range of a message: "reduce conv1/along data"
CLOSE = 0.002  # microseconds: traces have nanoseconds, rounded


class NoSimulatedMesh(Exception):
    """The trace does not say what is asked of it; the text says why."""


def read_slices(trace):
    """All operations by (process, lane, number on its lane)."""
    found = {}
    counts = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        lane = event["pid"], event["tid"]
        number = counts[lane] = counts.get(lane, -1) + 1
        found[*lane, number] = {
            "name": event["name"], "begin": event["ts"], "takes": event["dur"], "queued": event["args"]["queued"],
            "range": event["args"]["layer"], "after": [tuple(place) for place in event["args"].get("after", ())]}
    return found


def axes_of(slices, lane):
    """The axes of each operation on a lane, by its number, and the operation just before that it needs, if
    any. What waits for another stream begins something new; what follows needs it. Kernels before a message
    are on that message's stream."""
    numbers = [place[2] for place in slices if place[:2] == lane]
    axes, needs = {}, {}
    for number in reversed(numbers):
        one = slices[*lane, number]
        own = one["range"].rpartition(ALONG)[2] if ALONG in one["range"] else None
        follower = number + 1 in axes and not slices[*lane, number + 1]["after"]
        axes[number] = own or (axes[number + 1] if follower else "")
        if number > 0 and not one["after"]:
            needs[number] = number - 1
    return axes, needs


def in_order(slices):
    """The places of the operations: on a lane in its order, and each after those that it waits for."""
    waiting = {}  # the places on each lane that are not yet among `found`, the next one last
    for place in reversed(slices):
        waiting.setdefault(place[:2], []).append(place)
    found = {}
    while any(waiting.values()):
        before = len(found)
        for places in waiting.values():
            while places and all(other in found for other in slices[places[-1]]["after"]):
                found[places.pop()] = None
        if len(found) == before:
            raise NoSimulatedMesh("its operations wait for each other")
    return found


def place_again(slices, each_axis):
    """When each operation ends, if all messages of a lane follow each other, or, with `each_axis`, those
    of the same axes only."""
    ends, last = {}, {}
    lanes = {place[:2] for place in slices}
    of_lane = {lane: axes_of(slices, lane) for lane in lanes} if each_axis else {}
    for place in in_order(slices):
        one, lane = slices[place], place[:2]
        axes, needs = of_lane.get(lane, ({}, {}))
        stream = (*lane, axes.get(place[2], ""))
        before = [one["queued"], last.get(stream, 0), *(ends[other] for other in one["after"])]
        if place[2] in needs:
            before.append(ends[*lane, needs[place[2]]])
        ends[place] = last[stream] = max(before) + one["takes"]
    return ends


def step_ends(slices, ends):
    """When each step's last update ends."""
    found, updates = [], None
    for place, one in slices.items():
        if one["name"] in END_OF_STEP:
            updates = place
        elif updates and place[:2] == updates[:2] and one["name"] not in BEFORE_UPDATES:
            found.append(ends[updates])
            updates = None
    return found if updates is None else [*found, ends[updates]]


def step_time(slices, ends):
    """Seconds of a step after the warm-up, the mean."""
    steps = sorted(step_ends(slices, ends))[WARM_UP - 1:]
    if len(steps) < 2:
        raise NoSimulatedMesh(f"it has fewer than {WARM_UP + 1} steps; train {STEPS} (--max-steps {STEPS})")
    return (steps[-1] - steps[0]) / (len(steps) - 1) * 1e-6


def compared(path):
    """Seconds per step with one stream for all messages, as it was, and with one for each axis."""
    try:
        slices = read_slices(read_json(path))
    except (LookupError, TypeError, AttributeError) as error:
        raise NoSimulatedMesh("it is JSON, but no trace of 07-mesh") from error
    if not any("after" in one and one["after"] for one in slices.values()):
        raise NoSimulatedMesh("it does not say what operations waited for; run on simulated devices (--devices sim:4)")
    if not any(ALONG in one["range"] for one in slices.values()):
        raise NoSimulatedMesh("it has no messages along axes; give a trace of 07-mesh")
    ends = place_again(slices, each_axis=False)
    for place, one in slices.items():
        if abs(ends[place] - one["begin"] - one["takes"]) > CLOSE:
            raise NoSimulatedMesh(f"operation {place} ends at {one['begin'] + one['takes']} us, expected "
                                  f"{ends[place]} by what it waits for")
    return {"one_stream_seconds": step_time(slices, ends),
            "stream_each_seconds": step_time(slices, place_again(slices, each_axis=True))}


def main(argv):
    parser = Parser(prog="axis_queues.py", description=__doc__.partition("\n\n")[2],
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="TRACE")
    options = parser.parse_args(argv)
    try:
        found = compared(options.trace)
    except (OSError, ValueError, NoSimulatedMesh) as error:
        complain("axis_queues", f"{options.trace}: {error}")
        return 1
    one, each = found["one_stream_seconds"], found["stream_each_seconds"]
    print(f"one stream for all axes: {one * 1e3:.3f} ms per step; a stream for each: {each * 1e3:.3f} ms; the step is "
          f"{100 * (one / each - 1):.1f} % longer for it")
    return 0


if __name__ == "__main__":
    run_command(main)
