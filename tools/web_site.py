#!/usr/bin/env python3
"""Build the READMEs and the pages of docs/ as a web site, in the order of the lessons.

  ./lockstep site
  ./lockstep site --to FOLDER --source https://HOST/OWNER/NAME/blob/main

Sphinx makes the pages (Debian's furo and python3-myst-parser, or PyPI's furo and myst-parser) from copies, in which
links lead to pages, or to the source at the address of --source. Without that option they are plain text. Where the
programs are built, each lesson has its page of `./lockstep show`. Where pandoc is there, the course has its slides,
with these pages in them."""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import Parser, complain, run_command

ROOT = Path(__file__).resolve().parent.parent

GLOSSARY = "docs/glossary.md"
SLIDES = "docs/course/slides"
# The menu. Left out are the course's slides, which pandoc makes, and its answers, which only teachers read.
PAGES = {
    "Lessons": ["01-single-gpu/README.md", "02-dataparallel/README.md", "03-model-split/README.md",
                "03-model-split/pipeline/README.md", "03-model-split/tensor/README.md", "04-ddp/README.md",
                "05-syncbn-checkpoint/README.md", "06-fully-sharded/README.md", "07-mesh/README.md",
                GLOSSARY],
    "More about them": ["docs/options.md", "docs/ddp.md", "docs/sixteen-bits.md", "docs/launching.md",
                        "docs/checkpoints.md",
                        "docs/simulation.md", "docs/prediction.md", "docs/measurements.md", "docs/results/README.md",
                        "docs/results/gpu-check-2026-11-26-nvidia-h200.md",
                        "docs/results/gpu-check-2026-11-27-nvidia-h200.md", "docs/results/convolutions-h200.md",
                        "docs/machines.md"],
    "Course": ["docs/course/README.md", "docs/coursework.md", "docs/course/rubric.md", "docs/course/oral.md"],
    "The code": ["common/README.md", "tests/README.md", "tests/cuda_model/README.md",
                 "tests/parity/reference/README.md", "tools/README.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}
# What `./lockstep show` draws for a lesson.
STEPS = {
    "01-single-gpu": "--stage 01",
    "02-dataparallel": "--stage 02",
    "03-model-split/pipeline": "--schedule 1f1b --devices 4 --micro-batches 8",
    "03-model-split/tensor": "--stage tensor-split",
    "04-ddp": "--stage 04 --bucket-mb 0.05",
    "05-syncbn-checkpoint": "--stage 05",
    "06-fully-sharded": "--stage 06",
    "07-mesh": "--stage 07 --devices 4 --nodes 2 --mesh data=2,shard=2,tensor=2",
}
STEP = """
## Step through a step

**This is the page that `./lockstep show {words}` writes.** <a href="{place}">Open it alone.</a>

<iframe src="{place}" title="A step, to step through" loading="lazy"></iframe>
"""
STEP_SLIDE = """## Step through a step

<iframe src="step.html" title="A step, to step through"></iframe>

"""
# A link or a picture. Blocks and words of code, which come first, stay as they are.
CODE = r"^ *```.*?^ *```|`[^`\n]*`"
LINK = re.compile(rf"{CODE}|(?P<picture>!?)\[(?P<text>(?:`[^`]*`|[^][`])*)\]\((?P<target>[^)\s]+)\)", re.M | re.S)
SETTINGS = {
    "project": "Lockstep", "html_title": "Lockstep", "html_theme": "furo", "extensions": ["myst_parser"],
    "myst_heading_anchors": 6, "highlight_language": "none", "smartquotes": False, "html_copy_source": False,
    "html_static_path": ["static"], "html_css_files": ["site.css"], "html_show_copyright": False,
}
# Pictures and frames are as dark as the page around them. On a telephone, headings are
# broken anywhere and pictures scroll. Code of 100 columns fits beside the menus of a wide page.
STYLE = """
body { color-scheme: light dark; }
body[data-theme=light] { color-scheme: light; }
body[data-theme=dark] { color-scheme: dark; }
iframe { width: 100%; height: 85vh; border: 1px solid var(--color-background-border); }
h1, h2, h3 { overflow-wrap: anywhere; }
div.highlight pre { font-size: 0.75rem; padding: 0.625rem 0.5rem; }
@media (max-width: 46em) { article p:has(> img) { overflow-x: auto; } article img { width: 44em; max-width: none; } }
"""


def all_pages():
    return ["README.md", *(page for pages in PAGES.values() for page in pages)]


def name_of(page):
    """A folder's README is what its address shows."""
    return re.sub(r"README\.md$", "index.md", page)


def rewritten(link, page, source):
    """One match of LINK as it stands in the copy of a page."""
    target = link["target"]
    if target is None or re.match(r"#|\w+:", target):
        return link[0]
    path, hash_mark, anchor = target.partition("#")
    found = os.path.normpath(os.path.join(os.path.dirname(page), path))
    if f"{found}/README.md" in all_pages():
        found += "/README.md"
    if found in all_pages():
        target = os.path.relpath(name_of(found), os.path.dirname(page) or ".") + hash_mark + anchor
        if found == GLOSSARY and anchor:  # in its tables MyST finds no place
            return as_html(target, link)
    elif found.startswith(f"{SLIDES}/") and pandoc():
        return as_html(target, link)
    elif not link["picture"]:
        if not source:
            return link["text"]
        target = f"{source.rstrip('/')}/{found}{hash_mark}{anchor}"
    return f"{link['picture']}[{link['text']}]({target})"


def as_html(target, link):
    return f'<a href="{target.replace(".md", ".html")}">{link["text"]}</a>'


def copy_of(page, text, source):
    return LINK.sub(lambda link: rewritten(link, page, source), text)


def menu():
    """What Sphinx makes the menu from; it stands in the first page, where nobody sees it."""
    return "".join(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "".join(f"{name_of(page)}\n" for page in pages)
                   + "```\n" for caption, pages in PAGES.items())


def with_step(text, words, place):
    """A lesson with the page of its step, before its labs or its exercises."""
    before, heading, after = re.split(r"^(## (?:Labs|Break it|Exercises)$)", text, maxsplit=1, flags=re.M)
    return f"{before}{STEP.format(words=words, place=place).lstrip()}\n{heading}{after}"


def write_pages(folder, source, steps):
    """The copies of all pages and of their pictures; `steps`: whether there are pages of steps."""
    for page in all_pages():
        text = copy_of(page, (ROOT / page).read_text(), source)
        lesson = os.path.dirname(page)
        if steps and lesson in STEPS:
            text = with_step(text, STEPS[lesson], "step.html")
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / name_of(page)).write_text(text + (menu() if page == "README.md" else ""))
    shutil.copytree(ROOT / "docs/figures", folder / "docs/figures")
    (folder / "static").mkdir()
    (folder / "static/site.css").write_text(STYLE)
    (folder / "conf.py").write_text("".join(f"{name} = {value!r}\n" for name, value in SETTINGS.items()))


def write_steps(target, build):
    for lesson, words in STEPS.items():
        subprocess.run([sys.executable, ROOT / "tools/step_page.py", "--build", build, *words.split(),
                        "-o", target / lesson / "step.html"], check=True, stdout=subprocess.DEVNULL)


def pandoc():
    return shutil.which("pandoc")


def with_step_slide(text):
    """A lesson's slides with the page of its step, before the last slide, which is about the lab and the tasks."""
    *before, last = re.split(r"^(?=## )", text, flags=re.M)
    return "".join([*before, STEP_SLIDE, last])


def write_slides(target, steps):
    """The slides of each lesson: one file that needs no other. `steps`: whether there are pages of steps in `target`."""
    (target / SLIDES).mkdir(parents=True, exist_ok=True)
    for page in sorted((ROOT / SLIDES).glob("*.md")):
        stage, _, half = page.stem.partition("-")
        lesson = next(name for name in STEPS if name.startswith(stage) and name.endswith(half))
        text = with_step_slide(page.read_text()) if steps else page.read_text()
        subprocess.run([pandoc(), "-s", "-t", "dzslides", "--self-contained", "--slide-level", "2",
                        "--resource-path", f"{ROOT / SLIDES}:{target / lesson}", "--css", ROOT / SLIDES / "slides.css",
                        "-o", target / SLIDES / f"{page.stem}.html"], input=text, text=True, check=True)


def follow_the_system(target):
    """Debian 12's furo is dark only where its reader says so on the page. Others follow the system by themselves."""
    furo = (target / "_static/styles/furo.css").read_text()
    dark = re.search(r'body\[data-theme="dark"\] (\{[^}]*\})', furo)
    if "prefers-color-scheme" not in furo and dark:
        with (target / "_static/site.css").open("a") as style:
            style.write(f"@media screen and (prefers-color-scheme: dark) {{ body:not([data-theme=light]) {dark[1]} }}\n")


def lacking():
    """Those of Python's modules that make pages and are not here."""
    return [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]


def make_site(target, source, steps):
    with tempfile.TemporaryDirectory() as folder:
        write_pages(Path(folder, "pages"), source, steps)
        subprocess.run([sys.executable, "-m", "sphinx", "-q", "-d", f"{folder}/doctrees", f"{folder}/pages", target],
                       check=True)
    follow_the_system(target)


def main(arguments):
    parser = Parser(prog="lockstep site", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "build/site", metavar="FOLDER", help="default: build/site")
    parser.add_argument("--source", default="", metavar="ADDRESS", help="address of the repository's files on the web")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if lacking():
        parser.error(f"not found: {', '.join(lacking())}; Debian: apt-get install furo python3-myst-parser, which are for "
                     f"/usr/bin/python3 (this is {sys.executable}); elsewhere: pip install furo myst-parser")
    steps = (options.build / "01-single-gpu/01-single-gpu").exists()
    if not steps:
        complain("site", f"no programs in {options.build}: the lessons go without the pages of `./lockstep show`")
    if not pandoc():
        complain("site", "not found: pandoc; the course goes without its slides (Debian: apt-get install pandoc)")
    try:
        make_site(options.to, options.source, steps)
        if steps:
            write_steps(options.to, options.build)
        if pandoc():
            write_slides(options.to.absolute(), steps)
    except OSError as error:
        parser.error(f"--to {options.to}: {error.strerror}; name another folder")
    except subprocess.CalledProcessError:
        complain("site", "not all pages could be made, see above")
        return 1
    print(f"{options.to / 'index.html'}: open it in a browser")
    return 0


if __name__ == "__main__":
    run_command(main)
