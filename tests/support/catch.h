#pragma once
// The one include of every test: Catch2 version 2 (Debian 12) or 3 (Debian 13) under the same
// names, and LOCKSTEP_SKIP, which version 2 lacks. Of version 3 only what the tests use: each of
// its headers is compiled with every test.

#if LOCKSTEP_CATCH2 >= 3
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
namespace Catch::Matchers {
inline auto ContainsSubstring(const std::string& text) { return Contains(text); }
}  // namespace Catch::Matchers
#endif

#include <string>

namespace lockstep::testing {

/// Marks the running test case as skipped. The listener (listener.cpp) reports it with its reason;
/// `lockstep test` fails on a reason that is not in its list of allowed ones.
void mark_skipped(const std::string& reason);

/// True under `lockstep test --full`: random campaigns then run at full length.
bool full_campaign();

}  // namespace lockstep::testing

/// Leaves a test case (from its own body, not from a helper) without passing or failing it.
#define LOCKSTEP_SKIP(reason)                  \
  do {                                         \
    ::lockstep::testing::mark_skipped(reason); \
    return;                                    \
  } while (false)
