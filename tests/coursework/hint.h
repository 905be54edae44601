#pragma once
// HINT comes before an assertion, in its scope: it names the mistake that most likely makes the
// assertion fail, and never the solution. The grader shows the last hint before the failure.

#include <utility>

#include "tests/coursework/witness.h"
#include "tests/support/catch.h"

namespace lockstep::testing {

/// While it exists, the grader knows its text: if a program crashes or never ends, Catch2 does not
/// report what it was doing.
class KeptHint {
 public:
  explicit KeptHint(const char* text) : outer_(std::exchange(innermost_, text)) { keep(); }
  ~KeptHint() {
    innermost_ = outer_;
    keep();
  }
  KeptHint(const KeptHint&) = delete;
  KeptHint& operator=(const KeptHint&) = delete;

 private:
  static void keep() { tell_hint(innermost_); }

  inline static const char* innermost_ = "";
  const char* outer_;
};

}  // namespace lockstep::testing

#define LOCKSTEP_JOINED_(a, b) a##b
#define LOCKSTEP_JOINED(a, b) LOCKSTEP_JOINED_(a, b)
#define HINT(text)     \
  INFO("hint: " text); \
  const ::lockstep::testing::KeptHint LOCKSTEP_JOINED(kept_hint_, __LINE__)(text)
