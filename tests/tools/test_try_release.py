"""tools/try-release: which mirror, what it needs, and that nothing is left however it ends.

A fake debootstrap makes a release of a shell and a few commands, so that the real ones take part:
namespaces, mounts, chroot, git."""

import contextlib
import importlib.machinery
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/try-release"


def load_tool():
    loader = importlib.machinery.SourceFileLoader("try_release", str(TOOL))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("try_release", loader))
    loader.exec_module(module)
    return module


def call(*words, **options):
    return subprocess.run([sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True,
                          timeout=120, **options)


class TestArguments(unittest.TestCase):
    def test_a_release_is_a_word(self):
        for words in ((), ("--mirror",), ("../etc",), ("--no-such-option", "trixie"),
                      ("trixie", "--keep", "folder")):
            done = call(*words)
            self.assertEqual((done.returncode, done.stdout), (1, ""), words)
            self.assertRegex(done.stderr, r"\Atry-release: .*; --help lists all options\n\Z")
        self.assertIn("'../etc' names no release", call("../etc").stderr)
        self.assertIn("give options before the release", call("trixie", "--keep", "folder").stderr)
        self.assertIn("which release? Give its NAME", call().stderr)

    def test_without_root_one_line_and_status_77(self):
        tool, errors = load_tool(), io.StringIO()
        with mock.patch("os.geteuid", return_value=1000), contextlib.redirect_stderr(errors):
            self.assertEqual(77, tool.main(["trixie"]))
        self.assertEqual(errors.getvalue(),
                         "try-release: needs root, for mounts and chroot: start it with sudo\n")

    @unittest.skipUnless(os.geteuid() == 0, "namespaces not permitted: not root")
    def test_what_is_missing_is_one_line_and_status_77(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("git", "setpriv"):
                (Path(folder) / name).symlink_to(shutil.which(name))
            done = call("trixie", env={"PATH": folder})
        self.assertEqual((done.returncode, done.stderr.count("\n")), (77, 1))
        self.assertIn("no unshare", done.stderr)


class TestMirror(unittest.TestCase):
    """apt's settings in a folder of the test's own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.settings = Path(folder.name)
        (self.settings / "sources.list.d").mkdir()
        (self.settings / "os-release").write_text('NAME="Debian"\nVERSION_CODENAME=bookworm\n')
        self.tool = load_tool()

    def mirror(self, name, text):
        (self.settings / name).write_text(text)
        try:
            return self.tool.system_mirror(self.settings, self.settings / "os-release")
        finally:
            (self.settings / name).unlink()

    def test_lines_are_read(self):
        line = "deb http://one.test/debian bookworm main contrib # comment\n"
        self.assertEqual("http://one.test/debian", self.mirror("sources.list", line))
        line = "#deb http://no.test/ bookworm main\n" + line.replace("deb ", "deb [arch=amd64 a=b] ")
        self.assertEqual("http://one.test/debian", self.mirror("sources.list.d/a.list", line))

    def test_paragraphs_are_read(self):
        text = ("# one\nTypes: deb deb-src\n# two\nURIs: https://two.test/debian\n"
                "Suites: bookworm bookworm-updates\nComponents: main\n contrib\nSigned-By: x\n")
        self.assertEqual("https://two.test/debian", self.mirror("sources.list.d/a.sources", text))
        disabled = text.replace("two.test", "no.test") + "Enabled: no\n"
        self.assertEqual("https://two.test/debian",
                         self.mirror("sources.list.d/a.sources", f"{disabled}\n{text}"))
        of_several_lines = text.replace("Suites: bookworm", "Suites:\n bookworm")
        self.assertEqual("https://two.test/debian",
                         self.mirror("sources.list.d/a.sources", of_several_lines))

    def test_other_suites_and_other_peoples_repositories_are_passed_over(self):
        others = ("deb-src http://sources.test/debian bookworm main\n"
                  "deb http://docker.test/debian bookworm stable\n"
                  "deb http://node.test/node nodistro main\n"
                  "deb http://security.test/debian bookworm-security main\n"
                  "deb cdrom:[Debian]/ bookworm main\n")
        self.assertEqual("http://one.test/debian", self.mirror(
            "sources.list", others + "deb http://one.test/debian bookworm main\n"))
        with self.assertRaisesRegex(self.tool.Problem, "give --mirror URL"):
            self.mirror("sources.list", others)

    def test_proxies_go_along_but_no_scripts(self):
        settings = ('Acquire::http::Proxy "http://proxy.test:3128";\n'
                    'Acquire::http::Proxy::near.test "DIRECT";\n'
                    'Acquire::http::Proxy-Auto-Detect "/usr/bin/find";\n')
        apt_config = self.settings / "apt-config"
        apt_config.write_text(f"#!/bin/sh\ncat <<'X'\nAcquire::https::Proxy \"\";\n{settings}X\n")
        apt_config.chmod(0o755)
        variables = {"PATH": f"{self.settings}:{os.environ['PATH']}", "CI": "true", "LD_PRELOAD": "x.so"}
        with mock.patch.dict(os.environ, variables):
            os.environ.pop("http_proxy", None)
            settings, environment = self.tool.proxy_settings(), self.tool.clean_environment()
        self.assertEqual(['Acquire::http::Proxy "http://proxy.test:3128";',
                          'Acquire::http::Proxy::near.test "DIRECT";'], settings)
        self.assertEqual("http://proxy.test:3128", environment["http_proxy"])
        self.assertEqual(("true", "/root", "C.UTF-8"),
                         tuple(environment[name] for name in ("CI", "HOME", "LANG")))
        self.assertNotIn("LD_PRELOAD", environment)


DEBOOTSTRAP = """#!/bin/sh
echo "$*" >>"{folder}/log"
for folder; do case $folder in {folder}/*) break ;; esac; done
mkdir -p "$folder/bin" "$folder/etc/apt" "$folder/proc" "$folder/sys" "$folder/root"
mkdir -p "$folder/dev/shm" "$folder/dev/pts"
[ ! -e "{folder}/slow" ] || sleep 1234.5
for name in sh cat ls sleep; do
  program=$(command -v $name)
  cp -L "$program" "$folder/bin/$name"
  for library in $(ldd "$program" | grep -o '/[^ ]*'); do
    mkdir -p "$folder${{library%/*}}" && cp -L "$library" "$folder$library"
  done
done
[ ! -e "{folder}/broken" ]
"""
LOCKSTEP = """#!/bin/sh
echo "$1 of the clone"
[ "$1" = run ]
"""
NEVER_ENDING = ("sh", "-c", "echo begun; sleep 1234.5 & sleep 1234.5")


def wait_for(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


class TestSmallRelease(unittest.TestCase):
    """A tree of few files, with the tool in it; temporary folders are made next to it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="try-release-test-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "temporary").mkdir()
        self.executable("debootstrap", DEBOOTSTRAP.format(folder=self.folder))
        self.executable("tree/lockstep", LOCKSTEP)
        self.tool = self.executable("tree/tools/try-release", TOOL.read_text())
        for name in ("command_line.py", "child_processes.py"):  # what it imports
            self.executable(f"tree/tools/{name}", (TOOL.parent / name).read_text())
        git = ["git", "-C", self.folder / "tree", "-c", "user.name=x", "-c", "user.email=x"]
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "-"]):
            subprocess.run([*git, *words], check=True)
        self.environment = {**os.environ, "TMPDIR": str(self.folder / "temporary"), "CI": "yes",
                            "PYTHONDONTWRITEBYTECODE": "yes",
                            "PATH": f"{self.folder}:{os.environ['PATH']}"}
        done = self.try_release("--keep", self.folder / "kept", "trixie", "ls")
        if done.returncode == 77:
            self.skipTest(f"namespaces not permitted: {done.stderr.strip()}")
        self.assertEqual((done.returncode, done.stdout), (0, "lockstep\ntools\n"), done.stderr)

    def executable(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, *words, **options):
        return subprocess.Popen([sys.executable, self.tool, "--mirror", "http://mirror.test/debian", *words],
                                env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, **options)

    def try_release(self, *words):
        process = self.start(*words)
        output, errors = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    def check_nothing_is_left(self, folder_too=True):
        self.assertTrue(wait_for(lambda: not self.processes()), "processes are left")
        self.assertNotIn(str(self.folder), Path("/proc/self/mountinfo").read_text())
        if folder_too:
            self.assertEqual([], list((self.folder / "temporary").iterdir()))

    def processes(self):
        """Those whose root is below the folder, or that make a release there."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace")
                root = os.readlink(process / "root")
            except OSError:
                continue
            if str(self.folder) in root + words:
                found.append(words)
        return found

    def debootstraps(self):
        return len((self.folder / "log").read_text().splitlines())

    # --- A command that ends ----------------------------------------------------------------------

    def test_the_status_is_the_commands_and_nothing_is_left(self):
        done = self.try_release("trixie", "sh", "-c", "cat lockstep /etc/apt/sources.list; echo $CI $HOME; "
                                "echo $$; ls /proc/self /dev/null >/dev/null && exit 5")
        self.assertEqual(done.returncode, 5, done.stderr)
        lines = done.stdout.removeprefix(LOCKSTEP).splitlines()
        self.assertEqual(["deb http://mirror.test/debian trixie main", "yes /root"], lines[:2])
        self.assertLess(int(lines[2]), 50)  # process numbers of its own
        self.check_nothing_is_left()

    def test_run_and_test_are_what_it_runs_by_default(self):
        done = self.try_release("trixie")
        self.assertEqual((done.returncode, done.stdout), (1, "run of the clone\ntest of the clone\n"))
        self.assertRegex(done.stderr, r"trixie: \./lockstep run: status 0 after \d+ s\n")

    def test_a_kept_release_is_used_again_with_a_new_clone(self):
        kept = self.folder / "kept"
        (kept / "root/lockstep/old").touch()
        (self.folder / "tree/lockstep").write_text("changed")
        done = self.try_release("--keep", kept, "trixie", "ls")
        self.assertEqual((done.returncode, done.stdout), (0, "lockstep\ntools\n"))
        self.assertIn("not committed are not tried (lockstep for one)", done.stderr)
        self.assertEqual(1, self.debootstraps())

    def test_a_folder_that_holds_something_else_is_refused(self):
        for folder, name in ((self.folder, "trixie"), (self.folder / "kept", "bookworm")):
            done = self.try_release("--keep", folder, name, "ls")
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
            self.assertIn("name another folder", done.stderr)
        self.assertTrue((self.folder / "kept/bin/sh").exists())

    def test_a_release_that_cannot_be_made_is_told_and_removed(self):
        (self.folder / "broken").touch()
        done = self.try_release("--keep", self.folder / "new", "trixie", "ls")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1), done.stderr)
        self.assertIn("could not make trixie from http://mirror.test/debian (status 1)", done.stderr)
        self.assertFalse((self.folder / "new").exists())

    def test_a_folder_in_which_something_is_mounted_is_never_deleted(self):
        (self.folder / "mounted/inside").mkdir(parents=True)
        code = (f"import runpy, sys; sys.path.append({str(TOOL.parent)!r})\n"
                f"tool = runpy.run_path({str(self.tool)!r})\n"
                f"import pathlib; tool['remove'](pathlib.Path({str(self.folder / 'mounted')!r}))")
        done = subprocess.run(["unshare", "--mount", "sh", "-c", 'mount -t tmpfs x "$0" && '
                               'echo precious >"$0/file" && ! "$@" && cat "$0/file"',
                               self.folder / "mounted/inside", sys.executable, "-c", code],
                              capture_output=True, text=True)
        self.assertIn("mounted/inside is mounted", done.stderr)
        self.assertEqual((done.returncode, done.stdout), (0, "precious\n"))

    # --- Ended from outside -----------------------------------------------------------------------

    def end_in_the_middle(self, number, *words):
        """Status after a signal to the tool once the command, or debootstrap, has begun."""
        process = self.start(*words)
        self.addCleanup(process.kill)
        if (self.folder / "slow").exists():
            self.assertTrue(wait_for(lambda: self.debootstraps() == 2))
        else:
            self.assertEqual("begun\n", process.stdout.readline())
        process.send_signal(number)
        process.communicate(timeout=60)
        return process.returncode

    def test_a_signal_ends_everything(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number.name):
                self.assertEqual(128 + number, self.end_in_the_middle(number, "trixie", *NEVER_ENDING))
                self.check_nothing_is_left()

    def test_a_hangup_that_is_ignored_ends_nothing(self):
        process = self.start("trixie", *NEVER_ENDING, preexec_fn=lambda: signal.signal(
            signal.SIGHUP, signal.SIG_IGN))  # as nohup does
        self.addCleanup(process.kill)
        self.assertEqual("begun\n", process.stdout.readline())
        process.send_signal(signal.SIGHUP)
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(1)
        process.terminate()
        process.communicate(timeout=60)
        self.assertEqual(143, process.returncode)

    def test_sigkill_leaves_no_process_and_no_mount(self):
        self.assertEqual(-9, self.end_in_the_middle(signal.SIGKILL, "trixie", *NEVER_ENDING))
        self.check_nothing_is_left(folder_too=False)

    def test_a_signal_while_the_release_is_made_removes_it(self):
        (self.folder / "slow").touch()
        status = self.end_in_the_middle(signal.SIGTERM, "--keep", self.folder / "new", "trixie", "ls")
        self.assertEqual(status, 143)
        self.check_nothing_is_left()
        self.assertFalse((self.folder / "new").exists())


if __name__ == "__main__":
    unittest.main()
