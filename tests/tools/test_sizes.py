"""Files and functions stay short enough to be read in one go.

Files have at most: headers (.h, .cuh) 150 lines, other sources of the product (common/, the stages,
tools/) 300, the front end `lockstep` 200, everything below tests/ 500. Files that are not sources
have no limit, nor has tests/parity/reference/, which keeps another program and its output.

Functions have at most 40 lines of code, train() next to a stage's main() 60. Lines of code are
those from the signature's first to the closing brace, without blank ones and without those that are
only a comment or a docstring. A lambda belongs to the function around it; in Python the same goes
for everything that a function defines. Functions of tests/ have no limit but their file's: a case
may be a long list of expected values.
"""

import ast
import io
import re
import tempfile
import textwrap
import tokenize
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGE = re.compile(r"\d\d-[\w-]+")
HEADERS = (".h", ".cuh")
CPP = (*HEADERS, ".inl", ".cpp", ".cu")
BUILD = ("meson.build", "meson_options.txt")
REFERENCE = "tests/parity/reference/"

HEADER_LINES, FILE_LINES, TEST_FILE_LINES, FRONT_END_LINES = 150, 300, 500, 200
FUNCTION_LINES, TRAIN_LINES = 40, 60


# --- Functions of C++ -----------------------------------------------------------------------------

TOKEN = re.compile(r"""
    (?P<comment> //[^\n]* | /\*.*?\*/ )
  | \b(?:u8|u|U|L)?R"(?P<end>[^()\\\s]*)\(.*?\)(?P=end)"
  | "(?:\\.|[^"\\\n])*" | (?<!\w)'(?:\\.|[^'\\\n])+'
  | (?P<number> \b\d[\w.']* )
  | (?P<directive> ^[ \t]*\#(?:\\\n|/(?![/*])|[^/\n])* )
""", re.VERBOSE | re.DOTALL | re.MULTILINE)

# What may have parentheses in a declaration besides the parameters.
WITH_PARENTHESES = re.compile(
    r"\b(?:alignas|decltype|explicit|noexcept|requires|__\w+__)\s*\((?:[^()]|\([^()]*\))*\)"
    r"|\[\[.*?\]\]", re.DOTALL)
LABEL = re.compile(r"\s*(public|protected|private)\s*")
SCOPE = re.compile(r"(inline )?namespace\b|extern s+$|"
                   r"(typedef |static |constexpr |const )*(class|struct|union|enum)\b(?![^:]*\()")
NAME = re.compile(r"((?:[\w:<>]+::)?operator\s*(?:\(\)|[^\w\s(]+|[\w:]+)|[\w:~<>]+)\s*\(")
COLON = r"(?<!:):(?!:)"


def code_only(text):
    """C++ with the same lines, but without comments, and with `s` for every character of strings
    and of preprocessor lines: these must not be taken for code, but are no blank lines either."""
    def blank(match):
        masked = re.sub(r"\S", " " if match["comment"] else "s", match[0])
        return masked[:-1] + ";" if match["directive"] else masked
    return TOKEN.sub(blank, text)


def line_of(code, place):
    return code.count("\n", 0, place) + 1


def end_of(code, begin):
    """The place of the bracket that closes the one at `begin`."""
    opening, closing = code[begin], {"(": ")", "{": "}", "<": ">"}[code[begin]]
    depth = 0
    for place in range(begin, len(code)):
        depth += {opening: 1, closing: -1}.get(code[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"line {line_of(code, begin)}: no {closing} closes this {opening}")


def without_templates(head):
    """A declaration without the template <...> before it."""
    found = re.match(r"\s*template\s*(?=<)", head)
    return without_templates(head[end_of(head, found.end()) + 1:]) if found else head.strip()


def outside_parentheses(head):
    """A declaration without what is in parentheses: f(int a) is f()."""
    begin = head.find("(")
    if begin < 0:
        return head
    return head[:begin] + "()" + outside_parentheses(head[end_of(head, begin) + 1:])


def kind_of(head):
    """What the brace after this begins: ("scope", None) of names; ("function", its name), also for
    a lambda with no function around it; or ("value", None), also for a constructor's member."""
    head = without_templates(WITH_PARENTHESES.sub(" ", head))
    bare = outside_parentheses(head)
    if SCOPE.match(bare):
        return "scope", None
    named, is_value, value = re.sub(r"operator[^\w\s(]+|[<>=!]=", "", bare).partition("=")
    if is_value:
        is_lambda = value.lstrip().startswith("[")
        return ("function", re.findall(r"\w+", named)[-1]) if is_lambda else ("value", None)
    is_member = re.search(rf"\)[^)]*?{COLON}", bare) and re.search(r"[\w>]\s*$", bare)
    found = NAME.search(head)
    return ("function", found[1]) if found and not is_member else ("value", None)


def functions_of_cpp(text):
    """(name, lines of code) of each function that a text of C++ defines; raises ValueError if its
    brackets do not match."""
    code = code_only(text)
    found, scopes, begin, place = [], 0, 0, 0
    while place < len(code):
        character, head = code[place], code[begin:place]
        if character == "(":
            place = end_of(code, place)
        elif character == "{":
            kind, name = kind_of(head)
            if kind != "scope":
                place = end_of(code, place)
            if kind == "function":
                lines = code[begin:place + 1].strip().splitlines()
                found.append((name, sum(bool(line.strip()) for line in lines)))
            scopes += kind == "scope"
            begin = begin if kind == "value" else place + 1
        elif character == "}":
            scopes, begin = scopes - 1, place + 1
        elif character == ";" or character == ":" and LABEL.fullmatch(head):
            begin = place + 1
        if scopes < 0:
            raise ValueError(f"line {line_of(code, place)}: no {{ opens for this }}")
        place += 1
    if scopes:
        raise ValueError("a scope is not closed")
    return found


# --- Functions of Python --------------------------------------------------------------------------

NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def outermost_functions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTION):
            yield child
        else:
            yield from outermost_functions(child)


def docstring_lines(tree):
    """The lines of all docstrings below a node."""
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and ast.get_docstring(node) is not None:
            yield from range(node.body[0].lineno, node.body[0].end_lineno + 1)


def functions_of_python(text):
    """(name, lines of code) of each function or method that is in no other one."""
    tree, code = ast.parse(text), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= {i for i, line in enumerate(text.splitlines(), 1) if not line.strip()}
    code.difference_update(docstring_lines(tree))
    return [(function.name, len(code.intersection(range(function.lineno, function.end_lineno + 1))))
            for function in outermost_functions(tree)]


# --- A tree ---------------------------------------------------------------------------------------

def language_of(path, text):
    """What a file is written in; None for one that is no source."""
    if path.suffix in CPP:
        return "C++"
    first = text.split("\n", 1)[0] if not path.suffix else ""
    if path.suffix == ".py" or (first.startswith("#!") and "python" in first):
        return "Python"
    return "another" if path.name in BUILD or first.startswith("#!") else None


def most_lines(name):
    """How long a source may be."""
    if name == "lockstep":
        return FRONT_END_LINES
    if name.startswith("tests/"):
        return TEST_FILE_LINES
    return HEADER_LINES if name.endswith(HEADERS) else FILE_LINES


def function_faults(name, language, text):
    """A line for each function of a source that is too long."""
    read = {"C++": functions_of_cpp, "Python": functions_of_python}.get(language)
    try:
        functions = read(text) if read else []
    except (ValueError, SyntaxError) as error:
        return [f"{name}: cannot be read: {error}"]
    is_program = STAGE.match(name) and "main" in dict(functions)
    faults = []
    for function, lines in functions:
        most = TRAIN_LINES if is_program and function == "train" else FUNCTION_LINES
        if lines > most:
            faults.append(f"{name}: {function}() has {lines} lines of code, at most {most}")
    return faults


def sources_of(root):
    """(name, language, text) of every source of a tree."""
    stages = [path.name for path in root.iterdir() if STAGE.fullmatch(path.name)]
    paths = [path for top in ("common", "tools", "tests", *stages)
             for path in (root / top).rglob("*")]
    for path in sorted([*paths, root / "lockstep"]):
        name = str(path.relative_to(root))
        if not path.is_file() or "__pycache__" in path.parts or name.startswith(REFERENCE):
            continue
        text = path.read_text(errors="replace")
        language = language_of(path, text)
        if language:
            yield name, language, text


def faults_of(root):
    """A line for each file and for each function of a tree that is too long."""
    faults = []
    for name, language, text in sources_of(root):
        lines, most = len(text.splitlines()), most_lines(name)
        if lines > most:
            faults.append(f"{name}: {lines} lines, at most {most}")
        if not name.startswith("tests/"):
            faults += function_faults(name, language, text)
    return faults


class TestSizes(unittest.TestCase):
    def test_no_file_and_no_function_is_too_long(self):
        faults = faults_of(ROOT)
        if faults:
            self.fail("\n" + "\n".join(faults))

    def test_it_looks_at_what_there_is(self):
        seen = {name: (language, text) for name, language, text in sources_of(ROOT)}
        for name, language in (("lockstep", "another"), ("tools/gpu-check", "Python"),
                               ("tools/two-hosts", "another"), ("common/meson.build", "another"),
                               ("common/kernels/cuda/reduce.cuh", "C++"),
                               ("tools/bench.py", "Python")):
            self.assertEqual(language, seen[name][0], name)
        for program in ("01-single-gpu/main.cpp", "03-model-split/pipeline/main.cpp",
                        "04-ddp/main.cpp"):
            self.assertIn("train", dict(functions_of_cpp(seen[program][1])), program)


class TestFunctionsOfCpp(unittest.TestCase):
    def assert_functions(self, expected, text):
        self.assertEqual(expected, functions_of_cpp(textwrap.dedent(text)))

    def test_lines_of_code_are_counted(self):
        self.assert_functions([("f", 6)], """\
            #include <a>

            // Says what f is.
            template <class T,
                      class U = int>
            int f(T a,
                  U b) {

              // A comment.
              /* A longer
                 one. */
              return a + b;  // code and a comment
            }
            """)

    def test_names_of_all_kinds(self):
        for text, name in (
                ("std::vector<int> a::b<C>::f(int x) const noexcept(g()) {", "a::b<C>::f"),
                ("auto f() -> decltype(g()) {", "f"),
                ("bool operator==(const A& a, const A& b) {", "operator=="),
                ("A& A::operator=(A&& a) noexcept {", "A::operator="),
                ("int operator()(int a = 3) const {", "operator()"),
                ("explicit operator bool() const {", "operator bool"),
                ("[[nodiscard]] struct tm now() {", "now"),
                ("explicit A::A(int a) : a_(a), b_{c, {d}}, e_() {", "A::A"),
                ("A::~A() {", "A::~A"),
                ("__global__ void __launch_bounds__(kThreads) f(int a) {", "f"),
                ("template <class T>\nvoid f(T a = {}) requires(sizeof(T) > 1) {", "f"),
                ('extern "C" int f() {', "f"),
                ("const auto f = [a = 1](int b) {", "f")):
            with self.subTest(text):
                self.assert_functions([(name, 2 + text.count("\n"))], f"int g();\n{text}\n}}\n")

    def test_what_is_no_function(self):
        body = "int a;\n" * 100
        for head in ("class A", "struct A : B<int()>", "struct alignas(16) A final",
                     "enum class A : int", "namespace a::b", "namespace", 'extern "C"',
                     "const int a[] =", "Table table",
                     "template <class T>\nclass A : public B<T>", "union", "A a ="):
            with self.subTest(head):
                self.assert_functions([], f"{head} {{\n{body}}};\n")

    def test_functions_of_scopes_are_found(self):
        self.assert_functions([("f", 2), ("A", 2), ("g", 3)], """\
            namespace a {
            #define BEGIN {
            enum class E { one, two };
            const std::array<int, 2> kValues = {{1, 2}};
            class A : public B {
             public:
              int f() const {
                }
              int a_ = 0;

             private:
              A() : a_{1} {
              }
              E e_{E::one};
            };
            void g() {
              struct Local { int f() { return 1; } };
            }
            }  // namespace a
            """)

    def test_a_lambda_belongs_to_its_function(self):
        inside = "    a();\n" * 37
        self.assert_functions(
            [("f", 41)], f"void f() {{\n  const auto g = [&](int b) {{\n{inside}  }};\n}}\n")

    def test_strings_and_comments_do_not_confuse_it(self):
        for line in ("}", "{", "(", "}}}"):
            for text in (f'"{line}"', f'"\\"{line}"', f'R"x({line}\n\n")" {line})x"',
                         f"// it's {line}", f"/* {line}\n{line} */", f"'{line[0]}'",
                         f"u8R\"({line})\"",
                         f"1'000'000; // {line}", f"0x1'F; '{line[0]}'", "'\\''; '{'"):
                with self.subTest(text):
                    found = functions_of_cpp(f"void f() {{\n{text}\n;\n}}\nvoid g() {{\n}}\n")
                    self.assertEqual(["f", "g"], [name for name, _ in found])
        self.assert_functions(
            [("f", 5)], 'void f() {\n  a(R"(// no comment\n\n# no directive)");\n;\n}\n')

    def test_brackets_that_do_not_match_are_told(self):
        for text in ("void f() {\n", "}\n", "namespace a {\n", "void f(int {\n"):
            with self.subTest(text), self.assertRaises(ValueError):
                functions_of_cpp(text)


class TestFunctionsOfPython(unittest.TestCase):
    def assert_functions(self, expected, text):
        self.assertEqual(expected, functions_of_python(textwrap.dedent(text)))

    def test_lines_of_code_are_counted(self):
        self.assert_functions([("f", 5), ("g", 2)], '''\
            @decorated
            def f(a,
                  b):
                """Says what f is.

                More of it."""

                # A comment.
                c = """
                # no comment

                """  # code and a comment

            class A:
                """A docstring."""
                async def g(self):
                    return 1
            ''')

    def test_what_a_function_defines_belongs_to_it(self):
        self.assert_functions([("f", 4)], """\
            def f():
                def g():
                    return 1
                return [g, lambda: 2]
            """)


class TestTheTestItself(unittest.TestCase):
    """A small tree, right at first; each case plants what is too long and must see it reported."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.plant("lockstep", "#!/bin/sh\n")

    def plant(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)
        return faults_of(self.root)

    def test_files(self):
        for name, most in (("common/a/b.h", 150), ("04-d/b.cuh", 150), ("04-d/e/b.cpp", 300),
                           ("common/b.inl", 300), ("common/meson.build", 300),
                           ("tools/a/b.py", 300), ("tests/a/b.h", 500),
                           ("tests/a/b.cpp", 500), ("tests/b.py", 500)):
            with self.subTest(name):
                self.assertEqual([], self.plant(name, "\n" * most))
                self.assertEqual([f"{name}: {most + 1} lines, at most {most}"],
                                 self.plant(name, "\n" * (most + 1)))
                (self.root / name).unlink()
        self.assertEqual(["lockstep: 201 lines, at most 200"],
                         self.plant("lockstep", "#!/bin/sh\n" + "\n" * 200))

    def test_what_is_no_source_has_no_limit(self):
        for name in ("tools/a.json", "common/README.md", "tests/parity/reference/a.py",
                     "tools/packages.txt"):
            self.assertEqual([], self.plant(name, "\n" * 1000))

    def test_functions(self):
        cpp, python = "void f() {\n" + "  a();\n" * 38 + "}\n", "def f():\n" + "    a()\n" * 39
        for name, text in (("common/a.cpp", cpp), ("02-b/a.cuh", "class A {\n" + cpp + "};\n"),
                           ("tools/a.py", python),
                           ("tools/a", "#!/usr/bin/env python3\n" + python)):
            with self.subTest(name):
                self.assertEqual([], self.plant(name, text))
                self.assertEqual([f"{name}: f() has 41 lines of code, at most 40"],
                                 self.plant(name, re.sub(r"( *a\(\);?\n)", r"\1\1", text, count=1)))
                (self.root / name).unlink()

    def test_a_program_of_a_stage_may_train_longer(self):
        train, main = "void train() {\n" + "a();\n" * 58 + "}\n", "int main() {\n}\n"
        self.assertEqual([], self.plant("01-a/main.cpp", train + main))
        self.assertEqual(["01-a/main.cpp: train() has 61 lines of code, at most 60"],
                         self.plant("01-a/main.cpp", train.replace("{", "{\na();", 1) + main))
        self.assertEqual(["01-a/main.cpp: train() has 60 lines of code, at most 40"],
                         self.plant("01-a/main.cpp", train))

    def test_functions_of_tests_have_no_limit(self):
        long = "void f() {\n" + "a();\n" * 100 + "}\n"
        self.assertEqual([], self.plant("tests/a_test.cpp", long))

    def test_a_file_that_cannot_be_read(self):
        for name, text in (("common/a.cpp", "void f() {\n"), ("tools/a.py", "def f(:\n")):
            self.assertIn(f"{name}: cannot be read:", self.plant(name, text)[0])
            (self.root / name).unlink()


if __name__ == "__main__":
    unittest.main()
