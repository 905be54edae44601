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
    def test_last_accuracy_mean_epoch_and_the_memory_of_every_device(self):
        heading, rule, row = summary_table.table([METRICS])
        self.assertEqual(heading.split(), "stage network devices computed by epochs accuracy epoch time "
                                          "samples/s speed-up efficiency communication memory per "
                                          "device".split())
        self.assertEqual(row.split(), "04-ddp seed cpu:0,cpu:1 cpu (oneDNN) 2 81.25 % 8.50 s 7400 "
                                      "1.50 75 % 25 % 3.0, 5.0 MiB".split())
        self.assertEqual(len(heading), len(rule))

    def test_an_optimizer_stands_beside_the_network_unless_it_is_sgd(self):
        self.assertEqual("mlp, adamw", summary_table.network({"config": {"model": "mlp", "optimizer": "adamw"}}))
        self.assertEqual("mlp", summary_table.network({"config": {"model": "mlp", "optimizer": "sgd"}}))

    def test_fields_that_a_run_does_not_report(self):
        bare = summary_table.table([{"stage": "x"}, METRICS])[2]
        self.assertEqual(bare.split(), ["x"] + ["-"] * 11)

    def test_of_many_devices_the_fullest_counts(self):
        peaks = [9 * 2**20, *[10 * 2**20] * 4]
        self.assertEqual(summary_table.peak_memory({"peak_memory_bytes": peaks}), "at most 10.0 MiB")


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
