// What follows from an option's one description besides its place on a command line.

#include "common/options/option_parser.h"

#include <array>

#include "common/core/error.h"
#include "common/io/json.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Words = std::vector<std::string>;
using testing::message_of;

enum class Shade { light, very_dark };
constexpr auto words_of(Shade) { return std::array{"light", "very-dark"}; }

/// "3s"
struct Seconds {
  int number = 3;
  static Seconds from(const std::string& text) {
    require(text == "4s", "--wait: found '{}', expected 4s", text);
    return {4};
  }
  std::string text() const { return fmt::format("{}s", number); }
};

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
  Shade shade = Shade::light;
  std::vector<Shade> shades{Shade::very_dark, Shade::light};
  bool again = true;
  Seconds wait;

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
    parser.add("--shade", shade, {"of the colour", Role::per_rank});
    parser.add("--shades", shades, {"", Role::per_rank});
    parser.add("--again", again, {"", Role::per_rank});
    parser.add("--wait", wait, {"", Role::per_rank});
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
        R"({"a_number":1,"again":"yes","numbers":"1,2","shade":"light",)"
        R"("shades":"very-dark,light","texts":"x","wait":"3s"})");
  CHECK(settings_of(table, {Role::report}).dump() == R"({"has_file":true})");
  CHECK(settings_of(table, {}).dump() == "{}");
}

TEST_CASE("A table is words of a command line, those that say something new", "[options]") {
  EveryKind options;
  const OptionTable defaults = table_of(options);
  CHECK(words_unlike(defaults, table_of(options)).empty());
  options.number = 3, options.fraction = 1e-7, options.on = true;
  options.shade = Shade::very_dark, options.again = false;
  const OptionTable table = table_of(options);
  CHECK(words_unlike(defaults, table) == Words{"--a-number", "3", "--fraction", "1e-07", "--on",
                                               "--shade", "very-dark", "--again", "no"});
  CHECK(words_unlike(table, defaults) == Words{"--a-number", "1", "--fraction", "0.5", "--on=false",
                                               "--shade", "light", "--again", "yes"});
}

/// What a command line is refused with; empty if it is not.
std::string refusal(OptionParser& parser, Words words) {
  std::vector<const char*> argv{"folder/program"};
  for (const std::string& word : words) argv.push_back(word.c_str());
  return message_of<BadInput>([&] { parser.parse(int(argv.size()), argv.data()); });
}

/// The same with a parser of its own, which reads into `options`.
std::string refusal(EveryKind& options, Words words) {
  OptionParser parser("program", "-");
  options.add_to(parser);
  return refusal(parser, std::move(words));
}

TEST_CASE("A choice is one of its words, which are listed where it is none of them", "[options]") {
  EveryKind options;
  CHECK(refusal(options, {"--shade", "very-dark", "--again", "no", "--wait", "4s", "--shades",
                          "light,light", "very-dark"}) == "nothing was thrown");
  CHECK(options.shade == Shade::very_dark);
  CHECK(options.shades == std::vector{Shade::light, Shade::light, Shade::very_dark});
  CHECK((!options.again && options.wait.number == 4));
  CHECK(refusal(options, {"--shade", "very_dark"}) ==
        "--shade: found 'very_dark', expected light or very-dark");
  CHECK(refusal(options, {"--shades", "light,x"}) ==
        "--shades: found 'x', expected light or very-dark");
  CHECK(refusal(options, {"--again", "maybe"}) == "--again: found 'maybe', expected yes or no");
  CHECK(refusal(options, {"--wait", "5s"}) == "--wait: found '5s', expected 4s");
  CHECK_THAT(refusal(options, {"--shade", ""}),
             Catch::Matchers::ContainsSubstring("an empty text"));
}

TEST_CASE("An option of another program is refused with the command, and stays in the table",
          "[options]") {
  EveryKind options;
  OptionParser parser("program", "-");
  options.add_to(parser);
  parser.is_elsewhere("--large", "../other/program2", "--huge");
  parser.is_elsewhere("--on", "program3", "--on");
  CHECK(refusal(parser, {"--large", "1"}) ==
        "--large: program has no such option; start: other/program2 --huge 1");
  CHECK(refusal(parser, {"--on"}) ==
        "--on: program has no such option; start: folder/program3 --on");
  CHECK(settings_of(parser.table(), {Role::all_ranks}).contains("large"));
}

}  // namespace
}  // namespace lockstep
