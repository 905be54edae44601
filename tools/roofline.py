"""A machine's roofline: the rates that operations reach, and what keeps each of them from more.

An operation of F FLOPs and B bytes takes at least F / (FLOPs per second) and at least B / (bytes per second).
The longer of the two is what bounds it. Which one that is depends on F / B, its intensity, alone.
"""

FAR = 0.25  # of its time: an operation that both roofs explain so little of is bound by neither


def roofs(samples):
    """The most FLOPs and bytes per second that any of the operations reached."""
    return tuple(max(getattr(s, what) / s.seconds for s in samples if s.seconds > 0) for what in ("flops", "bytes"))


def bound_of(sample, flops_roof, bytes_roof):
    computing = sample.flops / flops_roof if flops_roof else 0
    moving = sample.bytes / bytes_roof if bytes_roof else 0
    if max(computing, moving) < FAR * sample.seconds:
        return "neither"
    return "computing" if computing >= moving else "memory"


def roofline_lines(samples, work):
    """A table of the operations of a step, the longest first, below the two roofs."""
    samples = sorted((s for s in samples if s.seconds > 0), key=lambda s: -s.seconds)
    flops_roof, bytes_roof = roofs(samples)
    lines = [f"roofline of {work}: at most {flops_roof / 1e9:.1f} GFLOP/s and {bytes_roof / 1e9:.1f} GB/s were reached;",
             f"below {flops_roof / bytes_roof:.1f} FLOP for each byte memory is the bound, above it computing; "
             "of what is far from both, neither",
             f"{'operation':<28}{'layer':<12}{'us':>8}{'FLOP/byte':>11}{'GFLOP/s':>9}{'GB/s':>7}  bound by"]
    for s in samples:
        lines.append(f"{s.name:<28}{s.layer:<12}{1e6 * s.seconds:>8.1f}{s.flops / s.bytes if s.bytes else 0:>11.2f}"
                     f"{s.flops / s.seconds / 1e9:>9.1f}{s.bytes / s.seconds / 1e9:>7.2f}"
                     f"  {bound_of(s, flops_roof, bytes_roof)}")
    return lines
