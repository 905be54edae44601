"""`lockstep bench`: where it says that it is, and what is left of it when it is stopped."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]
from bench_rounds import Group, Measuring, NotHere, Run, Terminal  # noqa: E402
from processes import gone, start  # noqa: E402

# A step takes 2 ms. With half of the batch, as two of them at once have it, a run does not end.
STAGE = """#!{python}
import json, os, sys, time
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if option["--batch-size"] == "32":
    open(f"{folder}/{{os.getpid()}}.pid", "w").close()
    time.sleep(600)
json.dump({{"step_seconds": [0.5] + [0.002] * 9}}, open(option["--metrics"], "w"))
"""


class TestStopped(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        shutil.copytree(ROOT / "tools", self.folder / "tools",
                        ignore=shutil.ignore_patterns("__pycache__"))
        self.stage = self.folder / "build/01-single-gpu/01-single-gpu"
        self.stage.parent.mkdir(parents=True)
        self.write(STAGE.format(python=sys.executable, folder=self.folder))

    def write(self, text):
        self.stage.write_text(text)
        self.stage.chmod(0o755)

    def bench(self):
        """Stage 01, then two of its processes apart, which hang."""
        return start(self, sys.executable, "-B", self.folder / "tools/bench.py", "--part", "ranks",
                     "--model", "seed", "--python", "none", "--json", self.folder / "found.json",
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def stopped(self, number):
        """Status and output of a run that gets a signal while two processes run."""
        process = self.bench()
        deadline = time.monotonic() + 60
        while len(pids := list(self.folder.glob("*.pid"))) < 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        self.addCleanup(self.end_all, pids)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        for path in pids:
            self.assertTrue(gone(int(path.stem)), path)
        return process.returncode, output, errors

    def end_all(self, pids):
        """Ends what a failed case left."""
        for path in pids:
            command = Path("/proc", path.stem, "cmdline")
            if command.exists() and str(self.stage) in command.read_text():
                os.kill(int(path.stem), signal.SIGKILL)

    def test_what_was_measured_is_printed_and_kept_and_no_process_is_left(self):
        for number, status, reason in ((signal.SIGINT, 130, "Ctrl-C"),
                                       (signal.SIGTERM, 143, "signal 15")):
            code, output, errors = self.stopped(number)
            self.assertEqual(status, code, errors)
            self.assertRegex(output, r"Two ranks.*:\nseed, global batch 64:\n"
                                     r"  one process +2\.00 ms/step +1\.00 times one process\n$")
            self.assertEqual(f"bench: stopped before the end: {reason}\n", errors)
            found = json.loads((self.folder / "found.json").read_text())
            self.assertEqual(reason, found["stopped"])
            self.assertEqual({"one process": 0.002}, found["parts"]["ranks"][0]["step_seconds"])
            for path in (*self.folder.glob("*.pid"), self.folder / "found.json"):
                path.unlink()

    def test_a_stage_that_fails_ends_it_with_what_was_measured(self):
        self.write(STAGE.replace("time.sleep(600)", "sys.exit(3)").format(
            python=sys.executable, folder=self.folder))
        process = self.bench()
        output, errors = process.communicate(timeout=60)
        self.assertEqual(1, process.returncode)
        self.assertRegex(output, r"one process +2\.00 ms/step")
        self.assertRegex(errors, r"(^|\n)bench: stopped before the end: .*--batch-size 32.* ended with "
                                 r"status 3\n$")


class TestProgress(unittest.TestCase):
    def test_it_says_how_many_runs_of_how_many_what_and_how_long(self):
        said, saying = [], threading.Event()
        terminal = Terminal(io.StringIO())
        terminal.every, shown = 0.01, []
        terminal.show = shown.append

        def say(line):
            said.append(line)
            saying.set()
        terminal.say = say

        def call():  # until a line was printed in its time
            saying.clear()
            self.assertTrue(saying.wait(60))
            saying.clear()
            self.assertTrue(saying.wait(60))
            return len(said)
        runs = {name: Run(f"stage {name}", 60.0, call) for name in ("01", "02")}
        group = Group("ranks", runs, 2, lambda found: [f"{len(found)} runs"], dict)
        Measuring([group], {"ranks": "Ranks:"}, terminal).run()
        text = "\n".join(said)
        for number, what in enumerate(("stage 01, round 1", "stage 02, round 1",
                                       "stage 01, round 2", "stage 02, round 2"), 1):
            self.assertRegex(text, rf"0:0\d  {number} of 4: ranks, {what} of 2; about \d+ (s|min) left")
        self.assertRegex(said[0], "about 4 min left")
        self.assertEqual([["", "Ranks:", "2 runs"]], shown)

    def test_what_cannot_be_measured_here_is_no_time_that_is_left(self):
        def call():
            raise NotHere("no cable")
        terminal, shown = Terminal(io.StringIO()), []
        terminal.show = shown.append
        runs = {name: Run(name, 60.0, call) for name in ("one", "two")}
        measuring = Measuring([Group("overlap", runs, 3, list, dict)], {}, terminal)
        measuring.run()
        self.assertEqual([["  not measured: no cable"]], shown)
        self.assertEqual({}, measuring.progress.waiting)

    def test_on_a_terminal_the_line_is_rewritten(self):
        screen = io.StringIO()
        screen.isatty = lambda: True
        terminal = Terminal(screen)
        terminal.say("1 of 2")
        terminal.say("2 of 2")
        terminal.show([])
        self.assertEqual("\r\033[K1 of 2\r\033[K2 of 2\r\033[K", screen.getvalue())
        self.assertLess(terminal.every, Terminal(io.StringIO()).every)

    def test_elsewhere_it_is_a_line_like_others(self):
        file = io.StringIO()
        Terminal(file).say("1 of 2")
        self.assertEqual("1 of 2\n", file.getvalue())


if __name__ == "__main__":
    unittest.main()
