"""Coursework: the grader's words for what a student's program and tree do."""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import grade  # noqa: E402
from coursework import CourseworkError, grader as grader_module, marked_lines, report, solutions, tasks  # noqa: E402
from coursework import verdict as verdict_module, watch, witness as witness_module  # noqa: E402
from coursework.calls import calls_of, taken_over  # noqa: E402
from coursework.sandbox import NONE, Sandbox, find_sandbox  # noqa: E402
from coursework.submission import lay  # noqa: E402
from coursework.verdict import (FAILED, OPEN, PASSED, Solution, Verdict, Way, as_pattern, case_passes, cut,  # noqa: E402
                                verdict_of)
from coursework.workshop import Workshop  # noqa: E402
from coursework_support import Folder, ROW, SOURCE, WITNESS  # noqa: E402
from processes import gone  # noqa: E402

TASK = tasks.Task(**{**ROW, "symbols": ("first",), "deadline": 2, "race": "step N was not awaited"})
FAILURE = {"event": "assertion", "ok": False, "how": "assertion", "asserted": "size == 3", "found": "2 == 3",
           "text": "", "hint": "is it rounded?", "file": "../source/tests/coursework/t.cpp", "line": 7}


class Programs(Folder):
    """Scripts in the place of programs of tests."""

    def fails(self, **other):
        """What a script says of a failed assertion."""
        return f": $((failed++)); tell '{json.dumps({**FAILURE, **other})}'\n"

    def way(self, script, **way):
        """A program that has begun a case."""
        program = self.write("program", f"{WITNESS}\nbegins 'A case'\n{script}\n", 0o755)
        return Way(program, Workshop(self.root).path_in_tree, **way)

    def verdict(self, script="asserts 1; ended", task=TASK, **way):
        return verdict_of(task, self.way(script, **way))


class TestDocument(unittest.TestCase):
    def test_the_teachers_page_has_the_limits_of_memory(self):
        page = " ".join((ROOT / "docs/coursework.md").read_text().split())
        own = int(re.search(r"hard_rss_limit_mb=(\d+)", verdict_module.ASAN)[1]) // 1024
        self.assertIn(f"AddressSanitizer, as all tasks are, ends at {own} GiB; "
                      f"{verdict_module.RUNNING.memory >> 30} GiB is the limit for all processes", page)


class TestVerdict(Programs):
    """The grader's words for what a program may do."""

    def test_passed(self):
        verdict = self.verdict()
        self.assertEqual((verdict.status, verdict.points, verdict.of), (PASSED, 1, 1))

    def test_a_failed_assertion_with_both_values_and_the_hint(self):
        verdict = self.verdict(self.fails() + self.fails(line=9) + "ended; exit 1")
        self.assertEqual((verdict.status, verdict.how, verdict.points), (FAILED, "assertion", 0))
        self.assertEqual((verdict.asserted, verdict.found), ("size == 3", "2 == 3"))
        self.assertEqual(verdict.hint, "is it rounded?")
        self.assertEqual((verdict.case, verdict.file, verdict.line),
                         ("A case", "tests/coursework/t.cpp", 7))

    def test_an_error_of_a_rank_is_told(self):
        said = "rank 1 waits in all_reduce number 3, rank 0 never called it"
        verdict = self.verdict(self.fails(how="exception", text=said, hint="who waits?") + "ended; exit 1")
        self.assertEqual((verdict.how, verdict.text, verdict.hint),
                         ("exception", said, "who waits?"))

    def test_a_crash_names_its_signal(self):
        verdict = self.verdict("echo '  what():  bad' >&2; kill -SEGV $$")
        self.assertEqual((verdict.how, verdict.case), ("crash", "A case"))
        self.assertEqual(verdict.text, "crashed (SIGSEGV): bad")

    def test_a_crash_inside_of_a_sandbox_names_its_signal_too(self):
        self.assertEqual("crashed (SIGABRT)", self.verdict("exit 134").text)

    def test_a_crash_and_a_hang_keep_their_hint(self):
        for end in ("kill -SEGV $$", "while :; do :; done"):
            self.assertEqual(self.verdict("hint why; " + end).hint, "why")
        self.assertEqual(self.verdict("hint why; asserts 1; ended").hint, "")

    def test_endless_output_is_told(self):
        verdict = self.verdict("exec head -c 100000000 /dev/zero")
        self.assertEqual(verdict.text, "crashed (SIGXFSZ: more than 64 MiB were written)")

    def test_endless_memory_is_not_given(self):
        script = 'echo "$ASAN_OPTIONS" | grep -q hard_rss_limit_mb=4096 || exit 3; echo "{}"; exit 1'
        said = "AddressSanitizer: hard rss limit exhausted (4096Mb vs 4100Mb)"
        for before in ("", "ended; "):  # in the middle of a test, and after it
            self.assertEqual("more than 4 GiB of memory were taken", self.verdict(before + script.format(said)).text)

    def test_too_many_processes_are_ended_with_the_program(self):
        few = dataclasses.replace(verdict_module.RUNNING, processes=20)
        with mock.patch.object(verdict_module, "RUNNING", few):
            verdict = self.verdict("for i in {1..40}; do sleep 1000 & done; wait", dataclasses.replace(TASK, deadline=20))
        self.assertEqual((verdict.how, verdict.text), ("crash", "more than 20 processes were started"))

    def test_what_address_sanitizer_finds_is_told_in_words(self):
        report = ("==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x1\\n{} of size 8\\n"
                  "    #0 0x1 in copy /usr/include/x.h:1\\n    #1 0x2 in f {}:5 (program+0x1)\\n")
        def told(access, file):
            script = f"hint why; printf '{report.format(access, file)}' >&2; exit 1"
            return self.verdict(script, own_lines=range(3, 9))
        verdict = told("READ", "../source/02-x/a.cpp")
        self.assertEqual((verdict.how, verdict.file, verdict.line, verdict.hint),
                         ("memory", "02-x/a.cpp", 5, "why"))
        self.assertEqual("AddressSanitizer: heap-buffer-overflow: the task reads beyond the end, or "
                         "before the beginning, of memory that was taken", verdict.text)
        # What a kernel does that the task gave wrong memory: the task's first line is to blame.
        elsewhere = told("WRITE", "../source/common/kernels/devices.cpp")
        self.assertEqual(("02-x/a.cpp", 3), (elsewhere.file, elsewhere.line))
        self.assertIn("the task writes", elsewhere.text)

    def test_the_kind_of_what_address_sanitizer_finds_is_that_of_its_summary(self):
        for said, kind, words in (
                ("attempting free on address which was not malloc()-ed: 0x1", "bad-free", "end without return"),
                ("attempting double-free on 0x1 in thread T0:", "double-free", "for the second time"),
                ("requested allocation size 0xf exceeds maximum", "allocation-size-too-big", "is a size negative?"),
                ("alloc-dealloc-mismatch (new vs free)", "alloc-dealloc-mismatch", "memory that is not its own")):
            report = (f"==7==ERROR: AddressSanitizer: {said}\\n    #0 0x1 in x y.h:1\\n"
                      f"SUMMARY: AddressSanitizer: {kind} y.h:1\\n")
            verdict = self.verdict(f"printf '{report}' >&2; exit 1", own_lines=range(5, 5))
            self.assertRegex(verdict.text, f"^AddressSanitizer: {kind}: the task .*{words}")
            self.assertEqual(("02-x/a.cpp", 5), (verdict.file, verdict.line))
        cut_off = self.verdict("echo '==7==ERROR: AddressSanitizer: attempting double-free on 0x1'; exit 1")
        self.assertIn("double-free: the task gives back", cut_off.text)

    def test_an_end_in_the_middle_is_no_pass(self):
        self.assertEqual(self.verdict("exit 0").how, "crash")
        self.assertEqual("the program ended before its last test",
                         self.verdict("asserts 1; case_ends; exit 0").text)
        self.assertIn("status 9: over", self.verdict("ended; echo over; exit 9").text)

    def test_an_endless_program_is_ended_with_all_that_it_started(self):
        begin = time.monotonic()
        pid_file = self.root / "pid"
        verdict = self.verdict(f"sleep 1000 & echo $! >{pid_file}; while :; do :; done")
        self.assertEqual((verdict.how, verdict.case), ("deadline", "A case"))
        self.assertFalse(verdict.waits)
        self.assertRegex(verdict.text, r"^still running after \d+ s.* endless")
        self.assertLess(time.monotonic() - begin, 20)
        self.assertTrue(gone(int(pid_file.read_text())))

    def test_what_leaves_its_session_is_ended_too(self):
        pid_file = self.root / "pid"
        leaves = f"setsid sh -c 'echo $$ >{pid_file}; exec sleep 1000' & "
        self.verdict(leaves + f"while [ ! -s {pid_file} ]; do :; done; asserts 1; ended")
        self.assertTrue(gone(int(pid_file.read_text())))

    def test_long_values_are_cut(self):
        verdict = self.verdict(self.fails(found="2" * 5000) + "ended; exit 1")
        self.assertEqual(verdict.found, "2" * 300 + "... (5000 characters)")
        said = self.verdict(self.fails(how="exception", text="x" * 400) + "ended; exit 1").text
        self.assertEqual(said, "x" * 300 + "... (400 characters)")

    def test_the_callers_options_for_thread_sanitizer_stay(self):
        script = 'ended; echo "$TSAN_OPTIONS"; exit 9'
        with mock.patch.dict(os.environ, {"TSAN_OPTIONS": "verbosity=1"}):
            text = self.verdict(script, race=True).text
        self.assertIn("verbosity=1:halt_on_error=1", text)
        self.assertIn("history_size=7", text)

    def test_the_file_that_these_options_name_is_in_the_sandbox(self):
        room = find_sandbox()
        if room.kind == NONE:
            self.skipTest("namespaces not permitted")
        races = self.write("races", "race:gloo")
        script = f"ended; cat {races}; exit 9"
        for separator in ":, ":
            with mock.patch.dict(os.environ, {"TSAN_OPTIONS": f"suppressions={races}{separator}verbosity=1"}):
                self.assertIn("race:gloo", self.verdict(script, race=True, sandbox=room).text, separator)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.root)
        for other in ("races", f"{races}-not-there"):
            with mock.patch.dict(os.environ, {"TSAN_OPTIONS": f"suppressions={other}"}):
                self.assertIn("status 9", self.verdict("ended; exit 9", race=True, sandbox=room).text, other)

    def test_nothing_else_of_the_callers_environment_is_there(self):
        with mock.patch.dict(os.environ, {"TOKEN": "secret"}):
            self.assertIn("status 9: none", self.verdict('ended; echo "${TOKEN:-none}"; exit 9').text)

    def test_a_race_is_told_in_the_words_of_the_table(self):
        report = ("WARNING: ThreadSanitizer: data race (pid=7)\\n  Write of size 4\\n"
                  "    #0 memcpy x.h:1\\n    #1 f ../source/02-x/a.cpp:5 (program+0x1)\\n"
                  "  Previous read of size 4\\n    #0 g ../source/02-x/a.cpp:8 (program+0x2)\\n")
        script = f"printf '{report}' >&2; exit 66"
        verdict = self.verdict(script, race=True)
        self.assertEqual((verdict.how, verdict.file, verdict.line), ("race", "02-x/a.cpp", 5))
        self.assertEqual(verdict.text, "ThreadSanitizer: data race: step N was not awaited")
        own = self.verdict(script, race=True, own_lines=range(7, 10))
        self.assertEqual((own.file, own.line), ("02-x/a.cpp", 8))

    def test_a_task_without_a_test_is_no_pass(self):
        program = self.write("program", f"{WITNESS}run_ends\n", 0o755)
        with self.assertRaisesRegex(CourseworkError, "no test case carries"):
            verdict_of(TASK, Way(program))

    def test_a_program_that_ends_before_its_tests_is_no_pass(self):
        verdict = verdict_of(TASK, Way(self.write("program", "#!/bin/sh\nexit 0\n", 0o755)))
        self.assertEqual((verdict.status, verdict.how), (FAILED, "crash"))
        self.assertIn("before its first test", verdict.text)

    def test_a_report_without_an_end_is_read_once(self):
        begin = time.process_time()
        self.verdict("echo 'ERROR: AddressSanitizer: x'; printf ' #0 x '; printf 'source/%.0s' {1..400000}; exit 1")
        self.assertLess(time.process_time() - begin, 10)  # it took hours

    def test_what_a_student_wrote_steers_no_terminal(self):
        self.assertEqual("a?[2J?b\nc", cut("a\x1b[2J\rb\nc"))

    def test_nothing_is_left_in_the_temporary_folder(self):
        before = set(os.listdir(tempfile.gettempdir()))
        self.verdict("touch y; kill -SEGV $$")
        left = set(os.listdir(tempfile.gettempdir())) - before
        self.assertEqual([name for name in left if name.startswith("lockstep")], [])


class TestWitness(Programs):
    """What a student's code may say in the tests' place: it does not count."""

    def refused(self, script, words):
        verdict = self.verdict(script)
        self.assertEqual((verdict.status, verdict.how), (FAILED, "witness"), verdict.text)
        self.assertRegex(verdict.text, f"does not count: .*{words}")

    def test_a_line_without_the_nonce(self):
        forged = '0000 1 {"event": "run ended", "passed": 9, "failed": 0}'
        self.refused(f"echo '{forged}' >&$LOCKSTEP_WITNESS; asserts 1; ended", "not the tests' own")

    def test_the_right_words_on_any_descriptor_that_is_open(self):
        """All that a program can do that does not know the nonce."""
        script = ("for fd in /proc/$$/fd/*; do echo '{\"event\": \"run ended\", \"passed\": 1, \"failed\": 0}' "
                  '>&"${fd##*/}"; done 2>/dev/null; exit 0')
        verdict = self.verdict(script)
        self.assertEqual(FAILED, verdict.status)

    def test_lines_that_are_left_out_or_come_twice(self):
        self.refused("asserts 1; : $((sent++)); ended", "line 3 came as number 2")
        self.refused("asserts 1; : $((sent--)); ended", "line 1 came as number 2")

    def test_assertions_that_were_not_made_or_not_told(self):
        self.refused("asserts 1; passed=7; ended", "made 7 assertions that passed .* told of 1")
        self.refused("asserts 1; failed=1; ended", "and 1 that failed")

    def test_more_words_than_anybody_needs(self):
        with mock.patch.object(witness_module, "MOST", 1000):
            self.refused("for i in {1..99}; do asserts 1; done; ended", "more than 0 MiB")

    def test_words_that_are_no_json(self):
        self.refused("tell nonsense; asserts 1; ended", "cannot be read")

    def test_words_of_who_knows_the_nonce_and_tells_what_no_test_tells(self):
        fails = '{"event": "assertion", "ok": false, "file": "a", "line": 1, "how": "", "text": "", "hint": "", "found": "", '
        for said in (f'{fails}"asserted": 5}}', f'{fails}"asserted": "\\ud800"}}', '{"event": "case", "name": ["x"]}',
                     '{"event": "case ended", "passed": "1", "failed": 0}', "$(printf '%0100000d' 0 | tr 0 '[')"):
            script = f"case_begins() {{ begins one; }}; case_begins; tell '{said}'; asserts 1; ended"
            if said.startswith("$"):
                script = f'begins one; tell "{said}"; asserts 1; ended'
            self.refused(script, "cannot be read")

    def test_each_run_has_another_nonce(self):
        seen = set()
        for _ in range(5):
            with witness_module.Witness() as witness:
                seen.add(witness.nonce)
        self.assertEqual(5, len(seen))


class TestSolution(Folder):
    """A program beside that of the solution, which has to say the same."""

    RIGHT = ("case $1 in '[task02.1]') begins one; asserts 1; asserts 2; case_ends; begins two; asserts 3;; "
             "*) begins hidden; value x $((seed * 2)); asserts 4;; esac; ended")

    def check(self, script, seed=21):
        right = self.write("right", f"{WITNESS}{self.RIGHT}\n", 0o755)
        program = self.write("program", f"{WITNESS}{script}\n", 0o755)
        solution = Solution(lambda task: Way(right, seed=seed))
        return verdict_of(TASK, Way(program, seed=seed), solution)

    def test_who_computes_the_same_passes(self):
        self.assertEqual(PASSED, self.check(self.RIGHT).status)

    def test_answers_for_the_visible_values_only_are_refused(self):
        verdict = self.check(self.RIGHT.replace("$((seed * 2))", "42"), seed=22)
        self.assertEqual((verdict.status, verdict.how, verdict.case), (FAILED, "hidden", "hidden"))
        self.assertEqual((verdict.asserted, verdict.found), ("x", "42, expected 44"))

    def test_cases_in_another_order_or_left_out_are_refused(self):
        swapped = "begins two; asserts 3; case_ends; begins one; asserts 1; asserts 2; ended"
        self.assertIn("in the order of the tests", self.check(swapped).text)
        self.assertIn("1, expected 2", self.check("begins one; asserts 1; asserts 2; ended").text)

    def test_an_assertion_that_was_not_reached_is_named(self):
        verdict = self.check(self.RIGHT.replace("asserts 2", "asserts 1"))
        self.assertEqual((verdict.how, verdict.status), ("witness", FAILED))
        self.assertIn("case 'one' left out the assertion at ../source/t.cpp:2", verdict.text)

    def test_a_hidden_case_that_crashes_or_says_nothing_is_no_pass(self):
        crashes = self.check(self.RIGHT.replace("value x", "kill -SEGV $$; value x"))
        self.assertEqual((crashes.how, crashes.status), ("crash", FAILED))
        self.assertIn("with other values than the visible cases': crashed (SIGSEGV)", crashes.text)
        silent = self.check(self.RIGHT.replace("value x $((seed * 2));", ""))
        self.assertEqual((silent.how, silent.found), ("hidden", "nothing, expected 42"))

    def test_a_solution_that_fails_is_the_graders_fault(self):
        with mock.patch.object(TestSolution, "RIGHT", "begins one; ended; exit 1"):
            with self.assertRaisesRegex(CourseworkError, "the solution does not pass"):
                self.check("begins one; asserts 1; ended")

    def test_numbers_with_a_fraction_may_differ_by_rounding_and_others_not(self):
        same = witness_module.same
        self.assertTrue(same("0.3333333 7 x", "0.3333334 7 x"))
        for found, expected in (("3", "4"), ("100000", "100001"), ("0.33", "0.34"), ("1 2", "1 2 3"), ("x", "y"), ("nan", "0.5")):
            self.assertFalse(same(found, expected), found)

    def test_a_case_is_worth_its_points_by_itself(self):
        row = {"case": "one", "hidden": "hidden", "points": 1}
        scripts = {"right": "case $1 in one) begins one; asserts 1;; *) begins hidden; value x $((seed * 2)); asserts 1;; "
                            "esac; ended"}
        scripts["table"] = scripts["right"].replace("$((seed * 2))", "42")
        scripts["wrong"] = scripts["right"].replace("asserts 1;; *", "exit 1;; *")
        for name, expected in (("right", True), ("table", False), ("wrong", False)):
            program = self.write(name, f"{WITNESS}{scripts[name]}\n", 0o755)
            right = self.write("solution", f"{WITNESS}{scripts['right']}\n", 0o755)
            solution = Solution(lambda task: Way(right, seed=9))
            self.assertEqual(expected, case_passes(TASK, Way(program, seed=9), row, solution), name)
            self.assertEqual(name != "wrong", case_passes(TASK, Way(program, seed=9), row))

    def test_a_name_on_the_command_line_of_catch(self):
        self.assertEqual(r"a\, b \[c\]", as_pattern("a, b [c]"))


class TestCalls(Folder):
    def made(self, source):
        """The object of this text."""
        made = self.root / "a.o"
        subprocess.run([*os.environ.get("CXX", "c++").split(), "-std=c++20", "-O0", "-c", self.write("a.cpp", source),
                        "-o", made], check=True)
        return made

    def calls(self, body):
        return calls_of(self.made(f"""#include <pthread.h>
#include <unistd.h>
#include <bit>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <future>
#include <iostream>
#include <vector>
namespace lockstep {{
double other(double);
double f(double x) {{
  {body}
}}
}}  // namespace lockstep
"""), find_sandbox())

    def test_what_computes_prints_or_takes_memory_is_harmless(self):
        self.assertEqual(set(), self.calls("""std::vector<double> all(8, std::log1p(x));
  std::printf("%f", all[0]);
  std::cout << std::to_string(all[1]) << std::stod("1");
  static std::mutex one;
  const std::lock_guard lock(one);
  try { throw std::runtime_error("x"); } catch (const std::exception&) { return other(x) + std::popcount(unsigned(x)); }
  return std::lround(x);"""))

    def test_what_acts_on_the_system_is_named_however_it_is_spelled(self):
        self.assertEqual({"getppid", "thread", "filesystem", "pread"}, self.calls("""auto later = std::async([] { return 1; });
  char byte;
  return double(::getppid() + later.get() + pread(0, &byte, 1, 0)) + double(std::filesystem::exists("x"));"""))

    def test_a_function_of_the_projects_that_is_defined_again_is_named(self):
        written = """#include <new>
#include <vector>
namespace lockstep {
struct Timer { double total() const; int count(); };
double Timer::total() const { return 1; }
inline int Timer::count() { return 1; }
int used = Timer().count();
namespace { double taken() { return 1; } }
double helper(std::vector<double> all) { all.push_back(taken()); return all[0]; }
}  // namespace lockstep
"""
        total, count = "_ZNK8lockstep5Timer5totalEv", "_ZN8lockstep5Timer5countEv"  # a strong one, a weak one
        names = {total, count, "_ZN8lockstep12_GLOBAL__N_15takenEv"}
        for strong, found in ((names, {"lockstep::Timer::total() const", "lockstep::Timer::count()"}),
                              (set(), {"lockstep::Timer::total() const"})):
            self.assertEqual(found, set(taken_over(self.made(written), (strong, names), find_sandbox())))
        self.assertEqual([], taken_over(self.made(written), (set(), set()), find_sandbox()))
        self.assertEqual(["std::wait()", "operator delete(void*)"], taken_over(self.made("""#include <cstddef>
void operator delete(void*) noexcept {}
namespace std { void wait() {} }
namespace lockstep { template <class T> T twice(T x) { return 2 * x; } template int twice(int); int x; }
"""), (set(), set()), find_sandbox()))

    def test_what_is_no_object_is_told(self):
        with self.assertRaisesRegex(CourseworkError, "nm cannot read .*a.txt"):
            calls_of(self.write("a.txt", "no object"))


class TestGrade(Folder):
    def test_ninjas_words_are_told_apart_by_target(self):
        output = ("[1/3] ok\nFAILED: a.o \ng++ a.cpp\n../source/02-x/a.cpp:5:3: error: no\n"
                  "[2/3] ok\nFAILED: b \nld: undefined reference to `f()'\n[3/3] ok\n")
        failed = grader_module.failed_edges(output)
        self.assertEqual(set(failed), {"a.o", "b"})
        self.assertNotIn("undefined", failed["a.o"])

    def test_the_solved_tree_itself_cannot_be_graded(self):
        with self.assertRaisesRegex(CourseworkError, "no prebuilt solutions"):
            grader_module.Grader(self.root, None, print, None)
        options = grade.parse_options(["--build", str(self.root / "build")], ROOT)
        if grade.is_teachers(ROOT):
            with self.assertRaisesRegex(CourseworkError, "is the solved tree: name a submission"):
                grade.grade(options, ROOT)

    def grader(self, section='open_task("x");', script="exit 1", outputs=(), row=ROW, calls=None, **settings):
        """A grader of a tree with one task, whose lines are `section`. Its program is a script; `outputs`
        are what the compiler prints, one call after the other: of the objects, of the programs."""
        self.write(tasks.TABLE, json.dumps({"tasks": [row]}))
        self.write("02-x/a.cpp", SOURCE.replace("return 1;", section))
        self.write(f"{solutions.OPEN_FILES}/02-x/a.cpp", SOURCE.replace("return 1;", 'open_task("x");'))
        self.write("common/a.h", "int a;\n")
        if not (self.root / solutions.MANIFEST).exists():
            solutions.write_manifest(self.root, {"calls": calls or {}})
        program = "asan/tests/coursework/grade-02.1"
        self.write(f"build/{program}", f"{WITNESS}{script}\n", 0o755)
        workshop = Workshop(self.root / "build")
        said, unmade = iter(outputs), set()

        def compile_(flavour, targets, *_, **__):
            status, output = next(said, (0, ""))
            unmade.difference_update(() if status else targets)
            return status, output
        workshop.configure = workshop.refresh = lambda *_: None
        workshop.compile = compile_
        workshop.objects = lambda flavour: {"02-x/a.cpp": "a.o"}
        workshop.forget = lambda paths: unmade.update({"a.o"} if "02-x/a.cpp" in paths else ())
        workshop.unmade = lambda flavour, programs: sorted(unmade)
        settings = grader_module.Settings(Sandbox(NONE), races=False, **settings)
        return grader_module.Grader(self.root, workshop, lambda text: None, settings)

    def graded(self, grader):
        return grader.grade(lay(self.root, grader.places), grader.tasks)[0]

    def verdict(self, *words, **options):
        return self.graded(self.grader(*words, **options))

    def graded_again(self, grader):
        """The verdict after the tree has changed."""
        grader = grader_module.Grader(self.root, grader.workshop, grader.say, grader.settings)
        return self.graded(grader)

    def test_a_task_is_open_if_its_lines_say_so(self):
        crashes = "kill -SEGV $$"
        for section in ('open_task("mine");', "int i;\n    open_task(0);"):
            verdict = self.verdict(section, crashes)
            line = 3 + section.count("\n")
            self.assertEqual((verdict.status, verdict.file, verdict.line),
                             (OPEN, "02-x/a.cpp", line))
        imitates = "echo '  what():  task 02.1 (the first) is yours: 02-x/a.cpp:3'; " + crashes
        for section in ('// was: open_task("task 02.1 (the first) is yours: 02-x/a.cpp:3");',
                        '// open_task("task 02.1 (the first) is yours: 02-x/a.cpp:3");',
                        "return 1;"):
            self.assertEqual(self.verdict(section, imitates).how, "crash")

    def test_nothing_is_compiled_for_a_task_that_is_open(self):
        for section, expected in (('open_task("x");', []), ("return 1;", [["a.o"], ["tests/coursework/grade-02.1"]])):
            grader, asked = self.grader(section), []
            compile_ = grader.workshop.compile
            grader.workshop.compile = lambda *words, **_: asked.append(words[1]) or compile_(*words)  # noqa: B023
            self.graded(grader)
            self.assertEqual(expected, asked)

    def test_only_the_marked_lines_count_and_the_rest_is_listed(self):
        grader = self.grader("return 7;")
        self.write("02-x/a.cpp", SOURCE.replace("return 1;", "return 7;").replace("two = 2", "two = 3"))
        self.graded(grader)
        compiled = (self.root / "build/source/02-x/a.cpp").read_text()
        self.assertIn("return 7;", compiled)
        self.assertIn("two = 2", compiled)
        self.assertEqual(["02-x/a.cpp differs outside of the markers, first at 'const int two = 3;' (1 lines)"],
                         grader.work.notes)

    def test_a_marker_that_was_moved_or_lost_its_name_hides_no_other_difference(self):
        begin, end = "// [task 02.1] the first", "// [end 02.1]"
        for ours, theirs, lines in ((end, end + " ", 1), (f"  {begin}", f"\t{begin}", 1), (begin, "// [task 02.1]", 2)):
            text = SOURCE.replace(ours, theirs).replace("two = 2", "two = 3")
            self.assertNotEqual(text, SOURCE.replace("two = 2", "two = 3"))
            taken = marked_lines.take(SOURCE, text, "02-x/a.cpp")
            self.assertEqual((), taken.lost)
            self.assertRegex(taken.outside, rf"differs outside of the markers, first at '.*' \({lines} lines\)")

    def test_whole_files_are_taken_where_they_are_asked_for(self):
        grader = self.grader("return 7;", whole_files=True)
        self.write("02-x/a.cpp", SOURCE.replace("two = 2", "two = 3"))
        self.graded(grader)
        self.assertIn("two = 3", (self.root / "build/source/02-x/a.cpp").read_text())
        self.assertIn("--whole-files", grader.work.notes[0])
        self.assertIn("whole files, not only the marked lines", report.how_graded(grader.settings))

    def test_lines_with_no_business_there_are_not_compiled_unless_they_were_looked_at(self):
        verdict = self.verdict("return system(0);")
        self.assertEqual((verdict.status, verdict.how, verdict.line), (FAILED, "refused", 3))
        self.assertIn("'system': a process has no business in a task", verdict.text)
        self.assertNotIn("system", (self.root / "build/source/02-x/a.cpp").read_text())
        self.verdict("return system(0);", take_flagged=True)
        self.assertIn("system", (self.root / "build/source/02-x/a.cpp").read_text())

    def verdict_of_calls(self, calls, defines=(), **settings):
        """That of lines whose object calls and defines these functions, and whether it was compiled in the end."""
        grader = self.grader("return getppid();", row={**ROW, "calls": ["remove"]}, calls={"02-x/a.cpp": ["open"]},
                             **settings)
        self.write("build/asan/a.o")
        with mock.patch.object(grader_module, "calls_of", lambda *_: calls), \
                mock.patch.object(grader_module, "taken_over", lambda *_: list(defines)):
            verdict = self.graded(grader)
        return verdict, "getppid" in (self.root / "build/source/02-x/a.cpp").read_text()

    def test_lines_that_call_what_neither_the_solved_file_nor_the_task_needs_are_refused(self):
        verdict, compiled = self.verdict_of_calls({"open", "getppid"})
        self.assertEqual(("refused", 3, False), (verdict.how, verdict.line, compiled))
        self.assertIn("'getppid', which these lines call, has no business in a task", verdict.text)

    def test_a_call_that_no_line_names_is_refused(self):
        verdict, compiled = self.verdict_of_calls({"open", "thrd_create"})
        self.assertEqual(("refused", 0, False), (verdict.how, verdict.line, compiled))

    def test_lines_that_define_what_the_project_has_are_refused(self):
        verdict, compiled = self.verdict_of_calls({"open"}, defines=["lockstep::Timer::getppid(int) const"])
        self.assertEqual(("refused", 3, False), (verdict.how, verdict.line, compiled))
        self.assertIn("a definition of 'lockstep::Timer::getppid(int) const', which is not the task's,", verdict.text)

    def test_what_the_solved_file_calls_and_what_the_task_allows_is_no_fraud(self):
        verdict, compiled = self.verdict_of_calls({"open", "remove"})
        self.assertEqual(("crash", True), (verdict.how, compiled))  # the script is no test

    def test_calls_that_were_looked_at_are_taken(self):
        verdict, compiled = self.verdict_of_calls({"getppid"}, take_flagged=True)
        self.assertEqual(("crash", True), (verdict.how, compiled))

    def test_a_task_without_its_markers_is_told(self):
        grader = self.grader("return 1;")
        self.write("02-x/a.cpp", SOURCE.replace("// [end 02.1]", "// end"))
        verdict = self.graded(grader)
        self.assertEqual((verdict.status, verdict.how), (FAILED, "refused"))
        self.assertIn("'// [end 02.1]' are not there", verdict.text)

    def test_lines_are_those_of_the_submitted_file(self):
        output = "FAILED: a.o \nc++\n../source/02-x/a.cpp:3:5: error: no\n"
        grader = self.grader("return x;", outputs=[(1, output)])
        self.write("02-x/a.cpp", "// mine\n// mine, too\n" + SOURCE.replace("return 1;", "return x;"))
        self.assertEqual(5, self.graded(grader).line)

    def test_a_task_with_no_line_at_all_is_at_its_end(self):
        report = "printf '==7==ERROR: AddressSanitizer: attempting free on address\\n'; exit 1"
        grader = self.grader("return 1;", report)
        self.write("02-x/a.cpp", "// mine\n// mine, too\n" + SOURCE.replace("  return 1;\n", ""))
        verdict = self.graded(grader)
        self.assertEqual(("memory", 5), (verdict.how, verdict.line))

    def test_a_compiler_that_takes_too_much_costs_the_task(self):
        output = "FAILED: a.o \nc++ a.cpp\nc++: fatal error: Killed signal terminated program cc1plus\n"
        verdict = self.verdict("return 1;", outputs=[(1, output)])
        self.assertEqual((verdict.how, verdict.file), ("compile", "02-x/a.cpp"))
        self.assertIn("more than 2 minutes or 3 GiB", verdict.text)

    def test_a_compiler_that_says_more_than_ninja_can_keep_costs_the_task(self):
        output = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
        verdict = self.verdict("return 1;", outputs=[(1, output), (1, output)])  # with others, and alone
        self.assertEqual((verdict.how, verdict.file), ("compile", "02-x/a.cpp"))
        self.assertIn("said more than can be kept", verdict.text)

    def test_what_is_never_made_for_good_costs_the_task(self):
        """It would be compiled again while solutions can be read."""
        grader, asked = self.grader("return 1;"), []
        compile_ = grader.workshop.compile

        def never(flavour, targets, *_, secret=False):
            asked.append(secret)
            changed = "return 1;" in (self.root / "build/source/02-x/a.cpp").read_text()
            return (0, "") if changed else compile_(flavour, targets)
        grader.workshop.compile = never
        verdict = self.graded(grader)
        self.assertEqual((verdict.status, verdict.how, verdict.file), (FAILED, "compile", "02-x/a.cpp"))
        self.assertIn("changes all the time", verdict.text)
        self.assertEqual([True, True], asked)  # nothing is left to link

    def test_a_crash_names_changed_headers(self):
        grader = self.grader("return 1;", "kill -SEGV $$")
        self.assertNotIn("a.h", self.graded(grader).text)
        self.write("common/a.h", "long a;\n")
        self.assertIn("crashed (SIGSEGV); the prebuilt solutions were compiled with common/a.h as",
                      self.graded_again(grader).text)

    def test_a_task_file_that_was_not_submitted_is_as_handed_out(self):
        grader = self.grader()
        (self.root / "02-x/a.cpp").unlink()
        (self.root / "02-x/a.cpp").symlink_to("none")
        self.write("02-x/other.cpp", "int other;\n")
        again = grader_module.Grader(self.root, grader.workshop, grader.say, grader.settings)
        verdict = self.graded(again)
        self.assertEqual((verdict.status, verdict.file), (OPEN, "02-x/a.cpp"))
        self.assertIn("not submitted, so as handed out: 02-x/a.cpp", again.work.notes)

    def test_absent_files_of_tasks_that_were_not_asked_for_are_not_noted(self):
        grader = self.grader()
        grader.places.add("02-x/c.cpp")
        grader.handed_out["02-x/c.cpp"] = self.write("handed-out/c.cpp", SOURCE)
        other = dataclasses.replace(grader.tasks[0], id="02.2", file="02-x/c.cpp")
        grader.tasks.append(other)
        submission = lay(self.root, grader.places)
        for chosen, notes in (([other], ["not submitted, so as handed out: 02-x/c.cpp"]), (grader.tasks[:1], [])):
            self.assertEqual(notes, grader.take(submission, chosen).notes)

    def test_a_task_file_that_a_students_git_ignores_is_there(self):
        grader = self.grader("return 1;", "kill -SEGV $$")
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)
        self.write(".gitignore", "*.cpp\n/build/\n")
        self.assertEqual(self.graded_again(grader).how, "crash")

    def test_a_compile_error_in_a_library_is_told_where_it_was_asked_for(self):
        output = ("FAILED: a.o \nc++ a.cpp\n/usr/include/c++/12/v.h:7:1: error: no match\n"
                  "../source/common/a.h:5:3:   required from here\n"
                  "../source/02-x/a.cpp:3:5:   required from 'int f()'\n")
        verdict = self.verdict("return 1;", outputs=[(1, output)])
        self.assertEqual((verdict.how, verdict.file, verdict.line, verdict.text),
                         ("compile", "02-x/a.cpp", 3, "no match"))

    def test_a_build_that_fails_for_no_compile_error_is_no_verdict(self):
        output = ("FAILED: a.o \nc++ a.cpp\nld: a.o: file truncated\n"
                  "collect2: error: ld returned 1 exit status\n")
        with self.assertRaisesRegex(CourseworkError, "task 02.1 .*: ld: a.o: file truncated; "):
            self.verdict("return 1;", outputs=[(0, ""), (1, output)])

    def test_a_warning_in_the_lines_of_a_failed_task_is_told(self):
        output = ("../source/02-x/a.cpp:1:1: warning: not mine\n"
                  "../source/02-x/a.cpp:3:1: warning: no return statement [-Wreturn-type]\n")
        verdict = self.verdict("int i;", outputs=[(0, output)])
        self.assertEqual(verdict.warning, "02-x/a.cpp:3: no return statement [-Wreturn-type]")
        self.assertIn("warning: ", "\n".join(report.lines_of(verdict)))

    def test_a_warning_is_told_although_another_task_was_compiled_with_threadsanitizer_since(self):
        grader = self.grader("return 1;", outputs=[(0, "../source/02-x/a.cpp:3:1: warning: unused\n")])
        self.graded(grader)
        grader.compile_written("tsan", ["tests/coursework/grade-02.2"], "task 02.2")
        self.assertEqual("02-x/a.cpp:3: unused", grader.warning_in(grader.tasks[0]))
        self.graded(grader)
        self.assertEqual("", grader.warning_in(grader.tasks[0]))  # of another submission

    def test_a_grading_leaves_no_process_not_even_one_that_nobody_waits_for(self):
        grader, before = self.grader("return 1;"), watch.children()
        grader.run = lambda *_: subprocess.run(["sh", "-c", "true & sleep 100 &"]) and Verdict("02.1", "", PASSED, 1)
        self.assertEqual(PASSED, self.graded(grader).status)
        self.assertEqual(before, watch.children())

    def test_tasks_that_passed_are_compiled_together_to_look_for_races(self):
        grader = self.grader("return 1;")
        fails, has_none, first, broken, last = (
            dataclasses.replace(TASK, id=f"02.{number}", race="x" * (number != 2)) for number in range(1, 6))
        asked, verdicts = [], {task.id: Verdict(task.id, "", PASSED, 1) for task in (has_none, first, broken, last)}
        verdicts[fails.id] = Verdict(fails.id, "", FAILED, 1)
        does_not = Verdict(broken.id, "", FAILED, 1, how="compile")
        grader.settings = dataclasses.replace(grader.settings, races=True)
        grader.compile = lambda flavour, tasks: (asked.append((flavour, [task.id for task in tasks]))
                                                 or ({broken.id: does_not} if flavour == "tsan" else {}))
        grader.run = lambda flavour, task, *_: asked.append((flavour, task.id)) or verdicts[task.id]

        @contextlib.contextmanager
        def compiling(flavour, objects):
            asked.append(("begins", flavour))
            yield
            asked.append(("ends", flavour))
        grader.workshop.compiling, grader.tsan_is_made = compiling, True
        with mock.patch.object(grader_module, "tsan_wrapper", lambda: ()):
            graded = grader.grade(lay(self.root, grader.places), [fails, has_none, first, broken, last])
        self.assertEqual([FAILED, PASSED, PASSED, FAILED, PASSED], [verdict.status for verdict in graded])
        self.assertIs(does_not, graded[3])
        ids = [task.id for task in (fails, has_none, first, broken, last)]
        self.assertEqual([("asan", ids), ("begins", "tsan"), *(("asan", each) for each in ids), ("ends", "tsan"),
                          ("tsan", ids[2:]), ("tsan", first.id), ("tsan", last.id)], asked)

    def refused(self, *words):
        """The line with which a command is refused, before anything is compiled."""
        options = grade.parse_options([*map(str, words), "--build", str(self.root / "build")], ROOT)
        with self.assertRaises(CourseworkError) as caught:
            grade.grade(options, ROOT)
        self.assertFalse((self.root / "build").exists())
        return str(caught.exception)

    def test_words_that_are_no_task_and_no_submission_are_told(self):
        for words, fault in (((self.root, "9"), "no task or submission 9, expected one of 01.1, "),
                             (("021", self.root), "no task or submission 021, expected one of 01.1, "),
                             (("foo",), "no task or submission foo, expected one of 01.1, "),
                             ((self.root / "x",), "there is no folder or file"),
                             ((self.root, "/"), "two submissions")):
            self.assertIn(fault, self.refused(*words))

    def test_verdicts_of_before_do_not_stay_and_no_place_for_new_ones_is_told(self):
        old = self.write("old.json", "{}")
        self.refused("foo", "--json", old)
        self.assertFalse(old.exists())
        link = self.root / "link.json"
        link.symlink_to(self.write("old.json", "{}"))
        self.refused("foo", "--json", link)
        self.assertTrue(link.is_symlink() and not link.exists())
        pipe = self.root / "pipe.json"
        os.mkfifo(pipe)
        for place, what in ((self.root, "it is a folder"), (pipe, "it exists and is not a regular file"),
                            (self.root / "absent/x.json", "No such file or directory")):
            told = self.refused("--json", place)
            self.assertIn(f"--json {place}: {what}", told)
            self.assertIn("expected a file's name", told)
        for option in ("--json", "--gradescope"):
            self.assertIn(f"{option} {old}: that is the submission", self.refused(self.write("old.json", "{}"), option, old))
        self.assertTrue(old.exists())
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(grade.main(["--json", "/proc/x.json"]), 2)
        self.assertIn("/proc/x.json", said.getvalue())

    def test_a_verdict_for_people(self):
        verdict = Verdict("02.1", "the first", FAILED, 2, how="assertion", case="A case", asserted="a == b",
                          found="1 == 2", hint="rounded?", file="t.cpp", line=7, partly={"The simplest": 0.5})
        text = "\n".join(report.lines_of(verdict))
        for words in ("failed", "0.5 of 2", "1 == 2", "rounded?", "t.cpp:7", "The simplest (0.5 of 2)"):
            self.assertIn(words, text)
        verdict.line = 0  # only the file is known
        self.assertEqual("      at:       t.cpp", report.lines_of(verdict)[-2])


if __name__ == "__main__":
    unittest.main()
