"""What a graded program says of itself, and whether that can be believed.

A student's code runs in the same process as the tests. So the tests' words come through a socket, and
each line begins with a nonce: the grader makes a new one for each run, and the program keeps it in memory
that cannot be read (tests/coursework/witness.cpp). Lines are numbered. The cases, their order and the
places of their assertions are compared with those of a run of the solution, and so are the values that
hidden cases compute.
"""

import json
import math
import secrets
import socket
import threading
from dataclasses import dataclass, field

MOST = 64 << 20  # bytes that a run may say
KINDS = {"ok": bool, "line": int, "passed": int, "failed": int}  # of what an event has; all else is text
TOLERANCE = 1e-4  # of numbers with a fraction: sums may be made in another order


@dataclass
class Case:
    """A test case that began."""

    name: str
    places: set = field(default_factory=set)  # of its assertions: file, line
    passed: int = 0  # assertions
    failed: int = 0
    ended: bool = False


@dataclass
class Account:
    """All that a run said."""

    cases: list = field(default_factory=list)
    values: list = field(default_factory=list)  # of hidden cases: name of the case, label, value
    failure: dict = field(default_factory=dict)  # the first
    hint: str = ""  # of where the test is
    ended: bool = False  # the run, by itself
    fault: str = ""  # why its words do not count

    @property
    def running(self):
        """The name of the case in whose middle the run ended; "" if there is none."""
        return self.cases[-1].name if self.cases and not self.cases[-1].ended else ""

    def take(self, event):
        kind = event["event"]
        if kind == "case":
            self.cases.append(Case(event["name"]))
        elif kind == "hint":
            self.hint = event["text"]
        elif kind == "run ended":
            self.ended = True
            self.count("the run", event, self.cases)
        else:
            self.take_of_case(kind, event, self.cases[-1])

    def take_of_case(self, kind, event, case):
        if kind == "assertion":
            case.places.add((event["file"], event["line"]))
            case.passed += event["ok"]
            case.failed += not event["ok"]
            if not event["ok"] and not self.failure:
                self.failure = {**event, "case": case.name}
        elif kind == "value":
            self.values.append((case.name, event["label"], event["value"]))
        elif kind == "case ended":
            case.ended, self.hint = True, ""
            self.count(f"case '{case.name}'", event, [case])

    def count(self, what, event, cases):
        """The number of assertions that came has to be that of those that were made."""
        came = sum(case.passed for case in cases), sum(case.failed for case in cases)
        if came != (event["passed"], event["failed"]):
            self.fault = self.fault or (f"{what} made {event['passed']} assertions that passed and "
                                        f"{event['failed']} that failed, and told of {came[0]} and {came[1]}")


class Witness:
    """Listens to one run. `options` go to the program's start."""

    def __init__(self, seed=0):
        self.nonce, self.account = secrets.token_hex(16), Account()
        self.ours, self.theirs = socket.socketpair()
        self.ours.sendall(f"{self.nonce} {seed}\n".encode())
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.lines = 0

    @property
    def descriptor(self):
        return self.theirs.fileno()

    @property
    def environment(self):
        return {"LOCKSTEP_WITNESS": str(self.descriptor)}

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        """After the program and all that it started have ended."""
        self.theirs.close()
        self.thread.join(10)
        self.ours.close()

    def listen(self):
        said, line = 0, b""
        while part := self.receive():
            said += len(part)
            if said > MOST:
                self.fail(f"it said more than {MOST >> 20} MiB")
                self.ours.shutdown(socket.SHUT_RDWR)
                return
            *whole, line = (line + part).split(b"\n")
            for one in whole:
                self.take(one.decode(errors="replace"))
        if line and self.account.ended:  # a crash may cut a line short
            self.fail("words after the end")

    def receive(self):
        try:
            return self.ours.recv(1 << 16)
        except ConnectionResetError:  # it ended without having read its nonce
            return b""

    def take(self, line):
        nonce, number, text = (line.split(" ", 2) + ["", ""])[:3]
        if not secrets.compare_digest(nonce.encode(), self.nonce.encode()):
            self.fail("a line that is not the tests' own")
        elif number != str(self.lines):
            self.fail(f"line {number} came as number {self.lines}")
        else:
            self.lines += 1
            try:
                self.account.take(checked(json.loads(text)))
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                self.fail("a line that cannot be read")

    def fail(self, why):
        self.account.fault = self.account.fault or why


def checked(event):
    """An event whose numbers are numbers, and its texts texts of whole characters: a student's code may have written
    it."""
    for key, value in event.items():
        if type(value) is not KINDS.get(key, str):
            raise TypeError(f"{key}: {value!r}")
        str(value).encode()
    return event


# --- Beside a run of the solution ----------------------------------------------------------------

def disagreement(account, solution):
    """Why a run that passed counts as none, beside the solution's; "" if it counts."""
    if account.fault:
        return account.fault
    if not account.ended:
        return "the run did not come to its end"
    names, expected = ([case.name for case in told.cases] for told in (account, solution))
    if names != expected:
        return (f"cases ran that are others than the tests': {len(names)}, expected {len(expected)} "
                "in the order of the tests")
    for case, right in zip(account.cases, solution.cases):
        if missing := right.places - case.places:
            file, line = min(missing)
            return f"case '{case.name}' left out the assertion at {file}:{line}"
    return ""


@dataclass(frozen=True)
class Difference:
    """The first value of a hidden case that is not the solution's."""

    case: str
    label: str
    found: str
    expected: str


def first_difference(values, expected):
    """None if all values are the solution's."""
    for number, (case, label, value) in enumerate(expected):
        if number >= len(values) or values[number][0] != case:
            return Difference(case, label, "nothing", value)
        if values[number][1] != label or not same(values[number][2], value):
            found = values[number][2] if values[number][1] == label else f"{values[number][1]}: {values[number][2]}"
            return Difference(case, label, found, value)
    if len(values) > len(expected):
        case, label, value = values[len(expected)]
        return Difference(case, label, value, "nothing")
    return None


def same(found, expected):
    """Whether two texts have the same words; numbers with a fraction may differ by rounding."""
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(map(same_word, ours, theirs))


def same_word(found, expected):
    if found == expected:
        return True
    if is_whole(found) and is_whole(expected):
        return False
    try:
        ours, theirs = float(found), float(expected)
    except ValueError:
        return False
    return math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def is_whole(word):
    return word.removeprefix("-").isdigit()
