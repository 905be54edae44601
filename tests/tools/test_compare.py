"""`lockstep run` and `lockstep compare`: what they train, print, keep and draw, with stand-ins for
the stages whose times are known."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]
import compare  # noqa: E402
import compare_figures  # noqa: E402
import step_rows  # noqa: E402
from processes import start  # noqa: E402
from stages import label, path_of  # noqa: E402

STAGES = ["01-single-gpu", "02-dataparallel", "03-model-split", "04-ddp", "05-syncbn-checkpoint"]
SHARDED = "06-fully-sharded"  # its optimizer is another by default
TENSOR = "03-model-split/tensor-split"  # a stage's second program

# An epoch takes 4 s on one device, 2.5 s on two. FAULT is a line of Python that is run first.
STAGE = """#!{python} -IS
import json, sys
stage = {stage!r}
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(stage + " " + " ".join(words) + "\\n")
option = {{a: b for a, b in zip(words, words[1:]) if a.startswith("--")}}
untraced = 0.00102  # seconds of a step; with --trace 0.001
{fault}
if "cuda" in option.get("--devices", ""):
    sys.exit("error: " + option["--devices"] + ": no NVIDIA driver; use --devices cpu:0")
model = option.get("--model", {{"05": "seed-bn", "06": "mlp"}}.get(stage[:2], "seed"))
optimizer = option.get("--optimizer", "adamw" if stage[:2] == "06" else "sgd")
devices = ["cpu:0"] if stage[:2] == "01" else option.get("--devices", "cpu:0,cpu:1").split(",")
epochs = int(option.get("--epochs", 1))
seconds = 4.0 if len(devices) == 1 else 2.5
metrics = {{"stage": stage, "config": {{"model": model, "optimizer": optimizer,
                                       "order": option["--order"]}}
            if "--order" in option else {{}}, "devices": devices, "batch_size": 64,
           "backend": "cpu (stand-in)", "epochs": epochs, "epoch_seconds": [seconds] * epochs,
           "accuracy": [0.8 + 0.01 * epoch for epoch in range(epochs)],
           "samples_per_second": 10000 / seconds,
           "step_seconds": [0.5] + [untraced] * 20, "peak_memory_bytes": [2**20] * len(devices)}}
if stage[:2] in ("04", "05"):
    metrics["per_step_seconds"] = {{"compute": 0.003, "communication": 0.002,
                                   "exposed_communication": 0.001}}
if "--baseline" in words:
    metrics["baseline"] = {{"proof": "|w - w_ref| / |w_ref|", "proof_value": 1e-8,
                           "proof_limit": 1e-5}}
if "--metrics" in option:
    json.dump(metrics, open(option["--metrics"], "w"))
if "--trace" in option:
    events = [{{"ph": "M", "name": name, "pid": 0, "tid": 0, "args": {{"name": text}}}}
              for name, text in (("process_name", "cpu:0"), ("thread_name", "compute"))]
    for step in range(6):
        events += [{{"ph": "X", "name": name, "pid": 0, "tid": 0, "ts": 1000 * step + begin,
                    "dur": 300, "args": {{"layer": ""}}}}
                   for name, begin in (("conv2d", 100), ("copy", 400), ("sgd_update", 700))]
    json.dump({{"traceEvents": events, "otherData": {{"zero_ns": 5000000}}}},
              open(option["--trace"], "w"))
print("trained by", stage)
"""


class Sandbox(unittest.TestCase):
    """The tools in a folder of their own, with fake stages."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.root = self.folder / "lock step"
        self.log = self.folder / "log"
        shutil.copytree(ROOT / "tools", self.root / "tools",
                        ignore=shutil.ignore_patterns("__pycache__"))
        for stage in (*STAGES, TENSOR):
            self.stage(stage)
        (self.root / "03-model-split/tensor").mkdir()

    def stage(self, stage, fault=""):
        """Makes a stage, which runs the Python line `fault` before all else."""
        program = self.root / "build" / path_of(stage)
        folder = stage.split("/")[0]
        for each in (self.root / folder, program.parent):
            each.mkdir(parents=True, exist_ok=True)
        (self.root / folder / "main.cpp").touch()
        program.write_text(STAGE.format(python=sys.executable, stage=label(stage), log=str(self.log),
                                        fault=fault))
        program.chmod(0o755)

    def compare(self, *words):
        return subprocess.run(
            [sys.executable, str(self.root / "tools/compare.py"), *map(str, words)],
            capture_output=True, text=True, timeout=60, cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"})

    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def timed(self):
        """The stages of the timed runs, in their order."""
        return [line for line in self.calls() if "synthetic" not in line]


class TestComparing(Sandbox):
    def rows(self, output):
        """The table's lines by stage and network."""
        lines = [line.split() for line in output.splitlines() if line.startswith(("0", "tensor"))]
        return {(line[0], line[1]): " ".join(line[2:]) for line in lines if len(line) > 8}

    def test_all_stages_and_each_speed_up_is_over_the_same_network(self):
        done = self.compare()
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = self.rows(done.stdout)
        self.assertEqual(list(rows), [("01-single-gpu", "seed"), ("01-single-gpu", "seed-bn"),
                                      *((stage, "seed") for stage in (*STAGES[1:3], "tensor-split", STAGES[3])),
                                      (STAGES[4], "seed-bn")])
        self.assertEqual(rows["01-single-gpu", "seed"], "cpu:0 80.00 % 2500 1.00 100 % 0 % 1.0")
        self.assertEqual(rows["04-ddp", "seed"], "cpu:0,1 80.00 % 4000 1.60 80 % 25 % 1.0, 1.0")
        self.assertIn("\n1 epoch, computed by cpu (stand-in)\n", done.stdout)
        self.assertIn(" 1.60 80 % 25 %", rows["05-syncbn-checkpoint", "seed-bn"])
        self.assertTrue(all("--order sampler" in line for line in self.timed()))
        self.assertEqual([line[:2] for line in self.timed()], ["01", "02", "03", "te", "04", "05", "01"])

    def test_a_stage_with_an_optimizer_of_its_own_is_compared_with_that_one(self):
        self.stage(SHARDED)
        done = self.compare("--stages", "01,06")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = self.rows(done.stdout)
        self.assertEqual(list(rows), [("01-single-gpu", "seed"), ("01-single-gpu", "mlp,"), (SHARDED, "mlp,")])
        self.assertRegex(rows[SHARDED, "mlp,"], "^adamw cpu:0,1 .* 1.60 80 %")
        reference, proof = [line for line in self.calls() if "adamw" in line]
        self.assertRegex(reference, "^01-single-gpu .*--model mlp --optimizer adamw")
        self.assertRegex(proof, f"^{SHARDED} --baseline .*--model mlp --optimizer adamw")

    def test_one_optimizer_for_all_needs_one_reference(self):
        self.stage(SHARDED)
        done = self.compare("--model", "mlp", "--optimizer", "adam")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line[:2] for line in self.timed()], ["01", "02", "03", "te", "04", "05", "06"])
        self.assertTrue(all("--model mlp --optimizer adam" in line for line in self.timed()))

    def test_one_network_for_all_needs_one_reference(self):
        done = self.compare("--model", "resnet18", "--width", "8", "--epochs=2", "--data", "mnist")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line[:2] for line in self.timed()], ["01", "02", "03", "te", "04", "05"])
        for line in self.timed():
            self.assertIn("--data mnist --model resnet18 --order sampler --epochs 2 --width 8", line)
        self.assertRegex(done.stdout, r"81\.00 %[^$]*\n2 epochs, computed by ")

    def test_a_speed_up_needs_a_proof(self):
        self.stage("02-dataparallel", "if '--baseline' in words: sys.exit('error: other weights')")
        done = self.compare("--stages", "01,02,04")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"02-dataparallel .* 4000 +- +- ")
        self.assertIn("02-dataparallel: no speed-up: other weights\n", done.stdout)
        self.assertRegex(done.stdout, r"04-ddp .* 4000 +1\.60 +80 %")
        proofs = [line for line in self.calls() if "--baseline" in line]
        self.assertEqual([line[:2] for line in proofs], ["02", "04"])
        self.assertTrue(all("--data synthetic:640:64" in line for line in proofs))

    def test_without_stage_01_there_is_no_speed_up_and_the_reason_is_told(self):
        done = self.compare("--stages", "04-ddp,02")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line[:2] for line in self.timed()], ["02", "04"])
        self.assertIn("04-ddp: no speed-up: no run of 01-single-gpu on seed to compare with",
                      done.stdout)

    def test_everything_measured_is_kept(self):
        target = self.folder / "two words.json"
        done = self.compare("--json", target, "--epochs", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(target.read_text())
        self.assertEqual(sorted(found), ["date", "machine", "options", "runs", "versions"])
        self.assertIn("cores", found["machine"])
        self.assertEqual(found["options"], ["--json", str(target), "--epochs", "2"])
        self.assertEqual(sorted(found["versions"]), ["lockstep", "python"])
        ddp = next(run for run in found["runs"] if run["stage"] == "04-ddp")
        self.assertEqual(ddp["metrics"]["accuracy"], [0.8, 0.81])
        self.assertEqual(ddp["proof"]["proof_value"], 1e-8)
        self.assertAlmostEqual(ddp["step"]["milliseconds"], 1.0)
        traced = [line for line in self.calls() if line.startswith("04") and "--trace" in line]
        self.assertEqual(5, len(traced))
        self.assertIn("--max-steps 18 ", traced[0])  # 0.3 s at 4000 samples/s

    def test_a_step_that_is_not_as_without_a_trace_is_not_drawn(self):
        target = self.folder / "found.json"
        self.stage("04-ddp", "untraced = 0.0009")
        done = self.compare("--json", target, "--stages", "01,04")
        self.assertEqual((done.returncode, done.stderr),
                         (0, "lockstep: 04-ddp: no timeline: the steps of 5 traced runs take 1.00, "
                             "1.00, 1.00, 1.00, 1.00 ms, expected one within 5 % of the 0.90 ms "
                             "without a trace; repeat it when nothing else runs\n"))
        one, two = json.loads(target.read_text())["runs"]
        self.assertIsNone(two["step"])
        self.assertAlmostEqual(one["step"]["milliseconds"], 1.0)

    def test_run_alone_keeps_nothing_and_traces_nothing(self):
        before = sorted(self.root.iterdir())
        self.assertEqual(self.compare("--stages", "01").returncode, 0)
        self.assertEqual(sorted(self.root.iterdir()), before)
        self.assertFalse([line for line in self.calls() if "--trace" in line])


class TestErrors(Sandbox):
    def refused(self, *words):
        """The one line with which the comparison refuses, before any stage has trained."""
        done = self.compare(*words)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        self.assertEqual(self.timed(), [])
        return done.stderr

    def test_unknown_stage(self):
        self.assertRegex(self.refused("--stages", "01,07"), r"--stages: '07' is no stage, expected "
                                                            r"some of: 01-single-gpu, .*05-sync")

    def test_device_that_does_not_exist(self):
        self.assertIn("--devices: cuda:0: no NVIDIA driver; use --devices cpu:0",
                      self.refused("--devices", "cpu:0,cuda:0"))

    def test_places_that_cannot_be_written(self):
        (self.folder / "file").touch()
        self.assertIn("--json: cannot write missing/x.json: No such file", self.refused("--json", "missing/x.json"))
        self.assertIn("it is a folder; name a file", self.refused("--json", self.folder))
        self.assertIn("--figures: cannot make the folder", self.refused("--figures", "file/below"))
        self.assertIn("--figures: cannot make the folder", self.refused("--figures", "file"))

    def test_a_full_disk_leaves_the_old_results(self):
        target = self.folder / "old.json"
        target.write_text("old")
        code = ("import argparse, compare\n"
                f"options = argparse.Namespace(json={str(target)!r}, figures=None)\n"
                "try: compare.write_outputs(options, {'x': 'x' * 9999})\n"
                "except compare.Refused as refusal: raise SystemExit(str(refusal))")
        done = subprocess.run(["bash", "-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "bash",
                               sys.executable, "-Bc", code], capture_output=True, text=True,
                              timeout=60, cwd=self.root / "tools")
        self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
        self.assertIn(f"--json: cannot write {target}: File too large", done.stderr)
        self.assertEqual("old", target.read_text())
        self.assertEqual([], list(self.folder.glob(".*.tmp")))

    def test_links_long_names_and_modes_of_results(self):
        target, link, long = self.folder / "target", self.folder / "link", self.folder / ("x" * 255)
        link.symlink_to("target")
        for text in "new", "newer":  # the first time there is no file yet
            compare.write_whole(link, text)
            self.assertEqual(text, target.read_text())
            target.chmod(0o640)
        self.assertTrue(link.is_symlink())
        self.assertEqual(0o640, target.stat().st_mode & 0o777)
        compare.write_whole(long, "whole")
        self.assertEqual("whole", long.read_text())
        self.assertIn("--json: cannot write " + "x" * 256 + ": File name too long", self.refused("--json", "x" * 256))

    def test_a_build_that_is_not_there(self):
        self.assertIn("--build: no program", self.refused("--build", self.folder / "none"))

    def test_options_that_serve_one_run_only(self):
        for word in ("--metrics", "--save=x", "--trace", "--baseline"):
            self.assertIn(word.partition("=")[0], self.refused(word, "x"))

    def test_a_stage_that_fails_has_its_own_line_and_the_others_their_rows(self):
        self.stage("03-model-split", "print('warning: odd', file=sys.stderr); "
                                     "print('error: no room', file=sys.stderr); sys.exit(2)")
        done = self.compare()
        self.assertEqual(done.returncode, 1)
        self.assertIn("03-model-split failed (status 2): no room", done.stdout)
        self.assertIn("warning: odd\n", done.stderr)
        self.assertIn("lockstep: 03-model-split failed (status 2): no room\n", done.stderr)
        self.assertRegex(done.stdout, r"03-model-split +- +- ")
        self.assertRegex(done.stdout, r"05-syncbn-checkpoint .* 1\.60 ")

    def test_stage_01_that_fails_is_tried_once(self):
        self.stage("01-single-gpu", "sys.exit('error: no data')")
        done = self.compare()
        self.assertEqual(done.returncode, 1)
        self.assertEqual([line[:2] for line in self.timed()], ["01", "02", "03", "te", "04", "05"])
        self.assertIn("05-syncbn-checkpoint: no speed-up: no run of 01-single-gpu on seed-bn",
                      done.stdout)

    def test_stages_that_crash_or_are_missing_or_say_nothing(self):
        self.stage("02-dataparallel", "import os; os.kill(os.getpid(), 9)")
        self.stage("03-model-split", "sys.exit(3)")
        self.stage("05-syncbn-checkpoint", "sys.exit(0)")
        (self.root / "build/04-ddp/04-ddp").unlink()
        done = self.compare()
        self.assertEqual(done.returncode, 1)
        self.assertIn("02-dataparallel failed (status 137): killed by SIGKILL\n", done.stdout)
        self.assertIn("03-model-split failed (status 3): it gave no reason\n", done.stdout)
        self.assertIn("04-ddp failed (status 127): cannot be started: No such file", done.stdout)
        self.assertIn("05-syncbn-checkpoint failed (status 1): ended well but left no metrics",
                      done.stdout)

    def test_an_interrupted_comparison_leaves_no_stage_behind(self):
        pid = self.folder / "pid"
        self.stage("01-single-gpu", f"import os, time; open({str(pid)!r}, 'w').write("
                                    "str(os.getpid()) + '.'); time.sleep(60)")
        process = start(self, sys.executable, self.root / "tools/compare.py",
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not (pid.exists() and pid.read_text().endswith(".")):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        process.terminate()
        self.assertEqual(process.wait(30), 143)
        self.assertFalse(Path("/proc", pid.read_text().rstrip(".")).exists())


class TestFigures(Sandbox):
    def test_the_same_measurements_give_the_same_figures(self):
        drawn = []
        target = self.folder / "found.json"
        for folder in (self.folder / "figures", self.folder / "again"):
            if folder.name == "figures":
                done = self.compare("--json", target, "--figures", folder, "--epochs", "2")
                self.assertEqual(done.returncode, 0, done.stderr)
            else:
                folder.mkdir()
                compare_figures.draw(json.loads(target.read_text()), folder)
            drawn.append({path.name: path.read_text() for path in folder.iterdir()})
        self.assertEqual(["accuracy.svg", "epoch-time.svg", "memory.svg", "timelines.svg"], sorted(drawn[0]))
        self.assertEqual(*drawn)
        self.assertIn("05-syncbn-checkpoint", drawn[0]["timelines.svg"])
        self.assertIn(">2.50</text>", drawn[0]["epoch-time.svg"])
        self.assertIn(">cpu:1: 1.0</text>", drawn[0]["memory.svg"])
        for name, file in drawn[0].items():
            count = 0 if name == "timelines.svg" else 1
            self.assertEqual([count, count], [file.count(f">network: {words}<") for words in ("seed", "seed-bn")])
        self.assertIn("measured (CPU devices)", drawn[0]["memory.svg"])

    def test_runs_that_trained_nothing_are_not_drawn(self):
        results = {"runs": [{"stage": "x", "metrics": None},
                            {"stage": "y", "metrics": {"epoch_seconds": []}}]}
        self.assertEqual(compare_figures.draw(results, self.folder), [])

    def test_timelines_are_drawn_as_other_steps_are(self):
        step = {"milliseconds": 2.0, "hosts": [{"device": "cpu:0", "enqueued": [[0.5, "conv1", True]]}],
                "lanes": [{"device": "cpu:0", "stream": "compute",
                           "slices": [[0, 1, "conv2d", "conv1"], [1.5, 0.5, "sgd_update", ""]]}]}
        run = {"stage": "01-single-gpu", "metrics": {"config": {"model": "seed"}}, "step": step}
        drawn = compare_figures.draw_timelines([run, {**run, "step": None}])
        for text in ("01-single-gpu, seed: 2.00 ms", "the host enqueues 1 operation of conv1, of a later step",
                     "prefers-color-scheme: dark"):
            self.assertIn(text, drawn)
        self.assertEqual("", compare_figures.draw_timelines([{**run, "step": None}]))

    def test_every_operation_is_of_one_kind(self):
        for operation, kind in (("conv2d_backward_input", "convolutions and products"),
                                ("all_gather", "copies and collectives"),
                                ("batch_norm", "other operations")):
            self.assertEqual(step_rows.kind_of(operation), kind)


if __name__ == "__main__":
    unittest.main()
