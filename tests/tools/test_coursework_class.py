"""Coursework: what is taken of a submission, the sandbox, and the marks of a class."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import unittest
import warnings
import zipfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import exercise  # noqa: E402
import grade  # noqa: E402
import grade_class  # noqa: E402
from coursework import CourseworkError, gradebook, marked_lines, sandbox, services, similarity, tasks, tree  # noqa: E402
from coursework.sandbox import BUBBLEWRAP, NAMESPACES, NONE, PODMAN, RUNNING, Sandbox, View  # noqa: E402
from coursework.submission import Submission, name_of, read_submission  # noqa: E402
from coursework.verdict import FAILED, PASSED, Verdict  # noqa: E402
from coursework_support import Folder, ROW, SOURCE, WITNESS  # noqa: E402

PLACES = {"02-x/a.cpp", "02-x/b.h", "common/data/a.h", "common/data/loader.cpp"}
OPENED = tasks.open_text(SOURCE, "02-x/a.cpp")


class TestSubmission(Folder):
    def read(self, path):
        return read_submission(self.root / path, PLACES)

    def test_a_tree_or_some_files_of_it_at_any_depth(self):
        for top in ("", "deep/er/"):
            self.write(f"{top or 'x/'}02-x/a.cpp", "mine")
            self.write(f"{top or 'x/'}common/data/loader.cpp", "mine, too")
            self.write(f"{top or 'x/'}README.md", "no matter")
            found = self.read("x" if not top else "deep")
            self.assertEqual({"02-x/a.cpp": "mine", "common/data/loader.cpp": "mine, too"}, found.files)
            self.assertEqual([], found.notes)

    def test_one_file_under_its_name(self):
        self.write("loader.cpp", "mine")
        self.assertEqual({"common/data/loader.cpp": "mine"}, self.read("loader.cpp").files)
        self.write("folder/loader.cpp", "mine")
        self.assertEqual({"common/data/loader.cpp": "mine"}, self.read("folder").files)

    def test_archives(self):
        with zipfile.ZipFile(self.root / "anna.zip", "w") as archive:
            archive.writestr("tree/02-x/a.cpp", "mine")
        source = self.write("b", "theirs")
        for ending, mode in ((".tar", "w"), (".tar.gz", "w:gz"), (".txz", "w:xz")):
            with tarfile.open(self.root / f"anna{ending}", mode) as archive:
                archive.add(source, "02-x/a.cpp")
            self.assertEqual({"02-x/a.cpp": "theirs"}, self.read(f"anna{ending}").files)
            self.assertEqual("anna", name_of(f"anna{ending}"))
        self.assertEqual({"02-x/a.cpp": "mine"}, self.read("anna.zip").files)
        (self.root / "upload_7").mkdir()
        (self.root / "anna.zip").rename(self.root / "upload_7/anna.zip")
        self.assertEqual({"02-x/a.cpp": "mine"}, self.read("upload_7").files)

    def test_an_archive_cannot_lead_out_of_its_folder(self):
        outside = self.root / "outside"
        with zipfile.ZipFile(self.root / "a.zip", "w") as archive:
            archive.writestr("../outside", "x")
            archive.writestr(str(outside), "x")
            archive.writestr("02-x/a.cpp", "mine")
        with tarfile.open(self.root / "a.tar", "w") as archive:
            for name, kind, to in (("02-x", tarfile.SYMTYPE, str(self.root)), ("02-x/b.h", tarfile.LNKTYPE, "/etc/passwd"),
                                   ("02-x/a.cpp", tarfile.SYMTYPE, "/etc/passwd"), ("pipe", tarfile.FIFOTYPE, "")):
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, to
                archive.addfile(member)
            member = tarfile.TarInfo("common/data/a.h")
            member.size = 4
            archive.addfile(member, io.BytesIO(b"mine"))
        before = set(self.root.iterdir())
        zipped, tarred = self.read("a.zip"), self.read("a.tar")
        self.assertEqual(({"02-x/a.cpp": "mine"}, {"common/data/a.h": "mine"}), (zipped.files, tarred.files))
        self.assertEqual(["not taken, their names lead elsewhere, or have more than 20 parts: ../outside"],
                         [note for note in zipped.notes if "elsewhere" in note])
        self.assertEqual(["not taken, they are links, or no files: 02-x, 02-x/b.h, 02-x/a.cpp, pipe"], tarred.notes)
        self.assertEqual(before, set(self.root.iterdir()))

    def test_an_honest_tree_in_an_archive_is_as_in_a_folder(self):
        """Some files of the tree are large, and what is built, and what systems leave, may be links."""
        large = "0123456789abcdef" * (1 << 16)
        teachers = {"tests/large.bin": self.write("own/large.bin", large)}
        for path, text in {"02-x/a.cpp": "mine", "tests/large.bin": large, "build/a.so.1": "x"}.items():
            self.write(f"anna/{path}", text)
        for link in ("build/a.so", ".DS_Store"):
            (self.root / "anna" / link).symlink_to("a.so.1")
        with tarfile.open(self.root / "anna.tgz", "w:gz") as archive:
            archive.add(self.root / "anna", "./anna")
        with zipfile.ZipFile(self.root / "anna.zip", "w") as archive:
            for path in ("02-x/a.cpp", "tests/large.bin"):
                archive.write(self.root / "anna" / path, f"anna/{path}")
        for name in ("anna", "anna.tgz", "anna.zip"):
            found = read_submission(self.root / name, PLACES, teachers)
            self.assertEqual(({"02-x/a.cpp": "mine"}, []), (found.files, found.notes), name)

    def test_links_of_an_archive_are_named(self):
        with zipfile.ZipFile(self.root / "a.zip", "w") as archive:
            archive.writestr("x/02-x/a.cpp", "mine")
            link = zipfile.ZipInfo("x/common/data/link")
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(link, "/etc/passwd")
        self.assertEqual(["not taken, they are links, or no files: x/common/data/link"], self.read("a.zip").notes)

    def test_an_archive_that_would_fill_the_disk_is_refused(self):
        with zipfile.ZipFile(self.root / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for number in range(70):
                archive.writestr(f"02-x/{number}.cpp", bytes(1 << 20))
        with self.assertRaisesRegex(CourseworkError, "more than 20000 files, or more than 64 MiB"):
            self.read("bomb.zip")
        self.write("broken.zip", "PK")
        with self.assertRaisesRegex(CourseworkError, "cannot be unpacked"):
            self.read("broken.zip")

    def test_links_pipes_large_files_and_what_is_no_text_are_not_taken(self):
        self.write("x/02-x/a.cpp", "mine")
        (self.root / "x/02-x/b.h").symlink_to("/etc/passwd")
        (self.root / "x/common").mkdir()
        (self.root / "x/common/data").symlink_to(ROOT / "common/data")
        os.mkfifo(self.root / "x/02-x/pipe.h")
        self.assertEqual({"02-x/a.cpp"}, set(self.read("x").files))
        self.write("y/02-x/a.cpp", "0" * (1 << 20) + "0")
        self.write("y/02-x/b.h", "\0")
        self.write("y/common/data/a.h", "mine")
        found = self.read("y")
        self.assertEqual({"common/data/a.h"}, set(found.files))
        self.assertEqual(2, len(found.notes))

    def test_a_submitted_solution_or_copy_is_no_students_file(self):
        self.write("x/solutions/open/02-x/a.cpp", OPENED)
        self.write("x/common/data/a.h", "mine")
        self.assertEqual({"common/data/a.h"}, set(self.read("x").files))

    def test_new_files_are_named_and_nothing_at_all_is_refused(self):
        self.write("x/02-x/a.cpp", "mine")
        self.write("x/02-x/cheat.cpp", "static int x = run();")
        self.write("x/common/cheat.h", "x")
        self.assertEqual(["not taken, they have no place in the tree: 02-x/cheat.cpp, common/cheat.h"], self.read("x").notes)
        self.write("y/essay.txt")
        for path in ("y", "y/essay.txt"):
            with self.assertRaisesRegex(CourseworkError, "has no file of the tree that was handed out"):
                self.read(path)
        with self.assertRaisesRegex(CourseworkError, "expected a folder, a file or an archive"):
            self.read("absent")

    def test_changed_files_of_the_teachers_are_named(self):
        teachers = {path: self.write(f"own/{path}", "the teacher's\n") for path in ("meson.build", "tests/a.cpp", "lockstep")}
        self.write("anna/02-x/a.cpp", "mine")
        self.write("anna/lockstep", "the teacher's\r\n")
        for path in ("meson.build", "tests/a.cpp"):
            self.write(f"anna/{path}", "the student's\n")
        found = read_submission(self.root / "anna", PLACES, teachers)
        self.assertEqual(["02-x/a.cpp"], list(found.files))
        self.assertEqual(["not taken, they are the teacher's, and changed: meson.build, tests/a.cpp"], found.notes)

    def test_new_files_outside_of_the_students_folders_and_a_second_version_are_named(self):
        for path in ("02-x/a.cpp", "sitecustomize.py", "tests/coursework/evil.cpp", "build/x.o", "data/x", "solutions/02.1.o"):
            self.write(f"v1/{path}", "mine")
        self.write("common/x")
        teachers = {"meson.build": self.write("own/meson.build", "x")}
        self.assertEqual(["not taken, they have no place in the tree: sitecustomize.py, tests/coursework/evil.cpp"],
                         read_submission(self.root / "v1", PLACES, teachers).notes)
        for version in ("v1", "v2"):
            self.write(f"both/{version}/02-x/a.cpp", version)
        found = read_submission(self.root / "both", PLACES, teachers)
        self.assertEqual({"02-x/a.cpp": "v1"}, found.files)
        self.assertEqual(["not taken, their places are taken by other files of this submission: v2/02-x/a.cpp"], found.notes)

    def test_what_systems_and_editors_add_is_no_difference(self):
        self.write("x/02-x/a.cpp", "\ufeffmine")
        for path in (".DS_Store", "02-x/.DS_Store", "02-x/._a.cpp", "__MACOSX/02-x/a.cpp", "02-x/Thumbs.db", "desktop.ini"):
            self.write(f"x/{path}", "x")
        found = read_submission(self.root / "x", PLACES, {"lockstep": self.write("own/lockstep", "x")})
        self.assertEqual(({"02-x/a.cpp": "mine"}, []), (found.files, found.notes))

    def test_a_name_that_an_archive_has_twice_is_named(self):
        with zipfile.ZipFile(self.root / "a.zip", "w") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for text in ("mine", "mine, too"):
                archive.writestr("02-x/a.cpp", text)
        found = self.read("a.zip")
        self.assertEqual({"02-x/a.cpp": "mine, too"}, found.files)
        self.assertEqual(["more than once in the archive, the last one counts: 02-x/a.cpp"], found.notes)

    def test_links_pipes_and_other_encodings_are_named(self):
        self.write("x/02-x/a.cpp", "mine")
        (self.root / "x/02-x/b.h").symlink_to("/etc/passwd")
        os.mkfifo(self.root / "x/pipe")
        self.assertEqual(["not taken, they are links, or no files: 02-x/b.h, pipe"], self.read("x").notes)
        self.write("y/02-x/a.cpp", "mine".encode("utf-16").decode("latin-1"))
        with self.assertRaisesRegex(CourseworkError, "02-x/a.cpp has more than 256 KiB, or is no text in UTF-8"):
            self.read("y")

    def test_folders_may_have_any_name(self):
        for folder in ("my-solutions", "solutions", "build-2", "data", "x"):
            for path in ("common/data/loader.cpp", "data/loader.cpp", "loader.cpp"):
                shutil.rmtree(self.root / "anna", ignore_errors=True)
                self.write(f"anna/{folder}/{path}", "mine")
                self.assertEqual({"common/data/loader.cpp": "mine"}, self.read("anna").files, f"{folder}/{path}")

    def test_names_from_the_root_are_those_below_it(self):
        with tarfile.open(self.root / "a.tar", "w") as archive:
            member = tarfile.TarInfo("/home/anna/tree/02-x/a.cpp")
            member.size = 4
            archive.addfile(member, io.BytesIO(b"mine"))
        self.assertEqual({"02-x/a.cpp": "mine"}, self.read("a.tar").files)

    def test_a_backup_does_not_count_beside_the_file(self):
        self.write("anna/backup/common/data/loader.cpp", "old")
        self.write("anna/common/data/loader.cpp", "mine")
        self.assertEqual("mine", self.read("anna").files["common/data/loader.cpp"])

    def test_a_submissions_git_is_never_asked(self):
        """Its settings would start a program."""
        self.write("x/02-x/a.cpp", "mine")
        subprocess.run(["git", "init", "-q", str(self.root / "x")], check=True)
        hook = self.write("hook", f"#!/bin/sh\ntouch {self.root}/started\n", 0o755)
        subprocess.run(["git", "-C", str(self.root / "x"), "config", "core.fsmonitor", str(hook)], check=True)
        self.assertEqual({"02-x/a.cpp"}, set(self.read("x").files))
        tree.list_files(self.root / "x")  # of one's own tree git is asked, and still starts nothing
        self.assertFalse((self.root / "started").exists())


class TestMarkedLines(unittest.TestCase):
    def taken(self, *changes, text=SOURCE):
        for old, new in changes:
            self.assertIn(old, text)
            text = text.replace(old, new)
        return marked_lines.take(OPENED, text, "02-x/a.cpp")

    def test_only_what_stands_between_the_markers_is_taken(self):
        taken = self.taken(("return 1;", "return 7;"), ("two = 2", "two = 3"))
        self.assertEqual(SOURCE.replace("return 1;", "return 7;"), taken.text)
        self.assertIn("first at 'const int two = 3;'", taken.outside)
        self.assertEqual("", self.taken(("return 1;", "return 7;\n  // 8")).outside)

    def test_lines_of_another_editor_are_the_same(self):
        self.assertEqual(SOURCE, marked_lines.take(OPENED, SOURCE.replace("\n", " \r\n"), "a.cpp").text.replace(" \n", "\n"))

    def test_markers_that_are_gone_cost_their_task_only(self):
        for old, new in (("// [task 02.1] the first", ""), ("// [end 02.1]", ""), ("[end 02.1]", "[end 02.2]"),
                         ("// [end 02.1]", "// [end 02.1]\n// [end 02.1]")):
            taken = self.taken((old, new))
            self.assertIn("02.1", taken.lost, old)
            self.assertIn('open_task("task 02.1', taken.text)
        self.assertEqual(("02.1",), self.taken(("// [end 02.1]", "")).lost)
        self.assertIn("return two;", self.taken(("// [end 02.1]", "")).text)

    def flags(self, *lines, **options):
        return [flag.what for flag in marked_lines.flag(list(lines), 10, **options)]

    def test_what_has_no_business_there_is_flagged_with_its_line(self):
        for line, what in (
                ("#include </etc/passwd>", "a line for the preprocessor"), ("  # define x y", "preprocessor"),
                ("%: include <a>", "preprocessor"), ('asm("syscall");', "the compiler"), ("__asm__ volatile(\"\");", "compiler"),
                ("dlopen(\"x\", 1);", "a library"), ("_exit(0);", "a process"), ("std::_Exit(0);", "a process"),
                ("std::system(\"x\");", "a process"), ("if (!fork()) {}", "a process"), ("int system;", "a process"),
                ("std::string p = \"/proc/self/maps\";", "'/proc' in a text"), ("int s = socket(1, 1, 0);", "a socket"),
                ("std::ifstream f(p);", "files"), ("getenv(\"LOCKSTEP_WITNESS\");", "the environment"),
                ("auto p = \"LOCKSTEP_WITNESS\";", "LOCKSTEP_"), ("extern \"C\" int f();", "the compiler"),
                ("extern int environ_;", "the compiler"), ("CHECK(true);", "the tests"), ("Catch::x();", "the tests"),
                ("__attribute__((constructor)) void f();", "the compiler"), ("[[gnu::constructor]] void f() {}", "an attribute"),
                ("sys\\", "goes on in the next"), ("auto f = s\\u0079stem;", "'\\u0'"), ("R\"(x)\";", "a raw string"),
                ("/* never closed", "without an end"), ("}", "the end of the function"), ("<% %>", "'<%'"),
                ("mprotect(p, 1, 7);", "memory"), ("tell_value(\"x\", \"y\");", "the tests"),
                ("std::thread runs(f);", "a thread"), ("pthread_create(&t, nullptr, f, nullptr);", "a thread"),
                ("union { int (*f)(int); long n; } u;", "another type's memory"), ("void* place = &f;", "'void*'"),
                ("*static_cast<long*>(p) += 8;", "'static_cast<long*>'"), ("new (&f) long(8);", "'new ('"),
                ("std::memcpy(&n, &f, 8);", "memory"), ("std::as_bytes(std::span(&f, 1));", "memory"),
                ("int (*f)(int) = g;", "'(*f)('"), ("decltype(&rand) f;", "'decltype(&'")):
            found = self.flags("int a;", line)
            self.assertTrue(any(what in flag for flag in found), f"{line}: {found}")
        self.assertEqual(11, marked_lines.flag(["int a;", "fork();"], 10)[0].line)

    def test_objects_that_would_be_made_before_the_tests_are_flagged(self):
        function = ["int f() {", "  return 1;", "}"]
        for line in ("int x = run();", "Run runs;", "static Run runs;", "const std::string text = made();",
                     "template <class T> const bool kEarly = run();", "template <template <class> class T, int N>\nRun runs{};",
                     "int begun = Early{}.operator()();", "int begun(Early{}.operator()());", "const int a = run();",
                     "struct S {\nstatic inline int begun = run(); };", "struct S { inline static Run runs; };"):
            self.assertTrue(self.flags(*function, line, at_margin=True), line)
        for line in ("int helper(int a);", "using Numbers = std::vector<int>;", "constexpr int kTwo = 2;",
                     "struct Pair { int a = 1; };", "int g() { int a = 1; return a; }",
                     "template <class T> int g(T a);", "template <class T, int N = 3> using Few = std::array<T, N>;",
                     "template <class T> constexpr T kNone = T();", "template <class T> T h(T a) { T b = a; return b; }",
                     "const int64_t kNothing = 0;", "const int kLess = -1;", "const bool kYes = true;",
                     "bool operator==(const Pair& a, const Pair& b);"):
            self.assertEqual([], self.flags(*function, line, at_margin=True), line)

    def test_an_object_that_outlives_the_call_is_told_and_no_fraud(self):
        flag, = marked_lines.flag(["static int calls = 0;"], 1)
        self.assertFalse(flag.grave)
        self.assertEqual([], self.flags("static constexpr int kTwo = 2;", "static_cast<int>(a);"))
        for line in ("static Run runs(1);", "static Run runs{1};", "static std::vector<int> all = made();",
                     "static Run runs((Early()));"):
            self.assertTrue(self.flags(line), line)
        for line in ("struct Go { static std::vector<int> go(int n) { return {}; } };",
                     "static int helper(int a = 1) noexcept { return a; }", "static auto twice(int a) -> int { return a; }"):
            self.assertEqual([], self.flags(line), line)

    def test_comments_texts_and_methods_are_no_calls(self):
        for line in ("// system() is not called here", "/* fork */", "std::string a = \"system\";", "stream.signal(1);",
                     "temporary.write(piece);", "temporary.remove();", "bool open = true;", "int64_t a = 1'000'000;",
                     "send(part(x, 1), right);", "char c = '\"'; // fork", "void visit(const Piece&) override {}",
                     "std::vector<::lockstep::Part> one;", "auto& signal = all.at(0);", "const auto accept = f;",
                     "std::bind(f, first);", "int pipe = 1, module = 2;"):
            self.assertEqual([], self.flags(line), line)

    def test_no_solution_is_flagged(self):
        if not (ROOT / "tests/coursework/wrong").is_dir():
            self.skipTest("tests/coursework runs it")
        for task in tasks.load_tasks(ROOT):
            text = (ROOT / task.file).read_text()
            section = tasks.section_of(text, task.file, task.id)
            self.assertEqual([], self.flags(*tasks.lines_of(text, task.file, task.id), at_margin=not section.indent),
                             task.id)

    def test_no_wrong_solution_is_refused_for_its_words(self):
        """They are refused with the hints that are meant for them."""
        if not (ROOT / "tests/coursework/wrong").is_dir():
            self.skipTest("tests/coursework runs it")
        for path in sorted((ROOT / "tests/coursework/wrong").iterdir()):
            for part in path.read_text().split("// [wrong ")[1:]:
                grave = [flag.what for flag in marked_lines.flag(part.split("\n")[1:], 1) if flag.grave]
                self.assertEqual([], grave, f"{path.name}: {part.split(']')[0]}")


class TestSandbox(Folder):
    """In each room that can be made here."""

    def rooms(self):
        found = [kind for kind in (BUBBLEWRAP, NAMESPACES, PODMAN) if sandbox.try_out(Sandbox(kind)) == ""]
        if not found:
            self.skipTest("namespaces not permitted")
        return [Sandbox(kind) for kind in found]

    def run_in(self, room, script, view=View(), limits=RUNNING, **environment):
        command = room.command(["bash", "-c", script], view, limits, environment)
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def test_it_has_its_files_and_no_others(self):
        self.write("mine/a", "seen")
        self.write("mine/secret/b", "not seen")
        self.write("other", "not seen")
        view = View(readable=(self.root / "mine",), hidden=(self.root / "mine/secret",))
        for room in self.rooms():
            done = self.run_in(room, f"cat {self.root}/mine/a; ls {self.root}/mine/secret; ls {self.root}; ls {ROOT} "
                                     f"/home 2>/dev/null; touch {self.root}/mine/c 2>/dev/null || echo no", view)
            self.assertEqual(["seenmine", "no"], done.stdout.split(), room.kind)

    def test_what_it_writes_is_gone_but_in_the_folder_that_it_may_write_to(self):
        (self.root / "out").mkdir()
        for room in self.rooms():
            view = View(writable=(self.root / "out",), foreign=False)
            self.run_in(room, f"echo x >{self.root}/out/{room.kind[0]}; echo x >/tmp/left-by-the-test; echo x >/dev/shm/x", view)
            self.assertTrue((self.root / "out" / room.kind[0]).is_file(), room.kind)
            self.assertFalse(Path("/tmp/left-by-the-test").exists())

    def test_its_devices_can_be_written_to(self):
        for room in self.rooms():
            done = self.run_in(room, "echo x >/dev/null && stat -c %a /dev")
            self.assertEqual("755\n", done.stdout, f"{room.kind}: {done.stderr}")  # else root alone may

    def test_the_disk_is_limited(self):
        for room in self.rooms():
            done = self.run_in(room, "head -c 2000000 /dev/zero >/tmp/a && echo much", limits=dataclasses.replace(
                RUNNING, disk=1 << 20))
            self.assertEqual("", done.stdout, room.kind)
            self.assertIn("No space left", done.stderr)

    def test_processes_are_limited(self):
        limits = dataclasses.replace(RUNNING, processes=30)
        with mock.patch.object(sandbox, "threads_of_user", lambda: 0):
            for room in self.rooms():
                script = "exec dash -c 'i=0; while [ $i -lt 99 ]; do sleep 5 & i=$((i + 1)); echo $i; done'"
                done = self.run_in(room, script, limits=limits)
                self.assertIn(int(done.stdout.split()[-1]), range(10, 31), f"{room.kind}: {done.stderr}")  # Podman has some
                self.assertIn("Cannot fork", done.stderr)

    def test_there_is_no_network_but_its_own(self):
        program = ("import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()); "
                   "print(len(socket.if_nameindex()))")
        view = View(readable=(Path(sys.base_prefix),))
        for room in self.rooms():
            done = self.run_in(room, f"{os.path.realpath(sys.executable)} -c \"{program}\"", view)
            self.assertEqual("1\n", done.stdout, f"{room.kind}: {done.stderr}")

    def test_a_tool_may_be_in_a_folder_of_the_graders_own(self):
        """Such as a Python below root's home, which other users may not enter."""
        with tempfile.TemporaryDirectory(dir="/var/tmp") as home:  # mode 700
            tool = Path(home) / "bin/tool"
            tool.parent.mkdir()
            shutil.copy("/bin/echo", tool)
            with mock.patch.object(sandbox, "tool_places", lambda: {str(tool)}):
                for room in self.rooms():
                    done = self.run_in(room, f"{tool} runs")
                    self.assertEqual("runs\n", done.stdout, f"{room.kind}: {done.stderr}")

    def test_there_is_no_environment_and_no_other_process(self):
        with mock.patch.dict(os.environ, {"TOKEN": "secret"}):
            for room in self.rooms():
                done = self.run_in(room, "echo ${TOKEN:-none} $GIVEN; ls /proc | grep -c '^[0-9]'", GIVEN="given")
                words = done.stdout.split()
                self.assertEqual(["none", "given"], words[:2])
                self.assertLess(int(words[2]), 8, room.kind)

    def test_it_has_no_rights(self):
        for room in self.rooms():
            for foreign in (True, False):
                done = self.run_in(room, "grep CapEff /proc/self/status; mount -t tmpfs x /tmp 2>/dev/null && echo mounted",
                                   View(foreign=foreign))
                self.assertEqual(["CapEff:", "0" * 16], done.stdout.split(), f"{room.kind} {foreign}")

    def test_where_none_can_be_had_it_says_why(self):
        with mock.patch.object(sandbox.shutil, "which", lambda tool: None):
            found = sandbox.find_sandbox()
        self.assertEqual((NONE, "there is no bwrap; there is no unshare; there is no podman"), (found.kind, found.why))
        self.assertEqual((NONE, "--no-sandbox"), (sandbox.find_sandbox(False).kind, sandbox.find_sandbox(False).why))

    def test_memory_of_all_processes_together_is_limited(self):
        few = dataclasses.replace(RUNNING, memory=1 << 20)
        guard = sandbox.Guard([], few)
        self.assertEqual("more than 0 GiB of memory were taken", guard.excess({os.getpid()}))
        self.assertEqual("", sandbox.Guard([], RUNNING).excess({os.getpid()}))


FACTS = {"tree": "anna", "points": 3.5, "of": 5, "seconds": 12.3, "notes": ["a note"], "sandbox": "bubblewrap",
         "without_sandbox": "", "whole_files": False, "hidden_cases": True, "tasks": [
             Verdict("02.1", "the first", PASSED, 3).facts(),
             Verdict("02.2", "the second", FAILED, 2, how="assertion", hint="why?", partly={"one": 0.5}).facts()]}


class TestGradebook(unittest.TestCase):
    def test_csv_has_a_row_for_each_student(self):
        table = [tasks.Task(**{**ROW, "id": id, "name": id}) for id in ("02.1", "02.2")]
        rows = list(csv.reader(io.StringIO(gradebook.grades_csv({"anna": FACTS, "=cmd": FACTS}, table))))
        self.assertEqual([["student", "points", "of", "02.1", "02.2", "notes"],
                          ["anna", "3.5", "5", "3", "0.5", "a note"], ["'=cmd", "3.5", "5", "3", "0.5", "a note"]], rows)

    def test_gradescope_has_its_published_form(self):
        # "Autograder Specifications": score or tests, each with score and max_score; these keys and no others.
        result = gradebook.gradescope(FACTS)
        self.assertLessEqual(result.keys(), {"score", "execution_time", "output", "output_format", "test_output_format",
                                             "test_name_format", "visibility", "stdout_visibility", "extra_data",
                                             "tests", "leaderboard"})
        self.assertEqual(result["score"], sum(test["score"] for test in result["tests"]))
        for test in result["tests"]:
            self.assertLessEqual(test.keys(), {"score", "max_score", "status", "name", "name_format", "number", "output",
                                               "output_format", "tags", "visibility", "extra_data"})
            self.assertIn(test["status"], ("passed", "failed"))
            self.assertIn(test["visibility"], ("hidden", "after_due_date", "after_published", "visible"))
        self.assertIn("why?", result["tests"][1]["output"])
        self.assertEqual(result, json.loads(json.dumps(result)))

    def test_autolab_reads_the_points_by_problem(self):
        line = gradebook.autolab(FACTS)
        self.assertNotIn("\n", line)
        self.assertEqual({"scores": {"02.1": 3, "02.2": 0.5}}, json.loads(line))


LONG = """  int64_t rest = batch % parts;
  std::vector<int64_t> sizes;
  for (int64_t part = 0; part < parts; ++part) {
    sizes.push_back(batch / parts + (part < rest ? 1 : 0));
  }
  return sizes;"""


class TestSimilarity(unittest.TestCase):
    def pairs(self, **texts):
        return similarity.pairs_of("02.1", texts, "  open_task(\"x\");")

    def test_other_names_numbers_and_layout_are_the_same_lines(self):
        copy = LONG.replace("sizes", "n").replace("rest", "left").replace("\n", "\n\n  // mine\n").replace("1", "7")
        pair, = self.pairs(anna=LONG, bert=copy, carl="  return micro(batch, parts, false);")
        self.assertEqual((("anna", "bert"), 1.0, False), (pair.students, pair.share, pair.same_text))

    def test_other_lines_are_not(self):
        other = """  auto left = batch;
  std::vector<int64_t> made(parts);
  while (left > 0) {
    for (auto& one : made) one += left-- > 0;
  }
  return made;"""
        self.assertEqual([], self.pairs(anna=LONG, bert=other))

    def test_the_same_text_is_told_even_if_it_is_short_and_what_was_handed_out_is_not(self):
        pair, = self.pairs(anna="return  1;", bert="return 1;", carl="return 2;")
        self.assertTrue(pair.same_text)
        self.assertEqual([], self.pairs(anna='  open_task("x");', bert='open_task("x");'))
        self.assertEqual([], similarity.pairs_of("02.1", {"anna": LONG + "\nx", "bert": LONG + "\ny;"}, LONG))

    def test_a_long_equal_piece_is_always_found(self):
        piece = " ".join(f"a{number} +" if number % 2 else "(b" for number in range(similarity.WORDS + similarity.WINDOW))
        for before in ("", "x;", "if (a) return;"):
            self.assertTrue(similarity.fingerprints(before + piece) & similarity.fingerprints("q(1, 2); " + piece))

    def test_the_page_names_them(self):
        page = similarity.report(self.pairs(anna=LONG, bert=LONG), {"02.1": 2})
        self.assertIn("| 02.1 | 2 | anna, bert | 1.00 | yes |", page)
        page = similarity.report(self.pairs(**{"a|b": LONG, "bert": LONG}), {"02.1": 2})
        self.assertIn("| 02.1 | 2 | a\\|b, bert | 1.00 | yes |", page)


class TestServices(Folder):
    def test_gradescopes_archive_has_its_two_programs_and_the_repository(self):
        self.write("solved/lockstep", "#!/bin/sh\n", 0o755)
        self.write("solved/a", "x")
        target, said = self.root / "g.zip", []
        services.write_gradescope(self.root / "solved", target, ["a", "lockstep"], said.append)
        with zipfile.ZipFile(target) as archive:
            modes = {member.filename: member.external_attr >> 16 & 0o777 for member in archive.infolist()}
            self.assertEqual({"setup.sh": 0o755, "run_autograder": 0o755, "lockstep/lockstep": 0o755, "lockstep/a": 0o644}, modes)
            for name in ("setup.sh", "run_autograder"):
                script = self.write(name, archive.read(name).decode())
                subprocess.run(["bash", "-n", script], check=True)
        for words in (("x.txt", "a new archive"), ("g.zip", "a new archive"), ("absent/x.zip", "no folder")):
            with self.assertRaisesRegex(CourseworkError, words[1]):
                services.write_gradescope(self.root / "solved", self.root / words[0], ["a"], print)
        self.write("student/solutions/x")
        with self.assertRaisesRegex(CourseworkError, "is a student's tree"):
            services.write_gradescope(self.root / "student", self.root / "h.zip", [], print)

    def test_the_commands_of_the_services_are_those_of_this_tree(self):
        for line in (services.SET_UP, services.RUN, services.workflow()):
            for command in [part for part in line.splitlines() if "./lockstep grade" in part]:
                words = command.split("./lockstep grade", 1)[1].split("|")[0].split()
                grade.parse_options(words, ROOT)
        self.assertIn("grade --prepare", services.SET_UP)
        self.assertIn("--gradescope /autograder/results/results.json", services.RUN)

    def test_a_tree_for_github_has_the_workflow(self):
        self.write("solved/" + tasks.TABLE, json.dumps({"tasks": [{**ROW, "id": "02.1"}]}))
        self.write("solved/02-x/a.cpp", SOURCE.split("int second")[0])
        for path in (*services.OURS, ".github/x.yml"):
            self.write(f"solved/{path}", "on: push")
        with mock.patch.object(exercise.solutions, "make_solutions", return_value={}):
            exercise.main(["--for", "github", str(self.root / "student"), "--build", str(self.root / "b")],
                          root=self.root / "solved")
        self.assertIn("./lockstep grade", (self.root / "student" / services.WORKFLOW).read_text())
        self.assertEqual({"x.yml", "workflows", "classroom.yml"},
                         {path.name for path in (self.root / "student/.github").rglob("*")})


class Graders:
    """In the place of a Grader: a student's points are the lines of the file."""

    def __init__(self):
        self.settings = mock.Mock(sandbox=Sandbox(BUBBLEWRAP), whole_files=False, hidden=ROOT)
        self.places, self.teachers, self.graded, self.stop_after = PLACES, {}, [], 99
        self.handed_out = {}
        self.work = mock.Mock(notes=["a note"])

    def prepare(self, chosen, all_flavours):
        pass

    def grade(self, submission, chosen):
        if len(self.graded) == self.stop_after:
            raise KeyboardInterrupt
        self.graded.append(submission)
        right = submission.files["02-x/a.cpp"].count("\n")
        return [Verdict(task.id, task.name, PASSED if right else FAILED, task.points) for task in chosen]


class TestClass(Folder):
    def setUp(self):
        super().setUp()
        for name, text in (("anna", "1\n"), ("bert", ""), ("carl", "1\n")):
            self.write(f"submissions/{name}/02-x/a.cpp", text)
        self.write("submissions/dora/essay.txt", "x")
        self.write("submissions/.DS_Store", "x")
        self.students = grade_class.find_students(self.root / "submissions")
        self.tasks = [tasks.Task(**{**ROW, "symbols": ("first",)})]

    def results(self, **wanted):
        results = grade_class.Results(self.root / "results", {"seed": 1, "tasks": [], **wanted})
        results.make_folders()
        return results

    def graded(self, grader):
        with mock.patch.object(grade_class, "say", lambda text: None), \
                mock.patch("builtins.print"):
            return grade_class.grade_all(self.students, self.results(), grader, self.tasks)

    def files(self):
        return {str(path.relative_to(self.root / "results")): path.read_text()
                for path in sorted((self.root / "results").rglob("*")) if path.is_file() and path.suffix != ".lock"}

    def test_each_student_has_a_report_and_who_sent_nothing_of_use_has_no_points(self):
        rows = self.graded(Graders())
        self.assertEqual({"anna": 1, "bert": 0, "carl": 1, "dora": 0}, {name: row["points"] for name, row in rows.items()})
        self.assertIn("could not be graded: dora has no file of the tree", rows["dora"]["notes"][0])
        for place in ("students/dora.txt", "gradescope/dora.json"):
            self.assertNotIn(str(self.root), (self.root / "results" / place).read_text())
        report = (self.root / "results/students/anna.txt").read_text()
        self.assertIn("1 of 1 points\nnote: a note\n\n02.1  the first", report)
        for folder in ("gradescope", "autolab", "students"):
            self.assertTrue((self.root / f"results/{folder}/dora.json").is_file())

    def test_interrupted_and_resumed_gives_the_same(self):
        with mock.patch.object(grade_class.time, "monotonic", lambda: 0):
            self.graded(Graders())
            whole = self.files()
            for name in whole:
                (self.root / "results" / name).unlink()
            first, second = Graders(), Graders()
            first.stop_after = 2
            with self.assertRaises(KeyboardInterrupt):
                self.graded(first)
            self.graded(second)
        self.assertEqual((2, 1), (len(first.graded), len(second.graded)))
        self.assertEqual(whole, self.files())

    def test_a_submission_that_has_changed_is_graded_again(self):
        self.graded(Graders())
        self.write("submissions/bert/02-x/a.cpp", "1\n")
        again = Graders()
        self.assertEqual(1, self.graded(again)["bert"]["points"])
        self.assertEqual(1, len(again.graded))

    def test_a_students_file_that_is_not_ours_is_graded_again(self):
        self.graded(Graders())
        for text in ("[]", "7", "null", '"x"', "{", "{}"):
            self.write("results/students/anna.json", text)
            again = Graders()
            self.assertEqual(1, self.graded(again)["anna"]["points"], text)
            self.assertEqual(1, len(again.graded), text)

    def test_the_seed_of_the_first_run_stays_and_another_way_of_grading_is_refused(self):
        self.results()
        self.assertEqual(1, self.results(seed=2).seed)
        with self.assertRaisesRegex(CourseworkError, r"a grading with tasks \[\], this one has \['02'\]: name another"):
            self.results(tasks=["02"])

    def test_what_is_not_as_it_should_be_is_refused_before_anything_is_written(self):
        self.write("week-1/anna/02-x/a.cpp", "mine")
        for words, why in ((("99.9", "-o", "results"), "no task 99.9"),
                           (("-o", ""), "expected the name of a folder"),
                           (("-o", "week-1/results"), "lies in week-1, where each entry is a student's")):
            done = subprocess.run([sys.executable, ROOT / "tools/grade_class.py", "week-1", *words],
                                  capture_output=True, text=True, cwd=self.root)
            self.assertEqual((2, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
            self.assertIn(why, done.stderr)
        self.assertEqual(["anna"], [path.name for path in (self.root / "week-1").iterdir()])
        self.assertFalse((self.root / "results").exists())
        done = subprocess.run([sys.executable, ROOT / "tools/grade_class.py", "week-1", "-o", "r", "--seed", str(1 << 63)],
                              capture_output=True, text=True, cwd=self.root)
        self.assertEqual(2, done.returncode)
        self.assertIn("expected a whole number from 0 to 2^63 - 1", done.stderr)

    def test_a_name_that_is_too_long_and_a_plan_that_is_damaged_are_refused(self):
        self.write(f"submissions/{'x' * 201}", "mine")
        with self.assertRaisesRegex(CourseworkError, "a name of 201 bytes, expected at most 200"):
            grade_class.find_students(self.root / "submissions")
        self.write("results/grading.json", "{")
        with self.assertRaisesRegex(CourseworkError, "grading.json says no more how the grading was made"):
            grade_class.Results(self.root / "results", {"seed": 1})

    def test_results_cannot_be_where_a_file_is(self):
        file = self.write("file", "mine")
        for place in (file, file / "results"):
            with self.assertRaisesRegex(CourseworkError, f"-o {place}: Not a directory; expected a folder"):
                grade_class.Results(place, {"seed": 1})

    def test_two_submissions_of_one_name_are_refused(self):
        self.write("submissions/anna.zip", "x")
        with self.assertRaisesRegex(CourseworkError, "the same name, anna"):
            grade_class.find_students(self.root / "submissions")
        (self.root / "empty").mkdir()
        with self.assertRaisesRegex(CourseworkError, "is empty"):
            grade_class.find_students(self.root / "empty")

    def test_without_a_sandbox_a_class_is_refused(self):
        if not grade_class.handed_out.is_teachers(ROOT):
            self.skipTest("tests/coursework runs it")
        words = [str(self.root / "submissions"), "-o", str(self.root / "results"), "--build", str(self.root / "build")]
        options = grade_class.parse_options(words, ROOT)
        none = mock.patch.object(grade_class.grade, "find_sandbox", lambda wanted: Sandbox(NONE, "no bwrap"))
        with none, mock.patch.object(grade_class, "say") as said:
            with self.assertRaisesRegex(CourseworkError, r"there is no sandbox \(no bwrap\).*install bubblewrap, or give --no-"):
                grade_class.grade_class(options, ROOT)
        self.assertIn("no sandbox: students' code runs with your rights", said.call_args_list[0][0][0])
        self.assertFalse((self.root / "results").exists())

    def test_a_students_tree_grades_no_class(self):
        options = grade_class.parse_options([str(self.root / "submissions"), "-o", "x"], ROOT)
        with self.assertRaisesRegex(CourseworkError, "is a student's tree: a class is graded in the repository"):
            grade_class.grade_class(options, self.root)

    def test_copies_are_looked_for_between_the_markers_only(self):
        grader = mock.Mock(places=PLACES, handed_out={"02-x/a.cpp": self.write("handed/a.cpp", OPENED)})
        body = SOURCE.replace("return 1;", LONG.strip())
        self.write("submissions/anna/02-x/a.cpp", body)
        self.write("submissions/bert/02-x/a.cpp", body.replace("two = 2", "two = 22222"))
        pairs, counts = grade_class.look_for_copies(self.students, grader, self.tasks)
        self.assertEqual([("anna", "bert")], [pair.students for pair in pairs])
        self.assertEqual({"02.1": 2}, counts)


# Says what a program says whose task returns 7, if that stands in the file that was to be compiled.
PROGRAM = """case $1 in '[task02.1]') begins visible; asserts 1;; *) begins hidden; value x $((seed % 1000 + ANSWER)); asserts 2;; esac
ended
"""


class TestMadeUpClass(Folder):
    """tests/coursework/made_up_class.py, with which the time of a class is measured (docs/coursework.md)."""

    SCRIPT = ROOT / "tests/coursework/made_up_class.py"

    def make(self, students):
        return subprocess.run([sys.executable, self.SCRIPT, self.root / "class", str(students)], capture_output=True, text=True)

    def test_its_submissions_are_read_and_have_right_wrong_and_open_tasks(self):
        if not self.SCRIPT.is_file():
            return  # a student's tree
        done = self.make(9)
        self.assertEqual(0, done.returncode, done.stderr)
        table = tasks.load_tasks(ROOT)
        students = grade_class.find_students(self.root / "class")
        self.assertEqual([f"student{number:02d}" for number in range(1, 10)], list(students))
        kinds = {"right": 0, "wrong": 0, "open": 0}
        for path in students.values():
            found = read_submission(path, {task.file for task in table})
            self.assertEqual([], found.notes)
            for task in table:
                lines = marked_lines.submitted_lines(found.files[task.file], task.id)[1]
                right = tasks.lines_of((ROOT / task.file).read_text(), task.file, task.id)
                is_open = any(line.strip().startswith("open_task(") for line in lines)
                kinds["open" if is_open else "right" if lines[1:] == right else "wrong"] += 1
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        self.assertTrue(done.stdout.endswith(f": 9 submissions with {len(table)} tasks each: {said}\n"), done.stdout)
        self.assertGreater(kinds["right"], kinds["wrong"])
        self.assertGreater(kinds["wrong"], kinds["open"])
        self.assertIn("is there already", self.make(1).stderr)


class TestWholeClass(Folder):
    """The commands from the first word to the last file; only compiling is left out."""

    def setUp(self):
        super().setUp()
        self.solved, self.build = self.root / "solved", self.root / "build"
        self.write("solved/" + tasks.TABLE, json.dumps({"tasks": [ROW]}))
        self.source = SOURCE.replace("// [task 02.2] the second", "//").replace("// [end 02.2]", "//")
        self.write("solved/02-x/a.cpp", self.source.replace("return 1;", "return 7;"))
        self.write("solved/common/a.h", "int first();\n")
        self.write(f"solved/{tree.HIDDEN}/stage02_hidden.cpp", "hidden")
        for name, body in (("anna", "return 7;"), ("bert", "return 8;"), ("carl", "fork();"), ("dora", "return   7;")):
            self.write(f"submissions/{name}/a.cpp", self.source.replace("return 1;", body))
        self.compiled, self.unmade = [], set()
        for name, value in (("configure", lambda *_: None), ("refresh", lambda *_: None), ("compile", self.compile),
                            ("objects", lambda *_: {"02-x/a.cpp": "a.o"}), ("unmade", lambda *_: sorted(self.unmade)),
                            ("forget", lambda shop, paths: self.unmade.update({"a.o"} if "02-x/a.cpp" in paths else ()))):
            patch = mock.patch.object(grade_class.Workshop, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        patch = mock.patch.object(exercise.solutions, "make_solutions", return_value={})
        patch.start()
        self.addCleanup(patch.stop)

    def compile(self, flavour, targets, what, say, secret=False):
        """Makes programs of the file in the mirror."""
        text = (self.build / "source/02-x/a.cpp").read_text()
        self.compiled.append((secret, text))
        self.unmade.difference_update(targets)
        for target in targets:
            if target.startswith("tests/"):
                right = target.endswith("right-02") or "7;" in text
                self.write(f"build/{flavour}/{target}", WITNESS + PROGRAM.replace("ANSWER", "7" if right else "8"), 0o755)
        return 0, ""

    def run_main(self, main, *words):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = main([*map(str, words), "--build", str(self.build), "--no-sandbox"], root=self.solved)
        return status, out.getvalue()

    def test_a_class_from_its_folder_to_the_files_for_the_gradebook(self):
        status, said = self.run_main(grade_class.main, self.root / "submissions", "-o", self.root / "results")
        self.assertEqual(0, status, said)
        self.assertIn("no sandbox: students' code runs with your rights (--no-sandbox)", said.splitlines()[0])
        rows = json.loads((self.root / "results/grades.json").read_text())
        told = {name: (row["points"], row["tasks"][0]["how"]) for name, row in rows.items()}
        self.assertEqual({"anna": (1, ""), "bert": (0, "hidden"), "carl": (0, "refused"), "dora": (1, "")}, told)
        self.assertNotIn("fork", "".join(text for _, text in self.compiled))
        self.assertIn("anna, dora", (self.root / "results/similarity.md").read_text())
        self.assertIn('"anna","1","1","1",', (self.root / "results/grades.csv").read_text())
        self.assertEqual("none", rows["anna"]["sandbox"])
        self.assertEqual({f"{name}.{kind}" for name in rows for kind in ("txt", "json")},
                         {path.name for path in (self.root / "results/students").iterdir()})

    def test_the_status_says_whether_all_some_or_none_was_graded(self):
        for name in ("bert", "carl", "dora"):
            shutil.rmtree(self.root / "submissions" / name)
        self.write("submissions/emil/essay.txt", "x")
        for expected in (1, 2):
            results = self.root / f"results-{expected}"
            status, said = self.run_main(grade_class.main, self.root / "submissions", "-o", results)
            self.assertEqual(expected, status, said)
            shutil.rmtree(self.root / "submissions/anna", ignore_errors=True)

    def test_what_students_wrote_is_compiled_before_solutions_are_there(self):
        self.run_main(grade_class.main, self.root / "submissions", "-o", self.root / "results")
        seen = set()
        for secret, text in self.compiled:
            if "7;" in text or "return 8;" in text:
                self.assertTrue(secret or text in seen, text)
                seen.add(text)
        self.assertTrue(seen)

    def test_it_goes_on_where_it_was_interrupted_with_the_same_seed(self):
        words = self.root / "submissions", "-o", self.root / "results"
        self.run_main(grade_class.main, *words)
        plan = (self.root / "results/grading.json").read_text()
        whole = (self.root / "results/grades.csv").read_text()
        (self.root / "results/students/bert.json").unlink()
        status, said = self.run_main(grade_class.main, *words)
        self.assertEqual((0, plan, whole), (status, (self.root / "results/grading.json").read_text(),
                                            (self.root / "results/grades.csv").read_text()))
        self.assertIn("3 of 4 are graded already", said)
        self.compiled.clear()
        self.assertEqual(0, self.run_main(grade_class.main, *words)[0])
        self.assertEqual([], self.compiled)  # nothing is left to grade

    def test_one_submission_by_itself_with_all_its_files(self):
        status, said = self.run_main(grade.main, self.root / "submissions/anna", "--json", self.root / "a.json",
                                     "--gradescope", self.root / "g.json", "--autolab", "--seed", "5")
        self.assertEqual(0, status, said)
        self.assertEqual('{"scores": {"02.1": 1}}', said.splitlines()[-1])
        self.assertEqual(1, json.loads((self.root / "g.json").read_text())["score"])
        facts = json.loads((self.root / "a.json").read_text())
        self.assertEqual((1, True, False, "none", "--no-sandbox"), tuple(
            facts[key] for key in ("points", "hidden_cases", "whole_files", "sandbox", "without_sandbox")))
        self.assertEqual(1, self.run_main(grade.main, self.root / "submissions/bert")[0])

    def test_preparing_grades_nothing(self):
        status, said = self.run_main(grade.main, "--prepare")
        self.assertEqual(0, status, said)
        self.assertEqual({False}, {secret for secret, _ in self.compiled})
        status, said = self.run_main(grade.main)
        self.assertEqual(2, status)
        self.assertIn("is the solved tree: name a submission", said)

    def test_a_students_own_tree_is_graded_by_its_marked_lines_and_without_hidden_cases(self):
        exercise.make_tree(self.solved, self.root / "student", grade_class.Workshop(self.build), lambda text: None)
        file = self.root / "student/02-x/a.cpp"
        file.write_text(self.source.replace("return 1;", "return 7;").replace("two = 2", "two = 3"))
        self.solved = self.root / "student"
        status, said = self.run_main(grade.main, "--json", self.root / "a.json")
        self.assertEqual(0, status, said)
        self.assertIn("graded by: visible cases", said)
        self.assertIn("differs outside of the markers, first at 'const int two = 3;'", said)
        self.assertIn("two = 2", (self.build / "source/02-x/a.cpp").read_text())
        self.assertFalse((self.build / "source" / tree.HIDDEN).exists())


if __name__ == "__main__":
    unittest.main()
