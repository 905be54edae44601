"""What a contributor looks for: CONTRIBUTING.md, the changelog, the workflow, editors' settings."""

import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github/workflows/ci.yml"
TEXTS = (".cpp", ".h", ".inl", ".cu", ".cuh", ".py", ".md", ".txt", ".build", ".json", ".yml")


@unittest.skipUnless(WORKFLOW.is_file(), "a student's tree for GitHub Classroom has another workflow")
class TestWorkflow(unittest.TestCase):
    """.github/workflows/ci.yml: as text, and as YAML where Python has a parser."""

    @classmethod
    def setUpClass(cls):
        cls.text = WORKFLOW.read_text()

    def jobs(self):
        """The text of each job, by its name."""
        parts = re.split(r"^  (\w+):\n", self.text[self.text.index("\njobs:\n"):], flags=re.M)
        return dict(zip(parts[1::2], parts[2::2]))

    def test_tests_and_lint_run_on_both_releases_and_the_layout_is_checked(self):
        jobs = self.jobs()
        self.assertEqual({"test": ".ci/run", "lint": "./lockstep lint",
                          "format": "./lockstep format --check"},
                         {name: re.findall(r"^      - run: (.*)$", job, re.M)[-1]
                          for name, job in jobs.items()})
        for name in ("test", "lint"):
            self.assertIn('system: ["debian:bookworm", "debian:trixie"]\n', jobs[name])
            self.assertIn("    container: ${{ matrix.system }}\n", jobs[name])
        self.assertIn("    container: debian:trixie\n", jobs["format"])
        self.assertNotIn("continue-on-error", self.text)

    def test_it_is_yaml(self):
        self.assertNotIn("\t", self.text)
        try:
            import yaml
        except ImportError:
            return  # without a parser, the checks above are all that is possible
        jobs = yaml.safe_load(self.text)["jobs"]
        self.assertEqual(self.jobs().keys(), jobs.keys())
        for name in ("test", "lint"):
            self.assertEqual(["debian:bookworm", "debian:trixie"],
                             jobs[name]["strategy"]["matrix"]["system"])
        for job in jobs.values():
            self.assertTrue(all({"run", "uses"} & step.keys() for step in job["steps"]))

    def test_it_starts_with_every_change(self):
        self.assertRegex(self.text, r"(?m)^on:\n  push:\n  pull_request:\n")


class TestDocuments(unittest.TestCase):
    def test_the_changelog_has_this_version_and_what_comes_next(self):
        text = (ROOT / "CHANGELOG.md").read_text()
        version = re.search(r"version: '([\d.]+)'", (ROOT / "meson.build").read_text()).group(1)
        headings = re.findall(r"^## (.*)$", text, re.M)
        self.assertEqual("[Unreleased]", headings[0])
        self.assertRegex(headings[1], rf"^\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$")

    def test_contributing_is_short_and_what_it_links_to_exists(self):
        text = (ROOT / "CONTRIBUTING.md").read_text()
        self.assertLessEqual(len(text.splitlines()), 120)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            self.assertTrue((ROOT / target).exists(), target)
        for command in ("run", "test", "format", "lint", "doctor"):
            self.assertIn(f"./lockstep {command}", text)

    def test_editors_settings_are_those_of_the_tree(self):
        folders = [ROOT / name for name in ("common", "tests", "tools", "docs", ".github")]
        for folder in [ROOT, *folders, *ROOT.glob("0[1-9]-*")]:
            for path in folder.glob("*") if folder == ROOT else folder.rglob("*"):
                if path.is_file() and path.suffix in TEXTS and path.parent.name != "reference":
                    self.check_layout(path)

    def check_layout(self, path):
        """Checks what .editorconfig says about every file that no program writes."""
        with self.subTest(str(path)):
            text = path.read_bytes().decode()
            self.assertNotIn("\r", text)
            self.assertNotRegex(text, re.compile(r"[ \t]+$", re.M))
            self.assertTrue(text.endswith("\n") or not text)


if __name__ == "__main__":
    unittest.main()
