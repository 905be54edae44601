"""`./lockstep predict`: the table, its figures, and what is refused."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import predict  # noqa: E402
import prediction_check  # noqa: E402
from calibrate import Size  # noqa: E402

BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build-test"))
SMALL = ("--model", "seed")  # a simulated run of it takes milliseconds


class TestPredict(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def predict(self, *words):
        return subprocess.run([sys.executable, ROOT / "tools/predict.py", "--build", BUILD,
                               *map(str, words)], capture_output=True, text=True, timeout=120)

    def runs(self, *words):
        """The runs that --json keeps."""
        done = self.predict("--json", self.folder / "all.json", *words)
        self.assertEqual((0, ""), (done.returncode, done.stderr), done.stdout)
        return json.loads((self.folder / "all.json").read_text())["runs"], done.stdout

    def assert_refused(self, words, *texts):
        done = self.predict(*words)
        self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
        for text in texts:
            self.assertIn(text, done.stderr)

    def test_every_stage_stands_in_the_table_with_what_its_own_run_gives(self):
        runs, table = self.runs(*SMALL, "--devices", "sim:h100x4")
        stages = [run["stage"] for run in runs]
        self.assertEqual(["01-single-gpu", "02-dataparallel", "03-model-split",
                          "03-model-split/tensor-split", "04-ddp", "05-syncbn-checkpoint",
                          "06-fully-sharded", "07-mesh"], stages)
        self.assertIn("from data sheets, never measured here", table)
        self.assertIn("64 samples per device (--batch-per-device)", table)
        one = runs[0]
        self.assertEqual((1, 64), (one["devices"], one["batch_size"]))
        for run in runs[1:]:
            self.assertEqual((4, 256), (run["devices"], run["batch_size"]), run["stage"])
            self.assertAlmostEqual(run["speed_up"], 256 / run["step_seconds"]
                                   / (64 / one["step_seconds"]))
        # The program itself, asked for the same.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "metrics.json"
            subprocess.run([BUILD / "04-ddp/04-ddp", "--devices", "sim:h100x4", *SMALL, "--data",
                            "blank:1024:64", "--batch-size", "256", "--metrics", path],
                           check=True, capture_output=True, timeout=60)
            own = json.loads(path.read_text())
        ddp = runs[stages.index("04-ddp")]
        self.assertEqual(own["step_seconds"][-1], ddp["step_seconds"])
        self.assertEqual(max(own["peak_memory_bytes"]), ddp["peak_memory_bytes"])
        row = next(line for line in table.splitlines() if line.startswith("04-ddp ")).split()
        self.assertEqual(["4", "256", f"{1e3 * ddp['step_seconds']:.3f}"], row[1:4])
        step = own["per_step_seconds"]
        waiting = step["exposed_communication"] / (step["compute"] + step["exposed_communication"])
        self.assertEqual([f"{100 * ddp['speed_up'] / 4:.0f}", "%", f"{100 * waiting:.0f}", "%"], row[6:10])
        used = own["training_flops"] / own["steps"] / (ddp["step_seconds"] * 4 * 6.7e13)
        self.assertEqual([f"{100 * used:.1f}", "%"], row[-2:])

    def test_a_batch_for_all_stays_as_it_is(self):
        runs, table = self.runs(*SMALL, "--devices", "sim:4", "--batch-size", "256", "--stages", "01,04")
        self.assertEqual([256, 256], [run["batch_size"] for run in runs])
        self.assertIn("a batch of 256 in all (--batch-size)", table)

    def test_stages_of_one_process_say_why_they_are_not_on_several_hosts(self):
        runs, table = self.runs(*SMALL, "--devices", "sim:2", "--nodes", "2", "--stages", "02,03,04")
        reasons = {run["stage"]: run["reason"] for run in runs}
        self.assertIn("devices of one host", reasons["02-dataparallel"])
        self.assertIn("devices of one host", reasons["03-model-split"])
        self.assertEqual("", reasons["04-ddp"])
        self.assertIn("02-dataparallel: is one process", table)

    def test_what_does_not_fit_is_marked_and_the_advice_is_right(self):
        words = ("--devices", "sim:t4x2", "--model", "resnet18", "--width", "512", "--stages", "02,04")
        _, table = self.runs(*words, "--batch-per-device", "256")
        self.assertRegex(table, r"02-dataparallel .* !")
        self.assertRegex(table, r"! 02-dataparallel needs \d+ MiB of 15259: it fits --batch-per-device "
                                r"128 or with this batch in 04-ddp")
        runs, table = self.runs(*words, "--batch-per-device", "128")
        self.assertNotIn("!", table)
        self.assertLess(max(run["peak_memory_bytes"] for run in runs), 15259 * 2**20)

    def test_a_sweep_over_devices_takes_as_many_hosts_as_they_need(self):
        runs, table = self.runs(*SMALL, "--devices", "sim:h100x8", "--stages", "03,04,06",
                                "--sweep", "devices=1,8,4096")
        hosts = {run["devices"]: run["nodes"] for run in runs if run["stage"] == "04-ddp"}
        self.assertEqual({1: 1, 8: 1, 4096: 512}, hosts)
        rows = {line.split()[0]: line.split()[1::2] for line in table.splitlines()
                if line.startswith("0") and "%" in line}
        efficiency = [float(cell) for cell in rows["04-ddp"]]
        self.assertEqual(sorted(efficiency, reverse=True), efficiency)
        self.assertRegex(table, r"03-model-split, .*4096: is one process")
        self.assert_refused((*SMALL, "--devices", "sim:8", "--sweep", "devices=12"),
                            "12 devices do not fill hosts of 8")

    def test_a_sweep_over_links_says_where_another_stage_becomes_the_fastest(self):
        # Split layers exchange activations, replicas gradients: of a large network with few samples the
        # first are smaller. Devices that wait for each other in every layer pay the latency each time.
        runs, table = self.runs("--devices", "sim:h100x1", "--nodes", "4", "--model", "mlp", "--stages",
                                "04,tensor-split", "--sweep", "link=100mbit,400gbit")
        seconds = {(run["stage"], run["value"]): run["step_seconds"] for run in runs if run["devices"] > 1}
        self.assertLess(seconds["03-model-split/tensor-split", "100mbit"], seconds["04-ddp", "100mbit"])
        self.assertGreater(seconds["03-model-split/tensor-split", "400gbit"], seconds["04-ddp", "400gbit"])
        self.assertIn("between 100mbit and 400gbit the fastest changes from tensor-split to 04-ddp", table)
        self.assert_refused((*SMALL, "--sweep", "link=1gbit"), "--nodes 2")

    def test_a_sweep_is_drawn(self):
        words = (*SMALL, "--stages", "04", "--sweep", "devices=1,2", "--figure", self.folder / "a.svg")
        self.runs(*words)
        self.assertIn(">04-ddp</text>", (self.folder / "a.svg").read_text())

    def test_a_check_measures_what_it_predicts(self):
        few = [prediction_check.Configuration("04-ddp", Size("seed", 12), 2, way) for way in ("shm", "tcp")]
        few.append(prediction_check.Configuration("02-dataparallel", Size("mlp", 6), 2))
        out = io.StringIO()
        with mock.patch.object(prediction_check, "configurations", lambda: few), \
                mock.patch.object(prediction_check, "STEPS", 8), contextlib.redirect_stdout(out):
            status = predict.main(["--check", "--devices", "sim:2", "--build", str(BUILD), "--rounds", "2"])
        self.assertIn(status, (0, 1))  # default.json knows nothing of this machine
        self.assertIn("rough figures, for a first look; medians of 2 alternating rounds of 8 steps", out.getvalue())
        for name in ("04-ddp, seed, batch 12, 2 x, shm", "04-ddp, seed, batch 12, 2 x, tcp", "02-dataparallel, mlp, batch"):
            self.assertRegex(out.getvalue(), rf"{name}.* \d+\.\d+ +\d+\.\d+ +[+-]\d+\.\d %  +equal +equal +\d+\.\d\d MiB")

    def test_a_check_fails_where_an_aim_is_missed_or_other_bytes_were_sent(self):
        def reached(*rows):
            results = [prediction_check.Compared(prediction_check.Configuration("04-ddp", Size("seed", 1), devices),
                                                 1.0, predicted, more, memory, 0) for devices, predicted, more, memory in rows]
            with contextlib.redirect_stdout(io.StringIO()):
                return prediction_check.report(results)
        good = [(1, 1.09, 0, 0)] * 9 + [(1, 5.0, 0, 0)]
        self.assertTrue(reached(*good))
        self.assertTrue(reached(*good, (64, 9.0, 8, 8)))  # more devices than cores
        self.assertFalse(reached(*good[1:], (1, 0.95, 8, 0)))
        self.assertFalse(reached(*good[1:], (1, 0.95, 0, 8)))
        self.assertFalse(reached(*[(1, 1.11, 0, 0)] * 10))
        self.assertFalse(reached(*good[1:], (1, 0.7, 0, 0)))

    def test_a_pipeline_of_ranks_stands_beside_the_others(self):
        runs, table = self.runs("--devices", "sim:h100x4", "--model", "mlp", "--stages", "04,07", "--mesh",
                                "pipeline=4", "--accumulate", "8")
        mesh = next(run["metrics"] for run in runs if run["stage"] == "07-mesh")
        self.assertEqual(4, mesh["pipeline"]["stages"])
        row = next(line for line in table.splitlines() if line.startswith("07-mesh ")).split()
        bubble = 100 * mesh["pipeline"]["waited_seconds_per_step"] / mesh["step_seconds"][-1]
        self.assertEqual([f"{bubble:.0f}", "%"], row[10:12])
        self.assertGreater(bubble, 3 / 11)  # the formula's, of equal stages
        ddp = next(line for line in table.splitlines() if line.startswith("04-ddp ")).split()
        self.assertEqual("-", ddp[10])
        runs, table = self.runs(*SMALL, "--devices", "sim:2", "--stages", "04,07", "--mesh", "pipeline=3")
        self.assertIn("07-mesh: --mesh pipeline=3: has 3 ranks, expected 2", table)

    def test_wrong_words_are_refused_in_one_line(self):
        self.assert_refused(("--check", "--sweep", "devices=1,2"), "--check: measures configurations of its own")
        self.assert_refused(("--check", "--model", "mlp"), "--check: measures configurations of its own")
        self.assert_refused(("--rounds", 3), "--rounds: is of --check")
        self.assert_refused(("--devices", "cpu:0"), "'cpu:0'", "sim:h100x8")
        self.assert_refused(("--devices", "sim:0"), "'sim:0'")
        self.assert_refused(("--devices", "sim:nox2"), "no profile", "h100")
        self.assert_refused(("--sweep", "devices=1,x"), "devices=1,x", "link=100mbit,1gbit")
        self.assert_refused(("--sweep", "link=1"), "link=1")
        self.assert_refused(("--batch-per-device", "0"), "'0'")
        self.assert_refused(("--batch-per-device", "1", "--batch-size", "2"), "--batch-size")
        self.assert_refused(("--stages", "09"), "09")
        self.assert_refused(("--max-steps", "3"), "--max-steps")
        self.assert_refused(("--figure", "a.svg"), "--sweep")
        self.assert_refused(("--json", "/no/such/folder/a.json", *SMALL), "/no/such/folder")
        self.assert_refused(("--model", "none"), "none")

    def test_what_is_no_profile_is_refused_in_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "mad.json"
            os.mkfifo(path)
            self.assert_refused(("--devices", f"sim:{path}x2"), "no profile", "not a regular file")
            path.unlink()
            for text in (100000 * "[", "[]", "{}", 5000 * "1", '{"operations": [], "links": 1}'):
                path.write_text(text)
                self.assert_refused(("--devices", f"sim:{path}x2", *SMALL), "no profile", "mad.json")


if __name__ == "__main__":
    unittest.main()
