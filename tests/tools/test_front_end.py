"""The front end `lockstep` and .ci/run: arguments, help, set-up, and what they pass on."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKSTEP = ROOT / "lockstep"
COMMANDS = ["run", "compare", "test", "data", "bench", "calibrate", "predict", "show", "figures", "site", "launch", "exercise", "grade",
            "grade-class",
            "gpu-check", "format", "lint", "doctor", "help"]
BASICS = ["awk", "basename", "bash", "cat", "cut", "dirname", "env", "grep", "mkdir", "mktemp",
          "nproc", "readlink", "rm", "sed", "sleep", "xargs"]


def call(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          timeout=120, **options)


class TestArguments(unittest.TestCase):
    def test_help_lists_every_sub_command(self):
        for arguments in ([], ["help"], ["--help"], ["-h"]):
            done = call(LOCKSTEP, *arguments)
            self.assertEqual(done.returncode, 0)
            listed = re.findall(r"^  (\w[\w-]*) ", done.stdout, re.MULTILINE)
            self.assertEqual(listed[:len(COMMANDS)], COMMANDS)
            for line in done.stdout.splitlines():  # a "|" would have cut it
                self.assertEqual(line.count("["), line.count("]"), line)

    def test_an_unknown_sub_command_is_one_line_with_the_list(self):
        done = call(LOCKSTEP, "trian")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("'trian'", done.stderr)
        for command in COMMANDS:
            self.assertIn(command, done.stderr)

    def test_works_from_any_directory_and_through_a_link(self):
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder) / "link"
            link.symlink_to(LOCKSTEP)
            done = call(link, "data", "synthetic", cwd=folder)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("nothing to fetch", done.stdout)


class TestForm(unittest.TestCase):
    def test_is_short_and_parses(self):
        self.assertLess(len(LOCKSTEP.read_text().splitlines()), 200)
        for script in (LOCKSTEP, ROOT / ".ci/run"):
            self.assertEqual(call("bash", "-n", script).stderr, "")
            self.assertTrue(os.access(script, os.X_OK))
            if shutil.which("shellcheck"):
                self.assertEqual(call("shellcheck", script).stdout, "")

    def test_every_package_group_is_one_that_the_front_end_asks_for(self):
        lines = (ROOT / "tools/packages.txt").read_text().splitlines()
        rows = [line.split("|") for line in lines if not line.startswith("#")]
        self.assertTrue(all(len(row) == 3 for row in rows))
        needs = re.findall(r"^\w+ *\|([\w ]*)\|", LOCKSTEP.read_text(), re.MULTILINE)
        asked = {word for need in needs for word in need.split()} - {"programs"}
        self.assertEqual({row[0].strip() for row in rows}, asked)


class Sandbox(unittest.TestCase):
    """A copy of the front end in a folder of its own, and a PATH of chosen and fake commands."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name) / "lock step"  # a blank, as a user's folder may have
        self.bin = Path(folder.name) / "bin"
        self.log = Path(folder.name) / "log"
        self.root.mkdir()
        self.bin.mkdir()
        shutil.copy(LOCKSTEP, self.root)
        shutil.copytree(ROOT / "tools", self.root / "tools",
                        ignore=shutil.ignore_patterns("__pycache__"))
        for name in BASICS:
            (self.bin / name).symlink_to(shutil.which(name))
        self.fake("python3", f'exec {sys.executable} "$@"')

    def fake(self, name, script):
        """A command that notes its arguments in self.log and does what `script` says."""
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f'#!{shutil.which("bash")}\necho "{name} $*" >>{self.log}\n{script}\n')
        path.chmod(0o755)

    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def lockstep(self, *arguments, **environment):
        return call(self.root / "lockstep", *arguments, cwd=self.root.parent,
                    env={"PATH": str(self.bin), "HOME": "/", **environment})

    def install(self, name):
        self.fake(name, "exit 0")


class TestSetUp(Sandbox):
    def fake_apt(self, installed, offered="."):
        """dpkg knows the packages in `installed`; apt-get adds what it installs to them."""
        database = self.root.parent / "database"
        database.write_text("".join(name + "\n" for name in installed))
        self.fake("dpkg-query", 'shift 3; for p in "$@"; do '
                                f'grep -qx -- "$p" "{database}" && echo "$p installed"; done; true')
        self.fake("apt-cache", f'echo "$2" | grep -qE "{offered}"')
        self.fake("apt-get", 'case " $* " in *" install "*) for p in "$@"; do echo "$p"; done '
                             f'>>"{database}" ;; esac')
        self.fake("id", "echo 0")

    def test_installs_what_is_missing_and_says_why(self):
        self.fake_apt([])
        (self.bin / "python3").unlink()  # a bare container has none
        done = self.lockstep("data", "synthetic")
        self.assertIn("python3", done.stderr)
        self.assertIn("runs the tools", done.stderr)
        installs = [line for line in self.calls() if "apt-get" in line and " install " in line]
        self.assertEqual(len(installs), 1)
        self.assertIn("--no-install-recommends python3", installs[0])
        updates = [line for line in self.calls() if "apt-get" in line and " update" in line]
        self.assertEqual(len(updates), 1)

    def test_is_silent_and_asks_no_apt_where_nothing_is_missing(self):
        self.fake_apt(["python3"])
        done = self.lockstep("data", "synthetic")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertFalse([line for line in self.calls() if line.startswith("apt")])

    def test_tries_again_when_apt_fails_once(self):
        self.fake_apt([])
        once = self.root.parent / "once"
        apt = (self.bin / "apt-get").read_text().split("\n", 2)[2]
        self.fake("apt-get", f'case " $* " in *" install "*) [ -e {once} ] || '
                             f'{{ touch {once}; exit 100; }} ;; esac\n{apt}')
        self.fake("sleep", "true")
        (self.bin / "touch").symlink_to(shutil.which("touch"))
        done = self.lockstep("data", "synthetic")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("attempt 1 of 3", done.stderr)
        self.assertNotIn("attempt 2 of 3", done.stderr)
        installs = [line for line in self.calls() if "apt-get" in line and " install " in line]
        self.assertEqual(len(installs), 2)

    def test_goes_on_without_a_package_that_is_not_offered_and_asks_once(self):
        packages = (self.root / "tools/packages.txt").read_text()
        names = re.findall(r"^\w+ *\| (\S+)", packages, re.MULTILINE)
        self.fake_apt([name for name in names if name != "libgloo-dev"], offered="^nothing$")
        for tool in ("meson", "ninja", "c++"):
            self.install(tool)
        first = self.lockstep("bench")
        self.assertIn("libgloo-dev is not on offer here", first.stderr)
        second = self.lockstep("bench")
        self.assertNotIn("libgloo-dev", second.stderr)

    def test_without_apt_lists_the_packages_by_purpose_and_stops(self):
        done = self.lockstep("bench")
        self.assertEqual(done.returncode, 1)
        self.assertIn("not found: meson ninja c++", done.stderr)
        self.assertRegex(done.stderr, r"meson +build system")
        self.assertRegex(done.stderr, r"libfmt-dev +text formatting")

    def test_without_apt_but_with_the_tools_it_goes_on(self):
        for tool in ("meson", "c++"):
            self.install(tool)
        self.fake("ninja", "exit 3")
        done = self.lockstep("bench")
        self.assertNotIn("not found", done.stderr)
        self.assertTrue([line for line in self.calls() if line.startswith("meson setup")])

    def test_without_root_and_sudo_apt_is_not_tried(self):
        self.fake_apt([])
        self.fake("id", "echo 1000")
        (self.bin / "python3").unlink()
        done = self.lockstep("data", "synthetic")
        self.assertEqual(done.returncode, 1)
        self.assertFalse([line for line in self.calls() if line.startswith("apt-get")])
        self.assertIn("Debian: apt-get install", done.stderr)

    def without_rights(self, sudo):
        """An ordinary user, whose sudo does what `sudo` says."""
        self.fake_apt([])
        self.fake("id", "echo 1000")
        self.fake("sudo", sudo)

    def test_sudo_is_asked_once_and_never_for_a_password(self):
        self.without_rights("exit 1")
        for tools, status in (((), 1), (("meson", "ninja", "c++"), 0)):
            for tool in tools:
                self.install(tool)
            self.log.unlink(missing_ok=True)
            done = self.lockstep("gpu-check", "--help-me") if tools else self.lockstep("bench")
            asked = [line for line in self.calls() if line.startswith(("sudo", "apt"))]
            self.assertEqual(["sudo -n true"], asked)
            self.assertEqual(1, done.stderr.count("not installed, without root: 'sudo -v' before this may help"))
            self.assertEqual(1, done.stderr.count("libfmt-dev"), done.stderr)
            self.assertEqual(not status, "not found: meson ninja c++" not in done.stderr)

    def test_sudo_that_needs_no_password_installs(self):
        self.without_rights('[ "$1" != -n ] || exit 0; exec "$@"')
        (self.bin / "python3").unlink()
        self.lockstep("data", "synthetic")
        self.assertTrue([line for line in self.calls() if line.startswith("apt-get") and " install " in line])

    def test_no_install_installs_nothing_and_names_once_what_is_missing(self):
        for tool in ("meson", "ninja", "c++", "git"):
            self.install(tool)
        needs = re.findall(r"^(\S+) *\| ([\w ]*)\| *\S", LOCKSTEP.read_text(), re.MULTILINE)
        self.assertEqual(COMMANDS, [name for name, _ in needs])
        for name, groups in needs:
            with self.subTest(name):
                self.fake_apt([])
                done = self.lockstep(name, "--no-install", "--no-such-option")
                self.assertFalse([line for line in self.calls() if line.startswith("apt")])
                self.assertEqual(bool(groups.strip()), "not installed, because of --no-install" in done.stderr)
                self.assertLessEqual(len(re.findall("^  python3 ", done.stderr, re.MULTILINE)), 1)
                self.assertNotIn("arguments: --no-install", done.stderr)

    def test_no_install_may_stand_behind_other_words_but_not_those_of_launch(self):
        self.fake_apt([])
        self.assertIn("not installed", self.lockstep("data", "synthetic", "--no-install").stderr)
        self.assertFalse([line for line in self.calls() if line.startswith("apt")])
        for tool in ("meson", "ninja", "c++"):
            self.install(tool)
        self.lockstep("launch", "program", "--no-install")
        self.assertTrue([line for line in self.calls() if line.startswith("apt")])

    def test_a_compiler_that_cxx_names_will_do(self):
        for tool in ("meson", "g++-12"):
            self.install(tool)
        self.fake("ninja", "exit 3")
        self.assertNotIn("not found", self.lockstep("bench", CXX="g++-12 -fopenmp").stderr)
        self.assertIn("not found: g++-13.", self.lockstep("bench", CXX="g++-13").stderr)


class TestRun(Sandbox):
    """`lockstep run` and `lockstep compare` with a fake build of two stages."""

    STAGE = """#!/bin/bash
printf '%s\\n' "stage $0 data=$LOCKSTEP_DATA" "$@" >>LOG
while [ $# -gt 1 ]; do shift; done
echo '{"stage": "NAME", "devices": ["cpu:0"], "batch_size": 64, "accuracy": [0.5],
"config": {"model": "seed", "optimizer": "sgd", "order": "sampler"}, "samples_per_second": 1, "epochs": 1,
"epoch_seconds": [1], "step_seconds": [1, 1], "peak_memory_bytes": [1048576], "traceEvents": [],
"otherData": {"zero_ns": 0}, "baseline": {"proof": "", "proof_value": 0, "proof_limit": 0}}' >"$1"
"""

    def setUp(self):
        super().setUp()
        for tool in ("meson", "c++"):
            self.install(tool)
        self.fake("ninja", 'case " $* " in *" -t targets "*) echo "01-a/01-a: cpp_LINKER" ;; '
                           '*" -n "*) echo "ninja: no work to do." ;; esac')
        (self.root / "build").mkdir()
        (self.root / "build/build.ninja").touch()
        for name in ("01-single-gpu", "02-b"):
            self.stage(name)

    def stage(self, name):
        (self.root / name).mkdir()
        (self.root / name / "main.cpp").touch()
        program = self.root / "build" / name / name
        program.parent.mkdir()
        program.write_text(self.STAGE.replace("LOG", str(self.log)).replace("NAME", name))
        program.chmod(0o755)

    def test_run_trains_every_stage_with_the_options_and_prints_one_table(self):
        done = self.lockstep("run", "--data", "synthetic", "--load", "two words")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.calls().count("two words"), 3)  # two timed runs and a proof
        self.assertRegex(done.stdout, r"01-single-gpu .*50\.00 %.*\n02-b .*50\.00 %")
        self.assertFalse((self.root / "build/comparison").exists())

    def test_compare_is_run_that_keeps_what_it_found(self):
        done = self.lockstep("compare", "--data", "synthetic", "--stages", "01")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"01-single-gpu .*50\.00 %")
        kept = self.root / "build/comparison/comparison.json"
        self.assertEqual([0.5], json.loads(kept.read_text())["runs"][0]["metrics"]["accuracy"])
        other = self.root.parent / "other.json"
        self.lockstep("compare", "--data", "synthetic", "--stages", "01", "--json", str(other))
        self.assertTrue(other.exists())

    def test_help_comes_before_anything_is_built_or_fetched(self):
        for command, usage in (("run", "usage: lockstep run"), ("compare", "usage: lockstep run"),
                               ("exercise", "usage: lockstep exercise"), ("bench", "usage: lockstep bench")):
            with self.subTest(command):
                done = self.lockstep(command, "--help")
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn(usage, done.stdout)
        self.assertFalse([line for line in self.calls() if line.startswith(("ninja", "meson", "apt"))])
        self.assertIn("--mine", self.lockstep("run", "--help").stdout)
        self.assertIn("--mine", self.lockstep("exercise", "--help").stdout)

    def test_mine_is_for_a_students_tree(self):
        done = self.lockstep("run", "--lr", "0.5", "--mine")
        self.assertEqual((1, ""), (done.returncode, done.stdout))
        self.assertIn("--mine is for a student's tree", done.stderr)
        self.assertIn("unrecognized arguments: --mine", self.lockstep("data", "synthetic", "--mine").stderr)

    def test_a_status_that_is_not_0_is_passed_on(self):
        done = self.lockstep("run", "--data", "synthetic", "--stages", "07")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))

    def test_a_stage_is_told_where_fetched_data_lies(self):
        (self.root / "data").mkdir()
        self.lockstep("run", "--data", "synthetic")
        self.assertTrue([line for line in self.calls() if line.endswith(f"data={self.root}/data")])

    def fake_build(self, script):
        """Ninja has two steps to do; `script` is what it does for them."""
        self.fake("ninja", 'case " $* " in *" -t targets "*) echo "01-a/01-a: cpp_LINKER"; '
                           'echo "tests/x/x: cpp_LINKER" ;; '
                           '*" -n "*) echo "[1/2] Compiling C++ object a.o"; '
                           'echo "[2/2] Linking target 01-a/01-a" ;; '
                           f'*01-a*) {script} ;; esac')

    def test_a_lab_compiles_its_own_program_only(self):
        self.fake("ninja", 'case " $* " in *" -n "*) echo "[1/1] Linking target labs" ;; esac')
        for words in (("--lab", "stale-replica"), ("--lab=stale-replica", "--without-assistant-page")):
            self.log.unlink(missing_ok=True)
            self.lockstep("exercise", *words)
            build = [line for line in self.calls() if "labs" in line and " -n " not in line][-1]
            self.assertRegex(build, r" -j \d+ 02-dataparallel/labs$")

    def test_the_name_of_a_lab_is_no_pattern(self):
        for name in (".*", "stale-replic.", "", "stale", "\\163tale-replica"):
            done = self.lockstep("exercise", f"--lab={name}" if name else "--lab=-")
            self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")), done.stderr)
            self.assertIn("expected one of ", done.stderr)
        self.assertFalse([line for line in self.calls() if line.startswith(("ninja", "meson"))])

    def test_a_build_says_what_it_will_do_and_about_how_long(self):
        self.fake_build('echo "[1/2] Compiling C++ object a.o"; echo "[2/2] Linking target x"')
        done = self.lockstep("run", "--data", "synthetic")
        self.assertEqual(done.returncode, 0, done.stderr)
        first, last = done.stderr.splitlines()
        self.assertRegex(first, r"^lockstep: compiling build/: 2 steps on \d+ cores?, about \d+ s(, longer .*)?$")
        self.assertRegex(last, r"^lockstep: compiled build/ in \d+ s$")
        self.assertNotIn("Compiling", done.stdout)
        builds = [line for line in self.calls() if "01-a" in line and " -n " not in line]
        self.assertEqual(len(builds), 1)
        self.assertNotIn("tests/", builds[0])

    def test_a_long_build_says_how_far_it_is(self):
        module = self.root / "tools/progress.py"
        module.write_text(module.read_text().replace("every=15", "every=0.5"))
        self.fake_build('echo "[1/2] Compiling C++ object a.o"; sleep 1.5')
        done = self.lockstep("run", "--data", "synthetic")
        self.assertRegex(done.stderr, r"\nlockstep: 0:01  compiling build/ \(1 of 2\); about \d+ s left\n")

    def test_a_terminal_sees_ninjas_own_line(self):
        self.fake_build('[ -t 1 ] && echo "a terminal"')
        outer, inner = os.openpty()
        done = subprocess.run([self.root / "lockstep", "run", "--data", "synthetic"], stdout=inner,
                              stderr=inner, timeout=120, env={"PATH": str(self.bin), "HOME": "/"})
        os.close(inner)
        seen = os.read(outer, 65536).decode()
        os.close(outer)
        self.assertEqual(done.returncode, 0, seen)
        self.assertIn("a terminal", seen)

    def test_a_build_that_fails_is_shown_and_stops(self):
        self.fake_build('echo "[1/2] fine"; echo "FAILED: a.o"; echo "main.cpp:1: oh no"; exit 1')
        done = self.lockstep("run")
        self.assertEqual(done.returncode, 1)
        self.assertIn("main.cpp:1: oh no\nlockstep: the build failed, see above (after moving",
                      done.stderr)
        self.assertNotIn("fine", done.stderr)
        self.assertNotIn("==", done.stdout)

    def test_a_first_build_is_configured_and_what_fails_there_is_shown(self):
        (self.root / "build/build.ninja").unlink()
        self.fake("meson", "echo no compiler; exit 1")
        done = self.lockstep("run")
        self.assertEqual(done.returncode, 1)
        self.assertTrue(self.calls()[-1].startswith(f"meson setup {self.root}/build {self.root} -D"))
        self.assertRegex(done.stderr, "^lockstep: configuring build/ .*\nno compiler\n"
                                      "lockstep: meson could not configure build/, see above; "
                                      "'./lockstep doctor' names what is too old\n$")


class TestLaunch(Sandbox):
    """`lockstep launch` with a fake build of the launcher."""

    def setUp(self):
        super().setUp()
        for tool in ("meson", "c++"):
            self.install(tool)
        self.launcher = self.root / "build/common/launch/launch"
        self.launcher.parent.mkdir(parents=True)
        (self.root / "build/build.ninja").touch()
        self.build("no work to do.")

    def build(self, answer, script=""):
        """Ninja has one program to compile; `answer` is what it says is to be done."""
        self.fake("ninja", 'case " $* " in *" -t targets "*) '
                           'echo "common/launch/launch: cpp_LINKER" ;; '
                           f'*" -n "*) echo "{answer}" ;; *common/launch/launch*) {script}\n;; esac')

    def fake_launcher(self):
        self.launcher.write_text(f"#!/bin/bash\nprintf '<%s>' \"$@\" >>{self.log}\n"
                                 'echo "pid $$ parent $PPID data $LOCKSTEP_DATA"\nexit 9\n')
        self.launcher.chmod(0o755)

    def test_passes_on_every_argument_and_the_status(self):
        self.fake_launcher()
        done = self.lockstep("launch", "--nproc-per-node", "2", "program", "two words", "", "--help")
        self.assertEqual((done.returncode, done.stderr), (9, ""))
        self.assertEqual(self.calls()[-1],
                         "<--nproc-per-node><2><program><two words><><--help>")

    def test_becomes_the_launcher_so_that_signals_reach_it(self):
        self.fake_launcher()
        done = self.lockstep("launch", "program")
        self.assertIn(f"parent {os.getpid()} ", done.stdout)

    def test_ranks_are_told_where_fetched_data_lies_but_nothing_is_fetched(self):
        self.fake_launcher()
        (self.root / "data").mkdir()
        done = self.lockstep("launch", "program")
        self.assertIn(f"data {self.root}/data", done.stdout)
        self.assertFalse([line for line in self.calls() if "fetch_data" in line])

    def test_builds_the_launcher_first(self):
        self.fake_launcher()
        finished = self.launcher.read_text()
        self.launcher.unlink()
        recipe = self.root.parent / "recipe"
        recipe.write_text(finished)
        recipe.chmod(0o755)
        (self.bin / "cp").symlink_to(shutil.which("cp"))
        self.build("[1/1]", f'cp "{recipe}" "{self.launcher}"')
        done = self.lockstep("launch", "program")
        self.assertEqual(done.returncode, 9, done.stderr)
        self.assertIn("compiling", done.stderr)

    def test_a_build_that_fails_starts_nothing(self):
        self.fake_launcher()
        self.build("[1/1]", 'echo "launcher.cpp:1: oh no"; exit 1')
        done = self.lockstep("launch", "program")
        self.assertEqual(done.returncode, 1)
        self.assertIn("launcher.cpp:1: oh no", done.stderr)
        self.assertEqual(done.stdout, "")


class TestContinuousIntegration(Sandbox):
    def test_passes_on_the_status_and_the_closing_line(self):
        (self.root / ".ci").mkdir()
        shutil.copy(ROOT / ".ci/run", self.root / ".ci")
        (self.root / "lockstep").write_text(
            "#!/usr/bin/env bash\n"
            "[ \"$*\" = test ] && echo '1 passed, 2 failed, 0 skipped'\nexit 1\n")
        done = call(self.root / ".ci/run", cwd="/")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stdout.splitlines()[-1], "1 passed, 2 failed, 0 skipped")


if __name__ == "__main__":
    unittest.main()
