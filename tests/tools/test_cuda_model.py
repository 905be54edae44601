"""The CUDA model of tests/cuda_model: installed into a folder, used as a toolkit."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/cuda_model"
sys.path.insert(0, str(ROOT / "tools"))
from compile_tests import install_cuda_model, tsan_wrapper  # noqa: E402
from run_tests import CUDA_MODEL  # noqa: E402


def run(*command, environment=None, timeout=400):
    """Status and output of a command."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          env={**os.environ, **(environment or {})}, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


@unittest.skipUnless(shutil.which("meson"), "meson is installed by `lockstep test`")
class TestCudaModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.prefix = ROOT / CUDA_MODEL  # the folder of the build that is tested with it
        if error := install_cuda_model(cls.prefix, ROOT):
            raise RuntimeError(error)

    def test_what_has_not_changed_is_not_installed_again(self):
        def installed():
            return {path: path.stat().st_mtime_ns for path in (self.prefix / "lib").iterdir()}

        before = installed()
        self.assertEqual("", install_cuda_model(self.prefix, ROOT))
        self.assertEqual(before, installed())

    def nvcc(self, *arguments):
        return run(self.prefix / "bin/nvcc", *arguments)

    def program(self, source, *flags):
        """The path of a test program of selftest/, compiled."""
        target = Path(self.folder.name) / (source + "".join(flags)).replace("/", "_")
        if target.exists():
            return target
        if source.endswith(".cu"):
            status, output = self.nvcc("-std=c++20", "-O1", "-g", "-lineinfo",
                                       "-gencode=arch=compute_80,code=sm_80",
                                       "-Xcompiler=-Wall,-Wextra,-Werror", *flags,
                                       MODEL / "selftest" / source, "-o", target)
        else:
            lib = self.prefix / "lib"
            status, output = run("g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror",
                                 f"-I{self.prefix / 'include'}", MODEL / "selftest" / source, "-o",
                                 target, f"-L{lib}", f"-Wl,-rpath,{lib}", "-lcudnn", "-lcublas",
                                 "-lnccl", "-lcudart")
        self.assertEqual(0, status, output)
        return target

    def machine(self, **environment):
        """What selftest/machine.cpp prints, by line: the words before the last, and the last."""
        status, output = run(self.program("machine.cpp"), environment=environment)
        self.assertEqual(0, status, output)
        return dict(line.rsplit(" ", 1) for line in output.splitlines()), output

    def test_kernels(self):
        program = self.program("kernels.cu")
        self.assertEqual((0, "<<<text>>>(stays) as it is\n"), run(program, timeout=20))
        for what, message in (("barrier", "divergent barrier in kernels::divergent_barrier: of 32 "
                               "threads 16 wait .*, 16 wait "),
                              ("shuffle", "divergent barrier .*16 wait for lanes of its mask"),
                              ("mask", "lane 1 .* mask leaves it out")):
            status, output = run(program, what, timeout=20)
            self.assertEqual(-6, status, output)
            self.assertRegex(output, message)

    def test_address_sanitizer_sees_what_kernels_do(self):
        program = self.program("kernels.cu", "-Xcompiler=-fsanitize=address")
        environment = {"ASAN_OPTIONS": "detect_leaks=0"}
        status, output = run(program, environment=environment, timeout=20)
        self.assertEqual(0, status, output)
        status, output = run(program, "memory", environment=environment, timeout=20)
        self.assertNotEqual(0, status)
        self.assertRegex(output, r"heap-buffer-overflow[\s\S]*past_the_end")

    def test_kernels_do_not_reach_other_gpus_memory(self):
        watched = self.program("peers.cu", "-Xcompiler=-fsanitize=address")
        environment = {"ASAN_OPTIONS": "detect_leaks=0"}
        for access in ("0", "1"):
            environment["CUDA_MODEL_PEER_ACCESS"] = access
            self.assertEqual((0, f"access {access}\n"), run(watched, environment=environment, timeout=20))
        for what, where in (("kernel", "add"), ("host", "main")):  # nor does the host
            status, output = run(watched, what, environment=environment, timeout=20)
            self.assertNotEqual(0, status)
            self.assertRegex(output, rf"use-after-poison[\s\S]* in {where}")

    def test_blocks_and_warps_run_in_an_order_that_the_seed_decides(self):
        def order(seed):
            status, output = run(self.program("kernels.cu"), "order", timeout=20,
                                 environment={"CUDA_MODEL_SEED": str(seed)})
            self.assertEqual(0, status, output)
            blocks, _, right = output.partition(" right ")
            return [int(block) for block in blocks.split()], int(right)

        self.assertEqual((list(range(12)), 50), order(0))  # a missing barrier does not show
        orders = [order(seed) for seed in (1, 1, 2, 3)]
        self.assertEqual(orders[0], orders[1])
        self.assertEqual(4, len({tuple(blocks) for blocks, _ in orders + [order(0)]}))
        for blocks, right in orders:
            self.assertEqual(list(range(12)), sorted(blocks))
            self.assertTrue(5 < right < 45, right)

    @unittest.skipUnless("LOCKSTEP_FULL" in os.environ, "only with --full: the build that needs it")
    def test_thread_sanitizer_sees_races_in_kernels(self):
        wrapper = tsan_wrapper()
        if wrapper is None:
            self.skipTest("TSan cannot map its shadow")
        program = self.program("kernels.cu", "-Xcompiler=-fsanitize=thread")
        environment = {"CUDA_MODEL_THREADS": "2", "TSAN_OPTIONS": "halt_on_error=1"}
        self.assertEqual((0, "<<<text>>>(stays) as it is\n"),
                         run(*wrapper, program, environment=environment, timeout=60))
        for what, kernel in (("blocks", "add_one_in_each_block"), ("fence", "last_block_total"),
                             ("warps", "tell"), ("lanes", "tell_lane")):
            status, output = run(*wrapper, program, what, environment=environment, timeout=60)
            self.assertNotEqual(0, status)
            self.assertRegex(output, rf"data race[\s\S]* kernels::{kernel}")

    def test_streams_events_memory_and_graphs(self):
        self.assertEqual((0, ""), run(self.program("runtime.cu"), timeout=20))

    def test_libraries_against_plain_loops(self):
        self.assertEqual((0, ""), run(self.program("libraries.cpp"), timeout=20))

    def test_nccl(self):
        program = self.program("nccl.cpp")
        self.assertEqual((0, ""), run(program, timeout=20))
        status, output = run(program, "disagree", timeout=20)
        self.assertEqual(-6, status, output)
        self.assertIn("CUDA model: NCCL: the ranks' collectives do not agree", output)
        gone = "on a communicator that was aborted or destroyed"
        for misuse, message in (("abort twice", f"ncclCommAbort {gone}"),
                                ("call after abort", f"ncclAllReduce {gone}"),
                                ("ask after abort", f"ncclCommGetAsyncError {gone}"),
                                ("two threads", "ncclCommAbort while another thread is in "
                                 "ncclAllReduce on this communicator")):
            status, output = run(program, "misuse", misuse, timeout=20)
            self.assertEqual(-6, status, output)
            self.assertIn(f"CUDA model: NCCL: {message}", output)

    def test_machines_without_a_usable_gpu(self):
        for driver in ("12040", "0"):
            codes, output = self.machine(CUDA_MODEL_DRIVER=driver)
            self.assertEqual("cudaErrorInsufficientDriver", codes["cudaGetDeviceCount"])
            self.assertIn(f"count -7 driver {driver}", output)  # the argument is left alone
            self.assertEqual("CUBLAS_STATUS_NOT_INITIALIZED", codes["cublasCreate"])
        for variable in ({"CUDA_MODEL_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "-1"}):
            self.assertEqual("cudaErrorNoDevice", self.machine(**variable)[0]["cudaGetDeviceCount"])

    def test_devices_as_the_environment_describes_them(self):
        _, output = self.machine(CUDA_MODEL_DEVICES="4", CUDA_VISIBLE_DEVICES="3,1,7,0",
                                 CUDA_MODEL_MEMORY_MIB="5", CUDA_MODEL_CAPABILITY="8.6")
        self.assertIn("count 2 ", output)
        self.assertIn("device 0: CUDA model on the CPU, 8.6, 5 MiB, bus 3", output)
        self.assertIn("device 1: CUDA model on the CPU, 8.6, 5 MiB, bus 1", output)

    def test_code_for_no_such_gpu(self):
        status, output = run(self.program("kernels.cu"), timeout=20,
                             environment={"CUDA_MODEL_CAPABILITY": "6.1"})
        self.assertEqual(1, status)
        self.assertIn("gives cudaErrorNoKernelImageForDevice", output)

    def test_planted_faults(self):
        codes, _ = self.machine(CUDA_MODEL_FAULT="cudaMallocAsync:2")
        self.assertEqual("cudaErrorMemoryAllocation", codes["cudaMallocAsync"])
        codes, _ = self.machine(CUDA_MODEL_FAULT="cudaStreamSynchronize:719:2")
        self.assertEqual("cudaSuccess", codes["cudaStreamSynchronize"])
        self.assertEqual("cudaErrorLaunchFailure", codes["again cudaStreamSynchronize"])
        self.assertEqual("cudaSuccess", codes["again cudaGetLastError"])  # a call's error goes
        codes, _ = self.machine(CUDA_MODEL_FAULT="cudaMemcpyAsync:700:1:async")
        self.assertEqual("cudaSuccess", codes["cudaMemcpyAsync"])
        for call in ("cudaStreamSynchronize", "again cudaStreamSynchronize",
                     "again cudaGetLastError"):  # a stream's error stays
            self.assertEqual("cudaErrorIllegalAddress", codes[call])
        codes, _ = self.machine(CUDA_MODEL_FAULT="cudnnCreate:1001")
        self.assertEqual("CUDNN_STATUS_NOT_INITIALIZED", codes["cudnnCreate"])

    def test_slow_copies(self):
        codes, _ = self.machine(CUDA_MODEL_COPY_DELAY_US="150000")
        self.assertGreaterEqual(float(codes["upload_ms"]), 150)

    def test_a_bad_variable_is_named(self):
        status, output = run(self.program("machine.cpp"),
                             environment={"CUDA_MODEL_FAULT": "cudaMalloc"})
        self.assertEqual(-6, status)
        self.assertRegex(output, r"CUDA_MODEL_FAULT is 'cudaMalloc', expected function:code")

    def test_nvcc_names_itself_and_writes_dependencies(self):
        status, output = self.nvcc("--version")
        self.assertEqual(0, status)
        self.assertRegex(output, r"CUDA model[\s\S]*release 13\.0, V13\.0\.0")
        folder = Path(self.folder.name)
        source, target, dependencies = (folder / f"small.{end}" for end in ("cu", "o", "d"))
        source.write_text(f'#include "{MODEL}/selftest/expect.h"\n')
        status, output = self.nvcc("-std=c++20", "-MD", "-MF", dependencies, "-c", source, "-o", target)
        self.assertEqual(0, status, output)
        text = dependencies.read_text()
        self.assertTrue(text.startswith(f"{target}:"), text)
        self.assertIn("selftest/expect.h", text)

    def test_nvcc_passes_on_the_errors_of_the_compiler(self):
        source = Path(self.folder.name) / "broken.cu"
        source.write_text("__global__ void k(int* x) { *x = missing; }\n")
        status, output = self.nvcc("-c", source, "-o", source.with_suffix(".o"))
        self.assertEqual(1, status)
        self.assertTrue(re.search(r"broken\.cu:1:\d+: error: .missing. was not declared", output),
                        output)


if __name__ == "__main__":
    unittest.main()
