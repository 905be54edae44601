"""A class's marks in the forms that gradebooks read.

`grades.csv`: a row for each student. Gradescope's results.json has the keys of "Output format" in
https://gradescope-autograders.readthedocs.io/en/latest/specs/: numbers for `score`, `max_score` and
`execution_time` (seconds), texts for `output`, `name` and `number`; a `score` for the whole counts instead of
the sum of the tests'. Autolab reads the last line of what is printed as JSON, `scores` with a number for each
problem: https://docs.autolabproject.com/lab/ ("Writing Autograders"). The problems' names are those on its web site.
"""

import csv
import io
import json

from coursework.report import lines_of, points
from coursework.verdict import PASSED, Verdict


def verdicts_of(facts):
    """Verdicts, as they were before they were written down."""
    return [Verdict(**{key: value for key, value in row.items() if key != "points"}) for row in facts["tasks"]]


def grades_csv(rows, tasks):
    """One line for each student: points in all, of how many, and for each task; then notes. `rows` are
    facts by name. A cell that a spreadsheet would compute gets an apostrophe in front."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)  # some spreadsheets divide at semicolons
    writer.writerow(["student", "points", "of", *(task.id for task in tasks), "notes"])
    for name, facts in rows.items():
        by_task = {row["id"]: points(row["points"]) for row in facts["tasks"]}
        writer.writerow([harmless(name), points(facts["points"]), points(facts["of"]),
                         *(by_task.get(task.id, "") for task in tasks), harmless("; ".join(facts["notes"]))])
    return out.getvalue()


def harmless(cell):
    return "'" + cell if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def gradescope(facts):
    """results.json for one submission."""
    verdicts = verdicts_of(facts)
    tests = [{"name": f"{verdict.id} {verdict.name}", "number": verdict.id, "score": verdict.points,
              "max_score": verdict.of, "status": "passed" if verdict.status == PASSED else "failed",
              "output": "\n".join(lines_of(verdict)), "visibility": "visible"} for verdict in verdicts]
    return {"score": facts["points"], "execution_time": round(facts["seconds"]), "visibility": "visible",
            "stdout_visibility": "hidden", "output": "\n".join(facts["notes"]), "tests": tests,
            "extra_data": {"sandbox": facts["sandbox"], "hidden_cases": facts["hidden_cases"]}}


def nothing(why):
    """results.json for what cannot be graded: its student reads why."""
    return {"score": 0, "visibility": "visible", "stdout_visibility": "hidden", "output": f"could not be graded: {why}", "tests": []}


def autolab(facts):
    """The line that Autolab reads last: the points by problem."""
    return json.dumps({"scores": {row["id"]: row["points"] for row in facts["tasks"]}})
