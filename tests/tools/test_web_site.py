"""`./lockstep site`: which pages there are, where their links lead, and what Sphinx makes of them."""

import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests/support")]

import web_site  # noqa: E402
from step_page_support import BUILD  # noqa: E402

NO_PAGES = ("docs/course/answers/", "docs/course/slides/", "tools/coursework/")
AT = "https://example.org/blob/main"


class TestPages(unittest.TestCase):
    def test_every_document_is_a_page_once(self):
        found = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md")]
        found = [name for name in found if not name.startswith(("build", "subprojects", ".", *NO_PAGES))]
        self.assertEqual(sorted(found), sorted(web_site.all_pages()))

    def test_lessons_come_first_and_in_order(self):
        lessons = web_site.PAGES["Lessons"]
        self.assertEqual("Lessons", next(iter(web_site.PAGES)))
        self.assertEqual(sorted(lessons[:-1], key=lambda name: name[:2]), lessons[:-1])
        self.assertEqual({path.name for path in ROOT.glob("0*-*")}, {name.split("/")[0] for name in lessons[:-1]})
        listed = [line for line in web_site.menu().splitlines() if line.endswith(".md")]
        self.assertEqual([web_site.name_of(page) for page in web_site.all_pages()[1:]], listed)
        self.assertEqual(["01-single-gpu/index.md", "docs/glossary.md"], [listed[0], listed[len(lessons) - 1]])

    def test_each_lesson_has_the_page_of_its_step_before_the_labs(self):
        lessons = {name.removesuffix("/README.md") for name in web_site.PAGES["Lessons"][:-1]}
        self.assertEqual(lessons - {"03-model-split"}, web_site.STEPS.keys())
        for lesson, words in web_site.STEPS.items():
            text = web_site.with_step((ROOT / lesson / "README.md").read_text(), words, "step.html")
            self.assertEqual(1, text.count('<iframe src="step.html"'))
            self.assertLess(text.index("<iframe"), text.index("## Exercises"))

    def test_slides_have_the_page_of_a_step_before_the_last_slide(self):
        for page in (ROOT / web_site.SLIDES).glob("*.md"):
            before, after = web_site.with_step_slide(page.read_text()).split(web_site.STEP_SLIDE)
            self.assertEqual(page.read_text(), before + after)
            self.assertTrue(after.startswith("## Now you\n"), page)
            self.assertNotIn("\n## ", after)


class TestLinks(unittest.TestCase):
    def check(self, page, text, expected, source=AT):
        self.assertEqual(expected, web_site.copy_of(page, text, source))

    def test_links_between_documents_lead_to_pages(self):
        self.check("README.md", "[a](04-ddp/) [b](04-ddp/README.md#buckets)",
                   "[a](04-ddp/index.md) [b](04-ddp/index.md#buckets)")
        self.check("03-model-split/pipeline/README.md", "[`a[0]` b](../../README.md#x),\n[two\nlines](../tensor/)",
                   "[`a[0]` b](../../index.md#x),\n[two\nlines](../tensor/index.md)")
        self.check("docs/ddp.md", "[w](glossary.md) [`a` b](launching.md#slurm)", "[w](glossary.md) [`a` b](launching.md#slurm)")

    def test_links_into_the_glossary_s_tables_are_html(self):
        self.check("04-ddp/README.md", "[`a` b](../docs/glossary.md#rank)",
                   '<a href="../docs/glossary.html#rank">`a` b</a>')

    def test_links_into_the_source_lead_to_its_address_or_are_text(self):
        text = "[main.cpp](main.cpp), [a](../docs/course/slides/)"
        self.check("04-ddp/README.md", text, f"[main.cpp]({AT}/04-ddp/main.cpp), [a]({AT}/docs/course/slides)", AT + "/")
        self.check("04-ddp/README.md", text, "main.cpp, a", source="")

    def test_all_else_stays(self):
        for text in ("[a](#b)", "[a](https://example.org/README.md)", "![a](../docs/figures/ring.svg)",
                     "`[a](main.cpp)`", "```cpp\n[a](main.cpp)\n```", "in [0, 1](no link)"):
            self.check("04-ddp/README.md", text, text)

    def test_copies_lead_to_copies(self):
        with tempfile.TemporaryDirectory() as folder:
            web_site.write_pages(Path(folder), "", steps=False)
            for page in web_site.all_pages():
                copy = Path(folder, web_site.name_of(page))
                for link in web_site.LINK.finditer(copy.read_text()):
                    target = (link["target"] or "").partition("#")[0]
                    if target and ":" not in target:
                        self.assertTrue((copy.parent / target).is_file(), f"{page}: {target}")


class TestWithSphinx(unittest.TestCase):
    @unittest.skipIf(web_site.lacking(), "no Sphinx")
    def test_the_site_has_pages_menu_search_and_steps(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, ROOT / "tools/web_site.py", "--build", BUILD, "--to", folder],
                                  capture_output=True, text=True)
            said = re.findall(r"^site: not found: pandoc.*\n", done.stderr)
            self.assertEqual((0, done.stderr), (done.returncode, "" if web_site.pandoc() else "".join(said)))
            for page in web_site.all_pages():
                self.assertTrue(Path(folder, web_site.name_of(page)).with_suffix(".html").is_file(), page)
            lesson = Path(folder, "04-ddp/index.html").read_text()
            self.assertIn('href="../docs/glossary.html#rank"', lesson)
            self.assertIn('<iframe src="step.html"', lesson)
            self.assertIn("</html>", Path(folder, "04-ddp/step.html").read_text())
            self.assertNotIn('class="xref myst"', lesson)  # a link that MyST dropped
            styles = "".join(path.read_text() for path in Path(folder, "_static").rglob("*.css"))
            self.assertRegex(styles, r"prefers-color-scheme: ?dark\) ?\{\s*body:not\(\[data-theme=\"?light\"?\]\) ?\{"
                                     r"[^}]*--color-background-primary")
            self.assertTrue(Path(folder, "searchindex.js").is_file())
            self.check_slides(Path(folder))
            self.check_places(Path(folder))

    def check_slides(self, folder):
        """They need no other file: the page of a step is in each. Without pandoc there are none."""
        made = {path.stem: path.read_text() for path in (folder / web_site.SLIDES).glob("*.html")}
        written = {path.stem for path in (ROOT / web_site.SLIDES).glob("*.md")} if web_site.pandoc() else set()
        self.assertEqual(written, made.keys())
        for name, text in made.items():
            self.assertEqual(1, len(re.findall(r'<iframe\s+src="data:text/html', text)), name)
            self.assertEqual([], re.findall(r'(?:src|href)="(?!data:|#|https?:)[^"]*', text), name)

    def is_whole(self, page):
        return page.name == "step.html" or page.parent.name == "slides"

    def check_places(self, folder):
        """Whatever a page of a document names is there: files, and places in pages."""
        pages = {path.resolve(): path.read_text() for path in folder.rglob("*.html")}
        places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
        for page, text in pages.items():
            for name in set(re.findall(r'(?:href|src)="(?!#"|\w+:|//)([^"]+)"', text)) if not self.is_whole(page) else ():
                file, _, place = name.partition("#")
                found = (page.parent / file.partition("?")[0]).resolve() if file else page
                self.assertTrue(found.is_file(), f"{page}: {name}")
                if place and found in places:
                    self.assertIn(place, places[found], f"{page}: {name}")

    def test_an_absent_generator_is_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, "-S", ROOT / "tools/web_site.py", "--to", folder],
                                  capture_output=True, text=True)
        self.assertEqual((1, 1), (done.returncode, done.stderr.count("\n")))
        self.assertIn("not found: sphinx, myst_parser, furo; Debian: apt-get install furo", done.stderr)


if __name__ == "__main__":
    unittest.main()
