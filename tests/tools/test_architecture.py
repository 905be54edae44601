"""The includes keep to the layers that common/README.md lists; unit tests are in folders of the
same names; every test is in a suite, and every tool in the list of tools/README.md."""

import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))
from small_tree import SmallTree
SOURCES = (".h", ".cpp", ".inl", ".cuh", ".cu")
ROOM_LINE = re.compile(r"^\d+\. \*\*(\w+)/\*\* \(uses: ([\w, ]+)\)", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
ASKS_FOR_CUDA = re.compile(r"^\s*#\s*(?:el)?if.*(?:CUDA|NVCC)", re.MULTILINE)
STAGE = re.compile(r"^(\d\d)-[\w-]+$")


def rooms_of(readme):
    """Each room of common/ with the rooms it may include, in the order of their layers."""
    return {
        name: [] if uses.strip() == "nothing" else [used.strip() for used in uses.split(",")]
        for name, uses in ROOM_LINE.findall(readme)
    }


def room_list_faults(rooms, folder):
    """The list must name the rooms that exist, and a room only rooms above it."""
    existing = {path.name for path in folder.iterdir() if path.is_dir()}
    faults = [f"common/README.md lists {room}/, which is no folder"
              for room in sorted(rooms.keys() - existing)]
    faults += [f"common/{room}/ is not in the list of common/README.md"
               for room in sorted(existing - rooms.keys())]
    above = set()
    for room, uses in rooms.items():
        faults += [f"room {room} uses {used}, which is not above it"
                   for used in uses if used not in above]
        above.add(room)
    return faults


def include_fault(part, room, target, rooms):
    """Why a file in `part` (common or a stage), and its room, may not include `target`; or None."""
    top, *rest = target.split("/")
    if top == "common":
        if part == "common" and rest[0] != room and rest[0] not in rooms.get(room, []):
            return f"room {room} may not use room {rest[0]}"
        return None
    if not STAGE.match(top):
        return "is not a path from the root of the repository (common/..., 01-single-gpu/...)"
    if part == "common":
        return "common/ knows of no stage"
    if STAGE.match(top).group(1) > STAGE.match(part).group(1):
        return "a stage includes only stages with a lower number"
    return None


def include_faults(root):
    """One line per forbidden include below common/ and the stages."""
    rooms = rooms_of((root / "common/README.md").read_text())
    faults = room_list_faults(rooms, root / "common")
    parts = ["common", *(p.name for p in root.iterdir() if STAGE.match(p.name))]
    files = [f for part in sorted(parts) for f in sorted((root / part).rglob("*"))]
    for file in files:
        if file.suffix not in SOURCES:
            continue
        part, room = file.relative_to(root).parts[:2]
        for bracket, target in INCLUDE.findall(file.read_text(errors="replace")):
            of_project = target.split("/")[0] == "common" or STAGE.match(target.split("/")[0])
            fault = None
            if bracket == '"' or of_project:
                fault = include_fault(part, room, target, rooms)
                fault = fault or ("is written in <>" if bracket == "<" else None)
            if fault is None and bracket == '"' and not (root / target).is_file():
                fault = "is not there"
            if fault:
                faults.append(f'{file.relative_to(root)}: #include "{target}": {fault}')
    return faults


def cuda_conditions(root):
    """The files below common/ and the stages that ask the preprocessor for CUDA."""
    parts = ["common", *(p.name for p in root.iterdir() if STAGE.match(p.name))]
    files = [f for part in sorted(parts) for f in sorted((root / part).rglob("*"))]
    return [str(file.relative_to(root)) for file in files if file.suffix in SOURCES
            and ASKS_FOR_CUDA.search(file.read_text(errors="replace"))]


class TestArchitecture(unittest.TestCase):
    def test_the_rooms_are_the_layers_of_the_design(self):
        rooms = rooms_of((ROOT / "common/README.md").read_text())
        self.assertEqual(list(rooms)[0], "core")
        self.assertEqual(rooms["data"], ["core"])

    def test_all_includes_keep_to_the_layers(self):
        self.assertEqual(include_faults(ROOT), [])

    def test_no_code_asks_whether_there_is_cuda(self):
        self.assertEqual(cuda_conditions(ROOT), [])


class TestTheTestItself(SmallTree):
    """A small tree, right at first; each case plants one wrong line and must see it reported."""

    FILES = {
        "common/README.md": "1. **core/** (uses: nothing)\n2. **data/** (uses: core): files\n",
        "common/core/a.h": "#include <vector>\n",
        "common/data/b.cpp": '#include "common/core/a.h"\n#include "common/data/b.h"\n',
        "common/data/b.h": "",
        "01-first/main.cpp": '#include "common/data/b.h"\n',
        "02-second/part.h": '#include "01-first/shared.h"\n',
        "01-first/shared.h": "",
    }

    def plant(self, name, text):
        self.append(name, text)
        return include_faults(self.root)

    def test_the_right_tree_is_right(self):
        self.assertEqual(include_faults(self.root), [])
        self.assertEqual(cuda_conditions(self.root), [])

    def test_a_question_for_cuda(self):
        for question in ("#ifdef __CUDACC__", "# if defined(HAVE_CUDA)", "  #elif LOCKSTEP_NVCC"):
            with self.subTest(question):
                (self.root / "common/data/b.h").write_text("int a;\n" + question + "\n#endif\n")
                self.assertEqual(cuda_conditions(self.root), ["common/data/b.h"])

    def test_a_lower_room_that_uses_a_higher_one(self):
        self.assertEqual(self.plant("common/core/a.h", '#include "common/data/b.h"'), [
            'common/core/a.h: #include "common/data/b.h": room core may not use room data'])

    def test_common_that_includes_a_stage(self):
        self.assertIn("common/ knows of no stage",
                      self.plant("common/data/b.h", '# include "01-first/shared.h"')[0])

    def test_a_stage_that_includes_a_later_one(self):
        faults = self.plant("01-first/main.cpp", '#include "02-second/part.h"')
        self.assertIn("a lower number", faults[0])

    def test_a_bare_include(self):
        for target in ("b.h", "data/b.h", "../core/a.h"):
            with self.subTest(target):
                faults = self.plant("common/data/b.cpp", f'#include "{target}"')
                self.assertIn("is not a path from the root", faults[-1])

    def test_a_project_file_in_angle_brackets(self):
        self.assertIn("<>", self.plant("01-first/main.cpp", "#include <common/core/a.h>")[0])

    def test_a_file_that_is_not_there(self):
        faults = self.plant("01-first/main.cpp", '#include "common/core/c.h"')
        self.assertIn("is not there", faults[0])

    def test_a_list_that_names_other_rooms_than_exist(self):
        (self.root / "common/extra").mkdir()
        faults = self.plant("common/README.md", "3. **gone/** (uses: core)")
        self.assertEqual(len(faults), 2, faults)

    def test_a_list_whose_order_is_not_that_of_the_layers(self):
        text = "1. **data/** (uses: core)\n2. **core/** (uses: nothing)\n"
        (self.root / "common/README.md").write_text(text)
        self.assertEqual(include_faults(self.root), ["room data uses core, which is not above it"])


def unit_test_faults(root):
    """One line per file below tests/unit that is in no folder of a room or a stage, and per name
    that two files have: a suite chooses cases by the names of files."""
    rooms = rooms_of((root / "common/README.md").read_text())
    stages = {path.name[:2] for path in root.iterdir() if STAGE.match(path.name)}
    faults, seen = [], {}
    for path in sorted((root / "tests/unit").rglob("*_test.cpp")):
        short = path.relative_to(root / "tests/unit")
        if len(short.parts) != 2 or short.parts[0] not in rooms.keys() | stages:
            faults.append(f"tests/unit/{short} is in no folder of a room or a stage")
        if path.name in seen:
            faults.append(f"tests/unit/{short} has the name of tests/unit/{seen[path.name]}")
        seen[path.name] = short
    return faults


def files_without_suite(root):
    """The test files that neither the meson.build of their kind names, by their path below it, nor
    that of tests/, by the path there. That of tests/tools names all those in Python."""
    of_tools = (root / "tests/tools/meson.build").read_text()
    of_all = root / "tests/meson.build"
    shared = of_all.read_text() if of_all.is_file() else ""
    missing = []
    for kind in sorted(path.parent for path in root.glob("tests/*/meson.build")):
        told = (kind / "meson.build").read_text()
        for path in sorted(kind.rglob("*_test.cpp")):
            by_loop = re.fullmatch(r"stage\d\d_test", path.stem)  # over the stages
            named = f"'{path.relative_to(kind)}'" in told or f"'{path.relative_to(root / 'tests')}'" in shared
            if not named and not by_loop:
                missing.append(str(path.relative_to(root)))
    for path in sorted(root.glob("tests/*/test_*.py")):
        short = path.stem.removeprefix("test_") if path.parent.name == "tools" else path.name
        if f"'{short}'" not in of_tools and f"/{short}'" not in of_tools:
            missing.append(str(path.relative_to(root)))
    return missing


def assertions_in_threads(text):
    """The lines, from 1, on which Catch2 asserts something in what ranks do as threads: its assertions
    belong to the main thread."""
    lines = []
    for call in re.finditer(r"(?:run_ranks|\.run)\(", text):
        depth, end = 1, call.end()
        while depth > 0 and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        lines += [text.count("\n", 0, found.start()) + 1 for found in
                  re.compile(r"\b(?:CHECK|REQUIRE|INFO|CAPTURE)\w*\(").finditer(text, call.end(), end)]
    return lines


class TestThreads(unittest.TestCase):
    def test_ranks_that_are_threads_assert_nothing(self):
        files = sorted(path for path in (ROOT / "tests").rglob("*") if path.suffix in (".cpp", ".h"))
        self.assertEqual([], [f"{path.relative_to(ROOT)}:{line}" for path in files
                              for line in assertions_in_threads(path.read_text())])

    def test_one_that_does_is_found(self):
        text = "const Texts errors = Job(3).run([&](ProcessGroup& group) {\n  CHECK(f(group) == 1);\n});\nCHECK(errors.empty());"
        self.assertEqual([2], assertions_in_threads(text))


class TestSuites(unittest.TestCase):
    def test_every_file_of_tests_is_in_a_suite(self):
        self.assertEqual(files_without_suite(ROOT), [])

    def test_unit_tests_lie_in_folders_of_rooms_and_stages(self):
        self.assertEqual(unit_test_faults(ROOT), [])


class TestTheTestOfSuites(SmallTree):
    """As above: a small tree that is right, and in each case one file that is not."""

    FILES = {
        "common/README.md": "1. **core/** (uses: nothing)\n",
        "02-second/main.cpp": "",
        "tests/unit/meson.build": "files('core/memory_test.cpp', '02/parts_test.cpp')\n",
        "tests/unit/core/memory_test.cpp": "",
        "tests/unit/02/parts_test.cpp": "",
        "tests/tools/meson.build": "foreach name : ['bench']\n",
        "tests/tools/test_bench.py": "",
    }

    def test_the_right_tree_is_right(self):
        self.assertEqual(files_without_suite(self.root), [])
        self.assertEqual(unit_test_faults(self.root), [])

    def test_a_file_that_no_suite_has(self):
        self.write("tests/unit/core/other_test.cpp")
        self.write("tests/tools/test_other.py")
        self.assertEqual(files_without_suite(self.root),
                         ["tests/unit/core/other_test.cpp", "tests/tools/test_other.py"])

    def test_a_file_that_is_listed_with_another_folder(self):
        self.write("tests/unit/core/parts_test.cpp")
        self.assertEqual(files_without_suite(self.root), ["tests/unit/core/parts_test.cpp"])

    def test_a_folder_that_is_neither_a_room_nor_a_stage(self):
        for name in ("attic/a_test.cpp", "03/b_test.cpp", "c_test.cpp", "core/more/d_test.cpp"):
            with self.subTest(name):
                self.write(f"tests/unit/{name}")
                self.assertEqual(unit_test_faults(self.root),
                                 [f"tests/unit/{name} is in no folder of a room or a stage"])
                (self.root / "tests/unit" / name).unlink()

    def test_a_name_that_two_files_have(self):
        self.write("tests/unit/core/parts_test.cpp")
        self.assertEqual(unit_test_faults(self.root),
                         ["tests/unit/core/parts_test.cpp has the name of "
                          "tests/unit/02/parts_test.cpp"])


class TestTools(unittest.TestCase):
    def test_the_readme_names_every_file_and_no_other(self):
        folder = ROOT / "tools"
        files = {str(path.relative_to(folder)) for path in folder.rglob("*")
                 if path.is_file() and "__pycache__" not in path.parts} - {"README.md"}
        named = set(re.findall(r"`([\w/-]+(?:\.\w+)?)`", (folder / "README.md").read_text()))
        self.assertEqual(set(), files - named, "not in tools/README.md")
        looks_like_one = {name for name in named if "." in name}
        self.assertEqual(set(), looks_like_one - files, "in tools/README.md, but not there")


if __name__ == "__main__":
    unittest.main()
