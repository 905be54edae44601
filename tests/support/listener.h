#pragma once
// Shared by listeners of Catch2: version 2 (Debian 12) or 3 (Debian 13) under the same names, and
// texts as JSON.

#if LOCKSTEP_CATCH2 >= 3
#include <catch2/catch_test_case_info.hpp>
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
using ListenerBase = Catch::EventListenerBase;
using AssertionAnswer = void;
#else
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include <catch2/catch.hpp>
using ListenerBase = Catch::TestEventListenerBase;
using AssertionAnswer = bool;  // whether what INFO() said may be dropped
#endif

#include <fmt/format.h>

#include <string>

namespace lockstep::testing {

/// Text as a string of JSON. Bytes that are not UTF-8 stay: a message may contain those of a
/// damaged file, and the reader expects that. Every test links this, so it does without the JSON
/// library.
inline std::string in_json(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result +=
        static_cast<unsigned char>(c) < 0x20 ? fmt::format("\\u{:04x}", int(c)) : std::string(1, c);
  }
  return result + '"';
}

}  // namespace lockstep::testing
