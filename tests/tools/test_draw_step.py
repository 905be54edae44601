"""Drawings of a measured step, and how one is found in a trace."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from xml.dom import minidom

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import compare_timeline  # noqa: E402
import draw_step
import step_rows  # noqa: E402


class TestDrawStep(unittest.TestCase):
    def draw(self, *words):
        return subprocess.run([sys.executable, str(ROOT / "tools/draw_step.py"), *map(str, words)],
                              capture_output=True, text=True, timeout=60)

    def test_a_step_with_the_names_of_its_operations(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            trace = TestTimeline.trace(self, folder, "trace", 0, [
                *((end - 0.1, end, "sgd_update") for end in (1, 2, 3)), (3.2, 3.8, "conv2d", "conv1"),
                (3.9, 4, "sgd_update")])
            done = self.draw(trace, folder / "a.svg")
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            self.assertIn(">conv2d<", (folder / "a.svg").read_text())
            self.assertEqual(0, self.draw(trace, folder / "b.svg", "--to", "0.1").returncode)
            self.assertFalse(">conv2d<" in (folder / "b.svg").read_text())
            self.assertEqual(0, self.draw(trace, folder / "d.svg", "--parts").returncode)
            self.assertNotIn(">conv2d<", (folder / "d.svg").read_text())
            self.assertEqual(0, self.draw(trace, folder / "e.svg", "--range", "conv").returncode)
            self.assertIn(">conv2d<", (folder / "e.svg").read_text())
            self.assertNotIn("sgd_update", (folder / "e.svg").read_text())
            for words, text in (((trace, folder / "c.svg", "--from", 7), "expected a part of"),
                                ((trace, folder / "c.svg", "--range", "fc"), "expected one of conv1"),
                                ((folder / "none", folder / "c.svg"), "expected what --trace")):
                done = self.draw(*words)
                self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
                self.assertIn(text, done.stderr)
            self.assertFalse((folder / "c.svg").exists())

    def test_a_trace_of_mad_content_is_drawn_or_refused_in_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            good = TestTimeline.trace(self, folder, "trace", 0, [
                span for end in (1, 2, 3) for span in ((end - 0.5, end - 0.2, "conv2d", "\x1b[31m<script>"),
                                                       (end - 0.1, end, "sgd_update"))]).read_text()
            memory = {"ph": "C", "pid": 0, "tid": 0, "ts": 1, "args": {"bytes": 5}}
            good = good.replace(', {"ph": "X"', f', {json.dumps(memory)}, {{"ph": "X"', 1)
            (folder / "good").write_text(good)
            self.assertEqual("", self.draw(folder / "good", folder / "a.svg").stderr)
            self.assertIn("\\x1b[31m", minidom.parse(str(folder / "a.svg")).toxml())
            layer = '"\\u001b[31m<script>"'
            for old, new in ((layer, "null"), (layer, "5"), ('"bytes": 5', '"bytes": "5"'),
                             ('"bytes": 5', '"bytes": null'), ('"compute"', "[]")):
                self.assertIn(old, good)
                (folder / "bad").write_text(good.replace(old, new))
                done = self.draw(folder / "bad", folder / "c.svg")
                self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
                self.assertIn("is JSON, but no trace", done.stderr)
            os.mkfifo(folder / "pipe")
            for endless in (folder / "pipe", "/dev/zero"):
                done = self.draw("--alone", endless, folder / "c.svg")
                self.assertEqual(1, done.returncode)
                self.assertIn(f"{endless}: it is not a regular file; expected what --trace", done.stderr)
            self.assertFalse((folder / "c.svg").exists())

    def test_a_range_ends_with_its_step_at_the_latest(self):
        # Times of slices are rounded, and here begin and length are, in sum, more than the step.
        step = {"milliseconds": 1.0000004, "lanes": [
            {"slices": [(0.1, 0.2, "conv2d", "conv1"), (0.2, 0.800001, "all_reduce", "bucket 0")]}]}
        self.assertEqual((0.2, 1.0000004), draw_step.time_of(step, "bucket"))

    def test_parts_are_neighbours_within_one_outermost_range(self):
        bars = step_rows.parts_of([
            (0, 1, "copy", ""), (1, 1, "fill", ""), (2, 1, "fill", ""),
            (3, 1, "copy", "forward 2"), (4, 1, "conv2d", "forward 2/conv1"),
            (6, 1, "nll_loss_backward", "forward 3"), (7, 1, "matmul", "backward 2/fc1"),
            (8, 1, "matmul", "fc1"), (9, 1, "matmul", "fc2"), (10, 1, "add_column_sums", "fc2"),
            (11, 1, "check_finite", "bucket 0"), (12, 1, "all_reduce", "bucket 0"),
            (13, 1, "matmul", "fc2"), (15, 1, "matmul", "fc2"), (17, 1, "all_reduce", "along tensor")])
        self.assertEqual(bars, [
            (0, 1, "copy", step_rows.MESSAGES, 1), (1, 2, "", step_rows.OTHER, 2), (3, 2, "F2", "forward", 2),
            (6, 1, "F3", "forward", 1), (7, 1, "B2", "backward", 1), (8, 1, "fc1", "forward", 1),
            (9, 2, "fc2", "backward", 2), (11, 2, "bucket 0", step_rows.MESSAGES, 2),
            (13, 1, "fc2", "forward", 1), (15, 1, "fc2", "forward", 1),
            (17, 1, "along tensor", "along tensor", 1)])

    def test_a_layer_that_does_the_same_both_ways_is_passed_forward_and_then_backward(self):
        bars = step_rows.parts_of([
            (0, 1, "conv2d", "conv1"), (1, 1, "copy", "flatten"), (2, 1, "matmul", "fc1"),
            (3, 1, "nll_loss_backward", "loss"), (4, 1, "column_sums", "fc1"), (5, 1, "copy", "flatten"),
            (6, 1, "conv2d_backward_input", "conv1")])
        kinds = [(name, kind) for _, _, name, kind, _ in bars]
        self.assertEqual(kinds[1], ("flatten", "forward"))
        self.assertEqual(kinds[5], ("flatten", "backward"))
        bars = step_rows.parts_of([
            (0, 1, "batch_norm", "block1.0.bn2"), (1, 1, "nll_loss", ""), (2, 1, "batch_norm_backward", "block1.0.bn2"),
            (3, 1, "add", "block1.0")])
        self.assertEqual("backward", bars[-1][3])


class TestTimeline(unittest.TestCase):
    def trace(self, folder, name, zero_ms, spans):
        """A trace of one device of one stream, its spans in ms."""
        events = [{"ph": "M", "name": kind, "pid": 0, "tid": 0, "args": {"name": text}}
                  for kind, text in (("process_name", name), ("thread_name", "compute"))]
        events += [{"ph": "X", "name": operation, "pid": 0, "tid": 0, "ts": 1e3 * begin,
                    "dur": 1e3 * (end - begin), "args": {"layer": layer[0] if layer else ""}}
                   for begin, end, operation, *layer in spans]
        path = Path(folder) / name
        path.write_text(json.dumps({"traceEvents": events, "otherData": {"zero_ns": zero_ms * 1e6}}))
        return path

    def test_the_median_step_of_all_ranks_on_one_clock(self):
        ends = (1, 12, 13, 14, 17, 19)  # lengths: two to warm up, then 1, 3 and 2 ms
        updates = [span for end in ends for span in ((end - 0.6, end - 0.6, "matmul"),
                                                     (end - 0.5, end - 0.3, "adam_update"),  # of two units
                                                     (end - 0.3, end - 0.3, "check_finite"),
                                                     (end - 0.3, end, "adam_update"), (end, end, "fill"))]
        with tempfile.TemporaryDirectory() as folder:
            path = self.trace(folder, "trace", 100, sorted([*updates, (17.5, 18, "conv2d", "conv1")]))
            self.trace(folder, "trace.rank10", 90, [(28.25, 30, "copy")])
            self.trace(folder, "trace.rank2", 110, [(0, 1, "early"), (8, 8.5, "all_reduce")])
            step, alone = compare_timeline.one_step(path), compare_timeline.one_step(path, alone=True)
        self.assertAlmostEqual(step["milliseconds"], 2)
        self.assertEqual(["trace"], [lane["device"] for lane in alone["lanes"]])
        self.assertEqual([lane["device"] for lane in step["lanes"]],
                         ["trace", "trace.rank2", "trace.rank10"])
        self.assertEqual([lane["slices"] for lane in step["lanes"]],
                         [[[0.5, 0.5, "conv2d", "conv1"], [1.4, 0.0, "matmul", ""],
                           [1.5, 0.2, "adam_update", ""], [1.7, 0.0, "check_finite", ""],
                           [1.7, 0.3, "adam_update", ""]],
                          [[1.0, 0.5, "all_reduce", ""]], [[1.25, 0.75, "copy", ""]]])

    def test_the_name_of_a_trace_is_no_pattern(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("t[1].json", "a*b", "t?"):
                own = self.trace(folder, name, 0, [])
                ranks = [self.trace(folder, f"{name}.rank{rank}", 0, []) for rank in (2, 10)]
                self.assertEqual([own, *ranks], compare_timeline.trace_files(own))
            for other in ("a*b.rank", "a*b.rankx", "axb.rank3", "a*b.rank1.old"):
                self.trace(folder, other, 0, [])
            self.assertEqual(3, len(compare_timeline.trace_files(Path(folder) / "a*b")))

    def two_devices(self, folder, second_begins):
        """One step's timeline of a run on two devices that compute for 2 ms per step: the second
        one begins so many ms after the first."""
        length, steps = 2.1 + second_begins, range(6)
        self.trace(folder, "trace.rank1", 0, [(length * step + second_begins,
                                               length * step + second_begins + 2, "conv2d")
                                              for step in steps])
        return compare_timeline.one_step(self.trace(folder, "trace", 0, [
            span for step in steps for span in
            ((length * step, length * step + 2, "conv2d"),
             (length * (step + 1) - 0.1, length * (step + 1), "sgd_update"))]))

    def test_a_run_whose_devices_take_turns_is_not_drawn(self):
        with tempfile.TemporaryDirectory() as folder:
            serial = [self.two_devices(folder, second_begins=2) for _ in range(3)]
            parallel = self.two_devices(folder, second_begins=0.05)
        untraced = [2.2, 2.1, 9.0, 2.15, 2.1]  # one round was disturbed
        self.assertEqual((None, "the steps of 3 traced runs take 4.10, 4.10, 4.10 ms, expected one "
                                "within 5 % of the 2.15 ms without a trace; repeat it when nothing "
                                "else runs"), compare_timeline.typical_step(serial, untraced))
        drawn, reason = compare_timeline.typical_step([*serial, parallel, *serial], untraced)
        self.assertEqual("", reason)
        self.assertIs(parallel, drawn)
        begins = [lane["slices"][0][0] for lane in drawn["lanes"]]
        self.assertAlmostEqual(0.05, begins[1] - begins[0], places=3)

    def test_too_few_steps_have_no_timeline(self):
        with tempfile.TemporaryDirectory() as folder:
            path = self.trace(folder, "trace", 0, [(0, 1, "sgd_update")])
            self.assertIsNone(compare_timeline.one_step(path))
        self.assertEqual((None, "the traces hold no whole step"),
                         compare_timeline.typical_step([None], [1.0]))


if __name__ == "__main__":
    unittest.main()
