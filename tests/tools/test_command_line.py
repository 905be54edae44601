"""What all tools do alike (tools/command_line.py, tools/plain_files.py): errors are one line, nothing
that they write is an order to the terminal, files are read and written with care."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import command_line  # noqa: E402
import plain_files  # noqa: E402

ESCAPE = "\x1b[2J\x1b]0;title\x07"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def tool(name, *words):
    return subprocess.run([sys.executable, ROOT / "tools" / name, *words], capture_output=True, timeout=60,
                          stdin=subprocess.DEVNULL)


class TestText(unittest.TestCase):
    def test_no_character_of_a_text_is_an_order(self):
        for text, shown in (("a\tb\nc é 漢", "a\tb\nc é 漢"), (ESCAPE, "\\x1b[2J\\x1b]0;title\\x07"),
                            ("a\rb\x7f", "a\\x0db\\x7f"), ("\x9b2J", "\\xc2\\x9b2J"),
                            ("\u202eabc\u2066", "\\xe2\\x80\\xaeabc\\xe2\\x81\\xa6"), ("a\u2028b", "a\\xe2\\x80\\xa8b"),
                            (os.fsdecode(b"a\x9b\xff"), "a\\x9b\\xff"), ("\ud800", "\\xed\\xa0\\x80")):
            self.assertEqual(shown, command_line.printable(text))
        self.assertEqual("a b\\x1b", command_line.one_line("a\nb\x1b"))

    def test_whatever_a_tool_writes_goes_through_it(self):
        code = ("import sys\nimport command_line\n"
                "def main(words):\n    print('out', words[0])\n    print('err', words[0], file=sys.stderr)\n"
                "    sys.exit('end ' + words[0])\n"
                "command_line.run_command(main)")
        done = subprocess.run([sys.executable, "-c", code, b"\x1b[2J\xff"], capture_output=True, timeout=60,
                              cwd=ROOT / "tools")
        self.assertEqual((b"out \\x1b[2J\\xff\n", b"err \\x1b[2J\\xff\nend \\x1b[2J\\xff\n", 1),
                         (done.stdout, done.stderr, done.returncode))

    def test_nor_do_the_programs_write_otherwise(self):
        """All text of the programs goes through common/core/text.h."""
        prints = re.compile(r"\b(fmt::print|f?puts|v?f?printf|std::cout|std::cerr|std::perror)\b(?! does)")
        allowed = {"common/core/text.h", "common/core/text.cpp",
                   "common/options/report.cpp",  # without memory, too
                   "common/comm/gloo_transport.cpp",  # turns off what Gloo prints
                   "common/training/training_log.cpp",  # a bar of numbers, over a line of its own
                   "common/training/verdict.cpp"}  # what another program has written: printable()
        found = {str(path.relative_to(ROOT)) for folder in (ROOT / "common", *ROOT.glob("0[1-9]-*"))
                 for path in folder.rglob("*") if path.suffix in (".h", ".cpp", ".inl", ".cu", ".cuh")
                 and prints.search(re.sub(r"//.*", "", path.read_text()))}
        self.assertEqual(allowed, found)

    def test_every_tool_begins_and_reads_its_options_there(self):
        starts = [path for path in (ROOT / "tools").glob("*.py") if "__main__" in path.read_text()]
        self.assertGreater(len(starts), 10)
        # These talk to bench.py, and to unittest, which takes exceptions for failures.
        serves = {"bench_torch.py", "run_python_tests.py"}
        for path in starts:
            if path.name not in serves:
                with self.subTest(path.name):
                    self.assertIn("run_command(", path.read_text())
                    self.assertNotIn("argparse.ArgumentParser(", path.read_text())


class TestOneLine(unittest.TestCase):
    def refused(self, name, *words, status=1):
        with self.subTest(name, words=words):
            done = tool(name, *words)
            text = done.stderr.decode()
            self.assertEqual((status, b""), (done.returncode, done.stdout), text)
            self.assertEqual(1, text.count("\n"), text)
            self.assertNotRegex(text.rstrip("\n"), RAW)
            self.assertNotRegex(text, "Traceback|usage:")
            return text

    def test_words_of_any_kind_are_refused_in_one_line(self):
        for name in ("fetch_data.py", "draw_step.py", "exercise.py"):
            self.refused(name)
            self.refused(name, "--no\n" + ESCAPE)
        for name, status in (("grade.py", 2), ("bench.py", 1), ("compare.py", 1), ("lint.py", 1), ("format.py", 1),
                             ("run_tests.py", 2), ("gpu-check", 1)):
            self.refused(name, "--json" if name == "compare.py" else "--no\n" + ESCAPE, status=status)
        self.refused("fetch_data.py", "a\nb")
        self.refused("fetch_data.py", ESCAPE)
        self.refused("exercise.py", "a", "b")
        self.refused("exercise.py", "--lab", ESCAPE + "\n")
        self.refused("step_page.py", "--stage", ESCAPE + "\n")
        self.refused("draw_step.py", b"\x1b[2J\xff\n", "x.svg")
        self.refused("compare.py", "--stages", "\n" + ESCAPE)
        self.refused("figures.py", ESCAPE + "\n")
        for name in ("format.py", "lint.py", "axis_queues.py"):
            self.refused(name, ESCAPE + "\n.cpp")
        self.refused("lint.py", "--clang-tidy", ESCAPE + "\n")

    def test_an_option_is_its_whole_name(self):
        for name, *words in (("fetch_data.py", "synthetic", "--di", "x"), ("exercise.py", "--la"),
                             ("draw_step.py", "a", "b", "--fr", "1")):
            self.refused(name, *words)

    def test_the_front_end_does_so_too(self):
        done = subprocess.run([ROOT / "lockstep", "no\n" + ESCAPE], capture_output=True, text=True, timeout=60)
        self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
        self.assertNotRegex(done.stderr.rstrip("\n"), RAW)
        done = subprocess.run([ROOT / "lockstep", "\\150elp"], capture_output=True, text=True, timeout=60)
        self.assertEqual((1, ""), (done.returncode, done.stdout), "a name is no pattern of awk's")


class TestFiles(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_numbers_of_no_measurement_are_refused(self):
        path = self.folder / "a.json"
        for text in ("1e999", "-1e999", "NaN", "Infinity", "1" + 400 * "0", "1e300"):
            path.write_text('{"a": [' + text + "]}")
            with self.assertRaises(ValueError):
                plain_files.read_json(path)
        path.write_text("[" + 5000 * "1" + "]")  # more digits than Python reads by itself
        with self.assertRaisesRegex(ValueError, "^the number 1{20} is out of range$"):
            plain_files.read_json(path)
        path.write_text(100000 * "[")
        with self.assertRaisesRegex(ValueError, "too many lists in each other"):
            plain_files.read_json(path)
        path.write_text("[1e30]")
        self.assertEqual([1e30], plain_files.read_json(path, largest=1e300))
        path.write_text('{"a": [1e18, -3, 0.5, 9007199254740993, null]}')
        self.assertEqual({"a": [1e18, -3, 0.5, 9007199254740993, None]}, plain_files.read_json(path))

    def test_a_file_is_written_whole_where_a_link_leads_and_keeps_its_mode(self):
        target, link = self.folder / "target", self.folder / "link"
        target.write_text("old")
        target.chmod(0o640)
        link.symlink_to(target)
        plain_files.write_whole(link, "new")
        self.assertTrue(link.is_symlink())
        self.assertEqual(("new", 0o640), (target.read_text(), target.stat().st_mode & 0o777))
        longest = self.folder / (255 * "x")
        plain_files.write_whole(longest, "long")
        self.assertEqual("long", longest.read_text())
        with self.assertRaises(UnicodeEncodeError):
            plain_files.write_whole(target, "\ud800")
        self.assertEqual("new", target.read_text())
        self.assertEqual({"target", "link", longest.name}, {path.name for path in self.folder.iterdir()})

    def test_a_pipe_is_refused_and_not_waited_for(self):
        os.mkfifo(self.folder / "pipe")
        with self.assertRaisesRegex(OSError, "not a regular file"):
            plain_files.read_json(self.folder / "pipe")
        with self.assertRaises(OSError) as caught:
            plain_files.write_whole(self.folder / "pipe", "x")
        self.assertIn("not a regular file", caught.exception.strerror)

    def test_links_in_a_circle_are_refused_and_stay(self):
        link = self.folder / "link"
        link.symlink_to(link.name)
        with self.assertRaises(OSError) as caught:
            plain_files.write_whole(link, "x")
        self.assertIn("in a circle", caught.exception.strerror)
        self.assertEqual([link], list(self.folder.iterdir()))
        self.assertTrue(link.is_symlink())
        for tool in ("exercise.py", "lint.py", "format.py"):
            done = subprocess.run([sys.executable, ROOT / "tools" / tool, link], capture_output=True, text=True)
            self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)


if __name__ == "__main__":
    unittest.main()
