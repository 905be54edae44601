"""What the tests of coursework share: a file with two tasks, the row of one, a folder to write in."""

import tempfile
import unittest
from pathlib import Path

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
