"""`./lockstep show`: a page that steps through a step, and the drawings on it."""

import itertools
import json
import re
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import compare_timeline  # noqa: E402
import figure_drawing  # noqa: E402
import step_page  # noqa: E402
import step_plan  # noqa: E402
import step_rows  # noqa: E402
from step_rows import MESSAGES, OTHER, PRODUCTS  # noqa: E402
from figure_drawing import ticks  # noqa: E402
from palette import ALONG, INK, MARK, PAPER  # noqa: E402
from step_drawing import Drawing, FILLS  # noqa: E402
from stages import all_stages, label  # noqa: E402
from step_page_support import (BUILD, contrast, MEMORY, plan_of, SCHEDULES, show,  # noqa: E402
                               small_trace, write_trace)
from step_rows import Bar, Row, Step  # noqa: E402


def blend(colour, paper, opacity):
    mixed = [round(opacity * int(colour[at:at + 2], 16) + (1 - opacity) * int(paper[at:at + 2], 16))
             for at in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def buckets_of(row):
    """Its messages but the broadcast of running statistics, which comes before the passes."""
    return [bar for bar in row.bars if bar.name != "broadcast"]


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
        self.assertEqual([], communication.waits(0, 2, "ms"))  # empty where nothing is sent

    def test_a_pass_is_named_in_a_trace_as_in_a_plan(self):
        self.assertEqual(["F2", "B10", "F2.1", "B0.3", "conv1", "forward"],
                         [step_rows.label_of(name) for name in
                          ("forward 2", "backward 10", "forward 2.1", "backward 0.3", "conv1", "forward")])

    def test_a_pipeline_of_equal_stages_is_the_formulas(self):
        for schedule, (devices, chunks, micro_batches) in {**SCHEDULES, "1f1b": (5, 1, 3), "gpipe": (1, 1, 1)}.items():
            plan = plan_of("03", "--schedule", schedule, "--chunks", chunks, "--micro-batches", micro_batches,
                           devices=devices)
            self.assertEqual(2 * devices * chunks * micro_batches, len(plan.bars()))
            self.assertEqual({1: chunks * micro_batches * devices, 2: chunks * micro_batches * devices},
                             Counter(bar.end - bar.begin for bar in plan.bars()))
            busy = sum(bar.end - bar.begin for bar in plan.bars())
            self.assertAlmostEqual(plan.formula["value"], 1 - busy / plan.end / devices)
            for row in plan.rows:
                live = itertools.accumulate(bar.takes - bar.gives for bar in row.bars)
                self.assertEqual(row.predicted_most, max(live))

    def test_an_interleaved_pipeline_tells_its_chunks_apart(self):
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
                         [bar[2:4] for bar in step_rows.operations_of(slices)])

    def test_the_plan_of_stage_02_has_the_bytes_that_the_stage_moves(self):
        for devices in (1, 2, 3):
            plan = plan_of("02", "--batch-size", 10, devices=devices)
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run([BUILD / "02-dataparallel/02-dataparallel", "--devices",
                                ",".join(f"cpu:{i}" for i in range(devices)), "--batch-size", "10",
                                "--max-steps", "3", "--data", "synthetic:40:10", "--metrics",
                                Path(folder) / "m.json"], check=True, capture_output=True)
                moved = json.loads((Path(folder) / "m.json").read_text())["bytes_moved"]["per_step"]
            self.assertAlmostEqual(moved, 1024 * sum(bar.takes for bar in plan.bars()), places=3)
            if devices > 1:
                self.assertAlmostEqual(moved, 1024 * plan.rows[0].predicted_most, places=3)  # the formula

    def test_the_example_of_stage_02s_bytes_gives_what_is_measured(self):
        text = (ROOT / "02-dataparallel/README.md").read_text()
        sums = re.search(r"two devices: 2 x ([\d.]+) \+ ([\d.]+) \+ 32 x \(([\d.]+) \+ 2 x ([\d.]+)\) = ([\d.]+) KiB",
                         text)
        flat, state, image, scores, total = map(float, sums.groups())
        self.assertAlmostEqual(total, 2 * flat + state + 32 * (image + 2 * scores), delta=0.05)
        self.assertAlmostEqual(total, sum(bar.takes for bar in plan_of("02").bars()), delta=0.05)
        self.assertIn(f"| {total} KiB |", text)

    def test_stage_02_has_its_phases_on_device_0(self):
        plan = plan_of("02", devices=3)
        self.assertEqual(["device 0", "device 1", "device 2"], [row.name for row in plan.rows])
        phases = [bar.name for bar in plan.rows[0].bars
                  if bar.kind in (MESSAGES, OTHER) and bar.name not in ("", "copy")]
        self.assertEqual(["scatter", "replicate", "gather", "loss", "scatter", "reduce", "update"], phases)
        self.assertEqual({"forward", "backward", OTHER}, {bar.kind for bar in plan.rows[1].bars})

    def test_messages_can_be_seen_whatever_the_networks_size(self):
        for model in ("seed", "mlp", "resnet18"):
            compute, communication = plan_of("04", "--model", model).rows
            passes = sum(bar.end - bar.begin for bar in compute.bars if bar.kind in ("forward", "backward"))
            spent = sum(bar.end - bar.begin for bar in communication.bars)
            self.assertTrue(passes / 3 < spent < passes / 2, (model, passes, spent))

    def test_a_message_takes_what_is_asked_for(self):
        plan = plan_of("04", "--model", "mlp", units_per_mib=30)
        sent = sum(bar.takes for bar in plan.rows[1].bars) / 1024
        spent = sum(bar.end - bar.begin for bar in plan.rows[1].bars)
        self.assertTrue(30 * sent < spent < 30 * sent + 3, (sent, spent))  # and latencies

    def test_the_plan_of_stage_04_has_its_buckets_each_after_its_last_layer(self):
        plan = plan_of("04", "--model", "resnet18", "--bucket-mb", 5)
        buckets = buckets_of(plan.rows[1])
        self.assertGreater(len(buckets), 5)
        self.assertEqual([f"bucket {i}" for i in range(len(buckets))], [bar.name for bar in buckets])
        self.assertAlmostEqual(42.6, sum(bar.takes for bar in buckets), places=1)  # 2 (W-1)/W of the gradients
        self.assertAlmostEqual(plan.rows[1].predicted_most, sum(bar.takes for bar in buckets), places=3)
        bars = plan.bars()
        for bucket in buckets:
            [layer] = bucket.after
            self.assertIn(bars[layer], plan.rows[0].bars)
            self.assertEqual("backward", bars[layer].kind)
            self.assertLess(bars[layer].begin, bucket.begin)
        update = plan.rows[0].bars[-1]
        self.assertEqual(("update", (bars.index(buckets[-1]),)), (update.name, update.after))
        self.assertLessEqual(buckets[-1].end, update.begin)

    def test_without_overlap_no_message_begins_before_backward_has_ended(self):
        compute, communication = plan_of("04", "--model", "resnet18", "--bucket-mb", 5, "--no-overlap").rows
        last = max(bar.end for bar in compute.bars if bar.kind == "backward")
        self.assertLessEqual(last, min(bar.begin for bar in buckets_of(communication)))

    def test_of_backward_and_messages_the_longer_counts_or_without_overlap_both(self):
        """With a bucket for each of the mlp's equal layers."""
        for units_per_mib in (0.5, 40):
            compute, communication = plan_of("04", "--model", "mlp", "--bucket-mb", 0.2, units_per_mib=units_per_mib).rows
            layer = next(bar.end - bar.begin for bar in compute.bars if (bar.name, bar.kind) == ("fc3", "backward"))
            of_layers = [bar for bar in communication.bars if bar.name.startswith("bucket")][1:-1]
            message = of_layers[0].end - of_layers[0].begin
            self.assertEqual(units_per_mib > 1, message > layer)
            self.assertGreaterEqual(len(of_layers), 2)
            for one, following in zip(of_layers, of_layers[1:]):
                self.assertAlmostEqual(max(layer, message), following.begin - one.begin, places=6)
            alone = plan_of("04", "--model", "mlp", "--bucket-mb", 0.2, "--no-overlap", units_per_mib=units_per_mib)
            backward = max(bar.end for bar in alone.rows[0].bars if bar.kind == "backward")
            messages = [bar for bar in alone.rows[1].bars if bar.name.startswith("bucket")]
            self.assertAlmostEqual(backward + sum(bar.end - bar.begin for bar in messages), messages[-1].end, places=6)

    def test_stages_that_are_ranks_are_drawn_side_by_side_with_their_messages(self):
        for mesh, devices in (("pipeline=2", 2), ("data=2,pipeline=2", 4)):
            plan = plan_of("07", "--mesh", mesh, "--accumulate", "4", "--schedule", "gpipe", devices=devices)
            self.assertIn(f"{devices} ranks, the first one of each stage", plan.title)
            rows = {row.name: row.bars for row in plan.rows}
            for stage in range(2):
                passes = [bar.name for bar in rows[f"device {stage} compute"] if bar.kind in ("forward", "backward")]
                self.assertLessEqual({f"{kind}{i}" for kind in "FB" for i in range(4)}, set(passes))
            sent, received = rows["device 0 activations"], rows["device 1 activations"]
            self.assertEqual({("along pipeline", "along pipeline")}, {(bar.name, bar.kind) for bar in sent})
            self.assertEqual({("along pipeline", "along pipeline")}, {(bar.name, bar.kind) for bar in received})
            self.assertEqual([(bar.begin, bar.end) for bar in sent], [(bar.begin, bar.end) for bar in received])
            self.assertEqual((4, 0), (len(sent), sum(bar.takes for bar in received)))
            bars = plan.bars()
            copies = {bar.kind for row in rows.values() for bar in row if bar.name.startswith("receive ")}
            self.assertEqual({MESSAGES}, copies)
            for i, message in enumerate(sent):
                [made], [used] = ([bar for bar in rows[f"device {stage} compute"] if bar.name == f"F{i}"] for stage in (0, 1))
                self.assertLessEqual(made.end, message.begin)
                self.assertLessEqual(message.end, used.begin)

    def test_an_arrow_leads_from_a_stages_send_to_its_receive(self):
        for mesh, devices in (("pipeline=3", 3), ("pipeline=2,data=2", 4)):
            plan = plan_of("07", "--mesh", mesh, "--accumulate", "3", devices=devices)
            bars, rows = plan.bars(), {row.name: row.bars for row in plan.rows}
            stages = range(int(mesh.removeprefix("pipeline=")[0]))
            names = sorted({int(row.split()[1]) for row in rows if row.endswith("compute")})  # the stages' first ranks
            self.assertEqual(len(stages), len(names))
            for lane, ways in (("activations", zip(names, names[1:])), ("gradients", zip(names[1:], names))):
                for sender, receiver in ways:
                    sends, receives = ([bar for bar in rows[f"device {stage} {lane}"] if operation in bar.text]
                                       for stage, operation in ((sender, "send"), (receiver, "receive")))
                    self.assertEqual(3, len(sends))
                    for send, receive in zip(sends, receives, strict=True):
                        self.assertIn(bars.index(send), receive.after)
                        self.assertEqual((send.begin, send.end), (receive.begin, receive.end))

    def test_times_can_be_a_profiles(self):
        plan = step_plan.planned(step_plan.Asked("04-ddp", 2, ROOT / "tools/profiles/h100.json",
                                                 options={"--model": "resnet18"}), BUILD)
        self.assertEqual("ms", plan.unit)
        self.assertIn("NVIDIA H100 SXM, from data sheets, never measured here", plan.note)

    def test_every_program_that_trains_can_be_drawn(self):
        for stage in all_stages():
            with self.subTest(stage):
                plan = plan_of(label(stage))
                self.assertLess(15, len(plan.bars()))
                self.assertLessEqual({"forward", "backward"}, {bar.kind for bar in plan.bars()})

    def test_a_command_line_is_read_as_its_program_reads_it(self):
        self.assertEqual({"--model": "mlp", "--betas": "0.9,0.99", "--no-overlap": None, "--lr": "1"},
                         step_plan.options_in(["--model=mlp", "--betas", "0.9", "0.99", "--no-overlap", "--lr", "1"]))

    def test_a_trace_with_a_command_that_is_none_says_nothing_of_its_run(self):
        with tempfile.TemporaryDirectory() as folder:
            for number, command in enumerate((5, "04-ddp", [5], ["04-ddp", None], {"a": 1}, ["/bin/true"])):
                trace = write_trace(Path(folder) / str(number), {"compute": [(0, 1, "sgd_update", "", 0)]},
                                    command=command)
                self.assertIsNone(step_plan.run_of(trace), command)
            trace = write_trace(Path(folder) / "run", {"compute": [(0, 1, "sgd_update", "", 0)]},
                                command=["/build/04-ddp", "--save", "a", "--trace=b", "--width", "8"])
            self.assertEqual({"--width": "8"}, step_plan.run_of(trace).options)

    def test_the_plan_of_a_trace_is_the_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            subprocess.run([BUILD / "06-fully-sharded/06-fully-sharded", "--devices", "cpu:0,cpu:1", "--data",
                            "synthetic:80:10", "--batch-size=8", "--max-steps", "6", "--model", "seed", "--shard=gradients",
                            "--trace", trace, "--lr", "0.01"], check=True, capture_output=True)
            asked = step_plan.run_of(trace)
            self.assertEqual(("06-fully-sharded", 2), (asked.stage, asked.devices))
            self.assertEqual({"--batch-size": "8", "--model": "seed", "--shard": "gradients", "--lr": "0.01"},
                             asked.options)
            page = Path(folder) / "page.html"
            for words in ((), ("--shard", "gradients"), ("--stage", "06", "--devices", "2")):
                done = show("-o", page, "--trace", trace, *words)
                self.assertEqual((0, ""), (done.returncode, done.stderr))
                self.assertIn("<h1>06-fully-sharded: seed, rank 0 of 2, --batch-size 8", page.read_text())
            for words, told in ((("--shard", "none"), "of a run with --shard gradients, found with --shard none"),
                                (("--width", 8), "of a run without --width, found with --width 8"),
                                (("--stage", "04"), "with --stage 06-fully-sharded, found with --stage 04-ddp"),
                                (("--devices", 3), "with --devices 2, found with --devices 3")):
                done = show("-o", Path(folder) / "other.html", "--trace", trace, *words)
                self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
                self.assertIn(f"{told}; leave {words[0]} out, and the plan is the run's", done.stderr)
            self.assertFalse((Path(folder) / "other.html").exists())

    def test_a_plan_of_a_wide_network_is_counted_and_not_built(self):
        words = (sys.executable, ROOT / "tools/step_page.py", "--build", BUILD, "--stage", "04", "--model", "resnet18",
                 "--width", "1024")
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.html"
            done = subprocess.run(["bash", "-c", 'ulimit -v 1000000; exec "$@"', "-", *map(str, words), "-o", page],
                                  capture_output=True, text=True, timeout=60)
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            facts = json.loads(re.search(r'id="facts">(.*?)</script>', page.read_text())[1])
        self.assertEqual("MiB sent by a stream, or in use", facts["counted"])
        self.assertGreater(sum(bar["takes"] for bar in facts["bars"]), 10000)  # the limit is a tenth of that

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


class TestDrawing(unittest.TestCase):
    STEP = Step("a < b", "ms", 10, [Row("x & y", [Bar(0, 5, "F0", "forward", 'a "text"'),
                                                  Bar(5.5, 5.6, "too long for it", "backward")], computes=True)])

    def test_bars_are_to_scale_and_names_stand_where_there_is_room(self):
        drawn = Drawing(self.STEP, "plan-").svg()
        self.assertRegex(drawn, r'<rect x="0.000%" y="\d+" width="50.000%" height="24"/>')
        self.assertRegex(drawn, r'<rect x="55.000%" y="\d+" width="1.000%" height="24"/>')
        self.assertRegex(drawn, r'class="long">too long for it<')
        self.assertIn(">F0</text>", drawn)
        self.assertIn("nothing for 4.4 ms, before the end", drawn)
        self.assertEqual(3, drawn.count('<g class="bar waiting"') + 1)

    def test_text_is_no_markup_and_a_picture_is_the_same_each_time(self):
        drawn = Drawing(self.STEP, "plan-").svg()
        self.assertEqual(drawn, Drawing(self.STEP, "plan-").svg())
        for text in ("a &lt; b", "x &amp; y", "a &quot;text&quot;"):
            self.assertIn(text, drawn)
        self.assertNotIn("a < b", drawn)

    def test_an_axis_has_round_numbers(self):
        self.assertEqual([0, 2, 4, 6, 8, 10], ticks(0, 10))
        self.assertEqual([0.5, 1, 1.5, 2, 2.5], ticks(0.3, 2.8))
        self.assertEqual([], ticks(1, 1))

    def test_the_last_number_of_an_axis_is_whole(self):
        axis = "".join(Drawing(Step("", "ms", 5.004, []), "plan-").axis())
        self.assertRegex(axis, r'style="text-anchor:start">0<')
        self.assertRegex(axis, r'x="99.920%" y="\d+" style="text-anchor:end">5<')

    def test_names_can_be_read_on_every_bar(self):
        for fill, letters in FILLS.values():
            self.assertGreaterEqual(contrast(letters, fill), 4.5, fill)
        for ink, paper, mark in zip(INK, PAPER, MARK):
            self.assertGreaterEqual(contrast(mark, paper), 3)
            for kind, (fill, _) in FILLS.items():
                self.assertGreaterEqual(contrast(ink, blend(fill, paper, 0.22)), 4.5, kind)  # .bar.future in page.css
            for axis, (fill, _) in ALONG.items():  # the grids of a mesh
                for share in (0.08, 0.22, 0.36):
                    self.assertGreaterEqual(contrast(ink, blend(fill, paper, share)), 4.5, axis)
                self.assertGreaterEqual(contrast(blend(fill, ink, 0.55), paper), 4.5, axis)

    def test_the_page_and_the_pictures_have_the_same_colours(self):
        self.assertEqual(FILLS, {kind: figure_drawing.FILLS[kind] for kind in FILLS})


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
            hostile = folder / "hostile"
            hostile.mkdir()
            small = small_trace(folder / "hostile/trace").read_text()
            for number, (old, new) in enumerate((('"ts": ', '"ts": 1e999, "was": '),
                                                 ('"dur": ', '"dur": NaN, "was": '),
                                                 ('"ts": ', f'"ts": 1{400 * "0"}, "was": '),
                                                 ('"zero_ns": ', '"zero_ns": -Infinity, "was": '))):
                (hostile / str(number)).write_text(small.replace(old, new))
            short = write_trace(folder / "short", {"compute": [(0, 1, "sgd_update", "", 0)]})
            for words, text in (
                    (("--stage", "08"), r"show: --stage '08', expected one of 01-single-gpu, 02-dataparallel, 03-"),
                    (("--schedule", "zigzag"), "--schedule: found 'zigzag', expected naive, gpipe, 1f1b or interleaved"),
                    (("--schedule", "interleaved", "--micro-batches", 6), "expected a multiple of 4"),
                    (("--chunks", 2), "1f1b has 1 chunk per device, found 2"),
                    (("--stages", 4), "--stages: a pipeline of equal stages has only --schedule, --chunks, --micro-b"),
                    (("--devices", 0), "--devices '0', expected a number from 1 to 64"), (("--stag", "02"), "--stag"),
                    (("--micro-batches", "x"), "--micro-batches: found 'x', expected a whole number"),
                    (("--stage", "04", "--trace=a", "--max-steps", 3), "a: No such file"),
                    (("--stage", "04", "--max-steps", 3), "--max-steps: is set by show; leave it out"),
                    (("--stage", "04", "--devices", "sim:nonex2"), "no profile .*nonex?.json"),
                    (("--stage", "04", "seed"), "'seed': expected an option, such as --model"),
                    (("--stage", "04", "--units-per-mib", "-1"), "--units-per-mib: '-1', expected a number from 0"),
                    (("--units-per-mib", "2"), "--units-per-mib: messages of equal stages take no time"),
                    (("--stage", "04", "--devices", "sim:h100x2", "--units-per-mib", "2"), "those of a profile its own"),
                    (("--schedule", "naive", "--micro-batches", 4), "micro"),
                    (("--stage", "04", "--stages", 2), "--stages"),
                    (("--stage", "04", "--model", "x"), "x"),
                    (("--stage", "06", "--shard", "all"), "--shard: found 'all', expected none, optimizer"),
                    (("--stage", "06", "--unit", "0"), "--unit: found '0', expected layer, block, model"),
                    (("--stage", "06", "--reshard-after-forward", "maybe"), "found 'maybe', expected yes or no"),
                    (("--stage", "06", "--shard", "none", "--prefetch", "3"), "--prefetch: found --shard none"),
                    (("--stage", "02", "--devices", "2x"), "expected a number from 1 to 64, or simulated devices"),
                    (("--trace", folder / "none"), "none: No such file or directory; expected what --trace"),
                    (("--trace", folder / "broken"), "broken is no JSON; expected what --trace of a stage"),
                    (("--trace", folder / "deep"), "deep is no JSON; expected what --trace of a stage"),
                    (("--trace", folder / "other"), "other is JSON, but no trace; expected what --trace"),
                    (("--trace", folder / "list"), "list is JSON, but no trace; expected what --trace"),
                    *((("--trace", hostile / str(number)), f"hostile/{number}: .*expected what --trace")
                      for number in range(4)),
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


if __name__ == "__main__":
    unittest.main()
