"""The machine code of a GPU's kernels as nvdisasm prints it: instructions, loops, registers."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SECTION = re.compile(r"//-+ \.text\.(\S+) +-+")
LABEL = re.compile(r"^(\S+):$")
INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/ +(?:@(!?U?P\w+) +)?([A-Z][\w.]*)([^;]*);")
TARGET = re.compile(r"`\((\S+)\)")
REGISTER = re.compile(r"\b(R\d+)\b")

ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP", "BPT")  # what is behind comes from elsewhere
WIDE = {".64": 2, ".128": 4}  # registers that a load fills


@dataclass
class Instruction:
    predicate: str  # "" for one that is always carried out
    opcode: str  # with its modifiers: LDG.E.128
    operands: str

    @property
    def name(self):
        return self.opcode.split(".")[0]

    def text(self):
        return " ".join(filter(None, [self.predicate and f"@{self.predicate}", self.opcode,
                                      self.operands]))

    def target(self):
        """The label that it jumps to, or None."""
        match = TARGET.search(self.operands) if self.name in ("BRA", "JMP") else None
        return match and match[1]

    def loads(self):
        """The registers that a load from global memory fills."""
        if self.name not in ("LDG", "LD"):
            return set()
        first = int(REGISTER.search(self.operands)[1][1:])
        width = next((count for mark, count in WIDE.items() if mark in self.opcode), 1)
        return {f"R{first + i}" for i in range(width)}

    def reads(self, registers):
        """True if one of these registers is among its operands, written ones included."""
        return bool(registers & set(REGISTER.findall(self.operands)))


@dataclass
class Kernel:
    name: str
    registers: int = 0
    local_bytes: int = 0  # of a thread, in local memory
    code: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)  # name: index of the instruction that follows

    def count(self, *names):
        return sum(instruction.name in names for instruction in self.code)

    def calls(self):
        """The functions that are called, not inlined: division of 64-bit numbers, for instance."""
        return {re.sub(r"^\$__internal_\d+_", "", TARGET.search(each.operands)[1])
                for each in self.code if each.name == "CALL" and TARGET.search(each.operands)}

    def successors(self, index):
        """The indices of the instructions that may follow."""
        here = self.code[index]
        after = [self.labels[here.target()]] if here.target() in self.labels else []
        if here.name not in ENDS or here.predicate:
            after.append(index + 1)
        return [each for each in after if each < len(self.code)]

    def loops(self):
        """The innermost loops, each a list of instructions in their order."""
        after = {index: self.successors(index) for index in self.reachable()}
        before = {index: [] for index in after}
        for index, nexts in after.items():
            for each in nexts:
                before[each].append(index)
        found = {}
        for index, nexts in after.items():
            for head in nexts:
                if head <= index:  # a jump back
                    found.setdefault(head, set()).update(body_of(head, index, before))
        bodies = [body for body in found.values()
                  if not any(other < body for other in found.values())]
        return [[self.code[index] for index in sorted(body)] for body in bodies]

    def reachable(self):
        """Of the instructions those that the first one leads to, without called functions."""
        seen, waiting = set(), [0] if self.code else []
        while waiting:
            index = waiting.pop()
            if index not in seen:
                seen.add(index)
                waiting += self.successors(index)
        return seen


def body_of(head, end, before):
    """The indices from which `end` is reached without passing `head`; nothing if it is no loop's
    head, because code that lies before it leads into the body."""
    body, waiting = {head}, [end]
    while waiting:
        index = waiting.pop()
        if index not in body:
            body.add(index)
            waiting += before[index]
    return body if min(body) == head else set()


def in_flight(loop):
    """The most loads of a loop that are on their way before the first of them is used."""
    most, waiting, under_way = 0, set(), 0
    for instruction in loop:
        if instruction.loads():
            if instruction.loads() & waiting:
                waiting, under_way = set(), 0
            waiting |= instruction.loads()
            under_way += 1
            most = max(most, under_way)
        elif instruction.reads(waiting):
            waiting, under_way = set(), 0
    return most


def plain_name(name):
    """Without namespaces and what the compiler adds: reduce_rows_kernel<AddColumnSums>."""
    name = re.sub(r"\b(lockstep|cuda|bodies)::", "", re.sub(r"^void ", "", name))
    return name.split("(")[0] if "(" in name else name


def read_kernels(listing):
    """The kernels of what nvdisasm prints, by name."""
    kernels, kernel = {}, None
    for line in listing.splitlines():
        if line.startswith("//---"):
            section = SECTION.search(line)
            kernel = kernels.setdefault(section[1], Kernel(section[1])) if section else None
        elif kernel is None:
            continue
        elif match := INSTRUCTION.search(line):
            kernel.code.append(Instruction(match[1] or "", match[2], match[3].strip()))
        elif match := LABEL.match(line):
            kernel.labels[match[1]] = len(kernel.code)
    return kernels


def demangled(kernels):
    """The kernels by the names that the source gives them."""
    names = subprocess.run(["c++filt"], input="\n".join(kernels), capture_output=True, text=True,
                           check=True).stdout.splitlines()
    for kernel, name in zip(kernels.values(), names):
        kernel.name = plain_name(name)
    return {kernel.name: kernel for kernel in kernels.values()}


# --- Compiling --------------------------------------------------------------------------------------

ENTRY = re.compile(r"Compiling entry function '(\S+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def find_nvdisasm(nvcc, folder):
    """Next to nvcc, in PATH, or from PyPI into `folder`; None if it is in none of them."""
    places = os.pathsep.join([str(Path(nvcc).resolve().parent), os.environ["PATH"]])
    if found := shutil.which("nvdisasm", path=places):
        return found
    if not list(folder.glob("nvidia/*/bin/nvdisasm")):
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries=0",
                        f"--target={folder}", "nvidia-cuda-nvdisasm"], capture_output=True)
    return next((str(path) for path in folder.glob("nvidia/*/bin/nvdisasm")), None)


def note_resources(kernels, report):
    """Adds what the assembler reports (-Xptxas -v) to the kernels."""
    kernel = None
    for line in report.splitlines():
        if match := ENTRY.search(line):
            kernel = kernels[match[1]]
        elif match := STACK.search(line):
            kernel.local_bytes = max(map(int, match.groups()))
        elif match := USED.search(line):
            kernel.registers = int(match[1])


def compile_kernels(nvcc, nvdisasm, source, arch, folders):
    """The kernels of a source, compiled as the build compiles it (common/kernels/cuda/meson.build)
    with headers from `folders`; by name."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        done = subprocess.run([nvcc, "-std=c++20", "-O3", *(f"-I{each}" for each in folders),
                               f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v",
                               "-cubin", str(source), "-o", str(cubin)],
                              capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{source} for sm_{arch}: {done.stderr[:2000]}")
        listing = subprocess.run([nvdisasm, "--print-code", str(cubin)], capture_output=True,
                                 text=True, check=True).stdout
    kernels = read_kernels(listing)
    note_resources(kernels, done.stderr)
    return demangled(kernels)
