"""Links in the documents lead to files and headings, the glossary says of each word what it means and where it is
explained, and a lesson's first use of such a word leads to the glossary."""

import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))
from small_tree import SmallTree  # noqa: E402

LINK = re.compile(r"\]\(([^)\s]+)\)")
# | word with its id | a sentence | PyTorch's name or nothing | a link to the section |
WORD = re.compile(r'\| <a id="([\w-]+)"></a>[^|]+ \| [A-Z][^|]+\. \| [^|]*\| \[[^]]+\]\([^)]+\) \|')

# Words of the glossary that lessons also use in their everyday sense.
EVERYDAY = {"copy", "free", "group", "hand back", "hand over", "join", "part", "place", "stage", "unit"}


def documents(root):
    """The Markdown files below a folder, without those of build folders and of libraries."""
    found = (path.relative_to(root) for path in root.rglob("*.md"))
    return sorted(path for path in found if not path.parts[0].startswith(("build", "subprojects", ".")))


def without_blocks(text):
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)


def anchors_of(path):
    """What a document's headings, and the places in it that have an id, are called in links."""
    text = without_blocks(path.read_text())
    headings = [re.sub(r"\]\([^)]*\)", "", heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(
        re.findall(r'<a id="([\w-]+)">', text))


def faults_of(root, document):
    """A line for each link of a document that leads nowhere. Addresses on the web are not asked."""
    faults = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", without_blocks((root / document).read_text()))):
        name, _, anchor = target.partition("#")
        path = (root / document.parent / name).resolve() if name else root / document
        if re.match(r"\w+:", target):
            continue
        if not path.exists() or root.resolve() not in (path, *path.parents):
            faults.append(f"{document}: {target}: no such file")
        elif anchor and (path.is_dir() or anchor not in anchors_of(path)):
            faults.append(f"{document}: {target}: no such heading")
    return faults


def faults_of_words(text):
    """The rows of a glossary that lack something, and the words that come twice."""
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| word |")]
    found = [WORD.fullmatch(row) for row in rows]
    ids = [match[1] for match in found if match]
    return [row for row, match in zip(rows, found) if not match] + sorted({word for word in ids if ids.count(word) > 1})


def words_in(glossary):
    """The words of each row of a glossary, for instance of "to gather, to scatter, in a kernel" the first two."""
    cells = re.findall(r'<a id="[\w-]+"></a>([^|]+) \|', glossary)
    rows = [{re.sub("^to ", "", word) for word in re.split("[,;] ", cell)} - EVERYDAY for cell in cells]
    return [sorted(word for word in row if re.match(r"(?!of |in )\w[\w-]", word)) for row in rows]


def words_without_link(rows, lesson):
    """The first uses of a row's words in a lesson's running text (outside code, tables and headings) that are in no
    link to the glossary."""
    text = re.sub(r"`[^`\n]*`|<!--.*?-->|!\[[^]]*\]\([^)]*\)", "", without_blocks(lesson))
    text = re.sub(r"\[([^][]*)\]\([^)]*glossary\.md#[^)]*\)",
                  lambda link: re.sub(r"\w+", r"\g<0>_", link[1]), text)  # rank_ is a rank in a link
    text = re.sub(r"^(#|\|).*$|(?<=\])\([^)]*\)", "", text, flags=re.M)
    faults = set()
    for words in filter(None, rows):
        word = "|".join(re.sub("[ -]", r"_?[\\s-]+", word) for word in words)
        use = re.search(rf"(?<![\w-])({word})(s|es|d|ed)?(_|\b)(?![-.]\w|\s+normalis)", text, re.I)
        faults |= {use[0]} if use and not use[3] else set()
    return sorted(faults)


class TestLinks(unittest.TestCase):
    def test_links_lead_to_files_and_headings(self):
        self.assertIn(Path("docs/glossary.md"), documents(ROOT))
        self.assertEqual([], [fault for document in documents(ROOT) for fault in faults_of(ROOT, document)])

    def test_each_word_of_the_glossary_has_a_sentence_and_a_section(self):
        text = (ROOT / "docs/glossary.md").read_text()
        self.assertIn('<a id="rank"></a>', text)
        self.assertEqual([], faults_of_words(text))

    def test_the_first_use_of_a_word_in_a_lesson_leads_to_the_glossary(self):
        words = words_in((ROOT / "docs/glossary.md").read_text())
        for row in (["batch"], ["gather", "scatter"], ["world size"], ["FLOP", "intensity", "roofline"]):
            self.assertIn(row, words)
        lessons = sorted(ROOT.glob("0*/**/README.md"))
        self.assertTrue(lessons)
        for lesson in lessons:
            with self.subTest(lesson.relative_to(ROOT)):
                self.assertEqual([], words_without_link(words, lesson.read_text()))


class TestTheTestItself(SmallTree):
    FILES = {
        "docs/words.md": '# Words, a list\n\n| word | what | PyTorch | explained in |\n|---|---|---|---|\n'
                         '| <a id="rank"></a>rank | A process. | `RANK` | [the page](../page/README.md#a-rank) |\n',
        "page/README.md": "# A page\n\n## A [rank](../docs/words.md#rank)\n\n[its list](../docs/words.md#words-a-list), "
                          "`[not](a.md)`\n\n```\n[nor](this)\n```\n[web](https://example.org/x.md), [here](#a-rank)\n",
    }

    def test_a_right_tree_is_right(self):
        self.assertEqual([[], []], [faults_of(self.root, document) for document in documents(self.root)])
        self.assertEqual([], faults_of_words((self.root / "docs/words.md").read_text()))

    def test_links_that_lead_nowhere(self):
        for target, fault in (("../docs/words.md#bucket", "no such heading"), ("../docs#rank", "no such heading"),
                              ("docs/words.md", "no such file"), ("../../other.md", "no such file"),
                              ("#another", "no such heading")):
            self.write("page/two.md", f"A [link]({target}).\n")
            self.assertEqual([f"page/two.md: {target}: {fault}"], faults_of(self.root, Path("page/two.md")))

    def test_words_that_lack_something(self):
        right = (self.root / "docs/words.md").read_text().splitlines()[-1]
        for old, new in (("A process.", "a process"), ("A process.", ""), ('<a id="rank"></a>', ""), ("](../", "] (../")):
            self.assertEqual([right.replace(old, new)], faults_of_words(right.replace(old, new)))
        self.assertEqual(["rank"], faults_of_words(f"{right}\n{right}"))

    def test_first_uses_without_a_link(self):
        rows = words_in('| <a id="flat-buffer"></a>flat buffer | ...\n| <a id="gather"></a>to gather, to scatter |\n')
        linked = "# Gather\n\nA [*flat\nbuffer*](../docs/glossary.md#flat-buffer), `scatter`. [It\nscatters](w.md)"
        self.assertEqual(["scatters"], words_without_link(rows, linked))
        linked = linked.replace("w.md", "../docs/glossary.md#gather") + ". It gathers flat buffers."
        self.assertEqual([], words_without_link(rows, linked))
        self.assertEqual(["flat buffers"], words_without_link(rows, f"Two flat buffers.\n{linked}"))


if __name__ == "__main__":
    unittest.main()
