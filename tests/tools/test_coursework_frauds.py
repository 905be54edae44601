"""Coursework: submissions that try to get points, or to harm others, before anything is compiled.

Frauds that run are in tests/coursework/test_campaign.py. Each case here was an attempt at full marks without
solving anything.
"""

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import unittest
import zipfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import grade  # noqa: E402
import grade_class  # noqa: E402
from coursework import (CourseworkError, SubmissionError, gradebook, grader, marked_lines, similarity,  # noqa: E402
                        submission, tasks, workshop)
from coursework.submission import read_submission  # noqa: E402
from coursework_support import Folder, ROW, SOURCE  # noqa: E402

PLACES = {"02-x/a.cpp", "common/data/loader.cpp"}
SECONDS = 10  # for a text that takes minutes if each of its parts is looked at up to the end; it should take one


class TestWords(unittest.TestCase):
    """Lines that hide a word, or a line for the preprocessor, from whoever looks for them."""

    def flags(self, *lines, **options):
        return [flag.what for flag in marked_lines.flag(list(lines), 10, **options) if flag.grave]

    def test_a_quote_as_a_character_hides_nothing(self):
        for before in ("u8", "case", "return", "else ", "0x1 + ", "1'0 + "):
            line = before + "'\"'; fork(); // \""
            self.assertEqual(["'fork': a process"], self.flags(line), line)
        self.assertEqual([], self.flags("const int64_t million = 1'000'000, mask = 0xff'ff'00;"))

    def test_a_comment_before_it_hides_no_line_for_the_preprocessor(self):
        for lines in (("/* */ #define J(a, b) a##b",), ("/*", "*/ #include <unistd.h>"), ("/**//**/#pragma once",),
                      ("#",), ("  /**/ %: define x",)):
            self.assertTrue(self.flags(*lines), lines)
        self.assertEqual([], self.flags('const char* name = "#1"; // #2'))

    def test_attributes_that_change_what_runs_are_flagged_however_they_are_written(self):
        for line in ('[[using gnu: ifunc("resolve")]] int f();', "[ [gnu::weak]] int f();", '[[/**/gnu::alias("g")]] int f();',
                     "[[using clang: annotate]] int a;", '[[maybe_unused, gnu::section("x")]] int a;', "[[,gnu::weak]] int f();",
                     '[] [[maybe_unused, gnu::no_sanitize("thread")]] () {}();', '[[deprecated("FAILED: x")]] int a;',
                     "[[maybe_unused, gnu"):
            self.assertTrue(self.flags(line), line)
        self.assertEqual([], self.flags("[[maybe_unused]] int a; [[nodiscard]] int f(); if (a) [[likely]] a = b[c[0]];"))

    def test_nothing_is_taken_for_what_it_is_not(self):
        for line in ("auto p = reinterpret_cast<char*>(&x);", "Other& other = static_cast<Other&>(messages_.comm);", "char* p = (char*)&x;", "*(Real const *)(p) = 1;", "(int&)x = 1;",
                     "const_cast<int&>(x) = 1;", "if (typeid(x).name()) f();", "namespace testing { int f(); }"):
            self.assertTrue(self.flags(line), line)
        for line in ("const auto f = [&](const Tensor& x, Real* y) { return *y * (x.count() & 3); };",
                     "double raise = 0; int clone = 1;", "order.splice(order.end(), order, order.begin());",
                     "const auto f = [](int64_t, const BatchPart&) noexcept { return 1; };", "bool operator<(const Way&) const;"):
            self.assertEqual([], self.flags(line), line)

    def test_more_than_anybody_writes_is_not_looked_at(self):
        flag, = self.flags(*["#"] * marked_lines.LARGEST)
        self.assertIn(f"characters, {marked_lines.LARGEST} at most", flag)

    def test_files_under_their_longer_names(self):
        for line in ("std::basic_ifstream<char> f(p);", "std::filebuf f;", "std::ofstream f(p);"):
            self.assertTrue(self.flags(line), line)

    def test_a_path_in_pieces_is_a_path(self):
        for line in ('f("/pr" "oc/self/mem");', 'f("/pr" /* */ u8"oc");', r'f("\x2fproc");', r'f("\57proc");', r'f("\u002fdev");'):
            self.assertTrue(self.flags(line), line)
        self.assertEqual([], self.flags('f("/pr", "oc"); char c = \'\\0\', d = \'\\n\';'))

    def test_reading_and_writing_files_by_the_system_is_flagged(self):
        for line in ("pwrite(f, p, 64);", "std::tmpfile();", "lockf(f, 0, 0);", "faccessat(0, p, 0, 0);"):
            self.assertTrue(self.flags(line), line)

    def test_objects_made_before_the_tests_in_every_way_of_writing(self):
        function = ["int f(int a = 1) {", "  return 1;", "}"]
        for line in ("int x = [] { return run(); }();", "auto x = [](int a) constexpr { return run(a); }(1);", "Run runs{};",
                     "Run runs(1);", "struct Run { Run(); } runs;", "namespace { int x = run(); }", "struct Run runs;",
                     "inline int x = run();", "union Run { int a; } runs;", "const auto x = [](int a) { return run(a); }(1);",
                     "const auto x = [] { return run(); }();", "const auto f = [](int) { return 1; }, x = run();"):
            self.assertTrue(self.flags(*function, line, at_margin=True), line)
        for line in ("namespace { int helper(int a) { int b = 1; return b; } }", "struct Pair { int a = 1; int b; };",
                     "bool operator==(const A& a, const A& b) { return true; }", "template <int N = 1> int g() { return N; }",
                     "int helper(int a = 1);", "static_assert(sizeof(int) == 4);", "struct Pair;", "enum class Way { a, b };",
                     "constexpr std::array<int, 2> kTwo{1, 2};", "const auto f = [](int a) { return a; };",
                     "template <class T> concept Number = std::integral<T>;"):
            self.assertEqual([], self.flags(*function, line, at_margin=True), line)

    def test_types_of_the_project_are_not_made_anew(self):
        types = marked_lines.types_of("class Counter final : public Base {\n  struct Inner {};\n};\nenum class Way { a };\n")
        self.assertEqual({"Counter", "Way"}, types)
        for line in ("class Counter { public: int current; };", "struct Counter final : Base {};", "enum class Way : int { b };"):
            flag, = marked_lines.flag([line], 3, at_margin=True, types=types)
            self.assertIn("a type of the project's", flag.what)
        for line in ("class Counter;", "struct Inner { int a; };", "struct Mine { Counter& counter; };",
                     "Counter f(Way way) { return {}; }"):
            self.assertEqual([], marked_lines.flag([line], 3, at_margin=True, types=types), line)
        self.assertEqual([], marked_lines.flag(["struct Way { int a; };"], 3, types=types))

    def test_texts_without_an_end_are_flagged(self):
        for line in ('auto a = "b', "auto a = 'b", "int a; /* b"):
            self.assertTrue(any("without an end" in flag for flag in self.flags(line)), line)

    def test_a_comment_like_a_marker_costs_its_own_task_only(self):
        taken = marked_lines.take(tasks.open_text(SOURCE, "a.cpp"), SOURCE.replace("return 1;", "return 1;  //[end 02.1]"),
                                  "02-x/a.cpp")
        self.assertEqual(("02.1",), taken.lost)
        self.assertIn("return two;", taken.text)


class TestAssembler(unittest.TestCase):
    def test_its_errors_are_a_tasks_and_end_no_grading(self):
        own = mock.Mock(spec=grader.Grader, messages=lambda pattern, output: [])
        own.in_submission = lambda task, verdict: verdict
        written = subprocess.run(["g++", "-x", "c++", "-c", "-", "-o", "/dev/null"], capture_output=True, text=True,
                                 input='void f() {\n  asm(".incbin \\"../solutions/02.1.o\\"");\n}\n')
        form = "{place}: Assembler messages:\n{place}:12: Error: file not found: ../solutions/02.1.o"
        forms = [form.format(place=place) for place in ("/tmp/ccXYZ.s", "../source/a.cpp", "{standard input}")]
        for said in [f"FAILED: a.o\n{words}" for words in (written.stderr, *forms)]:
            verdict = grader.Grader.does_not_compile(own, tasks.Task(**{**ROW, "symbols": ("first",)}), said)
            self.assertEqual(("compile", "file not found: ../solutions/02.1.o"), (verdict.how, verdict.text))


class TestLinker(unittest.TestCase):
    def test_the_errors_of_each_one_are_a_tasks(self):
        own = mock.Mock(spec=grader.Grader, messages=lambda pattern, output: [])
        own.in_submission = lambda task, verdict: verdict
        forms = {"mold: error: undefined symbol: first(int)\n>>> referenced by a.cpp": "undefined symbol: first(int)",
                 "ld.lld: error: undefined symbol: first(int)": "undefined symbol: first(int)",
                 "mold: error: duplicate symbol: a.o: b.o: first(int)": "duplicate symbol: a.o: b.o: first(int)",
                 "a.cpp:(.text+0xa): undefined reference to `first(int)'": "undefined reference to `first(int)'",
                 "b.o: multiple definition of `first(int)'": "b.o: multiple definition of `first(int)'"}
        for said, expected in forms.items():
            verdict = grader.Grader.does_not_compile(own, tasks.Task(**{**ROW, "symbols": ("first",)}),
                                                     f"FAILED: b\n{said}\ncollect2: error: ld returned 1 exit status\n")
            self.assertEqual(("compile", expected), (verdict.how, verdict.text))


class TestTime(Folder):
    """Texts that would hold up the whole class."""

    def test_a_long_line_of_a_compiler_is_read_once(self):
        begin = time.process_time()
        self.assertIsNone(workshop.UNDEFINED.search("x" * 400_000))
        self.assertLess(time.process_time() - begin, SECONDS)

    def test_no_text_takes_longer_than_its_length(self):
        most = submission.LARGEST // 4
        for piece in ("/*", '"', "'", '\\"', "R\"", "'\\", "a ", "{", "} ", "/ ", "// ", "1'", "fork ", "a {} "):
            text = (piece * most)[:most]
            for lines in ([text], text.replace(" ", "\n").split("\n")):
                begin = time.process_time()
                with mock.patch.object(marked_lines, "LARGEST", most):
                    marked_lines.flag(lines, 1, at_margin=True)
                similarity.fingerprints("\n".join(lines))
                self.assertLess(time.process_time() - begin, SECONDS, repr(piece))

    def test_a_file_of_empty_lines_is_not_compared_line_by_line(self):
        opened = tasks.open_text(SOURCE + "\n" * 100, "a.cpp")
        begin = time.process_time()
        taken = marked_lines.take(opened, opened + "\n" * (submission.LARGEST - len(opened)), "02-x/a.cpp")
        self.assertLess(time.process_time() - begin, SECONDS)
        self.assertIn("lines outside of the markers, handed out were", taken.outside)

    def test_a_thousand_flags_make_a_short_note(self):
        work = mock.Mock(flags={"02.1": marked_lines.flag(["fork();"] * 1000, 1)}, texts={})
        own = mock.Mock(tasks=[task := tasks.Task(**{**ROW, "symbols": ("first",)})], handed_out={task.file: mock.Mock()})
        with mock.patch.object(grader, "Work", lambda *_: work):
            work.notes = []
            notes = grader.Grader.take(own, submission.Submission()).notes
        self.assertEqual(grader.FLAGS + 1, len(notes))
        self.assertIn("992 more lines like these", notes[-1])


class TestArchives(Folder):
    def refused(self, name, why):
        with self.assertRaisesRegex(CourseworkError, why):
            read_submission(self.root / name, PLACES)

    def test_broken_compression_is_no_reason_to_stop(self):
        with zipfile.ZipFile(self.root / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("02-x/a.cpp", bytes(range(256)) * 50)
        with tarfile.open(self.root / "a.tar.xz", "w:xz") as archive:
            archive.add(self.write("b", "x" * 5000), "02-x/a.cpp")
        for name in ("a.zip", "a.tar.xz"):
            file = self.root / name
            content = bytearray(file.read_bytes())
            content[60:75] = b"\xff" * 15
            file.write_bytes(content)
            self.refused(name, "cannot be unpacked")

    def test_a_header_that_would_take_all_memory_is_not_read(self):
        """A header may say that it is as long as it likes, and costs nothing when compressed."""
        header = tarfile.TarInfo("x")
        header.type, header.size = tarfile.XHDTYPE, 3 << 30
        with tarfile.open(self.root / "a.tgz", "w:gz") as archive:
            archive.fileobj.write(header.tobuf())
            for _ in range(200):
                archive.fileobj.write(bytes(1 << 20))
        self.assertLess((self.root / "a.tgz").stat().st_size, 1 << 20)
        self.refused("a.tgz", "more than 64 MiB")

    def test_a_long_note_beside_a_member_is_not_read(self):
        """Python's tarfile takes hours for one of some MiB."""
        header = tarfile.TarInfo("x")
        header.type, header.size = tarfile.XHDTYPE, submission.LONGEST_NOTE + 1
        with tarfile.open(self.root / "a.tgz", "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("02-x/a.cpp"))
            archive.fileobj.write(header.tobuf() + b"1" * (1 << 20))
        self.refused("a.tgz", "a header of 65537 bytes")

    def test_a_member_of_negative_size_is_not_read_for_ever(self):
        header = bytearray(tarfile.TarInfo("02-x/a.cpp").tobuf(tarfile.GNU_FORMAT))
        header[124:136] = b"\xff" * 10 + b"\xfe\x00"  # -512
        (self.root / "a.tar").write_bytes(header + bytes(1024))
        self.refused("a.tar", "a header of -512 bytes")

    def test_for_a_compiler_a_line_ends_at_a_carriage_return(self):
        file = self.root / "s/02-x/a.cpp"
        self.write("s/02-x/a.cpp")
        file.write_bytes(SOURCE.replace("  return 1;", '  //\r#include "secret"\r\n  return 1;').encode())
        text = read_submission(self.root / "s", PLACES).files["02-x/a.cpp"]
        flags = marked_lines.take(SOURCE, text, "02-x/a.cpp").flags["02.1"]
        self.assertEqual({(4, True)}, {(flag.line, flag.grave) for flag in flags})

    def test_what_was_not_taken_is_named_where_nothing_is_left(self):
        self.write("s/02-x/a.cpp", "\0")
        self.refused("s", "under their names; not taken: 02-x/a.cpp has more than 256 KiB, or is no text")

    def test_thousands_of_folders_in_each_other_are_not_made(self):
        with zipfile.ZipFile(self.root / "a.zip", "w") as archive:
            archive.writestr("a/" * 1000 + "02-x/a.cpp", "x")
        self.refused("a.zip", "has no file of the tree")

    def test_names_of_any_bytes_are_told_as_text(self):
        with tarfile.open(self.root / "a.tar", "w", encoding="utf-8", errors="surrogateescape") as archive:
            for name in ("02-x/a.cpp", os.fsdecode(b"02-x/\xff.cpp"), "02-x/\x1b[2J\n10 of 10 points.cpp"):
                archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        note, = read_submission(self.root / "a.tar", PLACES).notes
        self.assertTrue(note.isprintable(), repr(note))
        note.encode()


class TestNeighbours(Folder):
    """One submission that cannot be read, among others."""

    def test_what_cannot_be_read_is_a_submission_without_points_and_no_end_of_the_class(self):
        self.write("s/anna/02-x/a.cpp", "x")
        (self.root / "s/link").symlink_to("/dev/zero")
        os.mkfifo(self.root / "s/pipe")
        self.write("s/many/02-x/a.cpp")
        self.write("s/zip.zip", "PK")
        students = grade_class.find_students(self.root / "s")
        with mock.patch.object(submission, "MOST_FILES", -1):
            self.assertEqual("", grade_class.digest_of(students["many"]))
        self.assertEqual(["", ""], [grade_class.digest_of(students[name]) for name in ("link", "pipe")])
        self.assertTrue(grade_class.digest_of(students["anna"]))
        settings = mock.Mock(whole_files=False, hidden=None, sandbox=mock.Mock(kind="none", why=""))
        for name in ("link", "pipe", "zip"):
            facts, report = grade_class.grade_one(mock.Mock(places=PLACES, settings=settings), students[name], [])
            self.assertFalse(facts["graded"])
            self.assertIn("could not be graded", report)

    def test_a_fault_of_the_grader_costs_one_submission(self):
        self.write("s/anna/02-x/a.cpp", "x")
        faulty = mock.Mock(places=PLACES, teachers=(), settings=mock.Mock(whole_files=False, hidden=None,
                                                                          sandbox=mock.Mock(kind="none", why="")))
        faulty.grade.side_effect = TypeError("no len()")
        facts, report = grade_class.grade_one(faulty, self.root / "s/anna", [])
        self.assertFalse(facts["graded"])
        self.assertIn("could not be graded: a fault of the grader: TypeError('no len()')", report)

    def test_a_file_that_is_too_large_to_be_taken_is_not_read(self):
        self.write("s/anna/02-x/a.cpp", "x")
        before = grade_class.digest_of(self.root / "s/anna")
        with open(self.root / "s/anna/large", "wb") as file:
            file.truncate(1 << 40)
        self.assertNotEqual(before, grade_class.digest_of(self.root / "s/anna"))

    def test_a_name_that_cannot_be_shown_is_refused(self):
        for name in ("a\nb", os.fsdecode(b"\xff"), "\x1b[2J"):
            with self.subTest(repr(name)):
                (self.root / "t" / name).mkdir(parents=True)
                with self.assertRaisesRegex(CourseworkError, "rename it") as caught:
                    grade_class.find_students(self.root / "t")
                self.assertTrue(str(caught.exception).isprintable())
                (self.root / "t" / name).rmdir()

    def test_no_cell_begins_with_a_formula_wherever_a_spreadsheet_divides(self):
        rows = {"=cmd|'x'!A0": {"points": 0, "of": 1, "tasks": [], "notes": ["02-x/a;=cmd().cpp"]}}
        text = gradebook.grades_csv(rows, [])
        row = list(csv.reader(io.StringIO(text)))[1]
        self.assertEqual("'=cmd|'x'!A0", row[0])
        self.assertIn('"02-x/a;=cmd().cpp"', text)

    def test_another_seed_than_the_folders_is_refused(self):
        wanted = {"seed": 1, "tasks": []}
        self.assertEqual(1, grade_class.Results(self.root / "r", wanted, 1).seed)
        self.assertEqual(1, grade_class.Results(self.root / "r", {**wanted, "seed": 2}).seed)
        with self.assertRaisesRegex(CourseworkError, "--seed 2: .* with seed 1, expected this one or none") as caught:
            grade_class.Results(self.root / "r", {**wanted, "seed": 2}, 2)
        self.assertNotIn("\n", str(caught.exception))

    def test_gradescopes_student_reads_why_there_is_nothing_to_grade(self):
        self.write("essay.txt", "x")
        for error, told in ((SubmissionError("no file"), True), (CourseworkError("no compiler"), False)):
            with mock.patch.object(grade, "grade", mock.Mock(side_effect=error)), mock.patch.object(grade, "complain"):
                status = grade.main([str(self.root / "essay.txt"), "--gradescope", str(self.root / "r.json")], self.root)
            self.assertEqual((2, told), (status, (self.root / "r.json").exists()))
            if told:
                result = json.loads((self.root / "r.json").read_text())
                self.assertEqual((0, "could not be graded: no file"), (result["score"], result["output"]))
                (self.root / "r.json").unlink()

    def test_one_that_could_not_be_graded_is_tried_again(self):
        results = grade_class.Results(self.root / "r", {"seed": 1})
        for graded in (True, False):
            (results.students / "anna.json").write_text(json.dumps({"submission": "x", "graded": graded}))
            self.assertEqual(graded, results.known("anna", "x") is not None)


if __name__ == "__main__":
    unittest.main()
