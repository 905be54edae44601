"""The plan of stage 06 for `lockstep show`, beside what it is made of, and beside a run of the stage."""

import itertools
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/tools")]

import compare_timeline  # noqa: E402
from test_step_page import BUILD, plan_of  # noqa: E402

SHARDS = ("none", "optimizer", "gradients", "parameters")


def most_counted(row):
    """The most that a row's count is. What ends at a moment has given back before anything begins."""
    changes = sorted([(bar.end, 0, -bar.gives) for bar in row.bars]
                     + [(bar.begin, 1, bar.takes) for bar in row.bars])
    return max(itertools.accumulate(by for _, _, by in changes))


def most_traced(path):
    """The most bytes in use in a whole trace."""
    return max(event["args"]["bytes"] for event in json.loads(path.read_text())["traceEvents"]
               if event["ph"] == "C")


class TestShardedPlan(unittest.TestCase):
    def test_no_unit_is_used_before_it_is_there_nor_kept_longer(self):
        for prefetch, slow in itertools.product((0, 1, 2), (0.1, 5)):
            plan = plan_of("06", "--prefetch", prefetch, "--units-per-mib", slow)
            compute, communication = plan.rows
            names = [bar.name for bar in compute.bars if bar.kind == "forward"]
            for place, name in enumerate(names):
                forward, backward = (next(bar for bar in compute.bars if (bar.name, bar.kind) == (name, kind))
                                     for kind in ("forward", "backward"))
                gathers = [bar for bar in communication.bars if bar.name == f"gather {name}"]
                frees = [bar for bar in compute.bars if f"frees the whole values of {name}," in bar.text]
                self.assertEqual((2, 2), (len(gathers), len(frees)))
                for gather, used, free in zip(gathers, (forward, backward), frees):
                    self.assertLessEqual(gather.end, used.begin)
                    self.assertAlmostEqual(used.end, free.begin)
                before = names[place - 1 - prefetch] if place > prefetch else None
                if before:  # the room that its gather needs is made free by the unit that many before
                    [free] = [bar for bar in compute.bars if bar.kind == "memory" and
                              f"frees the whole values of {before}," in bar.text][:1]
                    self.assertGreaterEqual(gathers[0].begin, free.end)
                [reduce] = [bar for bar in communication.bars if bar.name == f"reduce {name}"]
                [free] = [bar for bar in compute.bars if f"frees the whole gradients of {name}," in bar.text]
                self.assertLessEqual(backward.end, reduce.begin)
                self.assertLessEqual(reduce.end, free.begin)
            update = compute.bars[-1]
            self.assertEqual("the optimizer's step, of this rank's shard", update.text)

    def test_gathers_can_be_seen_whatever_the_networks_size(self):
        for model in ("seed", "mlp", "resnet18"):
            compute, communication = plan_of("06", "--model", model).rows
            forward = sum(bar.end - bar.begin for bar in compute.bars if bar.kind == "forward")
            gathers = sum(bar.end - bar.begin for bar in communication.bars if bar.name.startswith("gather"))
            self.assertAlmostEqual(2 * forward / 3, gathers)  # forward and backward gather

    def test_the_most_that_is_whole_is_the_formulas(self):
        for shard, unit, prefetch, reshard in itertools.product(
                SHARDS, ("layer", "block", "model"), (0, 1, 3), ("yes", "no")):
            with self.subTest(shard=shard, unit=unit, prefetch=prefetch, reshard=reshard):
                fetching = ("--prefetch", prefetch, "--reshard-after-forward", reshard)
                plan = plan_of("06", "--shard", shard, "--unit", unit, "--width", 8,
                               *(fetching if shard == "parameters" else ()))
                compute = plan.rows[0]
                self.assertAlmostEqual(compute.predicted_most, most_counted(compute))
                left = sum(bar.takes - bar.gives for bar in compute.bars)
                parameters = sum(bar.takes for bar in plan.rows[1].bars if bar.name.startswith("reduce"))
                whole = {"none": 2, "optimizer": 4, "gradients": 2, "parameters": 0}[shard]
                self.assertAlmostEqual(whole * parameters, left)  # W = 2: reduce-scatters send half of P

    def test_a_run_sends_and_holds_what_the_plan_says(self):
        for shard in SHARDS:
            with self.subTest(shard), tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                done = subprocess.run(
                    [BUILD / "06-fully-sharded/06-fully-sharded", "--devices", "cpu:0,cpu:1", "--batch-size", "8",
                     "--shard", shard, "--unit", "layer", "--max-steps", "8", "--data", "synthetic:80:10",
                     "--model", "seed", "--optimizer", "adamw", "--metrics", folder / "m.json", "--trace",
                     folder / "trace"], capture_output=True, text=True)
                self.assertEqual(0, done.returncode, done.stderr)
                metrics = json.loads((folder / "m.json").read_text())
                sent = metrics["bytes_per_step"]["sent"]
                compute, communication = plan_of("06", "--shard", shard, "--model", "seed").rows
                self.assertAlmostEqual(sent / 2**20, sum(bar.takes for bar in communication.bars))
                [memory, _] = compare_timeline.one_step(folder / "trace")["memory"]
                levels = [used / 2**20 for _, used in memory["changes"]]
                # Evaluation, which the peak of training leaves out, may need some more.
                [peak, _], most = metrics["peak_memory_bytes"], most_traced(folder / "trace")
                self.assertLessEqual(peak, most)
                self.assertLess(most, 1.05 * peak)
                kept = sum(bar.takes - bar.gives for bar in compute.bars)
                self.assertAlmostEqual(compute.predicted_most - kept, max(levels) - min(levels))


if __name__ == "__main__":
    unittest.main()
