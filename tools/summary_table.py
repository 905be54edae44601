#!/usr/bin/env python3
"""Print one table from the metrics files that the stages wrote: `summary_table.py FOLDER`.

A field that a stage does not report shows as "-"; speed-up and efficiency get a column only where
a stage reports them. `--save FILE` keeps the metrics: one object for one stage, else a list.
"""

import argparse
import json
import sys
from pathlib import Path


def last(value):
    """The newest entry of a list (one per epoch), or the value itself."""
    if isinstance(value, list):
        return value[-1] if value else None
    return value


def show(form, value):
    return "-" if value is None else form.format(value)


def devices(metrics):
    return ",".join(metrics.get("devices") or []) or "-"


def mean_epoch_seconds(metrics):
    seconds = metrics.get("epoch_seconds")
    if isinstance(seconds, list):
        return sum(seconds) / len(seconds) if seconds else None
    return seconds


def peak_memory(metrics):
    """Peak of the fullest device, MiB: the one that decides whether a model fits."""
    peaks = metrics.get("peak_memory_bytes")
    return max(peaks) / 2**20 if peaks else None


def percent(fraction):
    return None if fraction is None else 100 * fraction


# Heading, right-aligned, how a metrics object fills the cell.
COLUMNS = [
    ("stage", False, lambda m: m.get("stage", "-")),
    ("devices", False, devices),
    ("backend", False, lambda m: m.get("backend", "-")),
    ("epochs", True, lambda m: show("{}", m.get("epochs"))),
    ("test accuracy", True, lambda m: show("{:.2f} %", percent(last(m.get("accuracy"))))),
    ("epoch time", True, lambda m: show("{:.1f} s", mean_epoch_seconds(m))),
    ("samples/s", True, lambda m: show("{:.0f}", m.get("samples_per_second"))),
    ("peak memory", True, lambda m: show("{:.1f} MiB", peak_memory(m))),
]
OPTIONAL_COLUMNS = [
    ("speedup", True, lambda m: show("{:.2f}", m.get("speedup"))),
    ("efficiency", True, lambda m: show("{:.0f} %", percent(m.get("efficiency")))),
]


def table(all_metrics):
    """The table's lines: a heading, a rule, and one line per metrics object."""
    columns = COLUMNS + [
        column for column in OPTIONAL_COLUMNS
        if any(m.get(column[0]) is not None for m in all_metrics)
    ]
    rows = [[cell(m) for _, _, cell in columns] for m in all_metrics]
    rows.insert(0, [heading for heading, _, _ in columns])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, (_, right, _) in zip(row, widths, columns)
        ).rstrip()
        for row in rows
    ]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the stages' metrics, *.json")
    parser.add_argument("--save", type=Path, help="keep all metrics in this file")
    options = parser.parse_args(argv)
    all_metrics = []
    for path in sorted(options.folder.glob("*.json")):
        try:
            all_metrics.append(json.loads(path.read_text()))
        except ValueError as error:
            print(f"summary: {path.name} is not JSON ({error})", file=sys.stderr)
            return 1
    if not all_metrics:
        return 0  # the stages were asked for something else than training, such as --help
    print("\n" + "\n".join(table(all_metrics)))
    if options.save:
        kept = all_metrics[0] if len(all_metrics) == 1 else all_metrics
        try:
            options.save.write_text(json.dumps(kept, indent=1) + "\n")
        except OSError as error:
            sys.exit(f"summary: cannot write {options.save}: {error.strerror}; choose another file")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
