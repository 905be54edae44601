"""The part bench: samples per second next to PyTorch in alternating rounds, and the GPU's share."""

import collections
import contextlib
import dataclasses
import json
import queue
import statistics
import subprocess
import tempfile
import threading
from pathlib import Path

from child_processes import started
from gpu_check import device_copy
from gpu_check.checks import program, run_metrics, several_gpus
from gpu_check.machine import ROOT, torch_version
from operation_costs import CostError, measured

STAGE = "01-single-gpu"
ROUNDS = {"seed": 5, "resnet18": 3}
STEPS = {("seed", 64): 800, ("seed", 256): 230, ("seed", 1024): 59,
         ("resnet18", 64): 60, ("resnet18", 256): 30, ("resnet18", 1024): 12}

# Contender -> options of the stage's program, or of bench_torch.py.
OURS = {"Lockstep": (), "Lockstep --graph": ("--graph",), "Lockstep --nchw": ("--nchw",)}
# What products round their inputs to -> the option for it, of the stage's program and of bench_torch.py.
ROUNDED = {"": (), "TF32": ("--tf32",), "bf16": ("--precision", "bf16")}
LAYOUT_BATCH = 256  # the layouts are compared in the settings of this batch size
RIVALS = {"PyTorch": (), "channels_last": ("--channels-last",), "CUDA graph": ("--graph",)}
# Rival -> the contender of ours that steps as it does: a graph's time is compared with a graph's.
ALIKE = {"PyTorch": "Lockstep", "channels_last": "Lockstep", "CUDA graph": "Lockstep --graph"}


@dataclasses.dataclass(frozen=True)
class Setting:
    model: str
    batch: int
    rounded: str = ""  # of ROUNDED

    @property
    def name(self):
        return ", ".join(filter(None, (self.model, f"batch {self.batch}", self.rounded)))

    @property
    def steps(self):
        return STEPS[self.model, self.batch]


# In the order of the targets, so that a slow machine runs out of time on the others.
SETTINGS = (Setting("seed", 64), Setting("resnet18", 256), Setting("resnet18", 256, "TF32"),
            Setting("resnet18", 256, "bf16"), Setting("seed", 256), Setting("seed", 1024),
            Setting("resnet18", 64), Setting("resnet18", 64, "TF32"), Setting("resnet18", 1024),
            Setting("resnet18", 1024, "TF32"), Setting("resnet18", 1024, "bf16"))

# Setting, rival, how many times its samples per second.
TARGETS = ((Setting("seed", 64), "PyTorch", 3.0), (Setting("seed", 64), "CUDA graph", 1.1),
           (Setting("resnet18", 256), "channels_last", 1.1),
           (Setting("resnet18", 256, "TF32"), "channels_last", 1.1),
           (Setting("resnet18", 256, "bf16"), "channels_last", 1.1))


# --- PyTorch beside it -----------------------------------------------------------------------

class Rival:
    """PyTorch in one process for all measurements, as its start takes longer than what is measured:
    tools/bench_torch.py --serve."""

    def __init__(self, process):
        self.process = process
        self.answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def step_seconds(self, options, limit):
        """Mean seconds of a step with these options of bench_torch.py, and ""; or None and what
        went wrong in one line."""
        try:
            self.process.stdin.write(json.dumps([str(word) for word in options]) + "\n")
            self.process.stdin.flush()
            line = self.answers.get(timeout=limit)
        except (OSError, queue.Empty) as error:
            self.process.kill()  # or the next request would get its late answer
            return None, f"no answer from PyTorch within {limit:.0f} s ({type(error).__name__})"
        if not line:
            return None, f"PyTorch ended with status {self.process.wait()}"
        answer = json.loads(line)
        return answer.get("mean_step_seconds"), answer.get("error", "")


@contextlib.contextmanager
def rival_of(python):
    with started([python, ROOT / "tools/bench_torch.py", "--serve"], stdin=subprocess.PIPE,
                 stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Rival(process)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stdin):
                with contextlib.suppress(OSError):  # of a request that has no reader any more
                    pipe.close()


# --- One run ---------------------------------------------------------------------------------

def stage_options(setting, *more):
    """Options of a run of `setting.steps` steps over one epoch of generated images."""
    samples = (setting.steps + 1) * setting.batch
    return ("--data", f"synthetic:{samples}:64", "--model", setting.model, "--batch-size",
            setting.batch, "--max-steps", setting.steps, "--lr", 0.01, "--workers", 4,
            *ROUNDED[setting.rounded], *more)


def our_step(setup, setting, more, limit):
    """Mean seconds of a step without the first tenth (a step's time is the host's, between two
    losses that it read), or None, and what went wrong. PyTorch's figure is a mean, too."""
    metrics, fault = run_metrics(setup, STAGE, stage_options(setting, *more), limit)
    if metrics is None:
        return None, fault
    steps = metrics["step_seconds"]
    return statistics.fmean(steps[max(1, len(steps) // 10):]), fault


def rival_step(rival, setting, more, limit):
    layout = ("--channels-last",) if "--graph" in more and setting.model == "resnet18" else ()
    return rival.step_seconds(("--device", "cuda", "--model", setting.model, "--batch",
                               setting.batch, "--steps", setting.steps, *more, *layout,
                               *ROUNDED[setting.rounded]), limit)


def contenders(setup, setting, rival):
    """Name -> function of a time limit that measures one round."""
    runs = {name: lambda limit, more=more: our_step(setup, setting, more, limit)
            for name, more in OURS.items()
            if name != "Lockstep --nchw" or setting.batch == LAYOUT_BATCH}
    if rival:
        runs |= {name: lambda limit, more=more: rival_step(rival, setting, more, limit)
                 for name, more in RIVALS.items()}
    return runs


# --- A setting -------------------------------------------------------------------------------

def alternate(section, runs, rounds):
    """Rounds of all contenders in turn; seconds of a step by contender, and the first fault. It
    ends early rather than begin a round that would outlast the part's limit."""
    seconds, longest = collections.defaultdict(list), 0.0
    for number in range(rounds):
        if section.remaining() < 1.2 * longest + 1:
            return seconds, f"time for {number} of {rounds} rounds only, see the limit of this part"
        begin = section.seconds()
        for name, run in runs.items():
            step, fault = run(section.remaining())
            if step is None:
                return seconds, f"{name}: {fault}"
            seconds[name].append(step)
        longest = max(longest, section.seconds() - begin)
    return seconds, ""


def setting_row(setting, medians):
    """Samples per second of every contender, and ours as a multiple of each rival alike."""
    rates = [f"{setting.batch / medians[name]:.0f}" if name in medians else "-"
             for name in (*OURS, *RIVALS)]
    ratios = [f"{medians[name] / medians[ALIKE[name]]:.2f}" if name in medians else "-"
              for name in RIVALS]
    return f"| {setting.name} | {' | '.join(rates + ratios)} |"


def measure_settings(section, setup, rival):
    """The table; medians of seconds per step by setting and contender."""
    section.say(f"| samples/s | {' | '.join((*OURS, *RIVALS))} | "
                + " | ".join(f"{ALIKE[name]}: times {name}" for name in RIVALS) + " |")
    section.say("|---" * (1 + len(OURS) + 2 * len(RIVALS)) + "|")
    results, faults = {}, {}
    for setting in [each for each in SETTINGS if setup.tensor_cores or not each.rounded]:
        runs = contenders(setup, setting, rival)
        seconds, faults[setting] = alternate(section, runs, ROUNDS[setting.model])
        if len(seconds) == len(runs):
            results[setting] = {name: statistics.median(all_) for name, all_ in seconds.items()}
            section.say(setting_row(setting, results[setting]))
    section.say()
    for setting, fault in faults.items():
        section.check(setting.name, fault)
    return results


def say_targets(section, results):
    """Prints the targets, and whether they were reached; a missed target is no failure of the
    check."""
    for setting, name, factor in TARGETS:
        medians = results.get(setting, {})
        wanted = f"target {setting.name}: at least {factor:g} times {name}"
        if name not in medians:
            section.say(f"{wanted}: not measured")
            continue
        # Named, for it may be a graph beside eager steps.
        ours = min((each for each in OURS if each in medians), key=medians.get)
        found = medians[name] / medians[ours]
        section.say(f"{wanted}: {found:.2f} times by {ours}, "
                    + ("reached" if found >= factor else "not reached"))


def say_layouts(section, results):
    """What a convolution in the other layout would bring, its copies included."""
    for setting, medians in results.items():
        if "Lockstep --nchw" in medians:
            ratio = medians["Lockstep"] / medians["Lockstep --nchw"]
            section.say(f"layout, {setting.name}: with --nchw {ratio:.2f} times the samples per "
                        "second, copies to that layout and back included")


# --- The GPU's share of a step ---------------------------------------------------------------

def covered(intervals):
    """Length of the union of [begin, end) intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def busy_share(events):
    """Share of the time in which an operation ran, from the first tenth of the steps to the last
    one; a step ends with its update of the weights."""
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["ph"] == "X"]
    updates = sorted(end for _, end, name in spans if name in ("sgd_update", "adam_update"))
    if len(updates) < 3:
        raise ValueError(f"the trace has {len(updates)} updates of the weights, expected 3 or more")
    begin, end = updates[max(1, len(updates) // 10)], updates[-1]
    inside = [(max(a, begin), min(b, end)) for a, b, _ in spans if b > begin and a < end]
    return covered(inside) / (end - begin)


def say_busy_share(section, setup, setting):
    """Eager mode: in a replayed graph the operations cannot be told apart."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        options = stage_options(setting, "--trace", path)
        _, fault = run_metrics(setup, STAGE, options, section.remaining())
        try:
            share = busy_share(json.loads(path.read_text())["traceEvents"]) if not fault else 0.0
            section.say(f"the GPU is busy for {100 * share:.0f} % of an eager step of "
                        f"{setting.name}" if not fault else "")
        except (OSError, ValueError, KeyError) as error:
            fault = str(error)
    section.check(f"trace of {setting.name}", fault)


# --- Memory's bandwidth --------------------------------------------------------------------------

FEW_BYTES = 10e6  # an operation that moves less in a step is left out
# Their options, and the operations that are shown of a step with them: None for all.
OPTIMIZERS = (((), None), (("--optimizer", "adamw"), "adam_update"))


def bandwidths(samples):
    """Of each operation that moves bytes and multiplies little: its name, how often it ran, bytes, and
    seconds; the longest first."""
    moved, seconds, number = collections.Counter(), collections.Counter(), collections.Counter()
    for sample in samples:
        if sample.flops <= sample.bytes:
            moved[sample.name] += sample.bytes
            seconds[sample.name] += sample.seconds
            number[sample.name] += 1
    return [(name, number[name], moved[name], seconds[name])
            for name in sorted(moved, key=lambda name: -seconds[name])
            if moved[name] >= FEW_BYTES and seconds[name] > 0]


def bandwidth_row(name, number, moved, seconds, copy):
    """`copy`: bytes per second of the device's own copy, or None."""
    share = f"{100 * moved / seconds / copy:.0f} %" if copy else "-"
    return (f"| {name} | {number} | {1e-6 * moved:.0f} | {1e6 * seconds:.0f} | "
            f"{1e-12 * moved / seconds:.2f} | {share} |")


def measured_bandwidths(setup, setting):
    """What our own kernels move in a step with each optimizer, by events around each operation, and by
    the bytes that a simulated device counts for it."""
    found = []
    for words, only in OPTIMIZERS:
        with tempfile.TemporaryDirectory() as folder:
            samples = measured(program(STAGE), "cuda:0", ("--model", setting.model, "--lr", 0.01, *words),
                               setting.batch, setting.steps, folder, setup.environment)
        found += [each for each in bandwidths(samples) if only in (None, each[0])]
    return found


def say_bandwidth(section, setup, setting):
    """What our own kernels reach of memory's bandwidth, beside what a copy reaches."""
    copy, fault = device_copy.measured(setup.environment)
    try:
        found = measured_bandwidths(setup, setting)
    except (CostError, OSError, ValueError, KeyError) as error:
        section.check(f"bandwidth in {setting.name}", str(error))
        return
    section.say(f"\nMemory in an eager step of {setting.name}; the device's own copy of 1 GiB: "
                + (f"{1e-12 * copy:.2f} TB/s\n" if copy else f"unknown, {fault}\n"))
    section.say("| operation | times | MB | us | TB/s | of a copy |\n|---|---|---|---|---|---|")
    for each in found:
        section.say(bandwidth_row(*each, copy))
    if copy and found:
        shares = {name: moved / seconds / copy for name, _, moved, seconds in found}
        last = min(shares, key=shares.get)
        section.say(f"\nfarthest from a copy: {last}, {100 * shares[last]:.0f} %")
    section.check(f"bandwidth in {setting.name}", "")


# --- What a message costs --------------------------------------------------------------------

NCCL_ROUNDS = 5
# NCCL's own variable chooses the way: common/comm/nccl_communicator.cpp.
NCCL_WAYS = {"block": "1", "do not": "0"}
NCCL_MESSAGE = ("--backend", "nccl", "--kib", 4, "--all-reduce", "library", "--rounds", 20)


def message_seconds(setup, way, devices, limit):
    """Seconds of a small all-reduce as one of many, and ""; or None and what went wrong in one line."""
    environment = {**setup.environment, "NCCL_COMM_BLOCKING": way}
    rows, fault = run_metrics(dataclasses.replace(setup, environment=environment), "04-ddp/message-sizes",
                              NCCL_MESSAGE, limit, devices)
    return (rows[0]["seconds"] if rows else None), fault


def say_nccl_ways(section, setup):
    """One line: what NCCL's calls cost where they block, and where it continues in the background."""
    devices = several_gpus(setup.gpus, "04-ddp")
    runs = {name: lambda limit, way=way: message_seconds(setup, way, devices, limit)
            for name, way in NCCL_WAYS.items()}
    seconds, fault = alternate(section, runs, NCCL_ROUNDS)
    if len(seconds) == len(runs):
        block, do_not = (1e6 * statistics.median(seconds[name]) for name in runs)
        section.say(f"\nNCCL, an all-reduce of 4 KiB on {devices}: {block:.1f} us where calls block, {do_not:.1f} us "
                    f"where they do not, {do_not / block:.2f} times as long; medians of {len(seconds['block'])} "
                    "alternating rounds")
    section.check("NCCL's calls, both ways", fault, "skipped" if "no NCCL" in fault else "failed")


def bench(section, setup, options):
    """Every setting, the targets, the share of a step in which the GPU works, what its kernels reach of
    memory's bandwidth, and what a message of NCCL's costs."""
    version = torch_version(options.python)
    section.say(f"Medians of {ROUNDS['seed']} (seed) and {ROUNDS['resnet18']} (resnet18) "
                f"alternating rounds; PyTorch {version or 'absent'}, cudnn.benchmark off (its "
                "default), TF32 off unless named, bf16 by autocast; the CUDA graph of resnet18 is "
                "channels_last; "
                "`times`: a graph over a graph, eager steps over eager steps; a target's line "
                "names which of ours it took.\n")
    with rival_of(options.python) if version else contextlib.nullcontext() as rival:
        results = measure_settings(section, setup, rival)
    if not version:
        section.check("PyTorch beside it", f"no torch that sees a GPU in {options.python}",
                      "skipped")
    say_targets(section, results)
    say_layouts(section, results)
    section.say()
    for setting in (Setting("seed", 64), Setting("resnet18", 256)):
        say_busy_share(section, setup, setting)
    say_bandwidth(section, setup, Setting("resnet18", 256))
    say_nccl_ways(section, setup)
