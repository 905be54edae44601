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
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]
import bench  # noqa: E402
import bench_devices  # noqa: E402
import bench_meshes  # noqa: E402
import bench_ranks  # noqa: E402
import bench_runs  # noqa: E402
from bench_rounds import NotHere  # noqa: E402
from processes import own_children  # noqa: E402


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

# The first takes half as long as the other.
SIZES = """#!/usr/bin/env python3
import json, sys
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
json.dump([{"backend": option.get("--backend", "shm"), "all_reduce": kind, "world_size": 2, "bytes": 4096,
            "seconds": seconds, "sent_bytes": 4096, "counted_in": "shm",
            "bus_bytes_per_second": 4096 / seconds}
           for kind, seconds in (("ring", 0.0001), ("library", 0.0002))], open(option["--metrics"], "w"))
"""

# A simulated mesh: in each step a sum along tensor stands behind a reduction along data, a microsecond long.
TRACED = f"""#!/usr/bin/env python3
import json, sys
sys.path[:0] = [{str(ROOT / "tests/support")!r}]
from mesh_trace import mesh_trace
option = dict(zip(sys.argv[1::2], sys.argv[2::2]))
json.dump(mesh_trace(int(option["--max-steps"])), open(option["--trace"], "w"))
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
        self.overlap = lambda _, *more: {
            "compute": 1.0, "communication": 0.5, "exposed_communication":
            0.5 if "--no-overlap" in more else 0.2 if "--prefetch" in more else 0.1}

    def program(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def bench(self, *arguments, python="no-such-python", run=stand_in):
        """What `bench` prints with these arguments."""
        output = io.StringIO()
        with mock.patch.object(bench_runs, "program", lambda _: self.stage), \
                mock.patch.object(bench_runs, "run_stages", lambda *runs: [
                    run(stage, *options) for stage, options in runs]), \
                mock.patch.object(bench_devices, "other_stages", lambda: ["02-other"]), \
                mock.patch.object(bench_ranks, "cable_round", self.overlap), \
                mock.patch.object(bench_devices, "copy_seconds", lambda: 0.0001), \
                contextlib.redirect_stdout(output):
            self.assertEqual(0, bench.main([*arguments, "--python", str(python)]))
        return output.getvalue()

    def test_every_line_says_what_was_measured_row129(self):
        text = self.bench("--model", "seed", "--part", "one-device", "--thorough")
        self.assertIn("medians of 5 rounds; no PyTorch in no-such-python (--python names", text)
        lines = [line for line in text.splitlines() if "an epoch of" in line]
        self.assertEqual(4, len(lines))  # 1 and 2 threads, batches 64 and 256
        self.assertRegex(lines[0], r"^seed +W 1 +batch +64 +threads 1 +2\.00 ms/step +"
                                   r"32000 samples/s  an epoch of 60000 about 1\.9 s +"
                                   r"2\.0 GFLOP/s \(operations by shapes\)  "
                                   r"cpu \(stand-in, 1 thread\)$")
        self.assertTrue(all(re.search(r"W 1 +batch +(64|256) +threads [12]", x) for x in lines))

    def test_it_says_first_what_it_will_measure_and_about_how_long(self):
        text = self.bench("--part", "start", "--part", "messages")
        self.assertRegex(text.splitlines()[1], r"^start, messages: 12 runs, about 20 s on two cores; "
                                               r"Ctrl-C keeps and prints")
        self.assertEqual(["start", "messages"], bench.parse_options(
            ["--part", "start", "--part", "messages"]).parts)

    def test_the_parts_of_each_size_fit_its_time(self):
        for words, minutes in (((), 5), (("--quick",), 3),
                               (("--thorough", "--part", "devices"), 20)):
            options = bench.parse_options(words)
            options.torch = "9.9.9"
            groups = [group for name in options.parts for group in bench.PARTS[name][1](options)]
            self.assertLessEqual(sum(group.seconds() for group in groups), 60 * minutes, words)
        self.assertEqual(list(bench.PARTS), list(bench.parse_options(["--thorough"]).parts))

    def test_pytorch_stands_beside_in_the_same_run(self):
        python = self.program("python", TORCH)
        text = self.bench("--model", "seed", "--quick", python=python)
        self.assertIn("PyTorch 9.9.9, alternating", text)
        self.assertIn("PyTorch 6.00, PyTorch channels_last 4.00 ms: 2.00 times as fast as the better",
                      text)

    def test_slow_and_fast_stages_stand_beside_one_device_row129(self):
        text = self.bench("--model", "seed", "--thorough", "--part", "stages")
        self.assertRegex(text, r"seed +01-single-gpu +W 1 +batch +64 +2\.00 ms/step +"
                               r"32000 samples/s +1\.00 times one device, efficiency 100 %")
        self.assertRegex(text, r"seed +02-other +W 2 .* 1\.60 ms/step .* 1\.25 times one device, "
                               r"efficiency 62 %")
        self.assertRegex(text, r"seed +02-other +W 4 .* 0\.80 ms/step .* 2\.50 times")

    def test_pipelines_stand_beside_the_formula(self):
        text = self.bench("--part", "bubbles", "--thorough")
        self.assertRegex(text, r"Eight equal computing layers, batch 64:\n"
                               r" +2 stages +gpipe +4 micro-batches +4\.00 ms/step +bubble +25\.0 %, "
                               r"formula +20\.0 % +1\.0, 2\.0 MiB\n"
                               r" +2 stages +1f1b +4 micro-batches +3\.00 ms/step")  # of 1, 2, ... 5
        self.assertIn("Eight equal sleeping layers", text)

    def test_pipelines_of_resnet(self):
        target = self.folder / "bench.json"
        text = self.bench("--part", "pipelines", "--thorough", "--json", str(target))
        self.assertRegex(text, r"4 stages +1f1b +16 micro-batches +0\.80 ms/step +bubble +10\.0 %, "
                               r"formula +20\.0 % +1\.0, 1\.0, 1\.0, 1\.0 MiB")
        rows, = json.loads(target.read_text())["parts"]["pipelines"]
        # 1, 2 and 4 stages; naive, two schedules with 5 sizes, and the one that needs a multiple
        self.assertEqual(3 * 11 + 4 + 3, len(rows))
        self.assertIn(("naive", 1), [(row["schedule"], row["micro_batches"]) for row in rows])

    def test_layers_start_and_json(self):
        target = self.folder / "bench.json"
        text = self.bench("--model", "seed", "--json", str(target))
        self.assertRegex(text, r"conv1 +conv2d +1\.500 ms +75\.0 %")
        self.assertIn("Start to first step 0.25 s, peak memory of the process 64 MiB", text)
        figures = json.loads(target.read_text())
        self.assertEqual(("", 3), (figures["stopped"], figures["rounds"]))
        parts = figures["parts"]
        self.assertEqual(sorted({*bench.DEFAULT} - {"pipelines"}), sorted(parts))
        self.assertEqual([0.002] * 3, parts["one-device"][0]["all_rounds"]["ours"])
        self.assertAlmostEqual(0.002, parts["one-device"][0]["step_seconds"]["ours"])
        self.assertEqual([1, 2], [row["world_size"] for row in parts["stages"][0]])
        self.assertEqual({"conv1 conv2d": 1.5, "pool1 max_pool2d": 0.5},
                         parts["layers"][0]["layer_milliseconds"])

    def test_ranks_stand_beside_one_process_and_pytorch(self):
        python = self.program("python", TORCH)
        text = self.bench("--model", "seed", "--part", "ranks", "--part", "messages", "--thorough",
                          python=python)
        self.assertRegex(text, r"seed, global batch 64:\n"
                               r"  one process +2\.00 ms/step +1\.00 times one process\n"
                               r"  2 processes apart +2\.00 ms/step +1\.00 times one process\n"
                               r"  2 devices, stage 02 +1\.60 ms/step +1\.25 times one process.*\n"
                               r"  2 ranks, shm +1\.60 ms/step +1\.25 times one process; "
                               r"communication 0\.40 ms, exposed 0\.10; 87360 bytes sent \(formula 87360\); "
                               r"2\.50 times PyTorch's better")
        for backend in ("shm", "tcp", "gloo"):
            self.assertRegex(text, rf"  2 ranks, {backend} +1\.60 ms/step")
            self.assertRegex(text, rf"{backend} +ring +4 KiB +100\.0 us +0\.04 GB/s of a ring's formula; "
                                   r"4\.0 KiB sent, counted in shm")

    def test_a_build_without_gloo_measures_the_other_backends(self):
        (self.folder / "build").mkdir()
        (self.folder / "build/build.ninja").write_text("LINK_ARGS = libfmt.so\n")
        with mock.patch.object(bench_ranks, "ROOT", self.folder):
            text = self.bench("--part", "messages", "--part", "ranks", "--model", "seed")
        self.assertRegex(text, r"tcp +ring +4 KiB")
        self.assertNotIn("gloo", text)

    def test_what_overlap_hides(self):
        text = self.bench("--part", "overlap")
        self.assertRegex(text, r"two hosts joined by 1gbit:\n"
                               r"  overlap +compute 1000 ms, communication 500, exposed 100: 80 % hidden\n"
                               r"  no overlap +compute 1000 ms, communication 500, exposed 500: 0 % hidden")

    def test_what_fetching_ahead_hides(self):
        text = self.bench("--part", "prefetch")
        self.assertIn("prefetch 0  compute 1000 ms, communication 500, exposed 200: 60 % hidden", text)
        self.assertIn("prefetch 1  compute 1000 ms, communication 500, exposed 100: 80 % hidden", text)

    def test_a_machine_without_two_hosts_measures_the_rest(self):
        def not_permitted(*_):
            raise NotHere("two-hosts: namespaces not permitted")
        self.overlap = not_permitted
        text = self.bench("--part", "overlap", "--part", "start")
        self.assertIn("not measured: two-hosts: namespaces not permitted", text)
        self.assertIn("Start to first step", text)

    def test_ways_of_sharding_stand_beside_ddp_and_their_limits(self):
        seconds = {"none": 0.0021, "optimizer": 0.0022, "gradients": 0.003, "parameters": 0.004}

        def run(stage, *options):
            option = dict(zip(options[::2], options[1::2]))
            if stage == "06-fully-sharded":
                self.assertIn("--no-sync-bn", options)  # as stage 04's batch normalisation
            self.assertEqual("adamw", option["--optimizer"])
            step = seconds[option["--shard"]] if stage == "06-fully-sharded" else 0.002
            return stand_in(stage, *options) | {"step_seconds": [0.5] + [step] * 5}
        text = self.bench("--part", "sharding", "--model", "resnet18", run=run,
                          python=self.program("python", TORCH))
        row = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if "ms/step" in line}
        self.assertEqual("2.10 ms/step 1.05 times DDP's; peak 1.0 MiB; 2.86 times as fast as PyTorch's FSDP2",
                         row["none"])
        self.assertIn("2.20 ms/step 1.10 times DDP's (more than 1.05); peak", row["optimizer"])
        self.assertIn("2.00 times DDP's (more than 1.25); peak", row["parameters"])
        self.assertIn("6.00 ms/step 3.00 times DDP's", row["PyTorch"])
        self.assertIn("mlp, width 512, global batch 64, AdamW, 2 ranks:", self.bench("--part", "sharding", run=run))

    def test_meshes_stand_beside_other_stages_and_their_messages_by_hand(self):
        seconds = {"04-ddp": 0.002, "06-fully-sharded": 0.003, "07-mesh": 0.001}
        ran = []

        def run(where, program, *words):
            ran.append((where, program.name))
            self.assertEqual("--no-sync-bn" in words, program.name != "04-ddp")  # which has no such option
            option = dict(zip(words[::2], words[1::2]))
            if program.name == "mesh-messages":
                return {axis: {"seconds_per_step": 0.0005, "sent": 7.0} for axis in self.axes(option["--mesh"])}
            return stand_in(program.name, "--max-steps", "9", "--devices", "cpu:0,cpu:1") | {
                "step_seconds": [0.5] + [0.0035 if "--accumulate" in option else seconds[program.name]] * 8,
                "along": self.axes(option.get("--mesh", ""))}
        with mock.patch.object(bench_meshes, "run_where", lambda where, program, model, width, steps, *more: run(
                where, program, *more)), mock.patch.object(
                    bench_meshes, "path_of_program", lambda name: self.folder / name):
            text = self.bench("--part", "meshes", "--model", "resnet18")
        self.assertIn("\nresnet18, width 16, global batch 64, AdamW, 4 ranks, one host:\n", text)
        self.assertIn("\nresnet18, width 16, global batch 64, AdamW, 4 ranks, two hosts, 1gbit:\n", text)
        # Apart a quarter of the batch takes 2 ms; two axes take 0.5 ms each by hand.
        self.assertRegex(text, r"  4 processes apart +2\.00 ms/step +1\.00 times stage 04's\n"
                               r"  stage 06 +3\.00 ms/step +1\.50 times stage 04's; waits 0\.10 ms\n"
                               r"  data=2,shard=2 +1\.00 ms/step +0\.50 times stage 04's; apart and by hand 3\.00: "
                               r"no longer\n"
                               r"    data +waits +0\.40 ms; by hand 0\.50 ms; 5 bytes sent\n")
        self.assertRegex(text, r"  data=2,pipeline=2 +3\.50 ms/step .*; apart and by hand 3\.00: LONGER\n")
        self.assertRegex(text, r"    tensor +waits +0\.60 ms, 0\.25 of it before its sums began; by hand 0\.50 ms; "
                               r"5 bytes sent\n")
        # In every round each contender runs once.
        self.assertEqual(ran[:3], [("one host", "04-ddp"), ("one host", "06-fully-sharded"), ("one host", "07-mesh")])
        self.assertEqual(ran[3], ("one host", "mesh-messages"))
        self.assertEqual(ran[:10], ran[10:20])

    @staticmethod
    def axes(mesh):
        """What stage 07 has in its metrics."""
        rows = {word.partition("=")[0]: {"ranks": 2, "sent": 5.0, "predicted": 5.0, "waited_seconds_per_step": 0.0004}
                for word in mesh.split(",") if word}
        if "tensor" in rows:
            rows["tensor"] |= {"waited_seconds_per_step": 0.0006, "queued_seconds_per_step": 0.00025}
        return rows

    def test_one_stream_stands_beside_a_stream_for_each_axis(self):
        self.stage = self.program("stage", TRACED)
        text = self.bench("--part", "queues", "--model", "resnet18")
        self.assertRegex(text, r"resnet18, batch 64:\n  data=2,shard=2 +1 x h100x4 +0\.004 ms/step; with a "
                               r"stream for each axis 0\.003: 33\.3 % longer\n")
        self.assertRegex(text, r"  shard=2,tensor=2 +2 x laptopx2 +0\.004 ms/step")

    def test_two_devices_stand_beside_their_floors(self):
        # Apart 1.8 times stage 01; the bubble allows 8/9 of that. Milliseconds per step by stage,
        # network and devices; a step of half the batch takes 1.1, two at once are 0.9 times as fast.
        slow = {("02-dataparallel", 64): 1.25, ("04-ddp", 64): 1.15}

        def run(stage, *options):
            option = dict(zip(options[::2], options[1::2]))
            batch, one = option["--batch-size"], option["--devices"] == "cpu:0"
            step = (1.98 if "--micro-batches" in option else 2.0) if one else slow.get(
                (stage, batch), 1.4)
            apart = batch in (32, 128) and stage == bench_runs.STAGE and "--width" not in option
            step = 2.0 / 1.8 if apart or "--width" in option and batch == 64 else step
            return stand_in(stage, *options) | {"step_seconds": [0.5] + [1e-3 * step] * 9}
        text = self.bench("--part", "devices", "--thorough", run=run)
        self.assertRegex(text, r"seed, batch 64:\n  stage 01 +2\.00 ms/step \(2\.00 to 2\.00\) +1\.00 times "
                               r"stage 01\n"
                               r"  2 processes apart +1\.11 ms/step .* 1\.80 times stage 01\n"
                               r"  stage 02 +1\.25 ms/step .* 1\.60 times stage 01; 0\.89 times "
                               r"2 processes apart, floor 0\.93: NOT MET\n"
                               r"  stage 04 .* 0\.97 times 2 processes apart, floor 0\.95: met\n"
                               r"  stage 03 .* 1\.43 times stage 01, floor 1\.25: met\n")
        self.assertRegex(text, r"stage 05 .* floor 0\.85: NOT MET")
        self.assertRegex(text, r"2 stages, 1f1b, 8 micro-batches .* 1\.43 times stage 01, floor 1\.70: "
                               r"NOT MET; 1\.41 times 1 stage, 1f1b, 8 micro-batches, floor 1\.52: ")
        self.assertRegex(text, r"all-reduce of 1 KiB +100\.0 us, at most 5\.0: NOT MET\n"
                               r"  all-reduce of 45 MB +200\.0 us, at most 225\.0: met\n"
                               r"  copy of 45 MB, one process +100\.0 us")

    def test_bound_and_free_threads_stand_beside_each_other(self):
        beside = []

        def run(stage, *options):
            # By the whole command line: taskset may not yet have become the shell.
            beside.append(any("while :" in command for command in own_children()))
            bound = "--bind" in options
            self.assertNotEqual(bound, "--no-bind" in options)
            rest = [word for word in options if word not in ("--bind", "--no-bind")]
            step = 1e-3 * (1 + beside[-1]) * (2 if bound else 1)
            return stand_in(stage, *rest) | {"step_seconds": [step] * 9}
        text = self.bench("--part", "cores", "--model", "seed", run=run)
        self.assertRegex(text, r"02-dataparallel, seed, batch 64:\n"
                               r"  quiet +bound +2\.00 ms/step \(2\.00 to 2\.00\)\n"
                               r"  quiet +free +1\.00 ms/step .*\n"
                               r"  beside a loop +bound +4\.00 ms/step .*\n"
                               r"  beside a loop +free +2\.00 ms/step .*\n"
                               r"  beside a loop on one core +bound +4\.00 ms/step .*\n")
        self.assertIn("\ntensor-split, seed, batch 64:\n", text)
        self.assertIn("\n05-syncbn-checkpoint, seed-bn, batch 64:\n", text)
        self.assertEqual(beside[:6], [False, False, True, True, True, True])

    def test_options_that_give_no_median_or_nothing_are_refused(self):
        for words, text in ((("--rounds", "2"), "--rounds 2: expected 3 or more, for a median"),
                            (("--rounds", "4", "--thorough"), "--rounds 4: expected 5 or more"),
                            (("--part", "none"), "invalid choice: 'none'"),
                            (("--quick", "--part", "start"), "--quick: chooses one-device and layers, and --part "
                             "start chooses, too; leave one of them out"),
                            (("--threads", "0"), "--threads 0: expected 1 or more"),
                            (("--batch", "-1"), "--batch -1: expected 1 or more"),
                            (("--json", "/tmp"), "--json /tmp: it is a folder; name a file"),
                            (("--json", "missing/x"), "--json missing/x: No such file or directory"),
                            (("--json", "/dev/null"), "--json /dev/null: it exists and is not a regular")):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as error:
                self.bench(*words)
            self.assertIn(text, error.getvalue())
        with self.assertRaises(SystemExit) as end:
            self.bench("--part", "overlap", "--model", "seed")
        self.assertIn("--part overlap has nothing to measure with --model seed", str(end.exception))

    def test_what_a_served_measurement_cannot_take_is_an_answer_and_nothing_else(self):
        asked = "".join(json.dumps(words) + "\n" for words in (["--tf32"], ["--batch", "x"]))
        done = subprocess.run([sys.executable, ROOT / "tools/bench_torch.py", "--serve"], input=asked,
                              capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual([json.loads(line)["error"] for line in done.stdout.splitlines()],
                         ["ValueError: --tf32, --graph and --precision bf16 need --device cuda",
                          "ValueError: argument --batch: invalid int value: 'x'"])


if __name__ == "__main__":
    unittest.main()
