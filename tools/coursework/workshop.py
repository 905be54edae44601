"""The folder in which coursework is compiled: a mirror of the sources, and a build of it per
flavour. The sources of one student after another, or the solved ones, go into the same mirror, so
that only what differs is compiled."""

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

from child_processes import run, started
from coursework import CourseworkError, SOLUTIONS, tasks as table, tree
from coursework.sandbox import COMPILING as LIMITS, View
from ninja_build import CORES, Steps, is_compiling, linking, run_and_say

# What students' machines have in common: one engine, no GPU, no library that may be missing, no
# instruction of one processor. Without optimisation it compiles fastest, and does what the source
# says.
COMMON = ("-Dcuda=disabled", "-Dgloo=disabled", "-Dcpu_engine=reference", "-Dnative=false",
          "-Dtests=enabled", "-Doptimization=0", "-Ddebug=false")
FLAVOURS = {
    "plain": (),  # for the solutions
    "asan": ("-Db_sanitize=address", "-Dcpp_args=-g1"),  # for what is graded
    "tsan": ("-Db_sanitize=thread", "-Dcpp_args=-g1"),  # -g1: lines in its reports
}
# Seconds that a source takes where nothing was compiled yet (an AMD EPYC, 2026).
COMPILING = {"plain": 4.0, "asan": 5.0, "tsan": 5.0}
HEADERS = "standard_headers.h"  # of tests/coursework, copied to a build for grading
FAILED_EDGE = re.compile(r"^FAILED: (\S+)", re.MULTILINE)
PLACE = r"^(?P<file>[^\s:]+):(?P<line>\d+):\d+: "
ERROR = re.compile(PLACE + r"(?:fatal |internal compiler )?error: (?P<text>.*)$", re.MULTILINE)
WARNING = re.compile(PLACE + r"warning: (?P<text>.*)$", re.MULTILINE)
# The line that led into a library's header.
REQUIRED = re.compile(PLACE + r" *(?P<text>required (?:from|by) .*|note: in instantiation .*)$",
                      re.MULTILINE)
# In the words of binutils' linker, and of mold and LLVM's.
UNDEFINED = re.compile(r"undefined reference to .*|^.*multiple definition of .*"
                       r"|(?:undefined|duplicate) symbol: .*", re.MULTILINE)
# While what a student may have written is compiled, these are not there: of the sources, and of the build, in which
# programs are linked from solutions and hidden cases.
SECRET = (SOLUTIONS, tree.HIDDEN)
SECRET_BUILT = "tests/coursework"
# The assembler names no column; its file is that of the lines, or what it reads.
ASSEMBLER = re.compile(r"^[^\n:]+:\d+: Error: (?P<text>.*)$", re.MULTILINE)
# The compiler took more than it may, or Ninja did, which keeps what a compiler says.
EXHAUSTED = re.compile(r"^.*(?:signal terminated program|out of memory allocating|virtual memory exhausted|std::bad_alloc).*",
                       re.MULTILINE)
# Trouble that no student's line of C++ can cause: build files and the machine. Meson's own line
# says more than Ninja's, which follows it.
TROUBLE = tuple(re.compile(pattern, re.MULTILINE) for pattern in (
    r"^.*\bmeson\.build(?::\d+)*: ERROR: .*|^ERROR: .*",
    r"^.*(?:No space left on device|Disk quota exceeded|Read-only file system)(?:: '.*')?$",
    r"^.*error: opening dependency file .*",
    r"^[^\s:]+: fatal error: .*",
    r"^ninja: error: .*"))


class Workshop:
    """One folder, used by one command at a time."""

    def __init__(self, folder, sandbox=None):
        self.folder, self.sandbox = Path(folder), sandbox
        self.is_locked = False
        self.source = self.folder / "source"

    @contextmanager
    def locked(self, say):
        """Waits until no other command uses the folder."""
        if self.is_locked:
            yield
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CourseworkError(f"--build {self.folder}: {error.strerror}; expected a folder, or the name of a new "
                                  "one") from error
        if foreign := [name for name in ("source", *FLAVOURS) if os.path.lexists(self.folder / name)]:
            if not (self.folder / "lock").is_file():
                raise CourseworkError(f"{self.folder} has a {foreign[0]} that no command for coursework made; expected "
                                      "an empty folder, or a new one")
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another command that uses {self.folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            self.is_locked = True
            try:
                yield
            finally:
                self.is_locked = False

    def fill(self, files):
        """Makes the mirror hold these files. Returns the paths of those that are new or others than before."""
        return tree.mirror(files, self.source)

    def forget(self, paths):
        """Removes what was compiled from these sources: the next student's lines might read it."""
        for flavour in FLAVOURS:
            if (self.build(flavour) / "compile_commands.json").is_file():
                for made in self.compiled_from(flavour, paths):
                    tree.remove(self.build(flavour) / made)

    def build(self, flavour):
        return self.folder / flavour

    def configure(self, flavour, purpose):
        """Runs Meson unless the build is configured for this purpose already: `objects` or
        `grade`."""
        build = self.build(flavour)
        options = (*COMMON, *linking(), *FLAVOURS[flavour], f"-Dcoursework={purpose}")
        # A build keeps the compiler and the place that it was made with.
        stamp, here = build / "coursework-options", f"{compiler()} {self.source.resolve()}"
        wanted = "\n".join((*options, self.known_tasks(), here))
        made = stamp.read_text() if stamp.is_file() else ""
        if made == wanted:
            return
        if not made.endswith(here):
            shutil.rmtree(build, ignore_errors=True)
        again = ("--reconfigure",) if (build / "build.ninja").is_file() else ()
        ended, output = run(("meson", "setup", *again, build, self.source, *options))
        if ended:
            raise CourseworkError(self.trouble(output)
                                  or f"meson cannot configure {build}:\n{output}")
        stamp.write_text(wanted)

    def known_tasks(self):
        """What Meson reads and Ninja does not know: the table's checksum, and which hidden cases there are."""
        file, hidden = self.source / table.TABLE, self.source / tree.HIDDEN
        return " ".join([hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
                         *(sorted(path.name for path in hidden.iterdir()) if hidden.is_dir() else ())])

    def compile(self, flavour, targets, what, say, secret=False):
        """Compiles as many of these as possible, saying `what` it compiles, about how long that takes,
        and now and then how far it is. Returns the status and what was written. `secret`: solutions and
        hidden cases are not there for the compiler. Raises CourseworkError if the build itself is at
        fault."""
        steps = Steps(self.build(flavour), targets, COMPILING[flavour])
        if steps.names:
            say(f"compiling {what}: {len(steps.names)} steps, {steps.estimate()}")
        status, output = run_and_say(self.build(flavour), targets, steps, say, f"compiling {what}", keep_going=True,
                                     wrapped=lambda words: self.in_sandbox(flavour, words, secret))
        if status != 0 and (said := self.trouble(EXHAUSTED.sub("", output))):
            raise CourseworkError(said)
        return status, output

    @contextmanager
    def compiling(self, flavour, objects):
        """Compiles these beside what the block does, which goes first; ends when both have ended. Nobody hears what the
        compiler says. Solutions and hidden cases are not there for it."""
        words = ["nice", "-n", "19", "ninja", "-C", self.build(flavour), "-j", str(CORES), "-k", "0", *objects]
        with started(self.in_sandbox(flavour, words, secret=True) if objects else ["true"],
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as compiling:
            yield
            compiling.wait()

    def in_sandbox(self, flavour, words, secret):
        """A build's command, in the sandbox if there is one: it writes to its build's folder only."""
        if self.sandbox is None:  # the sources are the teacher's own
            return words
        hidden = [*(self.source / path for path in SECRET), self.build(flavour) / SECRET_BUILT] if secret else []
        view = View(readable=(self.source.resolve(),), writable=(self.build(flavour).resolve(),),
                    hidden=tuple(path.resolve() for path in hidden if path.is_dir()), foreign=False)
        return self.sandbox.command(words, view, LIMITS, {"NINJA_STATUS": "[%f/%t] "})

    def compiled_from(self, flavour, paths):
        """The objects that are compiled from these sources, in all targets."""
        commands = json.loads((self.build(flavour) / "compile_commands.json").read_text())
        return sorted({command["output"] for command in commands
                       if os.path.relpath(os.path.join(command["directory"], command["file"]), self.source) in paths})

    def unmade(self, flavour, programs):
        """The objects that have yet to be compiled for these programs; not those of the tests, which belong to what is
        secret."""
        made = [step.rsplit(" ", 1)[-1] for step in Steps(self.build(flavour), programs).names if is_compiling(step)]
        return [path for path in made if not path.startswith(f"{SECRET_BUILT}/")]

    def refresh(self, flavour):
        """Makes the build's files anew where the sources' have changed: not in the sandbox, for they are
        handed-out ones."""
        ended, output = run(("ninja", "-C", self.build(flavour), "build.ninja"))
        if ended:
            raise CourseworkError(self.trouble(output)
                                  or f"meson cannot configure {self.build(flavour)}:\n{output}")
        self.precompile(self.build(flavour))

    def precompile(self, build):
        """Compiles the headers that all sources of this build begin with, by the options that the sources have.
        With other options g++ does not use the result, and reads the headers."""
        header, made, stamp = (build / (HEADERS + end) for end in ("", ".gch", ".command"))
        if not header.is_file():
            return  # not for this compiler
        sources = json.loads((build / "compile_commands.json").read_text())
        words = shlex.split(sources[0]["command"])
        words = [word for word in words[:words.index("-MD")] if word not in ("-include", HEADERS)]
        words += ["-x", "c++-header", "-o", made.name, "-c", HEADERS]
        wanted = "\n".join((*words, header.read_text()))
        if made.is_file() and stamp.is_file() and stamp.read_text() == wanted:
            return
        ended, output = run(words, cwd=build)
        if ended:
            raise CourseworkError(self.trouble(output) or f"{header} cannot be compiled:\n{output}")
        stamp.write_text(wanted)

    def trouble(self, output):
        """What was written about build files or the machine, as one line; "" if nothing was."""
        for pattern in TROUBLE:
            if match := pattern.search(output):
                said = match[0].strip().replace("../source/", "")
                return (f"could not be built in {self.folder}: {said}; expected sources and build "
                        "files as handed out, and room on the disk and in memory")
        return ""

    def is_up_to_date(self, flavour, target):
        ended, output = run(("ninja", "-C", self.build(flavour), "-n", target))
        return not ended and "no work to do" in output

    def objects(self, flavour):
        """The object that each source file is compiled to, by the file's path in the tree."""
        build = self.build(flavour)
        found = {}
        for command in json.loads((build / "compile_commands.json").read_text()):
            path = os.path.relpath(os.path.join(command["directory"], command["file"]),
                                   self.source)
            found.setdefault(path, command["output"])
        return found

    def path_in_tree(self, text):
        """A path as compilers and tests write it, seen from the tree's root."""
        return re.sub(r"^(?:\.\./|\S*/)source/(?=\S)", "", text)


def compiler():
    """The compiler in words, and the machine it compiles for."""
    command = os.environ.get("CXX", "c++").split()
    try:
        version = run((*command, "--version"))[1].splitlines()[0]
        machine = run((*command, "-dumpmachine"))[1].strip()
    except (OSError, IndexError):
        raise CourseworkError(f"no C++ compiler: '{' '.join(command)}' cannot be started") from None
    return {"compiler": version, "machine": machine}
