// Networks learn. The floors are below what PyTorch reaches: at lr 0.1 it varies over twelve seeds
// from 0.77 to 0.835 after one epoch and from 0.837 to 0.874 after two.

#include <regex>

#include "tests/equivalence/outcome.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

/// The accuracy after each epoch.
std::vector<double> accuracies(const Options& options, const std::string& stage = "01-single-gpu",
                               const std::string& devices = "cpu:0") {
  return measure(options, stage, devices).metrics.at("accuracy").get<std::vector<double>>();
}

/// With --full a second epoch.
TEST_CASE("The seed network learns Fashion-MNIST", "[convergence][row16]") {
  const size_t epochs = full_campaign() ? 2 : 1;
  const Outcome run = measure(
      {"--epochs", std::to_string(epochs), "--lr", "0.1", "--no-dropout", "--log-interval", "10"});
  const auto accuracy = run.metrics.at("accuracy").get<std::vector<double>>();
  REQUIRE(accuracy.size() == epochs);
  CHECK(accuracy[0] >= 0.70);
  if (epochs == 2) CHECK(accuracy[1] >= 0.80);
  // The log as users of PyTorch know it.
  const std::regex line(R"(\nTrain Epoch: 1 \[640/60000 \(1%\)\]\tLoss: [0-9]\.[0-9]{6}\n)");
  CHECK(std::regex_search(run.out, line));
}

TEST_CASE("The seed network learns Fashion-MNIST with dropout", "[convergence][row16]") {
  CHECK(accuracies({"--lr", "0.1", "--dropout"}).at(0) >= 0.74);
}

TEST_CASE("The BatchNorm variant learns Fashion-MNIST", "[convergence][row16]") {
  CHECK(accuracies({"--model", "seed-bn", "--lr", "0.01"}).at(0) >= 0.80);
}

TEST_CASE("The seed network learns the generated images", "[convergence][row16]") {
  CHECK(accuracies({"--data", "synthetic"}).at(0) > 0.9);
}

#ifndef LOCKSTEP_DOUBLE  // which has no other precision
/// 300 steps at a low rate, as those of other stages below.
TEST_CASE("In 16 bits the seed network learns Fashion-MNIST as in float32",
          "[convergence][sixteen]") {
  const Options options{"--no-dropout", "--lr", "0.01", "--max-steps", "300", "--precision"};
  const double whole = accuracies(options + Options{"float32"}).at(0);
  for (const std::string precision : {"bf16", "fp16"}) {
    const double found = accuracies(options + Options{precision}).at(0);
    INFO(precision << ": " << found << ", float32: " << whole);
    CHECK(std::abs(found - whole) <= 0.01);
    CHECK(found > 0.5);
  }
}
#endif

// --- Stage 02: the same network on two devices ---------------------------------------------------

/// An epoch at a low rate, of which the short campaign trains the first 300 steps. Rounding changes
/// the accuracy by 0.2 points then; at lr 0.1 by more than a point; a replica's gradient that is
/// left out by 10.
Options at_low_rate(const Options& options) {
  return options + Options{"--lr", "0.01"} +
         (full_campaign() ? Options{} : Options{"--max-steps", "300"});
}

/// Several devices of a stage, with its own options `more`, are as good as one of stage 01.
void check_as_one(const std::string& stage, const Options& options, const Options& more = {},
                  const std::string& devices = "cpu:0,cpu:1") {
  const double one = accuracies(at_low_rate(options)).at(0);
  const double several = accuracies(at_low_rate(options) + more, stage, devices).at(0);
  INFO("one device " << one << ", several devices " << several);
  CHECK(std::abs(one - several) <= 0.005);
  CHECK(one > 0.5);
}

TEST_CASE("Two devices learn Fashion-MNIST as one does", "[convergence][dataparallel]") {
  check_as_one("02-dataparallel", {"--no-dropout"});
}

TEST_CASE("Two devices learn Fashion-MNIST at a high rate",
          "[convergence][dataparallel][highrate]") {
  CHECK(accuracies({"--lr", "0.1", "--no-dropout"}, "02-dataparallel", "cpu:0,cpu:1").at(0) >=
        0.70);
}

// --- Stage 03: the network in pieces -------------------------------------------------------------

/// Another program: tensor-split.
const Options kInsideLayers{"--layers", "auto"};

/// All schedules give the same weights, as tests/equivalence shows: the short campaign takes one.
std::vector<Options> ways() {
  std::vector<Options> all{{"--schedule", "1f1b"}, kInsideLayers};
  if (full_campaign()) {
    all.insert(all.end(),
               {{"--schedule", "naive"}, {"--schedule", "gpipe"}, {"--schedule", "interleaved"}});
  }
  return all;
}

/// The accuracy of the seed network on two devices.
double train_in_pieces(const Options& options, const Options& way) {
  const bool inside = way == kInsideLayers;
  return accuracies(way + options, inside ? "03-model-split/tensor-split" : "03-model-split",
                    "cpu:0,cpu:1")
      .at(0);
}

TEST_CASE("A network in pieces learns Fashion-MNIST as a whole one does",
          "[convergence][pipeline][tensorsplit]") {
  const Options options = at_low_rate({"--no-dropout"});
  const double whole = accuracies(options).at(0);
  for (const Options& way : ways()) {
    const double pieces = train_in_pieces(options, way);
    INFO(way[1] << ": one device " << whole << ", two " << pieces);
    CHECK(std::abs(whole - pieces) <= 0.005);
  }
}

TEST_CASE("A network in pieces learns Fashion-MNIST at a high rate",
          "[convergence][pipeline][tensorsplit][highrate]") {
  for (const Options& way : ways()) {
    INFO(way[1]);
    CHECK(train_in_pieces({"--lr", "0.1", "--no-dropout"}, way) >= 0.70);
  }
}

// --- Stage 04: a process per device --------------------------------------------------------------

TEST_CASE("Two ranks learn Fashion-MNIST as one process does", "[convergence][ddp]") {
  check_as_one("04-ddp", {"--no-dropout", "--order", "sampler"});
}

TEST_CASE("Two ranks learn Fashion-MNIST at a high rate", "[convergence][ddp][highrate]") {
  CHECK(accuracies({"--lr", "0.1", "--no-dropout"}, "04-ddp", "cpu:0,cpu:1").at(0) >= 0.70);
}

// --- Stage 05: batch normalisation over all ranks ------------------------------------------------

TEST_CASE("Two synchronised ranks learn Fashion-MNIST as one device does",
          "[convergence][syncbn]") {
  check_as_one("05-syncbn-checkpoint", {"--model", "seed-bn", "--order", "sampler"});
}

/// One epoch takes minutes, so that the short campaign trains its first 40 steps.
TEST_CASE("Two synchronised ranks learn Fashion-MNIST with ResNet-18", "[convergence][syncbn]") {
  Options options{"--model", "resnet18", "--width", "8", "--lr", "0.05", "--order", "sampler"};
  if (!full_campaign()) options = options + Options{"--max-steps", "40"};
  const double accuracy = accuracies(options, "05-syncbn-checkpoint", "cpu:0,cpu:1").at(0);
  INFO("accuracy " << accuracy);
  // Rounding errors grow in this network: five runs that differ only in the order of sums reached
  // 86.86, 83.86, 87.66, 83.29 and 81.29 %: stage 01, two ranks, three (Gloo, then TCP), four. The
  // floor is their minimum less 2 points.
  CHECK(accuracy >= (full_campaign() ? 0.7929 : 0.5));
}

// --- Stage 06: what the ranks kept whole is divided ----------------------------------------------

TEST_CASE("Two ranks that share out everything learn Fashion-MNIST as one process does",
          "[convergence][sharded]") {
  check_as_one("06-fully-sharded",
               {"--model", "seed", "--optimizer", "sgd", "--no-dropout", "--order", "sampler"});
}

// --- Stage 07: several ways at once --------------------------------------------------------------

TEST_CASE("Four ranks in a mesh learn Fashion-MNIST as one process does", "[convergence][mesh]") {
  check_as_one("07-mesh",
               {"--model", "seed", "--optimizer", "sgd", "--no-dropout", "--order", "sampler"},
               {"--mesh", "data=2,tensor=2"}, cpus(4));
}

}  // namespace
}  // namespace lockstep
