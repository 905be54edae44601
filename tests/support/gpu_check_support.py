"""What the tests of `lockstep gpu-check` share."""

import os
import subprocess
from pathlib import Path


def call(*words, **options):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True,
                          timeout=3600, **options)


def without_gpu():
    """The environment without the variables of this test run, and without nvidia-smi."""
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("LOCKSTEP_")}
    folders = os.environ["PATH"].split(os.pathsep)
    return {**environment, "PATH": os.pathsep.join(
        folder for folder in folders if not (Path(folder) / "nvidia-smi").exists())}
