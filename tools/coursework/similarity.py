"""Which submissions have the same lines: winnowing, over the marked lines only.

Schleimer, Wilkerson and Aiken, "Winnowing: Local Algorithms for Document Fingerprinting" (SIGMOD 2003).
Every run of WORDS words has a hash, and of every WINDOW runs the least one is a fingerprint: so a piece
of WORDS + WINDOW - 1 equal words is always found. A name counts as a name, whatever it is, and so does a
number. What was handed out does not count. Debian has no such tool that runs without a network.
"""

import re
import zlib
from dataclasses import dataclass
from itertools import combinations

WORDS, WINDOW = 12, 6
FEWEST = 8  # fingerprints, below which two tasks are alike by nature
ALIKE = 0.7  # share of the smaller one's fingerprints
KEPT = set("if else for while do switch case break continue return auto const int int64_t size_t double Real bool void "
           "true false std vector min max sizeof new delete struct class".split())
# No part of a text is looked at twice: it may be long.
WORD = re.compile(r"""//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|[A-Za-z_]\w*|\d[\w.']*|\S""",
                  re.DOTALL)


@dataclass(frozen=True)
class Pair:
    """Two students' lines of one task."""

    task: str
    students: tuple
    share: float  # of the fingerprints of the smaller one
    same_text: bool


def words_of(text):
    """Its words; names, numbers and texts only as such. Comments and layout do not count."""
    for word in WORD.findall(text):
        if word.startswith(("//", "/*")):
            continue
        if word[0].isalpha() or word[0] == "_":
            yield word if word in KEPT else "name"
        elif word[0].isdigit():
            yield "number"
        else:
            yield "text" if word[0] in "\"'" else word


def fingerprints(text):
    words = list(words_of(text))
    hashes = [zlib.crc32(" ".join(words[at:at + WORDS]).encode()) for at in range(len(words) - WORDS + 1)]
    return {min(hashes[at:at + WINDOW]) for at in range(max(1, len(hashes) - WINDOW + 1))} if hashes else set()


def pairs_of(task, texts, handed_out):
    """The pairs of students whose lines of a task are alike, the most alike first. `texts` are their lines
    by name."""
    base = fingerprints(handed_out)
    marks = {name: fingerprints(text) - base for name, text in texts.items() if text.strip() != handed_out.strip()}
    found = []
    for one, other in combinations(sorted(marks), 2):
        smaller = min(len(marks[one]), len(marks[other]))
        share = len(marks[one] & marks[other]) / smaller if smaller else 0
        same_text = "".join(texts[one].split()) == "".join(texts[other].split())
        if same_text or (smaller >= FEWEST and share >= ALIKE):
            found.append(Pair(task, (one, other), round(share, 2), same_text))
    return sorted(found, key=lambda pair: (not pair.same_text, -pair.share, pair.students))


def report(pairs, counts):
    """A page for the teacher. `counts` are how many students wrote each task."""
    lines = ["# Lines that are alike", "",
             "Short tasks have few right ways: look at the lines before you think of copying. A task that many have "
             "in common says little; equal layout, names and comments say more.", "",
             "| task | written by | students | share of the smaller one | same text |", "|---|---|---|---|---|"]
    for pair in pairs:
        students = ", ".join(pair.students).replace("|", "\\|")
        lines.append(f"| {pair.task} | {counts[pair.task]} | {students} | "
                     f"{pair.share:.2f} | {'yes' if pair.same_text else ''} |")
    return "\n".join(lines) + "\n"
