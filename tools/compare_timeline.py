"""One training step from a stage's traces (`--trace`), for `lockstep compare`."""

import json
import re
import statistics
from pathlib import Path

from command_line import one_line
from plain_files import read_json

# The last operation of a step, on the device that updates. Stage 06 has one for each unit, a pipeline one
# for each of a device's stages, and what belongs to the next of them lies in between.
END_OF_STEP = ("sgd_update", "adam_update")
BEFORE_UPDATES = ("check_finite", "fill", "fill_count", "poison", "adam_count")
WARM_UP = 2  # steps: libraries choose algorithms then, and memory is new
CLOSE = 0.05  # of the untraced median: a step that is farther from it is not typical of the stage


def trace_files(path):
    """The trace of a run: one file, and another next to it for every further rank, in rank
    order."""
    path = Path(path)
    beside = {int(found[1]): file for file in path.parent.iterdir()
              if (found := re.fullmatch(re.escape(path.name) + r"\.rank([0-9]+)", file.name))}
    return [path, *(file for _, file in sorted(beside.items()))]


def shown(name):
    """A name as a drawing can hold it: SVG has no control characters. TypeError for what is no text."""
    if not isinstance(name, str):
        raise TypeError(name)
    return one_line(name)


def read_lanes(path):
    """The streams of one process: device, stream, place in the trace (process, lane), slices of (begin and
    end in ms of the host's clock, operation, the layer that it belongs to), and (ms, layer, ms when it ran)
    of what the host enqueued. Then the memory of its devices, by name: (ms, bytes in use from then on)."""
    trace = read_json(path)
    zero = trace["otherData"]["zero_ns"] / 1e6
    devices, lanes, memory = {}, {}, {}
    for event in trace["traceEvents"]:
        lane = event["pid"], event["tid"]
        if event["ph"] == "M" and event["name"] == "process_name":
            devices[event["pid"]] = shown(event["args"]["name"])
        elif event["ph"] == "M":
            lanes[lane] = {"stream": shown(event["args"]["name"]), "slices": [], "enqueued": []}
        elif event["ph"] == "C":
            memory.setdefault(devices[event["pid"]], []).append((zero + event["ts"] / 1e3,
                                                                 0 + event["args"]["bytes"]))
        else:
            begin, layer = zero + event["ts"] / 1e3, shown(event["args"]["layer"])
            lanes[lane]["slices"].append((begin, begin + event["dur"] / 1e3, shown(event["name"]), layer))
            if "queued" in event["args"]:
                lanes[lane]["enqueued"].append((zero + event["args"]["queued"] / 1e3, layer, begin))
    return [{"device": devices[place[0]], "place": place, **lane} for place, lane in sorted(lanes.items())], memory


def middle_step(lanes):
    """Begin and end of the step of median length, between the updates of the first device that
    makes any; None if there are fewer than two."""
    for lane in lanes:
        ends, updated = [], False  # whether nothing of a next step has come since the last update
        for _, end, name, _ in lane["slices"]:
            if name in END_OF_STEP:
                ends[len(ends) - updated:] = [end]
            updated = name in END_OF_STEP or updated and name in BEFORE_UPDATES
        steps = list(zip(ends, ends[1:]))
        steps = steps[WARM_UP:] or steps
        if steps:
            return sorted(steps, key=lambda step: step[1] - step[0])[len(steps) // 2]
    return None


def memory_within(changes, first, last):
    """[ms since `first`, bytes in use from then on]: as it begins, and after every change."""
    before = [bytes_used for at, bytes_used in changes if at <= first]
    return [[0.0, before[-1] if before else 0]] + [[round(at - first, 6), bytes_used]
                                                   for at, bytes_used in changes if first < at < last]


def one_step(path, alone=False):
    """The lanes of one step, their slices as [begin, length, operation, layer] in ms since it
    began, with the number that the first of them has on its lane; its length, what each process's host
    enqueued meanwhile, as [ms, layer, whether it ran in a later step], and the devices' memory, as [ms,
    bytes in use from then on]. None where the trace holds no whole step. `alone`: without other ranks'
    traces."""
    processes, memories = zip(*map(read_lanes, [path] if alone else trace_files(path)))
    lanes = [lane for process in processes for lane in process]
    step = middle_step(lanes)
    if step is None:
        return None
    first, last = step
    hosts = [{"device": process[0]["device"],
              "enqueued": [[round(at - first, 6), layer, ran >= last] for lane in process
                           for at, layer, ran in lane.pop("enqueued") if first <= at < last]}
             for process in processes if process]
    for lane in lanes:
        inside = {number: [round(max(begin - first, 0), 6), round(min(end, last) - max(begin, first), 6), *names]
                  for number, (begin, end, *names) in enumerate(lane["slices"]) if begin < last and end > first}
        lane["first"] = min(inside, default=0)
        lane["slices"] = list(inside.values())
    memory = [{"device": device, "changes": memory_within(changes, first, last)}
              for process in memories for device, changes in process.items()]
    return {"milliseconds": last - first, "lanes": lanes, "hosts": hosts, "memory": memory}


def given_step(path, alone=False):
    """one_step() of a file that a user names. Raises ValueError, in words, where there is none."""
    expected = "expected what --trace of a stage writes"
    try:
        step = one_step(path, alone)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {expected}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON; {expected}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {expected}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} is JSON, but no trace; {expected}") from error
    if step is None or step["milliseconds"] <= 0:
        raise ValueError(f"{path} holds no whole step; train a few (--max-steps 12)")
    return step


def typical_step(steps, untraced):
    """Of the steps of several traced runs, the one whose length is nearest to the median of
    `untraced`, the milliseconds per step of as many runs without a trace; and why none is drawn,
    where none is near enough. While something else ran, devices may have taken turns."""
    lengths = [step["milliseconds"] for step in steps if step]
    if not lengths:
        return None, "the traces hold no whole step"
    median = statistics.median(untraced)
    step = min(filter(None, steps), key=lambda step: abs(step["milliseconds"] - median))
    if abs(step["milliseconds"] - median) <= CLOSE * median:
        return step, ""
    traced = ", ".join(f"{length:.2f}" for length in sorted(lengths))
    return None, (f"the steps of {len(lengths)} traced runs take {traced} ms, expected one within "
                  f"{100 * CLOSE:.0f} % of the {median:.2f} ms without a trace; repeat it when "
                  "nothing else runs")
