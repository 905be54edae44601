// Stage 06 with ranks that differ, losses that are not finite, and options without a meaning; and
// the table of what a rank keeps.

#include <fmt/format.h>

#include <array>
#include <map>
#include <regex>

#include "tests/support/catch.h"
#include "tests/support/jobs.h"
#include "tests/support/machine.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

const Words kSharded{stage_binary("06-fully-sharded"),
                     "--model",
                     "seed",
                     "--data",
                     "synthetic:120:10",
                     "--workers",
                     "0"};

TEST_CASE("A loss that is not finite stops all ranks that share anything out in the same step",
          "[faults][sharded]") {
  for (const std::string way : {"none", "optimizer", "gradients", "parameters"}) {
    INFO(way);
    const Jobs jobs;
    const ProcessResult run =
        jobs.run_words(Words{jobs.launcher(), "--nproc-per-node", "2"} + kSharded +
                       Words{"--shard", way, "--lr", "1e12", "--save", jobs / "weights"});
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring("step 1, rank 0 (cpu:0), rank 1 (cpu:1): the loss"));
    CHECK(std::ranges::count(run.err, '\n') == 1);
    CHECK(jobs.names() == Words{});
  }
}

TEST_CASE("Ranks that would share out differently are told so, once", "[faults][sharded]") {
  const Jobs jobs;
  for (const auto& [first, second, text] : std::vector<std::array<std::string, 3>>{
           {"--shard none", "--shard optimizer", "shard: rank 0 has \"none\", rank 1 has"},
           {"--unit layer", "--unit 2", "unit: rank 0 has \"layer\", rank 1 has \"2\""},
           {"--param-dtype none", "--param-dtype bf16",
            "param_dtype: rank 0 has \"none\", rank 1 has \"bf16\""},
           {"--prefetch 0", "--prefetch 2", "prefetch: rank 0 has 0, rank 1 has 2"},
           {"--reshard-after-forward no", "", "reshard_after_forward: rank 0 has \"no\""},
           {"--save $DIR/weights", "", "saves_weights: rank 0 has true, rank 1 has false"},
           {"", "--load $DIR/weights", "loads_weights: rank 0 has false, rank 1 has true"},
           {"--optimizer adam", "--optimizer adamw", "optimizer: rank 0 has \"adam\""}}) {
    INFO(first << " and " << second);
    const std::string script =
        "[ $RANK = 0 ] && exec \"$0\" \"$@\" " + first + "; exec \"$0\" \"$@\" " + second;
    const ProcessResult run = jobs.run_words(
        Words{jobs.launcher(), "--nproc-per-node", "2", "sh", "-c", script} + kSharded);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring(text));
    CHECK(std::ranges::count(run.err, '\n') == 1);
    CHECK(jobs.processes() == Words{});
  }
}

TEST_CASE("Options of sharding that have no meaning are refused in one line", "[faults][sharded]") {
  for (const auto& [options, text] : std::vector<std::pair<Words, std::string>>{
           {{"--shard", "all"},
            "--shard: found 'all', expected none, optimizer, gradients or parameters"},
           {{"--unit", "0"}, "--unit: found '0', expected layer, block, model, or MiB"},
           {{"--reshard-after-forward", "maybe"},
            "--reshard-after-forward: found 'maybe', expected yes or no"},
           {{"--shard", "optimizer", "--prefetch", "2"}, "--prefetch: found --shard optimizer"},
           {{"--prefetch", "-1"}, "--prefetch"},
           {{"--param-dtype", "fp16"}, "--param-dtype: found 'fp16', expected none or bf16"},
           {{"--shard", "gradients", "--param-dtype", "bf16"},
            "--param-dtype: found --shard gradients"},
           {{"--param-dtype", "bf16", "--baseline"}, "bf16: rounds parameters, so"},
           {{"--reduce-dtype", "bf16", "--baseline"}, "bf16: rounds gradients, so"},
           {{"--bucket-mb", "1"}, "--bucket-mb"}}) {
    const ProcessResult run = run_process(kSharded + options, kDeadline);
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring(text));
    CHECK(std::ranges::count(run.err, '\n') == 1);
  }
}

TEST_CASE("The ZeRO paper's table is counted, and so is that of float32",
          "[faults][sharded][sixteen][memory]") {
  const ProcessResult run = run_process({build_dir() + "/06-fully-sharded/zero-table"}, kDeadline);
  INFO(run.out << run.err);
  REQUIRE(run.status == 0);
  CHECK_THAT(run.out, ContainsSubstring("7500246946 parameters, 64 ranks"));
  const std::regex row(R"(\n(\w+) +([\d.]+) \(([\d.]+)\) +([\d.]+) \(([\d.]+)\))");
  std::map<std::string, std::string> paper;  // GB in mixed precision, with one digit
  for (std::sregex_iterator at(run.out.begin(), run.out.end(), row), end; at != end; ++at) {
    const auto number = [&](size_t group) { return std::stod((*at)[group]); };
    CHECK(number(2) == Approx(number(3)).epsilon(1e-3));
    CHECK(number(4) == Approx(number(5)).epsilon(1e-3));
    paper[(*at)[1]] = fmt::format("{:.1f}", number(4));
    if ((*at)[1] == "optimizer") CHECK(number(2) == Approx(60.94).epsilon(1e-3));
    if ((*at)[1] == "gradients") CHECK(number(2) == Approx(31.41).epsilon(1e-3));
  }
  CHECK(paper == std::map<std::string, std::string>{{"none", "120.0"},
                                                    {"optimizer", "31.4"},
                                                    {"gradients", "16.6"},
                                                    {"parameters", "1.9"}});
}

}  // namespace
}  // namespace lockstep
