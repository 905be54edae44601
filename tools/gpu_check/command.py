"""`./lockstep gpu-check`: the command line and the parts in order."""

import os
import sys
from pathlib import Path

from command_line import Parser, complain
from gpu_check import build, bundle, checks, measure, results
from gpu_check.machine import (CORES, ROOT, CheckError, describe, find_gpu, find_tools,
                               has_driver)

# Seconds that a part may take, on 16 cores: 24 minutes in all, in three calls of under 10.
LIMITS = {"build": 240, "ops": 90, "stages": 240, "sanitizer": 400, "bench": 470}
FULL_FACTOR = 3  # of the stages under --full
SLOWER = max(1, round(16 / CORES))  # a build takes longer on fewer cores
CHECKS = {"ops": checks.ops, "stages": checks.stages, "sanitizer": checks.sanitizer,
          "bench": measure.bench}

EPILOG = """On a machine without a package registry: `gpu-check --bundle DIR` where there is one,
copy DIR, then `gpu-check --offline DIR`. Three calls keep each under ten minutes on 16 cores:
--part build --part ops --part stages, --part sanitizer, --part bench. Exit status: 1 if
anything failed or could not run, else 0."""


def parse_options(arguments):
    parser = Parser(prog="lockstep gpu-check", epilog=EPILOG,
                    description="Build, test and measure Lockstep on this machine's GPU.")
    folder = {"type": Path, "metavar": "DIR", "nargs": "?", "const": ROOT / "bundle"}
    parser.add_argument("--bundle", **folder, help="collect what an offline build needs (default "
                        "bundle/) from this machine's Debian packages, and stop")
    parser.add_argument("--offline", **folder,
                        help="build from this bundle (default bundle/) and this machine alone")
    parser.add_argument("--part", action="append", choices=LIMITS, dest="parts",
                        help="only this part, may be repeated; default all, in this order")
    parser.add_argument("--full", action="store_true",
                        help="ResNet-18 for 10 epochs, random campaigns at full length")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the results here "
                        "(default docs/results/gpu-check-DATE-DEVICE.md)")
    parser.add_argument("--target", action="append", default=[], metavar="NAME",
                        help="part build: compile only this Ninja target (default everything)")
    parser.add_argument("--meson", action="append", default=[], metavar="OPTION",
                        help="one more option of `meson setup`, for instance --meson=-Dwerror=true")
    parser.add_argument("--python", default=sys.executable,
                        help="a Python that has torch, and CUDA libraries in its site-packages")
    options = parser.parse_args(arguments)
    if options.bundle and (options.offline or options.parts):
        parser.error("--bundle goes without --offline and --part: it is for the other machine")
    if options.target and options.parts != ["build"]:
        parser.error("--target is for --part build alone; the other parts need everything")
    options.parts = [part for part in LIMITS if part in (options.parts or LIMITS)]
    return options


def setup_for(options, gpu):
    """How to build here, and the manifest of the bundle if there is one."""
    manifest, prefix, environment = {}, None, dict(os.environ)
    environment.pop("LOCKSTEP_FULL", None)  # --full decides, not the caller
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers them
    if options.full:
        environment["LOCKSTEP_FULL"] = "1"
    if options.offline:
        folder = options.offline.resolve()
        manifest = bundle.verified(folder)
        prefix = bundle.unpack(folder, manifest)
        environment["LOCKSTEP_DATA"] = str(folder / "data")
    tools = find_tools(prefix)
    meson_options = (*build.options_for(gpu, options.python, prefix), *options.meson)
    return build.Setup(tools, meson_options, environment, not gpu or gpu.has_tensor_cores,
                      gpu.count if gpu else 0), manifest


def report_build(section, setup, gpu, reason, targets):
    """The part `build`: everything, tests included, unless `targets` names less."""
    try:
        summary = build.compile_targets(setup, targets, section.remaining())
    except build.BuildError as error:
        section.say(f"{error.output}\n")
        section.check("build", str(error))
        return
    for line in summary:
        section.say(f"* {line}")
    target = f"{gpu.name} (for {gpu.archs})" if gpu else f"CPU devices only ({reason})"
    what = ", ".join(targets) or "everything"
    section.check("build", "")
    section.say(f"built {what} for {target} in {section.seconds():.0f} s")


def limits_of(options, gpu):
    """Seconds that each part of this call may take."""
    slower = gpu.slower if gpu else 1
    factors = {"build": SLOWER, "stages": slower * (FULL_FACTOR if options.full else 1)}
    return {part: LIMITS[part] * factors.get(part, slower) for part in options.parts}


def run_part(section, setup, gpu, reason, options):
    """Runs one part into its section. What ends it early is a fault of the section, so that the
    file says it; an interrupt goes on."""
    part = section.part
    try:
        if part == "build":
            report_build(section, setup, gpu, reason, options.target)
            return
        build.compile_targets(setup, checks.TARGETS[part], LIMITS["build"] * SLOWER)
        section.begin_now()
        CHECKS[part](section, setup, options)
    except build.BuildError as error:
        section.say(f"{error.output}\n")
        section.check("build", results.one_line(error))
    except Exception as error:  # of any kind: the person here cannot mend it, and sends the file
        section.check(part, f"{type(error).__name__}: {results.one_line(error)}")
    except BaseException:
        section.check(part, "interrupted before its end")
        raise


def run_parts(options, setup, gpu, reason, file):
    """Every part's verdict, in one line each and in the file; what was found is kept even if an
    interrupt ends it."""
    verdicts = {}
    try:
        for part, limit in limits_of(options, gpu).items():
            print(f"\n== {part} (limit {limit} s)", flush=True)
            section = results.Section(part, limit)
            try:
                run_part(section, setup, gpu, reason, options)
            finally:
                section.finish()
                verdicts[part] = section.verdict()
                if file:
                    file.add(section.markdown(results.now()))
            if part == "build" and section.count["failed"]:
                break
    finally:
        if file:
            file.add(results.closing(options.parts, verdicts))
            print("\n" + "\n".join([*file.notes, results.what_to_send(file.path)]), flush=True)
    return verdicts


def need_gpu(options, gpu, reason):
    """CheckError if a part needs a GPU and there is none."""
    parts = [part for part in options.parts if part != "build"]
    if parts and not gpu:
        raise CheckError(f"{reason}; {', '.join(parts)} cannot run without one, nothing was "
                         "checked; run this where a GPU is (--part build builds for CPU devices)")


def main(options):
    if options.bundle:
        size = bundle.make(options.bundle)
        print(f"{options.bundle}: {size / 2**20:.1f} MiB, limit {bundle.LIMIT / 2**20:.0f} MiB")
        return 0
    gpu, reason = find_gpu()
    device = f"{gpu.name} {gpu.part}".rstrip() if gpu else "CPU devices"
    rows = []
    file = None  # a machine that never had a GPU gives no result to keep
    if gpu or options.out or has_driver():
        out = options.out or ROOT / "docs/results" / results.default_name(device)
        file = results.ResultFile(out, lambda: results.header(device, rows))
    try:
        need_gpu(options, gpu, reason)
        setup, manifest = setup_for(options, gpu)
    except (CheckError, OSError) as error:  # the person here sends the file
        if file:
            rows += describe(gpu, options.python)
            file.add(f"\nNothing was checked: {error}\n")
            print(results.what_to_send(file.path), flush=True)
        raise
    print(results.opening(limits_of(options, gpu), device) + "\n", flush=True)
    rows += describe(gpu, options.python, manifest.get("commit", ""))
    print("\n".join(f"{name:<14}{value}" for name, value in rows), flush=True)
    return 1 if "failed" in run_parts(options, setup, gpu, reason, file).values() else 0


def start(arguments):
    """The exit status of gpu-check with these arguments; errors are one line on stderr."""
    try:
        return main(parse_options(arguments))
    except (CheckError, OSError) as error:
        complain("gpu-check", error)
        return 1
    except KeyboardInterrupt:
        print("gpu-check: interrupted", file=sys.stderr)
        return 130
