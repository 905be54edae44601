// Writes one JSON line when a test case starts and one when it ends, to the file named by
// LOCKSTEP_TEST_LOG. `lockstep test` reads them: a case that started and never ended crashed.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/listener.h"

namespace lockstep::testing {
namespace {

// The only state of the process that outlives a case; Catch2 runs cases one after another.
std::string& skip_reason() {
  static std::string reason;
  return reason;
}

/// The end of what INFO() said: a program that failed says there why.
std::string end_of(const std::string& message) {
  constexpr size_t kLength = 240;
  const bool whole = message.size() <= kLength;
  return (whole ? "; " : "; ... ") + message.substr(whole ? 0 : message.size() - kLength);
}

class JsonLines : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    name_ = info.name;
    skip_reason().clear();
    first_failure_.clear();
    begin_ = std::chrono::steady_clock::now();
    write(fmt::format(R"({{"event": "start", "case": {}}})", in_json(name_)));
  }

  AssertionAnswer assertionEnded(const Catch::AssertionStats& stats) override {
    const Catch::AssertionResult& result = stats.assertionResult;
    if (!result.isOk() && first_failure_.empty()) {
      const Catch::SourceLineInfo place = result.getSourceInfo();
      first_failure_ = fmt::format(
          "{}:{}: {} {}", std::filesystem::path(place.file).filename().string(), place.line,
          result.hasExpandedExpression() ? result.getExpandedExpression() : result.getExpression(),
          result.hasMessage() ? std::string(result.getMessage()) : "");
      for (const Catch::MessageInfo& info : stats.infoMessages)
        first_failure_ += end_of(info.message);
    }
    return AssertionAnswer(true);
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin_;
    const bool failed = stats.totals.assertions.failed > 0;
    std::string status = failed ? "failed" : skip_reason().empty() ? "passed" : "skipped";
    // A case without assertions proves nothing, whatever its name.
    if (status == "passed" && stats.totals.assertions.total() == 0) status = "failed";
    write(fmt::format(
        R"({{"event": "end", "case": {}, "status": "{}", "reason": {}, "seconds": {:.6f}}})",
        in_json(name_), status, in_json(failed ? first_failure_ : skip_reason()), took.count()));
    (status == "skipped" ? skipped_ : others_) += 1;
  }

  /// A run whose cases were all skipped has not passed: Meson needs a special exit status for it,
  /// which Catch2 does not let a listener give.
  void testRunEnded(const Catch::TestRunStats&) override {
    if (skipped_ > 0 && others_ == 0) std::atexit([] { std::_Exit(kAllSkipped); });
  }

 private:
  static void write(const std::string& line) {
    const char* path = std::getenv("LOCKSTEP_TEST_LOG");
    if (path == nullptr) return;
    if (std::FILE* file = std::fopen(path, "a")) {
      std::fputs((line + "\n").c_str(), file);
      std::fclose(file);
    }
  }

  static constexpr int kAllSkipped = 77;
  int skipped_ = 0, others_ = 0;
  std::string name_, first_failure_;
  std::chrono::steady_clock::time_point begin_;
};

CATCH_REGISTER_LISTENER(JsonLines)

}  // namespace

bool full_campaign() { return std::getenv("LOCKSTEP_FULL") != nullptr; }

void mark_skipped(const std::string& reason) {
  skip_reason() = reason;
  std::fprintf(stderr, "skipped: %s\n", reason.c_str());
}

}  // namespace lockstep::testing
