// The parts of a verdict: weights files, speeds, and options as a command line.

#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <regex>
#include <set>
#include <tuple>

#include "common/core/error.h"
#include "common/options/options.h"
#include "common/training/verdict_figures.h"
#include "tests/support/catch.h"
#include "tests/support/json.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

/// The one-line BadInput that `call` throws; "" if it throws none.
template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const BadInput& error) {
    CHECK(std::string(error.what()).find('\n') == std::string::npos);
    return error.what();
  }
  return "";
}

// --- Weights files -------------------------------------------------------------------------------

struct Named {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

/// A weights file in `folder`.
std::string save(const TempDir& folder, const std::string& file, const std::vector<Named>& all) {
  std::vector<TensorEntry> entries;
  for (const Named& tensor : all) {
    entries.push_back({.name = tensor.name,
                       .dtype = DType::F32,
                       .shape = tensor.shape,
                       .bytes = std::as_bytes(std::span(tensor.values))});
  }
  save_safetensors(folder / file, entries);
  return folder / file;
}

TEST_CASE("Weights are compared as one vector, without running statistics", "[verdict]") {
  const TempDir folder;
  const std::string reference =
      save(folder, "reference",
           {{"a.weight", {2}, {3, 0}}, {"b", {1}, {4}}, {"n.running_var", {1}, {9}}});
  const std::string near = save(
      folder, "near", {{"a.weight", {2}, {3, 0.5}}, {"b", {1}, {4}}, {"n.running_var", {1}, {1}}});
  CHECK(weights_distance(near, reference) == Approx(0.1));
  CHECK(weights_distance(reference, reference) == 0);

  const std::string initial = save(
      folder, "initial", {{"a.weight", {2}, {3, 0}}, {"b", {1}, {2}}, {"n.running_var", {1}, {1}}});
  CHECK(change_distance(near, reference, initial) == Approx(0.25));
  CHECK(std::isnan(change_distance(reference, reference, reference)));  // nothing was learnt
}

TEST_CASE("A weight that is not finite never agrees", "[verdict]") {
  const TempDir folder;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::string good = save(folder, "good", {{"a", {2}, {1, 2}}});
  const std::string start = save(folder, "start", {{"a", {2}, {0, 0}}});
  const std::string bad = save(folder, "bad", {{"a", {2}, {1, nan}}});
  const auto agrees = [](double distance) { return distance <= 1e30; };
  CHECK(agrees(change_distance(good, good, start)));
  CHECK_FALSE(agrees(weights_distance(bad, good)));
  CHECK_FALSE(agrees(weights_distance(good, bad)));
  CHECK_FALSE(agrees(weights_distance(bad, bad)));
  CHECK_FALSE(agrees(change_distance(bad, good, start)));
  CHECK_FALSE(agrees(change_distance(good, good, bad)));
  CHECK_FALSE(agrees(weights_distance(start, start)));  // 0 / 0
}

TEST_CASE("Files with other parameters are refused by name", "[verdict]") {
  const TempDir folder;
  const std::string one = save(folder, "one", {{"a", {2}, {1, 2}}});
  const std::string two = save(folder, "two", {{"a", {2}, {1, 2}}, {"b", {1}, {1}}});
  const std::string turned = save(folder, "turned", {{"a", {1, 2}, {1, 2}}});
  const auto error = [](const std::string& path, const std::string& reference) {
    return error_of([&] { weights_distance(path, reference); });
  };
  CHECK_THAT(error(one, two), ContainsSubstring(one + ": tensor b is missing"));
  CHECK_THAT(error(two, one), ContainsSubstring(two + ": tensor b is not in " + one));
  CHECK_THAT(error(turned, one), ContainsSubstring("tensor a has shape [1, 2], expected [2]"));
  CHECK_THAT(error_of([&] { change_distance(one, one, two); }), ContainsSubstring(two));
  CHECK_THAT(error(folder / "none", one), ContainsSubstring("No such file"));

  const std::vector<int32_t> integers{1, 2};
  const TensorEntry entry{"a", DType::I32, {2}, std::as_bytes(std::span(integers))};
  save_safetensors(folder / "integers", std::span(&entry, 1));
  CHECK_THAT(error(folder / "integers", one), ContainsSubstring("dtype I32, expected F32 or F64"));
}

// --- Speeds --------------------------------------------------------------------------------------

nlohmann::json metrics_of(const std::vector<double>& step_seconds, double batch_size) {
  const double steps = double(step_seconds.size());
  return {{"step_seconds", step_seconds},
          {"steps", step_seconds.size()},
          {"epochs", 1},
          {"epoch_seconds", {2.0}},
          {"batch_size", batch_size},
          {"samples_per_second", steps * batch_size / 2}};
}

TEST_CASE("A warm step is the median without the first tenth", "[verdict]") {
  const auto step = [](const std::vector<double>& seconds) {
    return warm_speed(metrics_of(seconds, 10), "run").step_seconds;
  };
  CHECK(step({9, 2}) == 2);
  CHECK(step({9, 3, 1, 2}) == 2);
  CHECK(step({9, 1, 2, 3, 4}) == 2.5);
  CHECK(step({0, 1, 1, 1, 1, 5, 5, 5, 5, 5}) == 5);     // one of ten is left out
  CHECK(step({0, 0, 1, 1, 1, 1, 5, 5, 5, 5, 5}) == 5);  // two of eleven
  CHECK(warm_speed(metrics_of({9, 0.5}, 10), "run").samples_per_second == 20);

  // Ten epochs of one step each: the set is smaller than the batch.
  nlohmann::json small = metrics_of(std::vector<double>(10, 0.5), 64);
  small.update({{"epochs", 10},
                {"epoch_seconds", std::vector<double>(10, 0.5)},
                {"samples_per_second", 80.0}});
  CHECK(warm_speed(small, "run").samples_per_second == Approx(80));
}

TEST_CASE("Metrics that give no speed are refused", "[verdict]") {
  const auto error = [](const nlohmann::json& metrics) {
    return error_of([&] { warm_speed(metrics, "metrics of a run"); });
  };
  CHECK_THAT(error(metrics_of({1}, 10)), ContainsSubstring("1 entries, expected at least 2"));
  CHECK_THAT(error(metrics_of({1, 0}, 10)), ContainsSubstring("expected positive"));
  CHECK_THAT(error(metrics_of({1, 1}, 0)), ContainsSubstring("expected positive"));
  CHECK_THAT(error(metrics_of({1, std::nan("")}, 10)), ContainsSubstring("expected positive"));
  CHECK_THAT(error({{"step_seconds", "many"}}), ContainsSubstring("metrics of a run: "));
  CHECK_THAT(error(nullptr), ContainsSubstring("metrics of a run: "));
}

TEST_CASE("Efficiency is the speed-up per device", "[verdict]") {
  const SpeedUp gain = speed_up({.step_seconds = 0.5}, {.step_seconds = 1.5}, 4);
  CHECK(gain.factor == 3);
  CHECK(gain.efficiency == 0.75);
}

// --- Options as a command line -------------------------------------------------------------------

CommandLine parse(const StageInfo& stage, const Words& words, const AddOptions& add_others = {}) {
  Options options;
  const auto describe = [&](OptionParser& parser) {
    options.add_to(parser);
    if (add_others) add_others(parser);
  };
  std::vector<const char*> argv{"program"};
  for (const std::string& word : words) argv.push_back(word.c_str());
  return *parse_command_line(stage, options, describe, int(argv.size()), argv.data());
}

nlohmann::json all_of(const Options& options) {
  nlohmann::json values = options.to_json();
  values.update({{"metrics", options.metrics}, {"trace", options.trace}});
  return values;
}

/// Sets of options that go together; between them they change every option.
std::vector<Options> changed_options(const TempDir& folder) {
  Options a;
  a.data = "synthetic:20:10", a.data_dir = "-a folder's \"name\"", a.model = ModelKind::resnet18;
  a.width = 9, a.init = Initializer::normal, a.epochs = 3, a.max_steps = 7, a.batch_size = 65;
  a.lr = 0.1 + 0.2, a.scale_lr = 1e-7, a.warmup_epochs = 1.0 / 3, a.lr_step = 2;
  a.lr_gamma = 0.7, a.momentum = 0.9, a.weight_decay = 5e-4, a.seed = 4294967295;
  a.order = OrderKind::sampler, a.emulate = BatchSplit::from("micro:3"), a.devices = "cpu:1,cpu:0";
  a.threads_per_device = 2, a.tf32 = a.nchw = true, a.bind = true, a.workers = 3;
  a.prefetch_factor = 5, a.loader_timeout = 2.5, a.drop_last = true, a.log_interval = 9,
  a.load = "--here";
  a.metrics = folder / "m n", a.trace = folder / "t", a.save = folder / "s";
  Options b;
  b.dropout = b.graph = b.no_bind = true, b.workers = 0, b.data = "synthetic";
  b.optimizer = OptimizerKind::adamw, b.betas = {1.0 / 3, 0.98}, b.eps = 1e-7;
  return {Options(), a, b};
}

TEST_CASE("Options survive as a command line, every one of them", "[verdict]") {
  const TempDir folder;
  const StageInfo stage{.name = "01-test", .summary = "-", .in_parts = true};
  const StageInfo other{.name = "06-test",
                        .summary = "-",
                        .in_parts = true,
                        .order = OrderKind::sampler,
                        .model = ModelKind::seed_bn,
                        .optimizer = OptimizerKind::adamw};
  const nlohmann::json defaults = all_of(Options());
  std::set<std::string> changed, shown;
  for (const Options& options : changed_options(folder)) {
    INFO(fmt::format("{}", fmt::join(options.arguments(), " ")));
    CHECK(parse(stage, options.arguments()).options == options);
    CHECK(parse(other, options.arguments()).options == options);  // not its own defaults
    const nlohmann::json values = all_of(options);
    for (const auto& [key, value] : values.items()) {
      const std::string name = "--" + std::regex_replace(key, std::regex("_"), "-");
      if (value != defaults.at(key)) changed.insert(name);
    }
  }
  const std::string help = run_help(stage_binary("01-single-gpu/reference")).out;
  const std::regex option(R"(\n (?:-\w, ?)?(--[a-z0-9-]+))");
  for (std::sregex_iterator it(help.begin(), help.end(), option), end; it != end; ++it) {
    if ((*it)[1] != "--help") shown.insert((*it)[1]);
  }
  CHECK(changed == shown);
}

TEST_CASE("A learning rate that is not given is the optimizer's, and --momentum chooses SGD",
          "[verdict]") {
  const StageInfo plain{.name = "01-test", .summary = "-"};
  const StageInfo adam{.name = "06-test", .summary = "-", .optimizer = OptimizerKind::adamw};
  using Words = std::vector<std::string>;
  for (const auto& [stage, words, optimizer, lr] :
       std::vector<std::tuple<StageInfo, Words, std::string, double>>{
           {plain, {}, "sgd", 0.1},
           {plain, {"--optimizer", "adam"}, "adam", 0.001},
           {plain, {"--optimizer", "adamw", "--lr", "0.1"}, "adamw", 0.1},
           {adam, {}, "adamw", 0.001},
           {adam, {"--optimizer", "sgd"}, "sgd", 0.1},
           {adam, {"--momentum", "0.9"}, "sgd", 0.1},
           {adam, {"--lr", "0.5"}, "adamw", 0.5}}) {
    const Options options = parse(stage, words).options;
    INFO(fmt::format("{} {}", stage.name, fmt::join(words, " ")));
    CHECK(name_of(options.optimizer) == optimizer);
    CHECK(options.lr == lr);
  }
}

TEST_CASE("A stage's own options are kept as they were typed, numbers without zeros before them",
          "[verdict]") {
  std::string text, unused = "x";
  int number = 0;
  bool on = false, off = true;
  std::vector<int> list;
  const auto add = [&](OptionParser& parser) {
    parser.add("--text", text, "");
    parser.add("--unused", unused, "");
    parser.add("-n,--number", number, "");
    parser.add_flag("--on", on, "");
    parser.add_flag("--off,!--no-off", off, "");
    parser.add("--list", list, "");
  };
  const StageInfo stage{.name = "02-test", .summary = "-", .baseline = "01-test"};
  const CommandLine typed = parse(stage,
                                  {"--text", "a b=c", "--lr", "0.5", "-n", "007", "--on",
                                   "--no-off", "--list", "1,2", "--baseline", "--order", "file"},
                                  add);
  CHECK(typed.baseline);
  CHECK(typed.stage_arguments ==
        Words{"--text", "a b=c", "--number", "7", "--on=true", "--off=false", "--list", "1", "2"});
  text = "", number = 0, on = false, off = true, list = {};
  const CommandLine again = parse(stage, typed.options.arguments() + typed.stage_arguments, add);
  CHECK(again.options == typed.options);
  CHECK_FALSE(again.baseline);
  CHECK((text == "a b=c" && number == 7 && on && !off && list == std::vector<int>{1, 2}));
}

TEST_CASE("Only the reference emulates, only the others have a baseline", "[verdict]") {
  const StageInfo reference{.name = "test", .summary = "-", .in_parts = true};
  const StageInfo first{.name = "01-test", .summary = "-"};
  const StageInfo second{.name = "02-test", .summary = "-", .baseline = "01-test"};
  const std::vector<std::string> emulate{"--emulate", "chunk:2"};
  const std::vector<std::string> no_epochs{"--baseline", "--epochs", "0"};
  CHECK(parse(reference, emulate).options.emulate.text() == "chunk:2");
  CHECK(error_of([&] { parse(first, emulate); }) ==
        "--emulate: 01-test has no such option; start: reference --emulate chunk:2");
  CHECK_THAT(error_of([&] { parse(first, {"--baseline"}); }), ContainsSubstring("--baseline"));
  CHECK(error_of([&] { parse(second, emulate); }) ==
        "--emulate: 02-test has no such option; start: ../01-test/reference --emulate chunk:2");
  CHECK(error_of([&] { parse(second, {"--graph"}); }) ==
        "--graph: 02-test has no such option; start: ../01-test/01-test --graph");
  CHECK_THAT(error_of([&] { parse(second, no_epochs); }), ContainsSubstring("--epochs 0"));
}

}  // namespace
}  // namespace lockstep
