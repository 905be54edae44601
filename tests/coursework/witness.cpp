// The words of a graded program: lines "NONCE NUMBER JSON" on the socket that LOCKSTEP_WITNESS
// names.
//
// A student's code runs in the same process, and might write what a test would have written. So the
// grader gives each run a nonce, which it sends through the socket. It is read before any
// constructor of the program runs, and then lies in memory that is closed except while a line is
// sent. The lines are numbered. A line without the nonce, or one that is missing, is no pass
// (tools/coursework/witness.py).

#include "tests/coursework/witness.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>

#include "tests/support/listener.h"

namespace lockstep::testing {
namespace {

constexpr int kNoMoreCode = 65;  // PR_SET_MDWE, of Linux 6.3 and newer
constexpr size_t kPage = 65536;  // of every processor: a multiple of its pages

struct Secret {
  int socket;
  uint64_t seed;
  size_t length;  // of the nonce
  std::array<char, 64> nonce;
};
Secret* secret = nullptr;

/// The number at `text`. Moves `text` behind it.
uint64_t read_number(char*& text) {
  uint64_t number = 0;
  for (; *text >= '0' && *text <= '9'; ++text) number = number * 10 + uint64_t(*text - '0');
  return number;
}

/// A byte from the socket; a newline at its end.
char read_byte(int socket) {
  char byte = '\n';
  return syscall(SYS_read, socket, &byte, 1) == 1 ? byte : '\n';
}

/// Reads "NONCE SEED\n". Calls the system directly: nothing of the program is initialised yet.
void read_secret(int socket) {
  const long memory =
      syscall(SYS_mmap, nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == -1) return;
  secret = reinterpret_cast<Secret*>(memory);  // NOLINT(performance-no-int-to-ptr): a system call's
  secret->socket = socket;
  for (char byte = read_byte(socket); byte != ' ' && byte != '\n'; byte = read_byte(socket)) {
    if (secret->length < secret->nonce.size()) secret->nonce[secret->length++] = byte;
  }
  for (char byte = read_byte(socket); byte != '\n'; byte = read_byte(socket)) {
    secret->seed = secret->seed * 10 + uint64_t(byte - '0');
  }
  syscall(SYS_mprotect, secret, kPage, PROT_NONE);
  syscall(SYS_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);  // /proc/self/mem would read it all the same
  syscall(SYS_prctl, kNoMoreCode, 1, 0, 0, 0);      // what is data, such as a solution, stays data
}

void begin(int, char**, char** environment) {
  const char* const name = "LOCKSTEP_WITNESS=";
  for (; *environment != nullptr; ++environment) {
    size_t same = 0;
    while (name[same] != '\0' && (*environment)[same] == name[same]) ++same;
    if (name[same] != '\0') continue;
    char* text = *environment + same;
    read_secret(static_cast<int>(read_number(text)));
    for (char* digit = *environment + same; digit != text; ++digit) *digit = '0';
  }
}

// Runs before all constructors, those of libraries included.
__attribute__((section(".preinit_array"), used)) void (*at_first)(int, char**, char**) = begin;

void send_line(const std::string& json) {
  if (secret == nullptr) return;
  static std::mutex one_at_a_time;
  static uint64_t sent = 0;
  const std::lock_guard lock(one_at_a_time);
  std::string rest = fmt::format(" {} {}\n", sent++, json);
  mprotect(secret, kPage, PROT_READ);  // for as short as can be
  std::array<iovec, 2> parts{{{secret->nonce.data(), secret->length}, {rest.data(), rest.size()}}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  while (parts[1].iov_len > 0) {
    const ssize_t sent = sendmsg(secret->socket, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) break;  // nobody listens any more: the grader sees that the end is missing
    auto left = static_cast<size_t>(sent);
    for (iovec& part : parts) {
      const size_t taken = std::min(left, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + taken;
      part.iov_len -= taken;
      left -= taken;
    }
  }
  mprotect(secret, kPage, PROT_NONE);
}

/// As much of a text as the grader shows, and a bit more.
std::string cut(const std::string& text) { return text.substr(0, 20'000); }

std::string how_it_failed(Catch::ResultWas::OfType type) {
  switch (type) {
    case Catch::ResultWas::FatalErrorCondition:
      return "crash";
    case Catch::ResultWas::ThrewException:
      return "exception";
    default:
      return "assertion";
  }
}

/// The last hint in scope.
template <class Messages>
std::string hint_of(const Messages& messages) {
  const std::string begin = "hint: ";
  std::string hint;
  for (const auto& message : messages) {
    if (message.message.rfind(begin, 0) == 0) hint = message.message.substr(begin.size());
  }
  return hint;
}

class Witness : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    send_line(fmt::format(R"({{"event": "case", "name": {}}})", in_json(info.name)));
  }

  AssertionAnswer assertionEnded(const Catch::AssertionStats& stats) override {
    const Catch::AssertionResult& result = stats.assertionResult;
    const Catch::SourceLineInfo place = result.getSourceInfo();
    std::string told = fmt::format(R"({{"event": "assertion", "ok": {}, "file": {}, "line": {})",
                                   result.isOk(), in_json(place.file), place.line);
    if (!result.isOk()) {
      told += fmt::format(
          R"(, "how": "{}", "asserted": {}, "found": {}, "text": {}, "hint": {})",
          how_it_failed(result.getResultType()), in_json(cut(std::string(result.getExpression()))),
          in_json(result.hasExpandedExpression() ? cut(result.getExpandedExpression()) : ""),
          in_json(result.hasMessage() ? cut(std::string(result.getMessage())) : ""),
          in_json(cut(hint_of(stats.infoMessages))));
    }
    send_line(told + "}");
    return AssertionAnswer(true);
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    send_line(fmt::format(R"({{"event": "case ended", "passed": {}, "failed": {}}})",
                          stats.totals.assertions.passed, stats.totals.assertions.failed));
  }

  void testRunEnded(const Catch::TestRunStats& stats) override {
    send_line(fmt::format(R"({{"event": "run ended", "passed": {}, "failed": {}}})",
                          stats.totals.assertions.passed, stats.totals.assertions.failed));
  }
};

CATCH_REGISTER_LISTENER(Witness)

}  // namespace

void tell_hint(const char* text) {
  if (secret != nullptr)
    send_line(fmt::format(R"({{"event": "hint", "text": {}}})", in_json(text)));
}

void tell_value(const std::string& label, const std::string& value) {
  send_line(fmt::format(R"({{"event": "value", "label": {}, "value": {}}})", in_json(label),
                        in_json(cut(value))));
}

uint64_t hidden_seed() {
  if (secret == nullptr) return 1;
  mprotect(secret, kPage, PROT_READ);
  const uint64_t seed = secret->seed;
  mprotect(secret, kPage, PROT_NONE);
  return seed;
}

}  // namespace lockstep::testing
