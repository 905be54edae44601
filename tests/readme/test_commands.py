"""Every command that a README or a page of docs/ shows is run, with few steps, in the order in
which the commands appear.

A command that needs a GPU, another host or minutes is not run: its options are looked up in
the program's --help, and it counts as skipped. tools/two-hosts makes its hosts itself, where it may."""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import suites  # noqa: E402

BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build-test"))
READMES = ["README.md", "CONTRIBUTING.md",
           *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("0*/**/README.md")),
           *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
DEADLINE = 120  # seconds for one command
NO_NAMESPACES = 77  # what tools/two-hosts ends with where it cannot make two hosts

# Why a command is not run, by what it contains. The first that fits.
NOT_RUN = (
    ("no GPU", r"cuda:|gpu-check"),
    ("another host", r"node7|--nnodes 2"),
    ("tests/tools runs it", r"\b(srun|sbatch)\b"),
    ("no torch", r"\btorchrun\b"),
    ("tests/coursework runs it", r"lockstep (exercise|grade|grade-class)\b"),
    ("tests/tools runs it", r"lockstep (calibrate|figures|format|lint|predict|show|site)\b|run_python_tests\.py"),
    ("takes minutes", r"lockstep (run|test|bench|compare|data)\b|tools/try-release\b"),
    ("names no program", r"\bPROGRAM\b"),
)
PYTHON_TOOLS = {"run": "compare.py", "compare": "compare.py", "test": "run_tests.py",
                "bench": "bench.py", "data": "fetch_data.py", "exercise": "exercise.py",
                "grade": "grade.py", "grade-class": "grade_class.py", "gpu-check": "gpu-check", "format": "format.py",
                "lint": "lint.py", "calibrate": "calibrate.py", "figures": "figures.py", "predict": "predict.py",
                "show": "step_page.py", "site": "web_site.py"}

# Replaces a program: few steps on generated images, unless the command itself names generated ones;
# then few steps of large networks.
SHORTENED = """#!{python}
import os, sys
words = sys.argv[1:]
name = os.path.basename(sys.argv[0])
if "--help" in words or "--print-schedule" in words:
    pass
elif (name[:2].isdigit() or name == "tensor-split") and not any(word.startswith(("synthetic", "blank")) for word in words):
    for option, value in (("--data", "synthetic:1024:64"), ("--max-steps", "4")):
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
elif name[:2].isdigit() and ("resnet18" in words or "--width" in words):
    if "--max-steps" not in words:
        words += ["--max-steps", "4"]
    steps = words.index("--max-steps") + 1
    words[steps] = min(words[steps], "4", key=int)
elif name == "message-sizes":
    words += ["--kib", "1", "--rounds", "5"]
elif name == "bubble":
    words += ["--steps", "1", "--micro-batches", "4"]
os.execv({program!r}, [{program!r}, *words])
"""


# --- What a README shows -------------------------------------------------------------------------

def blocks(text):
    """The contents of a README's shell blocks."""
    return re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def inline(text):
    """Commands within sentences and tables: `build/...`, with a program's name."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`((?:\./)?build/0\d[^`/]*/[\w-]+(?: [^`]*)?)`", outside)


def inline_tools(text):
    """The other commands within sentences: the front end's, tools', Meson's."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`(?=\./lockstep\s|tools/\S|meson\s)([^`]+)`", outside)


def commands(block):
    """A block's commands; a command that continues over several lines is one."""
    found, rest = [], ""
    for line in block.splitlines():
        rest += line + "\n"
        if not line.endswith("\\") and is_complete(rest):
            if rest.strip() and not rest.lstrip().startswith("#"):
                found.append(rest.strip())
            rest = ""
    return found + ([rest.strip()] if rest.strip() else [])


def is_complete(text):
    return subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0


def reason_not_to_run(command):
    bare = re.sub(r"\s#.*", "", command)
    return next((reason for reason, words in NOT_RUN if re.search(words, bare)), None)


# --- Options of commands that are not run --------------------------------------------------------

@functools.lru_cache(maxsize=None)
def help_of(*program):
    done = subprocess.run([*program, "--help"], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, (program, done.stderr)
    return done.stdout


def programs_of(words):
    """For every option among a command's words: the programs that it belongs to."""
    program, found = None, []
    for word in words:
        if re.match(r"(\./)?build/", word):
            program = (str(BUILD / word.removeprefix("./").removeprefix("build/")),)
        elif word in PYTHON_TOOLS and program == ("lockstep",):
            program = (sys.executable, str(ROOT / "tools" / PYTHON_TOOLS[word]))
        elif word == "launch" and program == ("lockstep",):
            program = (str(BUILD / "common/launch/launch"),)
        elif word.endswith("lockstep"):
            program = ("lockstep",)
        elif word in ("tools/draw_step.py", "tools/try-release"):
            program = (sys.executable, str(ROOT / word))
        elif word in ("torchrun", "srun", "mpirun", "tools/two-hosts"):
            program = None  # not ours, or without a --help
        elif word.startswith("--") and program:
            found.append((program, word.partition("=")[0]))
    return found


def unknown_options(command):
    """Options that no help knows. Options that `run`, `compare`, `predict` and `show` do not know go to the
    stages; the front end takes one from all of its commands."""
    if "lockstep" in command:
        command = command.replace(" --no-install", "")
    stages = [(str(BUILD / stage),) for stage in ("01-single-gpu/01-single-gpu", "07-mesh/07-mesh")]
    return [option for program, option in programs_of(shlex.split(command, comments=True))
            if not any(re.search(rf"{re.escape(option)}\b", help_of(*each))
                       for each in (program, *stages))]


# --- Running -------------------------------------------------------------------------------------

class Sandbox:
    """The tree as a reader gets it, its programs in build/ with few steps."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        for entry in ROOT.iterdir():
            if entry.name != "lockstep" and not entry.name.startswith(("build", ".")):
                (self.root / entry.name).symlink_to(entry)
        for program in [*BUILD.glob("0*/*"), BUILD / "common/launch/launch"]:
            if program.is_file() and os.access(program, os.X_OK) and "." not in program.name:
                self.add(program.relative_to(BUILD), program)
        (self.root / "lockstep").write_text(
            '#!/bin/sh\ncase $1 in launch) shift; exec build/common/launch/launch "$@" ;; esac\n'
            f'exec {shlex.quote(str(ROOT / "lockstep"))} "$@"\n')
        (self.root / "lockstep").chmod(0o755)

    def add(self, name, program):
        place = self.root / "build" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(SHORTENED.format(python=sys.executable, program=str(program)))
        place.chmod(0o755)

    def run(self, command):
        return subprocess.run(["bash", "-uc", command], cwd=self.root, capture_output=True, text=True,
                              timeout=DEADLINE, stdin=subprocess.DEVNULL,
                              env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1",
                                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})


def may_fail(command):
    """diff finds differences; a lab's mistake may end in an error; a comparison of a few steps on
    a busy machine may find that the timed runs varied too much."""
    return command.startswith("diff ") or "/labs " in command or "--baseline" in command


class TestCommands(unittest.TestCase):
    """A method for every command (added below), and checks of the functions above."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.sandboxes = {}

    @classmethod
    def tearDownClass(cls):
        for sandbox in cls.sandboxes.values():
            sandbox.folder.cleanup()

    def check(self, readme, before, command):
        reason = reason_not_to_run(command)
        for tool in ("mpirun", "mpiexec.mpich", "pandoc"):
            if reason is None and tool in command and not shutil.which(tool):
                reason = f"no {tool}"
        if reason:
            self.assertEqual([], unknown_options(command))
            self.skipTest(f"{reason}: {command}")
        if readme not in self.sandboxes:
            self.sandboxes[readme] = Sandbox()
        done = self.sandboxes[readme].run("".join(line + "\n" for line in before) + command)
        if done.returncode == NO_NAMESPACES and "tools/two-hosts" in command:
            self.assertEqual([], unknown_options(command))
            self.skipTest(done.stderr.removeprefix("two-hosts: ").strip())  # namespaces, or no tc
        story = f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        self.assertNotRegex(done.stderr, r"[Nn]ot expected|expected one of|No such file|command not found",
                            story)
        if not may_fail(command):
            self.assertEqual(0, done.returncode, story)

    def test_commands_are_found_and_told_apart(self):
        text = "```sh\na --b \\\n  c   # d\n\n(\n  e\n)\n```\n`build/01-x/y z` `build/` and `f`\n"
        self.assertEqual([["a --b \\\n  c   # d", "(\n  e\n)"]],
                         [commands(block) for block in blocks(text)])
        self.assertEqual(["build/01-x/y z"], inline(text))
        self.assertEqual("no GPU", reason_not_to_run("x --devices cuda:0"))
        self.assertIsNone(reason_not_to_run("x --devices cpu:0  # not cuda:0"))
        self.assertIsNone(reason_not_to_run("tools/two-hosts --rate 1gbit ./build/04-ddp/04-ddp"))
        self.assertEqual("names no program", reason_not_to_run("tools/two-hosts PROGRAM"))
        self.assertEqual(["--no-such-option"], unknown_options(
            "./lockstep launch --nnodes 2 ./build/04-ddp/04-ddp --lr 1 --no-such-option"))

    def test_commands_of_docs_belong_to_the_stage_that_they_run(self):
        self.assertEqual("04 docs/a.md", place_of("docs/a.md", "x build/04-ddp/labs\nbuild/05-syncbn/x"))
        self.assertEqual("docs/a.md", place_of("docs/a.md", "./lockstep grade 04"))
        self.assertEqual("README.md", place_of("README.md", "./build/01-single-gpu/01-single-gpu"))

    # --- Commands within sentences, which take minutes: whatever they name has to exist ---------

    def test_commands_within_sentences_exist(self):
        told = subprocess.run([ROOT / "lockstep", "help"], capture_output=True, text=True).stdout
        names = re.findall(r"^  (\S+)", told, re.MULTILINE)
        meson_options = re.findall(r"^option\('(\w+)'", (ROOT / "meson_options.txt").read_text(),
                                   re.MULTILINE)
        for readme in [*READMES, "common/README.md", "tests/README.md", "tools/README.md"]:
            for command in inline_tools((ROOT / readme).read_text()):
                words = command.split()
                with self.subTest(f"{readme}: {command}"):
                    self.assertEqual([], unknown_options(" ".join(words)))
                    if words[0] == "./lockstep":
                        self.assertIn(words[1], names)
                        if words[1] == "test" and words[2:3] and not words[2].startswith("-"):
                            if words[2].isupper():  # a placeholder for such a word
                                continue
                            self.assertEqual("", suites.refusal(words[2], ROOT))
                    elif words[0] == "meson":
                        for option in re.findall(r"-D(\w+)=", command):
                            self.assertIn(option, [*meson_options, "b_sanitize"])
                    else:
                        self.assertTrue((ROOT / words[0]).exists())


def place_of(document, block):
    """The beginning of a command's name, by which meson.build chooses. A stage's README begins with the
    stage; a page of docs/ is put under that of the first program in the block."""
    program = re.search(r"\bbuild/(0\d)-", block)
    return f"{program[1]} {document}" if program and document.startswith("docs/") else document


def add_method(readme, place, number, before, command):
    def method(self):
        self.check(readme, before, command)
    name = re.sub(r"\W+", "_", f"{place} {number:02} {command.split(chr(10))[0][:60]}").strip("_")
    setattr(TestCommands, f"test_{name}", method)


def add_methods():
    for readme in READMES:
        text, number = (ROOT / readme).read_text(), 0
        for block in [*blocks(text), *([command] for command in inline(text))]:
            before = []  # the block's variables, for the commands after them
            place = place_of(readme, block if isinstance(block, str) else block[0])
            for command in commands(block) if isinstance(block, str) else block:
                if re.match(r"\w+=\S*[^&]*$", command) and not re.search(r"\s\./|srun|RANK", command):
                    before.append(command)
                    continue
                number += 1
                add_method(readme, place, number, before, command)


add_methods()

if __name__ == "__main__":
    unittest.main()
