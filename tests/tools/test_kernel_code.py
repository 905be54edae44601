"""The machine code of the GPU's kernels holds what their speed rests on (common/kernels/cuda).

The kernels are compiled by the real nvcc and disassembled, which needs no GPU. Nothing here is a
time: it is what can be known without one. Loads that are on their way together hide how long memory
takes to answer. Registers decide how many threads a multiprocessor holds. Local memory is as far
away as all memory. Most GPUs add doubles at a 32nd or 64th of the speed of floats.
"""

import os
import re
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]
from doctor import nvcc_path  # noqa: E402
from kernel_code import compile_kernels, find_nvdisasm, in_flight, read_kernels  # noqa: E402

SOURCE = ROOT / "common/kernels/cuda/cuda_kernels.cu"
FULL = "LOCKSTEP_FULL" in os.environ
ARCHITECTURES = ("90", "80") if FULL else ("90",)
DOUBLES = ("DADD", "DMUL", "DFMA", "DSETP")

# --- What is expected -------------------------------------------------------------------------------

REGISTERS = 32  # of a thread, where 2,048 of them are side by side: all that a multiprocessor holds
MORE_REGISTERS = {  # the first that fits
    "<long": 64,  # arrays of 2^31 elements and more
    "reduce_rows_kernel": 64,  # four blocks are enough, as each thread loads eight rows at once
    "BatchNormMerge": 64,  # a thread per channel: few
    "AdaptiveAvgPool2d": 48,  # on the smallest images of a network
    "each_team_kernel": 40,  # a block or a warp for each row: few threads, or short ones
}

# Kernels that keep registers in local memory while they call the slow paths of a division and a root:
# bytes.
LOCAL_BYTES = {"<long, AdamUpdate>": 16}  # arrays of 2^31 elements and more

ROWS_IN_FLIGHT = 8  # kInFlight of launch.cuh
LOADS_OF_A_ROW = {"AddColumnSums": 1, "BatchNormStatistics": 1, "BatchNormBackwardSums<false>": 2,
                  "BatchNormBackwardSums<true>": 2}
AHEAD = 4  # load_ahead() of launch.cuh
LOADED_AHEAD = ("CheckFinite", "LogSoftmax", "LogSoftmaxBackward", "NllLoss", "SumOfParts",
                "SumSquares")

# Loads that wait for a decision, which may be taken from another load.
CONDITIONAL_LOADS = {
    "transpose_kernel": "a bias, or what is added to, if there is one",
    "ClipToNorm": "gradients that are short enough are not read",
    "MaxPool2dBackward": "windows that overlap: only those that found their maximum here",
}

# Where doubles are added, with the most in one pass of the loop.
DOUBLE_ARITHMETIC = {
    "reduce_rows_kernel": 2,  # the two sums of eight rows, added in float before
    "BatchNormMerge": 100,  # a thread per channel: few, and digits would be lost
}

# What divides by more than the extents that Divisor of launch.cuh knows: their numbers may have 64 bits,
# and the code looks first, and divides small ones in 32.
DIVISION = ("AdaptiveAvgPool2d", "MaxPool2dBackward>", "ApplyMask")


def planned(table, kernel):
    """What a table says of a kernel, or None."""
    return next((value for part, value in table.items() if part in kernel.name), None)


def loads(loop):
    return [each for each in loop if each.loads()]


def row_loop(kernel):
    """The loop over a reduction's rows: that with loads of floats."""
    return next((loop for loop in kernel.loops()
                 if loads(loop) and not any(re.search(r"\.(64|128)", each.opcode)
                                            for each in loads(loop))), [])


def faults_of(kernel):
    """What is wrong with a kernel, one line each."""
    faults = []
    if ((kernel.local_bytes or kernel.count("LDL", "STL"))
            and kernel.local_bytes > (planned(LOCAL_BYTES, kernel) or 0)):
        faults.append(f"{kernel.local_bytes} bytes of local memory, expected none")
    most = planned(MORE_REGISTERS, kernel) or REGISTERS
    if kernel.registers > most:
        faults.append(f"{kernel.registers} registers, expected {most} at most")
    return [f"{kernel.name}: {fault}"
            for fault in faults + faults_of_loads(kernel) + faults_of_arithmetic(kernel)]


def faults_of_loads(kernel):
    faults = []
    for body, each in LOADS_OF_A_ROW.items():
        if kernel.name == f"reduce_rows_kernel<{body}>":
            loop = row_loop(kernel)
            if len(loads(loop)) != ROWS_IN_FLIGHT * each or in_flight(loop) < ROWS_IN_FLIGHT:
                faults.append(f"a pass over its rows has {len(loads(loop))} loads, "
                              f"{in_flight(loop)} of them on their way together, expected "
                              f"{ROWS_IN_FLIGHT * each} and at least {ROWS_IN_FLIGHT}")
    if kernel.name.endswith(tuple(f"_kernel<{body}>" for body in LOADED_AHEAD)):
        ahead = max(map(in_flight, kernel.loops()), default=0)
        if ahead < AHEAD:
            faults.append(f"{ahead} loads on their way together, expected {AHEAD}")
    late = [each.text() for loop in kernel.loops() for each in loads(loop) if each.predicate]
    if late and planned(CONDITIONAL_LOADS, kernel) is None:
        faults.append(f"a load that waits for a decision: {late[0]}")
    return faults


def faults_of_arithmetic(kernel):
    faults = []
    most = planned(DOUBLE_ARITHMETIC, kernel)
    if most is None and kernel.count(*DOUBLES):
        faults.append(f"{kernel.count(*DOUBLES)} operations in double, expected none")
    for loop in kernel.loops():
        doubles = sum(each.name in DOUBLES for each in loop)
        in_rows = not kernel.name.startswith("reduce_rows") or loop == row_loop(kernel)
        if most is not None and in_rows and doubles > most:
            faults.append(f"{doubles} operations in double in a pass, expected {most} at most")
    calls = [each for each in kernel.calls() if re.search(r"div_[su]64", each)]
    estimates = [each.text() for each in kernel.code if re.match(r"I2F\..*RP", each.opcode)]
    if calls + estimates and "<long" not in kernel.name and not any(
            part in kernel.name for part in DIVISION):
        faults.append(f"divides whole numbers, expected no division: {(calls + estimates)[0]}")
    return faults


# --- The kernels ------------------------------------------------------------------------------------

class TestKernelCode(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.nvcc, cls.nvdisasm, cls.kernels = nvcc_path(), None, {}
        if cls.nvcc:
            folder = Path(os.environ.get("LOCKSTEP_BUILD_DIR", tempfile.gettempdir())) / "nvdisasm"
            cls.nvdisasm = find_nvdisasm(cls.nvcc, folder)
        if cls.nvdisasm:
            with ThreadPoolExecutor() as pool:
                cls.kernels = dict(zip(ARCHITECTURES, pool.map(cls.compile, ARCHITECTURES)))

    def setUp(self):
        if not self.nvcc:
            self.skipTest("no GPU: no CUDA Toolkit on this machine")
        if not self.nvdisasm:
            self.skipTest("no nvdisasm: neither with nvcc nor nvidia-cuda-nvdisasm of PyPI")

    @classmethod
    def compile(cls, arch, *folders):
        return compile_kernels(cls.nvcc, cls.nvdisasm, SOURCE, arch, [*folders, ROOT])

    def test_every_kernel_is_as_planned(self):
        for arch, kernels in self.kernels.items():
            for kernel in kernels.values():
                with self.subTest(f"sm_{arch} {kernel.name}"):
                    self.assertEqual([], faults_of(kernel))

    def test_every_name_in_the_tables_is_that_of_a_kernel(self):
        tables = (MORE_REGISTERS, LOADS_OF_A_ROW, LOADED_AHEAD, CONDITIONAL_LOADS,
                  DOUBLE_ARITHMETIC, DIVISION)
        for part in (part for table in tables for part in table):
            self.assertTrue(any(part in name for name in self.kernels["90"]), part)

    @unittest.skipUnless(FULL, "only with --full: all kernels once more")
    def test_sources_with_a_mistake_are_found(self):
        for header, old, new, fault in (
                ("cuda/launch.cuh", "kInFlight = 8;", "kInFlight = 1;",
                 r"AddColumnSums>: a pass over its rows has 1 loads, 1 of"),
                ("bodies/batch_norm.inl", ": whole;", ": dy[i];",
                 r"BatchNormBackwardSums<true> >: a load that waits for a decision"),
                ("bodies/elementwise.inl", "*= factor;", "*= factor + 1e-9;",
                 r"Scale>: \d+ operations in double, expected none"),
                ("cuda/launch.cuh", "features.quotient(i)", "i / features.divisor",
                 r"each_row_kernel<unsigned int, AddBias>: divides whole numbers"),
                ("cuda/launch.cuh", "kAhead = 4;", "kAhead = 1;",
                 r"SumSquares>: 1 loads on their way together, expected 4")):
            with self.subTest(new), tempfile.TemporaryDirectory() as folder:
                text = (ROOT / "common/kernels" / header).read_text()
                self.assertIn(old, text)
                copy = Path(folder) / "common/kernels" / header
                copy.parent.mkdir(parents=True)
                copy.write_text(text.replace(old, new))
                faults = [fault for kernel in self.compile("90", folder).values()
                          for fault in faults_of(kernel)]
                self.assertRegex("\n".join(faults), fault)


# --- What reads them --------------------------------------------------------------------------------

def listing(*lines):
    """What nvdisasm prints of a kernel with these lines."""
    rows = [line if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;"
            for i, line in enumerate(lines)]
    return "\n".join(["//--------------------- .text.k --------------------------", "k:", *rows])


def kernel_of(*lines):
    return read_kernels(listing(*lines))["k"]


class TestReading(unittest.TestCase):
    def test_loads_that_wait_for_each_other(self):
        kernel = kernel_of(".L_x_1:", "LDG.E R4, [R2.64]", "FADD R5, R4, R5",
                           "LDG.E R4, [R2.64+0x4]", "FADD R5, R4, R5", "@P0 BRA `(.L_x_1)", "EXIT")
        [loop] = kernel.loops()
        self.assertEqual((5, 1), (len(loop), in_flight(loop)))

    def test_loads_that_are_on_their_way_together(self):
        kernel = kernel_of(".L_x_1:", "LDG.E R4, [R2.64]", "@!P1 LDG.E.64 R6, [R2.64+0x4]",
                           "FADD R5, R4, R5", "FADD R5, R7, R5", "@P0 BRA `(.L_x_1)", "EXIT")
        [loop] = kernel.loops()
        self.assertEqual(2, in_flight(loop))
        self.assertEqual(["", "!P1"], [each.predicate for each in loop if each.loads()])

    def test_only_what_is_inside_a_loop_belongs_to_it(self):
        kernel = kernel_of("LDG.E R4, [R2.64]", ".L_x_1:", "MOV R1, R2", ".L_x_2:", "DADD R4, R4, R6",
                           "@P0 BRA `(.L_x_2)", "@P1 BRA `(.L_x_1)", "@P2 BRA `(.L_x_3)", "EXIT",
                           ".L_x_3:", "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_u64)",
                           "EXIT", ".L_x_4:", "BRA `(.L_x_4)")
        self.assertEqual([["DADD", "BRA"]], [[each.name for each in loop] for loop in kernel.loops()])
        self.assertEqual({"$__cuda_sm20_div_u64"}, kernel.calls())

    def test_what_is_looked_for_is_found(self):
        kernel = kernel_of(".L_x_1:", "@P1 LDG.E R4, [R2.64]", "DADD R6, R4, R6", "STL [R1], R4",
                           "@P0 BRA `(.L_x_1)", "EXIT")
        kernel.name, kernel.registers, kernel.local_bytes = "each_kernel<Add>", 33, 16
        self.assertEqual(["each_kernel<Add>: 16 bytes of local memory, expected none",
                          "each_kernel<Add>: 33 registers, expected 32 at most",
                          "each_kernel<Add>: a load that waits for a decision: "
                          "@P1 LDG.E R4, [R2.64]",
                          "each_kernel<Add>: 1 operations in double, expected none"],
                         faults_of(kernel))


if __name__ == "__main__":
    unittest.main()
