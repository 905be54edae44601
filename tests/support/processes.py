"""Processes that tests start, seen from outside."""

import os
import signal
import subprocess
import time
from pathlib import Path


def start(case, *command, ignores=(), **options):
    """A program that ends with its test case at the latest. It ignores the signals in `ignores` and
    no others, even if the tests run under nohup, which makes them ignore SIGHUP."""
    words = ["/usr/bin/env", "--default-signal=HUP,INT,QUIT,TERM"]
    words += [f"--ignore-signal={signal.Signals(number).name[3:]}" for number in ignores]
    process = subprocess.Popen([*words, *map(str, command)], **options)
    case.addCleanup(end, process)
    return process


def end(process):
    process.kill()
    process.wait()
    for stream in filter(None, (process.stdin, process.stdout)):
        stream.close()


def status_of(pid):
    """What the kernel tells about a process: its state (Z: it has ended), its parent's number, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def command_line(process):
    """That of a folder of /proc. It is empty while a process becomes another program: read again."""
    for _ in range(100):
        if line := (process / "cmdline").read_bytes():
            break
        time.sleep(0.001)
    return line.decode(errors="replace")


def own_children():
    """The command lines of the processes that this one started and that run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if status_of(process.name)[1] == str(os.getpid()):
                found.append(command_line(process))
        except OSError:  # it has just ended
            continue
    return found


def gone(pid):
    """Whether a process has ended, or is just about to."""
    for _ in range(100):
        try:
            if status_of(pid)[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
