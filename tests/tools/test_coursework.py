"""Coursework: table and markers, the student's tree, what teachers get, labs that ask (the whole loop is in
tests/coursework)."""

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
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import exercise  # noqa: E402
from coursework import CourseworkError, labs, solutions, tasks, teacher, tree  # noqa: E402
from coursework.workshop import Workshop  # noqa: E402
from coursework_support import Folder, ROW, SOURCE  # noqa: E402


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

    def test_a_file_with_a_task_has_the_declaration_of_what_an_open_task_calls(self):
        def reached(name, seen):
            if name not in seen and (ROOT / name).is_file():
                seen.add(name)
                for target in re.findall(r'^#include "(.+)"', (ROOT / name).read_text(), re.MULTILINE):
                    reached(target, seen)
            return seen
        for name in {task.file for task in tasks.load_tasks(ROOT)}:
            self.assertIn("common/core/open_task.h", reached(name, set()), f"{name}: an open task does not compile")

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

    def test_no_link_in_a_students_tree_leads_to_what_is_left_out(self):
        for path in tree.list_files(ROOT):
            if not path.endswith(".md") or path.startswith(exercise.LEFT_OUT):
                continue
            for target in re.findall(r"\]\(([^)\s:#]+)", (ROOT / path).read_text()):
                place = os.path.relpath((ROOT / path).parent / target, ROOT) + "/"
                self.assertFalse(place.startswith(exercise.LEFT_OUT), f"{path}: {target}")

    def test_rows_that_are_wrong_are_named(self):
        self.assertEqual(self.load(ROW)[0].deadline, 20)
        self.assertIn("task 02.1: unknown colour", self.refused({**ROW, "colour": "red"}))
        self.assertIn("points", self.refused({key: ROW[key] for key in ROW if key != "points"}))
        self.assertIn("an id like 02.1", self.refused({**ROW, "id": "2-1"}))
        self.assertIn("needs 02.7", self.refused({**ROW, "needs": ["02.7"]}))
        other = {**ROW, "id": "02.10", "name": "another"}
        self.assertEqual(len(self.load({**ROW, "id": "02.9"}, other)), 2)
        self.assertIn("after task 02.10", self.refused(other, {**ROW, "id": "02.9"}))
        self.assertIn("has the name", self.refused(ROW, {**other, "name": "the first"}))


    def test_values_of_another_type_are_one_line(self):
        rows = {"points": ("3", 1.5, True, 0), "id": (2.1,), "symbols": ("first",), "race": (True,), "needs": ([1],),
                "cases": (["x"], {}), "deadline": (None,)}
        for key, values in rows.items():
            for value in values:
                said = self.refused({**ROW, key: value})
                self.assertIn(f": {key} is {json.dumps(value)}, expected a ", said)
        self.assertIn("row 1 is [], expected an object", self.refused([]))
        case = {"case": "one", "hidden": "two", "points": 0.5}
        self.assertEqual(0.5, self.load({**ROW, "cases": [case]})[0].cases[0]["points"])
        for wrong, why in (({"case": 1}, "case is 1, expected a text"),
                           ({"points": 0}, "points is 0, expected a number"), ({"x": 1}, "unknown x"),
                           ({"points": 1}, "cases have 1 points together")):
            self.assertIn(why, self.refused({**ROW, "cases": [{**case, **wrong}]}))
        del case["hidden"]
        self.assertIn("cases: row 1: there is no hidden", self.refused({**ROW, "cases": [case]}))

    def test_a_file_that_is_no_table_is_one_line(self):
        for text, why in (("", "is no JSON"), ("{", "is no JSON"), ("[]", r"is \[\], expected an object with the list"),
                          ("{}", r"is \{\}, expected an object"), ('{"tasks": {}}', "an object with the list")):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / tasks.TABLE
                path.parent.mkdir(parents=True)
                path.write_text(text)
                with self.assertRaisesRegex(CourseworkError, why) as caught:
                    tasks.load_tasks(folder)
                self.assertNotIn("\n", str(caught.exception))

    def test_cases_that_are_worth_points_are_cases_of_their_task(self):
        cases = teacher.cases_of(ROOT)
        for task in tasks.load_tasks(ROOT):
            kinds = [("case", task.tag)] + [("hidden", task.hidden_tag)] * (ROOT / tree.HIDDEN).is_dir()
            for kind, tag in kinds:  # a student's tree has no hidden ones
                names = {case.name for case in cases if tag in case.tags}
                for row in task.cases:
                    self.assertIn(row[kind], names, f"{task.id}: no test case {tag} has this name")


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

    def test_whole_functions_keep_their_heads(self):
        text = ("// [task 02.1] two\nint one(int a,\n        int b) {\n  if (a) {\n    return b;\n  }\n"
                "  return 1;\n}\n\n/// The second.\nint two() {\n  return 2;\n}\n// [end 02.1]\n")
        opened = tasks.open_text(text, "a.cpp")
        self.assertEqual(opened, "\n".join((
            "// [task 02.1] two", "int one(int a,", "        int b) {",
            '  open_task("task 02.1 (two) is yours: a.cpp:4");', "}", "", "/// The second.", "int two() {",
            '  open_task("task 02.1 (two) is yours: a.cpp:9");', "}", "// [end 02.1]", "")))
        self.assertEqual(4, tasks.open_line(opened, "a.cpp", "02.1"))
        one_done = opened.replace('  open_task("task 02.1 (two) is yours: a.cpp:4");', "  return 1;")
        self.assertEqual(9, tasks.open_line(one_done, "a.cpp", "02.1"))
        for lines, fault in (("int x = 1;", "expected whole functions"), ("int f() {", "expected whole"),
                             ("int f() { return 1; }", "lines of its own")):
            with self.assertRaisesRegex(CourseworkError, f"a.cpp: task 02.1.*{fault}"):
                tasks.open_text(f"// [task 02.1] a\n{lines}\n// [end 02.1]\n", "a.cpp")

    def test_markers_that_an_editor_has_moved_are_no_change(self):
        moved = SOURCE.replace("  // [end 02.1]", "      // [end 02.1]")
        self.assertNotEqual(moved, SOURCE)
        self.assertEqual(tasks.outside_text(moved, "a"), tasks.outside_text(SOURCE, "a"))

    def test_markers_that_do_not_fit_are_refused(self):
        self.assertIn("a.cpp:2: [task 02.2] stands inside task 02.1",
                      self.refused("// [task 02.1] a\n// [task 02.2] b\n"))
        self.assertIn("[end 02.1] stands outside", self.refused("// [end 02.1]\n"))
        self.assertIn("[end 02.2] stands inside task 02.1",
                      self.refused("// [task 02.1] a\n// [end 02.2]\n"))
        self.assertIn("has no end", self.refused("// [task 02.1] a\n"))
        self.assertIn("has no name", self.refused("// [task 02.1]\n// [end 02.1]\n"))
        self.assertIn("is no marker", self.refused("// [task 2] a\n"))
        self.assertIn("comes after task 02.2", self.refused(
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
        program = ("import sys; sys.path.insert(0, sys.argv[1]); import command_line as c; "
                   "c.run_command(lambda words: print(words[1]))")
        done = subprocess.run([sys.executable, "-c", program, str(ROOT / "tools"), name],
                              capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (0, b"common/a\\xe9\n"), done.stderr)

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
    """The part that does not compile anything."""

    def setUp(self):
        super().setUp()
        self.write("solved/" + tasks.TABLE, json.dumps({"tasks": [
            ROW, {**ROW, "id": "02.2", "name": "the second", "symbols": ["second"]}]}))
        self.write("solved/02-x/a.cpp", SOURCE)
        self.write("solved/02-x/a.h", "int first();\n")
        self.write("solved/lockstep", "#!/bin/sh\n", 0o755)
        self.write("solved/tests/coursework/wrong/02.1.txt", "// [wrong x] secret\n")
        self.write("solved/tests/coursework/test_x.py", "SOLUTION\n")
        self.write("solved/docs/course/answers/02.md", "ANSWER\n")
        self.write(f"solved/{tree.HIDDEN}/x_hidden.cpp", "CASE\n")
        self.solved, self.target = self.root / "solved", self.root / "student"

    def test_folders_that_cannot_be_are_refused(self):
        self.write("full/file")
        for target, words in (("full", "not empty"), ("solved/x", "inside this repository"),
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

    def test_a_page_for_assistants_is_at_the_top_unless_the_teacher_leaves_it_out(self):
        page = "tools/coursework/assistant_page.md"
        # a student's tree has it under the other name only
        here = next(path for path in (ROOT / page, ROOT / "AGENTS.md") if path.is_file())
        self.write(f"solved/{page}", here.read_text())
        for wanted in (True, False):
            target = self.root / f"student-{wanted}"
            exercise.write_tree(self.solved, tree.list_files(self.solved),
                                tasks.load_tasks(self.solved), target, wanted)
            self.assertEqual(wanted, (target / "AGENTS.md").is_file())
            self.assertFalse((target / page).exists())
        text = (self.root / "student-True/AGENTS.md").read_text()
        for path in ("docs/coursework.md", "common/README.md", "README.md"):
            self.assertIn(f"`{path}`", text)
            self.assertTrue((ROOT / path).is_file())

    def test_prebuilt_solutions_stand_in_for_what_is_open_and_nothing_else(self):
        self.assertEqual(((), []), (solutions.meson_options(self.solved, []), solutions.told(self.solved, [])))
        self.assertEqual([], solutions.replaced(self.solved, mine=False))
        exercise.write_tree(self.solved, tree.list_files(self.solved), tasks.load_tasks(self.solved), self.target)
        solutions.write_manifest(self.target, {})
        self.assertEqual(["02.1", "02.2"], solutions.replaced(self.target, mine=False))
        self.assertEqual([], solutions.replaced(self.target, mine=True))
        self.assertIn("-Dprebuilt=02.1,02.2", solutions.meson_options(self.target, ["02.1", "02.2"]))
        self.assertIn("open: 02.1, 02.2; prebuilt solutions run", solutions.told(self.target, ["02.1", "02.2"])[0])
        self.assertRegex(solutions.told(self.target, [])[0], r"^open: 02\.1, 02\.2; with --mine a program ends at")
        self.assertIn("-Dcoursework=programs", solutions.meson_options(self.target, []))  # --mine: linked anew
        file = self.target / "02-x/a.cpp"
        file.write_text(tasks.replace_section(file.read_text(), "02-x/a.cpp", "02.1", ["return 2;"]))
        self.assertEqual(["02.2"], solutions.replaced(self.target, mine=False))
        file.write_text(tasks.replace_section(file.read_text(), "02-x/a.cpp", "02.2", ["return 2;"]))
        self.assertEqual([], solutions.replaced(self.target, mine=False))
        self.assertIn("-Dcoursework=no", solutions.meson_options(self.target, []))
        file.unlink()
        self.assertEqual(["02.1", "02.2"], solutions.replaced(self.target, mine=False))

    def test_nothing_is_left_where_it_fails_or_is_interrupted(self):
        class Interrupted(Workshop):
            def configure(self, *_):
                raise KeyboardInterrupt

        workshop = Interrupted(self.root / "workshop")
        with self.assertRaises(KeyboardInterrupt):
            exercise.exercise(self.solved, self.target, workshop, lambda text: None)
        self.assertEqual(sorted(path.name for path in self.root.iterdir()), ["solved", "workshop"])

    def test_a_signal_that_comes_while_the_folder_is_made_leaves_nothing(self):
        make = tempfile.mkdtemp

        def interrupted(*args, **options):
            made = make(*args, **options)
            signal.raise_signal(signal.SIGINT)
            return made

        with mock.patch.object(tempfile, "mkdtemp", interrupted), self.assertRaises(KeyboardInterrupt):
            exercise.exercise(self.solved, self.target, Workshop(self.root / "workshop"), lambda text: None)
        self.assertEqual([path.name for path in self.root.iterdir()], ["solved"])

    def make_tree(self):
        """The messages while the tree is made, without its solutions."""
        said = []
        with mock.patch.object(solutions, "make_solutions", return_value={}):
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
        self.write("solved/tests/coursework/wrong/02.2.txt")
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


class TestTeacher(Folder):
    """What only teachers get, of a small tree and of this one."""

    def setUp(self):
        super().setUp()
        self.write("solved/" + tasks.TABLE, json.dumps({"tasks": [ROW]}))
        self.write("solved/tests/coursework/x_test.cpp",
                   'TEST_CASE("One "\n          "is \\"first\\"", "[task02.1]") {\n  HINT(\n      "is it "\n      "the first?");\n'
                   '  CHECK(first() == 1);\n}\n\nTEST_CASE("Another\'s", "[task02.2]") {}\n')
        self.write("solved/tests/coursework/wrong/02.1.txt", "// [wrong is_two] the first?\n  return 2;\n"
                                                            "// [wrong never_ends] endless\n  for (;;) {\n  }\n")
        self.write("solved/docs/course/answers/02.md", "ANSWER\n")
        self.write(f"solved/{tree.HIDDEN}/x_hidden.cpp", "CASE\n")
        self.solved, self.target = self.root / "solved", self.root / "teacher"

    def teacher(self, *words):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            return exercise.main(["--teacher", str(self.target), *words], root=self.solved), out.getvalue()

    def test_answers_cases_and_mistakes_are_written(self):
        status, told = self.teacher()
        self.assertEqual(0, status, told)
        self.assertIn(str(self.target), told)
        self.assertEqual("ANSWER\n", (self.target / "answers/02.md").read_text())
        self.assertEqual("CASE\n", (self.target / "hidden/x_hidden.cpp").read_text())
        page = (self.target / "tasks.md").read_text()
        self.assertIn("## 02.1 the first\n", page)
        self.assertIn('* `tests/coursework/x_test.cpp:1`, seen by students: One is "first"\n', page)
        self.assertNotIn("Another", page)
        self.assertIn('* "is it the first?" (is two)\n* "endless" (never ends)\n', page)

    def test_a_case_in_a_file_that_students_do_not_get_is_hidden(self):
        with mock.patch.object(exercise, "LEFT_OUT", (*exercise.LEFT_OUT, "tests/coursework/x_")):
            self.teacher()
        self.assertIn("`tests/coursework/x_test.cpp:1`, hidden from students: ", (self.target / "tasks.md").read_text())

    def test_it_is_whole_or_not_there(self):
        (self.solved / "docs/course/answers/02.md").unlink()
        status, told = self.teacher()
        self.assertEqual((1, 1), (status, told.count("\n")))
        self.assertIn("has no pages, expected one for each lesson", told)
        self.write("solved/solutions/manifest.json")
        self.assertIn("is a student's tree", self.teacher()[1])
        self.assertEqual(["solved"], [path.name for path in self.root.iterdir()])

    def test_the_page_of_this_tree_has_every_case_and_every_mistake(self):
        if not (ROOT / teacher.WRONG).is_dir():
            return  # a student's tree
        page = teacher.tasks_page(ROOT, exercise.LEFT_OUT)
        for folder, words in (("tests/coursework", "seen by"), ("tests/coursework/hidden", "hidden from")):
            cases = sum(path.read_text().count("\nTEST_CASE(") for path in (ROOT / folder).glob("*.cpp"))
            found = re.findall(rf"^\* `{folder}/\w+\.cpp:\d+`, {words} students: ", page, re.M)
            self.assertEqual((folder, cases), (folder, len(found)))
        for task in tasks.load_tasks(ROOT):
            part = page.split(f"\n## {task.id} ")[1].split("\n## ")[0]
            for name, (hint, _) in teacher.wrong_solutions(ROOT, task.id).items():
                self.assertRegex(part, rf'(?m)^\* ".*{re.escape(hint)}.*" \(.*\b{re.escape(name.replace("_", " "))}\b')


class TestPredict(Folder):
    """A lab that asks first: its program is a script here."""

    def setUp(self):
        super().setUp()
        self.write("build/02-dataparallel/labs", "#!/bin/sh\necho ran $*\n", 0o755)

    def lab(self, typed, *words):
        """Runs a lab at a terminal at which somebody types so; or, with None, without one."""
        code = ("import sys; from pathlib import Path; import exercise\n"
                "sys.exit(exercise.main(sys.argv[2:], programs=Path(sys.argv[1])))")
        outer, inner = os.openpty() if typed is not None else (None, subprocess.DEVNULL)
        if typed is not None:
            os.write(outer, typed.encode())
        done = subprocess.run([sys.executable, "-c", code, self.root / "build", "--lab", "stale-replica", *words],
                              stdin=inner, capture_output=True, text=True, timeout=60, cwd=ROOT / "tools")
        if typed is not None:
            os.close(inner)
            os.close(outer)
        return done

    def test_the_students_expectation_comes_first_and_both_are_at_the_end(self):
        done = self.lab("\n  the second is wrong \n", "--predict")  # an empty line is asked for again
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        lab = labs.load_labs()["stale-replica"]
        told = re.sub(r"\s+", " ", done.stdout)
        places = [told.find(text) for text in (
            f"Predict: {lab['ask']}", "What do you expect, in one line?", "ran stale-replica ", "ran stale-replica --fixed",
            "You expected: the second is wrong", f"It shows: {lab['expect']}", f"Why: {lab['why']}")]
        self.assertEqual(sorted(places), places, done.stdout)
        self.assertGreaterEqual(places[0], 0)
        self.assertNotIn("Expect: ", done.stdout)

    def test_where_nobody_can_answer_nothing_runs(self):
        for typed, words in ((None, "standard input is no terminal"), ("\4", "found no line, expected what you expect")):
            done = self.lab(typed, "--predict")
            self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
            self.assertIn(words, done.stderr)
            self.assertNotIn("ran", done.stdout)
        for words in (["--predict", "x"], ["--mine", "x"], ["--lab", "--predict"]):
            done = subprocess.run([sys.executable, ROOT / "tools/exercise.py", *words], capture_output=True, text=True, timeout=60)
            self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")))
            self.assertIn(f"{words[0] if words[0] != '--lab' else '--predict'} belongs to a lab: expected --lab NAME", done.stderr)

    def test_without_the_option_all_is_as_it_was(self):
        done = self.lab(None)
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertTrue(done.stdout.startswith("Expect: "))
        self.assertNotIn("You expected", done.stdout)

    def test_every_lab_has_a_question(self):
        for name, lab in labs.load_labs().items():
            self.assertRegex(lab["ask"], r"^[A-Z\d].*\?$", name)
            self.assertNotIn(lab["expect"], lab["ask"])


if __name__ == "__main__":
    unittest.main()
