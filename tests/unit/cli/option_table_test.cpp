// What follows from an option's one description besides its place on a command line.

#include "common/cli/option_table.h"

#include <map>

#include "common/cli/option_parser.h"
#include "common/core/error.h"
#include "common/io/json.h"
#include "common/options/described.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Words = std::vector<std::string>;
using testing::message_of;

/// An option of every kind, as a stage describes its own.
struct EveryKind {
  std::string text = "a";
  int number = 1;
  int64_t large = 5000000000;
  double fraction = 0.5;
  bool on = false;
  std::vector<int> numbers{1, 2};
  Words texts{"x"};
  std::string file;

  void add_to(OptionParser& parser) {
    parser.add("--text", text, "nothing is said of who must have the same");
    parser.add("-n,--a-number", number, {"", Role::per_rank}, {0, 9});
    parser.add("--large", large, {"", Role::all_ranks});
    parser.add("--fraction", fraction, {"", Role::rounding});
    parser.add_flag("--on,!--off", on, {"", Role::all_runs, "off", [this] { return !on; }});
    parser.add("--numbers", numbers, {"", Role::per_rank});
    parser.add("--texts", texts, {"", Role::per_rank});
    parser.add_output("--file", file,
                      {"", Role::report, "has_file", [this] { return !file.empty(); }});
  }
};

TEST_CASE("A table has every option under its setting's name, with the value of now", "[options]") {
  EveryKind options;
  options.text = "b", options.on = true, options.file = "f";
  const OptionTable table = table_of(options);
  CHECK(settings_of(table, {Role::all_runs}).dump() == R"({"off":false,"text":"b"})");
  CHECK(settings_of(table, {Role::all_ranks}).dump() == R"({"large":5000000000})");
  CHECK(settings_of(table, {Role::rounding}).dump() == R"({"fraction":0.5})");
  CHECK(settings_of(table, {Role::per_rank}).dump() ==
        R"({"a_number":1,"numbers":"1,2","texts":"x"})");
  CHECK(settings_of(table, {Role::report}).dump() == R"({"has_file":true})");
  CHECK(settings_of(table, {}).dump() == "{}");
}

TEST_CASE("A table is words of a command line, those that say something new", "[options]") {
  EveryKind options;
  const OptionTable defaults = table_of(options);
  CHECK(words_unlike(defaults, table_of(options)).empty());
  options.number = 3, options.fraction = 1e-7, options.on = true;
  const OptionTable table = table_of(options);
  CHECK(words_unlike(defaults, table) == Words{"--a-number", "3", "--fraction", "1e-07", "--on"});
  CHECK(words_unlike(table, defaults) ==
        Words{"--a-number", "1", "--fraction", "0.5", "--on=false"});
}

TEST_CASE("An option that is left out is unknown to the command line, but not to the table",
          "[options]") {
  EveryKind options;
  OptionParser parser("program", "-");
  options.add_to(parser);
  parser.leave_out("--large");
  const char* const words[] = {"program", "--large", "1"};
  CHECK_THAT(message_of<BadInput>([&] { parser.parse(3, words); }),
             Catch::Matchers::ContainsSubstring("--large"));
  CHECK_FALSE(parser.given("--large"));
  CHECK(settings_of(parser.table(), {Role::all_ranks})["large"] == 5000000000);
}

}  // namespace
}  // namespace lockstep
