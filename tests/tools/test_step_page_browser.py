"""`./lockstep show` in a browser: it steps, counts, scrolls and can be read."""

import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import browser  # noqa: E402
from step_page_support import (MEMORY, plan_of, SCHEDULES, schedule_plan, schedule_words, show,  # noqa: E402
                               small_trace, write_trace)


@unittest.skipUnless(browser.found(), "no Chromium")
class TestInABrowser(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)

    def page(self, *words, **options):
        target = Path(self.folder.name) / "page.html"
        self.assertEqual(0, show("-o", target, *words).returncode)
        window = browser.Browser(self, **options)
        window.open(target)
        return window

    def counts(self, window):
        """Of each lane: name, now, most so far, by the formula; and the idle share."""
        rows = window.run("return [...document.getElementById('lanes').rows]"
                          ".map((row) => [...row.cells].map((cell) => cell.textContent))")
        return rows, window.text("#idle")

    def check_moment(self, window, plan, moment):
        """The page beside the plan: counted here by looking at every bar."""
        rows, idle = self.counts(window)
        for row, (name, now, most, _) in zip(plan.rows, rows, strict=True):
            def count(t):
                return (sum(bar.takes for bar in row.bars if bar.begin <= t)
                        - sum(bar.gives for bar in row.bars if bar.end <= t))
            begun = [bar.begin for bar in row.bars if bar.begin <= moment]
            self.assertEqual(name, row.name)  # the page shows three decimals
            self.assertAlmostEqual(float(now), count(moment), delta=0.001)
            self.assertAlmostEqual(float(most), max(map(count, begun), default=0), delta=0.001)
        if moment > 0:
            streams = [row for row in plan.rows if not row.curve]
            busy = sum(max(0, min(bar.end, moment) - bar.begin) for row in streams for bar in row.bars)
            self.assertEqual(idle, f"{100 * (1 - busy / moment / len(streams)):.1f} %")
        running = window.run("return [...document.querySelectorAll('.bar.running')].map((bar) => bar.id)")
        self.assertEqual(running, [f"plan-{number}" for number, bar in enumerate(plan.bars())
                                   if bar.begin <= moment < bar.end])

    def test_it_steps_and_counts_as_the_simulation(self):
        for schedule, (devices, chunks, micro_batches) in SCHEDULES.items():
            plan, window = schedule_plan(schedule), self.page(*schedule_words(schedule))
            moments = sorted({moment for bar in plan.bars() for moment in (bar.begin, bar.end)})
            for moment in moments:
                self.check_moment(window, plan, moment)
                self.assertIn(f"At {moment:g} of {plan.end:g} forwards", window.text("#now"))
                window.press("Right")
            rows, idle = self.counts(window)
            self.assertEqual([[row[0], "0"] for row in rows], [row[:2] for row in rows])
            self.assertEqual([row[2] for row in rows], [row[3] for row in rows])  # the formula's
            bubble = (devices - 1) / (chunks * micro_batches + devices - 1)
            self.assertEqual(f"{100 * bubble:.1f} %", idle)
            formula = "(p-1)/(m+p-1)" if chunks == 1 else "(p-1)/(Vm+p-1)"
            self.assertIn(f"bubble {formula} = {devices - 1}/{chunks * micro_batches + devices - 1} = {idle}",
                          window.text("#formula"))
            self.assertIn("all is done", window.text("#now"))

    def test_it_steps_through_a_sharded_step(self):
        words = ("--stage", "06", "--model", "seed", "--shard", "parameters")
        plan, window = plan_of("06", *words[2:]), self.page(*words)
        moments = sorted({moment for bar in plan.bars() for moment in (bar.begin, bar.end)})
        for number, moment in enumerate(moments):
            if number % 5 == 0:
                self.check_moment(window, plan, moment)
            window.press("Right")
        [compute, communication, memory], _ = self.counts(window)
        self.assertEqual(["compute", "0", "0", ""], compute)
        self.assertAlmostEqual(float(communication[1]), float(communication[3]), delta=0.05)  # the loss goes along
        self.assertEqual("0", memory[1])  # all is given back
        self.assertEqual(memory[2], memory[3])  # at most what the formula says
        number = next(i for i, bar in enumerate(plan.bars()) if bar.text.startswith("forward of conv2"))
        window.point(f"#plan-{number}")
        self.assertRegex(window.text("#told"), r"^compute: forward of conv2: conv2d, .*\. Comes after: gather conv2: "
                                               r"all_gather; [\d.]+ [KM]iB sent on communication\.$")

    def test_an_arrow_comes_from_a_send_that_begins_with_its_receive(self):
        words = ("--stage", "07", "--devices", "2", "--mesh", "pipeline=2", "--accumulate", "2")
        plan, window = plan_of("07", *words[4:], devices=2), self.page(*words)
        number = next(i for i, bar in enumerate(plan.bars()) if "receive" in bar.text and bar.name == "along pipeline")
        window.point(f"#plan-{number}")
        self.assertRegex(window.text("#told"), r"Comes after: the begin of along pipeline: send; [\d.]+ KiB sent on device")

    def test_an_arrow_comes_from_the_part_of_a_block_that_is_waited_for(self):
        words = ("--stage", "04", "--model", "resnet18", "--bucket-mb", "5")
        plan, window = plan_of("04", *words[2:]), self.page(*words)
        bars = plan.bars()
        number = next(i for i, bar in enumerate(bars) if bar.name.startswith("bucket")
                      and any(bars[before].end > bar.begin for before in bar.after))
        window.point(f"#plan-{number}")
        self.assertRegex(window.text("#told"), r"Comes after: a part of backward of block\d")
        ends = window.run("const arrow = document.querySelector('.arrow'); "
                          "return [arrow.x1.baseVal.value, arrow.x2.baseVal.value]")
        self.assertEqual(*ends)

    def test_a_measured_step_has_a_curve_of_memory(self):
        window = self.page("--trace", small_trace(Path(self.folder.name) / "trace", MEMORY))
        window.run("document.getElementById('run').focus()")
        window.press("Right", "Down", "Down", "Down")
        self.assertEqual("cpu:0 memory, from 0 to 4.00 MiB: 1.50 MiB in use from 1.750 ms on.",
                         window.text("#told"))
        heights = window.run("return [...document.querySelectorAll('#run .memory.bar rect')]"
                             ".map((rect) => rect.getBoundingClientRect().height)")
        self.assertEqual([45, 60, 22], [int(height) for height in heights])

    def test_columns_in_which_nothing_would_stand_are_not_there(self):
        heads = ("return [...document.querySelectorAll('thead th')].filter((cell) => cell.offsetParent)"
                 ".map((cell) => cell.textContent)")
        for words, expected in ((("--stage", "02"), ["lane", "now", "by the formula"]),
                                (("--stage", "03"), ["lane", "now", "most so far", "by the formula"]),
                                (("--stage", "01"), ["lane", "now"])):
            self.assertEqual(expected, self.page(*words).run(heads))

    def test_what_is_to_come_is_pale_and_marks_on_it_are_not(self):
        window = self.page(*schedule_words("1f1b"))
        last = len(schedule_plan("1f1b").bars()) - 1
        look = ("const bar = document.getElementById(arguments[0]); const of = (part) => getComputedStyle(part); "
                "return [of(bar).opacity, of(bar.querySelector('rect')).fillOpacity, "
                "of(bar.querySelector('rect')).strokeWidth, of(bar.querySelector('text')).fill === of(document.body).color]")
        self.assertEqual(["1", "1"], window.run(look, "plan-0")[:2])
        self.assertEqual(["1", "0.22", "0.5px", True], window.run(look, f"plan-{last}"))
        window.point(f"#plan-{last}")
        self.assertEqual(["1", "0.22", "3px", True], window.run(look, f"plan-{last}"))

    def test_many_lanes_leave_room_for_the_drawing(self):
        top = "return document.getElementById('plan').getBoundingClientRect().top"
        few, many = self.page(*schedule_words("1f1b")), self.page("--devices", 24, "--micro-batches", 24)
        for _ in range(23):
            many.press("Right")
        self.assertLess(many.run(top), few.run(top) + 60)
        self.assertIn("24 of 24 lanes work; stage 0: ", many.text("#now"))
        eight = self.page("--devices", 8, width=1366, height=768)
        bottom, seen = eight.run("return [document.querySelector('#plan .unit').getBoundingClientRect().bottom, innerHeight]")
        self.assertLess(bottom, seen)

    def test_a_stretched_drawing_follows_the_moment_and_its_lanes_keep_their_names(self):
        window = self.page(*schedule_words("1f1b"))
        window.press("+", "+", "+")
        for key in ("End", "Home"):
            window.press(key)
            window.run("window.dispatchEvent(new Event('resize'))")
            line, name, end = window.run("const at = (found) => document.querySelector(found).getBoundingClientRect(); "
                                         "return [at('.moment').left, at('#plan .lane').left, at('#scroll').right]")
            self.assertTrue(0 <= line <= end + 1 and 0 <= name < 100, (key, line, name, end))

    def test_a_projector_gets_larger_letters(self):
        height = "return document.querySelector('#plan .lane').getBoundingClientRect().height"
        laptop, projector = (self.page(*schedule_words("1f1b"), width=width, height=1080).run(height)
                             for width in (1366, 1920))
        self.assertAlmostEqual(1.4, projector / laptop, delta=0.1)

    def test_after_a_click_on_a_drawing_the_arrows_go_on_stepping(self):
        window = self.page(*schedule_words("1f1b"))
        window.click("#plan-3")
        window.press("Right")
        self.assertIn("(moment 2 of ", window.text("#now"))

    def test_what_runs_in_the_plan_is_outlined_in_the_run(self):
        trace = write_trace(Path(self.folder.name) / "pipeline", {
            "compute": [(0.9, 1, "sgd_update", "", 0), (1, 2, "conv2d", "forward 0/conv1", 1),
                        (2, 3, "conv2d_backward_weight", "backward 0/conv1", 1), (3, 4, "sgd_update", "", 1)]})
        window = self.page("--schedule", "naive", "--devices", 1, "--trace", trace)
        outlined = ("return [...document.querySelectorAll('#run .same')].map((bar) => "
                    "bar.querySelector('text').textContent)")
        self.assertEqual(["F0"], window.run(outlined))
        window.press("Right")
        self.assertEqual(["B0"], window.run(outlined))
        self.assertEqual(1, window.run("return document.querySelectorAll('.moment').length"))
        self.assertIn("the plan counts in forwards, the run in ms", window.text("#about-run"))
        self.assertIn("The trace does not say what its run was", window.text("#about-run"))

    def test_a_rank_shows_its_groups_in_all_grids_of_the_mesh(self):
        window = self.page("--stage", "07", "--devices", 4, "--nodes", 2, "--mesh", "data=2,shard=2,tensor=2")
        filled = ("return [...document.querySelectorAll('.grid')].map((grid) => [...grid.querySelectorAll('.bar.together')]"
                  ".map((bar) => Number(bar.dataset.rank)).sort((a, b) => a - b))")
        self.assertEqual([[0, 4], [0, 2], [0, 1], [0, 2, 4, 6]], window.run(filled))
        window.point(".grid .bar[data-rank='5']")
        self.assertEqual([[1, 5], [5, 7], [4, 5], [1, 3, 5, 7]], window.run(filled))
        self.assertEqual("rank 5 on host 1: data 1, shard 0, tensor 1; its group along data: 1, 5.", window.text("#told"))
        window.point("h1")
        window.run("document.getElementById('mesh').focus()")
        for key, rank in (("Left", 4), ("Down", 6), ("Left", 3), ("Right", 6)):
            window.press(key)
            self.assertIn(f"rank {rank} on host", window.text("#told"))
        self.assertEqual([[2, 6], [4, 6], [6, 7], [0, 2, 4, 6]], window.run(filled))
        at = window.text("#now")
        window.press("Escape", "Right")  # steps again
        self.assertNotEqual(at, window.text("#now"))
        for theme in ("light", "dark"):
            seen = window.run("const of = (part) => getComputedStyle(document.querySelector(part)); "
                              "return [of('.grid .bar.shard.together rect').fill, "
                              "of('#plan .bar.shard rect').fill, of('.grid .bar.data.together rect').fill, "
                              "of('#plan .bar.data rect').fill]")
            self.assertEqual(seen[0::2], seen[1::2], theme)
            self.assertNotEqual(seen[0], seen[2])
            window.press("t")
        self.assertTrue(window.run("return document.documentElement.scrollWidth <= innerWidth"))

    def test_buttons_and_keys_lead_to_the_same_moments(self):
        window = self.page(*schedule_words("1f1b"))
        begin = window.text("#now")
        window.press("Left")
        self.assertEqual(begin, window.text("#now"))
        seen = {}
        for key, button in (("Right", "forward"), ("End", "last"), ("Left", "back"), ("Home", "first")):
            window.press(key)
            seen[key] = window.text("#now")
        for key, button in (("Right", "forward"), ("End", "last"), ("Left", "back"), ("Home", "first")):
            window.click(f"#{button}")
            self.assertEqual(seen[key], window.text("#now"))
        self.assertEqual(4, len(set(seen.values())))

    def test_pointing_at_a_bar_tells_it_and_what_it_comes_after(self):
        window = self.page(*schedule_words("1f1b"))
        plan = schedule_plan("1f1b")
        number = next(i for i, bar in enumerate(plan.bars()) if bar.text == "backward of micro-batch 2")
        window.point(f"#plan-{number}")
        # The other one made room for the activation that stage 0 has sent meanwhile.
        self.assertEqual("stage 0: backward of micro-batch 2. Comes after: backward of micro-batch 1 on stage 1; "
                         "backward of micro-batch 2 on stage 1.", window.text("#told"))
        marked = window.run("return [...document.querySelectorAll('.before')].map((bar) => bar.id)")
        self.assertEqual({f"plan-{i}" for i in plan.bars()[number].after}, set(marked))
        self.assertEqual(2, window.run("return document.querySelectorAll('.arrow').length"))

    def test_a_trace_is_read_with_the_keyboard_alone(self):
        trace = small_trace(Path(self.folder.name) / "trace")
        window = self.page(*schedule_words("gpipe"), "--trace", trace)
        window.run("document.getElementById('run').focus()")
        for keys, text in ((["Right"], "host: the host enqueues 2 operations of conv1."),
                           (["Down"], "cpu:0 compute: conv1: 0.500 ms; conv2d (conv1) 0.400 ms, relu "
                                      "(conv1) 0.100 ms."),
                           (["Right", "Right", "Right"], "cpu:0 compute: nothing for 0.7 ms, before 0.100 ms; "
                                                "sgd_update 0.100 ms."),
                           (["Right", "Right", "Right"], None)):
            window.press(*keys)
            if text:
                self.assertEqual(text, window.text("#told"))
        at = window.text("#now")
        window.press("Escape", "Right")  # steps again
        self.assertNotEqual(at, window.text("#now"))
        for selector in ("#now", "#told"):
            self.assertEqual("polite", window.run(
                "return document.querySelector(arguments[0]).ariaLive", selector))

    def test_it_can_be_stretched_and_is_dark_or_light(self):
        window = self.page(*schedule_words("gpipe"))
        width = "return document.getElementById('plan-0').getBoundingClientRect().width"
        narrow = window.run(width)
        window.press("+")
        self.assertAlmostEqual(2, window.run(width) / narrow, delta=0.1)
        window.press("-")
        paper = "return getComputedStyle(document.body).backgroundColor"
        light = window.run(paper)
        window.press("t")
        self.assertNotEqual(light, window.run(paper))
        window.click("#theme")
        self.assertEqual(light, window.run(paper))
        dark = self.page(*schedule_words("gpipe"))
        dark.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia",
                 params={"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
        self.assertNotEqual(light, dark.run(paper))


if __name__ == "__main__":
    unittest.main()
