"""Grades submissions: each task by itself, in the tree that was handed out.

A submission's marked lines are put into that tree (marked_lines.py), which is compiled and run in a
sandbox. All tasks but the graded one run from the prebuilt solutions.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from compile_tests import tsan_wrapper
from coursework import CourseworkError, marked_lines, names, solutions, tasks as table, tree
from coursework.calls import calls_of, definitions_of, taken_over
from coursework.sandbox import Sandbox
from coursework.submission import Submission
from coursework.verdict import FAILED, OPEN, PASSED, Solution, Verdict, Way, case_passes, cut, verdict_of
from coursework.watch import none_left
from coursework.workshop import ASSEMBLER, ERROR, EXHAUSTED, FAILED_EDGE, REQUIRED, UNDEFINED, WARNING


FLAGS = 8  # of a task, that are told
NEVER_DONE = "what these lines are compiled from changes all the time"


@dataclass(frozen=True)
class Settings:
    """How a grading is made; the results say so."""

    sandbox: Sandbox
    races: bool = True  # look for them
    whole_files: bool = False  # take a submission's other lines and files, too
    take_flagged: bool = False  # compile lines that have no business there
    hidden: Path = None  # the tree with the hidden cases; without it the visible ones decide
    seed: int = 0  # of the hidden cases


@dataclass
class Work:
    """What is taken of one submission."""

    files: dict  # for the mirror, beside the handed-out ones: texts by path
    texts: dict  # of the tasks' files, by path: as submitted, or as handed out
    lost: set  # ids of tasks without markers
    flags: dict  # by task
    notes: list


class Grader:
    """Grades by the table, the tests and the solutions of `own`, a handed-out tree."""

    def __init__(self, own, workshop, say, settings):
        self.own, self.workshop, self.say, self.settings = own, workshop, say, settings
        if not (own / solutions.MANIFEST).is_file():
            raise CourseworkError(f"{own} has no prebuilt solutions: give a tree that 'lockstep "
                                  "exercise DIR' has made")
        self.tasks = table.load_tasks(own)
        self.handed_out = {path: own / path for path in tree.list_files(own)}
        self.handed_out |= {task.file: own / solutions.OPEN_FILES / task.file for task in self.tasks}
        if settings.hidden:
            self.handed_out |= {f"{tree.HIDDEN}/{path.name}": path for path in (settings.hidden / tree.HIDDEN).iterdir()}
        self.places = {path for path in self.handed_out if tree.is_students(path)}
        self.teachers = {path: place for path, place in self.handed_out.items() if path not in self.places}
        self.changed_headers = solutions.changed_headers(own, own)
        manifest = solutions.read_manifest(own)  # of the solved files
        self.calls, self.defines = manifest.get("calls", {}), manifest.get("defines", {})
        self.types = frozenset().union(*(marked_lines.types_of(place.read_text()) for path, place in self.handed_out.items()
                                         if path.endswith(".h")))
        self.definitions = None  # names in the other objects, once they were asked for
        self.solution = Solution(self.solutions_way) if settings.hidden else None
        self.work, self.warnings = None, []
        self.tsan_is_made = False  # a build with ThreadSanitizer, but for what students write

    def select(self, words):
        return table.select(self.tasks, words)

    # --- What is taken -------------------------------------------------------------------------------

    def take(self, submission, chosen=()):
        """Looks what of a submission counts; the notes name files of the `chosen` tasks that are absent."""
        work = Work({}, dict(submission.files), set(), {}, list(submission.notes))
        by_file = {task.file: task for task in self.tasks}
        other = []
        for path, text in submission.files.items():
            handed_out = self.handed_out[path].read_text(errors="replace")
            if path in by_file:
                self.take_marked(work, path, handed_out, text)
            elif text != handed_out:
                other.append(path)
                if self.settings.whole_files and Path(path).name != "meson.build":
                    work.files[path] = text
        if other:
            taken = ("taken, but for build files (--whole-files)" if self.settings.whole_files
                     else "not taken: only the lines between the markers are")
            work.notes.append(f"changed: {names(sorted(other))}; {taken}")
        absent = by_file.keys() - submission.files.keys()
        work.texts |= {path: self.handed_out[path].read_text(errors="replace") for path in absent}
        if submission.files and (asked_for := sorted(absent & {task.file for task in chosen})):
            work.notes.append(f"not submitted, so as handed out: {names(asked_for)}")
        for task in self.tasks:
            flags = work.flags.get(task.id, [])
            work.notes += [f"{task.file}:{flag.line}: {flag.what}" for flag in flags[:FLAGS]]
            work.notes += [f"{task.file}: {len(flags) - FLAGS} more lines like these"] if len(flags) > FLAGS else []
        return work

    def take_marked(self, work, path, handed_out, text):
        taken = marked_lines.take(handed_out, text, path, self.types)
        work.lost.update(taken.lost)
        for task in self.tasks:
            if task.file == path and task.id in taken.flags:
                work.flags[task.id] = [flag for flag in taken.flags[task.id] if flag.word not in task.calls]
        if taken.outside:
            work.notes.append(taken.outside + ("" if not self.settings.whole_files else "; taken (--whole-files)"))
        if self.settings.whole_files or taken.text != handed_out:
            work.files[path] = text if self.settings.whole_files else taken.text

    # --- Grading -------------------------------------------------------------------------------------

    def prepare(self, chosen, all_flavours=False):
        """Compiles what does not depend on students, so that no submission has to wait for it, and finds out
        what the solutions say, before any student's line is there."""
        self.work = self.take(Submission())
        self.fill(set())
        programs = {self.right_program(task) for task in chosen} if self.solution else set()
        self.compile_all("asan", [*map(self.program, chosen), *sorted(programs)], "what was handed out")
        if self.solution:
            for number, task in enumerate(chosen, 1):
                self.say(f"the solution of task {task.id}, {number} of {len(chosen)}")
                self.solution.expect(task)
        races = [task for task in chosen if task.race]
        if all_flavours and races and self.settings.races and tsan_wrapper() is not None:
            self.compile_all("tsan", map(self.program, races), "what was handed out, with ThreadSanitizer")
            self.tsan_is_made = True

    def compile_all(self, flavour, programs, what):
        self.configure(flavour)
        status, output = self.workshop.compile(flavour, list(programs), what, self.say)
        if status:
            raise CourseworkError(f"{what} cannot be compiled in {self.workshop.folder}: {cut(last_words(output))}")

    @none_left()  # each sandbox leaves a process that has ended, and that nobody waits for
    def grade(self, submission, chosen):
        """The verdict of each of these tasks. `self.work.notes` says what was not taken."""
        self.work, self.warnings = self.take(submission, chosen), []
        verdicts = {task.id: verdict for task in self.tasks if (verdict := self.early_verdict(task))}
        self.fill(self.refused())
        verdicts |= self.compile("asan", [task for task in chosen if task.id not in verdicts])
        races = [task for task in chosen if task.race and task.id not in verdicts]
        with self.compiling_beside("tsan", races) if self.tsan_is_made and races else nullcontext():
            verdicts |= {task.id: self.run("asan", task) for task in chosen if task.id not in verdicts}
        verdicts |= self.look_for_races([task for task in races if verdicts[task.id].status == PASSED], verdicts)
        return [verdicts[task.id] for task in chosen]

    def fill(self, put_back):
        """Fills the mirror. The tasks in `put_back` are as they were handed out."""
        files = {**self.handed_out, **self.work.files}
        for task in self.tasks:
            if task.id not in put_back or task.file not in self.work.files:
                continue
            if self.settings.whole_files:  # what is wrong may stand anywhere in the file
                files[task.file] = self.handed_out[task.file]
            else:
                handed_out = table.lines_of(self.handed_out[task.file].read_text(), task.file, task.id)
                files[task.file] = table.replace_section(files[task.file], task.file, task.id, handed_out)
        changed = self.workshop.fill(files)
        self.workshop.forget(changed | {task.compiled for task in self.tasks if task.file in changed})

    def grave_flags(self, task):
        return [flag for flag in self.work.flags.get(task.id, ()) if flag.grave and not self.settings.take_flagged]

    def refused(self):
        """The tasks whose lines are not compiled."""
        return {task.id for task in self.tasks if self.grave_flags(task)}

    def early_verdict(self, task):
        """The verdict of a task for which nothing needs to be compiled. None for any other."""
        verdict = Verdict(task.id, task.name, FAILED, task.points, how="refused", file=task.file)
        grave = self.grave_flags(task)
        if task.id in self.work.lost and not self.settings.whole_files:
            verdict.text = (f"the lines '// [task {task.id}] {task.name}' and '// [end {task.id}]' are not there as "
                            "they were handed out: only what stands between them counts")
        elif line := self.open_line(task):
            return Verdict(task.id, task.name, OPEN, task.points, file=task.file, line=line)
        elif grave:
            return self.refusal(task, grave[0].line, grave[0].what)
        else:
            return None
        return verdict

    def refusal(self, task, line, what):
        return Verdict(task.id, task.name, FAILED, task.points, how="refused", file=task.file, line=line,
                       text=f"{what} has no business in a task; ask your teacher if you need it")

    def is_written(self, task):
        """Whether a submission's lines of this task are compiled."""
        return task.file in self.work.files and not self.open_line(task) and not self.grave_flags(task)

    def line_with(self, task, name):
        """The first of a task's lines that has this word; 0 if none has."""
        begin, lines = marked_lines.submitted_lines(self.work.texts[task.file], task.id)
        return next((begin + number for number, line in enumerate(lines or ()) if re.search(rf"\b{name}\b", line)), 0)

    def open_line(self, task):
        begin, lines = marked_lines.submitted_lines(self.work.texts[task.file], task.id)
        return next((begin + number for number, line in enumerate(lines or ())
                     if line.strip().startswith("open_task(")), 0)

    def look_for_races(self, tasks, verdicts):
        """The verdicts of tasks that passed without ThreadSanitizer, after a run with it, too."""
        wrapper = tsan_wrapper() if self.settings.races else None
        if wrapper is None:
            why = "ThreadSanitizer cannot run here" if self.settings.races else "--no-races"
            for task in tasks:
                verdicts[task.id].text = f"not looked for races: {why}"
            return {}
        broken = self.compile("tsan", tasks)
        for task in tasks:
            if task.id not in broken:
                self.say(f"looking for races in task {task.id}")
                broken[task.id] = self.run("tsan", task, wrapper)
        return broken

    def run(self, flavour, task, wrapper=()):
        race = flavour == "tsan"
        way = Way(self.workshop.build(flavour).resolve() / self.program(task), self.workshop.path_in_tree,
                  self.settings.sandbox, tuple(wrapper), race, self.own_lines(task), self.settings.seed)
        verdict = verdict_of(task, way, None if race else self.solution)
        if verdict.status != FAILED or race:
            return self.in_submission(task, verdict)
        headers = self.changed_headers or [path for path in self.work.files if path.endswith(".h")]
        if verdict.how in ("crash", "memory") and headers:
            verdict.text += (f"; the prebuilt solutions were compiled with {names(headers)} as handed out, and a "
                             "changed class makes them crash")
        verdict.warning = self.warning_in(task)
        if verdict.how != "witness":
            verdict.partly = {row["case"]: row["points"] for row in task.cases
                              if case_passes(task, way, row, self.solution)}
        return self.in_submission(task, verdict)

    def solutions_way(self, task):
        return Way(self.workshop.build("asan").resolve() / self.right_program(task), self.workshop.path_in_tree,
                   self.settings.sandbox, seed=self.settings.seed)

    def warning_in(self, task):
        """The compiler's first warning in the task's lines, if they were compiled this time."""
        own = self.own_lines(task)
        return next((f"{file}:{self.submitted_line(task, line)}: {cut(text)}" for file, line, text in self.warnings
                     if file == task.file and line in own), "")

    # --- Lines: as compiled, and as submitted ----------------------------------------------------------

    def compiled_text(self, task):
        return self.work.files.get(task.file) or self.handed_out[task.file].read_text(errors="replace")

    def own_lines(self, task):
        """The lines between the task's markers, in the file that is compiled."""
        try:
            return table.section_of(self.compiled_text(task), task.file, task.id).lines
        except CourseworkError:
            return range(0)  # a marker is gone

    def submitted_line(self, task, line):
        """The number that a compiled line of the task has in the submitted file."""
        own = self.own_lines(task)
        begin, lines = marked_lines.submitted_lines(self.work.texts.get(task.file, ""), task.id)
        inside = line in own or line == own.start  # of no lines the end's marker is the first
        return line - own.start + begin if inside and lines is not None else line

    def in_submission(self, task, verdict):
        if verdict.file == task.file:
            verdict.line = self.submitted_line(task, verdict.line)
        return verdict

    def program(self, task):
        return f"tests/coursework/grade-{task.id}"

    def right_program(self, task):
        return f"tests/coursework/right-{task.id[:2]}"

    # --- Compiling -------------------------------------------------------------------------------------

    def configure(self, flavour):
        self.workshop.configure(flavour, "grade")
        self.workshop.refresh(flavour)

    def compile(self, flavour, chosen):
        """Compiles the programs of these tasks: first what students wrote, where solutions and hidden cases
        are not there. What does not compile costs only the tasks in it: for the others it is put back as
        it was handed out. Returns the verdicts of tasks that have no program."""
        if not chosen:
            return {}
        self.configure(flavour)
        what = f"task{'s' if len(chosen) > 1 else ''} {names([task.id for task in chosen])}"
        what += " with ThreadSanitizer" if flavour == "tsan" else ""
        broken = self.compile_written(flavour, [self.program(task) for task in chosen], what)
        programs = [self.program(task) for task in chosen if task.id not in broken]
        status, output = self.workshop.compile(flavour, programs, what, self.say) if programs else (0, "")
        failed = failed_edges(output)
        for task in chosen:
            if status != 0 and task.id not in broken and not self.workshop.is_up_to_date(
                    flavour, self.program(task)):
                said = failed.get(self.program(task)) or output
                broken[task.id] = self.does_not_compile(task, said)
        return {task.id: broken[task.id] for task in chosen if task.id in broken}

    def compiling_beside(self, flavour, tasks):
        """Begins to compile what students wrote of these tasks, while the block does something else. What does not
        compile then is left for compile() to tell."""
        self.configure(flavour)
        return self.workshop.compiling(flavour, self.workshop.unmade(flavour, map(self.program, tasks)))

    def compile_written(self, flavour, programs, what):
        """Compiles all but tests and solutions that these programs are made of, until nothing of it is left for the
        time in which those can be read. Returns the verdicts of tasks that do not compile; they are put back."""
        broken = {}
        while True:
            left = self.workshop.unmade(flavour, programs)
            found = (left and self.not_made(flavour, programs, left, what)) or self.calling_out(flavour, broken)
            if not found.keys() - broken.keys():
                return broken
            broken |= found
            self.fill(broken.keys() | self.refused())

    def not_made(self, flavour, programs, left, what):
        """Compiles the objects that are `left` of these programs. Returns the verdicts of tasks that they cannot be made
        with."""
        status, output = self.workshop.compile(flavour, left, what, self.say, secret=True)
        self.warnings += self.messages(WARNING, output)
        failed = failed_edges(output) or (self.made_alone(flavour, left, what) if status else {})
        return self.broken_tasks(flavour, failed or dict.fromkeys(self.workshop.unmade(flavour, programs), NEVER_DONE))

    def calling_out(self, flavour, broken):
        """The verdicts of tasks whose lines call what neither the solved file nor the task needs, or define what the
        project does. Of several tasks in a file it costs those in whose lines the name stands, or else all."""
        objects, written, found = self.workshop.objects(flavour), {}, {}
        for source in self.calls if not self.settings.take_flagged else ():
            tasks = [task for task in self.tasks
                     if task.compiled == source and task.id not in broken and self.is_written(task)]
            made = (self.workshop.build(flavour) / objects[source]).resolve()
            if tasks and made.is_file():
                written[source] = tasks, made, self.defined_elsewhere(flavour, source)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process
            said = pool.map(lambda source: self.strange_names(source, *written[source]), written)
        for (tasks, *_), names in zip(written.values(), said):
            for name, what in names:
                for task in [task for task in tasks if self.line_with(task, name)] or tasks:
                    found[task.id] = self.refusal(task, self.line_with(task, name), what)
        return found

    def strange_names(self, source, tasks, made, elsewhere):
        """What an object calls or defines that it may not: a word to look for in the lines, and what it is."""
        allowed = {*self.calls[source], *(name for task in tasks for name in task.calls)}
        called = [(name, f"'{name}', which these lines call,")
                  for name in sorted(calls_of(made, self.settings.sandbox) - allowed)]
        return called + [(re.findall(r"\w+", name.partition("(")[0])[-1],
                          f"a definition of '{cut(name)}', which is not the task's,")
                         for name in taken_over(made, elsewhere, self.settings.sandbox)]

    def defined_elsewhere(self, flavour, source):
        """The strong names, and all names, that objects of the project other than this source's define."""
        if self.definitions is None:
            objects = self.workshop.objects(flavour)
            others = objects.keys() - {task.compiled for task in self.tasks}
            made = [*filter(Path.is_file, (self.workshop.build(flavour) / objects[path] for path in others))]
            strong, weak = definitions_of(*made)
            self.definitions = strong, strong | weak
        other_files = {name for path, names in self.defines.items() if path != source for name in names}
        return tuple(names | other_files for names in self.definitions)

    def made_alone(self, flavour, objects, what):
        """The output for each object that cannot be compiled, one object after the other. A compiler that says more
        than Ninja can keep ends Ninja, which then names none."""
        made = {target: self.workshop.compile(flavour, [target], what, self.say, secret=True) for target in objects}
        return {target: output for target, (status, output) in made.items() if status}

    def broken_tasks(self, flavour, failed):
        """The verdicts of the tasks in files that do not compile. A source with several headers
        costs those that its errors are in."""
        objects, broken = self.workshop.objects(flavour), {}
        for target, said in failed.items():
            files = {self.workshop.path_in_tree(error["file"]) for error in ERROR.finditer(said)}
            named = [task for task in self.tasks if task.file in files]
            affected = [task for task in self.tasks if objects.get(task.compiled) == target]
            for task in [task for task in affected if task in named] or affected or named:
                broken[task.id] = self.does_not_compile(task, said)
        return broken

    def does_not_compile(self, task, output):
        """The verdict, with the compiler's first words: about the task's own file, if there are
        any. Raises CourseworkError if they say nothing about the sources."""
        verdict = Verdict(task.id, task.name, FAILED, task.points, how="compile")
        errors, undefined = self.messages(ERROR, output), UNDEFINED.search(output)
        if output == NEVER_DONE:
            verdict.file, verdict.text = task.file, output
        elif errors:
            own = [error for error in errors if error[0] == task.file]
            verdict.file, verdict.line, text = (own or errors)[0]
            verdict.text = cut(text)
            if verdict.file.startswith("/"):  # a library's header: who included it?
                asked = [place for place in self.messages(REQUIRED, output) if place[0][0] != "/"]
                asked.sort(key=lambda place: place[0] != task.file)
                verdict.file, verdict.line, _ = (asked or errors)[0]
        elif undefined:
            verdict.text = cut(undefined[0].strip())
        elif said := ASSEMBLER.search(output):
            verdict.file, verdict.text = task.file, cut(said["text"])
        elif EXHAUSTED.search(output):
            verdict.file = task.file
            verdict.text = ("the compiler took more than 2 minutes or 3 GiB, or said more than can be kept, for the file "
                            "that these lines are in")
        else:
            raise CourseworkError(f"task {task.id} could not be built in {self.workshop.folder}: "
                                  f"{cut(last_words(output))}; expected a compiler's error")
        return self.in_submission(task, verdict)

    def messages(self, pattern, output):
        """File in the tree, line and text of all compiler messages of this form."""
        return [(self.workshop.path_in_tree(said["file"]), int(said["line"]), said["text"])
                for said in pattern.finditer(output)]


def last_words(output):
    """The last line, except for those that follow every failure."""
    follows = ("FAILED: ", "collect2: ", "compilation terminated", "ninja: ")
    lines = [line.strip() for line in output.split("\n") if not line.startswith(follows)]
    return next(filter(None, reversed(lines)), "nothing was said")


def failed_edges(output):
    """The output for each target that Ninja could not make, by target."""
    parts = re.split(r"^(?=FAILED: |\[\d+/\d+\] )", output, flags=re.MULTILINE)
    return {match[1]: part for part in parts if (match := FAILED_EDGE.match(part))}
