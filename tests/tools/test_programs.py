"""Every program that a tool or a test calls is on a minimal Debian, or comes with a package of
tools/packages.txt, or is looked for before.

What is called: in Python the head of a list or the first word of a call, in C++ the first word of
run_process() and Words{}, in shell scripts and in the texts that are given to a shell every word where
a command can stand."""

import ast
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Package | the programs of it that are called. What `debootstrap --variant=minbase` has.
MINIMAL = """
apt         | apt-cache apt-config apt-get
bash        | bash
coreutils   | basename cat chmod chown cp cut date df dirname echo env false head id ln ls mkdir mkfifo
            | mktemp mv nice nohup nproc od printf readlink realpath rm sha256sum sleep sort stat stdbuf
            | tail tee test timeout touch tr true uniq wc
dash        | sh
diffutils   | cmp diff
dpkg        | dpkg dpkg-query
findutils   | find xargs
grep        | grep
gzip        | gzip
hostname    | hostname
libc-bin    | getconf ldconfig ldd
mawk        | awk
mount       | mount umount
perl-base   | perl
sed         | sed
sysvinit-utils | pidof
tar         | tar
util-linux  | flock lscpu nsenter prlimit setarch setpriv setsid taskset unshare
"""
# Those of tools/packages.txt, and of what they need themselves.
LISTED = """
binutils    | c++filt ld nm objcopy objdump readelf strings
bubblewrap  | bwrap
g++         | c++ g++
git         | git
iproute2    | ip ss tc
meson       | meson
mpich       | mpiexec.mpich
ninja-build | ninja
openmpi-bin | mpirun
pkg-config pkgconf | pkg-config
python3 python3-minimal | python3
universal-ctags | ctags
"""
# Looked for before they are called, or named to the user: where they are absent a case is skipped, or
# another way is taken.
LOOKED_FOR = """
ca-certificates | update-ca-certificates
ccache      | ccache
chromium chromium-driver | chromedriver chromium
clang clang-tidy clang-format-19 | clang++ clang-format clang-format-19 clang-tidy clang-tidy-19 run-clang-tidy
cuda        | compute-sanitizer cuobjdump nvcc nvdisasm nvidia-smi
debootstrap | debootstrap
munge slurm-wlm | munged scontrol sinfo slurmctld slurmd srun squeue
shellcheck  | shellcheck
sudo        | sudo
"""
# What people have, and what comes from elsewhere: found wherever a program's name can stand, except
# those whose names are plain words (free, make, zip): these only where a name surely stands.
ELSEWHERE = """
bc          | bc
bsdextrautils | hexdump
bzip2 xz-utils zstd | bunzip2 bzip2 unxz xz zstd
cmake       | cmake gmake
cpio        | cpio
curl wget   | curl wget
dnsutils    | dig nslookup
e2fsprogs   | lsattr chattr
fuse        | fusermount
gdb         | gdb gdbserver
inotify-tools | inotifywait
iputils-ping | ping
jq          | jq
kmod        | lsmod modprobe
lsof        | lsof
ltrace strace | ltrace strace
net-tools   | ifconfig netstat
netcat      | nc ncat netcat
numactl     | numactl
procps      | pgrep pidwait pkill pmap ps pwdx slabtop sysctl tload uptime vmstat
psmisc      | fuser killall pstree
rsync       | rsync
socat       | socat
systemd     | journalctl loginctl systemctl systemd-run
tmux        | tmux
unzip       | unzip
valgrind    | valgrind
vim-common  | xxd
"""

BUILT_IN = set("""
. : [ [[ alias break builtin case cd command continue declare do done echo elif else esac eval exec exit
export false fi for function getopts hash if in jobs kill let local mapfile popd printf pushd pwd read readarray
readonly return set shift shopt source test then time times trap true type ulimit umask unset until wait while
""".split())
PREFIXES = {"!", "{", "do", "elif", "else", "exec", "if", "nohup", "then", "time", "until", "while", "command",
            "env", "nice"}
WORD = re.compile(r"(?:/usr)?(?:/s?bin/)?([a-z][\w.+-]*)$")
# Comments, quoted texts (but not what is run within them) and documents within a script.
HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1.*?\n(.*?\n)?\s*\2$", re.S | re.M)
NO_COMMANDS = re.compile(r"(?<![^\s])#[^\n]*|'[^']*'|\\\n")


def table(text):
    """The package of each program; a line without one continues the line before."""
    found, package = {}, ""
    for line in filter(None, text.splitlines()):
        left, _, right = line.partition("|")
        package = left.strip() or package
        found.update(dict.fromkeys(right.split(), package))
    return found


def commands(script):
    """The words of a shell script that stand where a command can."""
    script = NO_COMMANDS.sub(" Q ", HERE.sub("", script))
    functions = set(re.findall(r"^\s*(\w+)\(\)", script, re.M))
    for piece in re.split(r"\$\(|[;&|()`\n]", script):
        whole = piece.count('"') % 2 == 0
        words = (re.sub(r'"[^"]*"', "Q", piece) if whole else piece.replace('"', " ")).split()
        while words and (words[0] in PREFIXES or re.match(r"\w+\+?=|-\w|\d*[<>]", words[0])):
            words = words[1:]
        if words and WORD.match(words[0]) and words[0] not in BUILT_IN | functions:
            yield WORD.match(words[0])[1]


def python_calls(text):
    """Words of a Python file where a program's name surely stands, and where it may."""
    sure, perhaps = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.List, ast.Tuple)):
            perhaps |= first_word(node.elts)
            perhaps |= {name for option, script in zip(node.elts, node.elts[1:]) if is_option_c(option)
                        for name in commands(text_of(script))}
        elif isinstance(node, ast.Call):
            perhaps |= first_word(node.args) | first_word(node.args[1:])
            if re.match(r"subprocess\.\w+$|os\.exec\w+$|(child_processes\.)?(run|started)$", ast.unparse(node.func)) and node.args:
                sure |= first_word(getattr(node.args[0], "elts", [node.args[0]]))
        elif text_of(node).startswith("#!"):
            perhaps |= set(commands(text_of(node)))
    return sure, perhaps


def first_word(nodes):
    found = WORD.match(text_of(nodes[0])) if nodes else None
    return {found[1]} if found else set()


def is_option_c(node):
    return re.match(r"-\w*c$", text_of(node)) is not None


def text_of(node):
    """A text as far as it is written down; Q stands for each value within."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "".join(text_of(part) or "Q" for part in getattr(node, "values", []))


def cpp_calls(text):
    """The same of a C++ file. All its texts may be scripts."""
    sure = re.findall(r'\brun_process\(\s*(?:Words)?\{\s*"([a-z][\w.+-]*)"', text)
    perhaps = re.findall(r'[({,]\s*"([a-z][\w.+-]*)"', text)
    scripts = re.findall(r'"((?:\\.|[^"\\\n])*)"', re.sub(r'"\s*\n\s*"', "", text))
    return set(sure), {*perhaps, *(name for script in scripts for name in commands(script))}


def calls(path):
    """The same of any file; of one that calls nothing, nothing."""
    text = path.read_text(errors="replace")
    if path.suffix == ".py" or re.match(r"#!.*python", text):
        return python_calls(text)
    if path.suffix in (".cpp", ".h"):
        return cpp_calls(text)
    if re.match(r"#!.*\b(ba)?sh\b", text):
        here = {name for name in commands(text) if shutil.which(name)}
        return here, set(commands(text))
    return set(), set()


def faults(root, folders=("tools", "tests", "common", ".ci", "lockstep")):
    given, elsewhere = {**table(MINIMAL), **table(LISTED), **table(LOOKED_FOR)}, table(ELSEWHERE)
    files = [path for name in folders for path in (sorted((root / name).rglob("*")) or [root / name])
             if path.is_file()]
    for path in files:
        if path == Path(__file__).resolve():
            continue
        sure, perhaps = calls(path)
        for name in sorted(sure | perhaps):
            if name in elsewhere:
                yield f"{path.relative_to(root)}: {name} is of {elsewhere[name]}, which no list of packages has"
            elif name in sure and name not in given:
                yield f"{path.relative_to(root)}: {name} is in no table of tests/tools/test_programs.py"


class TestPrograms(unittest.TestCase):
    def test_every_program_is_there_or_looked_for(self):
        self.assertEqual([], list(faults(ROOT)))

    @unittest.skipUnless(shutil.which("dpkg-query"), "no packages of Debian: no dpkg-query")
    def test_the_tables_name_the_packages_that_debian_has_them_in(self):
        told = {**table(MINIMAL), **table(LISTED)}
        paths = [f"{folder}/{name}" for name in told for folder in ("/bin", "/sbin", "/usr/bin", "/usr/sbin")]
        done = subprocess.run(["dpkg-query", "-S", *paths], capture_output=True, text=True)
        found = {}
        for packages, path in re.findall(r"^([^:\n]+).*: (.*)$", done.stdout, re.M):
            found.setdefault(path.rpartition("/")[2], set()).update(packages.split(", "))
        wrong = {name: found[name] for name in told.keys() & found.keys()
                 if not found[name].intersection(told[name].split())}
        self.assertEqual({}, wrong)
        done = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Priority}\n"],
                              capture_output=True, text=True)
        required = {line.split()[0] for line in done.stdout.splitlines() if line.endswith("required")}
        self.assertEqual(set(), set(table(MINIMAL).values()) - required - {"apt"})

    def test_the_listed_packages_are_listed(self):
        lines = (ROOT / "tools/packages.txt").read_text().splitlines()
        listed = {line.split("|")[1].strip() for line in lines if not line.startswith("#")}
        unlisted = [package for package in table(LISTED).values() if not listed.intersection(package.split())]
        self.assertEqual({"binutils"}, set(unlisted))  # which g++ needs


class TestTheTestItself(unittest.TestCase):
    def found(self, name, text):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tests", name)
            path.parent.mkdir()
            path.write_text(text)
            return [line.split(": ")[1].split()[0] for line in faults(Path(folder))]

    def test_what_is_there_is_no_fault(self):
        self.assertEqual([], self.found("a.py", "subprocess.run(['git', 'init'])\nshow('plain', 'words')\n"))
        self.assertEqual([], self.found("a.cpp", 'run_process({"sh", "-c", "sleep 1; kill $!"}, 1);'))
        self.assertEqual([], self.found("a", "#!/bin/sh\n# pgrep x\ncat <<END\npgrep\nEND\necho 'a; pgrep'\n"))

    def test_programs_that_no_list_has(self):
        for name, text in (("a.py", "subprocess.run(['pgrep', '-f', 'x'])"),
                           ("a.py", "words = ['pgrep', '-f', 'x']"),
                           ("a.py", "call(self, 'pgrep', 'x')"),
                           ("a.py", "call('sh', '-c')\nx = ['bash', '-ec', f'exec {a} && ! pgrep {b}']"),
                           ("a.py", "SCRIPT = '#!/bin/sh\\nif pgrep x; then exit; fi\\n'"),
                           ("a.cpp", 'run_process({"pgrep", "x"}, 1);'),
                           ("a.cpp", 'run(Words{"sh", "-c", "sleep 1; "\n  "pgrep x"});'),
                           ("a", "#!/usr/bin/env bash\nfound=$(LANG=C pgrep x) || exit\n"),
                           ("a", "#!/bin/sh\ncase $1 in x) pgrep x ;; esac\n"),
                           ("a", "#!/bin/sh\necho \"it is $(pgrep x)\"\n")):
            with self.subTest(text):
                self.assertEqual(["pgrep"], self.found(name, text))

    def test_a_name_that_no_table_knows(self):
        for name, text in (("a.py", "subprocess.check_output(['frobnicate'])"),
                           ("a.cpp", 'run_process(Words{"frobnicate"} + more, 1);')):
            self.assertEqual(["frobnicate"], self.found(name, text))


if __name__ == "__main__":
    unittest.main()
