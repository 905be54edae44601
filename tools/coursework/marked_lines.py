"""What is taken from a submission: the lines between a task's markers, and nothing else.

All other lines are those that were handed out. What has no business between the markers is flagged: it
would act on the tests, the grader or the machine instead of computing. A task with a grave flag is not
compiled unless the teacher has looked at it (--take-flagged).
"""

import difflib
import re
from dataclasses import dataclass

from coursework import tasks as table

FORBIDDEN = {
    "a process": "system popen fork vfork posix_spawn posix_spawnp execl execle execlp execv execve execvp execvpe "
                 "fexecve _exit _Exit exit quick_exit abort terminate pthread_kill sigaction "
                 "setjmp longjmp atexit at_quick_exit ptrace prctl syscall unshare setns",
    "a thread": "thread jthread async pthread_create thrd_create",
    "a library": "dlopen dlmopen dlsym dlvsym dladdr dl_iterate_phdr",
    "memory of others": "mmap munmap mprotect mremap memfd_create process_vm_readv process_vm_writev shm_open",
    "a socket or a pipe": "socket socketpair sendmsg recvmsg sendto recvfrom pipe2 mkfifo",
    "files": "fopen freopen fdopen open64 openat creat dup dup2 dup3 ifstream fstream ofstream basic_ifstream basic_fstream "
             "basic_ofstream filebuf basic_filebuf wifstream wfstream wofstream wfilebuf opendir readdir filesystem "
             "readlink symlink chdir chroot pread pread64 preadv preadv2 readv pwrite pwrite64 pwritev pwritev2 "
             "writev lseek lseek64 lockf flock ioctl fcntl faccessat sendfile vmsplice tmpfile mkstemp mkdtemp",
    "the environment": "getenv secure_getenv setenv putenv environ",
    "another type's memory": "reinterpret_cast const_cast bit_cast typeid union memcpy memmove as_bytes as_writable_bytes",
    "the tests": "testing Catch CATCH_REGISTER_LISTENER TEST_CASE SECTION CHECK REQUIRE SUCCEED FAIL hidden_seed tell_value "
                 "tell_hint Witness HINT INFO",
    "the compiler": "asm extern _Pragma constructor destructor",
}
OUTLIVES = "an object that outlives the call"  # no fraud by itself
BUSINESS = {word: what for what, words in FORBIDDEN.items() for word in words.split()}
BY_NUMBER = re.compile(r"\\(?:x|o|u|U|N|[0-7]{2})")  # '\0' is none
PATHS = re.compile(r"/proc\b|/sys\b|/dev\b|/etc\b|LOCKSTEP_|solutions/")
# What begins first hides the others. No part is looked at twice: a student's text may be long. The quotes in
# 1'000 are a number's; those of u8'"' are not.
PARTS = re.compile(r"""(?P<comment>//[^\n]*|/\*.*?(?P<end>\*/|\Z))|(?P<raw>\b(?:u8|[uUL])?R"[^(\n]{0,16}\()|"""
                   r"""(?P<number>\b\d[\w.]*(?:'[\w.]+)*)|(?P<text>(?P<quote>["'])(?:\\.|(?!(?P=quote))[^\\\n])*"""
                   r"""(?P<unquote>(?P=quote))?)""", re.DOTALL)
ATTRIBUTES = r"\b(?:maybe_unused|nodiscard|fallthrough|likely|unlikely|noreturn|no_unique_address)\b"
TYPE = re.compile(r"\b(?:class|struct|union|enum)\s+(?:class\s+)?(\w+)[\w\s:,<>]{0,200}\{")
LARGEST = 1 << 14  # characters of a task's lines: the largest solution has less than a tenth
HEAD = 200  # words, that are enough to know a function by
LONG = 2000  # lines that a file may have beyond those handed out, to be compared line by line
TOKEN = re.compile(r"[A-Za-z_]\w*|[{}();=]|::|\S")


@dataclass(frozen=True)
class Flag:
    """What has no business where it stands."""

    line: int  # in the submitted file, from 1
    what: str
    grave: bool = True  # the task is not compiled; otherwise it is only told

    @property
    def word(self):
        """Of a word that has no business there."""
        return self.what[1:].partition("'")[0]


@dataclass(frozen=True)
class Taken:
    """A handed-out file with the submitted lines of its tasks, and what is to be said of it."""

    text: str
    lost: tuple = ()  # ids of tasks whose markers the submitted file has not
    flags: dict = None  # Flags by the task's id
    outside: str = ""  # where else the file differs


def take(handed_out, submitted, file, types=frozenset()):
    """Takes the marked lines of all tasks of a file. `types`: see flag()."""
    text, lost, flags = handed_out, [], {}
    for section in table.find_sections(handed_out, file):
        begin, lines = submitted_lines(submitted, section.id)
        if lines is None:
            lost.append(section.id)
            continue
        text = table.replace_section(text, file, section.id, lines)
        flags[section.id] = flag(lines, begin, not section.indent, types)
    return Taken(text, tuple(lost), flags, differences(handed_out, submitted, file))


def submitted_lines(text, task_id):
    """The number of the first line after a task's marker, and the lines up to its end. None for the lines
    if the markers are not there, twice there, or around others."""
    marks = [(number, match[2], match[3]) for number, line in enumerate(text.split("\n"))
             if (match := table.MARKER.match(line.rstrip()))]
    own = [place for place, mark in enumerate(marks) if mark[2] == task_id]
    if [marks[place][1] for place in own] != ["task", "end"] or own[1] != own[0] + 1:
        return 0, None
    begin, end = marks[own[0]][0], marks[own[1]][0]
    lines = [line.rstrip("\r") for line in text.split("\n")[begin + 1:end]]
    return (0, None) if any(map(table.LIKE_A_MARKER.search, lines)) else (begin + 2, lines)


def outside_lines(text, task_ids):
    """The lines outside of the markers of these tasks; all, where those are not as they should be. An editor may have
    moved a marker: how far it is indented does not count."""
    lines = text.split("\n")
    for task_id in task_ids:
        begin, own = submitted_lines("\n".join(lines), task_id)
        if own is not None:
            del lines[begin - 1:begin - 1 + len(own)]
    return [line.strip() if table.LIKE_A_MARKER.search(line) else line.rstrip() for line in lines]


def differences(handed_out, submitted, file):
    """The places outside of the markers where a file differs, in words; "" if there are none."""
    task_ids = [section.id for section in table.find_sections(handed_out, file)]
    ours, theirs = (outside_lines(text, task_ids) for text in (handed_out, submitted))
    if len(theirs) > len(ours) + LONG:
        return f"{file} has {len(theirs)} lines outside of the markers, handed out were {len(ours)}"
    changes = [change for change in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
               if change[0] != "equal"]
    if not changes:
        return ""
    lines = sum(max(change[2] - change[1], change[4] - change[3]) for change in changes)
    first = next(iter(theirs[changes[0][3]:changes[0][4]] or ours[changes[0][1]:changes[0][2]]))
    return f"{file} differs outside of the markers, first at '{first.strip()[:60]}' ({lines} lines)"


# --- What has no business there ------------------------------------------------------------------

def types_of(header):
    """The names of the types that a header has outside of others."""
    return set(re.findall(r"^(?:class|struct|enum class) (\w+)", header, re.MULTILINE))


def flag(lines, begin, at_margin=False, types=frozenset()):
    """The Flags of a task's lines, the first of which is line `begin` of its file. `at_margin`: they are
    whole functions, and may have types of their own, but none of these `types`, of which the tests have another idea."""
    text = "\n".join(lines)
    if len(text) > LARGEST:
        return [Flag(begin, f"a text of {len(text)} characters, {LARGEST} at most,")]
    found = [Flag(begin + number, what) for number, line in enumerate(lines) for what in line_flags(line)]
    code, texts = "", [(0, "")]
    place = 0
    for part in PARTS.finditer(text):
        between = text[place:part.start()]
        code += between
        if part["text"]:  # texts side by side are one
            begun, said = (part.start(), "") if between.strip(" \n\tu8UL") else texts.pop()
            texts.append((begun, said + part["text"][1:-1]))
        found += [Flag(begin + line_of(text, part.start()), what) for what in part_flags(part)]
        code += part[0] if part["number"] else re.sub(r"[^\n]", " ", part[0])
        place = part.end()
    code += text[place:]
    found += [Flag(begin + line_of(text, place), f"'{path[0]}' in a text") for place, said in texts
              if (path := PATHS.search(said))]
    found += [Flag(begin + line_of(code, place), what, OUTLIVES not in what)
              for place, what in code_flags(code, at_margin)]
    found += [Flag(begin + line_of(code, match.start()), f"'{match[1]}': a type of the project's")
              for match in TYPE.finditer(code) if at_margin and match[1] in types]
    return sorted(set(found), key=lambda one: (one.line, one.what))


def line_of(text, place):
    return text.count("\n", 0, place)


def line_flags(line):
    """Flags that do not depend on what is a comment: the preprocessor comes first."""
    stripped = line.strip()
    if re.match(r"#|%:|\?\?=", stripped):
        yield f"'{stripped.split('//')[0].strip()[:40]}': a line for the preprocessor"
    if stripped.endswith(("\\", "??/")):
        yield "a line that goes on in the next one"


def part_flags(part):
    if part["raw"]:
        yield "a raw string"
    elif part["comment"] and part["end"] == "":
        yield "a comment without an end"
    elif part["text"] and not part["unquote"]:
        yield "a text without an end"
    elif part["text"] and (found := BY_NUMBER.search(part["text"])):
        yield f"'{found[0]}': a character by its number"


def code_flags(code, at_margin):
    """Places and Flags of code without comments and strings."""
    tokens = [(match.start(), match[0]) for match in TOKEN.finditer(code)]
    yield from word_flags(tokens)
    for pattern in (r"\\[uU][0-9a-fA-F]", r"<%|%>|<:(?!:)|:>|%:|\?\?[=/'()!<>-]", "#",
                    r"[*&]\s*(?:const\s*)?\)\s*(?!(?:const|noexcept|mutable|override|final)\b)[\w(&]",
                    r"\bstatic_cast\s*<[^<>]*[*&]\s*(?:const\s*)?>", r"\bvoid\s*(?:const\s*)?\*", r"\bnew\s*\(",
                    r"\(\s*\*\s*\w*\s*\)\s*\(", r"\bdecltype\s*\(\s*&"):
        for match in re.finditer(pattern, code):
            yield match.start(), f"'{match[0]}'"
    for match in re.finditer(r"\[\s*\[(.*?)(?:\]\s*\]|\Z)", code, re.DOTALL):
        if unknown := re.sub(rf"{ATTRIBUTES}|[\s,]", "", match[1]):
            yield match.start(), f"'{unknown[:40]}': an attribute"
    depth = 0
    for place, token in tokens:
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            yield place, "'}': the end of the function that the lines are in"
            return
    if at_margin:
        yield from object_flags(tokens)


def word_flags(tokens):
    for number, (place, word) in enumerate(tokens):
        following = tokens[number + 1][1] if number + 1 < len(tokens) else ""
        before = tokens[number - 1][1] if number else ""
        if word in BUSINESS:
            yield place, f"'{word}': {BUSINESS[word]}"
        elif word.startswith("__"):
            yield place, f"'{word}': a name of the compiler's own"
        elif word == "static" and "inline" in (before, following) and is_variable(tokens[number + 1:]):
            yield place, "'static inline': an object outside of the functions"
        elif word == "thread_local" or (word == "static" and following != "constexpr"
                                        and not is_function_with_body(tokens[number + 1:])):
            yield place, f"'{word}': {OUTLIVES}"


def is_variable(tokens):
    """Whether a declaration that goes on like this is one of a variable."""
    return next((word != "(" for _, word in tokens if word in ("(", "=", "{", ";")), True)


def is_function_with_body(tokens):
    """Whether a declaration that goes on like this is one of a function, with its body."""
    depth = 0
    for number, (_, word) in enumerate(tokens[:HEAD]):
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth == 0 and word in ("=", "{", ";"):
            return False
        if depth == 0 and word == ")":
            following = tokens[number + 1][1] if number + 1 < len(tokens) else ""
            return following in ("{", "noexcept", "-")
    return False


def object_flags(tokens):
    """At the margin stand whole functions: an object there would be made before the tests begin. Words inside
    of braces do not count, except those of a namespace; a function ends with its brace."""
    depth, begin, words = 0, 0, []
    for place, token in tokens:
        begin = begin if words else place
        if token == "{" and depth == 0 and words[:1] == ["namespace"]:
            words = []
        elif token == "}":
            depth = max(0, depth - 1)
            words = [] if depth == 0 and is_function(words) else words
        elif token == ";" and depth == 0:
            if is_object(words):
                yield begin, f"'{words[0]}': an object outside of the functions"
            words = []
        else:
            words += [token] if depth == 0 and len(words) < HEAD else []
            depth += token == "{"


def is_function(words):
    """Whether these words, up to a brace, are a function's head."""
    if "(" not in words or words.count("(") != words.count(")"):
        return False
    return "operator" in words or "=" not in words[:words.index("(")]


def is_plain_lambda(words):
    """Whether these words are a function without a name and without captures that is not called. Of its body only
    the first brace is among them."""
    return words[:2] == ["[", "]"] and words.count("{") == 1 and words[-1] == "{"


def is_object(words):
    """Whether a statement outside of all functions makes an object while the program starts."""
    words = without_parameters(words)
    if not words or words[0] in ("using", "typedef", "enum", "namespace", "template", "concept", "static_assert"):
        return False
    if "operator" in words:  # declared, or called
        return bool({"=", "(", "{"} & set(words[:words.index("operator")]))
    if words[0] in ("struct", "class", "union"):
        return words[-1] != "{" if "{" in words else len(words) > 2
    first = next((number for number, word in enumerate(words) if word in ("=", "(", "{")), len(words))
    value = words[first + 1:]
    if "constexpr" in words[:first] or ("const" in words[:first] and words[first:first + 1] == ["="]
                                        and (is_literal(value) or is_plain_lambda(value))):
        return False
    return words[first:first + 1] != ["("] or ("=" not in words and any(word[0].isdigit() for word in words))


def without_parameters(words):
    """What a template's parameters stand before: a variable can be a template, too."""
    if words[:2] != ["template", "<"]:
        return words
    depth = 0
    for number, word in enumerate(words):
        depth += {"<": 1, ">": -1}.get(word, 0)
        if word == ">" and depth == 0:
            return without_parameters(words[number + 1:])
    return []


def is_literal(words):
    """Whether an object of this value is there before the program starts. Texts have no words here."""
    return len(words) <= 2 and all(word in ("-", "true", "false", "nullptr") or word[0].isdigit() for word in words)
