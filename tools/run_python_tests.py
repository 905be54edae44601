#!/usr/bin/env python3
"""Run the unittest methods of a folder or file, each recorded: `run_python_tests.py PATH [-k TEXT]`.

Writes the same JSON lines as tests/support/listener.cpp to the file named by LOCKSTEP_TEST_LOG.
"""

import glob
import json
import os
import signal
import sys
import time
import unittest
from pathlib import Path

from child_processes import SKIPPED, keep_ignored_signals_here
from command_line import Parser


class RecordingResult(unittest.TextTestResult):
    """A text result that also writes the record."""

    def startTest(self, test):
        super().startTest(test)
        self.status, self.reason = "passed", ""
        self.begin = time.monotonic()
        record(event="start", case=test.id())

    def stopTest(self, test):
        super().stopTest(test)
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return  # it was interrupted, so it has no end
        record(event="end", case=test.id(), status=self.status, reason=self.reason,
               seconds=time.monotonic() - self.begin)

    def fail_by(self, error):
        """The case failed; of several errors the first is reported, by the first line that says
        anything."""
        words = [line for line in str(error[1]).splitlines() if line.strip()]
        self.reason = self.reason or (words[0] if words else error[0].__name__)
        self.status = "failed"

    def addError(self, test, error):
        super().addError(test, error)
        if isinstance(test, unittest.TestCase):
            self.fail_by(error)
        else:  # setUpClass or a module failed: no method ran, so it is its own case
            record(event="start", case=test.id())
            record(event="end", case=test.id(), status="failed", reason=str(error[1]))

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.fail_by(error)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.fail_by(error)

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.status, self.reason = "failed", "succeeds although marked as an expected failure"

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.status, self.reason = "skipped", reason


def record(**line):
    path = os.environ.get("LOCKSTEP_TEST_LOG")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def cases_in(tests):
    """The single cases of a suite of suites."""
    for test in tests:
        yield from cases_in(test) if isinstance(test, unittest.TestSuite) else [test]


def main(argv):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a file of tests, or a folder of test_*.py")
    parser.add_argument("-k", action="append", help="only tests whose name contains this")
    parser.add_argument("--without", action="append", default=[], metavar="TEXT",
                        help="no tests whose name contains this")
    options = parser.parse_args(argv)
    loader = unittest.TestLoader()
    if options.k:
        loader.testNamePatterns = [f"*{glob.escape(text)}*" for text in options.k]
    # As with Ctrl-C: what a case started is ended by its `finally`. unittest takes SystemExit for a
    # failure.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    keep_ignored_signals_here()
    folder, pattern = options.path, "test_*.py"
    if options.path.suffix == ".py":
        folder, pattern = options.path.parent, options.path.name
    tests = loader.discover(str(folder), pattern)
    if options.without:
        tests = unittest.TestSuite(case for case in cases_in(tests) if not any(
            text in case.id() for text in options.without))
    runner = unittest.TextTestRunner(resultclass=RecordingResult, verbosity=1)
    try:
        result = runner.run(tests)
        if 0 < result.testsRun == len(result.skipped):
            return SKIPPED
        return 0 if result.wasSuccessful() else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
