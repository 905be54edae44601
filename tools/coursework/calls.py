"""What an object file calls outside of the project, and what it defines, by the names that the linker sees: no spelling
hides one.

A student's object may call what the solved file calls (solutions.py), what its tasks' rows allow besides (`calls`), the
project's own functions, and what only computes, prints or takes memory. It may define functions in the project's
namespace that no other object defines: the linker would take the student's (--allow-multiple-definition).
"""

import re
import subprocess

from coursework import CourseworkError
from coursework.marked_lines import BUSINESS
from coursework.sandbox import NONE, RUNNING, Sandbox, View

HARMLESS = re.compile("|".join((
    r"mem(?:chr|cmp|cpy|move|set)|str(?:n?cmp|r?chr|n?len|n?cpy|n?cat|str|to[dfl]|toull?|toll|error)|ato(?:i|f|ll?)",
    r"is(?:al(?:num|pha)|cntrl|digit|graph|lower|print|punct|space|upper|xdigit)|to(?:lower|upper)",
    r"v?[fs]?n?printf|f?puts|f?putc|putchar|perror|fflush|fwrite|stderr|stdout",
    r"malloc|calloc|realloc|free|aligned_alloc|qsort|bsearch|l?l?abs|l?l?div|s?rand",
    r"time|clock|clock_gettime|nanosleep|sched_yield|omp_get_\w+",
    r"(?:a?(?:cos|sin|tan)h?|atan2|ceil|floor|round|rint|nearbyint|trunc|exp[2m]?1?|log(?:2|10|1p|b)?|ilogb|pow|sqrt|cbrt|"
    r"hypot|fma|fmod|fmin|fmax|fabs|fdim|remainder|copysign|nextafter|frexp|ldexp|modf|scalbl?n|erfc?|[lt]gamma|"
    r"l?lround|l?lrint|sincos)[fl]?",
    r"pthread_(?:mutex|cond|rwlock|spin)_\w+|pthread_(?:once|self)|__once_proxy",
    r"__(?:asan|tsan|ubsan|sanitizer|cxa)_\w+|__gxx_personality_\w+|_Unwind_\w+|__dynamic_cast|__stack_chk_fail",
    r"__dso_handle|__assert_fail|__errno_location|__libc_single_threaded|__tls_get_addr|_GLOBAL_OFFSET_TABLE_",
    r"__v?[fs]?n?printf_chk|__mem\w+_chk|__(?:u?(?:div|mod)|popcount|clz|ctz|ffs|parity|bswap)\w+")))
BY_ITSELF = {"terminate"}  # the compiler calls it, where an error meets another
OURS = re.compile(r"_Z(?:T[A-Z]|GV)*(?:N[KVRO]*)?8lockstep")  # how names of the project's namespace begin
STRONG, WEAK = "TDBRGS", "WVu"  # kinds of names: the linker takes a strong one, or else any weak one
OLD_AND_NEW = re.compile(r"^__isoc\d\d_|(?<=[a-z])64$")  # of the C library: names of one function


def symbols(paths, *options, sandbox):
    """What nm says of object files."""
    command = sandbox.command(["nm", *options, *paths], View(readable=paths), RUNNING, {})
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise CourseworkError(f"nm cannot read {', '.join(map(str, paths))}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def calls_of(path, sandbox=Sandbox(NONE)):
    """The names of functions that an object file calls and that are neither C++'s, the project's, nor harmless. Of C++'s
    own, the words that no task may have."""
    found = set()
    for name in (line.split(None, 1)[1] for line in symbols((path,), "--undefined-only", "--demangle", sandbox=sandbox)):
        if plain := re.fullmatch(r"\w+", name):
            plain = OLD_AND_NEW.sub("", plain[0])
            found |= set() if HARMLESS.fullmatch(plain) else {plain}
        elif not name.startswith("lockstep::") or "testing" in name:
            found |= (BUSINESS.keys() & set(re.findall(r"\w+", name.split("(")[0]))) - BY_ITSELF
    return found


def definitions_of(*paths, sandbox=Sandbox(NONE)):
    """The strong and the weak names, as the linker sees them, that object files define for others."""
    said = symbols(paths, "--defined-only", "--extern-only", sandbox=sandbox) if paths else []
    found = [words for line in said if len(words := line.split()) == 3]
    return tuple({name for _, kind, name in found if kind in kinds} for kinds in (STRONG, WEAK))


def taken_over(path, elsewhere, sandbox=Sandbox(NONE)):
    """The functions and objects that an object file defines outside of the project's namespace, or although `elsewhere`,
    strong and all names of other objects, has them; as people write them. Of two weak ones, as of a template, the
    linker takes either."""
    strong, all_names = elsewhere
    mine, my_weak = definitions_of(path, sandbox=sandbox)
    found = (mine & all_names) | (my_weak & strong) | {name for name in mine if not OURS.match(name)}
    told = subprocess.run(["c++filt"], input="\n".join(sorted(found)), capture_output=True, text=True).stdout
    return told.splitlines()
