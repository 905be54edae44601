"""Functions stay short enough to be read in one go.

Functions of the product (common/, the stages, tools/) have at most 40 lines of code, train() next to
a stage's main() 60. Lines of code are those from the signature's first to the closing brace, without
blank ones and without those that are only a comment or a docstring. What a function defines, such as
a lambda, belongs to it. ctags finds the functions of C++.
"""

import ast
import json
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTION_LINES, TRAIN_LINES = 40, 60
CPP = (".h", ".cuh", ".inl", ".cpp", ".cu")
CTAGS = ("ctags", "-f", "-", "-L", "-", "--output-format=json", "--fields=+neK", "--languages=C++",
         "--kinds-C++=f", f"--langmap=C++:{''.join(CPP)}", "-I", "__launch_bounds__+")
TEXT_OR_COMMENT = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
BEFORE_A_SIGNATURE = re.compile(r"[;{}:\\]\s*$|^\s*#|^\s*$")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def without_comments(text):
    return TEXT_OR_COMMENT.sub(lambda match: re.sub(r"\S", " ", match[0]) if match[0][0] == "/" else match[0], text)


def functions_of_cpp(paths):
    """(path, name, lines) of each function that is in no other one."""
    tags = subprocess.run(CTAGS, input="\n".join(map(str, paths)), stdout=subprocess.PIPE, text=True, check=True)
    path, after = "", 0
    for tag in sorted(map(json.loads, tags.stdout.splitlines()), key=lambda tag: (tag["path"], tag["line"], -tag["end"])):
        if tag["path"] != path:
            path, after = tag["path"], 0
            code = without_comments(Path(path).read_text()).split("\n")
        first = tag["line"] - 1
        if first >= after:
            while first > 0 and not BEFORE_A_SIGNATURE.search(code[first - 1]):
                first -= 1  # template <...>, or a type on a line of its own
            after = tag["end"]
            yield Path(path), tag["name"], code[first:after]


def functions_of_python(path):
    """The same, of a file in Python."""
    code, tree = path.read_text().split("\n"), ast.parse(path.read_text())
    code = ["" if line.lstrip().startswith("#") else line for line in code]
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and ast.get_docstring(node) is not None:
            begin, end = node.body[0].lineno - 1, node.body[0].end_lineno
            code[begin:end] = [""] * (end - begin)
    waiting = [tree]
    for node in waiting:
        if isinstance(node, FUNCTION):
            yield path, node.name, code[node.lineno - 1:node.end_lineno]
        else:
            waiting += ast.iter_child_nodes(node)


def functions_of(root):
    """Those of a tree's product, with the number of their lines of code."""
    files = [path for top in ("common", "tools", *(path.name for path in root.glob("0[1-9]-*")))
             for path in sorted((root / top).rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    found = [*functions_of_cpp([path for path in files if path.suffix in CPP])]
    for path in files:
        if path.suffix == ".py" or not path.suffix and re.match("#!.*python", path.read_text()):
            found += functions_of_python(path)
    return [(str(path.relative_to(root)), name, sum(bool(line.strip()) for line in lines))
            for path, name, lines in found]


def faults_of(root):
    """A line for each function that is too long."""
    found = functions_of(root)
    programs = {path for path, name, _ in found if name == "main" and path[0] == "0"}
    for path, name, lines in found:
        most = TRAIN_LINES if name == "train" and path in programs else FUNCTION_LINES
        if lines > most:
            yield f"{path}: {name}() has {lines} lines of code, at most {most}"


@unittest.skipUnless(shutil.which("ctags"), "no ctags")
class TestSizes(unittest.TestCase):
    def test_no_function_is_too_long(self):
        self.assertGreater(len(functions_of(ROOT)), 2000)
        self.assertEqual([], list(faults_of(ROOT)))

    def test_one_line_more_is_told(self):
        cpp = ("class A {\n  template <class B>\n  B\n  f(int a,\n    int b) {\n  const auto g = [&] {\n};  // g\n"
               + "\n/* long\n//\n*/  a();\n" * 33 + "}\n};\n")
        kernel = "template <class T>\n__global__ void __launch_bounds__(k) f(T b) {\n" + '  a("//");\n' * 37 + "}\n"
        python = 'def f():\n  """Why."""\n  # How.\n' + "  a()\n\n" * 38 + "  def g(): pass\n"
        train, lines = "void train() {\n%s}\n", "  a();\n"
        for name, text, function, most in (
                ("common/a.h", cpp, "f", 40), ("03-b/c/a.cuh", kernel, "f", 40), ("tools/a.py", python, "f", 40),
                ("tools/a", "#!/usr/bin/env python3\n" + python, "f", 40), ("01-a/b.cpp", train % (lines * 38), "train", 40),
                ("01-a/main.cpp", train % (lines * 58) + "int main() {\n}\n", "train", 60)):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / name
                file.parent.mkdir(parents=True)
                file.write_text(text)
                self.assertEqual([], list(faults_of(Path(folder))))
                file.write_text(re.sub(r"(.*a\(.*\n)", r"\1\1", text, count=1))
                self.assertEqual([f"{name}: {function}() has {most + 1} lines of code, at most {most}"],
                                 list(faults_of(Path(folder))))


if __name__ == "__main__":
    unittest.main()
