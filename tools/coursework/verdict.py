"""The results of one task's tests: runs its program, hears what the tests tell, finds the right words."""

import os
import re
import resource
import signal
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from child_processes import LATE, Running, run
from coursework import CourseworkError
from coursework.sandbox import NONE, RUNNING, Guard, Sandbox, View
from coursework.watch import Watch, none_left
from coursework.witness import Account, Witness, disagreement, first_difference

PASSED, FAILED, OPEN = "passed", "failed", "not started"
SLOWER = 5  # ThreadSanitizer's programs, at most
# Catch2 reports signals; leaks are nobody's mistake here; vectors pass between code with and without
# AddressSanitizer, which cannot follow how full they are.
ASAN = ("hard_rss_limit_mb=4096:handle_segv=0:handle_abort=0:handle_sigfpe=0:handle_sigill=0:"
        "handle_sigbus=0:detect_leaks=0:detect_container_overflow=0")
TOO_MUCH = re.compile("AddressSanitizer: hard rss limit exhausted")
# "attempting double-free on ...": the summary below it has the kind's own name.
MEMORY = re.compile(r"ERROR: AddressSanitizer: (?:attempting )?(?P<kind>[\w-]+).*?"
                    r"(?:\n(?P<access>READ|WRITE) of size|\Z)", re.DOTALL)
SUMMARY = re.compile(r"^SUMMARY: AddressSanitizer: ([\w-]+)", re.MULTILINE)
KINDS = {"heap-buffer-overflow": "beyond the end, or before the beginning, of memory that was taken",
         "global-buffer-overflow": "beyond the end of a global variable",
         "stack-buffer-overflow": "beyond the end of a local variable",
         "heap-use-after-free": "memory that was given back: did something move it, or end?",
         "stack-use-after-return": "a local variable of a function that has ended",
         "stack-use-after-scope": "a local variable whose block has ended"}
DOES = {"bad-free": "gives back memory that was never taken: does a function end without return?",
        "double-free": "gives back memory for the second time",
        "allocation-size-too-big": "asks for more memory than there can be: is a size negative?"}
MEANS = {"SIGXFSZ": ": more than 64 MiB were written"}
LONGEST = 300  # characters of a value, or of a message
STARVED = 0.25  # of the deadline: others held up a program that computed less without waiting
PATIENCE = 4  # deadlines, for a program that was held up
FRAME = re.compile(r"^ +#\d+ .*? (\S*source/\S+?):(\d+)", re.MULTILINE)
LINE, MOST = 1000, 1 << 20  # characters of a line, and of all, that are read of what a program prints


@dataclass
class Verdict:
    """The outcome of one task. Fields that do not apply are empty."""

    id: str
    name: str
    status: str  # PASSED, FAILED or OPEN
    of: int  # points
    how: str = ""  # of FAILED: assertion, exception, crash, deadline, memory, race, compile, hidden, witness, refused
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
    partly: dict = field(default_factory=dict)  # of FAILED: points by case, of those that passed

    @property
    def points(self):
        return self.of if self.status == PASSED else sum(self.partly.values())

    def facts(self):
        return {**asdict(self), "points": self.points}


@dataclass(frozen=True)
class Way:
    """How a task's program is run."""

    program: Path
    in_tree: object = str  # turns a path into one of the student's tree
    sandbox: Sandbox = Sandbox(NONE)
    wrapper: tuple = ()  # words before the program
    race: bool = False  # it is ThreadSanitizer's
    own_lines: range = range(0)  # of the task's file, which the student wrote
    seed: int = 0  # of hidden cases
    words: tuple = ()  # which cases; those with the task's tag if empty


@dataclass
class Ended:
    """How a program ended: in words ("" for status 0), and what it left."""

    words: str
    account: Account
    output: str
    seconds: float  # that it took
    computed: float  # seconds of processor time
    waits: bool  # at its deadline
    starved: bool  # other programs had the processors
    exceeded: str = ""  # the limit that it was ended for

    @property
    def is_well(self):
        """Whether the tests passed, by the program's own words."""
        return not self.words and not self.account.failure and not self.account.running


def verdict_of(task, way, solution=None):
    """Runs the task's visible cases and, if a Solution is given, compares with it and runs the hidden ones."""
    begin = time.monotonic()
    ended = run_patiently(task, way)
    told = ended.account.failure
    verdict = Verdict(task.id, task.name, FAILED, task.points,
                      case=told.get("case") or ended.account.running,
                      asserted=cut(told.get("asserted", "")), found=cut(told.get("found", "")),
                      text=cut(told.get("text", "")), hint=told.get("hint", ""), how=told.get("how", ""),
                      file=way.in_tree(told.get("file", "")), line=told.get("line", 0),
                      seconds=round(time.monotonic() - begin, 2))
    if way.race and "WARNING: ThreadSanitizer" in ended.output:
        return tell_race(verdict, task, ended.output, way)
    if found := MEMORY.search(ended.output):
        verdict.hint = ended.account.hint
        return tell_memory(verdict, task, found, ended.output, way)
    if not tell_end(verdict, ended):
        if not ended.account.cases:
            raise CourseworkError(f"no test case carries the tag {task.tag}")
        passed = Verdict(task.id, task.name, PASSED, task.points, seconds=verdict.seconds)
        return solution.check(task, way, passed, ended.account) if solution else passed
    if verdict.how in ("crash", "deadline"):
        verdict.hint = verdict.hint or ended.account.hint
    return verdict


def tell_end(verdict, ended):
    """Says how a program ended that has not passed; False if it has."""
    if ended.words.startswith(LATE):
        tell_deadline(verdict, ended)
    elif ended.exceeded:
        verdict.how, verdict.text = "crash", ended.exceeded
    elif ended.account.fault:
        tell_fault(verdict, ended.account.fault)
    elif ended.words.startswith("killed") or (number := shell_signal(ended.words)):
        verdict.how = "crash"
        name = ended.words.split()[-1] if ended.words.startswith("killed") else number
        verdict.text = f"crashed ({name}{MEANS.get(name, '')})" + what_was_thrown(ended.output)
    elif verdict.how:
        pass
    elif ended.words and TOO_MUCH.search(ended.output):
        verdict.how, verdict.text = "crash", "more than 4 GiB of memory were taken"
    elif ended.account.running:
        verdict.how, verdict.text = "crash", "the program ended in the middle of a test"
    elif ended.words:
        last = (ended.output.strip().splitlines() or [""])[-1]
        verdict.how, verdict.text = "crash", f"{ended.words}: {cut(last)}"
    elif not ended.account.ended:
        verdict.how, verdict.text = "crash", "the program ended before its first test"
        if ended.account.cases:
            verdict.text = "the program ended before its last test"
    else:
        return False
    return True


def shell_signal(words):
    """The signal that ended a program inside of a sandbox, whose status is 128 + its number."""
    status = int(words.split()[-1]) if words.startswith("exited with status") else 0
    return signal.Signals(status - 128).name if status - 128 in set(signal.Signals) else ""


def tell_fault(verdict, why):
    verdict.status, verdict.how = FAILED, "witness"
    verdict.text = f"the tests' result does not count: {why}"


# --- Beside the solution -------------------------------------------------------------------------

class Solution:
    """What a program with all solutions says, for each task: a student's program has to say the same."""

    def __init__(self, ways):
        self.ways, self.visible, self.hidden = ways, {}, {}  # a Way for each task's program

    def account(self, task, kept, tag):
        if task.id not in kept:
            way = replace(self.ways(task), words=(tag,))
            ended = run_patiently(task, way)
            if not ended.is_well or not ended.account.ended or ended.account.fault or not ended.account.cases:
                raise CourseworkError(f"task {task.id}: the solution does not pass {tag}: "
                                      f"{ended.account.fault or ended.words or ended.account.failure or 'no case'}")
            kept[task.id] = ended.account
        return kept[task.id]

    def expect(self, task):
        """Runs the solution's cases, visible and hidden ones."""
        self.account(task, self.visible, task.tag)
        self.account(task, self.hidden, task.hidden_tag)

    def check(self, task, way, verdict, visible):
        """The verdict of a task whose visible cases have passed: after its hidden cases, too."""
        if why := disagreement(visible, self.account(task, self.visible, task.tag)):
            tell_fault(verdict, why)
            return verdict
        expected = self.account(task, self.hidden, task.hidden_tag)
        ended = run_patiently(task, replace(way, words=(task.hidden_tag,)))
        verdict.seconds += round(ended.seconds, 2)
        if not ended.is_well:
            tell_hidden_end(verdict, ended)
        elif difference := first_difference(ended.account.values, expected.values):
            verdict.status, verdict.how, verdict.case = FAILED, "hidden", difference.case
            verdict.asserted = difference.label
            verdict.found = f"{cut(difference.found)}, expected {cut(difference.expected)}"
            verdict.text = "the visible cases pass; with other values the result is another than the solution's"
        elif why := disagreement(ended.account, expected):
            tell_fault(verdict, why)
        return verdict


def case_passes(task, way, row, solution=None):
    """Whether one case is worth its points: by itself, and, beside a Solution, with other values, too."""
    ended = run_patiently(task, replace(way, words=(as_pattern(row["case"]),)))
    well = (ended.is_well and ended.account.ended and not ended.account.fault
            and [case.name for case in ended.account.cases] == [row["case"]])
    if not well or solution is None:
        return well
    expected = [value for value in solution.account(task, solution.hidden, task.hidden_tag).values
                if value[0] == row["hidden"]]
    ended = run_patiently(task, replace(way, words=(as_pattern(row["hidden"]),)))
    return bool(expected) and ended.is_well and not ended.account.fault and \
        first_difference(ended.account.values, expected) is None


def as_pattern(name):
    """A case's name on Catch2's command line."""
    return re.sub(r'([\\,\[\]"*~])', r"\\\1", name)


def tell_hidden_end(verdict, ended):
    """A hidden case that crashed, threw or did not end."""
    verdict.status, verdict.how = FAILED, ended.account.failure.get("how", "")
    verdict.case = ended.account.failure.get("case") or ended.account.running
    verdict.text = cut(ended.account.failure.get("text", ""))
    tell_end(verdict, ended)
    verdict.text = f"with other values than the visible cases': {verdict.text}"


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
    """As much of a text as people read, and only characters that can be shown."""
    text = "".join(each if each.isprintable() or each == "\n" else "?" for each in text[:LONGEST]) + text[LONGEST:]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def run_patiently(task, way):
    """Runs it under the task's deadline, and with a longer one if others had the processors."""
    deadline = task.deadline * (SLOWER if way.race else 1)
    ended = run_program(task, way, deadline)
    return run_program(task, way, deadline * PATIENCE) if ended.starved else ended


def run_program(task, way, deadline):
    """Runs it up to its first failure, in a sandbox, under a deadline."""
    if not os.access(way.program, os.X_OK):
        raise CourseworkError(f"{way.program} cannot be started: expected a program")
    begin, before, running = time.monotonic(), computed_by_children(), Running()
    with Witness(way.seed) as witness:
        environment = {"OMP_NUM_THREADS": "1", "TSAN_OPTIONS": tsan_options(), "ASAN_OPTIONS": ASAN,
                       **witness.environment}
        command = way.sandbox.command(
            (*way.wrapper, way.program, *(way.words or (task.tag,)), "--reporter", "xml", "--out", "/dev/null",
             "--success", "--abort"), View(readable=(way.program, *suppressions())), RUNNING, environment)
        try:
            with none_left(), Watch(running, deadline) as watch, Guard(running, RUNNING) as guard:
                words, output = run(command, deadline, running, pass_fds=(witness.descriptor,), cwd="/")
        except OSError as error:
            raise CourseworkError(f"{command[0]} cannot be started: {error.strerror}") from None
    seconds = time.monotonic() - begin
    computed = max(computed_by_children() - before, watch.computed)
    output = "\n".join(line[:LINE] for line in output[:MOST].split("\n"))
    late = words.startswith(LATE)
    waits = late and watch.waits
    return Ended(words, witness.account, output, seconds, computed, waits,
                 starved=late and not waits and computed < STARVED * deadline, exceeded=guard.exceeded)


def tsan_options():
    """The caller's options, and those that a readable report needs: the stack of the other access
    is remembered for as long as possible."""
    ours = "halt_on_error=1:second_deadlock_stack=1:history_size=7"
    return ":".join(filter(None, (os.environ.get("TSAN_OPTIONS"), ours)))


def suppressions():
    """The file that the caller's options name: the program must find it in its sandbox."""
    named = re.findall(r"\bsuppressions=([^:, ]+)", os.environ.get("TSAN_OPTIONS", ""))
    return [path for path in named if os.path.isabs(path) and os.path.isfile(path)]


def computed_by_children():
    """Processor time of all children that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def what_was_thrown(output):
    said = re.search(r"^ *what\(\): +(.*)$", output, re.MULTILINE)
    return f": {cut(said[1])}" if said else ""


def tell_race(verdict, task, output, way):
    """Puts ThreadSanitizer's report in the words of the table, and says where."""
    kind = re.search(r"WARNING: ThreadSanitizer: (.*?)(?: \(pid=\d+\))?$", output, re.MULTILINE)
    verdict.how, verdict.hint, verdict.asserted, verdict.found = "race", "", "", ""
    verdict.text = f"ThreadSanitizer: {kind[1] if kind else 'a report'}: {task.race}"
    verdict.file, verdict.line = place_in(output, task, way)
    return verdict


def tell_memory(verdict, task, found, output, way):
    """Puts AddressSanitizer's report in words, and says where."""
    verdict.how, verdict.asserted, verdict.found = "memory", "", ""
    summary = SUMMARY.search(output, found.start())
    kind = summary[1] if summary else found["kind"]
    does = {"READ": "reads", "WRITE": "writes"}.get(found["access"], "uses")
    does = DOES.get(kind) or f"{does} {KINDS.get(kind, 'memory that is not its own')}"
    verdict.text = f"AddressSanitizer: {kind}: the task {does}"
    verdict.file, verdict.line = place_in(output, task, way)
    return verdict


def place_in(output, task, way):
    """Where a sanitizer's report leads to: the student's lines if it names one of them, else the task's
    file; where it names neither, the first of the student's lines, which caused it (their end's marker if there are
    none)."""
    frames = [(way.in_tree(match[1]), int(match[2])) for match in FRAME.finditer(output)]
    own = [frame for frame in frames if frame[0] == task.file]
    return min(own, default=(task.file, way.own_lines.start), key=lambda frame: frame[1] not in way.own_lines)

