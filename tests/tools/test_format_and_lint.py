"""`lockstep format` and `lockstep lint`: what they ask clang-format and clang-tidy, what they
report."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# "Formats" by putting the word "tidy" into a file.
CLANG_FORMAT = """#!/bin/sh
case $* in
  *--version*) echo "clang-format version VERSION" ;;
  *--dry-run*) for file; do case $file in -*) ;; *)
    grep -q tidy "$file" || echo "$file:1:1: warning: code should be clang-formatted [x]" >&2 ;;
    esac; done ;;
  *-i*) for file; do case $file in -*) ;; *) echo tidy >"$file" ;; esac; done ;;
esac
"""


class SmallTree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve() / "tree"
        self.bin = self.root.parent / "bin"
        self.write(self.bin / "env", '#!/bin/sh\nexec "$@"\n')
        for name in ("common/a.cpp", "common/a.h", "01-one/main.cpp", "tests/unit/t.cpp"):
            self.write(self.root / name, "int x;\n")

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def call(self, tool, *arguments, path="/usr/bin:/bin"):
        """Runs a copy of a tool in the tree, where the fake programs come first."""
        for name in (tool, "command_line.py", "child_processes.py", "progress.py"):
            self.write(self.root / "tools" / name, (ROOT / "tools" / name).read_text())
        return subprocess.run([sys.executable, self.root / "tools" / tool, *map(str, arguments)],
                              capture_output=True, text=True, timeout=300, cwd=self.root,
                              env={**os.environ, "PATH": f"{self.bin}:{path}"})


class TestFormat(SmallTree):
    def fake(self, version="19.1.7", name="clang-format-19"):
        self.write(self.bin / name, CLANG_FORMAT.replace("VERSION", version))

    def test_check_lists_the_files_changes_nothing_and_fails(self):
        self.fake()
        (self.root / "common/a.h").write_text("tidy\n")
        done = self.call("format.py", "--check")
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertEqual(done.stdout, "01-one/main.cpp\ncommon/a.cpp\ntests/unit/t.cpp\n"
                                      "sources: 4, to be laid out: 3\n")
        self.assertEqual((self.root / "common/a.cpp").read_text(), "int x;\n")

    def test_lays_out_the_tree_or_the_files_named(self):
        self.fake("14.0.6")
        self.fake("19.1.7", "clang-format")
        done = self.call("format.py", "common/a.cpp")
        self.assertEqual((done.returncode, done.stdout), (0, "common/a.cpp\nsources: 1, changed: 1\n"))
        self.assertEqual((self.root / "common/a.h").read_text(), "int x;\n")
        self.assertEqual(self.call("format.py").returncode, 0)
        done = self.call("format.py", "--check")
        self.assertEqual((done.returncode, done.stdout), (0, "sources: 4, to be laid out: 0\n"))

    def test_another_version_is_refused_in_one_line(self):
        self.fake("14.0.6")
        self.fake("18.1.0", "clang-format")
        done = self.call("format.py", path="")
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1))
        self.assertIn("no clang-format 19", done.stderr)

    def test_what_is_no_source_is_refused(self):
        self.fake()
        for name in ("common", "nothing.cpp", "tools/format.py"):
            done = self.call("format.py", name)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
            self.assertIn(f"format: '{name}' is no source", done.stderr)

    @unittest.skipUnless("LOCKSTEP_FULL" in os.environ, "only with --full: the layout of all sources")
    def test_this_tree_is_laid_out(self):
        done = subprocess.run([sys.executable, ROOT / "tools/format.py", "--check"],
                              capture_output=True, text=True)
        if "no clang-format 19" in done.stderr:
            self.skipTest("no clang-format 19")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class TestLint(SmallTree):
    MESON = '#!/bin/sh\necho "$*" >>"$0.log"\nmkdir -p "$2" && touch "$2/build.ninja"\n'
    # Every source has a finding in the same header, and main.cpp one of its own.
    CLANG_TIDY = """#!/bin/sh
for file; do :; done
echo "$*" >>"$0.log"
echo "ROOT/common/a.h:1:5: error: oh no [bugprone-x,-warnings-as-errors]"
echo "int x;"
case $file in */main.cpp) echo "../01-one/main.cpp:1:1: error: oh dear [y]" ;; esac
echo "123 warnings generated." >&2
exit 1
"""

    def setUp(self):
        super().setUp()
        self.write(self.bin / "meson", self.MESON)
        self.write(self.bin / "ninja", "#!/bin/sh\n")
        self.write(self.bin / "clang-tidy", self.CLANG_TIDY.replace("ROOT", str(self.root)))

    def test_lints_the_product_and_tells_each_finding_once(self):
        done = self.call("lint.py")
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        lines = done.stdout.splitlines()
        self.assertEqual(lines[-1], "sources: 2, findings: 2")
        header = "common/a.h:1:5: error: oh no [bugprone-x,-warnings-as-errors]"
        own = "01-one/main.cpp:1:1: error: oh dear [y]"
        self.assertEqual((lines.count(header), lines.count(own)), (1, 1))
        self.assertEqual(lines.count("int x;"), 1)
        self.assertNotIn("generated", done.stdout)
        self.assertRegex(done.stdout, r"(?m)^\[1/2\] \S+\.cpp$(?s:.*)^\[2/2\] \S+\.cpp$")
        self.assertEqual(2, len((self.bin / "clang-tidy.log").read_text().splitlines()))

    def test_files_that_are_named_are_the_only_ones(self):
        done = self.call("lint.py", "common/a.cpp")
        self.assertIn("[1/1] common/a.cpp", done.stdout)
        self.assertNotIn("main.cpp", done.stdout)
        for name in ("tests/unit/t.cpp", "common/a.h", "common/none.cpp"):
            done = self.call("lint.py", name)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
            self.assertIn(f"'{name}' is no source of the product", done.stderr)

    def test_without_findings_the_status_is_0(self):
        self.write(self.bin / "clang-tidy", "#!/bin/sh\nexit 0\n")
        done = self.call("lint.py")
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (0, "sources: 2, findings: 0"))

    def test_a_clang_tidy_that_crashes_is_a_failure(self):
        self.write(self.bin / "clang-tidy", "#!/bin/sh\nkill -SEGV $$\n")
        self.assertEqual(self.call("lint.py").returncode, 1)

    def test_what_is_missing_is_one_line(self):
        done = self.call("lint.py", "--clang-tidy", "no-such-tidy")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
        self.assertIn("no no-such-tidy in PATH", done.stderr)

    def test_meson_that_fails_is_shown(self):
        self.write(self.bin / "meson", "#!/bin/sh\necho 'no compiler'\nexit 1\n")
        done = self.call("lint.py")
        self.assertEqual(done.returncode, 1)
        self.assertIn("no compiler\nlint: meson could not configure", done.stderr)

    def test_a_mistake_is_found_in_a_source_and_in_a_header(self):
        if not shutil.which("clang-tidy") or not shutil.which("meson"):
            self.skipTest("no clang-tidy, or no meson")
        shutil.rmtree(self.bin)
        for name in (".clang-tidy", "meson_options.txt"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "meson.build").write_text(
            "project('x', 'cpp', default_options: ['cpp_std=c++20'])\n"
            "static_library('a', 'common/a.cpp', '01-one/main.cpp')\n")
        (self.root / "common/a.h").write_text("inline int* none() { return 0; }\n")
        (self.root / "common/a.cpp").write_text('#include "a.h"\nint* nothing() { return none(); }\n')
        done = self.call("lint.py", path=os.environ["PATH"])
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("common/a.h:1:29: error: use nullptr", done.stdout)
        self.assertTrue(done.stdout.endswith("sources: 2, findings: 1\n"), done.stdout)


class TestSettings(unittest.TestCase):
    """.clang-tidy, which applies to the headers of the product, and to no others."""

    def test_findings_are_errors_in_every_header_of_the_product(self):
        text = (ROOT / ".clang-tidy").read_text()
        self.assertIn("WarningsAsErrors: '*'\n", text)
        wanted = re.compile(re.search(r"^HeaderFilterRegex: '(.*)'$", text, re.M).group(1))
        product = [path for folder in (ROOT / "common", *ROOT.glob("0[1-9]-*"))
                   for path in folder.rglob("*") if path.suffix in (".h", ".inl")]
        self.assertGreater(len(product), 100)
        self.assertEqual([], [path for path in product if not wanted.search(str(path))])
        self.assertEqual([], [path for path in (ROOT / "tests").rglob("*.h")
                              if wanted.search(str(path.relative_to(ROOT)))])

    def test_every_exception_names_its_check_and_its_reason(self):
        for folder in (ROOT / "common", *ROOT.glob("0[1-9]-*")):
            for path in folder.rglob("*"):
                for line in path.read_text().splitlines() if path.is_file() else ():
                    if "NOLINT" in line:
                        self.assertRegex(line, r"// NOLINT(NEXTLINE)?\([\w.,-]+\): \w+", str(path))


if __name__ == "__main__":
    unittest.main()
