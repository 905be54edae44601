"""`./lockstep calibrate`: counting, fitting, and the profile that it writes."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import calibrate  # noqa: E402
from operation_costs import CostError, Sample, aligned, cost, counted, fit, fit_all  # noqa: E402
from roofline import bound_of, roofline_lines, roofs  # noqa: E402

BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build-test"))
PROGRAM = BUILD / "01-single-gpu/01-single-gpu"


class TestCosts(unittest.TestCase):
    def test_flops_and_bytes_are_those_of_the_shapes(self):
        with tempfile.TemporaryDirectory() as folder:
            samples = counted(PROGRAM, ("--model", "seed"), 64, folder)
        found = {(each.name, each.layer): each for each in samples}
        conv = found["conv2d", "conv2"]  # 10 to 20 channels, 5x5, from 12x12 to 8x8
        self.assertEqual(2 * 64 * 8 * 8 * 20 * 5 * 5 * 10, conv.flops)
        weights = 20 * 5 * 5 * 10
        self.assertEqual(4 * (64 * 12 * 12 * 10 + weights + 20 + 64 * 8 * 8 * 20), conv.bytes)
        self.assertEqual("conv2d 5x5", conv.kind)
        self.assertEqual("matmul", found["matmul", "fc1"].kind)
        update = found["sgd_update", ""]  # reads weights and gradients, writes weights, and some numbers
        self.assertEqual(0, update.flops)
        self.assertAlmostEqual(1, update.bytes / (4 * 3 * 21840), delta=0.01)

    def test_a_convolution_fills_whole_lanes(self):
        with tempfile.TemporaryDirectory() as folder:
            plain, filled = (counted(PROGRAM, ("--model", "seed"), 64, folder, lanes=lanes) for lanes in (1, 16))
        factors = {(a.name, a.layer): b.flops / a.flops for a, b in zip(plain, filled) if a.flops}
        for name, layer, factor in (("conv2d", "conv2", 32 / 20), ("conv2d_backward_parameters", "conv2", 32 / 20),
                                    ("conv2d_backward_input", "conv2", 16 / 10), ("conv2d", "conv1", 16 / 10),
                                    ("matmul", "fc1", 1)):
            self.assertAlmostEqual(factor, factors[name, layer], msg=f"{name} {layer}")

    def test_a_fit_finds_the_figures_that_made_the_times(self):
        true = {"seconds": 3e-6, "flops": 2e10, "bytes": 8e9}
        samples = [Sample("conv2d", "", flops, moved) for flops in (1e4, 1e6, 3e7, 1e9)
                   for moved in (1e3, 1e5, 4e6)]
        for sample in samples:
            sample.seconds = cost(true, sample)
        for name, value in fit(samples).items():
            self.assertAlmostEqual(1, value / true[name], delta=0.05, msg=name)

    def test_costs_of_operations_that_differ_add_up_to_their_times(self):
        """Of the same work one sample takes half and another twice as long. Nothing may be too small on the whole."""
        samples = [Sample("conv2d", "", 1e6 * size, 0, 1e-5 * size * factor)
                   for size in (1, 2, 5, 10, 100) for factor in (0.5, 1, 2)]
        figures = fit(samples)
        self.assertAlmostEqual(1, sum(cost(figures, each) for each in samples) / sum(s.seconds for s in samples), 4)

    def test_operations_are_fitted_by_name_and_others_by_those_that_do_not_multiply(self):
        samples = [Sample("add", "", 0, moved, 1e-6 + moved / 1e9) for moved in (1e4, 1e5, 1e6)]
        samples += [Sample("matmul", "", flops, 1, 1e-6 + flops / 1e10) for flops in (1e4, 1e5, 1e6)]
        fitted = fit_all(samples)
        self.assertEqual({"default", "add", "matmul"}, set(fitted))
        windows = [Sample("conv2d", "", flops, 1, flops / rate, side) for side, rate in ((3, 1e10), (5, 2e10)) for flops in (1e6, 1e7)]
        fitted_windows = fit_all(windows)
        self.assertEqual({"default", "conv2d", "conv2d 3x3", "conv2d 5x5"}, set(fitted_windows))
        self.assertAlmostEqual(2, fitted_windows["conv2d 5x5"]["flops"] / fitted_windows["conv2d 3x3"]["flops"])
        self.assertAlmostEqual(1, fitted["default"]["bytes"] / 1e9, delta=0.05)
        self.assertAlmostEqual(1, fitted["matmul"]["flops"] / 1e10, delta=0.05)

    def test_what_only_the_device_does_belongs_to_the_operation_before_it(self):
        samples = [Sample("conv2d", "a", 1, 1), Sample("relu", "a", 1, 1)]
        step = [("conv2d", "a", 1.0), ("add_bias", "a", 0.5), ("relu", "a", 0.25)]
        self.assertEqual([1.5, 0.25], aligned(step, samples))
        with self.assertRaisesRegex(CostError, "a step has no relu of 'a'"):
            aligned(step[:2], samples)


class TestRoofline(unittest.TestCase):
    """Roofs of 100 GFLOP/s and 10 GB/s: the ridge is at 10 FLOP for each byte."""

    samples = [Sample("conv2d", "a", 1e8, 1e6, 1e-3), Sample("add", "b", 0, 1e6, 1e-4), Sample("matmul", "c", 4e6, 1e6, 2e-4),
               Sample("fill", "d", 0, 100, 1e-6), Sample("copy", "e", 0, 0, 0)]

    def test_the_roofs_are_what_was_reached_and_the_nearer_one_bounds(self):
        self.assertEqual((1e11, 1e10), tuple(map(round, roofs(self.samples))))
        self.assertEqual(["computing", "memory", "memory", "neither"],
                         [bound_of(sample, 1e11, 1e10) for sample in self.samples[:4]])
        self.assertEqual("computing", bound_of(Sample("matmul", "", 1.1e7, 1e6, 2e-4), 1e11, 1e10))

    def test_the_table_begins_with_what_takes_longest(self):
        first, second, head, *rows = roofline_lines(self.samples, "seed, batch 64")
        self.assertIn("seed, batch 64: at most 100.0 GFLOP/s and 10.0 GB/s were reached", first)
        self.assertIn("below 10.0 FLOP for each byte", second)
        self.assertEqual(["conv2d a 1000.0 100.00 100.0 1.00 computing", "matmul c 200.0 4.00 20.0 5.00 memory",
                          "add b 100.0 0.00 0.0 10.00 memory", "fill d 1.0 0.00 0.0 0.10 neither"],
                         [" ".join(row.split()) for row in rows])


class TestCalibrate(unittest.TestCase):
    def test_a_batch_takes_what_is_left_of_a_step_by_its_samples(self):
        steps = {calibrate.Size("seed", batch): 1e-3 + 5e-5 + 2e-6 * batch for batch in (8, 64, 256)}
        profile = {}
        with mock.patch.object(calibrate, "predicted_step", lambda *_: 1e-3):
            calibrate.add_host(None, profile, steps, None)
        self.assertAlmostEqual(5e-5, profile["batch_seconds"])
        self.assertAlmostEqual(2e-6, profile["sample_seconds"])

    def test_the_lanes_are_those_that_the_times_of_convolutions_show(self):
        size, options = calibrate.Size("seed", 16), mock.Mock(kind="cpu")
        for true in (1, 4, 8, 16):
            def work(lanes):
                return [Sample("conv2d", "", 1e6 * -(-channels // lanes) * lanes, 1) for channels in (6, 9, 12, 16, 20, 26)]
            measured = [replace(of_one, seconds=1e-6 + of_true.flops / 1e10) for of_one, of_true in zip(work(1), work(true))]
            with mock.patch.object(calibrate, "counted", lambda *_, lanes: work(lanes)):
                lanes, samples = calibrate.fitting_lanes(options, {size: measured}, "")
            self.assertEqual(true, lanes)
            self.assertEqual([each.flops for each in work(true)], [each.flops for each in samples])

    def test_waking_is_what_makes_many_messages_take_as_long_as_measured(self):
        """A step of the simulated stage 06 wakes 10 streams, of stage 04 one. Measured: 27e-5 s longer."""
        def metrics(_, stage, size, devices, words, steps):
            wake = json.loads(Path(words[1][4:-2]).read_text())["wake_seconds"]
            return {"step_seconds": [1e-3 + (10 if stage == "06-fully-sharded" else 1) * wake] * steps}
        with mock.patch.multiple(calibrate, job_metrics=metrics, CORES=2,
                                 job_step=lambda _, stage, *__: (2e-3 + 27e-5 * (stage == "06-fully-sharded"), 0)):
            for longest, expected in ((2e-4, 3e-5), (1e-5, 1e-5)):
                with mock.patch.object(calibrate, "MOST_WAKING", longest):
                    found = calibrate.waking(mock.Mock(kind="cpu"), {}, self.target.parent)
                self.assertAlmostEqual(expected, found, delta=longest / 500)
            self.assertEqual(0, calibrate.waking(mock.Mock(kind="cuda"), {}, self.target.parent))

    def test_a_link_has_the_latency_and_the_rate_of_the_ring_that_took_so_long(self):
        times = [(size, 2 * (3e-6 + size / 2 / 1e9)) for size in (1024, 65536, 2**20, 2**24)]
        options = mock.Mock(kind="cpu", links={"host": {"seconds": 1, "bytes": 2}})
        with mock.patch.object(calibrate, "message_times", lambda *_: times):
            found = calibrate.links(options)
        self.assertEqual({"seconds": 1, "bytes": 2}, found["host"])
        for link in ("device", "network"):
            self.assertAlmostEqual(3e-6, found[link]["seconds"])
            self.assertAlmostEqual(1, found[link]["bytes"] / 1e9)

    def test_a_link_has_a_rate_where_noise_hides_it(self):
        times = [(size, 8e-3) for size in (1024, 65536, 2**20, 2**24)]
        with mock.patch.object(calibrate, "message_times", lambda *_: times):
            found = calibrate.links(mock.Mock(kind="cpu", links={}))
        self.assertAlmostEqual(2**24 / 8e-3, found["device"]["bytes"])

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.target = Path(folder.name) / "mine.json"

    def calibrate(self, *words):
        out, err = io.StringIO(), io.StringIO()
        few = {"cpu": (calibrate.Size("seed", 16), calibrate.Size("seed", 32))}
        with mock.patch.multiple(calibrate, SIZES=few, WAITING=few["cpu"][:1], ROUNDS=1), contextlib.redirect_stdout(out), \
                contextlib.redirect_stderr(err):
            status = calibrate.main(["--build", str(BUILD), "-o", str(self.target), *words])
        return status, out.getvalue(), err.getvalue()

    def test_it_writes_a_profile_that_the_stages_take_and_says_its_errors(self):
        status, out, err = self.calibrate()
        self.assertEqual((0, ""), (status, err), out)
        self.assertRegex(out, r"seed, batch 16 +\d+\.\d+ +\d+\.\d+ +[+-]\d+\.\d %")
        self.assertRegex(out, r"median error \d+\.\d %, largest \d+\.\d %")
        self.assertRegex(out, r"\nroofline of seed, batch 16: at most \d+\.\d GFLOP/s and \d+\.\d GB/s")
        self.assertRegex(out, r"\nconv2d +conv2 +\d.* (computing|memory|neither)\n")
        profile = json.loads(self.target.read_text())
        self.assertLessEqual({"default", "conv2d", "matmul", "sgd_update"}, set(profile["operations"]))
        self.assertEqual("measured on cpu:0 by ./lockstep calibrate", profile["source"])
        self.assertIn(profile["lanes"], (1, *calibrate.LANES["cpu"]))
        self.assertTrue(0 <= profile["wake_seconds"] <= calibrate.MOST_WAKING, profile["wake_seconds"])
        default = json.loads((ROOT / "tools/profiles/default.json").read_text())["links"]
        self.assertEqual(default["host"], profile["links"]["host"])
        for link in ("device", "network"):  # measured, here
            self.assertNotEqual(default[link], profile["links"][link])
            self.assertTrue(1e7 < profile["links"][link]["bytes"] < 1e12, profile["links"][link])
        self.assertEqual([1.0, *sorted(profile["crowded"][1:])], profile["crowded"])  # never faster
        done = subprocess.run([BUILD / "04-ddp/04-ddp", "--devices", f"sim:{self.target}x2", "--data",
                               "blank:256:64", "--max-steps", "2"], capture_output=True, text=True, timeout=60)
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertIn("measured on cpu:0 by ./lockstep calibrate", done.stdout)

    def test_wrong_words_are_refused_in_one_line(self):
        for words, text in ((("--device", "gpu"), "'gpu', expected one device such as cpu:0"),
                            (("--device", "cpu:0", "--links", "none"), "'none', expected a profile"),
                            (("--build", "/nowhere"), "no program /nowhere/01-single-gpu/01-single-gpu"),
                            (("-o", "/no/such/folder/a.json"), "/no/such/folder")):
            status, out, err = self.calibrate(*words)
            self.assertEqual((1, 1), (status, err.count("\n")), (words, err))
            self.assertIn(text, err)
            self.assertFalse(self.target.exists())


if __name__ == "__main__":
    unittest.main()
