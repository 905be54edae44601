"""The options of `./lockstep run` and `./lockstep compare`."""

import argparse
import tempfile
from pathlib import Path

from command_line import Parser
from plain_files import require_writable
from stages import ROOT, all_stages, label

RESERVED = {  # options of the stages that serve one run only
    "--metrics": "--json FILE keeps the metrics of all runs",
    "--trace": "--figures DIR draws one step of every stage",
    "--save": "every stage would write this file; start a stage itself for its weights",
    "--baseline": "the speed-up over stage 01 is always measured here",
}


class Refused(Exception):
    """The comparison cannot be made; the message is the one line to show."""


def chosen_stages(text, existing):
    """The stages of a list such as 01,04 (or full names), in their own order."""
    wanted = set()
    for word in text.split(","):
        found = [stage for stage in existing if word in (stage, stage[:2], label(stage))]
        if not found:
            raise Refused(f"--stages: '{word}' is no stage, expected some of: {', '.join(existing)}"
                          " (the number is enough)")
        wanted.update(found)
    return sorted(wanted)


def require_folder(option, folder):
    """Makes sure that a file can be written there, before anything is trained."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise Refused(f"{option}: cannot write into {folder}: {error.strerror}; "
                      "choose another place") from error


def prepare_outputs(options):
    if options.figures:
        try:
            options.figures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"--figures: cannot make the folder {options.figures}: {error.strerror}; "
                          "choose another place") from error
        require_folder("--figures", options.figures)
    if options.json:
        try:
            require_writable(options.json)
        except OSError as error:
            raise Refused(f"--json: cannot write {options.json}: {error.strerror}; choose another "
                          "place") from error


MINE = ("--mine, in a student's tree: run the student's own functions only, without the prebuilt "
        "solutions of what is open")


def parse_options(argv, about):
    parser = Parser(
        prog="lockstep run (or compare)", description=about, epilog=MINE,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stages", metavar="LIST", help="for instance 01,04; default: all")
    add("--json", metavar="FILE", type=Path, help="write everything measured to this file")
    add("--figures", metavar="DIR", type=Path, help="draw the figures into this folder")
    add("--devices", metavar="LIST", help="of every stage; stage 01 takes the first")
    add("--data", help="the data set")
    add("--model", help="the network of every stage; default: each stage's own")
    add("--optimizer", help="of every stage; default: each stage's own")
    add("--order", default="sampler", help="of the samples, in every stage; default: %(default)s")
    add("--epochs", metavar="N", help="default: 1")
    add("--max-steps", metavar="N", help="stop after this many steps")
    add("--build", metavar="DIR", type=Path, default=ROOT / "build",
        help="where the programs were built")
    options, options.others = parser.parse_known_args(argv)
    for word in options.others:
        if reason := RESERVED.get(word.partition("=")[0]):
            raise Refused(f"{word}: belongs to one run, and this makes several; {reason}")
    existing = all_stages()
    options.stages = chosen_stages(options.stages, existing) if options.stages else existing
    return options


def arguments(options, **changes):
    """The command line of a stage: the user's options with changes (None: left out)."""
    named = {name: getattr(options, name)
             for name in ("devices", "data", "model", "optimizer", "order", "epochs", "max_steps")}
    named |= changes
    words = [word for name, value in named.items() if value is not None
             for word in ("--" + name.replace("_", "-"), str(value))]
    return words + options.others
