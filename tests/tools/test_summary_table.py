"""The table of `lockstep run` and `lockstep compare`."""

import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import summary_table  # noqa: E402

METRICS = {"stage": "04-ddp", "devices": ["cpu:0", "cpu:1"], "backend": "cpu (oneDNN)", "epochs": 2,
           "config": {"model": "seed"}, "accuracy": [0.5, 0.8125], "epoch_seconds": [8.0, 9.0],
           "samples_per_second": 7400.4, "speedup": 1.5, "efficiency": 0.75,
           "per_step_seconds": {"compute": 0.006, "communication": 0.005,
                                "exposed_communication": 0.002},
           "peak_memory_bytes": [3 * 2**20, 5 * 2**20]}


class TestTable(unittest.TestCase):
    def test_last_accuracy_and_the_memory_of_every_device(self):
        above, heading, rule, row = summary_table.table([METRICS])
        self.assertEqual(above.split(), "samples speed- effi- communi- memory".split())
        self.assertEqual(heading.split(), "stage network devices accuracy per s up ciency cation in MiB".split())
        self.assertEqual(row.split(), "04-ddp seed cpu:0,1 81.25 % 7400 1.50 75 % 25 % 3.0, 5.0".split())
        self.assertEqual({len(heading)}, {len(above), len(rule), len(row)})

    def test_the_longest_names_on_two_devices_fit_100_columns(self):
        for kind in ("cpu", "cuda"):
            longest = {**METRICS, "stage": "05-syncbn-checkpoint", "devices": [f"{kind}:0", f"{kind}:1"],
                       "config": {"model": "mlp", "optimizer": "adamw"}, "accuracy": [1.0],
                       "samples_per_second": 123456.7, "peak_memory_bytes": [2345 * 2**20] * 2}
            for line in summary_table.table([longest]):
                self.assertLessEqual(len(line), 100, line)

    def test_a_kind_of_devices_is_named_once_in_a_row(self):
        for names, short in ((["cpu:0"], "cpu:0"), (["cuda:0", "cuda:0", "cuda:3"], "cuda:0,0,3"),
                             (["cuda:0", "cpu:0", "cpu:1", "cuda:1"], "cuda:0,cpu:0,1,cuda:1"), ([], "-")):
            self.assertEqual(short, summary_table.devices({"devices": names}))

    def test_what_computed_is_said_once_or_for_each_that_differs(self):
        other = {**METRICS, "stage": "01-single-gpu", "backend": "cuda", "epochs": 1}
        self.assertEqual([], summary_table.computed_by([{"stage": "x"}]))
        self.assertEqual(["2 epochs, computed by cpu (oneDNN)"],
                         summary_table.computed_by([METRICS, {"stage": "x"}, METRICS]))
        self.assertEqual(["04-ddp: 2 epochs, computed by cpu (oneDNN)", "01-single-gpu: 1 epoch, computed by cuda"],
                         summary_table.computed_by([METRICS, other, other]))

    def test_an_optimizer_stands_beside_the_network_unless_it_is_sgd(self):
        self.assertEqual("mlp, adamw", summary_table.network({"config": {"model": "mlp", "optimizer": "adamw"}}))
        self.assertEqual("mlp", summary_table.network({"config": {"model": "mlp", "optimizer": "sgd"}}))

    def test_fields_that_a_run_does_not_report(self):
        bare = summary_table.table([{"stage": "x"}, METRICS])[3]
        self.assertEqual(bare.split(), ["x"] + ["-"] * 8)

    def test_of_many_devices_the_fullest_counts(self):
        peaks = [9 * 2**20, *[10 * 2**20] * 4]
        self.assertEqual(summary_table.peak_memory({"peak_memory_bytes": peaks}), "at most 10.0")


class TestBusyMachine(unittest.TestCase):
    def test_runs_whose_devices_lacked_cores_are_named(self):
        runs = [{"stage": stage, "share_without_core": shares, "noticed_without_core": 0.1}
                for stage, shares in (("01-a", [0.02]), ("02-b", [0, 0.31]))]
        self.assertRegex(summary_table.busy_machine(runs), "no core, of their time: 02-b 31 %; times")

    def test_a_quiet_machine_is_no_news(self):
        self.assertEqual("", summary_table.busy_machine(
            [{"stage": "01-a", "share_without_core": [0.05], "noticed_without_core": 0.1}, {}]))


class TestCommunicationShare(unittest.TestCase):
    def share(self, **metrics):
        return summary_table.communication_share({"devices": ["cpu:0", "cpu:1"], **metrics})

    def test_one_device_waits_for_nobody(self):
        self.assertEqual(self.share(devices=["cpu:0"]), 0)

    def test_what_is_hidden_behind_backward_does_not_count(self):
        self.assertEqual(self.share(per_step_seconds=METRICS["per_step_seconds"]), 0.25)

    def test_what_layers_exchange_lies_within_compute(self):
        self.assertEqual(self.share(per_step_seconds=METRICS["per_step_seconds"],
                                    batch_norm={"layers": 2, "seconds_per_step": 0.002}), 0.5)

    def test_sums_of_split_layers_lie_within_a_step(self):
        self.assertEqual(self.share(tensor_split={"seconds_per_step": 0.001},
                                    step_seconds=[0.003, 0.005]), 0.25)

    def test_phases_that_move_or_wait(self):
        phases = {"scatter": 1, "replicate": 1, "forward": 3, "gather": 1, "reduce": 1, "step": 1}
        self.assertEqual(self.share(phase_seconds=phases), 0.5)

    def test_a_pipeline_has_the_mean_of_its_stages(self):
        stages = [{"phase_seconds": {"forward": 3, "wait": 1}},
                  {"phase_seconds": {"backward": 1, "wait": 2, "send": 1}}]
        self.assertEqual(self.share(stages=stages), 0.5)

    def test_nothing_measured(self):
        for nothing in ({}, {"stages": []}, {"phase_seconds": {}},
                        {"per_step_seconds": {"compute": 0, "exposed_communication": 0}}):
            self.assertIsNone(self.share(**nothing))


if __name__ == "__main__":
    unittest.main()
