"""The lesson of a stage is the difference between two main programs: it must stay small."""

import difflib
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def count_changes(before, after):
    """Lines added and lines removed from one text to another."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))
    changes = [line for line in lines[2:] if not line.startswith("@@")]  # after the two headers
    added = sum(line.startswith("+") for line in changes)
    return added, len(changes) - added


def read_main(stage):
    return (ROOT / stage / "main.cpp").read_text()


class TestStageDiff(unittest.TestCase):
    def test_counting(self):
        self.assertEqual(count_changes("a\nb\nc\n", "a\nb\nc\n"), (0, 0))
        self.assertEqual(count_changes("a\nb\nc\n", "a\nB\nc\nd\n"), (2, 1))
        self.assertEqual(count_changes("--a\n", "++a\n"), (1, 1))

    def check(self, stage, most_added, most_removed, before="01-single-gpu"):
        added, removed = count_changes(read_main(before), read_main(stage))
        print(f"diff {before}/main.cpp {stage}/main.cpp: {added} lines added, {removed} removed "
              f"(at most {most_added} and {most_removed})")
        self.assertGreater(added, 0)
        self.assertLessEqual(added, most_added)
        self.assertLessEqual(removed, most_removed)

    def test_stage_01_is_read_from_top_to_bottom(self):
        self.assertLessEqual(len(read_main("01-single-gpu").splitlines()), 95)

    def test_data_parallel_differs_little_from_a_single_device(self):
        self.check("02-dataparallel", 36, 20)

    def test_a_network_in_pieces_differs_little_from_a_single_device(self):
        self.check("03-model-split/pipeline", 50, 45)
        self.check("03-model-split/tensor", 50, 30)

    def test_ddp_differs_little_from_a_single_device(self):
        self.check("04-ddp", 60, 45)

    def test_syncbn_and_checkpoints_differ_little_from_ddp(self):
        self.check("05-syncbn-checkpoint", 44, 22, before="04-ddp")

    def test_sharding_differs_little_from_syncbn_and_checkpoints(self):
        self.check("06-fully-sharded", 30, 25, before="05-syncbn-checkpoint")

    def test_a_mesh_differs_little_from_sharding(self):
        self.check("07-mesh", 28, 25, before="06-fully-sharded")

    def step(self, stage):
        text = read_main(stage)
        begin = text.index("void train_step(")
        return text[begin:text.index("\n}\n", begin)]

    def test_the_step_of_data_parallel_is_that_of_a_single_device(self):
        self.assertEqual(self.step("02-dataparallel"), self.step("01-single-gpu"))

    def test_the_step_of_split_layers_is_that_of_a_single_device(self):
        self.assertEqual(self.step("03-model-split/tensor"), self.step("01-single-gpu"))

    def test_the_step_of_shards_is_that_of_whole_replicas(self):
        self.assertEqual(self.step("06-fully-sharded"), self.step("05-syncbn-checkpoint"))
        self.assertEqual(self.step("07-mesh"), self.step("06-fully-sharded"))


if __name__ == "__main__":
    unittest.main()
