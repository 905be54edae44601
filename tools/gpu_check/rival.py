"""PyTorch in one process for all measurements: its start takes longer than what is measured."""

import contextlib
import json
import queue
import subprocess
import threading

from gpu_check.machine import ROOT


class Rival:
    """tools/bench_torch.py --serve; use it in a `with`."""

    def __init__(self, python):
        self.process = subprocess.Popen([python, ROOT / "tools/bench_torch.py", "--serve"],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def step_seconds(self, options, limit):
        """Mean seconds of a step with these options of bench_torch.py, and ""; or None and what
        went wrong in one line."""
        try:
            self.process.stdin.write(json.dumps([str(word) for word in options]) + "\n")
            self.process.stdin.flush()
            line = self.answers.get(timeout=limit)
        except (OSError, queue.Empty) as error:
            self.process.kill()  # or the next request would get its late answer
            return None, f"no answer from PyTorch within {limit:.0f} s ({type(error).__name__})"
        if not line:
            return None, f"PyTorch ended with status {self.process.wait()}"
        answer = json.loads(line)
        return answer.get("mean_step_seconds"), answer.get("error", "")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stdin):
            with contextlib.suppress(OSError):  # of a request that has no reader any more
                pipe.close()
