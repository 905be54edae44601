"""`lockstep gpu-check`: its parts on a stand-in, and without a GPU."""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]
from case_records import Case, judged  # noqa: E402
from gpu_check import checks, command, machine, measure, results  # noqa: E402
from gpu_check_support import call, without_gpu  # noqa: E402

FULL = "LOCKSTEP_FULL" in os.environ

# --- A stand-in for a machine with a GPU -----------------------------------------------------

NVIDIA_SMI = "#!/bin/sh\necho 'NVIDIA Test GPU, 9.0, 580.1, Default'\n"
MESON = """#!REAL_PYTHON -IS
import pathlib, sys
folder = pathlib.Path(next(word for word in sys.argv[2:] if not word.startswith("-")))
folder.mkdir(exist_ok=True)
(folder / "build.ninja").touch()
(folder / "meson-was-called-with").write_text("\\n".join(sys.argv[1:]))
print("Build targets: 9\\n\\n  Lockstep\\n    CPU engine : oneDNN\\n    GPU backend: YES\\n")
"""
# Three cases for operations, one of them skipped, and one for stages; FAULT says what goes wrong.
GPU_TEST = """#!REAL_PYTHON -IS
import json, os, sys
fault = os.environ.get("FAULT", "")
cases = {"[stage]": [("steps agree", "passed", "")]}.get(sys.argv[1], [
    ("matmul agrees", "failed" if fault == "case" else "passed", ""),
    ("pooling agrees", "passed", ""),
    ("two at once", "skipped",
     "no GPU: it said" if fault == "blind" else "fewer than two GPUs: 1")])
with open(os.environ["LOCKSTEP_TEST_LOG"], "a") as log:
    for name, status, reason in cases:
        print(json.dumps({"event": "start", "case": name}), file=log)
        print(json.dumps({"event": "end", "case": name, "status": status, "reason": reason,
                          "seconds": 0.5}), file=log)
sys.exit(fault == "case")
"""
# 2 ms a step eagerly and 1 ms as a graph, of which the update of the weights takes 0.5 ms.
STAGE = """#!REAL_PYTHON -IS
import json, os, sys
if os.environ.get("FAULT") == "old" and {"--tf32", "bf16"} & set(sys.argv): sys.exit("it begins with 8.0")
if "--help" in sys.argv: sys.exit(print("--graph") or 0)
def option(name, default):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
fault = os.environ.get("FAULT", "")
if fault == "crash" and "--tf32" in sys.argv: sys.exit("step 3, rank 0 (cuda:0): not finite")
epochs, steps = int(option("--epochs", 1)), int(option("--max-steps", 10))
where = option("--devices", "")
assert where == "cuda:0" or where.startswith("sim:")
ms = 0.001 if "--graph" in sys.argv else 0.002
json.dump({"accuracy": [0.5 if fault == "floor" else 0.9] * epochs, "test_loss": [0.4] * epochs,
           "losses": [2.0] * steps + [1.0] * steps * (epochs - 1), "epochs": epochs,
           "samples_per_second": 12345.6, "epoch_seconds": [1.5] * epochs,
           "peak_memory_bytes": [64 * 2**20], "step_seconds": [9.0] + [ms] * (steps - 1)},
          open(option("--metrics", os.devnull), "w"))
if "--trace" in sys.argv:
    # Simulated, an operation takes a nanosecond for each of its FLOPs, or of its bytes.
    update = option("--optimizer", "sgd").replace("adamw", "adam") + "_update"
    took = {"conv2d": 9e9 if "flops" in where else 1e6, update: 0.0 if "flops" in where else 4e7}
    spans = [{"ph": "X", "name": name, "ts": 2000.0 * step + at, "args": {"layer": ""},
              "dur": took[name] / 1e3 if "sim" in where else 500.0}
             for step in range(steps) for name, at in (("conv2d", 0.0), (update, 500.0))]
    json.dump({"traceEvents": [{"ph": "M", "name": "thread_name"}, *spans]},
              open(option("--trace", None), "w"))
"""
# An all-reduce with NCCL: 10 us where its calls block, 25 us where they do not.
SIZES = """#!REAL_PYTHON -IS
import json, os, sys
if os.environ.get("FAULT") == "nccl": sys.exit("error: no NCCL: this build has no NCCL; leave --backend out")
assert sys.argv[sys.argv.index("--backend") + 1] == "nccl"
seconds = {"1": 1e-5, "0": 2.5e-5}[os.environ["NCCL_COMM_BLOCKING"]]
json.dump([{"seconds": seconds}], open(sys.argv[sys.argv.index("--metrics") + 1], "w"))
"""
SANITIZER = """#!/bin/sh
case "$FAULT" in
  refuses) echo "========= Error: Device not supported" ; exit 1 ;;
  race) while [ "${1#--}" != "$1" ]; do shift 2; done; "$@"; echo "========= COMPUTE-SANITIZER"
        echo "========= Error: Potential WAR hazard"; echo "========= ERROR SUMMARY: 1 error"
        exit 9 ;;
esac
while [ "${1#--}" != "$1" ]; do shift 2; done
exec "$@"
"""
# A python that has torch: 4 ms a step, 3 ms channels_last, 1.5 ms as a graph.
TORCH = """#!REAL_PYTHON
import json, os, sys
if "-c" in sys.argv:
    exec(sys.argv[-1].replace("import torch;", "").replace(
        "torch.__version__ if torch.cuda.is_available() else ''", "'9.9.9'"))
for line in sys.stdin if "--serve" in sys.argv else ():
    words = json.loads(line)
    ms = 1.5 if "--graph" in words else 3.0 if "--channels-last" in words else 4.0
    if os.environ.get("FAULT") == "torch": print(json.dumps({"error": "RuntimeError: no memory"}))
    else: print(json.dumps({"mean_step_seconds": ms / 1e3}))
    sys.stdout.flush()
"""


NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
# Of a CUDA runtime what a copy needs: each of ten takes 5.4 ms.
RUNTIME = """int cudaMalloc(void** p, unsigned long n) { *p = &p; return n != 1ul << 30; }
int cudaEventCreate(void** mark) { *mark = &mark; return 0; }
int cudaEventRecord(void* mark, void* stream) { return 0; }
int cudaEventSynchronize(void* mark) { return 0; }
int cudaMemcpyAsync(void* to, void* from, unsigned long n, int kind, void* stream) { return kind != 3; }
int cudaEventElapsedTime(float* ms, void* from, void* to) { *ms = 53.687f; return 0; }
"""


class TestOnAStandIn(unittest.TestCase):
    """The tool in a tree of its own, with programs that answer as a GPU machine's would."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name) / "lock step"  # a blank, as a user's folder may have
        self.bin = Path(folder.name) / "bin"
        shutil.copytree(ROOT / "tools", self.root / "tools",
                        ignore=shutil.ignore_patterns("__pycache__"))
        for stage in ("01-first", "01-single-gpu"):
            self.write(self.root / "build-gpu" / stage / stage, STAGE)
        self.write(self.root / "build-gpu/04-ddp/message-sizes", SIZES)
        self.write(self.root / "01-single-gpu/main.cpp", "")
        self.write(self.root / "build-gpu/tests/gpu/gpu-test", GPU_TEST)
        for name, text in (("nvidia-smi", NVIDIA_SMI), ("meson", MESON), ("ninja", "#!/bin/sh\n"),
                           ("compute-sanitizer", SANITIZER), ("nvcc", NVCC), ("torch", TORCH)):
            self.write(self.bin / name, text)
        measures = self.root / "tools/gpu_check/measure.py"
        if not FULL:  # one round of the bench
            measures.write_text(re.sub(r"^ROUNDS = .*", 'ROUNDS = {"seed": 1, "resnet18": 1}',
                                       measures.read_text(), flags=re.MULTILINE))
        self.out = self.root / "results.md"

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("REAL_PYTHON", sys.executable))
        path.chmod(0o755)

    def check(self, *arguments, fault="", **variables):
        environment = without_gpu()
        environment["PATH"] = f"{self.bin}{os.pathsep}{environment['PATH']}"
        return call(self.root / "tools/gpu-check", "--python", self.bin / "torch", "--out",
                    self.out, *arguments, env={**environment, "FAULT": fault, **variables})

    def assert_failed(self, done, *texts):
        self.assertEqual(1, done.returncode, done.stdout + done.stderr)
        for text in texts:
            self.assertIn(text, done.stdout)

    def test_all_parts_pass_and_append_to_one_file_with_one_head(self):
        for arguments in (("--part", "stages", "--part", "build", "--part", "ops"),
                          ("--part", "sanitizer"), ("--part", "bench")):
            done = self.check(*arguments)
            self.assertEqual((0, ""), (done.returncode, done.stderr), done.stdout)
        text = self.out.read_text()
        self.assertEqual(1, text.count("# gpu-check on NVIDIA Test GPU\n"))
        for row in (r"date \| \d{4}-\d\d-\d\d",
                    r"device \| NVIDIA Test GPU, compute capability 9.0",
                    r"driver \| 580\.1", r"PyTorch \| 9\.9\.9", "CUDA Toolkit", "cuDNN", "NCCL",
                    r"commit \| unknown: no \.git", r"processor \| .*\d+ cores"):
            self.assertRegex(text, rf"\| {row}")
        self.assertEqual(["build", "ops", "stages", "sanitizer", "bench"],
                         re.findall(r"^## (\w+), [-\d]+ [:\d]+ UTC$", text, re.MULTILINE))
        closing = re.findall(r"^(\w+): (.*) in \d+ s \(limit (\d+) s\): passed$", text,
                             re.MULTILINE)
        self.assertEqual([("build", "1 passed, 0 failed", str(240 * command.SLOWER)),
                          ("ops", "2 passed, 0 failed, 1 skipped", "90"),
                          ("stages", "9 passed, 0 failed", "240"),
                          ("sanitizer", "4 passed, 0 failed", "400"),
                          ("bench", "15 passed, 0 failed", "470")], closing)
        self.assertIn("* skipped, 1: fewer than two GPUs: 1", text)

    def test_it_opens_with_a_plan_and_ends_with_verdicts_and_the_file_to_send(self):
        done = self.check("--part", "ops", "--part", "sanitizer", fault="case")
        self.assertTrue(done.stdout.startswith("2 parts on NVIDIA Test GPU, at most 9 minutes; "), done.stdout)
        self.assertRegex(done.stdout, r"\n  ops +at most  2 min  every operation")
        self.assertRegex(done.stdout, r"\nops: .*\(limit 90 s\): failed\n")
        self.assertIn(f"send this one file: {self.out}\nto: ", done.stdout)
        self.assertRegex(self.out.read_text(),
                         r"\| ops \| failed \|\n\| sanitizer \| \w+ \|\n$")

    def test_a_file_that_cannot_be_written_is_made_elsewhere_and_says_so(self):
        (self.root / "a-file").write_text("")
        home = self.root / "home"
        home.mkdir()
        with mock.patch.object(Path, "cwd", return_value=home):
            file = results.ResultFile(self.root / "a-file/results.md", lambda: "# head\n")
            file.add("first\n")
            file.add("second\n")
        self.assertEqual(home / "results.md", file.path)
        self.assertRegex(file.path.read_text(), "^# head\n\nNot written: .*a-file/results.md: .*; "
                                                "this file is in its place.\nfirst\nsecond\n$")
        self.assertEqual(1, len(file.notes))

    def test_an_interrupt_and_an_error_of_any_kind_are_in_the_file(self):
        for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
            self.out.unlink(missing_ok=True)
            file = results.ResultFile(self.out, lambda: "# head\n")
            options = command.parse_options(["--part", "ops", "--part", "bench"])
            with mock.patch.object(command.build, "compile_targets", side_effect=error), \
                    contextlib.redirect_stdout(io.StringIO()), \
                    contextlib.suppress(KeyboardInterrupt):
                command.run_parts(options, None, None, "", file)
            text = self.out.read_text()
            stopped = isinstance(error, KeyboardInterrupt)
            self.assertIn("interrupted before its end" if stopped else "No space left", text)
            self.assertIn(f"| bench | {'not run' if stopped else 'failed'} |", text)

    def test_the_limits_are_three_calls_of_under_ten_minutes_and_24_in_all(self):
        self.assertLessEqual(sum(command.LIMITS.values()), 24 * 60)
        first = sum(command.LIMITS[part] for part in ("build", "ops", "stages"))
        self.assertLess(max(first, command.LIMITS["sanitizer"], command.LIMITS["bench"]), 600)

    def test_the_build_is_for_the_gpu_found_and_configured_once(self):
        self.assertEqual(0, self.check("--part", "build").returncode)
        note = self.root / "build-gpu/meson-was-called-with"
        words = note.read_text().splitlines()
        self.assertIn("-Dcuda=enabled", words)
        self.assertIn("-Dgpu_archs=90", words)
        note.unlink()
        self.assertIn("* GPU backend: YES", self.check("--part", "build").stdout)
        self.assertFalse(note.exists())
        self.write(self.bin / "nvidia-smi", NVIDIA_SMI.replace("9.0", "8.6"))
        self.check("--part", "build")
        self.assertIn("-Dgpu_archs=86", note.read_text())

    def test_every_part_alone_compiles_all_programs_and_the_libraries_that_they_open(self):
        self.write(self.bin / "ninja", f'#!/bin/sh\necho "$@" >> "{self.root}/targets"\n')
        for part in ("ops", "stages", "sanitizer", "bench"):
            self.check("--part", part)
            called = (self.root / "targets").read_text().splitlines()[-1]
            self.assertIn(" programs", called, part)

    def test_libraries_of_python_packages_are_roots_of_the_build(self):
        site = self.root / "site-packages"
        for name in ("cudnn/include", "nccl/lib", "cu13/lib", "nothing/src"):
            (site / "nvidia" / name).mkdir(parents=True)
        with mock.patch.object(machine, "python_answer", return_value=["", str(site)]):
            roots = machine.library_roots("python3")
        self.assertEqual([str(site / "nvidia" / name) for name in ("cu13", "cudnn", "nccl")], roots)

    def test_a_build_that_fails_shows_its_output_and_no_part_passes(self):
        self.write(self.bin / "ninja", "#!/bin/sh\necho 'FAILED: kernels.cu.o'; exit 1\n")
        self.assert_failed(self.check(), "FAILED: kernels.cu.o", "build: 0 passed, 1 failed")
        self.assertNotIn("## ops", self.out.read_text())
        done = self.check("--part", "ops")
        self.assertEqual(1, done.returncode)
        for text in (done.stdout, self.out.read_text().split("## ops")[-1]):
            self.assertIn("FAILED: kernels.cu.o", text)

    def test_a_driver_that_shows_no_gpu_leaves_a_file_that_quotes_it(self):
        for text, reason in (("#!/bin/sh\necho 'No devices were found'\nexit 6\n",
                              "no GPU: nvidia-smi says 'No devices were found'"),
                             (NVIDIA_SMI.replace("9.0", "[N/A]"),
                              "no GPU: the compute capability of NVIDIA Test GPU is '[N/A]' for nvidia-smi")):
            self.write(self.bin / "nvidia-smi", text)
            done = call(self.root / "tools/gpu-check", "--part", "ops", env={
                **without_gpu(), "PATH": f"{self.bin}{os.pathsep}{without_gpu()['PATH']}"})
            self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
            file, = (self.root / "docs/results").iterdir()
            self.assertIn(f"send this one file: {file}", done.stdout)
            self.assertIn(f"Nothing was checked: {reason}", file.read_text())

    def test_software_that_is_missing_leaves_a_file_that_says_so(self):
        done = call(sys.executable, self.root / "tools/gpu-check", "--out", self.out, "--python",
                    self.bin / "torch", env={**without_gpu(), "PATH": str(self.bin)})  # no compiler
        self.assertEqual(1, done.returncode)
        self.assertEqual(1, done.stderr.count("\n"), done.stderr)
        text = self.out.read_text()
        self.assertIn("| device | NVIDIA Test GPU, compute capability 9.0 |", text)
        self.assertIn("Nothing was checked: c++: not on PATH", text)
        self.assertIn(f"send this one file: {self.out}\n", done.stdout)

    def test_a_part_of_a_gpu_is_found_and_gets_the_time_of_a_small_one(self):
        self.write(self.bin / "nvidia-smi", '''#!/bin/sh
case "$*" in
  -L) echo "GPU 0: NVIDIA Test GPU (UUID: GPU-1111-aaaa)"
      echo "GPU 1: NVIDIA Test GPU (UUID: GPU-2222-bbbb)"
      echo "  MIG 1g.10gb     Device  0: (UUID: MIG-3333-cccc)" ;;
  *--id=GPU-2222-bbbb) echo 'NVIDIA Test GPU, 9.0, 580.1, Default' ;;
  *) echo "Invalid id: $*"; exit 6 ;;
esac
''')
        for visible, part in (("MIG-3333-cccc", " MIG 1g.10gb"), ("GPU-2222-bbbb", ""), ("GPU-22", "")):
            done = self.check("--part", "ops", CUDA_VISIBLE_DEVICES=visible)
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)
            minutes = 6 if part else 2
            self.assertTrue(done.stdout.startswith(f"1 part on NVIDIA Test GPU{part}, at most {minutes} "),
                            done.stdout)
        done = self.check("--part", "ops", CUDA_VISIBLE_DEVICES="MIG-4444")
        self.assertIn("no GPU: CUDA_VISIBLE_DEVICES names MIG-4444, which is not in the list", done.stderr)
        done = self.check("--part", "ops", CUDA_VISIBLE_DEVICES="")
        self.assertIn("no GPU: CUDA_VISIBLE_DEVICES is empty, which hides all of them", done.stderr)

    def test_a_failed_case_and_one_that_saw_no_gpu_fail_the_part(self):
        self.assert_failed(self.check("--part", "ops", fault="case"), "* failed: matmul agrees",
                           "ops: 1 passed, 1 failed, 1 skipped")
        self.assert_failed(self.check("--part", "ops", fault="blind"),
                           "two at once: skipped ('no GPU: it said') although nvidia-smi shows")
        (self.root / "build-gpu/tests/gpu/gpu-test").unlink()
        self.assert_failed(self.check("--part", "ops"), "could not be started",
                           "0 passed, 1 failed")

    def test_training_runs_say_what_they_reached_and_keep_to_the_floors(self):
        done = self.check("--part", "stages", "--full")
        self.assertIn("| `01-single-gpu --epochs 2 --graph` | 0.9000, 0.9000 | 0.4000, 0.4000 | "
                      "2.0000, 1.0000 | 12346 | 1.50 | 64 |", done.stdout)
        self.assertIn("--model resnet18 --batch-size 256 --lr 0.1 --epochs 10", done.stdout)
        self.assert_failed(self.check("--part", "stages", fault="floor"),
                           "accuracy 0.5000 after epoch 1, expected at least 0.7; "
                           "accuracy 0.5000 after epoch 2, expected at least 0.8")
        self.assert_failed(self.check("--part", "stages", fault="crash"), "8 passed, 1 failed",
                           "--tf32: exited with status 1: step 3, rank 0 (cuda:0): not finite")

    def test_sanitizer_faults_fail_and_where_it_cannot_run_is_skipped(self):
        self.assert_failed(self.check("--part", "sanitizer", fault="race"),
                           "========= Error: Potential WAR hazard", "0 passed, 4 failed")
        done = self.check("--part", "sanitizer", fault="refuses")
        self.assertEqual(0, done.returncode)
        self.assertIn("memcheck: sanitizer refuses the device: Device not supported", done.stdout)
        self.assertIn("sanitizer: 0 passed, 0 failed, 4 skipped", done.stdout)
        done = self.check("--part", "sanitizer")
        self.assertRegex(done.stdout, r"memcheck: \d+ cases, 0 with faults\n")
        self.assertRegex(done.stdout, r"racecheck: \d+ cases, 0 with faults; cases left out: \[tensor-cores\]\n")

    def test_on_several_gpus_every_stage_but_the_first_trains_on_them_together(self):
        self.write(self.bin / "nvidia-smi", "#!/bin/sh\nfor gpu in 1 2 3; do echo 'NVIDIA Test GPU, "
                   "8.6, 580.1, Exclusive_Process'; done\necho 'NVIDIA Other, 7.5, 580.1, Default'\n")
        self.write(self.root / "04-ddp/main.cpp", "")
        self.write(self.root / "build-gpu/04-ddp/04-ddp", STAGE.replace('== "cuda:0"', 'in '
                   '("cuda:0", "cuda:0,cuda:1,cuda:2,cuda:3")'))
        done = self.check("--part", "stages", "--part", "build")
        self.assertEqual(0, done.returncode, done.stdout)
        self.assertIn("04-ddp --epochs 2 --devices cuda:0,cuda:1,cuda:2,cuda:3", done.stdout)
        self.assertNotIn("01-single-gpu --epochs 2 --devices", done.stdout)
        self.assertRegex(done.stdout, r"GPUs +4\n")
        self.assertIn("Exclusive_Process: the checks need several processes on a GPU", done.stdout)
        self.assertIn("stages    at most 16 min", done.stdout)  # a GPU that may be small
        words = (self.root / "build-gpu/meson-was-called-with").read_text().split("\n")
        self.assertIn("-Dgpu_archs=75,86", words)

    def test_on_a_gpu_without_tf32_and_bf16_nothing_asks_for_them(self):
        self.write(self.bin / "nvidia-smi", NVIDIA_SMI.replace("9.0", "7.5"))
        done = self.check("--part", "stages", "--part", "bench", fault="old")
        self.assertEqual(0, done.returncode, done.stdout)
        self.assertIn("compute capability 7.5", done.stdout)
        for rounded in ("TF32", "bf16"):
            self.assertIn(f"target resnet18, batch 256, {rounded}: at least 1.1 times channels_last: not measured",
                          done.stdout)

    def test_every_reason_that_the_cases_give_is_a_skip_except_that_there_is_no_gpu(self):
        sources = "".join(path.read_text() for path in sorted((ROOT / "tests/gpu").glob("*.[hc]*")))
        reasons = re.findall(r'LOCKSTEP_SKIP\((?:std::string\()?"([^"]+)"', sources)
        self.assertGreater(len(reasons), 8)
        for reason in reasons:
            case = judged(Case("gpu", "x", "skipped", reason))
            expected = "failed" if reason.startswith("no GPU: ") else "skipped"
            self.assertEqual(expected, checks.judged_here(case).status, reason)

    def test_bench_says_rates_ratios_targets_and_the_gpus_share(self):
        done = self.check("--part", "bench")
        self.assertIn("| seed, batch 64 | 32000 | 64000 | - | 16000 | 21333 | 42667 | "
                      "2.00 | 1.50 | 1.50 |", done.stdout)
        self.assertIn("target seed, batch 64: at least 3 times PyTorch: 4.00 times "
                      "by Lockstep --graph, reached",
                      done.stdout)
        self.assertIn("target resnet18, batch 256, TF32: at least 1.1 times channels_last: "
                      "3.00 times by Lockstep --graph, reached", done.stdout)
        self.assertIn("| resnet18, batch 256, bf16 | 128000 | 256000 | 128000 | 64000 |", done.stdout)
        self.assertIn("layout, seed, batch 256: with --nchw 1.00 times the samples per second", done.stdout)
        self.assertIn("| Lockstep: times PyTorch | Lockstep: times channels_last | "
                      "Lockstep --graph: times CUDA graph |", done.stdout)
        self.assertIn("busy for 50 % of an eager step of seed, batch 64", done.stdout)
        self.assertIn("NCCL, an all-reduce of 4 KiB on cuda:0: 10.0 us where calls block, 25.0 us where they do not, "
                      "2.50 times as long; medians of 5 alternating rounds", done.stdout)

    @unittest.skipUnless(FULL, "only with --full: the bench once more")
    def test_bench_says_what_part_of_memorys_bandwidth_each_operation_reaches(self):
        self.write(self.root / "runtime.c", RUNTIME)
        (self.bin.parent / "lib64").mkdir()  # beside nvcc's folder
        self.assertEqual(0, call("cc", "-shared", "-fPIC", self.root / "runtime.c", "-o",
                                 self.bin.parent / "lib64/libcudart.so").returncode)
        done = self.check("--part", "bench", "--python", "/no/such/python")  # it needs no PyTorch
        self.assertIn("the device's own copy of 1 GiB: 0.40 TB/s", done.stdout)
        for update in ("sgd_update", "adam_update"):  # 40 MB in 500 us
            self.assertEqual(1, done.stdout.count(f"| {update} | 1 | 40 | 500 | 0.08 | 20 % |"), update)
        self.assertNotIn("| conv2d |", done.stdout)  # it multiplies
        self.assertIn("farthest from a copy: sgd_update, 20 %", done.stdout)

    def test_bench_without_pytorch_measures_ours_and_says_so(self):
        done = self.check("--part", "bench", "--python", "/no/such/python")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn("| seed, batch 64 | 32000 | 64000 | - | - | - | - | - | - |", done.stdout)
        self.assertIn("no torch that sees a GPU in /no/such/python", done.stdout)
        self.assertEqual(5, done.stdout.count(": not measured"))
        self.assertIn("the device's own copy of 1 GiB: unknown, no libcudart.so with nvcc", done.stdout)
        self.assertIn("| sgd_update | 1 | 40 | 500 | 0.08 | - |", done.stdout)

    @unittest.skipUnless(FULL, "only with --full: the bench once more")
    def test_bench_with_a_rival_that_fails_has_failed(self):
        self.assert_failed(self.check("--part", "bench", fault="torch"),
                           "seed, batch 64: PyTorch: RuntimeError: no memory", "4 passed, 11 failed")


class TestWithoutGpu(unittest.TestCase):
    def check(self, *arguments, **changed):
        return call(ROOT / "tools/gpu-check", *arguments, env={**without_gpu(), **changed})

    def assert_one_line(self, done, *texts):
        self.assertEqual((1, ""), (done.returncode, done.stdout))
        self.assertEqual(1, done.stderr.count("\n"), done.stderr)
        for text in texts:
            self.assertIn(text, done.stderr)

    def test_every_part_that_needs_one_is_refused_in_one_line(self):
        before = sorted((ROOT / "docs/results").iterdir())
        for part in ("ops", "stages", "sanitizer", "bench"):
            self.assert_one_line(self.check("--part", part), f"no GPU: nvidia-smi is not on PATH; "
                                 f"{part} cannot run without one, nothing was checked")
        self.assert_one_line(self.check(), "no GPU", "ops, stages, sanitizer, bench")
        self.assertEqual(before, sorted((ROOT / "docs/results").iterdir()))

    def test_without_nvidia_smi_a_file_that_is_named_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.check("--out", Path(folder) / "found.md")
            self.assertEqual(1, done.returncode)
            self.assertIn("no GPU: nvidia-smi is not on PATH", (Path(folder) / "found.md").read_text())

    def test_wrong_arguments_are_one_line(self):
        for arguments, text in ((("--part", "speed"), "invalid choice: 'speed'"),
                                (("--bundle", "x", "--offline", "y"), "goes without --offline"),
                                (("--target", "x"), "--target is for --part build alone"),
                                (("--offline", "/no/such", "--part", "build"), "manifest.json"),
                                (("--speed",), "unrecognized arguments: --speed")):
            self.assert_one_line(self.check(*arguments), text)


class TestPieces(unittest.TestCase):
    def test_overlapping_spans_count_once(self):
        self.assertEqual(5.0, measure.covered([(0, 2), (1, 3), (1, 2), (8, 10)]))

    def test_the_share_is_of_whole_steps_after_the_first_tenth(self):
        def span(name, begin, length):
            return {"ph": "X", "name": name, "ts": begin, "dur": length}
        # The first step is slow and busy; then 2 of every 10.
        events = [span("conv2d", 0.0, 1000.0)]
        events += [span("sgd_update", 1000.0 + 10.0 * step, 2.0) for step in range(20)]
        events += [span("count_correct", 2000.0, 500.0)]  # the evaluation at the end
        self.assertAlmostEqual(0.2, measure.busy_share(events))
        with self.assertRaises(ValueError):
            measure.busy_share(events[:2])

    def test_a_target_that_is_missed_is_a_figure_and_no_fault(self):
        section = results.Section("bench", 100)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            measure.say_targets(section, {measure.Setting("seed", 64): {
                "Lockstep": 2.0, "Lockstep --graph": 1.0, "PyTorch": 2.9, "CUDA graph": 1.11}})
        self.assertRegex(output.getvalue(), "3 times PyTorch: 2.90 times by Lockstep --graph, not reached\n.*"
                                            "1.1 times CUDA graph: 1.11 times by Lockstep --graph, reached\n.*"
                                            "not measured\n.*TF32.*not measured")
        self.assertEqual(0, section.count["failed"])

    def test_libraries_for_another_cuda_than_the_compilers_are_left_out(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("nvidia/cudnn/lib", "nvidia/nccl/lib", "nvidia/cu13/lib",
                         "nvidia_cudnn_cu12-9.1.dist-info", "nvidia_nccl_cu13-2.28.dist-info"):
                (Path(folder) / name).mkdir(parents=True)
            with mock.patch.object(machine, "python_answer", lambda *_: ["", folder]), \
                    mock.patch.object(machine.doctor, "nvcc", lambda: "nvcc 13.0 in /usr/local/cuda"):
                roots = machine.library_roots("python3")
        self.assertEqual([f"{folder}/nvidia/cu13", f"{folder}/nvidia/nccl"], roots)

    def test_layouts_are_compared_where_both_were_measured(self):
        small, large = measure.Setting("seed", 64), measure.Setting("resnet18", 256, "TF32")
        self.assertNotIn("Lockstep --nchw", measure.contenders(None, small, None))
        self.assertIn("Lockstep --nchw", measure.contenders(None, large, None))
        section = results.Section("bench", 100)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            measure.say_layouts(section, {
                small: {"Lockstep": 1.0}, large: {"Lockstep": 3.0, "Lockstep --nchw": 2.0}})
        self.assertEqual("layout, resnet18, batch 256, TF32: with --nchw 1.50 times the samples per "
                         "second, copies to that layout and back included\n", output.getvalue())

    def test_rounds_stop_before_the_limit_and_say_how_many_there_were(self):
        section = results.Section("bench", 100)
        with mock.patch.object(results.Section, "seconds", side_effect=iter(range(0, 1000, 20))):
            seconds, fault = measure.alternate(section, {"a": lambda limit: (0.5, "")}, 5)
        self.assertEqual([0.5], seconds["a"])
        self.assertIn("time for 1 of 5 rounds only", fault)

    def test_a_part_that_checked_nothing_has_failed(self):
        section = results.Section("ops", 10)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            section.finish()
        self.assertEqual(1, section.count["failed"])
        self.assertIn("nothing was checked", output.getvalue())

    def test_losses_are_averaged_by_epoch(self):
        self.assertEqual([2.0, 1.0], checks.epoch_losses({"losses": [3, 2, 1, 1, 1], "epochs": 2}))

    def test_a_rival_answers_what_it_cannot_measure_in_one_line(self):
        with measure.rival_of(sys.executable) as torch:
            step, fault = torch.step_seconds(("--device", "cuda", "--batch", 0), 120)
            self.assertIsNone(step)
            self.assertRegex(fault, r"^\w+: ")
            _, fault = torch.step_seconds(("--tf32",), 120)  # it still answers
            self.assertEqual("ValueError: --tf32, --graph and --precision bf16 need --device cuda", fault)
            torch.process.kill()
            torch.process.wait()
            _, fault = torch.step_seconds(("--steps", "1"), 5)
            self.assertRegex(fault, "^(PyTorch ended with status -9|no answer from PyTorch)")


if __name__ == "__main__":
    unittest.main()
