"""Every lab of the stages is in the list, runs, and is in the READMEs."""

import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build-test"))
sys.path.insert(0, str(ROOT / "tools"))
from coursework import labs  # noqa: E402


class TestLabs(unittest.TestCase):
    def names_in(self, program):
        """The labs that a program of labs lists."""
        done = subprocess.run([BUILD / program, "none"], capture_output=True, text=True)
        self.assertEqual(1, done.returncode)
        return re.search(r"expected one of (.*)", done.stderr)[1].split(", ")

    def run_lab(self, *name):
        code = ("import sys; from pathlib import Path; import exercise\n"
                "sys.exit(exercise.main(['--lab', *sys.argv[2:]], programs=Path(sys.argv[1])))")
        return subprocess.run([sys.executable, "-c", code, str(BUILD), *name], capture_output=True,
                              text=True, timeout=100, cwd=ROOT / "tools")

    def test_the_list_is_what_the_programs_have(self):
        for program in sorted({lab["program"] for lab in labs.load_labs().values()}):
            listed = [name for name, lab in labs.load_labs().items() if lab["program"] == program]
            self.assertEqual(self.names_in(program), listed)

    def test_each_lab_shows_and_explains_itself(self):
        for name, lab in labs.load_labs().items():
            with self.subTest(name):
                done = self.run_lab(name)
                story = done.stdout + done.stderr
                self.assertEqual(0, done.returncode, story)
                parts = [done.stdout.find(text) for text in (
                    "Expect: ", "== With the mistake: ", "== Without it: ", "\nWhy: ")]
                self.assertEqual(sorted(parts), parts, story)
                self.assertGreaterEqual(parts[0], 0, story)

    def test_the_readmes_tell_them(self):
        text = (ROOT / "README.md").read_text()
        for name, lab in labs.load_labs().items():
            self.assertIn(f"`{name}`", text)
            stage = lab["program"].split("/")[0]
            self.assertIn(f"labs {name}`", (ROOT / stage / "README.md").read_text())

    def test_an_unknown_lab_is_one_line(self):
        done = self.run_lab("none")
        self.assertEqual((1, "", 1), (done.returncode, done.stdout, done.stderr.count("\n")))
        self.assertIn("--lab none: expected one of batch-reused-early, ", done.stderr)

    def test_without_a_name_all_are_listed(self):
        done = self.run_lab()
        self.assertEqual(0, done.returncode, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(list(labs.load_labs()),
                         [line.split()[0] for line in lines if not line.startswith(" ")])


if __name__ == "__main__":
    unittest.main()
