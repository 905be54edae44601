"""tools/axis_queues.py: what a stream for each axis would change, on traces whose answer is known."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]
import axis_queues  # noqa: E402
from mesh_trace import mesh_trace  # noqa: E402


class TestAxisQueues(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "trace.json"

    def compared(self, trace):
        self.path.write_text(json.dumps(trace))
        found = axis_queues.compared(self.path)
        return round(found["one_stream_seconds"] * 1e6, 3), round(found["stream_each_seconds"] * 1e6, 3)

    def run_tool(self, trace):
        self.path.write_text(json.dumps(trace))
        return subprocess.run([ROOT / "tools/axis_queues.py", self.path], capture_output=True, text=True, timeout=60)

    def test_a_sum_no_longer_stands_behind_another_axis(self):
        self.assertEqual(self.compared(mesh_trace(6)), (4, 3))

    def test_messages_of_one_axis_keep_their_order(self):
        self.assertEqual(self.compared(mesh_trace(6, [("all_reduce", "along data", True)] * 2)), (4, 4))

    def test_what_belongs_to_one_piece_of_work_keeps_its_order(self):
        # Shards are reduced, and what comes of it goes to the replicas: that waits for no other stream.
        self.assertEqual(self.compared(mesh_trace(6, [
            ("reduce_scatter", "reduce fc2/along shard", True),
            ("all_reduce", "reduce fc2/along data", False)])), (4, 4))

    def test_kernels_before_a_message_stand_where_it_stands(self):
        self.assertEqual(self.compared(mesh_trace(6, [
            ("all_reduce", "reduce fc2/along data", True), ("scale", "reduce fc1", True),
            ("all_reduce", "reduce fc1/along data", False)])), (5, 5))

    def test_it_says_the_difference(self):
        done = self.run_tool(mesh_trace(6))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, "one stream for all axes: 0.004 ms per step; a stream for each: 0.003 ms; the "
                                      "step is 33.3 % longer for it\n")

    def test_other_traces_are_refused_in_a_line(self):
        measured, other, late = mesh_trace(6), mesh_trace(6), mesh_trace(6)
        for event in measured["traceEvents"]:
            event.get("args", {}).pop("after", None)
        for event in other["traceEvents"]:
            if "layer" in event.get("args", {}):
                event["args"]["layer"] = "fc2"
        late["traceEvents"][-1]["ts"] += 1  # the last update
        for trace, text in ((measured, "does not say what operations waited for; run on simulated devices"),
                            (other, "it has no messages along axes; give a trace of 07-mesh"),
                            (late, "expected 24.0 by what it waits for"),
                            (mesh_trace(2), "it has fewer than 3 steps; train 6")):
            done = self.run_tool(trace)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, rf"^axis_queues: .*trace\.json: .*{text}.*\n$")
        infinite = mesh_trace(6)
        infinite["traceEvents"][-1]["ts"] = float("inf")
        for trace in ([], {}, {"traceEvents": 5}, {"traceEvents": [5]}, {"traceEvents": [{"ph": "X"}]}, infinite):
            done = self.run_tool(trace)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, r"^axis_queues: .*trace\.json: .*(no trace of 07-mesh|no number).*\n$")


if __name__ == "__main__":
    unittest.main()
