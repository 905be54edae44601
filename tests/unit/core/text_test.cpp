// Text from outside is UTF-8 or not, and text for people holds no order to a terminal.

#include <string>
#include <utility>

#include "common/core/text.h"
#include "tests/support/catch.h"

namespace lockstep {
namespace {

TEST_CASE("What a terminal would obey is shown as numbers, all other text as it is", "[core]") {
  const std::pair<std::string, std::string> cases[] = {
      {"", ""},
      {"a\tb\nc \xC3\xA9 \xE6\xBC\xA2 \xF0\x9F\x98\x80",
       "a\tb\nc \xC3\xA9 \xE6\xBC\xA2 \xF0\x9F\x98\x80"},
      {"\x1b[2J\x1b]0;title\a", "\\x1b[2J\\x1b]0;title\\x07"},
      {"a\rb\x7f", "a\\x0db\\x7f"},
      {std::string("a\0b", 3), "a\\x00b"},
      {"\xC2\x9B\x32J \xC2\xA0", "\\xc2\\x9b2J \xC2\xA0"},  // CSI as one character
      {"\x9B\x32J", "\\x9b2J"},                             // and as one byte
      {"\xE2\x80\xAE"
       "abc\xE2\x81\xA6",
       "\\xe2\\x80\\xaeabc\\xe2\\x81\\xa6"},  // right to left
      {"a\xE2\x80\xA8"
       "b \xE2\x80\xA6",
       "a\\xe2\\x80\\xa8b \xE2\x80\xA6"},  // a line's end
      {"half \xE2\x80", "half \\xe2\\x80"}};
  for (const auto& [text, shown] : cases) {
    CHECK(printable(text) == shown);
    CHECK(printable(shown) == shown);
  }
  CHECK(on_one_line("a\nb\x1b") == "a b\\x1b");
}

TEST_CASE("UTF-8 is checked as RFC 3629 defines it", "[core]") {
  for (const char* text : {"", "a", "\u00E9", "\u0800", "\uD7FF", "\uE000", "\uFFFF", "\U00010000",
                           "\U0010FFFF", "\x7F"}) {
    CHECK(is_valid_utf8(text));
  }
  for (const char* text :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xC3", "\xC3\x28", "\xE0\x9F\xBF", "\xED\xA0\x80",
        "\xE2\x82", "\xE2\x28\xA1", "\xE2\x82\x28", "\xF0\x90\x80\x28", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF0\x90\x80", "\xF5\x80\x80\x80", "\xFF"}) {
    INFO(text);
    CHECK(find_invalid_utf8("ok \u00E9" + std::string(text)) == 5);
  }
  const std::string_view euro = "\u20AC";
  CHECK(find_invalid_utf8(euro.substr(0, 2)) == 0);  // the view ends, the memory goes on
}

}  // namespace
}  // namespace lockstep
