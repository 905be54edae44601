"""`lockstep doctor`, and docs/machines.md: what a machine has, what is too old, how to get it without root."""

import ast
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import doctor  # noqa: E402

PAGE = (ROOT / "docs/machines.md").read_text()
CONTAINERFILE = (ROOT / "tools/Containerfile").read_text()


def call(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, **options)


def row(text, name):
    """The lines about one thing."""
    return re.search(rf"^  {re.escape(name)} .*\n(?: {{17}}.*\n)*", text, re.MULTILINE)[0]


class TestDoctor(unittest.TestCase):
    def doctor(self, tools=(), **environment):
        """What it prints where PATH has these tools only, of which each prints one line."""
        with tempfile.TemporaryDirectory() as folder:
            for name, line in dict(tools).items():
                path = Path(folder) / name
                path.write_text(f"#!/bin/sh\necho {shlex.quote(line)}\n")
                path.chmod(0o755)
            done = call(sys.executable, ROOT / "tools/doctor.py", env={"PATH": folder, **environment})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout

    def test_names_what_is_there_and_what_is_not(self):
        done = call(ROOT / "lockstep", "doctor")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for thing in ("system", "cores", "memory", "GPUs", "g++", "clang++", "meson", "ninja", "ccache",
                      "CUDA Toolkit", "cuDNN", "NCCL", "oneDNN", "Gloo", "Catch2",
                      "fashion-mnist", "mnist", "cifar10", "torch"):
            self.assertIn(thing, done.stdout)

    def test_with_an_empty_path_each_missing_tool_has_a_remedy(self):
        told = self.doctor()
        for tool, package in (("meson", "meson"), ("ninja", "ninja-build"), ("g++", "g++")):
            self.assertRegex(told, rf"{re.escape(tool)} +missing.*\n +to get it: apt-get install {re.escape(package)}\n"
                                   r" +without root: \S")

    def test_what_ubuntu_22_04_has_is_too_old_and_the_advice_is_not_to_install_the_same_again(self):
        told = self.doctor({"g++": "11.4.0", "meson": "0.61.2", "ninja": "1.10.1", "clang++": "clang version 13.0.1"})
        self.assertRegex(row(told, "g++"), r"11\.4\.0 is too old, 12 or newer is needed\n +newer: apt-get install g\+\+-12,"
                                           r".*CXX=g\+\+-12.*\n +without root: .*module load.*conda")
        self.assertRegex(row(told, "meson"), r"0\.61\.2 is too old, 1\.0 or newer is needed\n +without root: .*venv .*"
                                             r"pip install meson ninja")
        self.assertNotIn("apt-get", row(told, "meson"))
        self.assertRegex(row(told, "clang++"), r"13\.0\.1 is too old, 14 or newer is needed\n +to get it: apt-get")
        self.assertEqual("  ninja          1.10.1\n", row(told, "ninja"))

    def test_the_least_is_enough_and_one_less_is_not(self):
        for name, least in doctor.LEAST.items():
            self.assertFalse(doctor.is_too_old(name, least), name)
            *front, last = doctor.numbers(least)
            less = [*front, last - 1] if last else [front[0] - 1, 99]
            self.assertTrue(doctor.is_too_old(name, ".".join(map(str, less)) + " (somewhere)"), name)
        self.assertTrue(doctor.is_too_old("CUDA Toolkit", "nvcc 11.8 in /usr/local/cuda"))
        self.assertFalse(doctor.is_too_old("pkg-config", "0.1"))
        self.assertFalse(doctor.is_too_old("g++", "of a snapshot"))  # nothing can be said about it

    def test_the_compiler_is_the_one_that_cxx_names(self):
        tools = {"g++": "11.4.0", "g++-12": "12.3.0"}
        self.assertIn("  g++            12.3.0\n", self.doctor(tools, CXX="g++-12 -fopenmp"))
        self.assertIn("11.4.0 is too old", self.doctor(tools, CXX="absent"))

    def test_a_python_that_is_too_old_for_the_rest_can_say_so(self):
        with mock.patch.object(platform, "python_version", lambda: "3.6.8"):
            told = "\n".join(doctor.describe(*thing) for thing in doctor.SECTIONS[-1][1]) + "\n"
        self.assertRegex(row(told, "python3"), r"3\.6\.8 is too old, 3\.10 or newer is needed\n +without root: conda")
        told = call(sys.executable, "-c", "import sys; old = set(sys.modules); import doctor; "
                    "print(*(getattr(sys.modules[name], '__file__', '') for name in set(sys.modules) - old), sep='\\n')",
                    cwd=ROOT / "tools").stdout.splitlines()
        told = [path for path in told if Path(path).parent == ROOT / "tools"]
        self.assertEqual(["child_processes.py", "command_line.py", "doctor.py"], sorted(Path(path).name for path in told))
        for path in told:
            text = Path(path).read_text()
            ast.parse(text, feature_version=(3, 6))
            if path.endswith("doctor.py"):
                self.assertNotRegex(text, r"capture_output|text=True|removeprefix|removesuffix|strict=")

    def test_other_systems_get_advice_and_no_traceback(self):
        with mock.patch.multiple(platform, system=lambda: "Darwin", freedesktop_os_release=mock.Mock(side_effect=OSError)), \
                mock.patch.object(os, "sched_getaffinity", None), \
                mock.patch.object(os, "sysconf", mock.Mock(side_effect=ValueError)):
            told = "\n".join(doctor.describe(*thing) for thing in doctor.SECTIONS[0][1]) + "\n"
        self.assertIn("Darwin: Lockstep runs on Linux only; a container does it here (docs/machines.md)", told)
        self.assertIn(f"{os.cpu_count()} cores", told)
        self.assertIn("unknown", row(told, "memory"))
        with mock.patch.object(platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2"):
            self.assertTrue(doctor.system().endswith(", WSL"))


class TestMachines(unittest.TestCase):
    def test_the_least_is_that_of_the_build_and_of_the_documents(self):
        self.assertIn(f"meson_version: '>={doctor.LEAST['meson']}.0'", (ROOT / "meson.build").read_text())
        readme = (ROOT / "README.md").read_text()
        for text in (f"g++ {doctor.LEAST['g++']} or later", f"clang++ {doctor.LEAST['clang++']} or later",
                     f"Meson {doctor.LEAST['meson']}", f"Ninja {doctor.LEAST['ninja']}",
                     f"Python {doctor.LEAST['python3']}", f"CUDA Toolkit {doctor.LEAST['CUDA Toolkit']} or later",
                     f"cuDNN {doctor.LEAST['cuDNN']}", f"oneDNN {doctor.LEAST['oneDNN']} or later"):
            self.assertIn(text, readme)
        for tool, name in (("g++", "g++"), ("or clang++", "clang++"), ("Meson", "meson"), ("Ninja", "ninja"),
                           ("Python", "python3")):
            self.assertRegex(PAGE, rf"(?m)^\| {re.escape(tool)} \| {re.escape(doctor.LEAST[name])}[ ,]")

    def test_the_advice_is_the_same_in_both_places(self):
        for line in doctor.VENV.split(" && export"):
            self.assertIn(line.strip().removeprefix("PATH="), PAGE)
        self.assertIn("conda create -n lockstep -c conda-forge gxx", PAGE)

    def test_each_machine_says_whether_it_was_tried(self):
        table = re.search(r"^\| machine .*\n(?:\|.*\n)+", PAGE, re.MULTILINE)[0].splitlines()[2:]
        for line in table:
            self.assertRegex(line.split("|")[3], r"^ (yes|no)\b|: |no$", line)
        self.assertEqual(8, len(table))

    def test_scripts_are_ones_that_a_shell_reads(self):
        scripts = re.findall(r"^```\n(#!/bin/bash\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        self.assertEqual(1, len(scripts))
        self.assertEqual("", call("bash", "-n", "-c", scripts[0]).stderr)
        self.assertIn("#SBATCH --ntasks=4\n", scripts[0])

    def test_links_lead_to_files(self):
        for target in re.findall(r"\]\(([^)#]+)", PAGE):
            self.assertTrue((ROOT / "docs" / target).exists(), target)

    def test_containers_have_all_packages_and_nothing_from_elsewhere(self):
        command = re.search(r"&& (awk .*?) /tmp/packages.txt", CONTAINERFILE)[1]
        listed = call("bash", "-c", f"{command} tools/packages.txt", cwd=ROOT).stdout.split()
        rows = [line.split("|") for line in (ROOT / "tools/packages.txt").read_text().splitlines() if line[0] != "#"]
        self.assertEqual([cells[1].strip() for cells in rows], listed)
        self.assertEqual(["ARG BASE=debian:trixie", "FROM ${BASE}"],
                         re.findall(r"^(?:ARG|FROM) .*", CONTAINERFILE, re.MULTILINE))
        self.assertNotRegex(CONTAINERFILE, r"https?:|curl|wget|pip|ADD ")
        self.assertIn(f"{command.split(' }')[0]} }}' /packages.txt", PAGE)  # Apptainer's
        settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
        place = ROOT / ".devcontainer" / settings["build"]["dockerfile"]
        self.assertEqual(ROOT / "tools/Containerfile", place.resolve())
        self.assertEqual(ROOT / "tools", (ROOT / ".devcontainer" / settings["build"]["context"]).resolve())
        self.assertIn(f"useradd --create-home --shell /bin/bash {settings['remoteUser']}\n", CONTAINERFILE)


if __name__ == "__main__":
    unittest.main()
