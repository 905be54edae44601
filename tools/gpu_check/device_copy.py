"""The speed of a GPU's own copy, beside which the kernels' is put: run as a program with the CUDA runtime's
path, it prints bytes per second. The runtime is loaded by this Python, so nothing else is needed."""

import ctypes
import glob
import json
import subprocess
import sys

import doctor

SIZE = 2**30  # bytes: more than any cache holds
COPIES = 10
DEVICE_TO_DEVICE = 3  # cudaMemcpyKind


class CudaError(Exception):
    """A call of the CUDA runtime failed."""


class Runtime:
    """The calls of a shared library by their names, each checked."""

    def __init__(self, path):
        self.calls = ctypes.CDLL(path)

    def __getattr__(self, name):
        def call(*arguments):
            status = getattr(self.calls, name)(*arguments)
            if status:
                raise CudaError(f"{name} failed with error {status}")
        return call


def bytes_per_second(cuda):
    """Read and written bytes, both counted."""
    pieces, marks = [ctypes.c_void_p(), ctypes.c_void_p()], [ctypes.c_void_p(), ctypes.c_void_p()]
    for piece, mark in zip(pieces, marks):
        cuda.cudaMalloc(ctypes.byref(piece), ctypes.c_size_t(SIZE))
        cuda.cudaEventCreate(ctypes.byref(mark))

    def copy(times):
        for _ in range(times):
            cuda.cudaMemcpyAsync(*pieces, ctypes.c_size_t(SIZE), DEVICE_TO_DEVICE, None)

    copy(3)  # the first ones wake the GPU
    cuda.cudaEventRecord(marks[0], None)
    copy(COPIES)
    cuda.cudaEventRecord(marks[1], None)
    cuda.cudaEventSynchronize(marks[1])
    milliseconds = ctypes.c_float()
    cuda.cudaEventElapsedTime(ctypes.byref(milliseconds), *marks)
    return COPIES * 2 * SIZE / (1e-3 * milliseconds.value)


def runtime_path():
    """The CUDA runtime of the toolkit that compiles, or None."""
    root = doctor.cuda_root()
    folders = ("lib64", "lib", "lib/*-linux-gnu", "targets/*/lib") if root else ()
    return next((path for folder in folders
                 for path in sorted(glob.glob(f"{glob.escape(str(root))}/{folder}/libcudart.so*"))), None)


def measured(environment):
    """Bytes per second and "", or None and what went wrong in one line."""
    path = runtime_path()
    if not path:
        return None, "no libcudart.so with nvcc"
    try:
        done = subprocess.run([sys.executable, __file__, path], capture_output=True, text=True, timeout=120,
                              env={**environment, "PYTHONPATH": ":".join(sys.path)})
        return json.loads(done.stdout), ""
    except subprocess.TimeoutExpired:
        return None, "no answer within 120 s"
    except ValueError:
        return None, (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


if __name__ == "__main__":
    print(json.dumps(bytes_per_second(Runtime(sys.argv[1]))))
