#!/usr/bin/env python3
"""Draw what `lockstep compare` measured: `tools/compare_figures.py COMPARISON.json FOLDER`.

The same file gives the same SVG files, byte for byte (with one version of matplotlib).
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import figure_drawing
import step_rows
import summary_table
from plain_files import read_json
from command_line import one_line, run_command
from stages import label

NO_MATPLOTLIB = "no python3 here has matplotlib (Debian: apt-get install python3-matplotlib)"
ABSENT = (f"no figures, tables only: {NO_MATPLOTLIB}; tools/compare_figures.py draws them later from "
          "the --json file")
SYSTEM_PYTHON = "/usr/bin/python3"  # sees Debian's packages, which another python3 in PATH does not


def version():
    """Matplotlib's version, or None if there is none."""
    try:
        import matplotlib
    except ImportError:
        return None
    return matplotlib.__version__


def find_python():
    """A python3 that has matplotlib: this one, or the system's; None if neither does."""
    if version():
        return sys.executable
    try:
        done = subprocess.run([SYSTEM_PYTHON, "-c", "import matplotlib"], capture_output=True)
    except OSError:
        return None
    return SYSTEM_PYTHON if done.returncode == 0 else None


def use_matplotlib():
    """Whether matplotlib can be used. If only another python3 has it, that one restarts this
    program in place of this process."""
    python = find_python()
    if python not in (None, sys.executable):
        os.execv(python, [python, *sys.orig_argv[1:]])
    return python is not None


def pyplot():
    """Matplotlib, set to draw SVG files that depend on nothing but their contents."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    plt.rcParams.update({
        "svg.hashsalt": "lockstep", "svg.fonttype": "none", "font.family": "sans-serif",
        "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})
    return plt


def name_of(run):
    """A run's stage and network."""
    return f"{label(run['stage'])}\n{summary_table.network(run['metrics'])}"


def draw_accuracy(plt, runs):
    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        accuracy = [100 * value for value in run["metrics"]["accuracy"]]
        axes.plot(range(1, len(accuracy) + 1), accuracy, marker="o", alpha=0.8,
                  label=name_of(run).replace("\n", ", "))
    axes.set_xlim(0.5, max(len(run["metrics"]["accuracy"]) for run in runs) + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set(xlabel="epoch", ylabel="test accuracy, %")
    axes.legend()
    return figure


def bars(plt, runs):
    """A figure as wide as the names below its bars need."""
    return plt.subplots(figsize=(max(7, 1.15 * len(runs)), 4))


def draw_epoch_time(plt, runs):
    figure, axes = bars(plt, runs)
    for place, run in enumerate(runs):
        seconds = run["metrics"]["epoch_seconds"]
        mean = sum(seconds) / len(seconds)
        axes.bar(place, mean, color="#1b6ca8")
        axes.text(place, mean, f"{mean:.2f}", ha="center", va="bottom")
    axes.set_xticks(range(len(runs)), [name_of(run) for run in runs], fontsize=7)
    axes.set(ylabel="time of one epoch, s")
    return figure


def draw_memory(plt, runs):
    figure, axes = bars(plt, runs)
    for place, run in enumerate(runs):
        peaks, names = run["metrics"]["peak_memory_bytes"], run["metrics"]["devices"]
        width = 0.8 / len(peaks)
        for index, (peak, device) in enumerate(zip(peaks, names)):
            at = place - 0.4 + (index + 0.5) * width
            axes.bar(at, peak / 2**20, width * 0.9, color="#1b6ca8")
            axes.text(at, peak / 2**20, device, ha="center", va="bottom", fontsize=6)
    axes.set_xticks(range(len(runs)), [name_of(run) for run in runs], fontsize=7)
    axes.set(ylabel="peak memory of each device, MiB")
    return figure


def draw_timelines(runs):
    """One step of each run that has a timeline, as SVG; "" if no run has."""
    steps = []
    for run in runs:
        if run.get("step"):
            lanes = {**run["step"], "memory": ()}  # the figure is about what runs when
            step = step_rows.measured(lanes, step_rows.operations_of)
            steps.append(replace(step, title=f"{name_of(run)}: {step.end:.2f} ms".replace("\n", ", ")))
    return figure_drawing.measured(steps) if steps else ""


def save(figure, path):
    """As SVG, without the date: the same figure is the same file."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


FIGURES = {"accuracy": draw_accuracy, "epoch-time": draw_epoch_time, "memory": draw_memory}


def draw(results, folder):
    """Writes the figures for which there are results; returns their paths. None without
    matplotlib."""
    runs = [run for run in results["runs"] if run["metrics"] and run["metrics"]["epoch_seconds"]]
    if not runs or not version():
        return []
    plt, paths = pyplot(), []
    for name, draw_figure in FIGURES.items():
        figure = draw_figure(plt, runs)
        paths.append(Path(folder) / f"{name}.svg")
        save(figure, paths[-1])
        plt.close(figure)
    timelines = draw_timelines(runs)
    if timelines:
        paths.append(Path(folder) / "timelines.svg")
        paths[-1].write_text(timelines)
    return paths


def main(argv):
    if len(argv) != 2:
        sys.exit(f"compare_figures: found {len(argv)} words, expected FILE DIR")
    if not use_matplotlib():
        sys.exit(f"compare_figures: {NO_MATPLOTLIB}")
    try:
        paths = draw(read_json(argv[0]), argv[1])
    except (OSError, ValueError) as error:
        sys.exit(f"compare_figures: {one_line(error)}")
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        sys.exit(f"compare_figures: {argv[0]}: expected what `lockstep compare --json` writes")
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    run_command(main)
