"""What `lockstep show` draws of stage 07: the mesh beside the groups that the program makes, and messages in
the colours of their axes."""

import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import mesh_drawing  # noqa: E402
from draw_step import read_step  # noqa: E402
import step_rows  # noqa: E402
from mesh_drawing import Mesh, SENDS, section  # noqa: E402
from step_drawing import ALONG, CLASSES, Drawing, FILLS, RULES  # noqa: E402
from step_page_support import BUILD, plan_of, show  # noqa: E402
from step_rows import ALONG_AXES, AXES, SEVERAL  # noqa: E402

PROGRAM = BUILD / "07-mesh/07-mesh"
FLIGHT_HEADER, FLIGHT_ENTRY, TRANSFERS = 512, 256, 1  # bytes, and a kind: common/system/flight_recorder.h


def mesh_of(shape, per_host=8, sent=None):
    return Mesh.of({"shape": shape, "ranks_per_host": per_host}, sent)


def lab(colour):
    """Lightness and the two opponent colours, 0 to 100: distances are about what an eye sees (CIE 1976)."""
    parts = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505, 0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one, other):
    return sum((a - b) ** 2 for a, b in zip(lab(one), lab(other))) ** 0.5


def recorded(shape, ranks, *words):
    """What each of the program's ranks left in its flight recording: the texts of its header, one of which is its
    place, and the groups of ranks that its collectives went to."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "flight"
        subprocess.run([PROGRAM, "--devices", ",".join(f"cpu:{rank}" for rank in range(ranks)), "--mesh", shape, "--data",
                        "synthetic:48:24", "--batch-size", "24", "--max-steps", "2", "--clip-norm", "1", "--width", "24",
                        "--flight", file, *words], check=True, capture_output=True)
        for rank in range(ranks):
            page = Path(f"{file}.rank{rank}" if rank else file).read_bytes()
            groups = set()
            for at in range(FLIGHT_HEADER, len(page), FLIGHT_ENTRY):
                _, record, _, _, members, kind = struct.unpack_from("=6Q", page, at)
                if record > 0 and kind != TRANSFERS:
                    groups.add(tuple(other for other in range(ranks) if members >> other & 1))
            yield rank, re.findall(rb"[ -~]{6,}", page[:FLIGHT_HEADER]), groups


class TestMesh(unittest.TestCase):
    def test_coordinates_and_groups_are_the_programs(self):
        for shape, words in (("data=2,shard=2,tensor=2", ()), ("tensor=2,data=1,shard=3", ()),
                             ("shard=2,pipeline=2,data=2", ("--accumulate", "2"))):
            mesh = mesh_of(shape)
            long_axes = mesh.long_axes()
            for rank, texts, groups in recorded(shape, mesh.ranks(), *words):
                self.assertIn(mesh.place(rank).encode(), texts)
                along = {axes: tuple(mesh.group(rank, axes)) for axes in [
                    *((axis,) for axis in long_axes), ("data", "shard"), ("shard", "tensor", "pipeline"), AXES]}
                self.assertLessEqual(groups, set(along.values()))
                for axis in {"data", "shard", "tensor"} & set(long_axes):  # along pipeline there are sends
                    self.assertIn(along[axis,], groups)
                    self.assertEqual(along[axis,][0], mesh.first_of(rank, (axis,)))

    def test_the_last_axis_is_the_nearest(self):
        mesh = mesh_of("data=2,shard=2,tensor=2", per_host=4)
        self.assertEqual([[1, 5], [5, 7], [4, 5], [1, 3, 5, 7]],  # 07-mesh/README.md has them, too
                         [list(mesh.group(rank, axes)) for rank, axes in
                          ((5, ("data",)), (5, ("shard",)), (5, ("tensor",)), (5, ("data", "shard")))])
        self.assertEqual("data 1, shard 0, tensor 1", mesh.place(5))
        self.assertEqual([[1, 4], [0, 1, 2]], [list(mesh_of("tensor=2,data=3").group(1, (axis,))) for axis in
                                               ("tensor", "data")])
        self.assertEqual((8, 2, 3), (mesh.ranks(), mesh.hosts(), mesh_of("data=5", 2).hosts()))

    def test_the_mesh_that_none_was_asked_for_is_the_programs(self):
        plan = plan_of("07", "--nodes", 3, devices=2)
        self.assertEqual(({"data": 3, "shard": 2}, 2), (plan.mesh.sizes, plan.mesh.per_host))
        self.assertIn("The mesh data=3,shard=2: 6 ranks on 3 hosts", section(plan.mesh))


def cells_of(drawing):
    """{rank: (left, top, width, height, group, classes)}"""
    found = re.findall(r'<g class="bar ([^"]*)" data-group="(\d+)" data-rank="(\d+)".*?<rect x="([\d.]+)" y="([\d.]+)" '
                       r'width="([\d.]+)" height="([\d.]+)"', drawing, re.DOTALL)
    return {int(rank): (*map(float, place), int(group), classes.split()) for classes, group, rank, *place in found}


class TestGrids(unittest.TestCase):
    MESHES = (("data=8", 8), ("data=2,tensor=4", 4), ("tensor=4,data=2", 8), ("data=3,shard=2", 3),
              ("data=2,shard=2,tensor=2", 4), ("shard=2,tensor=3,data=2", 6), ("pipeline=2,data=2,shard=3,tensor=2", 12),
              ("data=512,shard=8", 8), ("shard=4096", 8), ("data=8,pipeline=8,shard=8,tensor=8", 8),
              ("data=2,shard=1,tensor=2", 2))

    def grids(self):
        for shape, per_host in self.MESHES:
            mesh = mesh_of(shape, per_host)
            for grid in mesh_drawing.grids(mesh):
                with self.subTest(shape, axes=grid.axes):
                    yield mesh, grid

    def test_ranks_of_a_group_have_its_mark_and_those_of_rank_0_are_filled(self):
        for mesh, grid in self.grids():
            cells = cells_of(grid.svg())
            self.assertIn(0, cells)
            self.assertIn(mesh.ranks() - 1, cells)
            self.assertLessEqual(len(cells), 64)
            for rank, (*_, group, classes) in cells.items():
                self.assertEqual(group, next(mesh.group(rank, grid.axes)))
                self.assertEqual(group == 0, "together" in classes)
                self.assertIn(grid.kind, classes)

    def test_lines_join_all_ranks_of_a_group_and_no_others(self):
        for mesh, grid in self.grids():
            cells = cells_of(grid.svg())
            joined = {rank: {rank} for rank in cells}
            for group, x, y, dx, dy in self.lines(grid.svg()):
                ends = [self.rank_at(cells, x, y), self.rank_at(cells, x + dx, y + dy)]
                self.assertEqual([group, group], [cells[end][4] for end in ends])
                together = joined[ends[0]] | joined[ends[1]]
                joined.update(dict.fromkeys(together, together))
            for rank, (*_, group, _) in cells.items():
                self.assertEqual({other for other in cells if cells[other][4] == group}, joined[rank])

    @staticmethod
    def lines(drawing):
        """(group, where it begins, how far it goes)"""
        for group, x, y, way, steps in re.findall(r'data-group="(\d+)" d="M([\d.]+),([\d.]+) ([hvc])([^"]*)"', drawing):
            last = re.findall(r"-?[\d.]+", steps)
            dx, dy = {"h": (last[-1], 0), "v": (0, last[-1]), "c": last[-2:]}[way]
            yield int(group), float(x), float(y), float(dx), float(dy)

    @staticmethod
    def rank_at(cells, x, y):
        """The only one that has this point inside or on its edge."""
        [found] = [rank for rank, (left, top, width, height, *_) in cells.items()
                   if left <= x <= left + width and top <= y <= top + height]
        return found

    def test_a_host_has_a_frame_around_its_ranks_and_no_others(self):
        for mesh, grid in self.grids():
            drawn = grid.svg()
            frames = [tuple(map(float, frame)) for frame in
                      re.findall(r'<rect class="frame" x="(\S+)" y="(\S+)" rx="4" width="(\S+)" height="(\S+)"/>', drawn)]
            if mesh.hosts() == 1:
                self.assertEqual([], frames)
                continue
            names, cells, found = re.findall(r">host (\d+)<", drawn), cells_of(drawn), {}
            for name, (left, top, width, height) in zip(names, frames, strict=True):
                for rank, (x, y, *_) in cells.items():
                    if left < x < left + width and top < y < top + height:
                        found.setdefault(rank, []).append(int(name))
            self.assertEqual({rank: [rank // mesh.per_host] for rank in cells}, found)

    def test_all_of_a_drawing_is_inside_of_it_and_no_ranks_overlap(self):
        for _, grid in self.grids():
            cells = list(cells_of(grid.svg()).values())
            for number, (left, top, width, height, *_) in enumerate(cells):
                self.assertTrue(0 <= left and left + width < grid.layout.right and 0 <= top
                                and top + height < grid.layout.bottom)
                for x, y, *_ in cells[:number]:
                    self.assertTrue(abs(x - left) > width or abs(y - top) > height)

    def test_each_axis_and_what_goes_along_several_has_a_grid(self):
        def axes(shape, sent=()):
            return [grid.axes for grid in mesh_drawing.grids(mesh_of(shape, sent=dict.fromkeys(sent, "1 KiB")))]
        self.assertEqual([("data",), ("shard",), ("tensor",), ("data", "shard"), ("shard", "tensor")],
                         axes("data=2,shard=2,tensor=2", ("shard", "shard and tensor", "data and shard")))
        self.assertEqual([("shard",), ("data",), ("shard", "data")], axes("shard=2,data=2"))
        self.assertEqual([("tensor",)], axes("data=1,tensor=2"))
        self.assertEqual("", section(mesh_of("data=1,shard=1")))

    def test_a_part_of_many_ranks_is_drawn_and_the_page_says_so(self):
        drawn = section(mesh_of("data=512,shard=8"))
        self.assertIn("4,096 ranks on 512 hosts", drawn)
        self.assertIn("64 of 4,096 ranks are drawn", drawn)
        self.assertIn("along data</b>: 8 groups of 512", drawn)
        self.assertIn("its group along data: 0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, and so on", drawn)
        self.assertLess(len(drawn), 200000)
        self.assertNotIn("are drawn", section(mesh_of("data=8,shard=8")))
        begin = time.process_time()
        section(mesh_of("data=1024,shard=512,tensor=2"))  # 2^20
        self.assertLess(time.process_time() - begin, 20)

    def test_what_an_axis_sends_is_the_readmes(self):
        rows = (ROOT / "07-mesh/README.md").read_text().splitlines()
        for axis in AXES:
            [row, *_] = [row for row in rows if row.startswith(f"| `{axis}`") and SENDS[axis] in row]
            self.assertEqual(SENDS[axis], row.split("|")[4].strip())


class TestMessages(unittest.TestCase):
    def test_messages_have_their_axis_and_bytes_as_the_program_counts_them(self):
        plan = plan_of("07", "--mesh", "data=2,shard=2,tensor=2", "--clip-norm", 1, devices=8)
        compute, communication, _ = plan.rows
        self.assertEqual({""}, {bar.along for bar in compute.bars})
        kinds = {bar.along: bar.kind for bar in communication.bars if bar.along}
        single = {axis: ALONG_AXES[axis] for axis in ("data", "shard", "tensor")}
        self.assertEqual({**single, "shard and tensor": SEVERAL}, kinds)
        self.assertEqual(set(kinds), set(plan.mesh.sent))
        self.assertTrue(all(bar.along for bar in communication.bars if bar.takes > 0))
        for name in ("gather fc2", "reduce fc2"):
            axes = {bar.along for bar in communication.bars if bar.name == name}
            self.assertEqual({"shard"} if name.startswith("gather") else {"shard", "data"}, axes)
        self.assertIn("KiB sent along data", next(bar.text for bar in communication.bars if bar.along == "data"))
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics"
            subprocess.run([PROGRAM, "--devices", "sim:8", "--mesh", "data=2,shard=2,tensor=2", "--clip-norm", "1", "--data",
                            "blank:320:64", "--max-steps", "5", "--metrics", metrics], check=True, capture_output=True)
            counted = json.loads(metrics.read_text())["along"]
        for axis in ("data", "tensor"):
            sent = sum(bar.takes for bar in communication.bars if bar.along == axis)
            self.assertAlmostEqual(counted[axis]["sent"] / 1024, sent, delta=0.1)  # and the loss

    def test_messages_of_a_measured_step_have_their_axes(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            subprocess.run([PROGRAM, "--devices", "cpu:0,cpu:1,cpu:2,cpu:3", "--mesh", "data=2,shard=2", "--data",
                            "synthetic:160:10", "--batch-size", "16", "--max-steps", "6", "--trace", trace], check=True,
                           capture_output=True)
            for bars_of in (step_rows.parts_of, step_rows.operations_of):
                rows = [row for row in read_step(trace, bars_of).rows if row.name.endswith("communication")]
                self.assertEqual(4, len(rows))
                for row in rows:
                    self.assertEqual({"data", "shard"}, {bar.along for bar in row.bars} - {""})
                    self.assertNotIn(step_rows.MESSAGES, {bar.kind for bar in row.bars})

    def test_formulas_have_the_bytes_of_all_axes_and_the_most_that_is_whole(self):
        for devices, shape in ((4, "shard=4"), (4, "data=2,shard=2"), (8, "data=2,shard=2,tensor=2"), (4, "tensor=4")):
            plan = plan_of("07", "--mesh", shape, devices=devices)
            sent = sum(bar.takes for bar in plan.rows[1].bars)
            self.assertAlmostEqual(plan.rows[1].predicted_most, sent, delta=0.3)
            for memory in plan.rows[2:]:
                self.assertAlmostEqual(memory.predicted_most, max(bar.takes for bar in memory.bars), places=3)

    def test_a_range_says_along_which_axes_its_messages_go(self):
        self.assertEqual(["data", "data and shard", "", "", ""],
                         [step_rows.along(layer) for layer in ("reduce fc1/along data", "along data and shard", "conv1", "",
                                                               "along data/conv1")])
        slices = [(0, 1, "scale", "reduce fc1"), (1, 1, "reduce_scatter", "reduce fc1/along shard"),
                  (2, 1, "all_reduce", "reduce fc1/along data"), (3, 1, "all_reduce", "along tensor")]
        expected = [(name, ALONG_AXES[axis]) for name, axis in
                    (("reduce fc1", "shard"), ("reduce fc1", "data"), ("along tensor", "tensor"))]
        self.assertEqual(expected, [bar[2:4] for bar in step_rows.parts_of(slices)])
        self.assertEqual([bar.along for bar, _ in step_rows.lane_bars(slices, step_rows.parts_of)], ["shard", "data", "tensor"])

    def test_axes_have_colours_that_differ(self):
        beside = ("forward", "backward", step_rows.MESSAGES, step_rows.OTHER, step_rows.MEMORY)  # in the same drawing
        axes, others = ([fill for fill, _ in found] for found in (ALONG.values(), (FILLS[kind] for kind in beside)))
        for one, other in [*itertools.combinations(axes, 2), *itertools.product(axes, others)]:
            self.assertGreater(difference(one, other), 20, (one, other))

    def test_a_picture_of_a_step_in_a_mesh_has_these_colours(self):
        bars = [step_rows.Bar(0, 1, "a", ALONG_AXES["shard"])]
        self.assertIn('class="bar shard"', Drawing(step_rows.Step("", "ms", 1, [step_rows.Row("", bars)]), "").svg())
        self.assertIn(".step .shard rect { fill: var(--shard); }", RULES)
        self.assertEqual({*AXES, "several"}, {CLASSES[kind] for kind in ALONG})


class TestPage(unittest.TestCase):
    def test_only_a_mesh_is_drawn(self):
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "a.html"
            for words, drawn in ((("--mesh", "data=2,tensor=2", "--devices", 4), True), (("--devices", 1), False)):
                done = show("-o", page, "--stage", "07", *words)
                self.assertEqual((0, ""), (done.returncode, done.stderr))
                self.assertEqual(drawn, "The mesh data=2,tensor=2: 4 ranks</h2>" in page.read_text())
                self.assertEqual(not drawn, 'from rank to rank."></section>' in page.read_text())

    def test_a_mesh_that_is_none_is_one_line_of_the_program(self):
        with tempfile.TemporaryDirectory() as folder:
            for mesh, text in (("data=3", "--mesh data=3: has 3 ranks, expected 2"),
                               ("rows=2", "--mesh: found 'rows=2', expected axes"),
                               ("data=2,data=1", "--mesh: found the axis data twice"), ("", "--mesh: found an empty text"),
                               ("data=0", "--mesh: found 'data=0'")):
                done = show("-o", Path(folder) / "a.html", "--stage", "07", f"--mesh={mesh}")
                self.assertEqual((True, 1), (done.returncode != 0, done.stderr.count("\n")), done.stderr)
                self.assertIn(text, done.stderr)
                self.assertFalse((Path(folder) / "a.html").exists())


if __name__ == "__main__":
    unittest.main()
