"""A test of a test: a small tree that is right, in which each case makes one thing wrong."""

import tempfile
import unittest
from pathlib import Path


class SmallTree(unittest.TestCase):
    FILES = {}  # name: text, of the tree that is right

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for name, text in self.FILES.items():
            self.write(name, text)

    def write(self, name, text=""):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def append(self, name, line):
        with open(self.root / name, "a") as file:
            file.write(line + "\n")
