"""The runner of `lockstep test`, with small fake executables instead of Catch2 ones."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import case_records  # noqa: E402
import compile_tests  # noqa: E402
import progress  # noqa: E402
import run_tests  # noqa: E402
import suites  # noqa: E402
from progress import CORES  # noqa: E402
from suites import Build, Row  # noqa: E402


def start(name):
    return f"echo '{json.dumps({'event': 'start', 'case': name})}' >> $LOCKSTEP_TEST_LOG\n"


def end(name, status="passed", reason="", seconds=0.5):
    line = {"event": "end", "case": name, "status": status, "reason": reason, "seconds": seconds}
    return f"echo '{json.dumps(line)}' >> $LOCKSTEP_TEST_LOG\n"


def whole(name, **how):
    return start(name) + end(name, **how)


class FakeExecutables(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = Path(self.folder.name)

    def run_scripts(self, *scripts, deadline=30, arguments=()):
        """Runs each script as the one row of its own build; returns (status, output lines)."""
        rows = {}
        for number, script in enumerate(scripts):
            path = self.root / f"script{number}"
            path.write_text("#!/bin/sh\n" + script)
            path.chmod(0o755)
            rows[f"fake{number}"] = [Row("unit", frozenset(["unit"]), (str(path),), deadline)]
        return self.run_rows(rows, arguments)

    def run_rows(self, rows, arguments=()):
        """Runs builds that need no compiler, whose rows are given by name."""
        builds = [Build(name, name, ()) for name in rows]
        with unittest.mock.patch.multiple(
                run_tests, configure=lambda build, root: "",
                read_rows=lambda folder: rows[folder.name]):
            return self.run_builds(builds, arguments)

    def run_builds(self, builds, arguments=()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = run_tests.main(list(arguments), builds, self.root)
        return status, out.getvalue().splitlines()

    def failure_lines(self, lines):
        return [line for line in lines[lines.index("Failed:"):] if line.startswith("  ")]


class TestCounting(FakeExecutables):
    def test_what_failed_stands_last_with_its_reason_in_one_line(self):
        _, lines = self.run_scripts(whole("a", status="failed", reason="x.cpp:3:   1  ==  2")
                                    + whole("b", status="skipped", reason="no GPU"))
        self.assertEqual(lines[-4:], ["Failed:", "  fake0 unit: a: x.cpp:3: 1 == 2", "",
                                      "0 passed, 1 failed, 1 skipped"])

    def test_counts_cases_over_all_executables(self):
        status, lines = self.run_scripts(
            whole("a") + whole("b"), whole("c") + whole("d", status="skipped", reason="no GPU"))
        self.assertEqual(lines[-1], "3 passed, 0 failed, 1 skipped")
        self.assertEqual(status, 0)

    def test_a_failed_case_fails_the_run_and_shows_the_output(self):
        status, lines = self.run_scripts(
            whole("good") + "echo expected 3, got 4\n" + whole("bad", status="failed") + "exit 1\n")
        self.assertEqual(lines[-1], "1 passed, 1 failed, 0 skipped")
        self.assertEqual(status, 1)
        self.assertIn("    expected 3, got 4", lines)
        self.assertEqual(self.failure_lines(lines), ["  fake0 unit: bad"])

    def test_a_crash_fails_the_case_that_was_running(self):
        status, lines = self.run_scripts(whole("first") + start("second") + "kill -SEGV $$\n")
        self.assertEqual(self.failure_lines(lines), ["  fake0 unit: second: killed by SIGSEGV"])
        self.assertEqual(lines[-1], "1 passed, 1 failed, 0 skipped")
        self.assertEqual(status, 1)

    def test_an_exit_in_the_middle_of_a_case_fails_it(self):
        _, lines = self.run_scripts(start("sanitized") + "exit 66\n", start("quits") + "exit 0\n")
        failures = "\n".join(self.failure_lines(lines))
        self.assertIn("sanitized: exited with status 66", failures)
        self.assertIn("quits: the process ended with status 0 in the middle", failures)
        self.assertEqual(lines[-1], "0 passed, 2 failed, 0 skipped")

    def test_a_time_out_fails_the_running_case_and_ends_its_children(self):
        mark = self.root / "still-alive"
        script = start("slow") + f"(sleep 3; touch {mark}) & sleep 30\n"
        begin = time.monotonic()
        status, lines = self.run_scripts(script, deadline=1)
        self.assertLess(time.monotonic() - begin, 25)
        self.assertEqual(self.failure_lines(lines),
                         ["  fake0 unit: slow: ran past its deadline of 1 s"])
        self.assertEqual(status, 1)
        time.sleep(3)
        self.assertFalse(mark.exists(), "a grandchild outlived the deadline")

    def test_a_row_that_is_ended_ends_what_it_started_in_other_sessions(self):
        mark = self.root / "still-alive"
        other = f"setsid sh -c 'sleep 3; touch {mark}'"
        script = start("slow") + f"trap 'kill -KILL $other; exit' TERM\n{other} & other=$!\nwait\n"
        self.run_scripts(script, deadline=1)
        time.sleep(3)
        self.assertFalse(mark.exists(), "a process of another session outlived the deadline")

    # A thread sends itself the signal: the kernel may choose any, and only the main one handles it.
    SIGNALLED = """import signal, sys, threading, time
from pathlib import Path
import run_tests
from child_processes import end_by_exception
from suites import Build, Row

folder, number = Path(sys.argv[1]), int(sys.argv[2])

def send():
    while not (folder / "mark").exists():
        time.sleep(0.05)
    time.sleep(0.2)  # the main thread waits by now
    signal.pthread_kill(threading.get_ident(), number)

end_by_exception()
row = Row("unit", frozenset(), ("sh", "-c", f"touch {folder}/mark; tail -f {folder}/mark --pid=$PPID"))
run_tests.configure, run_tests.read_rows = lambda *_: "", lambda _: [row] * 9
threading.Thread(target=send, daemon=True).start()
sys.exit(run_tests.main([], [Build("fake", "fake", ())], folder))
"""

    def test_a_signal_ends_the_run_and_what_it_started(self):
        mark = self.root / "mark"
        for number, status in ((signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)):
            done = subprocess.run(
                [sys.executable, "-c", self.SIGNALLED, str(self.root), str(int(number))],
                cwd=ROOT / "tools", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
            self.assertEqual((done.returncode, done.stdout.decode()), (status, ""))
            mark.unlink()
        left = [path for path in Path("/proc").glob("[0-9]*/cmdline")
                if str(mark).encode() in self.bytes_of(path)]
        self.assertEqual(left, [])

    @staticmethod
    def bytes_of(path):
        try:
            return path.read_bytes()
        except OSError:  # it has ended
            return b""

    def test_a_bad_end_after_good_cases_is_a_failure(self):
        status, lines = self.run_scripts(whole("a") + "exit 23\n")
        self.assertEqual(self.failure_lines(lines),
                         ["  fake0 unit: (after the last case): exited with status 23"])
        self.assertEqual(status, 1)

    def test_an_executable_without_cases_is_a_failure(self):
        status, lines = self.run_scripts("exit 0\n")
        self.assertEqual(lines[-1], "0 passed, 1 failed, 0 skipped")
        self.assertIn("it ran no test case", self.failure_lines(lines)[0])
        self.assertEqual(status, 1)

    def test_a_missing_executable_is_a_failure(self):
        row = Row("unit", frozenset(["unit"]), (str(self.root / "absent"),))
        status, lines = self.run_rows({"fake": [row]})
        self.assertIn("could not be started: No such file", self.failure_lines(lines)[0])
        self.assertEqual(status, 1)

    def test_a_record_line_cut_short_is_read_as_unwritten(self):
        script = whole("a") + start("b") + "printf '{\"event\": \"e' >> $LOCKSTEP_TEST_LOG\n"
        _, lines = self.run_scripts(script + "kill -ABRT $$\n")
        self.assertEqual(self.failure_lines(lines), ["  fake0 unit: b: killed by SIGABRT"])

    def test_a_record_of_another_form_is_a_failure_and_swallows_nothing(self):
        status, lines = self.run_scripts("echo 5 >> $LOCKSTEP_TEST_LOG\n", whole("a"))
        self.assertEqual(lines[-1], "1 passed, 1 failed, 0 skipped")
        self.assertIn("unreadable", self.failure_lines(lines)[0])
        self.assertEqual(status, 1)

    def test_nothing_to_run_is_a_failure(self):
        status, lines = self.run_builds([])
        self.assertEqual((status, lines[-1]), (1, "0 passed, 1 failed, 0 skipped"))

    def test_lists_the_slowest_cases_first(self):
        script = "".join(whole(f"case {n}", seconds=float(n)) for n in range(12))
        _, lines = self.run_scripts(script)
        listed = [line.split(": ")[1] for line in lines if " s  fake0 unit: " in line]
        self.assertEqual(listed, [f"case {n}" for n in range(11, 1, -1)])


class TestSkips(FakeExecutables):
    def test_every_reason_stands_above_the_closing_line(self):
        _, lines = self.run_scripts(whole("a", status="skipped", reason="no tc on this machine"))
        self.assertIn("  fake0 unit: a: no tc on this machine", lines[lines.index("Skipped:"):])

    def test_an_undeclared_reason_is_a_failure(self):
        status, lines = self.run_scripts(whole("a", status="skipped", reason="too tired"))
        self.assertEqual(lines[-1], "0 passed, 1 failed, 0 skipped")
        self.assertIn("'too tired'", self.failure_lines(lines)[0])
        self.assertEqual(status, 1)

    def test_an_unknown_status_is_a_failure(self):
        _, lines = self.run_scripts(whole("a", status="perhaps"))
        self.assertEqual(lines[-1], "0 passed, 1 failed, 0 skipped")

    def test_an_absent_reason_is_not_allowed(self):
        case = case_records.judged(case_records.Case("w", "n", "skipped", ""))
        self.assertEqual(case.status, "failed")

    def test_what_the_sources_give_as_a_reason_is_declared_and_leaves_the_case(self):
        found = []
        for path in (path for path in (ROOT / "tests").rglob("*") if path.suffix in (".h", ".cpp")):
            head = ""  # the line that begins a function or macro
            for line in re.sub("//.*", "", path.read_text()).splitlines():
                if re.match(r"[^\s}#]|#\s*define", line):
                    head = line
                for reason in re.findall(r'LOCKSTEP_SKIP\(\s*(?:std::string\()?("[^"]*"|\w)', line):
                    found.append(reason)
                    # It returns: in a helper, the case would go on.
                    self.assertRegex(head, "^(TEST_CASE|#define LOCKSTEP_)", path)
                    self.assertTrue(reason[0] != '"' or reason[1:].startswith(case_records.ALLOWED_SKIPS),
                                    f"{path}: {reason} is not in tools/case_records.py")
        self.assertIn('"no libsodium"', found)

    def test_where_tsan_cannot_run_each_executable_is_one_skip(self):
        row = Row("unit-core", frozenset(["unit"]), ("false",))
        with unittest.mock.patch.object(run_tests, "tsan_wrapper", lambda: None):
            status, lines = self.run_rows({"tsan": [row]})
        self.assertEqual((status, lines[-1]), (0, "0 passed, 0 failed, 1 skipped"))
        self.assertIn("  tsan unit-core: every case: TSan cannot map its shadow", lines)

    def test_where_no_gpu_is_what_needs_one_is_neither_compiled_nor_run(self):
        row = Row("gpu-core", frozenset(["gpu"]), ("false",))
        for gpu, needed, expected in ((None, {}, "0 passed, 0 failed, 1 skipped"),
                                      ("a GPU", {}, "0 passed, 1 failed, 0 skipped"),
                                      (None, {"LOCKSTEP_NEEDS_GPU": "1"},
                                       "0 passed, 1 failed, 0 skipped")):
            with unittest.mock.patch.object(run_tests, "find_gpu", lambda: (gpu, "no GPU: why")), \
                    unittest.mock.patch.dict(os.environ, needed):
                _, lines = self.run_rows({"default": [row]})
            self.assertEqual(lines[-1], expected)
            self.assertEqual("  default gpu-core: every case: no GPU: why" in lines, not gpu and not needed)

    def test_full_adds_a_builds_own_options(self):
        told = []
        build = Build("fake", "fake", ("-Done=1",), full_options=("-Done=2",))
        with unittest.mock.patch.multiple(run_tests, read_rows=lambda folder: [],
                                          configure=lambda build, root: told.append(build.options) or ""):
            for arguments in ((), ("--full",)):
                self.run_builds([build], arguments)
        self.assertEqual(told, [("-Done=1",), ("-Done=1", "-Done=2")])

    def test_what_only_full_has_is_not_configured_else(self):
        told = []
        builds = [Build("fake", "fake", ()), Build("races", "races", (), only_full=True)]
        with unittest.mock.patch.multiple(run_tests, read_rows=lambda folder: [],
                                          configure=lambda build, root: told.append(build.name) or ""):
            for arguments in ((), ("--full",)):
                self.run_builds(builds, arguments)
        self.assertEqual(told, ["fake", "fake", "races"])


def row(name, *suites, cases="", sources=(), targets=()):
    command = (name, "-#", cases) if cases else (name,)
    return Row(name, frozenset(suites), command, sources=sources, targets=targets)


class TestSelection(FakeExecutables):
    def setUp(self):
        super().setUp()
        self.source = self.root / "tests/unit/a_test.cpp"
        self.source.parent.mkdir(parents=True)
        self.source.write_text('TEST_CASE("a", "[loader][row7]") { b["[0]"]; }\n')
        (self.root / "04-ddp").mkdir()
        (self.root / "04-ddp/main.cpp").touch()
        self.rows = [row("unit-04", "unit", "04", sources=(str(self.source),)),
                     row("unit-core", "unit", "core", "full"), row("readme-04", "readme", "04"),
                     row("faults", "faults", cases="[#a],[#b]~[c]", sources=(str(self.source),))]

    def chosen(self, part, full=False):
        return [each.name for each in suites.select(self.rows, part, full, self.root)]

    def test_what_waits_for_full_is_left_out_else(self):
        self.assertEqual(["unit-04", "readme-04", "faults"], self.chosen(None))
        self.assertEqual(["unit-04", "unit-core"], self.chosen("unit", full=True))

    def test_a_stage_is_all_its_suites(self):
        self.assertEqual(["unit-04", "readme-04"], self.chosen("04"))

    def test_a_tag_narrows_every_filter_where_a_source_has_it(self):
        chosen = suites.select(self.rows, "row7", False, self.root)
        self.assertEqual([("unit-04", "[row7]"), ("faults", "-#", "[#a][row7],[#b]~[c][row7]")],
                         [each.command for each in chosen])

    def test_an_unknown_word_is_refused_with_the_list(self):
        for word in ("lodaer", "07", "core", "0"):
            why = suites.refusal(word, self.root)
            self.assertRegex(why, rf"^'{word}' is no part .*kind \(unit, .*stage \(04\) .*tag "
                                  r"\(loader, row7\)$")
        for word in ("loader", "04", "unit"):
            self.assertEqual("", suites.refusal(word, self.root))
        for words in (["lodaer"], [""], ["[]"], ["04", "unit"], ["-x"]):
            with (contextlib.redirect_stderr(io.StringIO()) as said,
                  self.assertRaises(SystemExit) as end):
                run_tests.main(words, [], self.root)
            self.assertEqual((end.exception.code, said.getvalue().count("\n")), (2, 1), words)
            self.assertIn("a stage (04) or a tag (loader, row7)", said.getvalue())

    def test_a_list_of_tags_is_short(self):
        self.assertEqual("a, b, row2 ... row4, row9, row11 ... row12", suites.numbered(
            {"row11", "b", "row2", "row9", "row12", "a", "row4", "row3"}))

    def test_with_a_tag_an_executable_may_have_no_case_but_not_all(self):
        rows = {"fake": [replace(self.rows[0], command=("true",))]}
        status, lines = self.run_rows(rows, ["loader"])
        self.assertEqual(status, 1)
        self.assertIn("no test was found", "\n".join(lines))

    def test_full_is_told_to_the_executables(self):
        script = 'if [ "$LOCKSTEP_FULL" = 1 ]; then\n' + whole("full") + "fi\n"
        self.assertEqual(self.run_scripts(script)[1][-1], "0 passed, 1 failed, 0 skipped")
        status, lines = self.run_scripts(script, arguments=["--full"])
        self.assertEqual((status, lines[-1]), (0, "1 passed, 0 failed, 0 skipped"))


class TestBuilding(FakeExecutables):
    def make_project(self, source):
        (self.root / "meson.build").write_text(
            "project('tiny', 'cpp')\nsubdir('tests/unit')\n")
        (self.root / "meson_options.txt").write_text("option('tests', type: 'feature')\n")
        unit = self.root / "tests/unit"
        unit.mkdir(parents=True)
        (unit / "meson.build").write_text(
            "program = executable('unit-core', 'unit_test.cpp')\n"
            "started = executable('started', 'good.cpp')\n"
            "executable('nobody-wants', 'broken.cpp')\n"
            "test('unit-core', program, suite: ['unit', 'core'], depends: started, env: {'A': 'b'})\n"
            "test('waits', started, suite: ['unit', 'full'])\n")
        (unit / "unit_test.cpp").write_text(source)
        (unit / "good.cpp").write_text("int main() { return 0; }\n")
        (unit / "broken.cpp").write_text("this is not C++\n")
        return Build("tiny", "build-tiny", ())

    # Writes one case's record, as the listener would.
    SOURCE = r"""#include <cstdio>
#include <cstdlib>
int main() {
  std::FILE* log = std::fopen(std::getenv("LOCKSTEP_TEST_LOG"), "a");
  std::fputs("{\"event\":\"start\",\"case\":\"c\"}\n", log);
  std::fputs("{\"event\":\"end\",\"case\":\"c\",\"status\":\"passed\"}\n", log);
  return std::fclose(log);
}
"""

    def test_builds_and_runs_an_executable(self):
        status, lines = self.run_builds([self.make_project(self.SOURCE)])
        self.assertEqual((status, lines[-1]), (0, "1 passed, 0 failed, 0 skipped"))

    def test_the_rows_are_mesons_tests(self):
        build = self.make_project(self.SOURCE)
        self.assertEqual(compile_tests.configure(build, self.root), "")
        folder = self.root / build.folder
        first, second = suites.read_rows(folder)
        self.assertEqual(("unit-core", {"unit", "core"}, {"A": "b"}),
                         (first.name, first.suites, first.environment))
        self.assertEqual([str(self.root / "tests/unit/unit_test.cpp")], list(first.sources))
        self.assertEqual(["tests/unit/started", "tests/unit/unit-core"],
                         compile_tests.targets_of([first, second], folder))

    def test_of_a_unity_build_the_rows_know_what_it_includes(self):
        build = self.make_project(self.SOURCE)
        self.assertEqual(compile_tests.configure(replace(build, options=("-Dunity=on",)), self.root), "")
        row = suites.read_rows(self.root / build.folder)[0]
        self.assertEqual([Path(source).name for source in row.sources], ["unit_test.cpp"])
        self.assertTrue(Path(row.sources[0]).samefile(self.root / "tests/unit/unit_test.cpp"))

    @unittest.skipUnless((ROOT / "build-test/lockstep-options").is_file(), "no build-test")
    def test_every_tag_of_this_tree_selects_a_row(self):
        rows = suites.read_rows(ROOT / "build-test")
        unknown = [tag for tag in suites.tags(ROOT) if not suites.select(rows, tag, True, ROOT)]
        self.assertEqual(unknown, [])

    def test_new_options_configure_anew(self):
        build = self.make_project(self.SOURCE)
        self.assertEqual(compile_tests.configure(build, self.root), "")
        changed = replace(build, options=("-Dbuildtype=release",))
        self.assertEqual(compile_tests.configure(changed, self.root), "")
        done = subprocess.run(["meson", "configure", str(self.root / "build-tiny")],
                              capture_output=True, text=True, check=True)
        self.assertRegex(done.stdout, r"buildtype\s+release")

    def test_a_warning_fails_every_row_of_the_build_and_is_shown(self):
        warning = "int main() { int never_used; }\n"
        build = self.make_project(warning)
        build = replace(build, options=("-Dwarning_level=3",))
        status, lines = self.run_builds([build])
        self.assertEqual((status, lines[-1]), (1, "0 passed, 1 failed, 0 skipped"))
        self.assertIn("  tiny unit-core: (the executable): could not be built", lines)
        self.assertTrue(any("never_used" in line for line in lines))


def followed(work, say, **how):
    run = progress.Progress(say, **how)
    run.expect(work)
    return run


class TestProgress(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / ".cache").mkdir()
        (self.root / ".cache/test-times.json").write_text('{"compile a": 600, "a b": 60}')
        self.said = []

    def progress(self, **how):
        return followed({"compile a": 300 * CORES, "a b": 30 * CORES}, self.said.append, **how)

    def test_says_what_runs_how_far_it_is_and_how_long_is_left(self):
        run = self.progress()
        with run.step("compile a") as how_far:
            how_far("3 of 4", 0.5)
            run.begin -= 300  # seconds ago, in which half was done: twice as slow as expected
            self.assertRegex(run.line(), r"^5:00  compile a \(3 of 4\); about [56] min left$")
        run.begin = time.monotonic() - 300
        with run.step("a b"):
            self.assertRegex(run.line(), r"^5:00  a b; about 30 s left$")

    def test_the_pace_corrects_what_was_expected_and_one_step_more_is_not_over(self):
        for done, elapsed, said in ((0, 0, "100 s|2 min"), (5, 50, "50 s"), (2, 60, "2 min"), (5, 10, "25 s"),
                                    (9, 270, "25 s"), (9, 90, "10 s")):
            run = followed({number: 10 * CORES for number in range(10)}, self.said.append)
            for number in range(done):
                with run.step(number):
                    pass
            run.begin -= elapsed
            self.assertRegex(run.line(), f"starting; about ({said}) left$")

    def test_times_are_as_exact_as_an_estimate_is(self):
        self.assertEqual([progress.in_words(seconds) for seconds in (0.2, 7, 43, 97, 101, 233)],
                         ["5 s", "5 s", "45 s", "95 s", "2 min", "4 min"])

    def test_a_line_comes_again_and_again_and_ends_with_the_run(self):
        with self.progress(every=0.05).shown():
            time.sleep(0.4)
        self.assertGreater(len(self.said), 1)
        count = len(self.said)
        time.sleep(0.2)
        self.assertEqual(count, len(self.said))

    def test_what_was_measured_is_known_next_time(self):
        times = progress.Times(self.root)
        self.assertEqual((600, 60), (times.of("compile a"), times.of("a b")))
        times.keep({"a b": 0.31, "compile c": 2.0})
        again = progress.Times(self.root)
        self.assertEqual((600, 0.3, 2 * CORES), tuple(map(again.of, ("compile a", "a b", "compile c"))))


if __name__ == "__main__":
    unittest.main()
