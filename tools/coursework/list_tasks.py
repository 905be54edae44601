#!/usr/bin/env python3
"""Print the ids of all tasks, for tests/coursework/meson.build."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from coursework import CourseworkError  # noqa: E402
from coursework.tasks import load_tasks  # noqa: E402

try:
    print(*(task.id for task in load_tasks(ROOT)))
except CourseworkError as error:
    sys.exit(str(error))
