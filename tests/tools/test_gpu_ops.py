"""Every operation of common/kernels/kernels.h has a case in tests/gpu/ops_test.cpp, or in
layer_ops_test.cpp next to it.

Those cases need a GPU to run; that they are there is checked everywhere. A case names its
operations before the colon of its name, and calls each of them.
"""

import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_AN_OPERATION = {"engine"}
PURE_VIRTUAL = re.compile(r"\bvirtual\s[^;{}()]*?\b(\w+)\s*\([^;]*?\)\s*(?:const\s*)?=\s*0\s*;")
CASE = re.compile(r'^TEST_CASE\(\s*((?:"[^"]*"\s*)+),\s*"([^"]*)"\s*\)', re.MULTILINE)


def operations_of(header):
    """The names of the pure virtuals of the catalogue."""
    code = re.sub(r"//[^\n]*", "", header)
    return set(PURE_VIRTUAL.findall(code)) - NOT_AN_OPERATION


def cases_of(source):
    """(operations named, tags, text up to the next case) of every test case."""
    found = list(CASE.finditer(source))
    ends = [case.start() for case in found[1:]] + [len(source)]
    for case, end in zip(found, ends):
        name = "".join(re.findall(r'"([^"]*)"', case.group(1)))
        yield [op.strip() for op in name.split(":")[0].split(",")], case.group(2), source[
            case.end():end]


def faults_of(header, source):
    """One line per operation without a case, and per case that is not what its name says."""
    operations, tested, faults = operations_of(header), set(), []
    for names, tags, text in cases_of(source):
        for tag in ("[cuda]", "[ops]"):
            if tag not in tags:
                faults.append(f"the case of {', '.join(names)} lacks the tag {tag}")
        for name in names:
            if name not in operations:
                faults.append(f"'{name}' is no operation of kernels.h")
            elif not re.search(rf"\bops\.{name}\(", text):
                faults.append(f"the case of {name} does not call it")
            else:
                tested.add(name)
    return faults + [f"{name} has no case" for name in sorted(operations - tested)]


class TestGpuOps(unittest.TestCase):
    HEADER = (ROOT / "common/kernels/kernels.h").read_text()
    SOURCE = "".join(path.read_text() for path in sorted(ROOT.glob("tests/gpu/*ops_test.cpp")))

    def test_every_operation_has_a_case(self):
        self.assertEqual(faults_of(self.HEADER, self.SOURCE), [])

    def test_the_catalogue_is_read_whole(self):
        operations = operations_of(self.HEADER)
        self.assertEqual(len(operations), self.HEADER.count("= 0;") - len(NOT_AN_OPERATION))
        self.assertLessEqual({"fill", "conv2d_backward_parameters", "sgd_update"}, operations)

    def test_an_operation_without_a_case_is_found(self):
        header = self.HEADER.replace(
            "virtual void fill(", "virtual void brand_new(Stream,\n   Real value) = 0;\n"
            "  virtual void fill(")
        self.assertEqual(faults_of(header, self.SOURCE), ["brand_new has no case"])

    def test_a_case_that_does_not_call_its_operation_is_found(self):
        source = self.SOURCE.replace("ops.scale(", "ops.add(")
        self.assertEqual(faults_of(self.HEADER, source),
                         ["the case of scale does not call it", "scale has no case"])

    def test_a_case_of_a_removed_operation_is_found(self):
        header = re.sub(r"virtual void apply_mask\([^;]*;", "", self.HEADER)
        self.assertEqual(faults_of(header, self.SOURCE),
                         ["'apply_mask' is no operation of kernels.h"])

    def test_a_case_without_its_tags_is_found(self):
        source = self.SOURCE.replace('"[cuda][ops]"', '"[ops]"', 1)
        self.assertEqual(len(faults_of(self.HEADER, source)), 1)


if __name__ == "__main__":
    unittest.main()
