"""The table at the end of `lockstep run`."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
METRICS = {"stage": "01-single-gpu", "devices": ["cpu:0"], "backend": "cpu (oneDNN)", "epochs": 2,
           "accuracy": [0.5, 0.8125], "epoch_seconds": [8.0, 9.0], "samples_per_second": 7400.4,
           "peak_memory_bytes": [3 * 2**20, 5 * 2**20]}


class TestSummaryTable(unittest.TestCase):
    def table(self, *objects, arguments=()):
        with tempfile.TemporaryDirectory() as folder:
            for number, content in enumerate(objects):
                text = content if isinstance(content, str) else json.dumps(content)
                (Path(folder) / f"{number:02}.json").write_text(text)
            return subprocess.run([sys.executable, str(ROOT / "tools/summary_table.py"), folder,
                                   *arguments], capture_output=True, text=True)

    def test_last_accuracy_mean_epoch_and_fullest_device(self):
        heading, rule, row = self.table(METRICS).stdout.strip().splitlines()
        self.assertEqual(row.split(), ["01-single-gpu", "cpu:0", "cpu", "(oneDNN)", "2", "81.25",
                                       "%", "8.5", "s", "7400", "5.0", "MiB"])
        self.assertNotIn("speedup", heading)
        self.assertEqual(len(heading), len(rule))

    def test_fields_that_a_stage_does_not_report(self):
        lines = self.table({"stage": "x"}, {**METRICS, "speedup": 1.5, "efficiency": 0.75})
        heading, _, bare, full = lines.stdout.strip().splitlines()
        self.assertTrue(heading.endswith("efficiency"))
        self.assertEqual(bare.split(), ["x"] + ["-"] * 9)
        self.assertTrue(full.endswith("1.50        75 %"), full)

    def test_nothing_trained_prints_nothing(self):
        done = self.table()
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_a_broken_file_is_one_line(self):
        done = self.table("{")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("00.json", done.stderr)

    def test_save_keeps_one_object_or_a_list(self):
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "kept.json"
            self.table(METRICS, arguments=["--save", str(kept)])
            self.assertEqual(json.loads(kept.read_text()), METRICS)
            self.table(METRICS, METRICS, arguments=["--save", str(kept)])
            self.assertEqual(json.loads(kept.read_text()), [METRICS, METRICS])


if __name__ == "__main__":
    unittest.main()
