"""Coursework: a student's tree with open tasks, and its grader (docs/coursework.md).

`tasks` knows the table and the markers in the sources, `tree` files and folders, `workshop` the
build in which both solutions and students' work are compiled, `solutions` the prebuilt objects,
`verdict` what one task's tests say. tools/exercise.py and tools/grade.py are the commands.
"""


class CourseworkError(Exception):
    """What ends a command, as one line."""
