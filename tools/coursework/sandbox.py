"""Where students' code is compiled and run: in a room without network, environment and other files.

bubblewrap makes the room (Debian's package); where it is not, or may not, util-linux does with user
namespaces (namespaces.py). Some systems permit these to container tools alone: then Podman makes them. Where
none of this can be, there is no room, and whoever grades is told. Limits of time, processes, memory and disk
hold in each case, those of disk in /tmp only in a room.
"""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from coursework.watch import family

BUBBLEWRAP, NAMESPACES, PODMAN, NONE = "bubblewrap", "user namespaces", "Podman's user namespaces", "none"
# What programs and compilers need of a system. The rest of it is not there.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives",
          "/etc/hosts", "/etc/nsswitch.conf")
TOOLS = ("ninja", "bash", "setpriv", os.environ.get("CXX", "c++").split()[0])
MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    processes: int = 512  # threads included
    memory: int = 5120 * MIB  # of all processes together
    disk: int = 256 * MIB  # in /tmp
    file: int = 64 * MIB  # of a file
    address_space: int = 0  # of each process; 0: as much as it likes, as AddressSanitizer does
    processor: int = 0  # seconds, of each process; 0: no limit but the deadline

    def command(self, processes):
        """What to put before a command, in which so many processes are allowed."""
        said = [f"ulimit -c 0 -f {self.file // 1024}"]
        said += [f"ulimit -u {processes}"] if processes else []
        said += [f"ulimit -v {self.address_space // 1024}"] if self.address_space else []
        said += [f"ulimit -t {self.processor}"] if self.processor else []
        return ("bash", "-c", "; ".join(said) + '; exec "$@"', "limits")


RUNNING = Limits()
COMPILING = Limits(disk=1024 * MIB, file=512 * MIB, address_space=3072 * MIB, processor=120)


@dataclass(frozen=True)
class View:
    """What a command sees beside the system, everything in its own place."""

    readable: tuple = ()
    writable: tuple = ()
    hidden: tuple = ()  # folders inside those, which are empty for the command
    foreign: bool = True  # as a user of its own, if whoever grades is root


class Sandbox:
    """One way to make a room. `why` says why it is no better one."""

    def __init__(self, kind, why=""):
        self.kind, self.why = kind, why

    @property
    def is_root(self):
        return os.geteuid() == 0

    def command(self, words, view, limits, environment):
        """The command that runs `words` in a room."""
        if self.kind == NONE:
            kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
            environment = {**kept, **environment}
            told = [f"{name}={value}" for name, value in environment.items()]
            return ["env", "-i", *told, *limits.command(0), *map(str, words)]
        foreign = view.foreign and self.is_root
        processes = limits.processes + (0 if foreign else threads_of_user())
        inside = [*self.other_user(foreign), *limits.command(processes), *map(str, words)]
        environment = {"PATH": tool_path(), "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8",
                       "CCACHE_DISABLE": "1", **environment}
        make = self.bubblewrap if self.kind == BUBBLEWRAP else self.namespaces
        return [*make(view, limits, environment, foreign), *inside]

    def other_user(self, foreign):
        """Root is not limited in its processes: the program gets a user that nobody else is."""
        if not foreign:
            return []
        user = random.SystemRandom().randrange(1 << 20, 1 << 30)
        return ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--no-new-privs",
                "--bounding-set=-all", "--inh-caps=-all"]

    def bubblewrap(self, view, limits, environment, foreign):
        words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-net",
                 "--unshare-uts", "--unshare-cgroup-try", "--clearenv"]
        words += ["--cap-drop", "ALL"] if self.is_root else ["--unshare-user", "--disable-userns"]
        if foreign:  # and then it drops these, too
            words += [word for name in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{name}")]
        for name, value in environment.items():
            words += ["--setenv", name, value]
        for path, link in system_paths():
            words += ["--symlink", link, path] if link else shown("--ro-bind", path)
        words += ["--proc", "/proc", "--dev", "/dev", *memory_folder("/dev/shm", 64 * MIB),
                  "--remount-ro", "/dev", *memory_folder("/tmp", limits.disk)]
        for option, paths in (("--ro-bind", view.readable), ("--bind", view.writable)):
            words += [word for path in paths for word in shown(option, str(path))]
        for path in view.hidden:
            words += ["--tmpfs", str(path)]
        return [*words, "--remount-ro", "/", "--chdir", "/tmp", "--"]

    def namespaces(self, view, limits, environment, foreign):
        words = ["podman", "unshare"] if self.kind == PODMAN else []  # a user's namespace, which unshare then needs not make
        words += ["unshare", *([] if words or self.is_root else ["--user", "--map-root-user"]), "--mount", "--pid", "--net",
                  "--ipc", "--uts", "--fork", "--kill-child", "env", "-i",
                  *(f"{name}={value}" for name, value in environment.items()),
                  sys.executable, str(Path(__file__).with_name("namespaces.py")), "--disk", str(limits.disk)]
        words += ["--keep-rights"] if foreign else []
        for path, link in system_paths():
            words += ["--link", path, link] if link else ["--readable", path]
        for option, paths in (("--readable", view.readable), ("--writable", view.writable), ("--hidden", view.hidden)):
            for path in paths:
                words += [option, str(path)]
        return [*words, "--"]


def shown(option, path):
    """What tells bubblewrap to show `path`. It would make the folders above for root alone."""
    above = [word for folder in reversed(Path(path).parents[:-1]) for word in ("--perms", "0755", "--dir", str(folder))]
    return [*above, option, path, path]


def memory_folder(path, size):
    return ["--perms", "1777", "--size", str(size), "--tmpfs", path]


def system_paths():
    """The places of SYSTEM that are here, and those of tools elsewhere; for a link what it says."""
    for path in SYSTEM:
        if os.path.islink(path):
            yield path, os.readlink(path)
        elif os.path.exists(path):
            yield path, ""
    for folder in sorted({os.path.dirname(place) for place in tool_places() if not place.startswith(SYSTEM[:3])}):
        yield folder, ""


def tool_places():
    """Where the tools are, and where links of them lead. A build also depends on Meson's Python: without it
    Ninja would have the build's files made anew."""
    found = [sys.executable, *(place for tool in TOOLS if (place := shutil.which(tool)))]
    return {*found, *map(os.path.realpath, found)}


def tool_path():
    folders = [os.path.dirname(place) for tool in TOOLS if (place := shutil.which(tool))]
    return ":".join(dict.fromkeys([*folders, "/usr/bin", "/bin", "/usr/sbin", "/sbin"]))


def threads_of_user():
    """How many threads this user has: older kernels count them against a room's limit, too."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.geteuid():
                count += len(os.listdir(process / "task"))
        except OSError:
            continue  # it has just ended
    return count


def find_sandbox(wanted=True):
    """The best room that can be had here."""
    if not wanted:
        return Sandbox(NONE, "--no-sandbox")
    reasons = []
    for kind, tool in ((BUBBLEWRAP, "bwrap"), (NAMESPACES, "unshare"), (PODMAN, "podman")):
        if not shutil.which(tool):
            reasons.append(f"there is no {tool}")
        elif (said := try_out(Sandbox(kind))) == "":
            return Sandbox(kind, "; ".join(reasons))
        else:
            reasons.append(f"{tool}: {said}")
    return Sandbox(NONE, "; ".join(reasons))


def try_out(sandbox):
    """What is wrong with a kind of room; "" if nothing is."""
    try:
        done = subprocess.run(sandbox.command(["true"], View(), RUNNING, {}), capture_output=True, text=True,
                              timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return "" if done.returncode == 0 else lines[-1]


class Guard:
    """Ends the processes in `running`, and all that they started, when together they have more memory or
    processes than the limits say. `exceeded` says what it was."""

    PERIOD = 0.1  # seconds

    def __init__(self, running, limits):
        self.running, self.limits = running, limits
        self.exceeded, self.over = "", threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def look(self):
        while not self.over.wait(self.PERIOD):
            for leader in self.running:
                self.exceeded = self.exceeded or self.excess(family(leader.pid))
                if self.exceeded:
                    leader.kill()

    def excess(self, pids):
        if len(pids) > self.limits.processes:
            return f"more than {self.limits.processes} processes were started"
        if sum(map(resident, pids)) > self.limits.memory:
            return f"more than {self.limits.memory // (1024 * MIB)} GiB of memory were taken"
        return ""


def resident(pid):
    """Bytes of a process that are in memory."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
