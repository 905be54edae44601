"""What the tests of coursework share: a file with two tasks, the row of one, a folder to write in."""

import json
import tempfile
import unittest
from pathlib import Path

from coursework import tasks, tree

SOURCE = """int first() {
  // [task 02.1] the first
  return 1;
  // [end 02.1]
}
int second() {
  const int two = 2;
  // [task 02.2] the second
  if (two > 1)
    return two;
  return 0;
  // [end 02.2]
}
"""
ROW = {"id": "02.1", "name": "the first", "file": "02-x/a.cpp", "symbols": ["first"],
       "teaches": "One.", "points": 1, "minutes": 5}


def only_stage(root, stage, folder):
    """Writes the solved tree with the tasks of one stage only: no other solutions are compiled."""
    def is_others(line):
        return (marker := tasks.MARKER.match(line)) and not marker[3].startswith(stage)

    files = {path: root / path for path in tree.list_files(root)}
    for path, text in tree.read_sources(root).items():
        files[path] = "\n".join(line for line in text.split("\n") if not is_others(line))
    rows = json.loads((root / tasks.TABLE).read_text())["tasks"]
    files[tasks.TABLE] = json.dumps({"tasks": [row for row in rows if row["id"].startswith(stage)]})
    tree.mirror(files, folder)
    return folder


# A program of tests, as a script of bash: what tests/coursework/witness.cpp does.
WITNESS = """#!/bin/bash
read -r nonce seed <&"$LOCKSTEP_WITNESS"
sent=0 passed=0 failed=0 all_passed=0 all_failed=0
tell() { printf '%s %d %s\\n' "$nonce" $((sent++)) "$1" >&"$LOCKSTEP_WITNESS"; }
begins() { tell '{"event": "case", "name": "'"$1"'"}'; }
hint() { tell '{"event": "hint", "text": "'"$1"'"}'; }
value() { tell '{"event": "value", "label": "'"$1"'", "value": "'"$2"'"}'; }
asserts() { : $((passed++)); tell '{"event": "assertion", "ok": true, "file": "../source/t.cpp", "line": '$1'}'; }
case_ends() {
  tell '{"event": "case ended", "passed": '$passed', "failed": '$failed'}'
  : $((all_passed += passed)) $((all_failed += failed)); passed=0 failed=0
}
run_ends() { tell '{"event": "run ended", "passed": '$all_passed', "failed": '$all_failed'}'; }
ended() { case_ends; run_ends; }
"""


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, path, text="", mode=0o644):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file
