"""Coursework: a student's tree with open tasks, and its grader (docs/coursework.md).

`tasks` reads the table and the markers in the sources, `tree` handles files and folders, `workshop`
the build in which both solutions and students' work are compiled, `solutions` the prebuilt objects.
`submission` and `marked_lines` say what counts of what a student hands in, `grader` grades it: in a
`sandbox`, by what a `witness` heard, with a `verdict` for each task. tools/exercise.py, tools/grade.py
and tools/grade_class.py are the commands.
"""

SOLUTIONS = "solutions"  # the folder of a student's tree with the prebuilt objects
OPEN_FILES = f"{SOLUTIONS}/open"  # the files with tasks as they were handed out


class CourseworkError(Exception):
    """Ends a command, with one line."""


class SubmissionError(CourseworkError):
    """What was submitted is nothing that can be graded."""


def names(paths, limit=5):
    """Paths in a message: the first few, and how many more there are."""
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more
