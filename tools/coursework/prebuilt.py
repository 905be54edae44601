"""A student's tree one can look at: its programs run with the prebuilt solutions of what is open."""

from coursework import names, solutions, tasks as table

# Every function of a file with tasks can be replaced only if none is inlined; rooms without tasks are
# compiled as usual. The solutions were compiled without these libraries, too.
OPTIONS = ("-Doptimization=0", "-Dcoursework=programs", "-Dcuda=disabled", "-Dgloo=disabled")
AS_USUAL = ("-Doptimization=2", "-Dcoursework=no", "-Dcuda=auto", "-Dgloo=auto")
MINE = "--mine"


def is_students_tree(root):
    return (root / solutions.MANIFEST).is_file()


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
    return (*(OPTIONS if open_tasks(root) else AS_USUAL), "-Dprebuilt=" + ",".join(tasks))


def told(root, tasks):
    """What to say about it, as lines."""
    if not tasks:  # with --mine, or all are done
        still = open_tasks(root) if is_students_tree(root) else []
        return [f"open: {names(still)}; with {MINE} a program ends at the first of them that it comes to, "
                "and shows all it has to show if it comes to none"] if still else []
    return [f"open: {names(tasks)}; prebuilt solutions run in their place, compiled without optimisation "
            f"({MINE}: without them)", *solutions.differences(root, root)]
