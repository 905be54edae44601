// One batch, several ways: what must not change the result of stage 01, and what does.

#include <algorithm>
#include <numeric>

#include "common/core/real.h"
#include "common/core/sixteen_bits.h"
#include "common/data/synthetic.h"
#include "tests/equivalence/outcome.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

/// 50 steps of 12 samples, of which the last has only 6.
const Options kFiftySteps{"--data", "synthetic:594:10", "--batch-size", "12", "--workers", "0"};
/// 12 samples in 5 parts: torch.chunk makes 4 of 3 samples, dealing and cutting 3, 3, 2, 2, 2. More
/// parts than samples leave some out.
const Options kSplits{"chunk:5", "stride:16", "micro:5"},
    kOtherSplits{"chunk:8", "stride:5", "micro:16"};

void check_splits(const Options& options, double tolerance, const Options& short_campaign) {
  const Outcome whole = train(kFiftySteps + options);
  REQUIRE(whole.losses().size() == 50);
  for (const std::string& split : full_campaign() ? kSplits + kOtherSplits : short_campaign) {
    INFO("--emulate " << split);
    const Outcome parts = train_in_parts(kFiftySteps + options, split);
    CHECK(relative_l2(parts.state, whole.state) <= tolerance);
    CHECK(largest(difference(parts.losses(), whole.losses())) <= 100 * tolerance);
    // Another order of the sums: it was really split.
    CHECK((parts.file != whole.file));
  }
}

TEST_CASE("The reference with whole batches is stage 01", "[equivalence]") {
  const Options options =
      kFiftySteps + Options{"--model", "seed-bn", "--dropout", "--momentum", "0.9"};
  const Outcome stage = train(options), reference = train_in_parts(options, "none");
  CHECK((reference.file == stage.file));
  CHECK(reference.losses() == stage.losses());
  CHECK(reference.metrics.at("test_loss") == stage.metrics.at("test_loss"));
}

#ifdef LOCKSTEP_DOUBLE

TEST_CASE("A batch taken in parts gives the step of the whole batch", "[equivalence]") {
  check_splits({"--lr", "0.01"}, kApart, kOtherSplits);
}

TEST_CASE("Parts equal the whole with momentum and dropout at a high rate", "[equivalence]") {
  check_splits({"--lr", "0.1", "--momentum", "0.9", "--dropout"}, kApartAtHighRate, kSplits);
}

#else

TEST_CASE("A batch taken in parts gives the step of the whole batch", "[equivalence]") {
  check_splits({"--lr", "0.01"}, 1e-5, kSplits);
}

TEST_CASE("Dropout masks do not depend on how a batch is split", "[equivalence]") {
  check_splits({"--lr", "0.01", "--dropout"}, 1e-5, {"stride:5"});
}

#endif

// --- BatchNorm: the parts show -------------------------------------------------------------------

TEST_CASE("With BatchNorm every part is normalised by itself, and that shows", "[equivalence]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const Options options = kFiftySteps + Options{"--model", "seed-bn", "--lr", "0.01"};
  const Weights whole = parameters_of(train(options).state);
  for (const std::string split : {"chunk:4", "stride:4", "micro:4"}) {
    INFO("--emulate " << split);
    const Weights parts = parameters_of(train_in_parts(options, split).state);
    CHECK(relative_l2(parts, whole) > 1e-3);
    CHECK(relative_l2(parts, whole) < 1);  // another result, not nonsense
  }
}

/// The state after one step of seed-bn over these samples as one batch, in this order.
Weights one_step(const std::vector<int64_t>& samples, const std::string& parts = "none") {
  const Dataset all = make_synthetic(SyntheticPart::train, 12);
  const auto count = static_cast<uint32_t>(samples.size());
  Bytes images, labels;
  for (const int64_t sample : samples) {
    const auto image = all.images.begin() + sample * all.image_bytes();
    images.insert(images.end(), image, image + all.image_bytes());
    labels.push_back(all.labels[sample]);
  }
  const TempDir folder;
  for (const std::string part : {"train", "t10k"}) {
    write_file(folder / (part + "-images-idx3-ubyte"), idx_bytes(2051, {count, 28, 28}, images));
    write_file(folder / (part + "-labels-idx1-ubyte"), idx_bytes(2049, {count}, labels));
  }
  return train_in_parts({"--data-dir", folder.path(), "--model", "seed-bn", "--order", "file",
                         "--batch-size", std::to_string(count), "--lr", "0.01"},
                        parts)
      .state;
}

/// BatchNorm's own: 0.9 times what was there plus 0.1 times what the batch shows.
constexpr double kKept = 0.9;

/// Running statistics after passes over `parts` one after another. Each part is given by the state
/// of a run that saw nothing else (and so began with mean 0 and variance 1).
std::vector<double> accumulated(const std::vector<Weights>& parts, const std::string& name) {
  const double initial = name.ends_with("var") ? 1 : 0;
  std::vector<double> running(parts.front().at(name).size(), initial);
  for (const Weights& part : parts) {
    const std::vector<double>& alone = part.at(name);
    for (size_t c = 0; c < running.size(); ++c) {
      running[c] = kKept * running[c] + (alone[c] - kKept * initial);
    }
  }
  return running;
}

void check_running(const Weights& found, const std::vector<Weights>& parts) {
  for (const std::string layer : {"bn1", "bn2"}) {
    for (const std::string what : {".running_mean", ".running_var"}) {
      INFO(layer + what);
      const std::vector<double> expected = accumulated(parts, layer + what);
      CHECK(largest(difference(found.at(layer + what), expected)) <= (kDouble ? 1e-12 : 2e-6));
    }
    CHECK(found.at(layer + ".num_batches_tracked") == std::vector<double>{double(parts.size())});
  }
}

TEST_CASE("Running statistics come from part 0, or from every micro-batch", "[equivalence]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  std::vector<int64_t> all(12);
  std::iota(all.begin(), all.end(), 0);
  const Weights first = one_step({0, 1, 2});
  check_running(one_step(all, "chunk:4"), {first});
  check_running(one_step(all, "stride:4"), {one_step({0, 4, 8})});
  check_running(one_step(all, "micro:4"),
                {first, one_step({3, 4, 5}), one_step({6, 7, 8}), one_step({9, 10, 11})});
}

// --- The same run again --------------------------------------------------------------------------

TEST_CASE("The same seed gives the same bytes, whatever the loader threads",
          "[equivalence][row14]") {
  for (const std::string model : {"seed", "seed-bn"}) {
    if (model == "seed" && !full_campaign()) continue;
    INFO(model);
    const Options options{"--data",    "synthetic:600:20", "--model", model,
                          "--dropout", "--momentum",       "0.9",     "--lr",
                          "0.01"};
    const Outcome once = train(options + Options{"--seed", "7"});
    CHECK((train(options + Options{"--seed", "7"}).file == once.file));
    CHECK((train(options + Options{"--seed", "7", "--workers", "0"}).file == once.file));
    const Outcome two = train(options + Options{"--seed", "7", "--workers", "2"});
    CHECK((two.file == once.file));
    CHECK(two.losses() == once.losses());
    CHECK((train(options + Options{"--seed", "8"}).file != once.file));
  }
}

// --- Weights files -------------------------------------------------------------------------------

std::string test_line(const std::string& out) {
  const size_t first = out.find("Test set:");
  return first == out.npos ? "no test line in: " + out
                           : out.substr(first, out.find('\n', first) - first);
}

/// A copy of a weights file with every Real tensor as `To`.
template <class To>
void convert(const std::filesystem::path& from, const std::filesystem::path& to, DType dtype) {
  const SafetensorsFile file = load_safetensors(from);
  std::vector<std::vector<To>> storage;
  std::vector<TensorEntry> entries(file.tensors());
  for (TensorEntry& entry : entries) {
    if (entry.dtype == DType::I64) continue;
    const std::vector<double> values =
        entry.dtype == DType::F64 ? as_doubles<double>(entry) : as_doubles<float>(entry);
    storage.emplace_back(values.begin(), values.end());
    entry.dtype = dtype;
    entry.bytes = std::as_bytes(std::span(storage.back()));
  }
  save_safetensors(to, entries);
}

Options evaluate(const std::filesystem::path& weights) {
  return {"--data", "synthetic:400:200", "--model", "seed-bn", "--epochs", "0", "--load", weights};
}

TEST_CASE("Saved weights load as they were", "[equivalence]") {
  const TempDir folder;
  const Outcome trained = train({"--data", "synthetic:400:200", "--model", "seed-bn"});
  write_file(folder / "weights", trained.file);
  const Outcome loaded = train(evaluate(folder / "weights"));
  CHECK((loaded.file == trained.file));
  CHECK(test_line(loaded.out) == test_line(trained.out));
  CHECK(loaded.metrics.at("test_loss") == trained.metrics.at("test_loss"));
  CHECK(loaded.metrics.at("steps") == 0);
  CHECK_THAT(loaded.out, ContainsSubstring("Loaded 18 tensors from"));
  CHECK_THAT(loaded.out, !ContainsSubstring("converted"));

  // The other precision: every float is a double, but not every double a float.
  if constexpr (kDouble) {
    convert<float>(folder / "weights", folder / "other", DType::F32);
  } else {
    convert<double>(folder / "weights", folder / "other", DType::F64);
  }
  const Outcome converted = train(evaluate(folder / "other"));
  CHECK_THAT(converted.out, ContainsSubstring(kDouble ? "16 of them converted to float64"
                                                      : "16 of them converted to float32"));
  CHECK(relative_l2(converted.state, trained.state) <= (kDouble ? 6e-8 : 0));
  CHECK((converted.file == trained.file) == !kDouble);
}

/// Every number of `weights` as a T is worth.
template <class T>
Weights rounded(Weights weights) {
  for (auto& [name, values] : weights) {
    if (name.ends_with("num_batches_tracked")) continue;
    for (double& value : values) value = double(T(float(value)));
  }
  return weights;
}

TEST_CASE("Weights of 16 bits are loaded, and the line says so", "[equivalence][sixteen]") {
  const TempDir folder;
  const Outcome trained =
      train({"--data", "synthetic:64:64", "--model", "seed-bn", "--max-steps", "1"});
  write_file(folder / "weights", trained.file);
  convert<Bf16>(folder / "weights", folder / "bf16", DType::BF16);
  convert<Fp16>(folder / "weights", folder / "fp16", DType::F16);
  const auto check = [&](const std::string& file, const Weights& expected) {
    const Outcome loaded = train(evaluate(folder / file));
    CHECK_THAT(loaded.out, ContainsSubstring(kDouble ? "16 of them converted to float64"
                                                     : "16 of them converted to float32"));
    CHECK((loaded.state == expected));
    CHECK((loaded.state != trained.state));
  };
  check("bf16", rounded<Bf16>(trained.state));
  check("fp16", rounded<Fp16>(trained.state));
}

TEST_CASE("Weights of another type are refused by name", "[equivalence]") {
  const TempDir folder;
  write_file(folder / "weights",
             train({"--data", "synthetic:64:64", "--model", "seed-bn", "--max-steps", "1"}).file);
  convert<int32_t>(folder / "weights", folder / "other", DType::I32);
  const ProcessResult run = run_stage01(evaluate(folder / "other"), kDeadline);
  CHECK(run.status == 1);
  CHECK_THAT(run.err, ContainsSubstring("has dtype I32, expected F32, F64, BF16 or F16"));
  CHECK_THAT(run.err, ContainsSubstring((folder / "other").string()));
}

// --- How much is trained -------------------------------------------------------------------------

TEST_CASE("--drop-last and --max-steps say how many steps there are", "[equivalence]") {
  LOCKSTEP_PROVED_IN_DOUBLE;
  const auto steps = [](const Options& options) {
    const Outcome outcome = train(Options{"--data", "synthetic:100:10"} + options);
    CHECK(outcome.losses().size() == outcome.metrics.at("steps").get<size_t>());
    // One evaluation per epoch, and one where nothing is trained.
    const size_t epochs = outcome.metrics.at("epochs");
    CHECK(outcome.metrics.at("accuracy").size() == std::max<size_t>(1, epochs));
    return std::pair<int, int>(outcome.metrics.at("steps"), outcome.metrics.at("epochs"));
  };
  using Counts = std::pair<int, int>;
  CHECK(steps({}) == Counts{2, 1});
  CHECK(steps({"--drop-last"}) == Counts{1, 1});
  CHECK(steps({"--epochs", "3"}) == Counts{6, 3});
  CHECK(steps({"--epochs", "3", "--drop-last"}) == Counts{3, 3});
  CHECK(steps({"--epochs", "3", "--max-steps", "3"}) == Counts{3, 2});
  CHECK(steps({"--epochs", "3", "--max-steps", "4"}) == Counts{4, 2});
  CHECK(steps({"--epochs", "0"}) == Counts{0, 0});
}

#ifndef LOCKSTEP_DOUBLE  // which has no other precision

// --- 16 bits -------------------------------------------------------------------------------------

TEST_CASE("In 16 bits stage 01, its graph and the reference end with the same bytes",
          "[equivalence][sixteen]") {
  for (const std::string precision : {"bf16", "fp16"}) {
    const Options options{"--data",      "synthetic:256:64", "--batch-size", "16",        "--lr",
                          "0.01",        "--model",          "seed-bn",      "--workers", "0",
                          "--precision", precision};
    INFO(precision);
    const Outcome plain = train(options);
    CHECK((train(options + Options{"--graph"}).file == plain.file));
    CHECK((train_in_parts(options, "none").file == plain.file));
    CHECK_THAT(plain.out, ContainsSubstring(precision + ", no faster on a CPU"));
    CHECK(plain.metrics.at("config").at("precision") == precision);
    CHECK(plain.metrics.contains("loss_scale") == (precision == "fp16"));
  }
}

TEST_CASE("A scale that grows after every good step overflows, and no step is lost but those",
          "[equivalence][sixteen]") {
  const Options options{
      "--data", "synthetic:256:64", "--batch-size", "8", "--precision", "fp16", "--growth-interval",
      "1"};
  const nlohmann::json metrics = train(options).metrics;
  const auto skipped = metrics.at("loss_scale").at("skipped_steps").get<std::vector<int64_t>>();
  CHECK(!skipped.empty());
  CHECK(metrics.at("steps") == 32);
  double scale = 65536;  // GradScaler's rule, with what was skipped
  for (int64_t step = 0; step < 32; ++step) {
    scale *= std::ranges::find(skipped, step) != skipped.end() ? 0.5 : 2;
  }
  CHECK(metrics.at("loss_scale").at("scale") == scale);
}

#endif

}  // namespace
}  // namespace lockstep
