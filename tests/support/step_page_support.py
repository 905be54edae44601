"""What the tests of `./lockstep show` and `figures` share: plans, traces of a few operations, colours."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import step_plan  # noqa: E402

BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build-test"))
# Devices, chunks (stages of each), micro-batches.
SCHEDULES = {"naive": (3, 1, 1), "gpipe": (4, 1, 8), "1f1b": (4, 1, 8), "interleaved": (4, 2, 8)}


def contrast(one, other):
    """Of two colours, 1 to 21, as the Web Content Accessibility Guidelines define it."""
    def luminance(colour):
        parts = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def show(*words):
    return subprocess.run([sys.executable, str(ROOT / "tools/step_page.py"), "--build", str(BUILD),
                           *map(str, words)], capture_output=True, text=True, timeout=100)


def plan_of(stage, *words, devices=0, units_per_mib=0):
    return step_plan.planned(step_plan.Asked(step_plan.stage_of(stage), devices, units_per_mib=units_per_mib,
                                             options=step_plan.options_in(map(str, words))), BUILD)


def schedule_words(schedule):
    devices, chunks, micro_batches = SCHEDULES[schedule]
    return ("--schedule", schedule, "--devices", devices, "--chunks", chunks, "--micro-batches",
            micro_batches)


def schedule_plan(schedule):
    devices, chunks, micro_batches = SCHEDULES[schedule]
    return plan_of("03", "--schedule", schedule, "--chunks", chunks, "--micro-batches", micro_batches, devices=devices)


def write_trace(path, lanes, memory=(), command=()):
    """A trace of one process: a stream's (begin, end, operation, layer, enqueued), in ms; and its
    memory, (ms, MiB in use from then on)."""
    events = [{"ph": "C", "name": "memory", "pid": 0, "tid": 0, "ts": 1e3 * at,
               "args": {"bytes": round(mebibytes * 2**20)}} for at, mebibytes in memory]
    events[:0] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "cpu:0"}}]
    for number, (stream, spans) in enumerate(lanes.items()):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": number,
                       "args": {"name": stream}})
        events += [{"ph": "X", "name": operation, "pid": 0, "tid": number, "ts": 1e3 * begin,
                    "dur": 1e3 * (end - begin), "args": {"layer": layer, "queued": 1e3 * queued}}
                   for begin, end, operation, layer, queued in spans]
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"zero_ns": 0, **({"command": command} if command else {})}}))
    return path


def small_trace(path, memory=()):
    """A step from 1 to 3 ms: conv1 forward and backward, a bucket's all-reduce, a pause; and the first
    operation of the next step, which the host enqueues already."""
    updates = [(end - 0.1, end, "sgd_update", "", end - 0.9) for end in (1, 3)]
    return write_trace(path, {
        "compute": sorted([*updates, (1.0, 1.4, "conv2d", "conv1", 1.1), (1.4, 1.5, "relu", "conv1", 1.12),
                           (1.5, 1.6, "nll_loss", "loss", 1.13), (1.6, 2.2, "conv2d_backward_weight", "conv1", 1.6),
                           (3.1, 3.2, "conv2d", "conv1", 2.8)]),
        "communication": [(2.2, 2.5, "all_reduce", "bucket 0/ring", 1.65)]}, memory)


MEMORY = [(0.2, 1), (0.8, 3), (1.5, 6), (1.5, 4), (2.75, 1.5), (3.5, 9)]  # 1.5 ms: two changes at once
