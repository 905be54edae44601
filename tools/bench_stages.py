"""The stages on several devices in `lockstep bench`, beside stage 01 on one."""

import bench_runs
from bench_plan import Group, Run, all_rounds, medians
from bench_runs import STAGE, expected, speed_up
from stages import all_stages, label

# Network, its options, batch, steps.
WORK = (("seed", (), 64, 200), ("resnet18", ("--width", 16), 128, 6))


def other_stages():
    return [stage for stage in all_stages() if stage != STAGE]


def stages(options):
    """Every other stage on 2 devices of one thread (--thorough: on 4, too)."""
    worlds = (2, 4) if options.thorough else (2,)
    return [stages_group(*work, worlds, options.rounds)
            for work in WORK if work[0] in options.models]


def stages_group(model, more, batch, steps, worlds, rounds):
    contenders = [(STAGE, 1), *((stage, world) for stage in other_stages() for world in worlds)]
    name = " ".join(map(str, (model, *more)))
    runs = {}
    for stage, world in contenders:
        devices = ",".join(f"cpu:{rank}" for rank in range(world))
        runs[stage, world] = Run(
            f"{label(stage)} on {world}, {name}",
            expected(model, batch, steps, world, more[1] if more else 64),
            lambda stage=stage, devices=devices: bench_runs.run_ours(
                model, batch, 1, steps, *more, stage=stage, devices=devices))

    def figures(found):
        step, rounds_of = medians(found), all_rounds(found)
        return [{"model": name, "batch_size": batch, "stage": stage, "world_size": world,
                 "step_seconds": seconds, **speed_up(seconds, step[STAGE, 1], world),
                 "all_rounds": rounds_of[stage, world]}
                for (stage, world), seconds in step.items()]
    return Group("stages", runs, rounds, lambda found: list(map(stage_line, figures(found))),
                 figures)


def stage_line(row):
    return (f"{row['model']:<20} {label(row['stage']):<19} W {row['world_size']}  batch "
            f"{row['batch_size']:>4}  {row['step_seconds'] * 1e3:9.2f} ms/step  "
            f"{row['batch_size'] / row['step_seconds']:9.0f} samples/s  {row['speedup']:5.2f} "
            f"times one device, efficiency {100 * row['efficiency']:.0f} %")
