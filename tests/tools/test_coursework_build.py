"""Coursework: what the grader builds with, and the solutions that are cut out of objects."""

import json
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

from coursework import CourseworkError, sandbox, solutions, tasks  # noqa: E402
from coursework import workshop as workshop_module  # noqa: E402
from coursework.workshop import HEADERS, Workshop  # noqa: E402
from coursework_support import Folder, ROW  # noqa: E402
from processes import start  # noqa: E402


class TestWorkshop(Folder):
    def test_a_folder_that_was_moved_or_copied_is_configured_anew(self):
        configured = []

        def meson(command):
            if command[0] == "meson":
                configured.append(command[-1] if "--reconfigure" in command else "anew")
                next(Path(word) for word in command if str(word).endswith("plain")).mkdir(
                    parents=True, exist_ok=True)
            return "", "x"
        with mock.patch.object(workshop_module, "run", meson):
            Workshop(self.root / "a").configure("plain", "grade")
            Workshop(self.root / "a").configure("plain", "grade")
            shutil.copytree(self.root / "a", self.root / "b")
            Workshop(self.root / "b").configure("plain", "grade")
        self.assertEqual(len(configured), 2)

    def test_a_folder_with_things_of_others_is_not_emptied(self):
        thesis = self.write("mine/source/thesis.txt")
        with self.assertRaisesRegex(CourseworkError, "mine has a source that no command for coursework made"):
            with Workshop(self.root / "mine").locked(print):
                pass
        self.assertTrue(thesis.is_file())
        for _ in range(2):
            with Workshop(self.root / "new").locked(print):
                Workshop(self.root / "new").fill({"a.cpp": "x"})

    def test_a_table_that_changed_is_configured_anew(self):
        configured = []

        def meson(command):
            configured.append(command[0])
            (self.root / "plain").mkdir(exist_ok=True)
            return "", "x"
        with mock.patch.object(workshop_module, "run", meson):
            for text in ("1", "2", "2"):
                self.write("source/" + tasks.TABLE, text)
                Workshop(self.root).configure("plain", "grade")
        self.assertEqual(configured.count("meson"), 2)

    def test_trouble_of_the_build_is_no_compile_error(self):
        students = "a.cpp:3:1: error: x\n  3 | throw \"No space left on device\";"
        for output, words in (
                ("ninja: error: unknown target 'grade-03.5'", "unknown target 'grade-03.5'"),
                ("x\n../source/02-x/meson.build:3:0: ERROR: Unknown function\n"
                 "ninja: error: rebuilding 'build.ninja': cannot make progress",
                 ": 02-x/meson.build:3:0: ERROR: Unknown function; expected"),
                ("cc1plus: fatal error: ../source/02-x/b.cpp: No such file", "No such file"),
                ("a.cpp:3:1: fatal error: opening dependency file a.d: No such file", "a.d"),
                ("as: Fatal error: a.o: No space left on device\nx", "No space left")):
            with mock.patch.object(workshop_module, "run_and_say", lambda *_, **__: (1, output)), \
                    self.assertRaisesRegex(CourseworkError, words) as caught:
                Workshop(self.root).compile("plain", ["x"], "x", print)
            self.assertNotIn("\n", str(caught.exception))
        with mock.patch.object(workshop_module, "run_and_say", lambda *_, **__: (1, students)):
            self.assertEqual(Workshop(self.root).compile("plain", ["x"], "x", print)[0], 1)

    def test_compiling_says_what_how_many_steps_and_about_how_long(self):
        self.write("plain/build.ninja", "rule cc\n  command = touch $out\n  description = Compiling $out\n"
                   "build a.o: cc\nbuild b.o: cc\n")
        told = []
        shop = Workshop(self.root)
        self.assertEqual(0, shop.compile("plain", ["a.o", "b.o"], "tasks 01.1, 01.2", told.append)[0])
        self.assertEqual(1, len(told), told)
        self.assertRegex(told[0], r"^compiling tasks 01\.1, 01\.2: 2 steps, about \d+ s(, longer .*)?$")
        self.assertEqual(0, shop.compile("plain", ["a.o", "b.o"], "tasks", told.append)[0])
        self.assertEqual(1, len(told), told)  # nothing to do, nothing to say

    def test_headers_are_compiled_once_with_the_options_of_the_sources(self):
        words = f"g++ -std=c++20 -O0 -include {HEADERS} -MD -MQ a.o -MF a.o.d -o a.o -c ../source/a.cpp"
        self.write("asan/compile_commands.json", json.dumps([{"command": words}]))
        self.write("source/a.cpp", "std::vector<int> a;\n")
        build, shop = self.root / "asan", Workshop(self.root)
        shop.precompile(build)
        self.assertFalse((build / f"{HEADERS}.gch").exists())  # this build's compiler is not to have any
        self.write(f"asan/{HEADERS}", "#include <vector>\n")
        shop.precompile(build)
        subprocess.run(words.split(), cwd=build, check=True)
        self.assertNotIn("/vector", (build / "a.o.d").read_text())  # was not read again
        made = (build / f"{HEADERS}.gch").stat().st_mtime_ns
        shop.precompile(build)
        self.assertEqual(made, (build / f"{HEADERS}.gch").stat().st_mtime_ns)
        self.write(f"asan/{HEADERS}", "#include <string>\n#include <vector>\n")
        shop.precompile(build)
        self.assertNotEqual(made, (build / f"{HEADERS}.gch").stat().st_mtime_ns)

    def test_in_a_sandbox_a_build_writes_to_its_folder_and_sees_solutions_only_where_no_student_is_compiled(self):
        room = sandbox.find_sandbox()
        if room.kind == sandbox.NONE:
            self.skipTest("namespaces not permitted")
        self.write("source/solutions/x", "secret")
        self.write("asan/tests/coursework/right-02", "built")
        self.write("source/a.cpp", "a")
        self.write("asan/build.ninja", "rule cc\n  command = cat ../source/a.cpp ../source/solutions/x "
                                       "tests/coursework/right-02 >$out 2>/dev/null; "
                                       "touch ../source/b ../c 2>/dev/null || true\nbuild a.o: cc\nbuild b.o: cc\n")
        shop = Workshop(self.root, room)
        self.assertEqual(0, shop.compile("asan", ["a.o"], "x", lambda text: None, secret=True)[0])
        self.assertEqual(0, shop.compile("asan", ["b.o"], "x", lambda text: None)[0])
        self.assertEqual(("a", "asecretbuilt"), tuple((self.root / "asan" / name).read_text() for name in ("a.o", "b.o")))
        self.assertEqual(["asan", "source"], sorted(path.name for path in self.root.iterdir()))
        self.assertFalse((self.root / "source/b").exists())

    def test_what_was_compiled_from_the_lines_before_is_removed(self):
        """Else the next student's could read it."""
        self.write("asan/compile_commands.json", json.dumps(
            [{"directory": str(self.root / "asan"), "file": f"../source/{name}.cpp", "output": f"{name}.o"} for name in "ab"]))
        shop = Workshop(self.root)
        self.assertEqual({"a.cpp", "b.cpp"}, shop.fill({"a.cpp": "1", "b.cpp": "1"}))
        for name in "ab":
            self.write(f"asan/{name}.o")
        changed = shop.fill({"a.cpp": "1", "b.cpp": "1\r\n2"})
        self.assertEqual({"b.cpp"}, changed)
        self.assertEqual(b"1\r\n2", (shop.source / "b.cpp").read_bytes())
        self.assertEqual(set(), shop.fill({"a.cpp": "1", "b.cpp": "1\r\n2"}))
        shop.forget(changed)
        self.assertEqual((True, False), tuple((self.root / f"asan/{name}.o").exists() for name in "ab"))

    def test_what_is_not_made_yet_are_objects_but_those_of_the_tests(self):
        self.write("asan/build.ninja", "rule cc\n  command = touch $out\n  description = Compiling C++ object $out\n"
                   "rule ld\n  command = touch $out\n  description = Linking target $out\nbuild a.o: cc\nbuild b.o: cc\n"
                   "build tests/coursework/c.o: cc\nbuild program: ld a.o tests/coursework/c.o\n")
        shop = Workshop(self.root)
        self.assertEqual(["a.o"], shop.unmade("asan", ["program"]))
        shop.compile("asan", ["a.o"], "x", lambda text: None)
        self.assertEqual([], shop.unmade("asan", ["program"]))

    def test_a_compiler_that_takes_too_much_is_no_trouble_of_the_build(self):
        said = "FAILED: a.o\nc++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated."
        with mock.patch.object(workshop_module, "run_and_say", lambda *_, **__: (1, said)):
            self.assertEqual((1, said), Workshop(self.root).compile("plain", ["x"], "x", print))

    def test_what_is_compiled_beside_has_ended_with_the_block_whether_it_compiles_or_not(self):
        self.write("asan/build.ninja", "rule well\n command = touch began; sleep 0.2; touch $out\nbuild a.o: well\n"
                                       "rule ill\n command = false\nbuild b.o: ill\n")
        with Workshop(self.root).compiling("asan", ["b.o", "a.o"]):
            while not (self.root / "asan/began").exists():
                time.sleep(0.01)
            self.assertFalse((self.root / "asan/a.o").exists())
        self.assertTrue((self.root / "asan/a.o").exists())
        with Workshop(self.root).compiling("asan", []):  # ninja would make all
            pass

    def test_hidden_cases_that_come_or_go_are_configured_anew(self):
        shop = Workshop(self.root)
        before = shop.known_tasks()
        self.write("source/tests/coursework/hidden/stage01_hidden.cpp")
        self.assertNotEqual(before, shop.known_tasks())

    def command_in_a_folder(self, **options):
        """A command that has made a folder for itself and waits for a line; also returns that
        folder."""
        program = ("import sys, tempfile; sys.path.insert(0, sys.argv[1])\n"
                   "from command_line import run_command\n"
                   "def main(words):\n"
                   "    with tempfile.TemporaryDirectory() as folder:\n"
                   "        print(folder, flush=True)\n"
                   "        return int(sys.stdin.readline())\n"
                   "run_command(main)\n")
        process = start(self, sys.executable, "-c", program, ROOT / "tools", text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        return process, Path(process.stdout.readline().strip())

    def test_a_terminal_that_is_closed_leaves_nothing(self):
        process, folder = self.command_in_a_folder()
        process.send_signal(signal.SIGHUP)
        self.assertEqual(process.wait(30), 129)
        self.assertFalse(folder.exists())

    def test_under_nohup_it_goes_on_when_the_terminal_is_closed(self):
        process, folder = self.command_in_a_folder(ignores=(signal.SIGHUP,))
        process.send_signal(signal.SIGHUP)
        process.communicate("7\n", timeout=30)
        self.assertEqual(process.returncode, 7)
        self.assertFalse(folder.exists())

    def test_paths_are_those_of_the_tree(self):
        workshop = Workshop(self.root)
        for path in ("../source/04-ddp/a.cpp", f"{self.root}/source/04-ddp/a.cpp", "04-ddp/a.cpp"):
            self.assertEqual(workshop.path_in_tree(path), "04-ddp/a.cpp")


FUNCTIONS = """namespace lockstep {
static int helper(int a) { return a + %d; }
int first() { return helper(1); }
int second() { return first() * 10; }
int third(int) { return 3; }
int third(double) { return 4; }
}  // namespace lockstep
"""
MAIN = "namespace lockstep { int second(); }\nint main() { return lockstep::second(); }\n"


class TestSolutions(Folder):
    """With a compiler, on a few lines."""

    def compiled(self, name, text):
        source = self.write(f"{name}.cpp", text)
        subprocess.run(["c++", "-fPIC", "-ffunction-sections", "-c", str(source), "-o",
                        str(source.with_suffix(".o"))], check=True)
        return source.with_suffix(".o")

    def task(self, *symbols):
        return tasks.Task(**{**ROW, "symbols": symbols})

    def status(self, objects):
        """The exit status of a program of these objects."""
        program = self.root / "program"
        subprocess.run(["c++", "-Wl,--allow-multiple-definition", "-o", str(program),
                        *map(str, objects)], check=True)
        return subprocess.run([str(program)]).returncode

    def test_symbols_are_found_by_the_names_that_people_read(self):
        solved = self.compiled("solved", FUNCTIONS % 0)
        names = solutions.mangled_symbols(self.task("lockstep::first", "lockstep::third(int)"),
                                          solved)
        self.assertEqual(names, ["_ZN8lockstep5firstEv", "_ZN8lockstep5thirdEi"])
        for symbol, words in (("lockstep::third", "has 2 functions"), ("x::first", "0 functions")):
            with self.assertRaisesRegex(CourseworkError, f"{words}.*lockstep::{symbol[-5:]}"):
                solutions.mangled_symbols(self.task(symbol), solved)

    def test_a_solution_brings_what_it_needs_and_stands_before_the_students_function(self):
        solved = self.compiled("solved", FUNCTIONS % 1)
        student = self.compiled("student", FUNCTIONS % 5)
        main, cut = self.compiled("main", MAIN), self.root / "cut.o"
        name = "_ZN8lockstep5firstEv"
        solutions.cut_out(solved, [name], set(), cut)
        self.assertEqual([mangled for mangled, _ in solutions.defined_symbols(cut)], [name])
        for objects, status in (([student], 60), ([cut, student], 20)):
            self.assertEqual(self.status([main, *objects]), status)

    def test_a_solution_has_no_copy_of_another_task_of_its_file(self):
        solved = self.compiled("solved", FUNCTIONS % 1)
        student = self.compiled("student", (FUNCTIONS % 2).replace("10", "100"))
        main, cut = self.compiled("main", MAIN), self.root / "cut.o"
        solutions.cut_out(solved, ["_ZN8lockstep6secondEv"], {"_ZN8lockstep5firstEv"}, cut)
        self.assertEqual(self.status([main, cut, student]), 30)
        with self.assertRaisesRegex(CourseworkError, "64-bit ELF"):
            solutions.without_definitions(b"MZ", set())


if __name__ == "__main__":
    unittest.main()
