"""Coursework: a student's tree with open tasks, and its grader (docs/coursework.md).

`tasks` reads the table and the markers in the sources, `tree` handles files and folders, `workshop`
the build in which both solutions and students' work are compiled, `solutions` the prebuilt objects,
`verdict` the results of one task's tests. tools/exercise.py and tools/grade.py are the commands.
"""

import sys

from child_signals import end_by_exception

SOLUTIONS = "solutions"  # the folder of a student's tree with the prebuilt objects


class CourseworkError(Exception):
    """Ends a command, with one line."""


def run_command(main):
    """Ends this process with main's status; a signal unwinds it first, so that nothing is left."""
    end_by_exception()
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


def names(paths, limit=5):
    """Paths in a message: the first few, and how many more there are."""
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more
