"""The course (docs/course/) keeps to the tree: its weeks have every task, lab and exercise, its sums are those of
tasks.json, each task has its questions, each lesson its slides, each exercise its answer.

That the code on the slides is the sources' is test_quotes.py's; that links lead somewhere, test_links.py's; that
commands exist, readme/test_commands.py's."""

import math
import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from coursework import labs, tasks, teacher  # noqa: E402

COURSE = ROOT / "docs/course"
LESSONS = {"01": "01-single-gpu", "02": "02-dataparallel", "03-pipeline": "03-model-split/pipeline",
           "03-tensor": "03-model-split/tensor", "04": "04-ddp", "05": "05-syncbn-checkpoint",
           "06": "06-fully-sharded", "07": "07-mesh"}
MINUTES = {"lesson": 120, "lab": 10, "exercise": 60}  # "Hours" says this rule


def section(page, heading):
    """The text below a heading of level two."""
    text = (COURSE / page).read_text()
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def table(text):
    """The rows of a section's table, by the names of its columns."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(rows[0], row)) for row in rows[2:]]


def lesson_of(task):
    if task.id[:2] != "03":
        return task.id[:2]
    return "03-tensor" if "/tensor/" in task.file else "03-pipeline"


def exercises_of(lesson):
    """The numbers of the exercises at the end of a lesson."""
    text = (ROOT / LESSONS[lesson] / "README.md").read_text()
    return [int(number) for number in re.findall(r"^(\d+)\. ", text.split("\n## Exercises\n")[1], re.M)]


def exercises_in(cell):
    """Pairs of lesson and number: 01: 1, 3; 02: 5."""
    return [(lesson, int(number)) for lesson, numbers in re.findall(r"([\w-]+): ([\d, ]+)", cell)
            for number in numbers.split(",")]


class TestWeeks(unittest.TestCase):
    def setUp(self):
        self.tasks = {task.id: task for task in tasks.load_tasks(ROOT)}
        self.plans = [table(section("README.md", heading)) for heading in ("Six weeks", "Twelve weeks")]

    def column(self, week, name):
        return re.findall(r"[\w.-]+", next(cell for head, cell in week.items() if head.startswith(name)))

    def test_every_task_comes_once_and_after_what_it_needs(self):
        for plan in self.plans:
            order = [task for week in plan for task in self.column(week, "tasks")]
            self.assertEqual(sorted(self.tasks), sorted(order))
            for place, task in enumerate(order):
                for needed in self.tasks[task].needs:
                    self.assertIn(needed, order[:place], task)

    def test_every_lab_comes_once_in_a_week_of_its_stage(self):
        for plan in self.plans:
            found = [name for week in plan for name in self.column(week, "labs")]
            self.assertEqual(sorted(labs.load_labs()), sorted(found))
            for week in plan:
                for name in self.column(week, "labs"):
                    stage = labs.load_labs()[name]["program"][:2]
                    self.assertIn(stage, [lesson[:2] for lesson in self.column(week, "lessons")], name)

    def test_exercises_exist_and_twelve_weeks_have_all(self):
        there = [(lesson, number) for lesson in LESSONS for number in exercises_of(lesson)]
        six, twelve = ([pair for week in plan for pair in exercises_in(week["exercises"])] for plan in self.plans)
        self.assertEqual(sorted(there), sorted(twelve))
        self.assertEqual(set(), set(six) - set(there))

    def test_hours_follow_the_rule(self):
        for heading, plan in zip(("Six weeks", "Twelve weeks"), self.plans):
            weeks = [lesson for week in plan for lesson in self.column(week, "lessons")]
            self.assertEqual(set(LESSONS), set(weeks))
            for week in plan:
                minutes = sum(MINUTES["lesson"] / weeks.count(lesson) for lesson in self.column(week, "lessons"))
                minutes += MINUTES["lab"] * len(self.column(week, "labs"))
                minutes += MINUTES["exercise"] * len(exercises_in(week["exercises"]))
                minutes += sum(self.tasks[task].minutes for task in self.column(week, "tasks"))
                self.assertEqual(math.ceil(minutes / 30) / 2, float(week["hours"]), week)
            total = sum(float(week["hours"]) for week in plan)
            self.assertIn(f"The sum is {total:g} hours", section("README.md", heading))

    def test_the_first_lines_count_right(self):
        count = sum(len(exercises_of(lesson)) for lesson in LESSONS)
        text = re.sub(r"\s+", " ", (COURSE / "README.md").read_text())
        self.assertIn(f"eight lessons, {len(self.tasks)} graded tasks, {len(labs.load_labs())} labs and {count} "
                      "exercises", text)

    def test_what_may_be_left_out_is_needed_by_nothing(self):
        ids, minutes, of, points, all_points = re.search(
            r"leave out (.*?) first: .*?They are (\d+) of the (\d+) minutes and (\d+) of the (\d+) points",
            re.sub(r"\s+", " ", section("README.md", "Six weeks"))).groups()
        ids = re.findall(r"\d\d\.\d", ids)
        self.assertFalse([task.id for task in self.tasks.values() if set(task.needs) & set(ids)])
        for attribute, part, whole in (("minutes", minutes, of), ("points", points, all_points)):
            figures = {key: getattr(task, attribute) for key, task in self.tasks.items()}
            self.assertEqual((sum(figures[key] for key in ids), sum(figures.values())), (int(part), int(whole)))

    def test_each_goal_is_tested_and_each_task_has_a_goal(self):
        tested = [task for row in table(section("README.md", "Goals"))
                  for task in re.findall(r"\d\d\.\d", row["tested by"])]
        self.assertEqual(sorted(self.tasks), sorted(tested))


class TestMarks(unittest.TestCase):
    def test_points_are_those_of_the_tasks(self):
        rows = table(section("rubric.md", "Points of the tasks"))
        by_stage = {}
        for task in tasks.load_tasks(ROOT):
            by_stage.setdefault(task.id[:2], []).append(task)
        every = [task for group in by_stage.values() for task in group]
        wanted = [(stage, ", ".join(f"{task.id}: {task.points}" for task in group), group)
                  for stage, group in by_stage.items()] + [("all", f"{len(every)} tasks", every)]
        self.assertEqual([[stage, text, str(sum(task.points for task in group)), str(sum(task.minutes for task in group))]
                          for stage, text, group in wanted], [list(row.values()) for row in rows])

    def test_the_example_is_calculated_right(self):
        text = section("rubric.md", "A mark")
        points, of, result = re.search(r"(\d+) of (\d+) points are ([\d.]+)\.", text).groups()
        self.assertEqual(float(result), round(int(points) / int(of) * 50, 1))
        self.assertEqual(int(of), sum(task.points for task in tasks.load_tasks(ROOT)))

    def test_each_task_has_questions_with_a_key_point(self):
        text = (COURSE / "oral.md").read_text()
        parts = re.split(r"^### (.*)$", text, flags=re.M)[1:]
        self.assertEqual([f"{task.id} {task.name}" for task in tasks.load_tasks(ROOT)], parts[::2])
        for name, part in zip(parts[::2], parts[1::2]):
            questions = re.findall(r"^\d\. .*?\?\n   \*Key point: [^*]*\.\*$", part, re.M | re.S)
            self.assertEqual(len(questions), len(re.findall(r"^\d\. ", part, re.M)), name)
            self.assertIn(len(questions), (2, 3), name)


class TestSlides(unittest.TestCase):
    def slides(self, lesson):
        return re.split(r"^(?=## )", (COURSE / f"slides/{lesson}.md").read_text(), flags=re.M)[1:]

    def test_each_lesson_has_its_slides(self):
        self.assertEqual(sorted(LESSONS), sorted(path.stem for path in (COURSE / "slides").glob("*.md")))
        for lesson in LESSONS:
            with self.subTest(lesson):
                self.assertTrue(8 <= len(self.slides(lesson)) <= 14)
                self.assertIn(f"Read: `{LESSONS[lesson]}/README.md`", self.slides(lesson)[0])

    def test_a_question_stands_before_each_lab(self):
        for name, lab in labs.load_labs().items():
            found = [slide for lesson in LESSONS if lesson[:2] == lab["program"][:2]
                     for slide in self.slides(lesson) if f"exercise --lab {name}\n" in slide]
            self.assertEqual(1, len(found), name)
            self.assertRegex(found[0].split("```sh")[0], r"(?s)Predict.*\?", name)

    def test_the_last_slide_names_the_tasks(self):
        for task in tasks.load_tasks(ROOT):
            last = re.sub(r"\s+", " ", self.slides(lesson_of(task))[-1])
            self.assertIn(f"{task.id} ({task.name})", last)


class TestAnswers(unittest.TestCase):
    """For teachers: a student's tree has none of them, so there is nothing to check there."""

    WHERE_FROM = re.compile(r"^\*(Measured|Counted|Calculated|Recorded|To run|Not measured)\b.*:?\*", re.MULTILINE)

    def setUp(self):
        self.pages = {path.stem: path.read_text() for path in (ROOT / teacher.ANSWERS).glob("*.md")}

    def test_each_exercise_has_an_answer_that_says_where_its_figures_are_from(self):
        if self.pages:
            self.assertEqual(sorted(LESSONS), sorted(self.pages))
        for lesson, text in self.pages.items():
            head, *answers = re.split(r"^## (\d+)\. .*\n", text, flags=re.MULTILINE)
            self.assertIn("2 shared cores", re.sub(r"\s+", " ", head))
            self.assertEqual(exercises_of(lesson), [int(number) for number in answers[::2]], lesson)
            for number, answer in zip(answers[::2], answers[1::2]):
                with self.subTest(f"{lesson}: {number}"):
                    self.assertRegex(answer, self.WHERE_FROM)
                    self.assertGreater(len(answer.split()), 40)

    def test_changes_can_be_made(self):
        for lesson, text in self.pages.items():
            for patch in re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
                with self.subTest(f"{lesson}: {patch.splitlines()[0]}"):
                    done = subprocess.run(["git", "apply", "--check", "-"], input=patch, text=True, capture_output=True,
                                          cwd=ROOT)
                    self.assertEqual((0, ""), (done.returncode, done.stderr))

    def test_cases_and_headings_that_are_named_exist(self):
        there = " ".join(path.read_text() for folder, kind in (("tests", "*.cpp"), ("docs", "*.md"), ("common", "*.md"))
                         for path in (ROOT / folder).rglob(kind) if ROOT / teacher.ANSWERS not in path.parents)
        there = re.sub(r'\s+', " ", re.sub(r'"\s*\n\s*"', "", there))
        for lesson, text in self.pages.items():
            for name in re.findall(r'"([A-Z][^"]{15,})"', re.sub(r"\s+", " ", text)):
                self.assertIn(name, there, lesson)
            for path in re.findall(r"`((?:tests|docs|common)/[\w./-]+)`", text):
                self.assertTrue((ROOT / path).exists(), f"{lesson}: {path}")


if __name__ == "__main__":
    unittest.main()
