"""`./lockstep show`: a page that steps through a step, and the drawings on it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import browser  # noqa: E402
import compare_timeline  # noqa: E402
import draw_memory  # noqa: E402
import step_page  # noqa: E402
import step_rows  # noqa: E402
from operation_kinds import MESSAGES, OTHER, PRODUCTS  # noqa: E402
from step_drawing import CLASSES, Drawing, FILLS, PAPER, stacked, ticks  # noqa: E402
from step_rows import Bar, Row, Step  # noqa: E402

BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build-test"))
# Devices, chunks (stages of each), micro-batches.
SCHEDULES = {"naive": (3, 1, 1), "gpipe": (4, 1, 8), "1f1b": (4, 1, 8), "interleaved": (4, 2, 8)}


def show(*words):
    return subprocess.run([sys.executable, str(ROOT / "tools/step_page.py"), "--build", str(BUILD),
                           *map(str, words)], capture_output=True, text=True, timeout=100)


def plan_of(stage, *words):
    return step_page.plan_of(step_page.plans(BUILD)[stage], list(map(str, words)))


def schedule_words(schedule):
    devices, chunks, micro_batches = SCHEDULES[schedule]
    return ("--schedule", schedule, "--stages", devices, "--chunks", chunks, "--micro-batches",
            micro_batches)


def write_trace(path, lanes, memory=()):
    """A trace of one process: a stream's (begin, end, operation, layer, enqueued), in ms; and its
    memory, (ms, MiB in use from then on)."""
    events = [{"ph": "C", "name": "memory", "pid": 0, "tid": 0, "ts": 1e3 * at,
               "args": {"bytes": round(mebibytes * 2**20)}} for at, mebibytes in memory]
    events[:0] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "cpu:0"}}]
    for number, (stream, spans) in enumerate(lanes.items()):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": number,
                       "args": {"name": stream}})
        events += [{"ph": "X", "name": operation, "pid": 0, "tid": number, "ts": 1e3 * begin,
                    "dur": 1e3 * (end - begin), "args": {"layer": layer, "queued": 1e3 * queued}}
                   for begin, end, operation, layer, queued in spans]
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"zero_ns": 0}}))
    return path


def small_trace(path, memory=()):
    """A step from 1 to 3 ms: conv1 forward and backward, a bucket's all-reduce, a pause; and the first
    operation of the next step, which the host enqueues already."""
    updates = [(end - 0.1, end, "sgd_update", "", end - 0.9) for end in (1, 3)]
    return write_trace(path, {
        "compute": sorted([*updates, (1.0, 1.4, "conv2d", "conv1", 1.1), (1.4, 1.5, "relu", "conv1", 1.12),
                           (1.5, 1.6, "nll_loss", "loss", 1.13), (1.6, 2.2, "conv2d_backward_weight", "conv1", 1.6),
                           (3.1, 3.2, "conv2d", "conv1", 2.8)]),
        "communication": [(2.2, 2.5, "all_reduce", "bucket 0/ring", 1.65)]}, memory)


MEMORY = [(0.2, 1), (0.8, 3), (1.5, 6), (1.5, 4), (2.75, 1.5), (3.5, 9)]  # 1.5 ms: two changes at once


def contrast(one, other):
    """Of two colours, 1 to 21, as the Web Content Accessibility Guidelines define it."""
    def luminance(colour):
        parts = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def blend(colour, paper, opacity):
    mixed = [round(opacity * int(colour[at:at + 2], 16) + (1 - opacity) * int(paper[at:at + 2], 16))
             for at in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


class TestRows(unittest.TestCase):
    def test_a_measured_step_has_the_host_its_streams_and_what_waits(self):
        with tempfile.TemporaryDirectory() as folder:
            step = step_page.read_step(small_trace(Path(folder) / "trace"))
        self.assertEqual(["host", "cpu:0 compute", "cpu:0 communication"],
                         [row.name for row in step.rows])
        host, compute, communication = step.rows
        self.assertEqual([("conv1", 0.1, 0.12), ("loss", 0.13, 0.13), ("conv1", 0.6, 0.6), ("bucket 0", 0.65, 0.65),
                          ("", 1.1, 1.1), ("conv1", 1.8, 1.8)],
                         [(bar.name, round(bar.begin, 3), round(bar.end, 3)) for bar in host.bars])
        self.assertEqual("the host enqueues 2 operations of conv1", host.bars[0].text)
        self.assertEqual("the host enqueues 1 operation of conv1, of a later step", host.bars[-1].text)
        self.assertEqual([], host.waits(0, 2, "ms"))
        self.assertEqual([("conv1", "forward"), ("loss", "forward"), ("conv1", "backward"),
                          ("", OTHER)],
                         [(bar.name, bar.kind) for bar in compute.bars])
        self.assertEqual("conv1: 0.500 ms; conv2d (conv1) 0.400 ms, relu (conv1) 0.100 ms",
                         compute.bars[0].text)
        self.assertEqual(["nothing for 0.7 ms, before 0.100 ms; sgd_update 0.100 ms"],
                         [wait.text for wait in compute.waits(0, 2, "ms")])
        self.assertEqual([("bucket 0", MESSAGES)], [(bar.name, bar.kind) for bar in communication.bars])
        self.assertEqual(["nothing for 1.2 ms, before bucket 0", "nothing for 0.5 ms, before the end"],
                         [wait.text for wait in communication.waits(0, 2, "ms")])

    def test_a_pass_is_named_in_a_trace_as_in_a_plan(self):
        self.assertEqual(["F2", "B10", "F2.1", "B0.3", "conv1", "forward"],
                         [step_rows.label_of(name) for name in
                          ("forward 2", "backward 10", "forward 2.1", "backward 0.3", "conv1", "forward")])

    def test_the_plan_of_an_interleaved_pipeline_tells_its_chunks_apart(self):
        plan = plan_of("03", "--schedule", "interleaved")  # 4 devices of 2 chunks, 8 micro-batches
        self.assertEqual("interleaved: 4 devices of 2 chunks, 8 micro-batches", plan.title)
        self.assertEqual([f"device {i}" for i in range(4)], [row.name for row in plan.rows])
        self.assertEqual(["F0.0", "F1.0", "F2.0", "F3.0", "F0.1"], [bar.name for bar in plan.rows[0].bars][:5])
        bars = plan.bars()
        first = next(bar for bar in plan.rows[0].bars if bar.name == "F0.1")
        self.assertEqual([("F0.0", "forward of micro-batch 0 through chunk 0")],
                         [(bars[i].name, bars[i].text) for i in first.after])
        self.assertIn(bars[first.after[0]], plan.rows[3].bars)  # it has been round all devices
        self.assertEqual(2 * 4 * 2 * 8, len({(row.name, bar.name) for row in plan.rows for bar in row.bars}))

    def test_a_ring_says_which_half_it_is_in(self):
        slices = [(0, 1, "transfers", "bucket 0/reduce-scatter"), (1, 1, "add", "bucket 0/reduce-scatter"),
                  (2, 1, "transfers", "bucket 0/all-gather"), (3, 1, "conv2d", "block1.0/conv1")]
        self.assertEqual([("reduce-scatter", MESSAGES), ("reduce-scatter", OTHER),
                          ("all-gather", MESSAGES), ("conv2d", PRODUCTS)],
                         [bar[2:] for bar in step_rows.operations_of(slices)])

    def test_the_plan_of_stage_02_has_the_bytes_that_the_stage_moves(self):
        for devices in (1, 2, 3):
            plan = plan_of("02", "--devices", devices, "--batch-size", 10)
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run([BUILD / "02-dataparallel/02-dataparallel", "--devices",
                                ",".join(f"cpu:{i}" for i in range(devices)), "--batch-size", "10",
                                "--max-steps", "3", "--data", "synthetic:40:10", "--metrics",
                                Path(folder) / "m.json"], check=True, capture_output=True)
                moved = json.loads((Path(folder) / "m.json").read_text())["bytes_moved"]["per_step"]
            self.assertAlmostEqual(moved, 1024 * sum(bar.takes for bar in plan.bars()), places=3)
            self.assertAlmostEqual(moved, 1024 * plan.rows[0].predicted_most, places=3)  # the formula

    def test_the_example_of_stage_02s_bytes_gives_what_is_measured(self):
        text = (ROOT / "02-dataparallel/README.md").read_text()
        sums = re.search(r"two devices: 2 x ([\d.]+) \+ ([\d.]+) \+ 32 x \(([\d.]+) \+ 2 x ([\d.]+)\) = ([\d.]+) KiB",
                         text)
        flat, state, image, scores, total = map(float, sums.groups())
        self.assertAlmostEqual(total, 2 * flat + state + 32 * (image + 2 * scores), delta=0.05)
        self.assertAlmostEqual(total, sum(bar.takes for bar in plan_of("02").bars()), delta=0.05)
        self.assertIn(f"| {total} KiB |", text)

    def test_stage_02_takes_devices_as_a_number_or_as_a_list(self):
        self.assertEqual(plan_of("02", "--devices", 3), plan_of("02", "--devices", "cpu:0,cpu:1,cpu:2"))
        names = [bar.name for bar in plan_of("02", "--devices", 4).rows[0].bars]
        self.assertEqual(["S1", "S2", "S3", "R1", "R2", "R3", "forward", "G1", "G2", "G3", "loss",
                          "S1", "S2", "S3", "backward", "A1", "A2", "A3", "update"], names)

    def test_the_plan_of_stage_04_has_its_buckets_each_after_its_last_layer(self):
        plan = plan_of("04", "--model", "resnet18", "--bucket-mb", 5)
        buckets = [bar for bar in plan.rows[1].bars]
        self.assertGreater(len(buckets), 5)
        self.assertAlmostEqual(42.6, sum(bar.takes for bar in buckets), places=1)
        bars = plan.bars()
        for bucket in buckets:
            [layer] = bucket.after
            self.assertIn(bars[layer], plan.rows[0].bars)
            self.assertEqual("backward", bars[layer].kind)
            self.assertLessEqual(bars[layer].end, bucket.begin)
        self.assertEqual({bars.index(bucket) for bucket in buckets},
                         set(plan.rows[0].bars[-1].after))
        layers = [[bar.name for bar in plan.rows[0].bars if bar.kind == kind]
                  for kind in ("forward", "backward")]
        self.assertEqual(layers[0], layers[1][::-1])
        self.assertEqual("stem_conv", layers[0][0])

    def test_a_plan_of_a_wide_network_is_counted_and_not_built(self):
        done = subprocess.run(["bash", "-c", 'ulimit -v 1000000; exec "$@"', "-", step_page.plans(BUILD)["04"],
                               "--model", "resnet18", "--width", "1024"], capture_output=True, text=True, timeout=60)
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        sent = sum(one["takes"] for one in json.loads(done.stdout)["work"])
        self.assertGreater(sent, 10000)  # MiB; the limit is a tenth of that

    def test_a_bar_of_the_plan_knows_the_same_in_the_run(self):
        def step(*rows):
            return Step("", "", 9, [Row(name, [Bar(0, 1, word, kind) for word, kind in bars]) for name, bars in rows])
        forwards = [("F0", "forward"), ("B0", "backward")]
        plan = step(("stage 0", forwards), ("stage 1", forwards))
        run = step(("host", [("F0", "host")]), ("cpu:0", [("", OTHER), *forwards]), ("cpu:1", forwards))
        self.assertEqual([[2], [3], [4], [5]], step_rows.numbers_of_same(plan, run))
        self.assertEqual([[], []], step_rows.numbers_of_same(step(("a", forwards[:1]), ("b", forwards[:1])),
                                                             step(("cpu:0", forwards))))  # other stages
        rank = step(("compute", [("conv1", "forward"), ("conv1", "backward")]), ("messages", [("bucket 0", MESSAGES)]))
        ranks = step(*[(name, [("conv1", "forward"), ("bucket 0", MESSAGES)]) for name in ("cpu:0", "cpu:1")])
        self.assertEqual([[0, 2], [], [1, 3]], step_rows.numbers_of_same(rank, ranks))

    def test_memory_over_time_is_a_row_of_levels(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = small_trace(Path(folder) / "trace", MEMORY)
            step, part = step_page.read_step(trace), step_page.read_step(trace, begin=1, end=1.5)
            [memory] = compare_timeline.one_step(trace)["memory"]
        self.assertEqual([[0.0, 3], [0.5, 6], [0.5, 4], [1.75, 1.5]],  # the step is from 1 to 3 ms
                         [[at, used / 2**20] for at, used in memory["changes"]])
        row = step.rows[-1]
        self.assertEqual(("cpu:0 memory, from 0 to 4.00 MiB", []), (row.name, row.waits(0, 2, "ms")))
        self.assertEqual([(0, 0.5, 0.75), (0.5, 1.75, 1), (1.75, 2, 0.375)],
                         [(round(bar.begin, 3), round(bar.end, 3), bar.level) for bar in row.bars])
        self.assertEqual("4.00 MiB in use from 0.500 ms on", row.bars[1].text)
        self.assertEqual([(1, 1.5, 1)], [(bar.begin, bar.end, bar.level) for bar in part.rows[-1].bars])

    def test_memory_of_runs_side_by_side_has_one_scale(self):
        with tempfile.TemporaryDirectory() as folder:
            words = [f"{name}={small_trace(Path(folder) / name, memory)}"
                     for name, memory in (("a", MEMORY), ("b", [(0, 2)]))]
            drawn = draw_memory.picture([draw_memory.read_run(word) for word in words])
            with self.assertRaisesRegex(ValueError, "holds no whole step with its memory"):
                draw_memory.read_run(f"c={small_trace(Path(folder) / 'c')}")
            for word in ("a", "=a", "a="):
                with self.assertRaisesRegex(ValueError, f"'{word}': expected NAME=TRACE"):
                    draw_memory.read_run(word)
        heights = [float(height) for height in re.findall(r'<rect x="\d.* height="([\d.]+)">', drawn)]
        most = draw_memory.CURVE / 1.02
        for height, level in zip(heights, (0.75, 1, 0.375, 0.5), strict=True):
            self.assertAlmostEqual(level * most, height, delta=0.01)
        self.assertIn("at most 4.00 MiB", drawn)
        self.assertIn("at most 2.00 MiB", drawn)
        self.assertRegex(drawn, r'<rect x="25.000%" y="[\d.]+" width="62.500%"')


class TestDrawing(unittest.TestCase):
    STEP = Step("a < b", "ms", 10, [Row("x & y", [Bar(0, 5, "F0", "forward", 'a "text"'),
                                                  Bar(5.5, 5.6, "too long for it", "backward")])])

    def test_bars_are_to_scale_and_names_stand_where_there_is_room(self):
        drawn = Drawing(self.STEP).svg()
        self.assertRegex(drawn, r'<rect x="0.000%" y="\d+" width="50.000%" height="24"/>')
        self.assertRegex(drawn, r'<rect x="55.000%" y="\d+" width="1.000%" height="24"/>')
        self.assertRegex(drawn, r'class="long">too long for it<')
        self.assertIn(">F0</text>", drawn)
        self.assertIn("nothing for 4.4 ms, before the end", drawn)
        self.assertEqual(3, drawn.count('<g class="bar waiting"') + 1)

    def test_several_steps_have_one_scale(self):
        drawn = stacked([self.STEP, Step("short", "ms", 4, [Row("x", [Bar(0, 4, "F0", "forward")])])])
        self.assertRegex(drawn, r'<svg y="24" width="100.000%".*(?s:.*)<svg y="\d+" width="40.000%"')
        self.assertEqual(1, drawn.count("<style>"))
        self.assertEqual(["0", "2", "4", "6", "8", "10"], re.findall(r'class="tick"[^>]*>(\d+)<', drawn))

    def test_text_is_no_markup_and_a_picture_is_the_same_each_time(self):
        drawn = Drawing(self.STEP).svg()
        self.assertEqual(drawn, Drawing(self.STEP).svg())
        self.assertNotIn("var(", drawn)  # not every program that shows pictures knows them
        for text in ("a &lt; b", "x &amp; y", "a &quot;text&quot;"):
            self.assertIn(text, drawn)
        self.assertNotIn("a < b", drawn)

    def test_an_axis_has_round_numbers(self):
        self.assertEqual([0, 2, 4, 6, 8, 10], ticks(0, 10))
        self.assertEqual([0.5, 1, 1.5, 2, 2.5], ticks(0.3, 2.8))
        self.assertEqual([], ticks(1, 1))

    def test_the_last_number_of_an_axis_is_whole(self):
        axis = "".join(Drawing(Step("", "ms", 5.004, [])).axis())
        self.assertRegex(axis, r'style="text-anchor:start">0<')
        self.assertRegex(axis, r'x="99.920%" y="\d+" style="text-anchor:end">5<')

    def test_names_can_be_read_on_every_bar(self):
        for mode in (0, 1):
            ink, paper = (PAPER[name][mode] for name in ("ink", "paper"))
            for kind, colours in FILLS.items():
                letters = "#000000" if kind == OTHER else "#ffffff"
                self.assertGreaterEqual(contrast(letters, colours[mode]), 4.5, (kind, mode))
                pale = blend(colours[mode], paper, 0.22)  # .bar.future in page.css
                self.assertGreaterEqual(contrast(ink, pale), 4.5, (kind, mode))

    def test_the_lessons_pictures_have_these_colours(self):
        style = Drawing(self.STEP).svg().partition("<style>")[2].partition("</style>")[0]
        for name in ("1f1b", "buckets", "gpipe", "ring", "sharded-memory", "sharded-step", "step-01",
                     "step-02", "syncbn", "timelines"):
            text = (ROOT / f"docs/figures/{name}.svg").read_text()
            self.assertEqual(style, text.partition("<style>")[2].partition("</style>")[0], name)
            self.assertNotIn("var(", text)
            self.assertLessEqual(set(re.findall(r'<g class="bar (\w+)"', text)), set(CLASSES.values()))


class TestPage(unittest.TestCase):
    def test_the_page_needs_nothing_but_itself(self):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "a.html"
            done = show("-o", target, "--trace", small_trace(Path(folder) / "trace").parent)
            self.assertEqual((0, f"{target}: open it in a browser\n"), (done.returncode, done.stdout))
            text = target.read_text()
        self.assertEqual({"http://www.w3.org/2000/svg"}, set(re.findall(r"\w+://[^\s\"'<]+", text)))
        self.assertNotRegex(text, r'\bsrc=|<link|@import|url\((?!#)')
        self.assertIn("measured: a step of 2.00 ms", text)

    def test_the_page_does_not_count_as_a_file_of_the_tree(self):
        self.assertIn("default: step.html", show("--help").stdout)
        self.assertIn("/step.html", (ROOT / ".gitignore").read_text().splitlines())

    def test_what_it_cannot_show_is_one_line(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            target, empty = folder / "a.html", folder / "empty"
            empty.mkdir()
            (folder / "broken").write_text("{")
            (folder / "deep").write_text("[" * 100000)
            (folder / "other").write_text('{"traceEvents": []}')
            (folder / "list").write_text("[1]")
            short = write_trace(folder / "short", {"compute": [(0, 1, "sgd_update", "", 0)]})
            for words, text in (
                    (("--stage", "01"), r"show: --stage '01', expected one of 02, 03, 04, 06"),
                    (("--schedule", "zigzag"), "--schedule: 'zigzag', expected naive, gpipe, 1f1b or interleaved"),
                    (("--schedule", "interleaved", "--micro-batches", 6), "expected a multiple of 4"),
                    (("--chunks", 2), "1f1b has 1 chunk per device, found 2"),
                    (("--stages", 0), "--stages: "), (("--stag", "02"), "--stag"),
                    (("--schedule", "naive", "--micro-batches", 4), "micro"),
                    (("--stage", "04", "--stages", 2), "--stages"),
                    (("--stage", "04", "--model", "x"), "x"),
                    (("--stage", "06", "--shard", "all"), "--shard: 'all', expected none, optimizer"),
                    (("--stage", "06", "--unit", "0"), "--unit: '0', expected layer, block, model"),
                    (("--stage", "06", "--reshard-after-forward", "maybe"), "'maybe', expected yes or no"),
                    (("--stage", "02", "--devices", "0"), "expected a number from 1 to 64, or a list"),
                    (("--stage", "02", "--devices", "2x"), "expected a number from 1 to 64, or a list"),
                    (("--trace", folder / "none"), "none: No such file or directory; expected what --trace"),
                    (("--trace", folder / "broken"), "broken is no JSON; expected what --trace of a stage"),
                    (("--trace", folder / "deep"), "deep is no JSON; expected what --trace of a stage"),
                    (("--trace", folder / "other"), "other is JSON, but no trace; expected what --trace"),
                    (("--trace", folder / "list"), "list is JSON, but no trace; expected what --trace"),
                    (("--trace", short), "holds no whole step; train a few"),
                    (("--trace", empty), "found 0 files in the folder, expected one trace"),
                    (("--trace", folder), "found 5 files in the folder"),
                    (("-o", folder / "none/a.html"), "No such file or directory")):
                done = show("-o", target, *words)
                with self.subTest(words):
                    self.assertNotEqual(0, done.returncode)
                    self.assertEqual(1, done.stderr.count("\n"), done.stderr)
                    self.assertRegex(done.stderr, text)
                    self.assertNotRegex(done.stderr, r"Error\(|Traceback")
                    self.assertFalse(target.exists())


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
            busy = sum(max(0, min(bar.end, moment) - bar.begin) for bar in plan.bars())
            self.assertEqual(idle, f"{100 * (1 - busy / moment / len(plan.rows)):.1f} %")
        running = window.run("return [...document.querySelectorAll('.bar.running')].map((bar) => bar.id)")
        self.assertEqual(running, [f"plan-{number}" for number, bar in enumerate(plan.bars())
                                   if bar.begin <= moment < bar.end])

    def test_it_steps_and_counts_as_the_simulation(self):
        for schedule, (devices, chunks, micro_batches) in SCHEDULES.items():
            plan = plan_of("03", *schedule_words(schedule))
            window = self.page(*schedule_words(schedule))
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
        rows, _ = self.counts(window)
        self.assertEqual(["compute", "0"], rows[0][:2])  # all is given back
        self.assertEqual(rows[0][2], rows[0][3])  # at most what the formula says
        number = next(i for i, bar in enumerate(plan.bars()) if bar.text == "forward of conv2")
        window.point(f"#plan-{number}")
        self.assertRegex(window.text("#told"), r"^compute: forward of conv2\. Comes after: all-gather of the "
                                               r"values of conv2, [\d.]+ [KM]iB sent on communication\.$")

    def test_a_measured_step_has_a_curve_of_memory(self):
        window = self.page("--trace", small_trace(Path(self.folder.name) / "trace", MEMORY))
        window.run("document.getElementById('run').focus()")
        window.press("Right", "Down", "Down", "Down")
        self.assertEqual("cpu:0 memory, from 0 to 4.00 MiB: 3.00 MiB in use from 0.000 ms on.",
                         window.text("#told"))
        heights = window.run("return [...document.querySelectorAll('#run .memory.bar rect')]"
                             ".map((rect) => rect.getBoundingClientRect().height)")
        self.assertEqual([45, 60, 22], [int(height) for height in heights])
    def test_columns_in_which_nothing_would_stand_are_not_there(self):
        heads = ("return [...document.querySelectorAll('thead th')].filter((cell) => cell.offsetParent)"
                 ".map((cell) => cell.textContent)")
        for words, expected in ((("--stage", "02"), ["lane", "now", "by the formula"]),
                                (("--stage", "03"), ["lane", "now", "most so far", "by the formula"]),
                                (("--stage", "04", "--model", "seed"), ["lane", "now", "most so far"])):
            self.assertEqual(expected, self.page(*words).run(heads))

    def test_what_is_to_come_is_pale_and_marks_on_it_are_not(self):
        window = self.page(*schedule_words("1f1b"))
        last = len(plan_of("03", *schedule_words("1f1b")).bars()) - 1
        look = ("const bar = document.getElementById(arguments[0]); const of = (part) => getComputedStyle(part); "
                "return [of(bar).opacity, of(bar.querySelector('rect')).fillOpacity, "
                "of(bar.querySelector('rect')).strokeWidth, of(bar.querySelector('text')).fill === of(document.body).color]")
        self.assertEqual(["1", "1"], window.run(look, "plan-0")[:2])
        self.assertEqual(["1", "0.22", "0.5px", True], window.run(look, f"plan-{last}"))
        window.point(f"#plan-{last}")
        self.assertEqual(["1", "0.22", "3px", True], window.run(look, f"plan-{last}"))

    def test_many_lanes_leave_room_for_the_drawing(self):
        top = "return document.getElementById('plan').getBoundingClientRect().top"
        few, many = self.page(*schedule_words("1f1b")), self.page("--stages", 24, "--micro-batches", 24)
        for _ in range(23):
            many.press("Right")
        self.assertLess(many.run(top), few.run(top) + 60)
        self.assertIn("24 of 24 lanes work; stage 0: ", many.text("#now"))
        eight = self.page("--stages", 8, width=1366, height=768)
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
        window = self.page("--schedule", "naive", "--stages", 1, "--trace", trace)
        outlined = ("return [...document.querySelectorAll('#run .same')].map((bar) => "
                    "bar.querySelector('text').textContent)")
        self.assertEqual(["F0"], window.run(outlined))
        window.press("Right")
        self.assertEqual(["B0"], window.run(outlined))
        self.assertEqual(1, window.run("return document.querySelectorAll('.moment').length"))
        self.assertIn("the plan counts in forwards, the run in ms", window.text("#about-run"))

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
        plan = plan_of("03", *schedule_words("1f1b"))
        number = next(i for i, bar in enumerate(plan.bars())
                      if bar.text == "backward of micro-batch 0" and len(bar.after) == 2)
        window.point(f"#plan-{number}")
        self.assertEqual("stage 0: backward of micro-batch 0. Comes after: forward of micro-batch 0 on "
                         "stage 0; backward of micro-batch 0 on stage 1.", window.text("#told"))
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
