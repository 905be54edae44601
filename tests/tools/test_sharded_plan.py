"""What `lockstep show` draws of stage 06, beside formulas and beside a run of the stage."""

import itertools
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import compare_timeline  # noqa: E402
from step_page_support import BUILD, plan_of  # noqa: E402

SHARDS = ("none", "optimizer", "gradients", "parameters")


def most_traced(path):
    """The most bytes in use in a whole trace."""
    return max(event["args"]["bytes"] for event in json.loads(path.read_text())["traceEvents"]
               if event["ph"] == "C")


class TestShardedPlan(unittest.TestCase):
    def test_no_unit_is_used_before_it_is_there_nor_reduced_before_it_is_complete(self):
        for prefetch in (0, 1, 2):
            plan = plan_of("06", "--prefetch", prefetch)
            compute, communication, _ = plan.rows
            bars = plan.bars()
            names = [bar.name for bar in compute.bars if bar.kind == "forward"]
            self.assertGreater(len(names), 4)
            for place, name in enumerate(names):
                forward, backward = (next(bar for bar in compute.bars if (bar.name, bar.kind) == (name, kind))
                                     for kind in ("forward", "backward"))
                gathers = [bar for bar in communication.bars if bar.name == f"gather {name}"]
                self.assertEqual(2, len(gathers))
                for gather, used in zip(gathers, (forward, backward)):
                    self.assertLessEqual(gather.end, used.begin)
                    self.assertIn(bars.index(gather), used.after)
                if place > prefetch:  # fetched ahead, but not farther than asked for
                    before = next(bar for bar in compute.bars if (bar.name, bar.kind)
                                  == (names[place - 1 - prefetch], "forward"))
                    self.assertGreaterEqual(gathers[0].begin, before.end)
                [reduce] = [bar for bar in communication.bars if bar.name == f"reduce {name}"]
                self.assertLessEqual(backward.end, reduce.begin)
                self.assertIn(bars.index(backward), reduce.after)
            self.assertEqual("update", compute.bars[-1].name)

    def test_of_layers_and_messages_in_turn_the_longer_counts_or_without_prefetch_both(self):
        """The network's middle layers, fc2 to fc4, are equal."""
        for units_per_mib in (0.5, 40):  # messages are shorter than layers, or longer
            for prefetch in (0, 1, 2):
                compute, communication, _ = plan_of("06", "--model", "mlp", "--prefetch", prefetch,
                                                    units_per_mib=units_per_mib).rows
                bars = {(bar.name, bar.kind): bar for bar in compute.bars}
                third, fourth = bars["fc3", "forward"], bars["fc4", "forward"]
                layer = third.end - third.begin
                message = next(bar.end - bar.begin for bar in communication.bars if bar.name == "gather fc3")
                self.assertEqual(units_per_mib > 1, message > layer)
                expected = max(layer, message) if prefetch else layer + message
                self.assertAlmostEqual(expected, fourth.begin - third.begin, places=6)

    def test_messages_take_a_third_of_the_passes_whatever_the_networks_size(self):
        for model in ("seed", "mlp", "resnet18"):
            compute, communication, _ = plan_of("06", "--model", model).rows
            passes = sum(bar.end - bar.begin for bar in compute.bars if bar.kind in ("forward", "backward"))
            sending = [bar for bar in communication.bars if bar.takes]
            # Each has a latency, too, and a reduction is with the operations around it.
            spent = sum(bar.end - bar.begin for bar in sending) - 0.3 * len(sending)
            self.assertLess(spent, passes / 3)
            self.assertGreater(sum(bar.end - bar.begin for bar in sending), passes / 3)

    def test_the_most_that_is_whole_is_the_formulas(self):
        for shard, unit, prefetch, reshard in itertools.product(
                SHARDS, ("layer", "block", "model"), (0, 1, 3), ("yes", "no")):
            if shard != "parameters" and (prefetch, reshard) != (0, "yes"):
                continue
            with self.subTest(shard=shard, unit=unit, prefetch=prefetch, reshard=reshard):
                fetching = ("--prefetch", prefetch, "--reshard-after-forward", reshard)
                plan = plan_of("06", "--model", "resnet18", "--shard", shard, "--unit", unit, "--width", 8,
                               *(fetching if shard == "parameters" else ()))
                memory = [row for row in plan.rows if row.curve]
                self.assertEqual(shard in ("gradients", "parameters"), len(memory) == 1)
                for row in memory:
                    self.assertAlmostEqual(row.predicted_most, max(bar.takes for bar in row.bars))
                    self.assertTrue(all(bar.takes == bar.gives for bar in row.bars))

    def test_a_run_sends_and_holds_what_the_plan_says(self):
        for shard in SHARDS:
            with self.subTest(shard), tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                options = ("--batch-size", "8", "--shard", shard, "--unit", "layer", "--model", "seed",
                           "--optimizer", "adamw")
                done = subprocess.run(
                    [BUILD / "06-fully-sharded/06-fully-sharded", "--devices", "cpu:0,cpu:1", *options, "--max-steps",
                     "8", "--data", "synthetic:80:10", "--metrics", folder / "m.json", "--trace", folder / "trace"],
                    capture_output=True, text=True)
                self.assertEqual(0, done.returncode, done.stderr)
                metrics = json.loads((folder / "m.json").read_text())
                plan = plan_of("06", *options)
                compute, communication, *memory = plan.rows
                sent = sum(bar.takes for bar in communication.bars)
                self.assertAlmostEqual(metrics["bytes_per_step"]["sent"] / 1024,
                                       sum(bar.takes for bar in communication.bars
                                           if bar.name.startswith(("gather", "reduce"))))
                self.assertAlmostEqual(communication.predicted_most, sent, delta=0.05)  # the loss goes along
                [measured, _] = compare_timeline.one_step(folder / "trace")["memory"]
                levels = [used / 2**10 for _, used in measured["changes"]]
                # Evaluation, which the peak of training leaves out, may need some more.
                [peak, _], most = metrics["peak_memory_bytes"], most_traced(folder / "trace")
                self.assertLessEqual(peak, most)
                self.assertLess(most, 1.05 * peak)
                rise = max((bar.takes for row in memory for bar in row.bars), default=0)
                self.assertAlmostEqual(rise, max(levels) - min(levels))


if __name__ == "__main__":
    unittest.main()
