"""The machine code of the GPU's kernels holds what their speed rests on (common/kernels/cuda).

The kernels are compiled by the real nvcc and disassembled, which needs no GPU. Nothing here is a
time: it is what can be known without one. An instruction that moves 16 bytes takes as long as one
for 4. Loads that are on their way together hide how long memory takes to answer. Registers decide
how many threads a multiprocessor holds. Local memory is as far away as all memory. Most GPUs add
doubles at a 32nd or 64th of the speed of floats.
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
MESON = (ROOT / "common/kernels/cuda/meson.build").read_text()
COMPILED = re.findall(r"\d+", re.search(r"version_compare\('>=13'\) \? (\[.*?\])", MESON)[1])
ARCHITECTURES = tuple(reversed(COMPILED)) if FULL else ("90",)
DOUBLES = ("DADD", "DMUL", "DFMA", "DSETP")

# --- What is expected -------------------------------------------------------------------------------
# In these tables Half stands for Bf16 and for Fp16.

REGISTERS = 32  # of a thread, where 2,048 of them are side by side: all that a multiprocessor holds
REGISTERS_OF = {"75": 64}  # which holds 1,024
MORE_REGISTERS = {  # the first that fits
    "<long": 64,  # arrays of 2^31 elements and more
    "reduce_rows_kernel": 80,  # three blocks are enough, as each thread loads several rows at once
    "4, DropoutMask": 40,  # four numbers at random
    "8, DropoutMask": 40,
    "NormalizeImage<float>": 48,  # 16 pixels
    "NormalizeImage<Half>": 56,
    "1, BatchNormBackwardInput<float, true>": 40,
    "1, BatchNormBackwardInput<Half, true>": 40,
    "MaxPool2d<Half, 0>": 40,
    "each_marked_kernel": 64,  # packs of three or four arrays at once
    "each_row_kernel<unsigned int, 4, BatchNorm": 64,  # packs of up to eight arrays at once
    "each_row_kernel<unsigned int, 8, BatchNorm": 64,
    "BatchNormMerge": 64,  # a thread per channel: few
    "AdaptiveAvgPool2d": 48,  # on the smallest images of a network
    "each_team_kernel": 40,  # a block or a warp for each row: few threads, or short ones
}

# Loads and stores of 16 bytes for one pack of each array (packs.cuh); for a reduction's those that are on
# their way together.
WIDE = {
    "each_kernel<Fill<float> >": (0, 1),
    "each_kernel<Fill<long> >": (0, 1),
    "each_kernel<Add<float, float> >": (2, 1),
    "each_kernel<Scale>": (1, 1),
    "each_kernel<ClipToNorm>": (1, 1),
    "each_kernel<ScaleLoss>": (1, 1),
    "each_kernel<Unscale>": (1, 1),
    "each_kernel<NormalizeImage<float> >": (1, 4),  # 16 pixels
    "each_kernel<Relu<float> >": (1, 1),
    "each_kernel<ReluBackward<float> >": (2, 1),
    "each_marked_kernel<SgdUpdate<false> >": (2, 1),
    "each_marked_kernel<SgdUpdate<true> >": (3, 2),
    "each_marked_kernel<AdamUpdate>": (4, 3),
    "each_row_kernel<unsigned int, 4, AddBias<float> >": (2, 1),
    "each_row_kernel<unsigned int, 4, BatchNorm<float, false, false> >": (5, 1),
    "each_row_kernel<unsigned int, 4, BatchNorm<float, false, true> >": (6, 1),
    "each_row_kernel<unsigned int, 4, BatchNorm<float, true, false> >": (5, 1),
    "each_row_kernel<unsigned int, 4, BatchNorm<float, true, true> >": (6, 1),
    "each_row_kernel<unsigned int, 4, BatchNormBackwardInput<float, false> >": (7, 1),
    "each_row_kernel<unsigned int, 4, BatchNormBackwardInput<float, true> >": (8, 1),
    "each_row_kernel<unsigned int, 4, DropoutMask<float> >": (0, 1),
    "each_row_kernel<unsigned int, 4, ApplyMask<float> >": (1, 1),  # several rows may share a mask
    "each_row_kernel<unsigned int, 4, NllLossBackward>": (0, 1),
    "reduce_rows_kernel<4, true, AddColumnSums<float> >": (4, 0),
    "reduce_rows_kernel<4, true, BatchNormStatistics<float> >": (4, 0),
    "reduce_rows_kernel<4, true, BatchNormMeasure<float> >": (4, 0),
    "reduce_rows_kernel<4, true, BatchNormBackwardSums<float, false> >": (8, 0),
    "reduce_rows_kernel<4, true, BatchNormBackwardSums<float, true> >": (8, 0),
    "report_if_any_kernel<CheckFinite>": (4, 0),
    "report_if_any_kernel<FindOverflow>": (4, 0),
    "each_team_kernel<SumSquares>": (4, 0),
    # In sixteen bits a pack has eight numbers. Where another array has float32, it moves two packs.
    "each_kernel<Fill<Half> >": (0, 1),
    "each_kernel<Add<Half, Half> >": (2, 1),
    "each_kernel<Add<Half, float> >": (3, 2),
    "each_kernel<Narrow<Half> >": (2, 1),
    "each_kernel<Widen<Half> >": (1, 2),
    "each_kernel<NormalizeImage<Half> >": (1, 2),
    "each_kernel<Relu<Half> >": (1, 1),
    "each_kernel<ReluBackward<Half> >": (2, 1),
    "each_row_kernel<unsigned int, 8, AddBias<Half> >": (3, 1),
    "each_row_kernel<unsigned int, 8, BatchNorm<Half, false, false> >": (9, 1),
    "each_row_kernel<unsigned int, 8, BatchNorm<Half, false, true> >": (10, 1),
    "each_row_kernel<unsigned int, 8, BatchNorm<Half, true, false> >": (9, 1),
    "each_row_kernel<unsigned int, 8, BatchNorm<Half, true, true> >": (10, 1),
    "each_row_kernel<unsigned int, 8, BatchNormBackwardInput<Half, false> >": (12, 1),
    "each_row_kernel<unsigned int, 8, BatchNormBackwardInput<Half, true> >": (14, 1),
    "each_row_kernel<unsigned int, 8, DropoutMask<Half> >": (0, 1),
    "each_row_kernel<unsigned int, 8, ApplyMask<Half> >": (1, 1),
}

# What moves single numbers, and why.
SINGLE = {
    "each_kernel<Poison>": "one number",
    "each_kernel<UpdateScale>": "one call",
    "each_kernel<AdamCount>": "a thread per parameter",
    "each_kernel<BatchNorm": "a thread per channel",
    "each_row_kernel<unsigned int, 1,": "rows of which a pack is no whole number",
    "each_row_kernel<long, 1,": "the same, of 2^31 elements and more",
    "reduce_rows_kernel<1, true,": "rows of which a pack is no whole number",
    "reduce_rows_kernel<4, false,": "rows that begin beside a pack: the same order of sums",
    "reduce_rows_kernel<4, true, AddColumnSums<Half> >": "four channels, as in float32: 8 bytes",
    "reduce_rows_kernel<4, true, BatchNormStatistics<Half> >": "the same",
    "reduce_rows_kernel<4, true, BatchNormMeasure<Half> >": "the same",
    "reduce_rows_kernel<4, true, BatchNormBackwardSums<Half,": "the same",
    "each_pixel_kernel<": "reads windows, or every n-th pixel",
    "each_team_kernel<": "rows of a few classes, which begin anywhere",
    "transpose_kernel": "tiles in shared memory: a warp moves 128 bytes at once",
}

ROWS_IN_FLIGHT = {"1, true": 8, "4, true": 4}  # kInFlight of launch.cuh
LOADS_OF_A_ROW = {f"{body}<{options}> ": 2 if "Backward" in body else 1
                  for element in ("float", "Half") for body, options in (
                      ("AddColumnSums", element), ("BatchNormStatistics", element),
                      ("BatchNormMeasure", element), ("BatchNormBackwardSums", f"{element}, false"),
                      ("BatchNormBackwardSums", f"{element}, true"))}
AHEAD = 4  # load_ahead() of launch.cuh
PACKS = 2  # each_pack() of launch.cuh, for packs of four numbers
LARGE_PACKS = ("Half", "NormalizeImage")  # the compiler decides what is loaded when
LOADED_AHEAD = ("CheckFinite", "FindOverflow", "LogSoftmax<float> ", "LogSoftmaxBackward<float> ",
                "LogSoftmax<Half> ", "LogSoftmaxBackward<Half> ", "NllLoss", "SumOfParts", "SumSquares")

# Loads that wait for a decision, which may be taken from another load.
CONDITIONAL_LOADS = {
    "transpose_kernel": "a bias, or what is added to, if there is one",
    "ClipToNorm": "gradients that are short enough are not read",
    "MaxPool2dBackward": "windows that overlap: only those that found their maximum here",
}

# Where doubles are added, with the most in one pass of the loop.
DOUBLE_ARITHMETIC = {
    "reduce_rows_kernel": 8,  # two sums of four channels, of rows added in float before
    "BatchNormMerge": 100,  # a thread per channel: few, and digits would be lost
}

# What divides by more than the extents that Divisor of launch.cuh knows: their numbers may have 64 bits,
# and the code looks first, and divides small ones in 32.
DIVISION = ("AdaptiveAvgPool2d", "MaxPool2dBackward<", "ApplyMask")


def general(name):
    """A kernel's name as the tables have it."""
    return re.sub("Bf16|Fp16", "Half", name)


def planned(table, kernel):
    """What a table says of a kernel, or None."""
    return next((value for part, value in table.items() if part in general(kernel.name)), None)


def loads(loop):
    return [each for each in loop if each.loads()]


def row_loop(kernel):
    """The loop over a reduction's rows: that which adds floats. What blocks found are doubles."""
    return next((loop for loop in kernel.loops()
                 if loads(loop) and any(each.name in ("FADD", "FFMA") for each in loop)), [])


def width_faults(kernel):
    """What is wrong with the widths of a kernel's loads and stores."""
    if general(kernel.name) not in WIDE:
        return [] if planned(SINGLE, kernel) else [
            "neither among those with wide loads and stores, nor among those without"]
    found = tuple(sum(each.name == name and ".128" in each.opcode for each in kernel.code)
                  for name in ("LDG", "STG"))
    least = WIDE[general(kernel.name)]
    return ([] if all(map(int.__ge__, found, least)) else
            [f"{found[0]} loads and {found[1]} stores of 16 bytes, expected {least[0]} and {least[1]}"])


def faults_of(kernel, arch):
    """What is wrong with a kernel, one line each."""
    faults = []
    if kernel.local_bytes or kernel.count("LDL", "STL"):
        faults.append(f"{kernel.local_bytes} bytes of local memory, expected none")
    most = max(planned(MORE_REGISTERS, kernel) or REGISTERS, REGISTERS_OF.get(arch, REGISTERS))
    if kernel.registers > most:
        faults.append(f"{kernel.registers} registers, expected {most} at most")
    constant = next((each.text() for each in kernel.code if ".CONSTANT" in each.opcode), "")
    if constant:
        faults.append(f"a load that may miss what the same kernel writes: {constant}")
    return [f"{kernel.name}: {fault}"
            for fault in [*faults, *width_faults(kernel), *faults_of_loads(kernel),
                          *faults_of_arithmetic(kernel)]]


def loads_ahead(kernel):
    """How many loads a kernel must have on their way at the same time."""
    name = general(kernel.name)
    if name.endswith(tuple(f"_kernel<{body}>" for body in LOADED_AHEAD)):
        return AHEAD
    if name not in WIDE or not name.startswith("each_kernel<") or any(body in name for body in LARGE_PACKS):
        return 0
    return PACKS * WIDE[name][0]


def faults_of_loads(kernel):
    faults = []
    for body, each in LOADS_OF_A_ROW.items():
        for size, rows in ROWS_IN_FLIGHT.items():
            loop = row_loop(kernel) if general(kernel.name) == f"reduce_rows_kernel<{size}, {body}>" else None
            together = rows - ("Half" in body)  # the first may become float32 before the last is loaded
            if loop is not None and (len(loads(loop)) != rows * each or in_flight(loop) < together):
                faults.append(f"a pass over its rows has {len(loads(loop))} loads, "
                              f"{in_flight(loop)} of them on their way together, expected "
                              f"{rows * each} and at least {together}")
    ahead = max(map(in_flight, kernel.loops()), default=0)
    if ahead < loads_ahead(kernel):
        faults.append(f"{ahead} loads on their way together, expected {loads_ahead(kernel)}")
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
                    self.assertEqual([], faults_of(kernel, arch))

    def test_every_name_in_the_tables_is_that_of_a_kernel(self):
        tables = (MORE_REGISTERS, WIDE, SINGLE, LOADS_OF_A_ROW, LOADED_AHEAD, CONDITIONAL_LOADS,
                  DOUBLE_ARITHMETIC, DIVISION)
        for part in (part for table in tables for part in table):
            self.assertTrue(any(part in general(name) for name in self.kernels["90"]), part)

    @unittest.skipUnless(FULL, "only with --full: all kernels once more")
    def test_sources_with_a_mistake_are_found(self):
        for header, old, new, fault in (
                ("cuda/launch.cuh", "kInFlight = kSize == 1 ? 8 : 4;", "kInFlight = 1;",
                 r"4, true, BatchNormBackwardSums<float, false> >: a pass over its rows has 2 loads"),
                ("cuda/packs.cuh", "kWidest = 16;", "kWidest = 8;",
                 r"AdamUpdate>: 0 loads and 0 stores of 16 bytes, expected 4 and 3"),
                ("cuda/packs.cuh", "return *reinterpret_cast<const Pack<T, N>*>(from);",
                 "constexpr int kWords = sizeof(Pack<T, N>) / sizeof(int);"
                 "Pack<T, N> pack;"
                 "for (int k = 0; k < kWords; ++k)"
                 "  reinterpret_cast<int*>(&pack)[k] = __ldg(reinterpret_cast<const int*>(from) + k);"
                 "return pack;",
                 r"each_kernel<Add<float, float> >: a load that may miss what the same kernel writes"),
                ("bodies/batch_norm.inl", ": whole;", ": dy[i];",
                 r"1, BatchNormBackwardInput<float, true> >: a load that waits for a decision"),
                ("bodies/elementwise.inl", "*= factor;", "*= factor + 1e-9;",
                 r"Scale>: \d+ operations in double, expected none"),
                ("cuda/launch.cuh", "packs_of_row.quotient(pack)", "pack / packs_of_row.divisor",
                 r"each_row_kernel<unsigned int, 4, AddBias<float> >: divides whole numbers"),
                ("cuda/launch.cuh", "kAhead = 4;", "kAhead = 1;",
                 r"SumOfParts>: 1 loads on their way together, expected 4"),
                ("cuda/launch.cuh", "at.first_of(pack), at.first_of(pack + stride));",
                 "at.first_of(pack)); each_of_packs(run, RunElement(), at.first_of(pack + stride));",
                 r"each_kernel<Add<float, float> >: 2 loads on their way together, expected 4")):
            with self.subTest(new), tempfile.TemporaryDirectory() as folder:
                text = (ROOT / "common/kernels" / header).read_text()
                self.assertIn(old, text)
                copy = Path(folder) / "common/kernels" / header
                copy.parent.mkdir(parents=True)
                copy.write_text(text.replace(old, new))
                faults = [fault for kernel in self.compile("90", folder).values()
                          for fault in faults_of(kernel, "90")]
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
        kernel = kernel_of("LDG.E.CONSTANT R5, [R8.64]", ".L_x_1:", "@P1 LDG.E R4, [R2.64]",
                           "DADD R6, R4, R6", "STL [R1], R4", "@P0 BRA `(.L_x_1)", "EXIT")
        kernel.name, kernel.registers, kernel.local_bytes = "each_kernel<Add<float, float> >", 33, 16
        self.assertEqual(["each_kernel<Add<float, float> >: 16 bytes of local memory, expected none",
                          "each_kernel<Add<float, float> >: 33 registers, expected 32 at most",
                          "each_kernel<Add<float, float> >: a load that may miss what the same kernel writes: "
                          "LDG.E.CONSTANT R5, [R8.64]",
                          "each_kernel<Add<float, float> >: 0 loads and 0 stores of 16 bytes, expected 2 and 1",
                          "each_kernel<Add<float, float> >: 1 loads on their way together, expected 4",
                          "each_kernel<Add<float, float> >: a load that waits for a decision: "
                          "@P1 LDG.E R4, [R2.64]",
                          "each_kernel<Add<float, float> >: 1 operations in double, expected none"],
                         faults_of(kernel, "90"))
        self.assertNotIn("33 registers", str(faults_of(kernel, "75")))


if __name__ == "__main__":
    unittest.main()
