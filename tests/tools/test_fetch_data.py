"""`lockstep data`: fetching from a local HTTP server that is good, or bad in one way."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))
from processes import start  # noqa: E402

FETCH = ROOT / "tools" / "fetch_data.py"
IMAGES = gzip.compress(bytes(range(256)) * 400, mtime=1)
LABELS = gzip.compress(b"labels", mtime=1)


def tar_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


ARCHIVE = tar_of({"batches/one.bin": b"1" * 5000, "batches/two.bin": b"2" * 5000, "../evil": b"x"})


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves files; `faults[name]` can be cut: too few bytes, short: a shorter file, hang:
    stops."""

    def __init__(self, state, *args):
        self.state = state
        super().__init__(*args)

    def do_GET(self):
        name = self.path.lstrip("/")
        self.state["asked"].append(name)
        content = self.state["files"].get(name)
        fault = self.state["faults"].get(name)
        if content is None:
            self.send_error(404)
            return
        if fault == "short":
            content = content[: len(content) // 2]
        if fault == "endless":  # until the other side goes, and 10 MB at most
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    self.wfile.write(bytes(100000))
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault is None or fault == "short":
            self.wfile.write(content)
            return
        self.wfile.write(content[: len(content) // 2])  # the connection closes with this handler
        if fault == "hang":
            self.wfile.flush()
            self.state["release"].wait(30)

    def log_message(self, *_):
        pass


class FetchTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.target = self.root / "target"
        files = {"images.gz": IMAGES, "labels.gz": LABELS, "all.tar.gz": ARCHIVE}
        self.state = {"files": files, "faults": {}, "asked": [], "release": threading.Event()}
        handler = functools.partial(Handler, self.state)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        thread.start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(thread.join)
        self.addCleanup(self.server.shutdown)
        self.addCleanup(self.state["release"].set)
        self.write_table()

    def write_table(self):
        def md5(name):
            return hashlib.md5(self.state["files"][name]).hexdigest()

        def sha256(content):
            return hashlib.sha256(content).hexdigest()

        self.table = {
            "pictures": {"url": "http://127.0.0.1:1/", "files": [
                {"name": "images.gz", "md5": md5("images.gz"),
                 "content_sha256": sha256(gzip.decompress(IMAGES))},
                {"name": "labels.gz", "md5": md5("labels.gz"),
                 "content_sha256": sha256(gzip.decompress(LABELS))}]},
            "packed": {"url": "http://127.0.0.1:1/", "files": [
                {"name": "all.tar.gz", "md5": md5("all.tar.gz"),
                 "content_sha256": sha256(self.state["files"]["all.tar.gz"]),
                 "unpack": ["batches/one.bin", "batches/two.bin"]}]},
        }
        (self.root / "table.json").write_text(json.dumps(self.table))

    def command(self, name, *options):
        return [sys.executable, str(FETCH), name, "--dir", str(self.target),
                "--table", str(self.root / "table.json"), *options]

    def environment(self, **changes):
        url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        return {**os.environ, "LOCKSTEP_DATA_URL": url, "no_proxy": "127.0.0.1", **changes}

    def fetch(self, name="pictures", *options, **environment):
        return subprocess.run(self.command(name, *options), capture_output=True, text=True,
                              env=self.environment(**environment), timeout=60)

    def files(self):
        return {str(p.relative_to(self.target)) for p in self.target.rglob("*") if p.is_file()}

    def assert_one_line(self, done, *words):
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)


class TestGood(FetchTest):
    def test_fetches_verifies_and_names_the_folder(self):
        done = self.fetch()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(str(self.target), done.stdout)
        self.assertEqual(self.files(), {"images.gz", "labels.gz"})
        self.assertEqual((self.target / "images.gz").read_bytes(), IMAGES)

    def test_what_is_there_is_not_fetched_again(self):
        self.fetch()
        self.state["asked"].clear()
        done = self.fetch()
        self.assertEqual(done.returncode, 0)
        self.assertIn("found in", done.stdout)
        self.assertEqual(self.state["asked"], [])

    def test_only_the_missing_file_is_fetched(self):
        self.target.mkdir()
        (self.target / "images.gz").write_bytes(IMAGES)
        self.assertEqual(self.fetch().returncode, 0)
        self.assertEqual(self.state["asked"], ["labels.gz"])

    def test_the_same_content_packed_otherwise_is_right(self):
        self.target.mkdir()
        (self.target / "labels.gz").write_bytes(LABELS)
        for name, content in (("images.gz", gzip.compress(gzip.decompress(IMAGES), 1, mtime=2)),
                              ("images", gzip.decompress(IMAGES))):
            with self.subTest(name):
                (self.target / name).write_bytes(content)
                self.assertEqual(self.fetch().returncode, 0)
                self.assertEqual(self.state["asked"], [])
                (self.target / name).unlink()

    def test_a_corrupt_file_is_named_and_replaced(self):
        self.fetch()
        (self.target / "images.gz").write_bytes(IMAGES[:-1] + b"?")
        self.state["asked"].clear()
        done = self.fetch()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("images.gz: wrong checksum, fetching it again", done.stdout)
        self.assertEqual(self.state["asked"], ["images.gz"])
        self.assertEqual((self.target / "images.gz").read_bytes(), IMAGES)

    def test_unless_present_is_silent_where_the_files_are(self):
        self.fetch()
        (self.target / "images.gz").write_bytes(b"another")
        done = self.fetch("pictures", "--unless-present")
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_synthetic_needs_nothing(self):
        done = self.fetch("synthetic")
        self.assertEqual(done.returncode, 0)
        self.assertIn("nothing to fetch", done.stdout)
        self.assertFalse(self.target.exists())


class TestArchive(FetchTest):
    def test_unpacks_the_listed_files_and_no_other(self):
        done = self.fetch("packed")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.files(), {"batches/one.bin", "batches/two.bin", "SHA256SUMS"})
        self.assertEqual((self.target / "batches/two.bin").read_bytes(), b"2" * 5000)
        self.assertFalse((self.root / "evil").exists())
        self.state["asked"].clear()
        self.assertEqual(self.fetch("packed").returncode, 0)
        self.assertEqual(self.state["asked"], [])

    def test_a_corrupt_unpacked_file_is_replaced(self):
        self.fetch("packed")
        (self.target / "batches/one.bin").write_bytes(b"x" * 5000)
        self.assertEqual(self.fetch("packed").returncode, 0)
        self.assertEqual((self.target / "batches/one.bin").read_bytes(), b"1" * 5000)

    def test_an_archive_without_a_listed_file_is_refused(self):
        self.state["files"]["all.tar.gz"] = tar_of({"batches/one.bin": b"1"})
        self.write_table()
        self.assert_one_line(self.fetch("packed"), "holds no file batches/two.bin")
        self.assertNotIn("SHA256SUMS", self.files())


class TestBad(FetchTest):
    def test_a_wrong_checksum_is_refused(self):
        self.state["files"]["images.gz"] = IMAGES[:-1] + b"?"
        expected = self.table["pictures"]["files"][0]["md5"]
        self.assert_one_line(self.fetch(), "images.gz", f"expected {expected}")
        self.assertEqual(self.files(), set())

    def test_another_file_of_the_same_md5_is_refused(self):
        """As if somebody on the way had made one: what was published has another SHA-256."""
        for data_set, files in (("pictures", {"images.gz"}), ("packed", {"all.tar.gz"})):
            entry = self.table[data_set]["files"][0]
            published = entry["content_sha256"] = hashlib.sha256(b"what was published").hexdigest()
            (self.root / "table.json").write_text(json.dumps(self.table))
            self.assert_one_line(self.fetch(data_set), *files, f"SHA-256 is not {published}")
            self.assertEqual(self.files(), set())

    def test_a_server_that_never_ends_does_not_fill_the_disk(self):
        self.state["faults"]["images.gz"] = "endless"
        program = "import fetch_data as f; f.LARGEST = 3000000; f.run_command(f.main)"
        done = subprocess.run([sys.executable, "-c", program, *self.command("pictures")[2:]], text=True,
                              capture_output=True, timeout=60, env=self.environment(PYTHONPATH=str(FETCH.parent)))
        self.assert_one_line(done, "images.gz: more than 3000000 bytes came")
        self.assertEqual(self.files(), set())

    def test_a_table_of_another_form_is_named_and_leads_nowhere_else(self):
        entry = self.table["pictures"]["files"][0]
        outside = self.root / "evil"
        path = self.root / "table.json"
        for entries in (None, "x", [5], [{"name": "images.gz"}], [{**entry, "name": None}],
                        *([{**entry, "name": name}] for name in ("../evil", str(outside), "", ".")),
                        *([{**entry, "unpack": names}] for names in (5, [5], ["../evil"], [str(outside)]))):
            path.write_text(json.dumps({"pictures": {"url": "", "files": entries}}))
            self.assert_one_line(self.fetch(), "table.json: expected", "datasets.json")
        for text in ("5", "null", "[]", '{"pictures": []}'):
            path.write_text(text)
            self.assert_one_line(self.fetch(), "table.json: expected", "datasets.json")
        for text in ("", "[" * 100000):
            path.write_text(text)
            self.assert_one_line(self.fetch(), "table.json is no JSON")
        path.unlink()
        os.mkfifo(path)
        self.assert_one_line(self.fetch(), "table.json: it is not a regular file")
        self.assertEqual((self.state["asked"], outside.exists()), ([], False))

    def test_damaged_checksums_of_an_unpacked_archive_mean_that_it_is_fetched_again(self):
        self.fetch("packed")
        for damage in (b"", b"one\n", b"\xff\xfe\n", b" \n"):
            (self.target / "SHA256SUMS").write_bytes(damage)
            done = self.fetch("packed")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("fetching", done.stdout)
        (self.target / "SHA256SUMS").unlink()
        os.mkfifo(self.target / "SHA256SUMS")
        self.assertEqual(self.fetch("packed").returncode, 0)
        self.assertIn("found in", self.fetch("packed").stdout)

    def test_a_table_without_a_digest_is_not_fetched_by(self):
        for wrong in (None, "", "00"):
            entry = self.table["pictures"]["files"][1]
            entry.pop("content_sha256", None)
            entry |= {} if wrong is None else {"content_sha256": wrong}
            (self.root / "table.json").write_text(json.dumps(self.table))
            self.assert_one_line(self.fetch(), "no content_sha256 of labels.gz")
            self.assertEqual((self.state["asked"], self.files()), ([], set()))

    def test_a_truncated_file_is_refused(self):
        self.state["faults"]["images.gz"] = "short"
        self.assert_one_line(self.fetch(), "images.gz", f"{len(IMAGES) // 2} bytes came")
        self.assertEqual(self.files(), set())

    def test_a_connection_that_breaks_is_refused(self):
        self.state["faults"]["images.gz"] = "cut"
        self.assert_one_line(self.fetch(), f"after {len(IMAGES) // 2} of {len(IMAGES)} bytes")
        self.assertEqual(self.files(), set())

    def test_a_missing_file_on_the_server_is_named(self):
        del self.state["files"]["labels.gz"]
        self.assert_one_line(self.fetch(), "labels.gz", "404")
        self.assertEqual(self.files(), {"images.gz"})

    def test_an_unreachable_server_is_named(self):
        done = self.fetch(LOCKSTEP_DATA_URL="http://127.0.0.1:1/")
        self.assert_one_line(done, "127.0.0.1:1", "refused")
        self.assertEqual(self.files(), set())

    def test_a_bad_address_is_named(self):
        self.assert_one_line(self.fetch(LOCKSTEP_DATA_URL="nowhere"), "nowhere/images.gz")

    def test_a_failed_replacement_leaves_the_old_file(self):
        self.target.mkdir()
        (self.target / "images.gz").write_bytes(b"old")
        self.state["faults"]["images.gz"] = "cut"
        self.assert_one_line(self.fetch(), "images.gz")
        self.assertEqual((self.target / "images.gz").read_bytes(), b"old")

    def test_a_link_stays_and_what_it_leads_to_is_replaced(self):
        self.target.mkdir()
        (self.target / "batches").mkdir()
        elsewhere = self.root / "elsewhere"
        elsewhere.mkdir()
        for name in ("images.gz", "batches/one.bin"):
            place = elsewhere / Path(name).name
            place.write_bytes(b"old")
            place.chmod(0o640)
            (self.target / name).symlink_to(place)
        for data_set in ("pictures", "packed"):
            done = self.fetch(data_set)
            self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("images.gz", "batches/one.bin"):
            place = elsewhere / Path(name).name
            self.assertTrue((self.target / name).is_symlink(), name)
            self.assertNotEqual(place.read_bytes(), b"old")
            self.assertEqual(place.stat().st_mode & 0o777, 0o640, name)
        self.assertEqual({path.name for path in elsewhere.iterdir()}, {"images.gz", "one.bin"})

    def test_an_unknown_name_is_answered_with_the_list(self):
        self.assert_one_line(self.fetch("cats"), "'cats'", "pictures, packed, synthetic")

    def test_a_pipe_or_a_device_to_which_a_link_leads_is_not_replaced(self):
        pipe = self.root / "pipe"
        os.mkfifo(pipe)
        self.target.mkdir()
        (self.target / "images.gz").symlink_to(pipe)
        self.assert_one_line(self.fetch(), "images.gz", "is not a regular file")
        self.assertTrue(pipe.is_fifo())

    def test_a_target_that_is_a_file_is_named(self):
        self.target.write_text("in the way")
        self.assert_one_line(self.fetch(), str(self.target))

    def test_a_terminated_fetch_leaves_nothing(self):
        self.state["faults"]["images.gz"] = "hang"
        process = start(self, *self.command("pictures"), env=self.environment(),
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not (self.target.exists() and self.files()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertTrue(self.files(), "the download did not begin")
        process.send_signal(signal.SIGTERM)
        self.assertNotEqual(process.wait(20), 0)
        self.assertEqual(self.files(), set())

    def test_a_signal_that_comes_while_a_file_is_made_leaves_nothing(self):
        program = ("import os, runpy, signal, sys, tempfile; make = tempfile.mkstemp\n"
                   "def interrupted(*args, **options):\n"
                   "    made = make(*args, **options)\n"
                   "    os.kill(os.getpid(), signal.SIGTERM)\n"
                   "    return made\n"
                   "tempfile.mkstemp = interrupted; sys.argv = sys.argv[1:]\n"
                   "runpy.run_path(sys.argv[0], run_name='__main__')")
        command = self.command("pictures")
        done = subprocess.run([command[0], "-c", program, *command[1:]], capture_output=True, text=True,
                              timeout=60, env=self.environment(PYTHONPATH=str(FETCH.parent)))
        self.assertEqual((done.returncode, self.files()), (128 + signal.SIGTERM, set()), done.stderr)


class TestTable(unittest.TestCase):
    def test_every_entry_has_its_own_address_and_checksum(self):
        table = json.loads((ROOT / "tools/datasets.json").read_text())
        self.assertEqual(set(table), {"fashion-mnist", "mnist", "cifar10"})
        for name, data_set in table.items():
            self.assertRegex(data_set["url"], r"^https?://[\w.~/-]+/$", name)
            for entry in data_set["files"]:
                self.assertRegex(entry["md5"], "^[0-9a-f]{32}$", entry["name"])
                self.assertRegex(entry["content_sha256"], "^[0-9a-f]{64}$", entry["name"])

    def test_the_checksums_fit_what_this_machine_holds(self):
        """Debian's package is repacked, so only the digests of its content can be right."""
        table = json.loads((ROOT / "tools/datasets.json").read_text())
        folder = table["fashion-mnist"]["debian_folder"]
        done = subprocess.run([sys.executable, str(FETCH), "fashion-mnist", "--dir", folder],
                              capture_output=True, text=True, timeout=120,
                              env={**os.environ, "LOCKSTEP_DATA_URL": "http://127.0.0.1:1/"}
                              ) if Path(folder).is_dir() else None
        if done:
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("checksums right", done.stdout)


if __name__ == "__main__":
    unittest.main()
