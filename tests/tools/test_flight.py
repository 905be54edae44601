"""`./lockstep show --flight`: joins recordings whose format is written here from its description in
common/system/flight_recorder.h, byte by byte."""

import os
import struct
import tempfile
import unittest
from pathlib import Path

import sys
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from step_page_support import show  # noqa: E402

WORD = 2**64 - 1
SECOND = 10**9


def check_of(body):
    check = 0xcbf29ce484222325
    for (word,) in struct.iter_unpack("=Q", body):
        check = (check ^ word) * 0x9e3779b97f4a7c15 & WORD
        check ^= check >> 32
    return struct.pack("=Q", check | 1)


def entry(record, number, started, completed, text="all_reduce of 5 f32, sum", label=""):
    """An entry; times in seconds."""
    times = [int(time * SECOND) for time in (1, started, completed)]
    name = text.split()[0]
    body = struct.pack("=6Q3q24s48s104s", record, number, 0, 0, 0, 20, *times, name.encode(),
                       label.encode(), text.encode())
    return check_of(body) + body


def page(rank, entries, world_size=2):
    head = struct.pack("=8s4Qq2Q", b"LSFLIGHT", 1 | 64 << 16 | 32 << 32, rank, world_size, 4127, 0, 1, 2)
    places = [bytes(256)] * 64
    for written in entries:
        places[(struct.unpack_from("=Q", written, 8)[0] - 1) % 64] = written
    return (head + check_of(head)).ljust(512, b"\0") + b"".join(places)


class TestFlight(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = Path(folder.name) / "flight[1].rec"

    def write(self, *pages):
        for rank, content in enumerate(pages):
            Path(f"{self.file}.rank{rank}" if rank else self.file).write_bytes(content)

    def told(self, status=0):
        done = show("--flight", self.file)
        self.assertEqual(status, done.returncode, done.stderr)
        if status:
            self.assertEqual(("", 1), (done.stdout, done.stderr.count("\n")), done.stderr)
            self.assertTrue(done.stderr.startswith("error: --flight "), done.stderr)
        return done.stdout + done.stderr

    def test_ranks_are_joined_and_the_late_one_is_named(self):
        calls = [entry(record, record, 2, 3) for record in range(1, 101)]
        self.write(page(0, [*calls, entry(101, 101, 10, 0)]), page(1, [*calls, entry(101, 101, 0, 0)]))
        self.assertIn("rank 1 is late: rank 0 has waited in call 101 (all_reduce of 5 f32, sum) since ",
                      self.told())

    def test_calls_that_differ_are_named_and_their_texts_tame(self):
        self.write(page(0, [entry(1, 1, 2, 0, "barrier")]), page(1, [entry(1, 1, 2, 0, "\033[2Jgather\n")]))
        self.assertIn("call 1 is barrier on rank 0, and ?[2Jgather? on rank 1", self.told())

    def test_an_entry_that_was_being_written_is_left_out(self):
        whole = [entry(1, 1, 2, 3), entry(2, 2, 4, 0)]
        torn = bytearray(whole[1])
        torn[60] ^= 1
        self.write(page(0, whole), page(1, [whole[0], bytes(torn)]))
        self.assertIn("rank 1 is late", self.told())
        self.assertIn("1     ended, none since", self.told())

    def test_a_file_that_is_no_recording_is_one_line(self):
        good = page(0, [])
        for content in (b"", b"x" * len(good), good[:-1], good + b"\0", good[:16] + b"\7" + good[17:],
                        page(1, []), page(0, [], world_size=2**60), page(0, [], world_size=0)):
            self.write(content)
            self.told(1)
        self.write(good, page(1, [], 3))
        self.told(1)
        self.file.unlink()
        Path(f"{self.file}.rank1").unlink()
        self.told(1)
        for make in (os.mkdir, os.mkfifo):
            make(self.file)
            self.told(1)
            os.rename(self.file, f"{self.file}.{make.__name__}")

    def test_where_nothing_was_recorded_that_is_said(self):
        self.write(page(0, []), page(1, []))
        self.assertEqual("flight recorder: no rank has recorded a call\n", self.told())


if __name__ == "__main__":
    unittest.main()
