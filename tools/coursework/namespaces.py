#!/usr/bin/env python3
"""Makes a room of the namespaces that `unshare` has made, and runs a command in it (sandbox.py)."""

import argparse
import array
import fcntl
import os
import socket
import struct
import subprocess
import sys

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of <net/if.h>
ROOM = "/sys"  # a folder that every system has: in these namespaces the room covers it
NO_RIGHTS = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")


def mount(*words):
    subprocess.run(["mount", *words], check=True)


def bind(root, path, *options):
    """Shows what is at `path` at the same place below `root`."""
    place = root + path
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        open(place, "a").close()
    mount("--rbind", path, place)
    for option in options:
        mount("-o", f"remount,bind,{option}", place)


def memory_folder(place, options):
    os.makedirs(place, exist_ok=True)
    mount("-t", "tmpfs", "-o", options, "tmpfs", place)


def start_loopback():
    """127.0.0.1, which ranks talk over, is down in a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        request = array.array("B", struct.pack("16sh", b"lo", 0) + bytes(16))
        fcntl.ioctl(anything, GET_FLAGS, request)
        flags, = struct.unpack_from("h", request, 16)
        struct.pack_into("h", request, 16, flags | UP)
        fcntl.ioctl(anything, SET_FLAGS, request)


def make_room(root, options):
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", root)
    for path, leads_to in options.link:
        os.symlink(leads_to, root + path)
    memory_folder(root + "/tmp", f"size={options.disk},mode=1777")
    for path in options.readable:
        bind(root, path, "ro")
    for path in options.writable:
        bind(root, path)
    for path in options.hidden:
        memory_folder(root + path, "size=1m,ro")
    # Nobody's devices in a folder of everybody's: then Linux lets no user but root write to /dev/null.
    memory_folder(root + "/dev", "size=1m,mode=755")
    for name in DEVICES:
        bind(root, f"/dev/{name}")
    for name, leads_to in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
                           ("stderr", "/proc/self/fd/2")):
        os.symlink(leads_to, f"{root}/dev/{name}")
    memory_folder(root + "/dev/shm", f"size={64 << 20},mode=1777")
    mount("-o", "remount,bind,ro", root + "/dev")
    os.makedirs(root + "/proc", exist_ok=True)
    mount("-t", "proc", "proc", root + "/proc")
    mount("-o", "remount,bind,ro", root)


def main():
    parser = argparse.ArgumentParser()
    for name in ("--readable", "--writable", "--hidden"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--link", nargs=2, action="append", default=[])
    parser.add_argument("--disk", type=int, required=True)
    parser.add_argument("--keep-rights", action="store_true", help="the command gives them up itself")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    os.umask(0o022)  # another user enters the folders of the room
    start_loopback()
    make_room(ROOM, options)
    os.chroot(ROOM)
    os.chdir("/tmp")
    command = options.command if options.keep_rights else [*NO_RIGHTS, *options.command]
    if (child := os.fork()) == 0:
        close_descriptors()
        os.execvp(command[0], command)
    sys.exit(wait_for(child))


def close_descriptors():
    """All but the tests' socket: Podman leaves some of its own open."""
    kept = int(os.environ.get("LOCKSTEP_WITNESS", 2))
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def wait_for(child):
    """The status of the command. It is not the room's first process: that one gets no signal which it does not
    expect, not even from itself. Orphans come to this process, which ends them by its own end."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the tests' socket is the command's only
    while (ended := os.wait())[0] != child:
        pass
    status = os.waitstatus_to_exitcode(ended[1])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    main()
