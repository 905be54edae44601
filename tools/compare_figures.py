"""Figures of what `lockstep compare` measured. The same results give the same files, byte for byte."""

from dataclasses import replace
from pathlib import Path

import figure_drawing
import step_rows
import summary_table
from figure_drawing import Panel, Picture
from stages import label
from step_rows import Bar, Row


def name_of(run):
    """A run's stage and network."""
    return f"{label(run['stage'])}, {summary_table.network(run['metrics'])}"


def by_network(runs):
    """{heading: runs}: only those of one network can be compared."""
    found = {}
    for run in runs:
        found.setdefault(f"network: {summary_table.network(run['metrics'])}", []).append(run)
    return found


def devices_of(runs):
    """ "CPU devices": what was measured."""
    kinds = dict.fromkeys(device.partition(":")[0].upper() for run in runs for device in run["metrics"]["devices"])
    return f"{' and '.join(kinds)} devices"


def draw_accuracy(runs):
    groups = {heading: {label(run["stage"]): {str(epoch): 100 * value for epoch, value
                                              in enumerate(run["metrics"]["accuracy"], 1)} for run in same}
              for heading, same in by_network(runs).items()}
    return figure_drawing.lines("Test accuracy after each epoch", groups, "epoch", "test accuracy, %")


def bars(title, runs, rows_of, unit):
    """A panel for each network, all on one scale."""
    panels = {heading: [row for run in same for row in rows_of(run)] for heading, same in by_network(runs).items()}
    most = max(row.bars[0].end for rows in panels.values() for row in rows)
    return Picture(title, [Panel(heading, rows, most) for heading, rows in panels.items()], {},
                   f"{unit}, measured ({devices_of(runs)})").svg()


def epoch_time(run):
    seconds, count = run["metrics"]["epoch_seconds"], len(run["metrics"]["devices"])
    mean = sum(seconds) / len(seconds)
    return [Row(f"{label(run['stage'])}, {count} device{'s' * (count > 1)}", [Bar(0, mean, f"{mean:.2f}", "forward")])]


def draw_epoch_time(runs):
    return bars("Time of one epoch", runs, epoch_time, "seconds of one epoch")


def peak_memory(run):
    peaks = [peak / 2**20 for peak in run["metrics"]["peak_memory_bytes"]]
    names = [label(run["stage"]), *[""] * (len(peaks) - 1)]
    return [Row(name, [Bar(0, peak, f"{device}: {peak:.1f}", "forward")])
            for name, peak, device in zip(names, peaks, run["metrics"]["devices"])]


def draw_memory(runs):
    return bars("Peak memory of each device", runs, peak_memory, "MiB, peak memory of a device")


def draw_timelines(runs):
    """One step of each run that has a timeline; "" if no run has."""
    steps = []
    for run in runs:
        if run.get("step"):
            lanes = {**run["step"], "memory": ()}  # the figure is about what runs when
            step = step_rows.measured(lanes, step_rows.operations_of)
            steps.append(replace(step, title=f"{name_of(run)}: {step.end:.2f} ms"))
    return figure_drawing.measured(steps) if steps else ""


FIGURES = {"accuracy": draw_accuracy, "epoch-time": draw_epoch_time, "memory": draw_memory, "timelines": draw_timelines}


def draw(results, folder):
    """Writes the figures for which there are results; returns their paths."""
    runs = [run for run in results["runs"] if run["metrics"] and run["metrics"]["epoch_seconds"]]
    paths = []
    for name, draw_figure in FIGURES.items() if runs else ():
        figure = draw_figure(runs)
        if figure:
            paths.append(Path(folder) / f"{name}.svg")
            paths[-1].write_text(figure)
    return paths
