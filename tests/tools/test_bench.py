"""`lockstep bench`: what it prints, with a stand-in for the stages whose times are known."""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bench  # noqa: E402
import bench_ranks  # noqa: E402
import bench_runs  # noqa: E402


def stand_in(_stage, *options):
    """What a stage measures: 2 ms a step, the first one slow; one convolution and one pooling slice
    per step."""
    option = dict(zip(options[::2], options[1::2]))
    steps = int(option["--max-steps"])
    devices = option.get("--devices", "").count(",") + 1
    step = 0.002 if devices == 1 else 0.0032 / devices
    if "--trace" in option:
        slices = [{"ph": "X", "name": name, "dur": dur, "args": {"layer": layer}}
                  for _ in range(steps) for name, layer, dur in
                  (("conv2d", "conv1", 1500.0), ("max_pool2d", "pool1", 500.0))]
        events = [{"ph": "M", "name": "thread_name"}] + slices
        Path(option["--trace"]).write_text(json.dumps({"traceEvents": events}))
    metrics = {"step_seconds": [0.5] + [step] * (steps - 1), "steps": steps,
               "backend": "cpu (stand-in, 1 thread)", "training_flops": 4e6 * steps,
               "bubble": {"measured": 0.1, "predicted": 0.2},
               "peak_memory_bytes": [2**20] * devices,
               "startup_seconds": 0.25, "peak_rss_bytes": 64 * 2**20}
    if devices > 1:
        metrics |= {"per_step_seconds": {"compute": 0.001, "communication": 0.0004,
                                         "exposed_communication": 0.0001},
                    "bytes_per_step": {"sent": 87360.0, "predicted": 87360.0}}
    return metrics


# Two pipelines; the second takes a different time in every round.
BUBBLE = """#!/usr/bin/env python3
import json, os, sys
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(__file__ + ".rounds", "a") as rounds:
    rounds.write("x")
number = os.path.getsize(__file__ + ".rounds")
rows = [{"stages": 2, "schedule": kind, "micro_batches": 4, "step_seconds": seconds,
         "bubble": {"measured": bubble, "predicted": 0.2}, "peak_memory_bytes": [2**20, 2**21]}
        for kind, seconds, bubble in (("gpipe", 0.004, 0.25), ("1f1b", 0.001 * number, 0.3))]
json.dump(rows, open(option["--metrics"], "w"))
"""

# The ring takes half as long as the others.
SIZES = """#!/usr/bin/env python3
import json, sys
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
json.dump([{"backend": option["--backend"], "all_reduce": kind, "world_size": 2, "bytes": 4096,
            "seconds": seconds, "bus_bytes_per_second": 4096 / seconds}
           for kind, seconds in (("ring", 0.0001), ("library", 0.0002))], open(option["--metrics"], "w"))
"""

TORCH = ("#!/usr/bin/env python3\n"
         "import json, sys\n"
         "fast = '--channels-last' in sys.argv\n"
         "if '-c' in sys.argv: print('9.9.9')\n"
         "else: print(json.dumps({'step_seconds': [0.004 if fast else 0.006] * 20}))\n")


class TestBench(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.stage = self.folder / "stage"
        self.program("bubble", BUBBLE)
        self.program("message-sizes", SIZES)
        self.overlap = lambda *more: {"compute": 1.0, "communication": 0.5,
                                      "exposed_communication": 0.5 if more else 0.1}

    def program(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def bench(self, *arguments):
        """What `bench` prints with these arguments."""
        output = io.StringIO()
        with mock.patch.object(bench_runs, "program", lambda _: self.stage), \
                mock.patch.object(bench_runs, "run_stage", stand_in), \
                mock.patch.object(bench, "other_stages", lambda: ["02-other"]), \
                mock.patch.object(bench_ranks, "overlap_round", self.overlap), \
                mock.patch.object(sys, "argv", ["bench", *arguments]), \
                contextlib.redirect_stdout(output):
            bench.main()
        return output.getvalue()

    def test_every_line_says_what_was_measured_row129(self):
        text = self.bench("--model", "seed", "--python", "no-such-python")
        self.assertIn("medians of 5 rounds", text)
        self.assertIn("backend: cpu (stand-in, 1 thread)", text)
        lines = [line for line in text.splitlines() if "s/epoch" in line]
        self.assertEqual(4, len(lines))  # 1 and 2 threads, batches 64 and 256
        self.assertRegex(lines[0], r"^seed +W 1 +batch +64 +threads 1 +2\.00 ms/step +"
                                   r"32000 samples/s +1\.9 s/epoch +2\.0 GFLOP/s$")
        self.assertTrue(all(re.search(r"W 1 +batch +(64|256) +threads [12]", x) for x in lines))

    def test_pytorch_stands_beside_in_the_same_run(self):
        python = self.program("python", TORCH)
        text = self.bench("--model", "seed", "--quick", "--python", str(python))
        self.assertIn("PyTorch 9.9.9, alternating", text)
        self.assertIn("PyTorch 6.00, channels_last 4.00 ms: 2.00 times as fast as the better", text)

    def test_slow_and_fast_stages_stand_beside_one_device_row129(self):
        text = self.bench("--model", "seed", "--quick", "--python", "no-such-python")
        self.assertRegex(text, r"seed +01-single-gpu +W 1 +batch +64 +2\.00 ms/step +"
                               r"32000 samples/s +1\.00 times one device, efficiency 100 %")
        self.assertRegex(text, r"seed +02-other +W 2 .* 1\.60 ms/step .* 1\.25 times one device, "
                               r"efficiency 62 %")
        self.assertRegex(text, r"seed +02-other +W 4 .* 0\.80 ms/step .* 2\.50 times")

    def test_pipelines_stand_beside_the_formula(self):
        text = self.bench("--model", "seed", "--quick", "--python", "no-such-python")
        self.assertRegex(text, r"eight equal computing layers, batch 64:\n"
                               r" +2 stages +gpipe +4 micro-batches +4\.00 ms/step +bubble +25\.0 %, "
                               r"formula +20\.0 % +1\.0, 2\.0 MiB\n"
                               r" +2 stages +1f1b +4 micro-batches +3\.00 ms/step")  # of 1, 2, ... 5
        self.assertIn("eight equal sleeping layers", text)
        self.assertNotIn("Pipelines of ResNet-18", text)

    def test_pipelines_of_resnet(self):
        target = self.folder / "bench.json"
        text = self.bench("--model", "resnet18", "--quick", "--python", "no-such-python",
                          "--json", str(target))
        self.assertRegex(text, r"4 stages +1f1b +16 micro-batches +0\.80 ms/step +bubble +10\.0 %, "
                               r"formula +20\.0 % +1\.0, 1\.0, 1\.0, 1\.0 MiB")
        rows = json.loads(target.read_text())["pipelines"]["resnet18"]
        self.assertEqual(3 * 11, len(rows))  # 1, 2 and 4 stages; naive, and two schedules with 5 sizes
        self.assertIn(("naive", 1), [(row["schedule"], row["micro_batches"]) for row in rows])

    def test_layers_start_and_json(self):
        target = self.folder / "bench.json"
        text = self.bench("--model", "seed", "--quick", "--python", "no-such-python",
                          "--json", str(target))
        self.assertRegex(text, r"conv1 +conv2d +1\.500 ms +75\.0 %")
        self.assertIn("Start to first step 0.25 s, peak memory of the process 64 MiB", text)
        figures = json.loads(target.read_text())
        self.assertEqual(5, len(figures["results"][0]["all_rounds"]["ours"]))
        self.assertAlmostEqual(0.002, figures["results"][0]["step_seconds"]["ours"])
        self.assertEqual([1, 2, 4], [row["world_size"] for row in figures["scaling"]])
        self.assertEqual({"conv1 conv2d": 1.5, "pool1 max_pool2d": 0.5},
                         figures["layer_milliseconds"]["seed"])

    def test_ranks_stand_beside_one_process_and_pytorch(self):
        python = self.program("python", TORCH)
        text = self.bench("--model", "seed", "--quick", "--python", str(python))
        self.assertRegex(text, r"seed, global batch 64:\n"
                               r"  one process +2\.00 ms/step +1\.00 times one process\n"
                               r"  2 processes apart +2\.00 ms/step +1\.00 times one process\n"
                               r"  2 devices, stage 02 +1\.60 ms/step +1\.25 times one process.*\n"
                               r"  2 ranks, gloo +1\.60 ms/step +1\.25 times one process; communication "
                               r"0\.40 ms, exposed 0\.10; 87360 bytes sent; 2\.50 times PyTorch's better")
        self.assertRegex(text, r"tcp   ring +4 KiB +100\.0 us")
        self.assertNotIn("two hosts", text)  # only for ResNet-18

    def test_what_overlap_hides(self):
        text = self.bench("--model", "resnet18", "--quick", "--python", "no-such-python")
        self.assertRegex(text, r"two hosts joined by 1gbit:\n"
                               r"  overlap +compute 1000 ms, communication 500, exposed 100: 80 % hidden\n"
                               r"  no overlap +compute 1000 ms, communication 500, exposed 500: 0 % hidden")
        self.overlap = lambda *more: "two-hosts: namespaces not permitted"
        text = self.bench("--model", "resnet18", "--quick", "--python", "no-such-python")
        self.assertIn("not measured: two-hosts: namespaces not permitted", text)

    def test_fewer_than_five_rounds_are_refused(self):
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as error:
            self.bench("--rounds", "3")
        self.assertIn("--rounds 3: a median needs 5 or more", error.getvalue())

    def test_what_a_served_measurement_cannot_take_is_an_answer_and_nothing_else(self):
        asked = "".join(json.dumps(words) + "\n" for words in (["--tf32"], ["--batch", "x"]))
        done = subprocess.run([sys.executable, ROOT / "tools/bench_torch.py", "--serve"], input=asked,
                              capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual([json.loads(line)["error"] for line in done.stdout.splitlines()],
                         ["ValueError: --tf32 and --graph need --device cuda",
                          "ValueError: argument --batch: invalid int value: 'x'"])


if __name__ == "__main__":
    unittest.main()
