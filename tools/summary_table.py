"""The table of `lockstep run` and `lockstep compare`: one line per run, from its metrics.

A field that a run does not report shows as "-". Headings have two lines, so that the table of two
devices fits 100 columns.
"""

# What a device does when it does not compute, by the phases that stages 02 and 03 report.
WAITING_PHASES = ("scatter", "replicate", "gather", "reduce", "send", "wait")
MOST_DEVICES = 4  # whose memory is listed one by one


def last(value):
    """The newest entry of a list (one per epoch), or the value itself."""
    if isinstance(value, list):
        return value[-1] if value else None
    return value


def show(form, value):
    return "-" if value is None else form.format(value)


def devices(metrics):
    """cpu:0,1 for cpu:0 and cpu:1: a kind is named once in a row."""
    words, before = [], None
    for name in metrics.get("devices") or []:
        kind, _, number = name.partition(":")
        words.append(number if kind == before else name)
        before = kind
    return ",".join(words) or "-"


def network(metrics):
    """The network, and the optimizer unless that is SGD."""
    config = metrics.get("config") or {}
    words = [config.get("model", "-"), config.get("optimizer", "sgd")]
    return ", ".join(words if words[1] != "sgd" else words[:1])


def share_of_phases(phases):
    whole = sum(phases.values())
    waiting = sum(seconds for name, seconds in phases.items() if name in WAITING_PHASES)
    return waiting / whole if whole > 0 else None


def communication_share(metrics):
    """The part of a step, 0 to 1, in which a device does not compute, because it moves data or
    waits for other devices; None if the run does not measure it. In stages of several processes it
    is rank 0's (gradients, the exchanges of SyncBatchNorm, other stages of a pipeline, the sums of
    split layers), in stage 02 device 0's, in stage 03's pipeline the mean over the devices."""
    if len(metrics.get("devices") or []) == 1 and metrics.get("simulated_ranks", 1) == 1:
        return 0.0
    if "per_step_seconds" in metrics:
        step = metrics["per_step_seconds"]
        whole = step["compute"] + step["exposed_communication"]
        within_compute = (metrics.get("batch_norm", {}).get("seconds_per_step", 0)
                          + metrics.get("pipeline", {}).get("waited_seconds_per_step", 0))
        waiting = step["exposed_communication"] + within_compute
        return waiting / whole if whole > 0 else None
    if "tensor_split" in metrics:
        seconds = metrics.get("step_seconds")
        return (metrics["tensor_split"]["seconds_per_step"] * len(seconds) / sum(seconds)
                if seconds else None)
    if "phase_seconds" in metrics:
        return share_of_phases(metrics["phase_seconds"])
    shares = [share_of_phases(stage["phase_seconds"]) for stage in metrics.get("stages") or []]
    return sum(shares) / len(shares) if shares and None not in shares else None


def peak_memory(metrics):
    """MiB of every device; if there are many, of the fullest: it decides whether a model fits."""
    peaks = [f"{mib:.1f}" if mib < 100 else f"{mib:.0f}"
             for mib in (peak / 2**20 for peak in metrics.get("peak_memory_bytes") or [])]
    if len(peaks) > MOST_DEVICES:
        return f"at most {max(peaks, key=float)}"
    return ", ".join(peaks) or "-"


def percent(fraction):
    return None if fraction is None else 100 * fraction


# Two lines of heading, right-aligned, how a metrics object fills the cell.
COLUMNS = [
    ("", "stage", False, lambda m: m.get("stage", "-")),
    ("", "network", False, network),
    ("", "devices", False, devices),
    ("", "accuracy", True, lambda m: show("{:.2f} %", percent(last(m.get("accuracy"))))),
    ("samples", "per s", True, lambda m: show("{:.0f}", m.get("samples_per_second"))),
    ("speed-", "up", True, lambda m: show("{:.2f}", m.get("speedup"))),
    ("effi-", "ciency", True, lambda m: show("{:.0f} %", percent(m.get("efficiency")))),
    ("communi-", "cation", True, lambda m: show("{:.0f} %", percent(communication_share(m)))),
    ("memory", "in MiB", True, peak_memory),
]


def computed_by(all_metrics):
    """What computed the runs, and for how many epochs: a line for all of them, or one for each that
    differs."""
    stages_of = {}
    for m in all_metrics:
        if "backend" in m:
            epochs = m.get("epochs")
            text = f"{epochs} epoch{'' if epochs == 1 else 's'}, computed by {m['backend']}"
            stages_of.setdefault(text, []).append(m.get("stage", "-"))
    if len(stages_of) == 1:
        return list(stages_of)
    return [f"{', '.join(dict.fromkeys(stages))}: {text}" for text, stages in stages_of.items()]


def busy_machine(all_metrics):
    """A line that says which runs lacked cores, so that their times, and what is computed from them, are
    not those of a quiet machine; "" if none did."""
    busy = [f"{m['stage']} {100 * max(m['share_without_core']):.0f} %" for m in all_metrics
            if m.get("share_without_core") and max(m["share_without_core"]) >= m["noticed_without_core"]]
    if not busy:
        return ""
    return ("devices were ready to compute and had no core, of their time: " + ", ".join(busy)
            + "; times, speed-up and efficiency are not those of a quiet machine")


def table(all_metrics):
    """The table's lines: a heading of two, a rule, and one line per metrics object."""
    rows = [[cell(m) for *_, cell in COLUMNS] for m in all_metrics]
    rows[:0] = [[column[i] for column in COLUMNS] for i in (0, 1)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(2, ["-" * width for width in widths])
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, (_, _, right, _) in zip(row, widths, COLUMNS)
        ).rstrip()
        for row in rows
    ]
