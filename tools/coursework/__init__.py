"""Coursework: a student's tree with open tasks, and its grader (docs/coursework.md).

`tasks` reads the table and the markers in the sources, `tree` handles files and folders, `workshop`
the build in which both solutions and students' work are compiled, `solutions` the prebuilt objects,
`verdict` the results of one task's tests. tools/exercise.py and tools/grade.py are the commands.
"""

SOLUTIONS = "solutions"  # the folder of a student's tree with the prebuilt objects


class CourseworkError(Exception):
    """Ends a command, with one line."""


def names(paths, limit=5):
    """Paths in a message: the first few, and how many more there are."""
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more
