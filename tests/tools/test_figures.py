"""`./lockstep figures`, and the pictures that the README and the lessons show."""

import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import figure_drawing  # noqa: E402
import figures  # noqa: E402
from figure_drawing import (CLASSES, DARK, FILLS, KEPT, LIGHT, Column, Groups, Panel, Picture, columns,  # noqa: E402
                            measured)  # noqa: E402
from step_page_support import BUILD, contrast  # noqa: E402
from step_rows import ALONG_AXES, HOST, MEMORY, MESSAGES, OTHER, SEVERAL, Bar, Row, Step  # noqa: E402

FOLDER = ROOT / "docs/figures"
PAGES = [path for pattern in ("README.md", "0*/**/README.md", "docs/**/*.md") for path in sorted(ROOT.glob(pattern))]
MOST_BYTES, LEAST_TEXT, SHOWN_WIDTH = 60_000, 12, 900
SVG = "{http://www.w3.org/2000/svg}"


def shown_in(page):
    """The names of the pictures that a page shows."""
    return re.findall(r"!\[[^\]]+\]\([./]*(?:docs/)?figures/([\w-]+)\.svg\)", page.read_text())


class TestPictures(unittest.TestCase):
    def test_each_is_made_by_the_command_and_shown(self):
        names = {path.stem for path in FOLDER.iterdir()}
        self.assertEqual({*figures.PICTURES, *figures.MEASURED}, names)
        self.assertEqual(names, {name for page in PAGES for name in shown_in(page)})

    def test_the_command_stands_beside_each(self):
        for page in PAGES:
            if "slides" not in page.parts:  # there is no room
                for name in set(shown_in(page)) & set(figures.PICTURES):
                    with self.subTest(f"{page}: {name}"):
                        self.assertTrue(re.search(rf"\./lockstep figures[\w\- ]* {name}\b", page.read_text()))

    def test_none_is_large_and_all_text_can_be_read(self):
        for path in FOLDER.iterdir():
            with self.subTest(path.name):
                text = path.read_text()
                self.assertLess(len(text), MOST_BYTES)
                width = float(ElementTree.fromstring(text).get("viewBox").split()[2])
                sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?(?:\w+ )?([\d.]+)px", text)]
                self.assertTrue(sizes)
                self.assertGreaterEqual(min(sizes) * SHOWN_WIDTH / width, LEAST_TEXT)

    def test_those_that_are_drawn_follow_the_readers_mode_and_stay_within_their_width(self):
        for name in figures.PICTURES:
            with self.subTest(name):
                text = (FOLDER / f"{name}.svg").read_text()
                self.assertEqual(1, text.count("@media (prefers-color-scheme: dark)"))
                self.assertNotIn("var(", text)
                for each in ElementTree.fromstring(text).iter(SVG + "rect"):
                    if each.get("x"):
                        self.assertGreaterEqual(float(each.get("x")), 0)
                        self.assertLessEqual(float(each.get("x")) + float(each.get("width")), figure_drawing.WIDTH)

    def test_the_command_makes_what_is_there(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, ROOT / "tools/figures.py", "--build", BUILD, "--to", Path(folder, "new")],
                                  capture_output=True, text=True)
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            for name in figures.PICTURES:
                self.assertEqual((FOLDER / f"{name}.svg").read_text(), Path(folder, "new", f"{name}.svg").read_text(), name)

    def test_a_name_that_is_none_is_refused(self):
        done = subprocess.run([sys.executable, ROOT / "tools/figures.py", "rings"], capture_output=True, text=True)
        self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")))
        self.assertIn("'rings', expected one of stages, ", done.stderr)


class TestDrawing(unittest.TestCase):
    STEP = Step("a < b", "ms", 10, [Row("x & y", [Bar(0, 5, "F0", "forward", 'a "text"'),
                                                  Bar(5.5, 5.6, "too long for it", MESSAGES)])])

    def bars(self, drawn):
        """(left, width) of each."""
        kinds = "|".join(CLASSES[kind] for kind in FILLS)
        found = re.findall(rf'<rect class="(?:{kinds})" x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="(\d+)"', drawn)
        return [(float(x), float(width)) for x, width, height in found if int(height) == figure_drawing.BAR]

    def test_bars_are_to_scale_and_nothing_is_drawn_where_nothing_runs(self):
        drawn = measured([self.STEP])
        (left, width), (second, _) = self.bars(drawn)
        self.assertAlmostEqual(0.55, (second - left) / (2 * width), places=2)
        self.assertIn(">F0</text>", drawn)
        self.assertNotIn("too long for it", drawn)
        for text in ("a &lt; b", "x &amp; y", "a &quot;text&quot;"):
            self.assertIn(text, drawn)

    def test_names_of_narrow_bars_stand_below_the_row(self):
        row = Row("x", [Bar(0, 9.9, "F0", "forward"), Bar(9.9, 10, "bucket 0", MESSAGES), Bar(9.9, 10, "update", OTHER)])
        for names in (False, True):
            drawn = Picture("", [Panel("", [row], 10, names=names)], {OTHER: "update"}).svg()
            self.assertEqual(names, "bucket 0" in drawn)
            self.assertEqual(1, drawn.count("update"))  # the legend's

    def test_each_name_below_a_row_has_its_own_place_and_a_line_from_each_bar(self):
        names = ("bn2", "fc1", "fc2", "fc2", "fc1")
        row = Row("x", [Bar(1 + place / 100, 1 + place / 100 + 0.01, name, "forward") for place, name in enumerate(names)])
        drawn = Picture("", [Panel("", [row], 10, names=True, marks=[Bar(1.05, 1.05, "bucket 0", "backward")])], {}).svg()
        found = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="name">(bn2|fc1|fc2|bucket 0)<', drawn)
        self.assertEqual(["bn2", "fc1", "fc2", "fc1", "bucket 0"], [name for _, name in found])
        for (left, one), (right, other) in zip(found, found[1:]):
            self.assertGreaterEqual(float(right) - float(left), figure_drawing.width_of(one + other) / 2)
        self.assertEqual(6, drawn.count('class="lead"'))
        self.assertEqual(5, len(self.bars(drawn)))  # a mark is none

    def test_a_sliver_is_named_though_the_legend_has_its_name(self):
        row = Row("x", [Bar(0, 9.99, "F0", "forward"), Bar(9.99, 10, "update", OTHER)])
        self.assertEqual(2, Picture("", [Panel("", [row], 10, names=True)], {OTHER: "update"}).svg().count(">update<"))

    def test_a_curve_has_its_line_where_it_is_highest(self):
        for level, height in ((1, figure_drawing.CURVE), (0.5, figure_drawing.CURVE / 2)):
            row = Row("memory", [Bar(0, 1, "", MEMORY, level=level)], curve=True, full="2.5 MiB")
            drawn = Picture("", [Panel("", [row], 1)], {}).svg()
            top, bottom, *_ = [float(y) for y in re.findall(r'<line [^>]*y1="([\d.]+)"', drawn)]
            self.assertEqual(height, bottom - top)

    def test_lines_of_a_group_have_one_colour_and_one_is_not_dashed(self):
        groups = {"a": {"one": {}, "two": {}}, "b": {"one": {}, "three": {}}}
        (_, _, first, solid), (_, _, second, dashed), (heading, _, other, again), _ = figure_drawing.looks(groups)
        self.assertEqual((first, "", "b", ""), (second, solid, heading, again))
        self.assertNotEqual(("", first), (dashed, other))
        alone = [*figure_drawing.looks({"": {"one": {}, "two": {}}})]
        self.assertEqual((["", ""], 2), ([dash for *_, dash in alone], len({colour for _, _, colour, _ in alone})))

    def test_arrows_lead_from_the_last_row_to_the_first(self):
        rows = [Row(name, [Bar(0, 1, "", MESSAGES)]) for name in ("rank 0", "rank 1")]
        drawn = Picture("", [Panel("", rows, 1, arrows=(0.25, 0.5))], {}).svg()
        self.assertEqual((4, 2), (drawn.count('class="arrow"'), drawn.count(">to rank 0<")))

    def test_a_heading_stands_above_the_rows_and_notes_below_them(self):
        row = Row("x", [Bar(0, 1, "F0", "forward")])
        drawn = Picture("", [Panel("step", [row], 1, notes=("a note",))], {OTHER: "update"}, heading=("one line",)).svg()
        heights = [float(re.search(rf'y="([\d.]+)"[^>]*>{words}<', drawn)[1])
                   for words in ("update", "one line", "step", "F0", "a note", "time")]
        self.assertEqual(sorted(set(heights)), heights)

    def test_a_message_is_named_after_its_layer_and_what_the_passes_wait_for_is_a_sum(self):
        compute = Row("compute", [Bar(1, 2, "fc1", "forward"), Bar(3, 4, "fc1", "backward"), Bar(6, 7, "update", OTHER)])
        sent = Row("communication", [Bar(begin, begin + 1, name, MESSAGES) for begin, name in enumerate(
            ("all_gather", "gather fc1", "all_reduce", "reduce fc12", "all_reduce"))])
        row = figures.of_layers({"compute": compute, "communication": sent}, {"gather": "G", "reduce": "R"},
                                lambda layer: f"sum after {layer.kind}")
        self.assertEqual(["all finite?", "G1", "sum after forward", "R12", "mean of the losses"],
                         [bar.name for bar in row.bars])

    def test_a_pair_of_layers_reaches_to_the_end_of_its_sum_and_says_if_there_is_none(self):
        compute = Row("compute", [Bar(0, 1, "fc1", "forward"), Bar(1, 2, "fc2", "forward"),
                                  Bar(4, 5, "fc2", "backward"), Bar(5, 6, "fc1", "backward")])
        sent = Row("messages", [Bar(2, 3, "sum", MESSAGES)])
        self.assertEqual([(0, 3, "fc1, fc2, and a sum"), (4, 6, "fc2, fc1: no sum")], [
            (bar.begin, bar.end, bar.name) for bar in figures.pairs({"compute": compute}, sent, [("fc1", "fc2")])])

    def test_a_message_in_a_pass_has_the_name_of_the_layer_that_waits_for_it(self):
        compute = Row("compute", [Bar(0, 1, "conv1", "forward"), Bar(2, 3, "bn1", "forward"), Bar(4, 5, "bn1", "backward")])
        sent = Row("", [Bar(1, 2, "all_gather", MESSAGES), Bar(3, 4, "all_reduce", MESSAGES), Bar(5, 6, "bucket 0", MESSAGES)])
        self.assertEqual(["bn1 forward", "bn1 backward", "bucket 0"],
                         [bar.name for bar in figures.for_layers(sent, compute).bars])

    def test_the_first_messages_of_a_kind_have_names(self):
        row = Row("x", [Bar(0, 1, name, MESSAGES) for name in ("copy", "F0", "copy", "copy")])
        named = figures.with_first_names(row, {"copy": ["send outputs", "send more"]})
        self.assertEqual(["send outputs", "F0", "send more", ""], [bar.name for bar in named.bars])

    def test_a_curve_says_how_high_it_is(self):
        drawn = Picture("", [Panel("", [Row("memory", [Bar(0, 1, "", MEMORY)], curve=True, full="2.5 MiB")], 1)], {}).svg()
        self.assertRegex(drawn, r">2.5 MiB<(?s:.)*>0<")

    def test_lines_join_the_ranks_of_a_group(self):
        groups = Groups("x", 2, {ALONG_AXES["data"]: [[0, 2], [1, 3]], ALONG_AXES["tensor"]: [[0, 1], [2, 3]]})
        drawn = "".join(groups.svg(0, 0, 900))
        self.assertEqual((4, 8, 2), tuple(map(drawn.count, ('class="join"', "<rect", ">host "))))

    def test_several_steps_have_one_scale(self):
        short = Step("short", "ms", 4, [Row("x", [Bar(0, 4, "F0", "forward")])])
        (_, first), _, (_, second) = self.bars(measured([self.STEP, short]))
        self.assertAlmostEqual(4 / 5, second / first, places=2)

    def test_a_long_legend_has_several_lines(self):
        row = Row("x", [Bar(place, place + 1, "", kind) for place, kind in enumerate(FILLS)])
        places = [float(x) for x in re.findall(r'<rect class="k\d+" x="([-\d.]+)"', measured([Step("all", "ms", 30, [row])]))]
        self.assertGreaterEqual(min(places), 0)

    def test_letters_can_be_read_and_kinds_told_apart(self):
        for fill, letters in FILLS.values():
            self.assertGreaterEqual(contrast(fill, letters), 4.5)
        beside = ("forward", "backward", MESSAGES, OTHER, HOST, MEMORY, SEVERAL, *ALONG_AXES.values())  # in one step
        self.assertEqual(len(beside), len({FILLS[kind] for kind in beside}))
        for ink, paper, pale, _ in (LIGHT, DARK):
            self.assertGreaterEqual(min(contrast(ink, paper), contrast(pale, paper)), 4.5)

    def test_memory_has_one_scale(self):
        drawn = columns("x", [Column(["a"], [(0, 4), (0.25, 8)], 4), Column(["b"], [(0, 2)], 2)], "MiB", "kept", "used")
        kept = [float(height) for height in re.findall(rf'<rect class="{CLASSES[KEPT]}"[^>]* height="([\d.]+)"', drawn)][1:]
        self.assertEqual(2, kept[0] / kept[1])


if __name__ == "__main__":
    unittest.main()
