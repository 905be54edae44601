"""Every source includes the header of each name that it uses from the C++ library, from POSIX and
from fmt, itself or through headers of this project.

A compiler does not look for that: it takes a name that some other header of the library brings along,
and with the next release of the library that header may not."""

import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))
from small_tree import SmallTree
SOURCES = (".h", ".cpp", ".inl", ".cuh", ".cu")

# Header | names within std:: that it declares. A name that stands twice may come from either. All of
# a namespace within std:: (chrono, filesystem) is in one header; not so `ranges`.
STANDARD = """
algorithm | adjacent_find all_of any_of binary_search clamp copy copy_backward copy_if copy_n count
          | count_if equal equal_range fill fill_n find find_if find_if_not for_each for_each_n
          | generate includes is_sorted iter_swap lexicographical_compare lower_bound max
          | max_element min min_element minmax minmax_element mismatch next_permutation none_of nth_element
          | partition remove remove_if replace replace_if reverse rotate search set_difference
          | set_intersection set_union shuffle sort stable_partition stable_sort swap_ranges
          | transform unique upper_bound ranges::adjacent_find ranges::all_of ranges::any_of
          | ranges::binary_search ranges::contains ranges::copy ranges::copy_if ranges::count
          | ranges::count_if ranges::equal ranges::fill ranges::find ranges::find_if
          | ranges::find_if_not ranges::for_each ranges::includes ranges::is_sorted
          | ranges::lower_bound ranges::max ranges::max_element ranges::min ranges::min_element
          | ranges::minmax ranges::move ranges::none_of ranges::nth_element ranges::remove_if
          | ranges::replace ranges::reverse ranges::rotate ranges::shuffle ranges::sort
          | ranges::stable_sort ranges::transform ranges::unique ranges::upper_bound
any       | any any_cast
array     | array get to_array tuple_size_v
atomic    | atomic atomic_ref atomic_thread_fence memory_order memory_order_acq_rel
          | memory_order_acquire memory_order_relaxed memory_order_release memory_order_seq_cst
barrier   | barrier
bit       | bit_cast bit_ceil bit_floor bit_width countl_zero countr_zero endian has_single_bit
          | popcount
bitset    | bitset
cctype    | isalnum isdigit isprint isspace isxdigit tolower toupper
charconv  | from_chars to_chars
chrono    | chrono
cmath     | abs cbrt ceil cos exp expm1 fabs floor fma fmax fmin fmod hypot ilogb isfinite isinf
          | isnan ldexp llround log log10 log1p log2 lround nan nearbyint nextafter pow round
          | signbit sin sqrt tan tanh trunc
compare   | partial_ordering strong_ordering weak_ordering
concepts  | convertible_to derived_from floating_point integral invocable same_as unsigned_integral
condition_variable | condition_variable
csignal   | signal
cstddef   | byte max_align_t nullptr_t ptrdiff_t size_t to_integer
cstdint   | int16_t int32_t int64_t int8_t intmax_t intptr_t uint16_t uint32_t uint64_t uint8_t
          | uintmax_t uintptr_t
cstdio    | clearerr fclose ferror fflush fgets FILE fopen fprintf fputc fputs fread fseek ftell
          | fwrite perror printf putchar puts remove rename size_t snprintf sscanf
cstdlib   | _Exit abort abs aligned_alloc atexit atoi atoll calloc exit free getenv malloc
          | quick_exit realloc size_t strtod strtol strtoll strtoul strtoull system
cstring   | memchr memcmp memcpy memmove memset size_t strchr strcmp strerror strlen strncmp strncpy
          | strrchr strstr
ctime     | gmtime localtime strftime time time_t
deque     | deque erase erase_if
exception | current_exception exception exception_ptr make_exception_ptr nested_exception
          | rethrow_exception rethrow_if_nested set_terminate terminate throw_with_nested
          | uncaught_exceptions
filesystem | filesystem
fstream   | fstream ifstream ofstream
functional | bind_front cref equal_to function greater hash invoke less mem_fn minus multiplies
          | negate not_fn plus ref reference_wrapper
future    | async future future_status launch packaged_task promise shared_future
initializer_list | initializer_list
iomanip   | setfill setprecision setw
ios       | ios streamoff streamsize
iostream  | cerr cin clog cout
iterator  | advance back_inserter begin cbegin cend data distance empty end inserter
          | istream_iterator istreambuf_iterator iterator_traits make_move_iterator next prev
          | reverse_iterator size ssize
latch     | latch
limits    | numeric_limits
list      | list
map       | erase_if map multimap
memory    | addressof allocator construct_at default_delete destroy_at dynamic_pointer_cast
          | enable_shared_from_this make_shared make_unique shared_ptr static_pointer_cast
          | to_address unique_ptr weak_ptr
mutex     | call_once lock_guard mutex once_flag recursive_mutex scoped_lock timed_mutex unique_lock
new       | align_val_t bad_alloc bad_array_new_length get_new_handler nothrow set_new_handler
numbers   | numbers
numeric   | accumulate adjacent_difference exclusive_scan gcd inclusive_scan inner_product iota lcm
          | midpoint partial_sum reduce transform_reduce
optional  | make_optional nullopt optional
queue     | priority_queue queue
random    | bernoulli_distribution mt19937 mt19937_64 normal_distribution random_device seed_seq
          | uniform_int_distribution uniform_real_distribution
ranges    | views ranges::begin ranges::end ranges::iota_view ranges::size ranges::subrange
ratio     | micro milli nano ratio
regex     | regex regex_match regex_replace regex_search smatch sregex_iterator
semaphore | binary_semaphore counting_semaphore
set       | erase_if multiset set
shared_mutex | shared_lock shared_mutex
source_location | source_location
span      | as_bytes as_writable_bytes dynamic_extent span
sstream   | istringstream ostringstream stringstream
stack     | stack
stdexcept | domain_error invalid_argument length_error logic_error out_of_range overflow_error
          | range_error runtime_error underflow_error
stop_token | stop_callback stop_source stop_token
streambuf | streambuf
string    | erase erase_if getline stod stof stoi stoll stoul stoull string string_literals
          | to_string u8string wstring
string_view | string_view
system_error | errc error_code generic_category make_error_code system_category system_error
thread    | jthread this_thread thread
tuple     | apply forward_as_tuple get ignore make_tuple tie tuple tuple_cat tuple_element_t
          | tuple_size_v
type_traits | bool_constant common_type_t conditional_t decay_t enable_if_t false_type
          | integral_constant invoke_result_t is_arithmetic_v is_base_of_v is_const_v
          | is_convertible_v is_enum_v
          | is_floating_point_v is_integral_v is_invocable_v is_nothrow_move_constructible_v
          | is_same_v is_signed_v is_trivially_copyable_v is_unsigned_v is_void_v make_signed_t
          | make_unsigned_t remove_const_t remove_cvref_t remove_pointer_t remove_reference_t
          | true_type type_identity_t underlying_type_t void_t
unordered_map | unordered_map unordered_multimap
unordered_set | unordered_set
utility   | as_const cmp_equal cmp_greater cmp_less cmp_less_equal declval exchange forward get
          | in_place in_range index_sequence integer_sequence make_index_sequence make_pair move
          | pair piecewise_construct swap tuple_size_v
variant   | get get_if holds_alternative monostate variant variant_size_v visit
vector    | erase erase_if vector
"""

# Header | names of other libraries, and those without std::.
OTHERS = """
fmt/core.h fmt/format.h | fmt::format fmt::format_string fmt::print fmt::runtime
fmt/ranges.h   | fmt::join
nlohmann/json.hpp nlohmann/json_fwd.hpp | nlohmann::json

arpa/inet.h    | inet_ntop inet_pton
cerrno         | EACCES EADDRINUSE EAGAIN EBADF ECHILD ECONNREFUSED ECONNRESET EEXIST EINTR EINVAL
               | EIO ENOENT ENOMEM ENOSPC ENOSYS ENOTSUP EPERM EPIPE ESRCH ETIMEDOUT errno
climits limits.h | CHAR_BIT INT_MAX INT_MIN PATH_MAX
csignal signal.h | SIGABRT SIGCHLD SIGCONT SIGHUP SIGINT SIGKILL SIGPIPE SIGSEGV SIGSTOP SIGTERM
               | SIG_DFL SIG_IGN
cstdint        | INT32_MAX INT64_MAX UINT32_MAX UINT64_MAX int16_t int32_t int64_t int8_t intptr_t
               | uint16_t uint32_t uint64_t uint8_t uintptr_t
cstdio stdio.h | stderr stdin stdout
cstdlib        | EXIT_FAILURE EXIT_SUCCESS
dirent.h       | ::opendir ::readdir
dlfcn.h        | ::dlopen ::dlsym RTLD_LOCAL RTLD_NOW
fcntl.h        | ::fallocate ::fcntl ::open FD_CLOEXEC F_GETFD F_GETFL F_SETFD F_SETFL O_CLOEXEC
               | O_CREAT O_DIRECTORY O_EXCL O_NOFOLLOW O_NONBLOCK O_RDONLY O_RDWR O_TRUNC O_WRONLY
netdb.h        | ::gai_strerror ::getaddrinfo ::getnameinfo
netinet/in.h   | INADDR_ANY INADDR_LOOPBACK htons ntohs
netinet/tcp.h  | TCP_NODELAY
poll.h         | ::poll POLLIN POLLOUT
sched.h        | ::sched_getaffinity ::sched_getcpu ::sched_setaffinity ::unshare CPU_SET CPU_ZERO
csignal signal.h | ::kill ::pthread_sigmask ::raise ::sigaction ::sigaddset ::sigemptyset
               | ::sigismember ::signal ::sigprocmask ::sigtimedwait ::sigwaitinfo siginfo_t
               | sigset_t
spawn.h        | ::posix_spawnp
cstdio stdio.h | ::pclose ::popen
cstdlib stdlib.h | ::mkdtemp ::setenv ::unsetenv
cstring string.h | ::sigabbrev_np ::strsignal
sys/eventfd.h  | ::eventfd ::eventfd_write
sys/file.h     | ::flock
sys/mman.h     | ::madvise ::memfd_create ::mincore ::mmap ::mprotect ::munmap MAP_ANONYMOUS
               | MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE
sys/prctl.h    | ::prctl
sys/resource.h | ::getrlimit ::getrusage ::setrlimit
sys/signalfd.h | ::signalfd
sys/socket.h   | ::accept ::accept4 ::bind ::connect ::getsockname ::getsockopt ::listen ::recv
               | ::recvmsg ::send ::sendmsg ::setsockopt ::socket ::socketpair AF_INET AF_INET6
               | AF_UNIX SOCK_CLOEXEC SOCK_NONBLOCK SOCK_STREAM SOL_SOCKET SOMAXCONN SO_PEERCRED
               | SO_REUSEADDR
sys/stat.h     | ::chmod ::fchmod ::fstat ::lstat ::mkfifo ::umask
sys/types.h unistd.h signal.h sys/wait.h | pid_t
sys/un.h       | sockaddr_un
sys/wait.h     | ::waitid ::waitpid WEXITSTATUS WIFEXITED WIFSIGNALED WNOHANG WTERMSIG
time.h         | ::nanosleep
unistd.h       | ::_exit ::access ::close ::close_range ::dup ::execv ::execve ::fork ::fsync
               | ::ftruncate ::getegid ::geteuid ::getgid ::gethostname ::getpid ::getppid ::gettid
               | ::getuid ::link ::lseek ::pipe ::pread ::read ::setpgid ::setsid ::setuid ::syscall
               | ::sysconf ::unlink ::write STDERR_FILENO STDIN_FILENO STDOUT_FILENO
"""

# Header | those that bring it along: by the standard's synopses, by fmt's manual, or as a type that
# they return.
BROUGHT = """
initializer_list | algorithm array deque functional list map memory optional random regex set span string
                 | string_view tuple unordered_map unordered_set utility vector
iterator         | array deque list map regex set span string string_view unordered_map unordered_set vector
ios              | fstream iostream sstream streambuf
fmt/core.h       | fmt/ranges.h
ratio            | chrono
streambuf        | fstream iostream sstream
exception        | new stdexcept
system_error     | charconv filesystem
cstddef          | span
"""

MODEL = "tests/cuda_model"  # a project of its own, whose headers are found below it, too

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.M)
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|\bR"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', re.S)
NAME = re.compile(r"(?<![\w.>:])(std::ranges::\w+|(?:std|fmt|nlohmann)::\w+|::\w+(?=\()|[A-Za-z]\w*)")


def rows(table):
    """The headers and the names of each row; one without headers continues the row before."""
    headers = ()
    for line in filter(None, table.splitlines()):
        left, _, names = line.partition("|")
        headers = left.split() or headers
        yield headers, names.split()


def headers_of_names():
    found = {}
    for table, prefix in ((STANDARD, "std::"), (OTHERS, "")):
        for headers, names in rows(table):
            for name in names:
                found.setdefault(prefix + name, set()).update(headers)
    return found


def sources(root):
    """This project's own; not those of libraries, nor what a build made."""
    folders = [root / "common", root / "tests", *root.glob("[0-9][0-9]-*")]
    return sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES)


def names_in(path):
    return set(NAME.findall(NOT_CODE.sub('""', path.read_text())))


class Tree:
    """The sources below a folder, and what each includes."""

    def __init__(self, root):
        self.root, self.known = root, {}
        self.brought = {}
        for (header,), by in rows(BROUGHT):
            for each in by:
                self.brought.setdefault(each, set()).add(header)

    def included(self, path):
        """The names of libraries' headers that a file includes, also through this tree's files."""
        if path not in self.known:
            self.known[path] = set()  # for a file that includes itself
            headers = set()
            for bracket, target in INCLUDE.findall(path.read_text()):
                own = [place / target for place in self.places(path) if (place / target).is_file()]
                headers |= self.included(own[0]) if own else {target, *self.brought.get(target, ())}
            self.known[path] = headers
        return self.known[path]

    def places(self, path):
        model = self.root / MODEL
        return (self.root, model, model / "include") if path.is_relative_to(model) else (self.root,)


def missing(root):
    """One line per name whose header a source does not include, and per name in no table."""
    tree, table, faults = Tree(root), headers_of_names(), []
    for path in sources(root):
        short = path.relative_to(root)
        for name in sorted(names_in(path)):
            headers = table.get(name, set())
            if not headers and name.startswith("std::"):
                faults.append(f"{short}: {name} is in no table of tests/tools/test_includes.py")
            elif headers and not headers & tree.included(path):
                faults.append(f"{short}: {name}: #include <{'> or <'.join(sorted(headers))}>")
    return faults


class TestIncludes(unittest.TestCase):
    def test_every_source_includes_what_it_names(self):
        self.assertEqual([], missing(ROOT))


class TestTheTestItself(SmallTree):
    """A small tree, right at first; each case plants one line and must see it reported."""

    FILES = {
        "common/own.h": "#include <vector>\ninline std::vector<int> some;\n",
        "common/own.cpp": '#include "common/own.h"\n#include <fcntl.h>\n'
                          'std::vector<int> more;  // no std::map\nint file = ::open("std::set", O_RDONLY);\n'
                          'const char* text = R"(std::deque)";\n',
        "tests/cuda_model/include/nccl.h": "#include <map>\n",
        "tests/cuda_model/runtime/a.cpp": "#include <nccl.h>\nstd::map<int, int> here;\n",
    }

    def plant(self, line, name="common/own.cpp"):
        self.append(name, line)
        return missing(self.root)

    def test_the_right_tree_is_right(self):
        self.assertEqual([], missing(self.root))

    def test_a_name_whose_header_is_missing(self):
        for line, fault in (("auto n = std::ranges::count(some, 1);", "std::ranges::count: #include <algorithm>"),
                            ("int e = errno;", "errno: #include <cerrno>"),
                            ("uint8_t byte;", "uint8_t: #include <cstdint>"),
                            ("int f = ::fork();", "::fork: #include <unistd.h>"),
                            ("auto t = fmt::join(some, 1);", "fmt::join: #include <fmt/ranges.h>"),
                            ("std::tuple<int> t;", "std::tuple: #include <tuple>")):
            with self.subTest(line):
                self.setUp()
                self.assertEqual([f"common/own.cpp: {fault}"], self.plant(line))

    def test_a_header_that_needs_what_its_user_includes(self):
        self.assertEqual(["common/own.h: O_CLOEXEC: #include <fcntl.h>"],
                         self.plant("inline int flag = O_CLOEXEC;", "common/own.h"))

    def test_a_name_that_is_in_no_table(self):
        self.assertIn("std::frobnicate is in no table", self.plant("std::frobnicate();")[0])

    def test_members_and_other_namespaces_are_no_such_names(self):
        self.assertEqual([], self.plant("auto a = x.errno; auto b = y->SIGTERM; auto c = own::stdout;"))


if __name__ == "__main__":
    unittest.main()
