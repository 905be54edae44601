"""Coursework: table and markers, the student's tree, the grader's words (the whole loop is in
tests/coursework)."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import exercise  # noqa: E402
import grade  # noqa: E402
from coursework import CourseworkError, solutions, tasks, tree  # noqa: E402
from coursework.verdict import FAILED, OPEN, PASSED, verdict_of  # noqa: E402
from coursework import workshop as workshop_module  # noqa: E402
from coursework.workshop import Workshop  # noqa: E402
from processes import gone, start  # noqa: E402

SOURCE = """int first() {
  // [task 02.1] the first
  return 1;
  // [end 02.1]
}
int second() {
  const int two = 2;
  // [task 02.2] the second
  if (two > 1)
    return two;
  return 0;
  // [end 02.2]
}
"""
ROW = {"id": "02.1", "name": "the first", "file": "02-x/a.cpp", "symbols": ["first"],
       "teaches": "One.", "points": 1, "minutes": 5}


class TestTable(unittest.TestCase):
    def load(self, *rows):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / tasks.TABLE
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({"tasks": rows}))
            return tasks.load_tasks(folder)

    def refused(self, *rows):
        with self.assertRaises(CourseworkError) as caught:
            self.load(*rows)
        return str(caught.exception)

    def test_table_and_markers_of_this_tree_agree(self):
        table = tasks.load_tasks(ROOT)
        tasks.check_markers(table, tree.read_sources(ROOT))
        for task in table:
            self.assertTrue(task.teaches.endswith("."), task.id)

    def test_the_teachers_page_has_the_same_table(self):
        page = (ROOT / "docs/coursework.md").read_text()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                for line in page.splitlines() if re.match(r"\| \d\d\.\d+ ", line)]
        table = tasks.load_tasks(ROOT)
        self.assertEqual(rows, [[f"{task.id} {task.name}", task.teaches, str(task.minutes),
                                 str(task.points), ", ".join(task.needs)] for task in table])
        minutes = {}
        for task in table:
            minutes[task.id[:2]] = minutes.get(task.id[:2], 0) + task.minutes
        self.assertIn(", ".join(map(str, minutes.values())) + " minutes", page)
        counts = re.findall(r"^\| \[(\d\d)-.* \| (\d+) \|$", (ROOT / "README.md").read_text(), re.M)
        self.assertEqual(counts, [(stage, str(sum(task.id[:2] == stage for task in table)))
                                  for stage in minutes])

    def test_no_line_of_a_solution_stands_elsewhere_in_a_students_tree(self):
        texts = {path: (ROOT / path).read_text(errors="replace") for path in tree.list_files(ROOT)
                 if not tree.is_students(path) and not path.startswith(exercise.LEFT_OUT)
                 and path.endswith((".cpp", ".h", ".py", ".md", ".txt", ".json"))}
        for task in tasks.load_tasks(ROOT):
            for line in tasks.lines_of((ROOT / task.file).read_text(), task.file, task.id):
                line = line.strip()[:40]
                idiom = line.startswith(("//", "for (", "if (!std::all_of("))
                if len(line) < 40 or idiom:
                    continue
                self.assertEqual([path for path, text in texts.items() if line in text], [],
                                 f"{task.id}: {line}")

    def test_rows_that_are_wrong_are_named(self):
        self.assertEqual(self.load(ROW)[0].deadline, 20)
        self.assertIn("task 02.1: unknown colour", self.refused({**ROW, "colour": "red"}))
        self.assertIn("points", self.refused({key: ROW[key] for key in ROW if key != "points"}))
        self.assertIn("an id like 02.1", self.refused({**ROW, "id": "2-1"}))
        self.assertIn("needs 02.7", self.refused({**ROW, "needs": ["02.7"]}))
        other = {**ROW, "id": "02.10", "name": "another"}
        self.assertEqual(len(self.load({**ROW, "id": "02.9"}, other)), 2)
        self.assertIn("behind task 02.10", self.refused(other, {**ROW, "id": "02.9"}))
        self.assertIn("has the name", self.refused(ROW, {**other, "name": "the first"}))


class TestMarkers(unittest.TestCase):
    def refused(self, text):
        with self.assertRaises(CourseworkError) as caught:
            tasks.find_sections(text, "02-x/a.cpp")
        return str(caught.exception)

    def test_a_students_text_throws_and_says_where(self):
        opened = tasks.open_text(SOURCE, "02-x/a.cpp")
        lines = opened.split("\n")
        self.assertEqual(lines[2], '  open_task("task 02.1 (the first) is yours: 02-x/a.cpp:3");')
        self.assertEqual(lines[8], '  open_task("task 02.2 (the second) is yours: 02-x/a.cpp:9");')
        self.assertNotIn("return", opened)
        self.assertEqual(lines[7], "  // [task 02.2] the second")

    def test_lines_come_back(self):
        text = tasks.open_text(SOURCE, "a")
        for task_id in ("02.1", "02.2"):
            text = tasks.replace_section(text, "a", task_id, tasks.lines_of(SOURCE, "a", task_id))
        self.assertEqual(text, SOURCE)
        self.assertEqual(tasks.outside_text(SOURCE, "a"),
                         tasks.outside_text(tasks.open_text(SOURCE, "a"), "a"))

    def test_markers_that_do_not_fit_are_refused(self):
        self.assertIn("a.cpp:2: [task 02.2] stands inside task 02.1",
                      self.refused("// [task 02.1] a\n// [task 02.2] b\n"))
        self.assertIn("[end 02.1] stands outside", self.refused("// [end 02.1]\n"))
        self.assertIn("[end 02.2] stands inside task 02.1",
                      self.refused("// [task 02.1] a\n// [end 02.2]\n"))
        self.assertIn("has no end", self.refused("// [task 02.1] a\n"))
        self.assertIn("has no name", self.refused("// [task 02.1]\n// [end 02.1]\n"))
        self.assertIn("is no marker", self.refused("// [task 2] a\n"))
        self.assertIn("stands behind task 02.2", self.refused(
            "// [task 02.2] b\n// [end 02.2]\n// [task 02.1] a\n// [end 02.1]\n"))

    def test_table_and_markers_that_differ_are_refused(self):
        task = tasks.Task(**{**ROW, "symbols": ("first",)})
        second = tasks.Task(**{**ROW, "id": "02.2", "name": "the second", "symbols": ("second",)})
        texts = {"02-x/a.cpp": SOURCE}
        tasks.check_markers([task, second], texts)
        for table, files, fault in (
                ([task], texts, "task 02.2, marked in 02-x/a.cpp, is not in"),
                ([task, second], {}, "task 02.1 is marked in no file"),
                ([task, second], {"b.cpp": SOURCE}, "is marked in b.cpp"),
                ([task, second], {**texts, "b.cpp": SOURCE}, "expected in one place")):
            with self.assertRaisesRegex(CourseworkError, fault):
                tasks.check_markers(table, files)
        with self.assertRaisesRegex(CourseworkError, "is called 'the first'"):
            tasks.check_markers([tasks.Task(**{**ROW, "name": "x"}), second], texts)


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, path, text="", mode=0o644):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file


class TestTree(Folder):
    def test_files_without_git(self):
        for path in ("a.txt", "common/data/b.h", "build/c", "build-x/c", "data/d", "e/data/f",
                     "tools/__pycache__/g.pyc", ".gitignore"):
            self.write(path)
        self.assertEqual(tree.list_files(self.root),
                         [".gitignore", "a.txt", "common/data/b.h", "e/data/f"])
        self.assertEqual(tree.list_unknown(self.root), [])

    def test_files_with_git(self):
        self.write("tracked")
        self.write(".gitignore", "/ignored\n")
        self.write("ignored")
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)
        subprocess.run(["git", "-C", str(self.root), "add", "tracked"], check=True)
        self.write("new")
        self.assertEqual(tree.list_files(self.root), [".gitignore", "new", "tracked"])
        self.assertEqual(tree.list_unknown(self.root), [".gitignore", "new"])

    def test_a_git_that_ignores_objects_does_not_hide_the_solutions(self):
        self.write("solutions/01.1.o", "x")
        self.write("other.o", "x")
        self.write(".gitignore", "*.o\n")
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)
        self.assertEqual(tree.list_files(self.root), [".gitignore", "solutions/01.1.o"])

    def test_a_mirror_touches_only_what_differs(self):
        same, program = self.write("from/same", "1"), self.write("from/program", "2", 0o755)
        mirror = self.root / "to"
        tree.mirror({"same": same, "x/program": program, "text": "3"}, mirror)
        before = os.stat(mirror / "same").st_mtime_ns
        time.sleep(0.01)
        same.write_text("1")
        tree.mirror({"same": same, "text": "4"}, mirror)
        self.assertEqual(os.stat(mirror / "same").st_mtime_ns, before)
        self.assertEqual((mirror / "text").read_text(), "4")
        self.assertEqual(tree.list_files(mirror), ["same", "text"])

    def test_a_mirror_takes_any_change_of_type_and_leaves_no_empty_folder(self):
        mirror, text = self.root / "to", self.write("from/text", "1")
        tree.mirror({"common/notes": text}, mirror)
        tree.mirror({"common/notes/a": text, "common/x/y/z": "2"}, mirror)
        self.assertEqual((mirror / "common/notes/a").read_text(), "1")
        tree.mirror({"common/notes": text}, mirror)
        self.assertEqual((mirror / "common/notes").read_text(), "1")
        self.assertEqual(os.listdir(mirror / "common"), ["notes"])

    def test_a_mirror_writes_through_no_link(self):
        outside, text = self.write("outside/a", "theirs"), self.write("from/a", "1")
        for link, to in (("to/common", "outside"), ("to2/common/a", "outside/a")):
            (self.root / link).parent.mkdir(parents=True)
            (self.root / link).symlink_to(self.root / to)
            tree.mirror({"common/a": text}, self.root / link.split("/")[0])
            tree.mirror({"common/a": "2"}, self.root / link.split("/")[0])
        self.assertEqual(outside.read_text(), "theirs")
        self.assertEqual((self.root / "to/common/a").read_text(), "2")

    def test_only_regular_files_are_taken(self):
        self.write("outside/a.h", "theirs")
        self.write("tree/common/a.h", "mine")
        common = self.root / "tree/common"
        for name, to in (("inside.h", "a.h"), ("out.h", "../../outside/a.h"), ("none.h", "none"),
                         ("loop.h", "loop.h"), ("data", "../../outside")):
            (common / name).symlink_to(to)
        os.mkfifo(common / "pipe.h")
        refused = [f"common/{name}" for name in ("data", "loop.h", "none.h", "out.h", "pipe.h")]
        for git in (False, True):
            if git:
                subprocess.run(["git", "init", "-q", str(self.root / "tree")], check=True)
                refused.remove("common/pipe.h")  # git does not name it
            self.assertEqual(tree.list_files(self.root / "tree"),
                             ["common/a.h", "common/inside.h"])
            self.assertEqual(tree.list_refused(self.root / "tree"), refused)
        tree.mirror({"a.h": common / "inside.h"}, self.root / "to")
        self.assertFalse((self.root / "to/a.h").is_symlink())

    def test_a_folder_that_became_a_link_hides_what_git_knows_in_it(self):
        self.write("tree/common/a.h")
        for words in (("init", "-q"), ("add", ".")):
            subprocess.run(["git", "-C", str(self.root / "tree"), *words], check=True)
        (self.root / "tree/common").rename(self.root / "tree/other")
        (self.root / "tree/common").symlink_to("other")
        self.assertEqual(tree.list_files(self.root / "tree"), ["other/a.h"])

    def test_without_git_a_clone_is_walked(self):
        self.write("tree/common/a.h")
        subprocess.run(["git", "init", "-q", str(self.root / "tree")], check=True)
        with mock.patch.dict(os.environ, {"PATH": str(self.root)}):
            self.assertEqual(tree.list_files(self.root / "tree"), ["common/a.h"])
            self.assertEqual(tree.list_unknown(self.root / "tree"), [])

    def test_names_need_not_be_utf_8(self):
        self.write("common/a")
        name = os.fsdecode(b"common/a\xe9")
        self.write(name)
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)
        self.assertEqual(tree.list_files(self.root), ["common/a", name])
        program = ("import sys; sys.path.insert(0, sys.argv[1]); import coursework as c; "
                   "c.run_command(lambda words: print(words[1]))")
        done = subprocess.run([sys.executable, "-c", program, str(ROOT / "tools"), name],
                              capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (0, b"common/a\\udce9\n"), done.stderr)

    def test_a_folder_that_is_no_tree_is_refused(self):
        self.write("tree/02-x/a.cpp")
        self.write("tree/common/a.h")
        tree.check_tree(self.root / "tree")
        for folder in (self.root, self.root / "tree/common", Path("/")):
            with self.assertRaisesRegex(CourseworkError, "is no tree of Lockstep.*name the folder"):
                tree.check_tree(folder)

    def test_students_write_in_the_stages_and_in_common(self):
        self.assertTrue(tree.is_students("common/data/loader.cpp"))
        self.assertTrue(tree.is_students("04-ddp/ddp.h"))
        self.assertFalse(tree.is_students("tests/coursework/stage04_test.cpp"))


class TestExercise(Folder):
    """What does not compile anything."""

    def setUp(self):
        super().setUp()
        self.write("solved/" + tasks.TABLE, json.dumps({"tasks": [
            ROW, {**ROW, "id": "02.2", "name": "the second", "symbols": ["second"]}]}))
        self.write("solved/02-x/a.cpp", SOURCE)
        self.write("solved/02-x/a.h", "int first();\n")
        self.write("solved/lockstep", "#!/bin/sh\n", 0o755)
        self.write("solved/tests/coursework/wrong/02.1/x.txt", "hint: secret\n")
        self.write("solved/tests/coursework/test_x.py", "SOLUTION\n")
        self.solved, self.target = self.root / "solved", self.root / "student"

    def test_folders_that_cannot_be_are_refused(self):
        self.write("full/file")
        for target, words in (("full", "not empty"), ("solved/x", "inside of this repository"),
                              ("absent/x", "no folder"), ("full/file", "is a file")):
            with self.assertRaisesRegex(CourseworkError, words):
                exercise.exercise(self.solved, self.root / target, None, print)
        self.write("solved/solutions/manifest.json")
        with self.assertRaisesRegex(CourseworkError, "student's tree"):
            exercise.exercise(self.solved, self.target, None, print)

    def test_the_tree_is_a_copy_with_open_tasks_and_without_wrong_solutions(self):
        exercise.write_tree(self.solved, tree.list_files(self.solved),
                            tasks.load_tasks(self.solved), self.target)
        files = tree.list_files(self.target)
        self.assertEqual(files, ["02-x/a.cpp", "02-x/a.h", "lockstep", "solutions/open/02-x/a.cpp",
                                 tasks.TABLE])
        self.assertTrue(os.access(self.target / "lockstep", os.X_OK))
        self.assertIn("is yours: 02-x/a.cpp:9", (self.target / "02-x/a.cpp").read_text())

    def test_nothing_is_left_where_it_fails_or_is_interrupted(self):
        class Interrupted(Workshop):
            def configure(self, *_):
                raise KeyboardInterrupt

        workshop = Interrupted(self.root / "workshop")
        with self.assertRaises(KeyboardInterrupt):
            exercise.exercise(self.solved, self.target, workshop, lambda text: None)
        self.assertEqual(sorted(path.name for path in self.root.iterdir()), ["solved", "workshop"])

    def make_tree(self):
        """What is said while the tree is made, without its solutions."""
        said = []
        with mock.patch.object(solutions, "make_solutions"):
            exercise.exercise(self.solved, self.target, Workshop(self.root / "workshop"),
                              said.append)
        return said

    def test_an_empty_folder_is_filled(self):
        self.target.mkdir()
        self.make_tree()
        self.assertTrue((self.target / solutions.MANIFEST).is_file())
        self.assertEqual(oct(self.target.stat().st_mode & 0o777), "0o755")

    def test_a_teachers_own_files_are_not_handed_out(self):
        for words in (("init", "-q"), ("add", ".")):
            subprocess.run(["git", "-C", str(self.solved), *words], check=True)
        self.write("solved/exam.txt")
        self.write("solved/common/exam.h")
        self.assertIn("left out: common/exam.h, exam.txt;", self.make_tree()[0])
        self.assertNotIn("exam", " ".join(tree.list_files(self.target)))
        self.assertEqual(solutions.differences(self.target, self.target), [])

    def test_what_is_never_handed_out_is_not_named(self):
        for words in (("init", "-q"), ("add", ".")):
            subprocess.run(["git", "-C", str(self.solved), *words], check=True)
        self.write("solved/tests/coursework/wrong/02.1/y.txt")
        self.assertNotIn("left out", self.make_tree()[0])

    def test_changed_build_files_and_what_cannot_be_taken_are_noted(self):
        self.write("solved/02-x/meson.build", "x")
        self.make_tree()
        self.write("student/02-x/meson.build", "y")
        for number in range(7):
            self.write(f"student/common/new{number}/meson.build")
        (self.target / "common/link").symlink_to("..")
        build_files, refused = solutions.differences(self.target, self.target)
        self.assertRegex(build_files, "made: 02-x/meson.build, .* and 3 more; build files can do")
        self.assertIn("not taken: common/link; expected", refused)

    def test_a_place_where_nothing_can_be_made_is_one_line(self):
        done = subprocess.run([sys.executable, str(ROOT / "tools/exercise.py"), "/proc/student"],
                              capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)


class TestWorkshop(Folder):
    def test_an_interrupted_build_leaves_no_compiler(self):
        self.write("build.ninja", "rule compile\n  command = echo $$$$ >pid; exec sleep 1000\n"
                                  "build object: compile\n")
        program = ("import sys; sys.path.insert(0, sys.argv[1]); from coursework.workshop import "
                   "call; call(('ninja', '-C', sys.argv[2]))")
        process = start(self, sys.executable, "-c", program, ROOT / "tools", self.root,
                        stderr=subprocess.DEVNULL)
        pid = self.root / "pid"
        begin = time.monotonic()
        while not (pid.is_file() and pid.read_text()) and time.monotonic() - begin < 30:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.wait(30)
        self.assertTrue(gone(int(pid.read_text())))

    def test_a_signal_while_a_process_starts_finds_it(self):
        started = self.root / "started"
        class Slow(subprocess.Popen):  # the signal comes before the constructor returns
            def __init__(self, *words, **options):
                super().__init__(*words, **options)
                started.write_text(str(self.pid))
                os.kill(os.getpid(), signal.SIGINT)
        with mock.patch.object(workshop_module.subprocess, "Popen", Slow), \
                self.assertRaises(KeyboardInterrupt):
            workshop_module.call(("sleep", "1000"))
        self.assertTrue(gone(int(started.read_text())))

    def test_a_folder_that_was_moved_or_copied_is_configured_anew(self):
        configured = []

        def meson(command):
            if command[0] == "meson":
                configured.append(command[-1] if "--reconfigure" in command else "anew")
                (Path(next(word for word in command if word.endswith("plain")))).mkdir(
                    parents=True, exist_ok=True)
            return 0, "x"
        with mock.patch.object(workshop_module, "call", meson):
            Workshop(self.root / "a").configure("plain", "grade")
            Workshop(self.root / "a").configure("plain", "grade")
            shutil.copytree(self.root / "a", self.root / "b")
            Workshop(self.root / "b").configure("plain", "grade")
        self.assertEqual(len(configured), 2)

    def test_a_table_that_changed_is_configured_anew(self):
        configured = []

        def meson(command):
            configured.append(command[0])
            (self.root / "plain").mkdir(exist_ok=True)
            return 0, "x"
        with mock.patch.object(workshop_module, "call", meson):
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
            with mock.patch.object(workshop_module, "call", lambda command: (1, output)), \
                    self.assertRaisesRegex(CourseworkError, words) as caught:
                Workshop(self.root).compile("plain", ["x"])
            self.assertNotIn("\n", str(caught.exception))
        with mock.patch.object(workshop_module, "call", lambda command: (1, students)):
            self.assertEqual(Workshop(self.root).compile("plain", ["x"])[0], 1)

    def command_in_a_folder(self, **options):
        """A command that has made a folder for itself and waits for a line; and that folder."""
        program = ("import sys, tempfile; sys.path.insert(0, sys.argv[1])\n"
                   "from coursework import run_command\n"
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
    """The grader's words for what a program may do, by programs of the shell."""

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
        takes = f"exec {sys.executable} -c 'bytearray(9 << 30)'"
        self.assertIn("MemoryError", self.verdict(None, "ended; " + takes).text)

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
        """A grader of a tree with one task, whose lines are `section`. Its program is a script of
        the shell; `outputs` are what the compiler says, one call after the other."""
        self.write(tasks.TABLE, json.dumps({"tasks": [ROW]}))
        for folder in ("", f"{solutions.OPEN}/"):
            self.write(folder + "02-x/a.cpp", SOURCE.replace("return 1;", section))
        self.write("common/a.h", "int a;\n")
        if not (self.root / solutions.MANIFEST).exists():
            solutions.write_manifest(self.root)
        program = "plain/tests/coursework/grade-02.1"
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
        for place in (self.root, self.root / "absent/x.json"):
            self.assertIn(f"--json {place}: expected a file's name", self.refused("--json", place))
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
