"""Prebuilt solutions: solutions/ID.o has one task's functions, made from the solved sources, and
everything that only they need, under private names.

A grader's program is linked from the student's objects and the solutions of all tasks but its own.
These come first, and the linker takes the first definition (--allow-multiple-definition). Code is
compiled with -fPIC and semantic interposition, so no call was bound or inlined before that.

ThreadSanitizer's programs link the same objects: it checks only what the student compiled.
"""

import hashlib
import json
import struct
import subprocess
import tempfile
from pathlib import Path

from coursework import CourseworkError, OPEN_FILES, SOLUTIONS, names, tasks as table, tree
from coursework.calls import calls_of, definitions_of
from coursework.workshop import compiler

MANIFEST = f"{SOLUTIONS}/manifest.json"


def make_solutions(workshop, tasks, target, say):
    """Compiles the solved sources that the workshop holds and fills `target`/solutions. Returns, for the manifest, what
    each of them calls outside of the project, and what it defines (calls.py)."""
    workshop.configure("plain", "objects")
    objects = workshop.objects("plain")
    for task in tasks:
        if task.compiled not in objects:
            raise CourseworkError(f"task {task.id}: {task.compiled} is not compiled by itself "
                                  "in a build for coursework; see docs/coursework.md")
    made = {task.id: workshop.build("plain") / objects[task.compiled] for task in tasks}
    wanted = sorted({objects[task.compiled] for task in tasks})
    status, output = workshop.compile("plain", wanted, "the solutions", say)
    if status != 0:
        raise CourseworkError(f"the solutions cannot be compiled:\n{output}")
    (target / SOLUTIONS).mkdir(parents=True, exist_ok=True)
    symbols = {task.id: mangled_symbols(task, made[task.id]) for task in tasks}
    for task in tasks:
        others = {name for other, names in symbols.items() if other != task.id for name in names}
        cut_out(made[task.id], symbols[task.id], others, target / SOLUTIONS / f"{task.id}.o")
    objects = {task.compiled: made[task.id] for task in tasks}
    return {"calls": {path: sorted(calls_of(place)) for path, place in objects.items()},
            "defines": {path: sorted(definitions_of(place)[0]) for path, place in objects.items()}}


def defined_symbols(path):
    """Mangled and demangled names of an object's functions."""
    def listed(*options):
        done = subprocess.run(["nm", "--defined-only", *options, str(path)], capture_output=True,
                              text=True, check=True)
        return [line.split(" ", 2)[1:] for line in done.stdout.splitlines()]

    pairs = zip(listed(), listed("--demangle"))
    return [(plain[1], told[1]) for plain, told in pairs if plain[0] in "TWV"]


def mangled_symbols(task, path):
    """A task's functions, by the linker's names."""
    defined = defined_symbols(path)
    found = []
    for symbol in task.symbols:
        fits = [mangled for mangled, told in defined
                if told == symbol or (told.replace("[abi:cxx11]", "").startswith(symbol + "(")
                                      and "::{lambda" not in told)]
        if len(fits) != 1:
            near = [told for _, told in defined if symbol.split("::")[-1] in told]
            raise CourseworkError(f"task {task.id}: {task.compiled} has {len(fits)} functions "
                                  f"{symbol}, expected one; near to it are: "
                                  f"{'; '.join(near) or 'none'}")
        found += fits
    return found


SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, ...
SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
SYMTAB, GLOBAL_WITHOUT_TYPE, UNDEFINED = 2, 0x10, 0


def without_definitions(data, names):
    """An object file (ELF, 64 bits, little endian) in which these symbols are undefined: no tool of
    binutils does that to a symbol to which the file itself refers."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise CourseworkError("the compiler does not write 64-bit ELF objects, which solutions are")
    data, names = bytearray(data), {name.encode() for name in names}
    first, = struct.unpack_from("<Q", data, 40)
    count, = struct.unpack_from("<H", data, 60)
    if count == 0:  # if they do not fit into the header, the first section's size says it
        count = SECTION.unpack_from(data, first)[5]
    sections = [SECTION.unpack_from(data, first + i * SECTION.size) for i in range(count)]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != SYMTAB:
            continue
        strings = sections[link][4]
        for at in range(offset, offset + size, SYMBOL.size):
            name = SYMBOL.unpack_from(data, at)[0]
            if bytes(data[strings + name:data.index(0, strings + name)]) in names:
                SYMBOL.pack_into(data, at, name, GLOBAL_WITHOUT_TYPE, 0, UNDEFINED, 0, 0)
    return bytes(data)


def run_tool(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise CourseworkError(f"{command[0]}: {done.stderr.strip()}")


def cut_out(path, symbols, others, target):
    """Writes the object `target`, which defines nothing but `symbols`, from the object `path`.
    `others` are symbols of other tasks: it calls them, but has no copies of its own."""
    with tempfile.TemporaryDirectory() as folder:
        whole, alone = Path(folder) / "whole.o", Path(folder) / "alone.o"
        whole.write_bytes(without_definitions(path.read_bytes(), others))
        roots = [word for symbol in symbols for word in ("-u", symbol)]
        run_tool("ld", "-r", "--gc-sections", "--force-group-allocation", *roots,
                 f"--entry={symbols[0]}", whole, "-o", alone)
        run_tool("objcopy", "--keep-global-symbol=none", "--strip-debug", alone)
        run_tool("objcopy", *[f"--globalize-symbol={symbol}" for symbol in symbols], alone, target)


# --- What they were made from --------------------------------------------------------------------

def header_sums(root):
    """Checksums of the headers that must be the same for students' objects and for solutions, by
    path; students' own lines do not count."""
    return {path: hashlib.sha256(outside(text, path).encode()).hexdigest()
            for path, text in tree.read_sources(root).items() if not path.endswith(".cpp")}


def source_sums(root):
    """Checksums of the other sources; students' own lines do not count."""
    return {path: hashlib.sha256(outside(text, path).encode()).hexdigest()
            for path, text in tree.read_sources(root).items() if path.endswith(".cpp")}


def outside(text, path):
    try:
        return table.outside_text(text, path)
    except CourseworkError:
        return text  # a student's markers are broken: that is a change


def build_file_sums(root):
    """Checksums of the files that say how students' files are compiled."""
    return {path: hashlib.sha256((root / path).read_bytes()).hexdigest()
            for path in tree.list_files(root)
            if tree.is_students(path) and path.split("/")[-1] == "meson.build"}


def write_manifest(target, of_objects):
    facts = {**compiler(), "headers": header_sums(target), "sources": source_sums(target),
             "build_files": build_file_sums(target), **of_objects}
    (target / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n")


def read_manifest(root):
    return json.loads((root / MANIFEST).read_text())


def changed_headers(root, sources):
    """The headers with which the solutions in `root` were made that are missing or different in
    `sources`."""
    made, here = read_manifest(root)["headers"], header_sums(sources)
    return sorted(path for path in made if here.get(path) != made[path])


def changed(root, which, here):
    """The files of this kind that are missing, new or different."""
    made = read_manifest(root).get(which)
    if made is None:
        return []  # this tree was made before they were recorded
    return sorted(path for path in made.keys() | here.keys() if here.get(path) != made.get(path))


def differences(root, sources):
    """How this machine and these sources differ from those that the solutions in `root` were made
    with, as lines. Raises CourseworkError if they cannot be linked at all."""
    made, here = read_manifest(root), compiler()
    if here["machine"] != made["machine"]:
        raise CourseworkError(f"the solutions in {root / SOLUTIONS} are for {made['machine']}, this "
                              f"machine is {here['machine']}: make the tree on one like it")
    lines = []
    if here["compiler"] != made["compiler"]:
        lines.append(f"the solutions were compiled by '{made['compiler']}', here is "
                     f"'{here['compiler']}'")
    if headers := changed_headers(root, sources):
        lines.append(f"changed since the tree was made: {names(headers)}; the prebuilt "
                     "solutions do not know of it")
    if others := changed(root, "sources", source_sums(sources)):
        lines.append(f"changed outside of the markers since the tree was made: {names(others)}; a teacher's grade "
                     "takes only the marked lines")
    if build_files := changed(root, "build_files", build_file_sums(sources)):
        lines.append(f"changed since the tree was made: {names(build_files)}; build files can do "
                     "anything, look at them")
    if refused := tree.list_refused(sources):
        lines.append(f"not taken: {names(refused)}; expected regular files in folders that are no "
                     "links")
    return lines


# --- A student's programs, with the solutions of what is open ------------------------------------

# Every function of a file with tasks can be replaced only if none is inlined; rooms without tasks are
# compiled as usual. The solutions were compiled without these libraries, too.
PROGRAMS_OPTIONS = ("-Doptimization=0", "-Dcoursework=programs", "-Dcuda=disabled", "-Dgloo=disabled")
AS_USUAL = ("-Doptimization=2", "-Dcoursework=no", "-Dcuda=auto", "-Dgloo=auto")
MINE = "--mine"


def is_students_tree(root):
    return (root / MANIFEST).is_file()


def open_tasks(root):
    """The ids of the tasks whose lines still call open_task, or whose file is missing."""
    def is_open(task):
        file = root / task.file
        return not file.is_file() or table.open_line(file.read_text(errors="replace"), task.file, task.id)
    return [task.id for task in table.load_tasks(root) if is_open(task)]


def replaced(root, mine):
    """The tasks that prebuilt solutions stand in for; none in a tree with all of them done, and
    none with --mine."""
    return [] if mine or not is_students_tree(root) else open_tasks(root)


def meson_options(root, tasks):
    """How the programs of a student's tree are compiled: as long as anything is open in it, so that
    functions can be replaced. Empty for the solved tree."""
    if not is_students_tree(root):
        return ()
    return (*(PROGRAMS_OPTIONS if open_tasks(root) else AS_USUAL), "-Dprebuilt=" + ",".join(tasks))


def told(root, tasks):
    """What to say about it, as lines."""
    if not tasks:  # with --mine, or all are done
        still = open_tasks(root) if is_students_tree(root) else []
        return [f"open: {names(still)}; with {MINE} a program ends at the first of them that it comes to, "
                "and shows all it has to show if it comes to none"] if still else []
    return [f"open: {names(tasks)}; prebuilt solutions run in their place, compiled without optimisation "
            f"({MINE}: without them)", *differences(root, root)]
