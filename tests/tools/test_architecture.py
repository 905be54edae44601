"""The includes keep to the layers that common/README.md lists; every test is in a suite, and every
tool in the list of tools/README.md."""

import re
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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


class TestTheTestItself(unittest.TestCase):
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

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, text in self.FILES.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)

    def plant(self, name, text):
        with open(self.root / name, "a") as file:
            file.write(text + "\n")
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


class TestSuites(unittest.TestCase):
    def test_every_file_of_tests_is_in_a_suite(self):
        told = "".join(path.read_text() for path in ROOT.glob("tests/*/meson.build"))
        for path in [*ROOT.glob("tests/*/*_test.cpp"), *ROOT.glob("tests/*/test_*.py")]:
            short = path.stem.removeprefix("test_") if path.parent.name == "tools" else path.name
            stage = re.fullmatch(r"stage\d\d_test", path.stem)  # named by a loop over the stages
            self.assertTrue(f"'{short}'" in told or f"/{short}'" in told or stage, path)


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
