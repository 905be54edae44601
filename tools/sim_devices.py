"""Simulated devices as commands name them: "sim:h100x8", eight devices with the figures of a profile."""

import re
import sys
from pathlib import Path

from compare import Refused
from plain_files import read_json

PROFILES = Path(__file__).resolve().parent / "profiles"


def path_of_profile(name):
    """Of tools/profiles/, or the path itself."""
    return Path(name).resolve() if "/" in name else PROFILES / f"{name}.json"


def read_profile(path):
    """A profile's figures; what else is wrong with them, the programs say. Raises Refused, in words."""
    try:
        profile = read_json(path, largest=sys.float_info.max)  # a rate of 1e30 costs no time
        if not is_profile(profile):
            raise ValueError("it is JSON, but no profile")
        return profile
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(each.stem for each in PROFILES.glob("*.json")))
        raise Refused(f"--devices: no profile {path} ({error}); there are: {known}") from error


def is_profile(found):
    parts = {"device": str, "source": str, "memory_bytes": (int, float), "operations": dict, "links": dict}
    return isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in parts.items())


def devices_of(text):
    """The profile's path and the devices of a host, from "sim:h100x8"."""
    found = re.fullmatch(r"sim:(?:(.*?)x)?([0-9]+)", text)
    if not found or int(found[2]) == 0:
        raise Refused(f"--devices: '{text}', expected simulated devices such as sim:8 or sim:h100x8 "
                      "(docs/simulation.md)")
    return path_of_profile(found[1] or "default"), int(found[2])
