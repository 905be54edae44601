"""Slurm: each of its lines in docs/launching.md, in a cluster of one node made for the test.

It needs Debian's slurm-wlm and munge. Nothing of the system's own configuration is read or changed."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build-test"))
SERVERS = ("munged", "slurmctld", "slurmd")
DEADLINE = 60  # seconds for one command
FEW_STEPS = ["--data", "synthetic:120:10", "--batch-size", "12", "--lr", "0.01", "--order", "sampler",
             "--workers", "0"]

# Four processors, however many there are: Slurm only places tasks.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES State=UP
"""


def program(name):
    """Debian keeps servers in a folder that not every PATH has."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")


def reason_to_skip():
    missing = [name for name in (*SERVERS, "srun", "sbatch") if not program(name)]
    if missing:
        return "no Slurm: " + ", ".join(missing)
    return None if os.geteuid() == 0 else "no Slurm: its servers want to be started by root"


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """One node. Its servers are children of this process, which ends them."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        for name in ("state", "spool", "munge"):
            (self.folder / name).mkdir()
        (self.folder / "key").write_bytes(os.urandom(128))
        (self.folder / "key").chmod(0o600)
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            folder=self.folder, host=socket.gethostname().split(".")[0], ports=free_ports(2)))
        self.servers = []

    def start(self):
        munge = self.folder / "munge"
        self.serve("munged", "--foreground", "--key-file", self.folder / "key", "--socket",
                   munge / "socket", "--pid-file", munge / "pid", "--log-file", munge / "log",
                   "--seed-file", munge / "seed")
        self.wait_until(lambda: (munge / "socket").exists())
        self.serve("slurmctld", "-D")
        self.serve("slurmd", "-D", "-N", "localhost")
        self.wait_until(lambda: self.state().startswith("idle"))

    def serve(self, name, *words):
        log = open(self.folder / f"{name}.out", "w")
        with log:
            self.servers.append(subprocess.Popen([program(name), *map(str, words)], stdout=log, stderr=log,
                                                 stdin=subprocess.DEVNULL, env=self.environment))

    def state(self):
        return subprocess.run([program("sinfo"), "--noheader", "--format", "%T"], capture_output=True,
                              text=True, env=self.environment, timeout=DEADLINE).stdout

    def wait_until(self, is_true):
        begin = time.monotonic()
        while not is_true():
            if time.monotonic() - begin > DEADLINE:
                raise TimeoutError(self.logs())
            time.sleep(0.05)

    def logs(self):
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}"
                         for path in sorted(self.folder.rglob("*")) if path.suffix in (".log", ".out"))

    def stop(self):
        for server in reversed(self.servers):
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        shutil.rmtree(self.folder)


def page_lines():
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/launching.md").read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if re.match(r"(srun|sbatch)\b", line)]


class TestSlurm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if reason_to_skip():
            return
        cls.cluster = Cluster()
        cls.addClassCleanup(cls.cluster.stop)
        cls.cluster.start()

    def setUp(self):
        if reason_to_skip():
            self.skipTest(reason_to_skip())
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = Path(folder.name)

    def add_stage(self, name):
        """A program of that name in the tree, which trains for few steps and saves its weights."""
        place = self.tree / "build" / name
        place.parent.mkdir(parents=True)
        words = " ".join([str(BUILD / name), *FEW_STEPS, "--save", str(self.tree / "weights")])
        place.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        place.chmod(0o755)

    def run_line(self, line, **variables):
        done = subprocess.run(["bash", "-c", line], cwd=self.tree, capture_output=True, text=True,
                              timeout=DEADLINE, stdin=subprocess.DEVNULL,
                              env={**self.cluster.environment, "SBATCH_WAIT": "1", **variables})
        printed = "".join(path.read_text() for path in self.tree.glob("slurm-*.out"))
        return done, done.stdout + done.stderr + printed

    def weights(self):
        found = (self.tree / "weights").read_bytes()
        (self.tree / "weights").unlink()
        return found

    def expected(self, ranks):
        devices = ",".join(f"cpu:{rank}" for rank in range(ranks))
        subprocess.run([self.tree / "build/04-ddp/04-ddp", "--devices", devices], check=True,
                       capture_output=True, timeout=DEADLINE)
        return self.weights()

    def test_every_line_of_the_page_leads_to_the_weights_of_our_launcher(self):
        self.add_stage("04-ddp/04-ddp")
        lines = page_lines()
        self.assertEqual(len(lines), 3, lines)
        for line, ranks in zip(lines, (4, 4, 2)):
            with self.subTest(line=line):
                done, story = self.run_line(line)
                self.assertEqual(done.returncode, 0, story)
                self.assertEqual("no launcher: starting 2 local ranks" in story, "srun" not in line, story)
                self.assertIn(f"{ranks} ranks over", story)
                self.assertEqual(self.weights(), self.expected(ranks))

    def test_a_batch_script_is_one_process_for_stage_05_too(self):
        self.add_stage("05-syncbn-checkpoint/05-syncbn-checkpoint")
        done, story = self.run_line(
            "sbatch --ntasks 2 --wrap './build/05-syncbn-checkpoint/05-syncbn-checkpoint "
            "--devices cpu:0,cpu:1 --checkpoint-dir checkpoints'")
        self.assertEqual(done.returncode, 0, story)
        self.assertIn("2 ranks over", story)
        self.assertTrue(list((self.tree / "checkpoints").iterdir()))

    def test_an_address_that_is_set_is_taken_and_pmi_beside_it_changes_nothing(self):
        self.add_stage("04-ddp/04-ddp")
        port = str(free_ports(1)[0])
        for words in ("", "--mpi=pmi2"):
            done, story = self.run_line(f"srun {words} --ntasks 2 ./build/04-ddp/04-ddp",
                                        MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            self.assertEqual(done.returncode, 0, story)
            self.assertEqual(self.weights(), self.expected(2))

    def test_what_a_job_was_asked_for_per_node_is_no_fact_of_its_steps(self):
        self.add_stage("04-ddp/04-ddp")
        done, story = self.run_line(
            "sbatch --ntasks-per-node 1 --wrap 'srun --ntasks 4 --overcommit ./build/04-ddp/04-ddp'")
        self.assertEqual(done.returncode, 0, story)
        self.assertIn("4 ranks over", story)
        self.assertEqual(self.weights(), self.expected(4))

    def test_two_steps_of_a_job_run_beside_each_other(self):
        self.add_stage("04-ddp/04-ddp")
        step = "(srun --ntasks 2 --overcommit --overlap ./build/04-ddp/04-ddp || touch failed)"
        done, story = self.run_line(f"sbatch --ntasks 2 --wrap '{step} & {step}; wait'")
        self.assertEqual(done.returncode, 0, story)
        self.assertFalse((self.tree / "failed").exists(), story)
        self.assertEqual(story.count("2 ranks over"), 2, story)
        self.assertEqual(self.weights(), self.expected(2))

    def test_one_task_is_one_process(self):
        self.add_stage("04-ddp/04-ddp")
        done, story = self.run_line("srun --ntasks 1 ./build/04-ddp/04-ddp --devices cpu:0,cpu:1")
        self.assertEqual(done.returncode, 0, story)
        self.assertIn("no launcher: starting 2 local ranks", story)


if __name__ == "__main__":
    sys.exit(unittest.main())
