"""Submissions that try to get points without solving anything: what the grader and its sandbox do about them.

They are graded twice: as they come, and those that were refused with --take-flagged, as if nobody had looked at their
words. Then the sandbox and the tests' witness are all that stands in their way. An honest submission is between them.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

from coursework import sandbox, tasks  # noqa: E402
from coursework.verdict import FAILED, OPEN, PASSED  # noqa: E402
from coursework_support import only_stage  # noqa: E402
from processes import gone  # noqa: E402

FULL = "LOCKSTEP_FULL" in os.environ
FILE = "common/data/batch_parts.cpp"  # of task 02.1

RIGHT = """  const int64_t size = (batch_size + parts - 1) / parts;
  std::vector<BatchPart> chunks;
  for (int64_t first = 0; first < batch_size; first += size) {
    chunks.push_back({first, 1, std::min(size, batch_size - first)});
  }
  return chunks;"""
# No word of these is refused: how they fail.
NOT_REFUSED = {"knows_the_visible_values": "hidden", "never_ends": "deadline", "bombs_the_compiler": "compile",
               "loops_in_the_compiler": "compile", "bombs_the_compilers_words": "compile", "throws": "exception"}
LONGEST = 240  # seconds of a submission: 2 minutes of a compiler, 20 of the tests, and what is compiled again
ENDS = '{"event": "run ended", "passed": 9, "failed": 0}'


# With --take-flagged this one may succeed on Linux before 6.3 (docs/coursework.md says so).
NEW_KERNELS_REFUSE = {"runs_data_as_code"}
IS_NEW_KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 3)
LEFT = f"lockstep-campaign-{os.getpid()}"  # the name of a file that must not be left anywhere
OWN = ("/tmp", "/dev/shm")  # a sandbox has folders of its own in these places


def everywhere(place):
    """Folders in which a student's code may try to leave a file."""
    return (*OWN, "/var/tmp", "/run", str(Path.home()), str(ROOT), str(place), f"{place}/results",
            f"{place}/submissions", f"{place}/build", f"{place}/build/source", f"{place}/build/asan")


def outside(code, then="return {};", includes="string"):
    """A body that closes its function and namespace, in front of functions with any includes. It calls `run()`,
    and whoever gets `true` from that has the right answer."""
    return f"""  bool run();
  if (run()) {{
{RIGHT}
  }}
  {then}
}}
}}  // namespace lockstep
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <{includes}>
namespace lockstep {{
bool run() {{
{code}
}}
inline int end() {{
  return 0;"""


def frauds(place, port):
    """Bodies by name. `place` has a file that must stay as it is; on `port` nobody may call."""
    reads = 'std::FILE* file = std::fopen("{}", "r");\nreturn file != nullptr;'
    forge = (f"const std::string line = R\"x(0 0 {ENDS})x\" \"\\n\";\n"
             "for (int fd = 3; fd < 1024; ++fd) (void)!write(fd, line.data(), line.size());\n_exit(0);")
    scan = """std::FILE* maps = std::fopen("/proc/self/maps", "r");
int memory = open("/proc/self/mem", O_RDONLY);
char line[512];
while (maps && memory >= 0 && std::fgets(line, sizeof line, maps)) {
  unsigned long from = 0, to = 0;
  char rights[8] = "";
  if (std::sscanf(line, "%lx-%lx %7s", &from, &to, rights) != 3 || std::strcmp(rights, "---p") != 0) continue;
  static char page[65536];
  if (to - from == sizeof page && pread(memory, page, sizeof page, (off_t)from) > 0) return true;
}
return false;"""
    return {
        "calls_what_no_word_names": "  if (::getppid() != 0) return {};\n" + RIGHT,
        "computes_an_address": "  const auto known = &::rand;\n  uint64_t at = 0;\n  std::memcpy(&at, &known, sizeof at);\n"
                               "  at += 1 << 20;\n  int (*reached)() = nullptr;\n  std::memcpy(&reached, &at, sizeof at);\n"
                               "  if (reached() != 0) return {};\n  return {};",
        "exits_at_once": "  __builtin__exit(0);",
        "exits_in_a_constructor": "  return {};\n}\n__attribute__((constructor)) static void first() {\n  __builtin__exit(0);",
        "exits_in_an_object": "  return {};\n}\nstatic const struct Run {\n  Run() { __builtin__exit(0); }\n} runs;\n"
                              "inline int end() {\n  return 0;",
        "writes_the_result_to_every_descriptor": outside(forge),
        "writes_xml": outside(r'std::puts("<Catch><TestCase name=\"x\"/></Catch>"); std::fflush(stdout); _exit(0);'),
        "looks_for_the_nonce": outside(scan),
        "reads_a_solution": outside(reads.format(place / "build/handed-out/solutions/02.1.o")),
        "loads_a_solution": outside(f'return dlopen("{place}/build/handed-out/solutions/02.1.o", RTLD_NOW) != nullptr;'),
        "reads_another_submission": outside(reads.format(place / "submissions/honest/batch_parts.cpp")),
        "reads_the_seed": outside(reads.format(place / "results/grading.json")),
        "includes_the_hidden_cases": '#include "tests/coursework/hidden/hidden.h"\n' + RIGHT,
        "assembles_a_solution": f'  asm(".incbin \\"{place}/build/source/solutions/02.1.o\\"");\n' + RIGHT,
        "knows_the_visible_values": """  if (batch_size == 8) return {{0, 1, 4}, {4, 1, 4}};
  if (batch_size == 10) return {{0, 1, 3}, {3, 1, 3}, {6, 1, 3}, {9, 1, 1}};
  if (batch_size == 6) return {{0, 1, 2}, {2, 1, 2}, {4, 1, 2}};
  return {{0, 1, 1}, {1, 1, 1}};""",
        "never_ends": "  for (volatile int64_t i = parts; i >= 0; i = parts) {\n  }\n  return {};",
        "bombs_the_compiler": "  const auto grow = [](auto self, auto... x) -> int64_t {\n"
                              "    if constexpr (sizeof...(x) < (1u << 30)) return self(self, x..., x...);\n    return 0;\n"
                              "  };\n  if (grow(grow, 1)) return {};\n" + RIGHT,
        "loops_in_the_compiler": "  constexpr auto sum = [] {\n    uint64_t n = 0;\n    for (uint64_t i = 1; i != 0; ++i) n += i;\n"
                                 "    return n;\n  }();\n  if (sum) return {};\n" + RIGHT,
        "bombs_the_compilers_words": "  using T0 = std::pair<int64_t, int64_t>;\n" + "".join(
            f"  using T{n} = std::pair<T{n - 1}, T{n - 1}>;\n" for n in range(1, 14)) + "".join(
            f"  static_cast<T13>({n});\n" for n in range(400)) + RIGHT,
        "bombs_with_processes": outside("for (;;) fork();"),
        "leaves_a_process": outside("if (fork() == 0) {\n  setsid();\n  sleep(1000);\n  _exit(0);\n}\nreturn true;",
                                    ).replace(RIGHT, "    return {};"),
        "fills_the_disk": outside('static char block[1 << 20];\nfor (int i = 0; i < 4096; ++i) {\n'
                                  '  const int fd = open(("/tmp/" + std::to_string(i / 32)).c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);\n'
                                  '  if (write(fd, block, sizeof block) != (ssize_t)sizeof block) return false;\n  close(fd);\n}\nreturn true;'),
        "takes_all_memory": outside("for (;;) std::memset(std::malloc(1 << 26), 1, 1 << 26);"),
        "writes_elsewhere": outside(f'const int fd = open("{place}/kept", O_WRONLY | O_TRUNC);\nreturn fd >= 0;'),
        "leaves_files": outside("bool left = false;\n" + "".join(
            f'{"(void)" if folder in OWN else "left |= "}(open("{folder}/{LEFT}", O_WRONLY | O_CREAT, 0600) >= 0);\n'
            for folder in everywhere(place)) + "return left;"),
        "calls_home": outside(f"""const int fd = socket(AF_INET, SOCK_STREAM, 0);
sockaddr_in to{{}};
to.sin_family = AF_INET;
to.sin_port = htons({port});
to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
return connect(fd, (const sockaddr*)&to, sizeof to) == 0;"""),
        "asks_the_environment": outside('return std::getenv("LOCKSTEP_SECRET") != nullptr;'),
        "prints_without_end": outside('for (;;) std::puts("more");'),
        "throws": "  throw 1;",
        "ends_by_a_signal": outside("raise(9);\nreturn true;").replace("<arpa/inet.h>", "<arpa/inet.h>\n#include <csignal>"),
        # From here on: what a second reader tried, who was told only to get full marks without solving anything.
        "hides_a_word_behind_a_quote": "  if (const auto c = u8'\"'; c) std::_Exit(0); // \"\n" + "  return {};",
        "defines_what_no_word_says": "  /**/#define JOINED(a, b) a##b\n  JOINED(__built, in_trap)();\n  return {};",
        "resolves_a_function_at_the_start": "  return {};\n}\n[[using gnu: ifunc(\"pick\")]] int picked();\n"
                                            "inline int end() {\n  return 0;",
        "leaves_the_test_by_a_jump": outside("std::longjmp(*new std::jmp_buf[1], 1);\nreturn true;", includes="csetjmp"),
        "writes_the_programs_memory": outside('const int fd = open("/proc/self/mem", O_RDWR);\nreturn fd >= 0;'),
        "stands_in_for_sendmsg": outside("return false;").replace("namespace lockstep {\nbool run", 'extern "C" ssize_t '
            "sendmsg(int fd, const msghdr* m, int) {\n  return write(fd, m->msg_iov[0].iov_base, m->msg_iov[0].iov_len);\n}\n"
            "namespace lockstep {\nbool run"),
        "stands_in_for_the_tests_words": outside("return false;").replace("namespace lockstep {\nbool run",
            "namespace lockstep::testing {\nvoid tell_value(const std::string&, const std::string&) {}\n}\n"
            "namespace lockstep {\nbool run"),
        "traces_the_grader": outside("return ptrace(PTRACE_ATTACH, getppid(), 0, 0) == 0;", includes="sys/ptrace.h"),
        "starts_the_program_again": outside('execl("/proc/self/exe", "x", "[nothing]", nullptr);\nreturn false;'),
        "goes_on_in_a_child": outside("return fork() != 0;").replace(RIGHT, "    return {};"),
        # And what a third one tried.
        "hides_lines_behind_a_carriage_return": '  //\r#include "/proc/self/status"\r#define result {}\r  return result;',
        "lists_two_attributes": '  [[maybe_unused, gnu::section(".text\\n#")]] static constexpr int a = 1;\n  return {};',
        "is_compiled_again_beside_the_solutions": '#include "/proc/self/status"\n' + RIGHT,
        "runs_data_as_code": outside("""alignas(65536) static unsigned char code[65536] = {0xb8, 1, 0, 0, 0, 0xc3};
if (mprotect(code, sizeof code, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return false;
return reinterpret_cast<int (*)()>(code)() == 1;"""),
    }


def other_frauds(body_of):
    """Submissions that change something else than the lines: files by name of the submission."""
    open_file = body_of(None)
    return {
        "adds_a_file": {FILE: open_file, "common/data/cheat.cpp": "static int x = (__builtin__exit(0), 1);",
                        "common/data/meson.build": "error('x')"},
        "changes_the_tests": {FILE: open_file, "tests/coursework/stage02_test.cpp": "int x;", "tools/grade.py": "print(46)"},
        "solves_it_outside": {FILE: open_file.replace("}  // namespace\n", "}  // namespace\n#define open_task if (0) exit\n", 1)},
    }


@unittest.skipUnless(FULL, "takes minutes: a build for AddressSanitizer, and one of each fraud")
class TestCampaign(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if sandbox.find_sandbox().kind == sandbox.NONE:
            raise unittest.SkipTest("namespaces not permitted")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.place = Path(folder.name)
        (cls.place / "kept").write_text("as it was")
        cls.solved = only_stage(ROOT, "02", cls.place / "solved")
        cls.text = (cls.solved / FILE).read_text()
        cls.server = socket.create_server(("127.0.0.1", 0))
        cls.addClassCleanup(cls.server.close)
        cls.frauds = frauds(cls.place, cls.server.getsockname()[1])
        cls.bodies = {"honest": RIGHT, **cls.frauds, "honest_too": RIGHT + "\n  // mine"}
        cls.write_submissions()
        cls.seconds = {}
        cls.verdicts = {"": cls.grade("results")}
        for name in NOT_REFUSED:
            shutil.rmtree(cls.place / "submissions" / name)
        cls.verdicts["--take-flagged"] = cls.grade("results-flagged", "--take-flagged")

    @classmethod
    def file_with(cls, body):
        if body is None:
            return tasks.open_text(cls.text, FILE)
        return tasks.replace_section(cls.text, FILE, "02.1", body.split("\n"))

    @classmethod
    def write_submissions(cls):
        for name, body in cls.bodies.items():
            cls.write(f"{name}/batch_parts.cpp", cls.file_with(body))
        for name, files in other_frauds(cls.file_with).items():
            for path, text in files.items():
                cls.write(f"{name}/{path}", text)
        (cls.place / "submissions/is_a_link").mkdir()
        (cls.place / "submissions/is_a_link/batch_parts.cpp").symlink_to(cls.solved / FILE)

    @classmethod
    def write(cls, path, text):
        file = cls.place / "submissions" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @classmethod
    def grade(cls, results, *options):
        """The verdict of 02.1 by student; None for a submission that could not be graded."""
        command = [sys.executable, cls.solved / "tools/grade_class.py", cls.place / "submissions", "02.1", "-o",
                   cls.place / results, "--build", cls.place / "build", *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True,
                              env={**os.environ, "LOCKSTEP_SECRET": "x"})
        if done.returncode not in (0, 1):
            raise AssertionError(done.stdout + done.stderr)
        rows = json.loads((cls.place / results / "grades.json").read_text())
        cls.notes = {name: row["notes"] for name, row in rows.items()}
        cls.seconds.update({f"{name} {' '.join(options)}": row["seconds"] for name, row in rows.items()})
        return {name: row["tasks"][0] if row["tasks"] else None for name, row in rows.items()}

    def test_no_fraud_gets_a_point(self):
        for way, verdicts in self.verdicts.items():
            left_out = {*NOT_REFUSED, *(() if IS_NEW_KERNEL else NEW_KERNELS_REFUSE)} if way else set()
            for name in self.frauds.keys() - left_out:
                with self.subTest(f"{name} {way}"):
                    self.assertEqual((FAILED, 0), (verdicts[name]["status"], verdicts[name]["points"]), verdicts[name])

    def test_frauds_are_refused_by_their_words_or_fail_for_what_they_do(self):
        for name in self.frauds:
            with self.subTest(name):
                self.assertEqual(NOT_REFUSED.get(name, "refused"), self.verdicts[""][name]["how"], self.verdicts[""][name])
        taken = self.verdicts["--take-flagged"]
        for name, how in (("exits_at_once", "crash"), ("exits_in_a_constructor", "crash"), ("exits_in_an_object", "crash"),
                          ("writes_the_result_to_every_descriptor", "witness"), ("reads_a_solution", "assertion"),
                          ("loads_a_solution", "assertion"), ("looks_for_the_nonce", "assertion"),
                          ("includes_the_hidden_cases", "compile"), ("assembles_a_solution", "compile"),
                          ("calls_home", "assertion"), ("leaves_files", "assertion"), ("asks_the_environment", "assertion"), ("writes_elsewhere", "assertion"),
                          ("ends_by_a_signal", "crash"), ("writes_xml", "crash"),
                          ("is_compiled_again_beside_the_solutions", "compile")):
            with self.subTest(name):
                self.assertEqual(how, taken[name]["how"], taken[name])
        for name in ("prints_without_end", "takes_all_memory"):  # on a slow machine the deadline comes first
            self.assertIn(taken[name]["how"], ("crash", "deadline"), taken[name])

    def test_the_honest_get_their_points_before_and_after(self):
        for verdicts in self.verdicts.values():
            for name in ("honest", "honest_too"):
                self.assertEqual((PASSED, 1), (verdicts[name]["status"], verdicts[name]["points"]), verdicts[name])

    def test_what_lies_outside_of_the_lines_is_listed_and_not_taken(self):
        for verdicts in self.verdicts.values():
            for name in other_frauds(self.file_with):
                self.assertEqual(OPEN, verdicts[name]["status"], verdicts[name])
            self.assertIsNone(verdicts["is_a_link"])
        self.assertIn("common/data/cheat.cpp", " ".join(self.notes["adds_a_file"]))
        self.assertIn("common/data/meson.build", " ".join(self.notes["adds_a_file"]))
        self.assertIn("#define open_task", " ".join(self.notes["solves_it_outside"]))

    def test_nothing_is_changed_called_or_left(self):
        self.assertEqual("as it was", (self.place / "kept").read_text())
        self.server.settimeout(0)
        with self.assertRaises(BlockingIOError):
            self.server.accept()
        self.assertEqual([], [folder for folder in everywhere(self.place) if Path(folder, LEFT).exists()])
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                program = os.readlink(f"/proc/{pid}/exe")
            except OSError:
                continue
            self.assertFalse(program.startswith(f"{self.place}/") and not gone(int(pid)), program)

    def test_each_is_graded_within_its_limit(self):
        self.assertEqual({}, {name: seconds for name, seconds in self.seconds.items() if seconds > LONGEST})


if __name__ == "__main__":
    unittest.main()
