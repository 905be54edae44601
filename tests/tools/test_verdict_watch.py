"""Deadlock or endless loop: what the grader says about a program that does not end, whatever else
the machine does."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

from coursework.tasks import Task  # noqa: E402
from coursework.report import lines_of  # noqa: E402
from coursework.verdict import PASSED, Way, verdict_of  # noqa: E402
from coursework.watch import WAITS, Sample, look_at, share_computed  # noqa: E402
from coursework_support import WITNESS  # noqa: E402
from processes import start  # noqa: E402

LOOP = "while :; do :; done"
# Two threads: one waits for the other, which checks a thousand times a second.
POLLS = """import threading, time
never = threading.Event()
def look():
    while not never.is_set():
        time.sleep(0.001)
threading.Thread(target=look).start()
never.wait()"""
COMPUTES_BESIDE = "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\n"


def samples(count, period, idle, computed):
    """Samples of one thread, `period` seconds apart: every so often (`idle`) all sleep; it computes
    `computed` seconds from one sample to the next."""
    return [Sample(number * period, bool(idle) and number % idle == 0, {7: number * computed})
            for number in range(count)]


class TestShare(unittest.TestCase):
    def test_a_loop_computes_always_however_little_it_may(self):
        for computed in (0.1, 0.02, 0.001, 0):
            self.assertEqual(share_computed(samples(40, 0.1, 0, computed)), 1)

    def test_a_deadlock_never(self):
        self.assertEqual(share_computed(samples(40, 0.1, 1, 0)), 0)

    def test_who_looks_now_and_then_waits_also_where_it_mostly_queues(self):
        # asleep for one look of ten, in the queue for nine, 20 us of computing each
        self.assertLess(share_computed(samples(40, 0.001, 10, 0.00002)), WAITS)

    def test_who_sleeps_for_moments_computes(self):
        self.assertGreater(share_computed(samples(40, 0.1, 10, 0.09)), WAITS)

    def test_a_thread_that_ends_takes_nothing_back(self):
        before, after = Sample(0, False, {1: 50, 2: 1}), Sample(1, True, {2: 1})
        self.assertEqual(share_computed([before, after]), 0)

    def test_without_a_look_nothing_is_claimed(self):
        self.assertEqual(share_computed([]), 1)


class TestLook(unittest.TestCase):
    def test_sees_what_left_for_another_session(self):
        process = start(self, "sh", "-c", "setsid sh -c 'echo; while :; do :; done' & wait",
                        stdout=subprocess.PIPE, start_new_session=True)
        process.stdout.readline()
        child = next(pid for pid in look_at(process.pid).computed if pid != process.pid)
        self.addCleanup(os.kill, child, 9)
        self.assertFalse(look_at(process.pid).idle)

    def test_a_process_that_has_ended_is_nothing_to_see(self):
        process = subprocess.Popen(["true"])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self.assertIsNone(look_at(process.pid))
        process.wait()
        self.assertIsNone(look_at(process.pid))


class TestVerdict(unittest.TestCase):
    """Programs that do not end, alone and next to others that take the processors."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.program = Path(folder.name) / "program"
        self.pin = ""

    def verdict(self, script, python="", deadline=0.5):
        run = f"exec {sys.executable} -c '{python}'" if python else script
        self.program.write_text(f"{WITNESS}{self.pin}\nbegins 'A case'\n{run}\n")
        self.program.chmod(0o755)
        task = Task(id="02.1", name="the first", file="a.cpp", symbols=("first",), teaches="One.",
                    points=1, minutes=5, deadline=deadline)
        return verdict_of(task, Way(self.program))

    def compete(self):
        """Leaves a tenth of one processor to the program. Each rival has a session of its own: the
        kernel may share out processors by session."""
        core = min(os.sched_getaffinity(0))
        self.pin = f"taskset -pc {core} $$ >/dev/null"
        for _ in range(9):
            start(self, "taskset", "-c", core, "sh", "-c", LOOP, start_new_session=True)

    def assert_deadlock(self, verdict):
        self.assertEqual((verdict.how, verdict.waits), ("deadline", True), verdict.text)
        self.assertRegex(verdict.text, r"after \d s, of which it computed 0\.\d s: .*a deadlock")
        self.assertIn("failed: deadlock", lines_of(verdict)[0])
        self.assertTrue(verdict.facts()["waits"])

    def assert_endless(self, verdict):
        self.assertEqual((verdict.how, verdict.waits), ("deadline", False), verdict.text)
        self.assertRegex(verdict.text, "endless")
        self.assertIn("failed: endless", lines_of(verdict)[0])

    def test_a_deadlock(self):
        self.assert_deadlock(self.verdict("exec sleep 1000"))

    def test_a_deadlock_of_a_program_that_looks_whether_it_may_go_on(self):
        self.assert_deadlock(self.verdict("", POLLS, deadline=1))

    def test_a_deadlock_on_a_busy_machine(self):
        self.compete()
        self.assert_deadlock(self.verdict("sleep 1000 & wait"))

    @unittest.skipUnless("LOCKSTEP_FULL" in os.environ, "only with --full: the same, while others compute")
    def test_who_looks_whether_it_may_go_on_is_in_a_deadlock_on_a_busy_machine(self):
        self.compete()
        self.assert_deadlock(self.verdict("", POLLS, deadline=3))

    def test_an_endless_loop_beside_a_thread_that_waits(self):
        self.assert_endless(self.verdict("", COMPUTES_BESIDE, deadline=1))

    def test_an_endless_loop_on_a_busy_machine_is_told_as_such_after_a_second_try(self):
        self.compete()
        runs = self.program.with_name("runs")
        verdict = self.verdict(f"echo >>{runs}; {LOOP}")
        self.assert_endless(verdict)
        self.assertEqual(runs.read_text().count("\n"), 2)
        self.assertRegex(verdict.text, r"after 2 s, of which other programs left it 0\.\d s")
        self.assertLess(verdict.computed, 1)  # otherwise nothing was shown

    def test_who_was_kept_from_computing_may_pass_at_the_second_try(self):
        self.compete()
        runs = self.program.with_name("runs")
        verdict = self.verdict(f"[ ! -e {runs} ] || {{ asserts 1; ended; exit 0; }}; echo >{runs}; {LOOP}")
        self.assertEqual(verdict.status, PASSED, verdict.text)


if __name__ == "__main__":
    unittest.main()
