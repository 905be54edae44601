"""The results of one task's tests: runs its program, reads Catch2's XML, finds the right words."""

import os
import re
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from case_records import read_events
from child_processes import LATE, Running, run
from coursework import CourseworkError
from coursework.watch import Watch, none_left

PASSED, FAILED, OPEN = "passed", "failed", "not started"
SLOWER = 5  # ThreadSanitizer's programs, at most
# No core files; 4 GiB of memory (ASAN) and 64 MiB of output end an endless loop before the machine does.
LIMITS = ("bash", "-c", 'ulimit -c 0 -f 65536; exec "$@"', "limits")
# Catch2 reports signals; leaks are nobody's mistake here; vectors pass between code with and without
# AddressSanitizer, which cannot follow how full they are.
ASAN = ("hard_rss_limit_mb=4096:handle_segv=0:handle_abort=0:handle_sigfpe=0:handle_sigill=0:"
        "handle_sigbus=0:detect_leaks=0:detect_container_overflow=0")
TOO_MUCH = re.compile("AddressSanitizer: hard rss limit exhausted")
MEMORY = re.compile(r"ERROR: AddressSanitizer: (?P<kind>[\w-]+).*?(?:\n(?P<access>READ|WRITE) of size|\Z)",
                    re.DOTALL)
KINDS = {"heap-buffer-overflow": "beyond the end, or before the beginning, of memory that was taken",
         "global-buffer-overflow": "beyond the end of a global variable",
         "stack-buffer-overflow": "beyond the end of a local variable",
         "heap-use-after-free": "memory that was given back: did something move it, or end?",
         "stack-use-after-return": "a local variable of a function that has ended",
         "stack-use-after-scope": "a local variable whose block has ended"}
MEANS = {"SIGXFSZ": ": more than 64 MiB were written"}
LONGEST = 300  # characters of a value, or of a message
STARVED = 0.25  # of the deadline: others held up a program that computed less without waiting
PATIENCE = 4  # deadlines, for a program that was held up
FRAME = re.compile(r"^ +#\d+ .*? (\S*source/\S+?):(\d+)", re.MULTILINE)


@dataclass
class Verdict:
    """The outcome of one task. Fields that do not apply are empty."""

    id: str
    name: str
    status: str  # PASSED, FAILED or OPEN
    of: int  # points
    how: str = ""  # of FAILED: assertion, exception, crash, deadline, memory, race, compile
    case: str = ""
    asserted: str = ""  # as in the test
    found: str = ""  # the same with the values
    text: str = ""  # any other message
    hint: str = ""
    file: str = ""
    line: int = 0
    seconds: float = 0
    computed: float = 0  # seconds of processor time, of FAILED by `deadline`
    waits: bool = False  # of FAILED by `deadline`: it waits for something that does not come
    warning: str = ""  # of the compiler, in the student's lines

    @property
    def points(self):
        return self.of if self.status == PASSED else 0

    def facts(self):
        return {**asdict(self), "points": self.points}


@dataclass
class Ended:
    """How a program ended: in words ("" for status 0), and what it left."""

    words: str
    xml: str
    output: str
    case: str  # that was running
    hint: str  # of where the test was; empty for a test that ended
    seconds: float  # that it took
    computed: float  # seconds of processor time
    waits: bool  # at its deadline
    starved: bool  # other programs had the processors


def verdict_of(task, program, in_tree, wrapper=(), race=False, own_lines=range(0)):
    """Runs a task's program. `in_tree` turns paths into paths of the student's tree; `race`: the
    program is ThreadSanitizer's; `own_lines`: the lines of the task's file that the student
    wrote."""
    begin = time.monotonic()
    deadline = task.deadline * (SLOWER if race else 1)
    ended = run_program(task, program, deadline, wrapper)
    if ended.starved:
        ended = run_program(task, program, deadline * PATIENCE, wrapper)
    seconds = round(time.monotonic() - begin, 2)
    told = Told(ended.xml)
    verdict = Verdict(task.id, task.name, FAILED, task.points, case=told.case or ended.case,
                      asserted=told.asserted, found=told.found, text=told.text, hint=told.hint,
                      file=in_tree(told.file), line=told.line, seconds=seconds)
    if race and "WARNING: ThreadSanitizer" in ended.output:
        return tell_race(verdict, task, ended.output, in_tree, own_lines)
    if found := MEMORY.search(ended.output):
        verdict.hint = ended.hint
        return tell_memory(verdict, task, found, ended.output, in_tree, own_lines)
    if ended.words.startswith(LATE):
        tell_deadline(verdict, ended)
    elif ended.words.startswith("killed"):
        verdict.how = "crash"
        name = ended.words.split()[-1]
        verdict.text = f"crashed ({name}{MEANS.get(name, '')})" + what_was_thrown(ended.output)
    elif told.how:
        verdict.how = told.how
    elif ended.case:
        verdict.how, verdict.text = "crash", "the program ended in the middle of a test"
    elif ended.words:
        verdict.how = "crash"
        last = (ended.output.strip().splitlines() or [""])[-1]
        verdict.text = ("more than 4 GiB of memory were taken" if TOO_MUCH.search(ended.output)
                        else f"{ended.words}: {cut(last)}")
    elif not ended.xml:
        verdict.how, verdict.text = "crash", "the program ended before its first test"
    elif told.cases == 0:
        raise CourseworkError(f"no test case carries the tag {task.tag}")
    else:
        return Verdict(task.id, task.name, PASSED, task.points, seconds=seconds)
    if verdict.how in ("crash", "deadline"):
        verdict.hint = verdict.hint or ended.hint
    return verdict


def tell_deadline(verdict, ended):
    verdict.how, verdict.computed = "deadline", round(ended.computed, 1)
    verdict.waits = ended.waits
    after = f"still running after {ended.seconds:.0f} s"
    if verdict.waits:
        verdict.text = (f"{after}, of which it computed {verdict.computed} s: it waits for something "
                        "that does not come (a deadlock)")
    elif ended.starved:
        verdict.text = (f"{after}, of which other programs left it {verdict.computed} s to compute: "
                        "endless, or slow; grade again with nothing beside it")
    else:
        verdict.text = f"{after} and computing: endless"


def cut(text):
    """As much of a text as people read."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def run_program(task, program, deadline, wrapper=()):
    """Runs it up to its first failure, in a temporary folder, in a process group of its own, under
    a deadline."""
    with tempfile.TemporaryDirectory(prefix="lockstep-grade-") as folder:
        xml, log, hint = (Path(folder) / name for name in ("result.xml", "cases.jsonl", "hint"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder,
                       "LOCKSTEP_TEST_LOG": str(log), "LOCKSTEP_HINT": str(hint),
                       "TSAN_OPTIONS": tsan_options(), "ASAN_OPTIONS": ASAN}
        begin, before, running = time.monotonic(), computed_by_children(), Running()
        try:
            with none_left(), Watch(running, deadline) as watch:
                words, output = run((*wrapper, *LIMITS, program, task.tag, "--reporter", "xml", "--out", xml,
                                     "--abort"), deadline, running, cwd=folder, env=environment)
        except OSError as error:
            raise CourseworkError(f"{program} cannot be started: {error.strerror}") from None
        case = ""
        for event in read_events(log):
            case = event["case"] if event["event"] == "start" else ""
        def read(path):
            return path.read_text(errors="replace") if path.is_file() else ""
        seconds, computed = time.monotonic() - begin, computed_by_children() - before
        late = words.startswith(LATE)
        waits = late and watch.waits
        return Ended(words, read(xml), output, case, read(hint), seconds, computed, waits,
                     starved=late and not waits and computed < STARVED * deadline)


def tsan_options():
    """The caller's options, and those that a readable report needs: the stack of the other access
    is remembered for as long as possible."""
    ours = "halt_on_error=1:second_deadlock_stack=1:history_size=7"
    return ":".join(filter(None, (os.environ.get("TSAN_OPTIONS"), ours)))


def computed_by_children():
    """Processor time of all children that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def what_was_thrown(output):
    said = re.search(r"^ *what\(\): +(.*)$", output, re.MULTILINE)
    return f": {cut(said[1])}" if said else ""


def tell_race(verdict, task, output, in_tree, own_lines):
    """Puts ThreadSanitizer's report in the words of the table, and says where."""
    kind = re.search(r"WARNING: ThreadSanitizer: (.*?)(?: \(pid=\d+\))?$", output, re.MULTILINE)
    verdict.how, verdict.hint, verdict.asserted, verdict.found = "race", "", "", ""
    verdict.text = f"ThreadSanitizer: {kind[1] if kind else 'a report'}: {task.race}"
    verdict.file, verdict.line = place_in(output, task, in_tree, own_lines)
    return verdict


def tell_memory(verdict, task, found, output, in_tree, own_lines):
    """Puts AddressSanitizer's report in words, and says where."""
    verdict.how, verdict.asserted, verdict.found = "memory", "", ""
    does = {"READ": "reads ", "WRITE": "writes "}.get(found["access"], "")
    verdict.text = f"AddressSanitizer: {found['kind']}: the task {does or 'uses '}" \
                   f"{KINDS.get(found['kind'], 'memory that is not its own')}"
    verdict.file, verdict.line = place_in(output, task, in_tree, own_lines)
    return verdict


def place_in(output, task, in_tree, own_lines):
    """Where a sanitizer's report leads to: the student's lines if it names one of them, else the task's
    file; where it names neither, the first of the student's lines, which caused it."""
    frames = [(in_tree(match[1]), int(match[2])) for match in FRAME.finditer(output)]
    own = [frame for frame in frames if frame[0] == task.file]
    first = min(own_lines, default=0)
    return min(own, default=(task.file, first), key=lambda frame: frame[1] not in own_lines)


class Told:
    """The first failure in Catch2's XML, as far as that was written."""

    def __init__(self, xml):
        self.how = self.case = self.asserted = self.found = self.text = self.hint = self.file = ""
        self.line = self.cases = 0
        self.infos, self.inside = [], []
        parser = ElementTree.XMLPullParser(["start", "end"])
        try:
            parser.feed(xml)
            for event, element in parser.read_events():
                self.take(event, element)
        except ElementTree.ParseError:
            pass  # a crash cut it short

    def take(self, event, element):
        if event == "start":
            self.inside.append(element)
            if element.tag == "TestCase":
                self.cases += 1
                self.infos.clear()
            return
        self.inside.pop()
        if element.tag == "Info":
            self.infos.append((element.text or "").strip())
        elif element.tag in ("Expression", "Exception", "Failure", "FatalErrorCondition"):
            in_expression = any(outer.tag == "Expression" for outer in self.inside)
            if not in_expression and element.get("success") != "true":
                self.take_failure(element)
                self.infos.clear()

    def take_failure(self, element):
        if self.how:
            return
        thrown = element if element.tag != "Expression" else element.find("Exception")
        if thrown is None:
            thrown = element.find("FatalErrorCondition")
        self.how = {"FatalErrorCondition": "crash", "Exception": "exception"}.get(
            thrown.tag if thrown is not None else "", "assertion")
        self.case = next((outer.get("name", "") for outer in self.inside
                          if outer.tag == "TestCase"), "")
        self.asserted = cut((element.findtext("Original") or "").strip())
        self.found = cut((element.findtext("Expanded") or "").strip())
        self.text = cut((thrown.text or "").strip()) if thrown is not None else ""
        hints = [info for info in self.infos if info.startswith("hint: ")]
        self.hint = hints[-1].removeprefix("hint: ") if hints else ""
        self.file, self.line = element.get("filename", ""), int(element.get("line", 0))
