"""Coursework: the grader's words for what a student's program and tree do."""

import contextlib
import io
import json
import os
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
from coursework import CourseworkError, solutions, tasks  # noqa: E402
from coursework.verdict import FAILED, OPEN, PASSED, verdict_of  # noqa: E402
from coursework.workshop import Workshop  # noqa: E402
from coursework_support import Folder, ROW, SOURCE  # noqa: E402
from processes import gone  # noqa: E402

TASK = tasks.Task(**{**ROW, "symbols": ("first",), "deadline": 2, "race": "step N was not awaited"})
EXPRESSION = """<Info>
          hint: is it rounded?
        </Info>
        <Expression success="false" type="CHECK" filename="../source/tests/coursework/t.cpp" line="7">
          <Original>
            size == 3
          </Original>
          <Expanded>
            2 == 3
          </Expanded>
        </Expression>"""
EXCEPTION = """<Info>hint: who waits?</Info>
        <Exception filename="../source/tests/coursework/t.cpp" line="4">{}</Exception>"""
XML = """<?xml version="1.0" encoding="UTF-8"?>
<Catch name="fake"><Group name="fake">
  <TestCase name="A case" tags="[task02.1]" filename="../source/tests/coursework/t.cpp" line="3">
        {}
    <OverallResult success="{}"/>
  </TestCase>
</Group></Catch>"""


class TestVerdict(Folder):
    """The grader's words for what a program may do, with shell scripts as programs."""

    def verdict(self, xml="", script="", race=False, success="false", task=TASK,
                own_lines=range(0)):
        program = self.write("program", f"""#!/bin/sh
out=$5
printf '{{"event": "start", "case": "A case"}}\\n' >"$LOCKSTEP_TEST_LOG"
cat >"$out" <<'XML'
{XML.format(xml, success) if xml is not None else ""}
XML
ended() {{ printf '{{"event": "end", "case": "A case", "status": ""}}\\n' >>"$LOCKSTEP_TEST_LOG"; }}
{script or "ended"}
""", 0o755)
        return verdict_of(task, program, Workshop(self.root).path_in_tree, race=race,
                          own_lines=own_lines)

    def test_passed(self):
        verdict = self.verdict(success="true")
        self.assertEqual((verdict.status, verdict.points, verdict.of), (PASSED, 1, 1))

    def test_a_failed_assertion_with_both_values_and_the_hint(self):
        verdict = self.verdict(EXPRESSION + EXPRESSION.replace("7", "9"), "ended; exit 1")
        self.assertEqual((verdict.status, verdict.how, verdict.points), (FAILED, "assertion", 0))
        self.assertEqual((verdict.asserted, verdict.found), ("size == 3", "2 == 3"))
        self.assertEqual(verdict.hint, "is it rounded?")
        self.assertEqual((verdict.case, verdict.file, verdict.line),
                         ("A case", "tests/coursework/t.cpp", 7))

    def test_an_error_of_a_rank_is_told(self):
        said = "rank 1 waits in all_reduce number 3, rank 0 never called it"
        verdict = self.verdict(EXCEPTION.format(said), "ended; exit 1")
        self.assertEqual((verdict.how, verdict.text, verdict.hint),
                         ("exception", said, "who waits?"))

    def test_a_crash_names_its_signal(self):
        verdict = self.verdict(None, "echo '  what():  bad' >&2; kill -SEGV $$")
        self.assertEqual((verdict.how, verdict.case), ("crash", "A case"))
        self.assertEqual(verdict.text, "crashed (SIGSEGV): bad")

    def test_a_crash_and_a_hang_keep_their_hint(self):
        hints = 'printf why >"$LOCKSTEP_HINT"; '
        for end in ("kill -SEGV $$", "while :; do :; done"):
            self.assertEqual(self.verdict(None, hints + end).hint, "why")
        self.assertEqual(self.verdict("", hints + "ended", success="true").hint, "")

    def test_endless_output_is_told(self):
        verdict = self.verdict(None, "exec head -c 100000000 /dev/zero")
        self.assertEqual(verdict.text, "crashed (SIGXFSZ: more than 64 MiB were written)")

    def test_endless_memory_is_not_given(self):
        script = 'ended; echo "$ASAN_OPTIONS" | grep -q hard_rss_limit_mb=4096 || exit 3; echo "{}"; exit 1'
        said = "AddressSanitizer: hard rss limit exhausted (4096Mb vs 4100Mb)"
        self.assertEqual("more than 4 GiB of memory were taken",
                         self.verdict(None, script.format(said)).text)

    def test_what_address_sanitizer_finds_is_told_in_words(self):
        report = ("==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x1\\n{} of size 8\\n"
                  "    #0 0x1 in copy /usr/include/x.h:1\\n    #1 0x2 in f {}:5 (program+0x1)\\n")
        def told(access, file):
            script = f"printf why >$LOCKSTEP_HINT; printf '{report.format(access, file)}' >&2; exit 1"
            return self.verdict(None, script, own_lines=range(3, 9))
        verdict = told("READ", "../source/02-x/a.cpp")
        self.assertEqual((verdict.how, verdict.file, verdict.line, verdict.hint),
                         ("memory", "02-x/a.cpp", 5, "why"))
        self.assertEqual("AddressSanitizer: heap-buffer-overflow: the task reads beyond the end, or "
                         "before the beginning, of memory that was taken", verdict.text)
        # What a kernel does that the task gave wrong memory: the task's first line is to blame.
        elsewhere = told("WRITE", "../source/common/kernels/devices.cpp")
        self.assertEqual(("02-x/a.cpp", 3), (elsewhere.file, elsewhere.line))
        self.assertIn("the task writes", elsewhere.text)

    def test_an_end_in_the_middle_is_no_pass(self):
        self.assertEqual(self.verdict(None, "exit 0").how, "crash")
        self.assertIn("status 9: over", self.verdict(None, "ended; echo over; exit 9").text)

    def test_an_endless_program_is_ended_with_all_that_it_started(self):
        begin = time.monotonic()
        pid_file = self.root / "pid"
        verdict = self.verdict(None, f"sleep 1000 & echo $! >{pid_file}; while :; do :; done")
        self.assertEqual((verdict.how, verdict.case), ("deadline", "A case"))
        self.assertFalse(verdict.waits)
        self.assertRegex(verdict.text, r"^still running after \d+ s.* endless")
        self.assertLess(time.monotonic() - begin, 20)
        self.assertTrue(gone(int(pid_file.read_text())))

    def test_what_leaves_its_session_is_ended_too(self):
        pid_file = self.root / "pid"
        leaves = f"setsid sh -c 'echo $$ >{pid_file}; exec sleep 1000' & "
        self.verdict("", leaves + f"while [ ! -s {pid_file} ]; do :; done; ended", success="true")
        self.assertTrue(gone(int(pid_file.read_text())))

    def test_long_values_are_cut(self):
        verdict = self.verdict(EXPRESSION.replace("2 == 3", "2" * 5000), "ended; exit 1")
        self.assertEqual(verdict.found, "2" * 300 + "... (5000 characters)")
        said = self.verdict(EXCEPTION.format("x" * 400), "ended; exit 1").text
        self.assertEqual(said, "x" * 300 + "... (400 characters)")

    def test_the_callers_options_for_thread_sanitizer_stay(self):
        script = 'ended; echo "$TSAN_OPTIONS"; exit 9'
        with mock.patch.dict(os.environ, {"TSAN_OPTIONS": "verbosity=1"}):
            text = self.verdict(None, script, race=True).text
        self.assertIn("verbosity=1:halt_on_error=1", text)
        self.assertIn("history_size=7", text)

    def test_a_race_is_told_in_the_words_of_the_table(self):
        report = ("WARNING: ThreadSanitizer: data race (pid=7)\\n  Write of size 4\\n"
                  "    #0 memcpy x.h:1\\n    #1 f ../source/02-x/a.cpp:5 (program+0x1)\\n"
                  "  Previous read of size 4\\n    #0 g ../source/02-x/a.cpp:8 (program+0x2)\\n")
        script = f"printf '{report}' >&2; exit 66"
        verdict = self.verdict(None, script, race=True)
        self.assertEqual((verdict.how, verdict.file, verdict.line), ("race", "02-x/a.cpp", 5))
        self.assertEqual(verdict.text, "ThreadSanitizer: data race: step N was not awaited")
        own = self.verdict(None, script, race=True, own_lines=range(7, 10))
        self.assertEqual((own.file, own.line), ("02-x/a.cpp", 8))

    def test_a_task_without_a_test_is_no_pass(self):
        program = self.write("program", "#!/bin/sh\necho '<Catch/>' >\"$5\"\n", 0o755)
        with self.assertRaisesRegex(CourseworkError, "no test case carries"):
            verdict_of(TASK, program, str)

    def test_a_program_that_ends_before_its_tests_is_no_pass(self):
        verdict = verdict_of(TASK, self.write("program", "#!/bin/sh\nexit 0\n", 0o755), str)
        self.assertEqual((verdict.status, verdict.how), (FAILED, "crash"))
        self.assertIn("before its first test", verdict.text)

    def test_nothing_is_left_in_the_temporary_folder(self):
        before = set(os.listdir(tempfile.gettempdir()))
        self.verdict(None, 'touch "$TMPDIR/x" y; kill -SEGV $$')
        left = set(os.listdir(tempfile.gettempdir())) - before
        self.assertEqual([name for name in left if name.startswith("lockstep-grade")], [])


class TestGrade(Folder):
    def test_ninjas_words_are_told_apart_by_target(self):
        output = ("[1/3] ok\nFAILED: a.o \ng++ a.cpp\n../source/02-x/a.cpp:5:3: error: no\n"
                  "[2/3] ok\nFAILED: b \nld: undefined reference to `f()'\n[3/3] ok\n")
        failed = grade.failed_edges(output)
        self.assertEqual(set(failed), {"a.o", "b"})
        self.assertNotIn("undefined", failed["a.o"])

    def test_the_solved_tree_itself_cannot_be_graded(self):
        for folder in ("common", "02-x"):
            (self.root / folder).mkdir()
        with self.assertRaisesRegex(CourseworkError, "no prebuilt solutions"):
            grade.Grader(self.root, self.root, None, print)

    def grader(self, section='open_task("x");', script="exit 1", outputs=()):
        """A grader of a tree with one task, whose lines are `section`. Its program is a shell
        script; `outputs` are what the compiler prints, one call after the other."""
        self.write(tasks.TABLE, json.dumps({"tasks": [ROW]}))
        for folder in ("", f"{solutions.OPEN}/"):
            self.write(folder + "02-x/a.cpp", SOURCE.replace("return 1;", section))
        self.write("common/a.h", "int a;\n")
        if not (self.root / solutions.MANIFEST).exists():
            solutions.write_manifest(self.root)
        program = "asan/tests/coursework/grade-02.1"
        self.write(f"build/{program}", f"#!/bin/sh\n{script}\n", 0o755)
        workshop = Workshop(self.root / "build")
        said = iter(outputs)
        workshop.configure = lambda *_: None
        workshop.compile = lambda *_: next(said, (0, ""))
        workshop.objects = lambda flavour: {"02-x/a.cpp": "a.o"}
        return grade.Grader(self.root, self.root, workshop, lambda text: None, races=False)

    def verdict(self, *words, **options):
        grader = self.grader(*words, **options)
        return next(grader.grade(grader.tasks))

    def graded_again(self, grader):
        """The verdict after the tree has changed."""
        grader = grade.Grader(self.root, self.root, grader.workshop, grader.say, races=False)
        return next(grader.grade(grader.tasks))

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
        grader, asked = self.grader(), []
        grader.workshop.compile = lambda *words: asked.append(words) or (0, "")
        self.assertEqual(OPEN, next(grader.grade(grader.tasks)).status)
        self.assertEqual([], asked)
        grader = self.grader("return 1;")
        grader.workshop.compile = lambda *words: asked.append(words) or (0, "")
        next(grader.grade(grader.tasks))
        self.assertEqual([("asan", ["tests/coursework/grade-02.1"], "task 02.1")],
                         [words[:3] for words in asked])

    def test_a_crash_names_changed_headers(self):
        grader = self.grader("return 1;", "kill -SEGV $$")
        self.assertNotIn("a.h", next(grader.grade(grader.tasks)).text)
        self.write("common/a.h", "long a;\n")
        self.assertIn("crashed (SIGSEGV); the prebuilt solutions were compiled with common/a.h as",
                      self.graded_again(grader).text)

    def test_a_task_file_that_is_a_dangling_link_is_missing(self):
        grader = self.grader()
        (self.root / "02-x/a.cpp").unlink()
        (self.root / "02-x/a.cpp").symlink_to("none")
        verdict = self.graded_again(grader)
        self.assertEqual((verdict.how, verdict.text), ("compile", "the file 02-x/a.cpp is missing"))

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
            self.verdict("return 1;", outputs=[(1, output)])

    def test_a_warning_in_the_lines_of_a_failed_task_is_told(self):
        output = ("../source/02-x/a.cpp:1:1: warning: not mine\n"
                  "../source/02-x/a.cpp:3:1: warning: no return statement [-Wreturn-type]\n")
        verdict = self.verdict("int i;", outputs=[(0, output)])
        self.assertEqual(verdict.warning, "02-x/a.cpp:3: no return statement [-Wreturn-type]")
        self.assertIn("warning: ", "\n".join(grade.lines_of(verdict)))

    def refused(self, *words):
        """The line with which a command is refused, before anything is compiled."""
        options = grade.parse_options([*map(str, words), "--build", str(self.root / "build")], ROOT)
        with self.assertRaises(CourseworkError) as caught:
            grade.grade(options, ROOT)
        self.assertFalse((self.root / "build").exists())
        return str(caught.exception)

    def test_words_that_are_no_task_and_no_tree_are_told(self):
        file = self.write("file")
        for words, fault in (((self.root, "9"), "no task or folder 9, expected one of 01.1, "),
                             (("021", self.root), "no task or folder 021, expected one of 01.1, "),
                             (("foo",), "no task or folder foo, expected one of 01.1, "),
                             ((self.root / "x",), "there is no folder"),
                             ((file,), "is a file, expected a student's tree"),
                             ((self.root, "/"), "two trees"),
                             (("/",), "/ is no tree of Lockstep")):
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
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(grade.main(["--json", "/proc/x.json"]), 2)
        self.assertIn("/proc/x.json", said.getvalue())

    def test_a_verdict_for_people(self):
        verdict = grade.Verdict("02.1", "the first", FAILED, 2, how="assertion", case="A case",
                                asserted="a == b", found="1 == 2", hint="rounded?", file="t.cpp",
                                line=7)
        text = "\n".join(grade.lines_of(verdict))
        for words in ("failed", "0 of 2", "1 == 2", "rounded?", "t.cpp:7"):
            self.assertIn(words, text)


if __name__ == "__main__":
    unittest.main()
