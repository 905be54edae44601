"""Which elements a GPU's kernels move 16 bytes at once (common/kernels/cuda/packs.cuh), and the blocks of their sums.

The functions that decide it run on the CPU here: the nvcc of tests/cuda_model compiles them.
"""

import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from compile_tests import install_cuda_model  # noqa: E402
from run_tests import CUDA_MODEL  # noqa: E402


@unittest.skipUnless(shutil.which("meson"), "meson is installed by `lockstep test`")
class TestGpuPacks(unittest.TestCase):
    def test_each_element_is_moved_once_and_in_a_pack_where_one_may_begin(self):
        model = ROOT / CUDA_MODEL
        self.assertEqual("", install_cuda_model(model, ROOT))
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "packs_test"
            for command in ([model / "bin/nvcc", "-std=c++20", "-O1", f"-I{ROOT}",
                             "-Xcompiler=-Wall,-Wextra,-Werror,-Wno-unknown-pragmas",
                             ROOT / "tests/gpu/packs_test.cu", "-o", program], [program]):
                done = subprocess.run(command, capture_output=True, text=True, timeout=400)
                self.assertEqual((0, ""), (done.returncode, done.stderr), done.stdout[:2000])


if __name__ == "__main__":
    unittest.main()
