"""`meson setup` under the conditions that the options of this project distinguish."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
FULL = "LOCKSTEP_FULL" in os.environ
BACKENDS = ("common/kernels/cuda/liblockstep_cuda.so", "common/comm/liblockstep_nccl.so")


def toolkit():
    """The CUDA Toolkit's own folder (not a link to it), or None. nvcc says where it is: the one in
    PATH may be a script elsewhere that calls it."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin:/opt/cuda/bin")
    if not nvcc:
        return None
    steps = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull],
                           capture_output=True, text=True)
    return Path(re.search(r"^#\$ TOP=(.+)$", steps.stderr, re.M).group(1)).resolve()


def hiding(folder, behind=None):
    """The beginning of a shell script, for a mount namespace, that hides a folder, if there is one;
    it is still visible at `behind`."""
    if folder is None:
        return ""
    lines = [f"mount --bind {quoted(folder)} {quoted(behind)}"] if behind else []
    return "\n".join([*lines, f"mount -t tmpfs none {quoted(folder)}", ""])


def quoted(path):
    return shlex.quote(str(path))


def in_namespace(script):
    """Runs a shell script with mounts of its own, and without nvcc in PATH."""
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(f for f in folders if not (Path(f) / "nvcc").exists())
    return subprocess.run(["unshare", "--mount", "--map-root-user", "sh", "-ec", script],
                          env={**os.environ, "PATH": path}, capture_output=True, text=True)


def namespaces_are_permitted():
    return shutil.which("unshare") and in_namespace("mount -t tmpfs none /mnt").returncode == 0


@unittest.skipUnless(shutil.which("meson"), "meson is installed by `lockstep test`")
class TestConfigure(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def enterContext(self, context):  # unittest has it from Python 3.11 on
        self.addCleanup(context.__exit__, None, None, None)
        return context.__enter__()

    def configure(self, *options, prologue="", epilogue=""):
        """Status and output of meson setup; with a prologue in a namespace of its own."""
        setup = ["meson", "setup", str(self.folder / "build"), str(ROOT), "-Dtests=disabled",
                 *map(str, options)]
        if prologue or epilogue:
            if not namespaces_are_permitted():
                self.skipTest("namespaces not permitted: unshare --mount fails")
            done = in_namespace(f"{prologue}{shlex.join(setup)}\n{epilogue}")
        else:
            done = subprocess.run(setup, capture_output=True, text=True)
        shutil.rmtree(self.folder / "build", ignore_errors=True)
        return done.returncode, done.stdout + done.stderr

    def test_without_nvcc(self):
        status, output = self.configure(prologue=hiding(toolkit()))
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"GPU backend *: NO \(no nvcc in PATH")
        self.assertRegex(output, r"precision *: float")

    def test_cuda_asked_for_without_nvcc_is_refused(self):
        status, output = self.configure("-Dcuda=enabled", prologue=hiding(toolkit()))
        self.assertNotEqual(0, status)
        self.assertRegex(output, r"ERROR: .*cuda=enabled: no nvcc .*-Dgpu_roots=")

    @unittest.skipUnless(toolkit(), "no GPU: no CUDA Toolkit on this machine")
    def test_a_toolkit_without_cudnn_is_named(self):
        root = self.folder / "toolkit"
        for name in ("bin", "include", "lib"):
            (root / name).mkdir(parents=True)
        (root / "bin/nvcc").symlink_to(toolkit() / "bin/nvcc")
        for name in ("cuda_runtime.h", "cublas_v2.h"):
            (root / "include" / name).touch()
        for name in ("cudart", "cublas"):
            (root / f"lib/lib{name}.so").touch()
        behind = self.folder / "behind"
        behind.mkdir()
        (root / "bin/nvcc").unlink()
        (root / "bin/nvcc").symlink_to(behind / "bin/nvcc")
        status, output = self.configure("-Dcuda=enabled", f"-Dgpu_roots={root}",
                                        prologue=hiding(toolkit(), behind))
        self.assertNotEqual(0, status)
        self.assertRegex(output, r"ERROR: .*cuda=enabled: no libcudnn.so with cudnn.h in .*toolkit")

    @unittest.skipUnless(FULL, "only with --full: the backend is built once more")
    @unittest.skipUnless(toolkit(), "no GPU: no CUDA Toolkit on this machine")
    def test_the_backend_is_built_from_a_toolkit_found_only_through_gpu_roots(self):
        # As in Python's packages: a folder per library with its own headers, and files with version
        # numbers only. Beside nvcc are the runtime's headers, and those of another cuDNN.
        behind, headers = self.folder / "behind", self.folder / "headers"
        roots = self.folder / "site-packages/nvidia"
        behind.mkdir()
        headers.mkdir()
        real = toolkit()
        packages = {"runtime": ("cudart",), "cublas": ("cublas", "cublasLt"), "cudnn": ("cudnn",),
                    "nccl": ("nccl",)}
        for package, libraries in packages.items():
            (roots / package / "lib").mkdir(parents=True)
            (roots / package / "include").mkdir()
            for library in libraries:
                newest = sorted(real.glob(f"lib64/lib{library}.so.*"))[0].name
                (roots / package / "lib" / newest).symlink_to(behind / "lib64" / newest)
        for header in (real / "include").iterdir():
            package = next((name for name in packages if header.name.startswith(name)), "runtime")
            (roots / package / "include" / header.name).symlink_to(headers / header.name)
        for folder in ("bin", "nvvm"):
            (roots / "runtime" / folder).symlink_to(behind / folder)
        status, output = self.configure(
            "-Dcuda=enabled", "-Dgpu_archs=90", "-Dunity=on",
            "-Dgpu_roots=" + ",".join(f"{roots}/{package}" for package in packages),
            prologue=f"mount --bind {quoted(real / 'include')} {quoted(headers)}\n"
                     + hiding(real, behind)
                     + f"mount -t tmpfs none {quoted(behind / 'include')}\n"
                       f"ln -s {quoted(roots / 'runtime/include')}/* {quoted(behind / 'include')}\n"
                       f"echo '#error another cuDNN' > {quoted(behind / 'include/cudnn.h')}\n",
            epilogue=f"cd {quoted(self.folder / 'build')}\n"
                     f"ninja -j2 {' '.join(BACKENDS)}\nldd {' '.join(BACKENDS)}\n")
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"GPU backend *: CUDA \d+\.\d+, for 90\n")
        for library in ("cudart", "cublas", "cudnn", "nccl"):
            self.assertRegex(output, rf"lib{library}\.so\.\d+ => {roots}/")

    def refusing_nvcc(self, error="host_config.h:132:2: error: #error -- unsupported GNU version!"):
        """An nvcc beside a toolkit's libraries that compiles nothing."""
        root = self.folder / "old"
        for name in ("bin", "include", "lib"):
            (root / name).mkdir(parents=True)
        for header, library in (("cuda_runtime", "cudart"), ("cublas_v2", "cublas"), ("cudnn", "cudnn")):
            (root / f"include/{header}.h").touch()
            (root / f"lib/lib{library}.so").touch()
        nvcc = root / "bin/nvcc"
        nvcc.write_text("#!/bin/sh\n"
                        'case "$*" in\n'
                        "  *--version*) echo 'Cuda compilation tools, release 12.0, V12.0.140';;\n"
                        f"  *) echo '{error}' >&2\n"
                        "     exit 1;;\n"
                        "esac\n")
        nvcc.chmod(0o755)
        return root

    def test_a_compiler_that_nvcc_does_not_know_is_named_and_the_build_goes_on(self):
        root = self.refusing_nvcc()
        status, output = self.configure(f"-Dgpu_roots={root}")
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"GPU backend *: NO \(nvcc of CUDA 12\.0 \(.*/old/bin/nvcc\) does not "
                                 r"compile with g\+\+ \d+\.\d+\.\d+: host_config\.h:132:2: error: #error -- "
                                 r"unsupported GNU version!; install an older g\+\+")
        if not FULL:  # asked for, it is refused in the same words
            return
        status, output = self.configure(f"-Dgpu_roots={root}", "-Dcuda=enabled")
        self.assertNotEqual(0, status)
        self.assertRegex(output, r"ERROR: .*cuda=enabled: nvcc of CUDA 12\.0 .*install an older g\+\+")

    def test_what_else_nvcc_lacks_is_told_with_advice_of_its_own(self):
        for error, advice in (("probe.cu:4:10: fatal error: cudnn.h: No such file or directory",
                               "install the package that has this header"),
                              ("nvcc fatal   : Could not open output file",
                               "see the whole error in meson-logs/meson-log.txt"))[:None if FULL else 1]:
            status, output = self.configure(f"-Dgpu_roots={self.refusing_nvcc(error)}")
            shutil.rmtree(self.folder / "old")
            self.assertEqual(0, status, output)
            self.assertRegex(output, rf"GPU backend *: NO \(.*: {re.escape(error)}; {re.escape(advice)}")
            self.assertNotIn("an older g++", output)

    def test_an_older_compiler_that_nvcc_knows_is_taken(self):
        root, tools = self.refusing_nvcc(), self.folder / "tools"
        tools.mkdir()
        (tools / "g++-10").symlink_to(shutil.which("g++"))
        nvcc = root / "bin/nvcc"
        nvcc.write_text(nvcc.read_text().replace(
            "  *) echo", f"  *'-ccbin {tools}/g++-10'*) ;;\n  *) echo"))
        with mock.patch.dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}"):
            status, output = self.configure(f"-Dgpu_roots={root}")
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"GPU backend *: CUDA 12\.0")

    def compile_all(self, *options):
        status, output = self.configure(
            "-Dwerror=true", "-Doptimization=0", "-Ddebug=false", *options,
            epilogue=f"ninja -C {quoted(self.folder / 'build')} -j2\n")
        self.assertEqual(0, status, output[-5000:])
        return output

    @unittest.skipUnless(FULL, "takes minutes: every source is compiled by itself")
    def test_every_source_includes_what_it_needs(self):
        self.assertNotIn("unity", self.compile_all("-Dcuda=disabled"))

    @unittest.skipUnless(FULL, "takes minutes: every program is compiled")
    def test_every_program_compiles_in_double(self):
        self.compile_all("-Dprecision=double", "-Dunity=on", "-Dunity_size=40")

    def test_a_compiler_without_openmp_is_told_what_to_install(self):
        status, output = self.configure("-Dcpp_args=-U_OPENMP")
        self.assertNotEqual(0, status)
        self.assertRegex(output, r"ERROR: .* has no OpenMP: .*libomp-dev")

    def test_the_summary_says_what_is_left_out_and_what_stands_in_for_libsodium_compiles(self):
        options = ("-Dcuda=disabled", "-Dcpu_engine=reference", "-Dsodium=disabled", "-Dwerror=true")
        status, output = self.configure(*options, epilogue=(
            f"cd {quoted(self.folder / 'build')}\n"
            "ninja common/system/libsystem.a.p/no_secrets.cpp.o\n! grep libsodium build.ninja\n"))
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"libsodium *: NO")
        self.assertRegex(output, r"CPU engine *: reference")
        self.assertRegex(output, r"GPU backend *: NO \(not asked for\)")

    @unittest.skipUnless(FULL, "takes minutes: a stage is compiled without libsodium")
    def test_without_libsodium_a_secret_is_refused_and_never_ignored(self):
        program = self.folder / "build/04-ddp/04-ddp"
        status, output = self.configure(
            "-Dcuda=disabled", "-Dcpu_engine=reference", "-Dsodium=disabled", "-Doptimization=0", "-Dunity=on",
            epilogue=f"ninja -C {quoted(self.folder / 'build')} -j2 04-ddp/04-ddp\n"
                     f"for secret in '' LOCKSTEP_JOB_SECRET=0123456789abcdef0123456789abcdef; do\n"
                     f"  env $secret {quoted(program)} --devices cpu:0,cpu:0 --data blank:8:8 --max-steps 1 "
                     "2>&1 || echo refused\ndone\n")
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"(?s)Train Epoch.*\nerror: .*LOCKSTEP_JOB_SECRET is set, and this build has no "
                                 r"libsodium .*\nrefused\n$")

    def test_double_is_the_reference_engines(self):
        status, output = self.configure("-Dprecision=double")
        self.assertEqual(0, status, output)
        self.assertRegex(output, r"precision *: double")
        self.assertRegex(output, r"CPU engine *: reference")
        self.assertRegex(output, r"GPU backend *: NO")

    def test_double_refuses_onednn_and_cuda(self):
        for option in ("-Dcpu_engine=onednn", "-Dcuda=enabled"):
            status, output = self.configure("-Dprecision=double", option)
            self.assertNotEqual(0, status, option)
            self.assertRegex(output, r"ERROR: .*precision=double .*give -D")


if __name__ == "__main__":
    unittest.main()
