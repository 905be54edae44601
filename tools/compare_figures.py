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


def draw_accuracy(runs):
    series = {name_of(run): {str(epoch): 100 * value for epoch, value in enumerate(run["metrics"]["accuracy"], 1)}
              for run in runs}
    return figure_drawing.lines("Test accuracy after each epoch", series, "epoch", "test accuracy, %")


def draw_epoch_time(runs):
    rows = []
    for run in runs:
        seconds = run["metrics"]["epoch_seconds"]
        mean = sum(seconds) / len(seconds)
        rows.append(Row(name_of(run), [Bar(0, mean, f"{mean:.2f}", "forward")]))
    longest = max(row.bars[0].end for row in rows)
    return Picture("Time of one epoch", [Panel("", rows, longest)], {}, "seconds of one epoch").svg()


def draw_memory(runs):
    rows = []
    for run in runs:
        peaks = [peak / 2**20 for peak in run["metrics"]["peak_memory_bytes"]]
        names = [name_of(run), *[""] * (len(peaks) - 1)]
        rows += [Row(name, [Bar(0, peak, f"{device}: {peak:.1f}", "forward")])
                 for name, peak, device in zip(names, peaks, run["metrics"]["devices"])]
    most = max(row.bars[0].end for row in rows)
    return Picture("Peak memory of each device", [Panel("", rows, most)], {}, "MiB, the peak of each device").svg()


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
