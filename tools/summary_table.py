"""The table of `lockstep run` and `lockstep compare`: one line per run, from its metrics.

A field that a run does not report shows as "-".
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
    return ",".join(metrics.get("devices") or []) or "-"


def network(metrics):
    """The network, and the optimizer unless that is SGD."""
    config = metrics.get("config") or {}
    words = [config.get("model", "-"), config.get("optimizer", "sgd")]
    return ", ".join(words if words[1] != "sgd" else words[:1])


def mean_epoch_seconds(metrics):
    seconds = metrics.get("epoch_seconds")
    if isinstance(seconds, list):
        return sum(seconds) / len(seconds) if seconds else None
    return seconds


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
    peaks = [f"{peak / 2**20:.1f}" for peak in metrics.get("peak_memory_bytes") or []]
    if len(peaks) > MOST_DEVICES:
        return f"at most {max(peaks, key=float)} MiB"
    return ", ".join(peaks) + " MiB" if peaks else "-"


def percent(fraction):
    return None if fraction is None else 100 * fraction


# Heading, right-aligned, how a metrics object fills the cell.
COLUMNS = [
    ("stage", False, lambda m: m.get("stage", "-")),
    ("network", False, network),
    ("devices", False, devices),
    ("computed by", False, lambda m: m.get("backend", "-")),
    ("epochs", True, lambda m: show("{}", m.get("epochs"))),
    ("accuracy", True, lambda m: show("{:.2f} %", percent(last(m.get("accuracy"))))),
    ("epoch time", True, lambda m: show("{:.2f} s", mean_epoch_seconds(m))),
    ("samples/s", True, lambda m: show("{:.0f}", m.get("samples_per_second"))),
    ("speed-up", True, lambda m: show("{:.2f}", m.get("speedup"))),
    ("efficiency", True, lambda m: show("{:.0f} %", percent(m.get("efficiency")))),
    ("communication", True, lambda m: show("{:.0f} %", percent(communication_share(m)))),
    ("memory per device", True, peak_memory),
]


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
    """The table's lines: a heading, a rule, and one line per metrics object."""
    rows = [[cell(m) for _, _, cell in COLUMNS] for m in all_metrics]
    rows.insert(0, [heading for heading, _, _ in COLUMNS])
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, (_, right, _) in zip(row, widths, COLUMNS)
        ).rstrip()
        for row in rows
    ]
