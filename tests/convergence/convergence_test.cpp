// Networks learn. The floors are below what PyTorch reaches: at lr 0.1 it varies over twelve seeds
// from 0.77 to 0.835 after one epoch and from 0.837 to 0.874 after two.

#include <regex>

#include "tests/support/catch.h"
#include "tests/support/json.h"
#include "tests/support/stage.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

struct Outcome {
  std::vector<double> accuracy;  // per epoch
  std::string out;
};

Outcome train(std::vector<std::string> options, const std::string& stage = "01-single-gpu",
              const std::string& devices = "cpu:0") {
  const TempDir folder;
  options.insert(options.begin(), {stage_binary(stage), "--devices", devices});
  options.insert(options.end(), {"--metrics", folder / "metrics"});
  const ProcessResult run = run_process(options, kDeadline);
  INFO(story(run));
  REQUIRE(run.status == 0);
  return {read_json(folder / "metrics").at("accuracy").get<std::vector<double>>(), run.out};
}

TEST_CASE("The seed network learns Fashion-MNIST", "[convergence][row16]") {
  const Outcome outcome =
      train({"--epochs", "2", "--lr", "0.1", "--no-dropout", "--log-interval", "10"});
  REQUIRE(outcome.accuracy.size() == 2);
  CHECK(outcome.accuracy[0] >= 0.70);
  CHECK(outcome.accuracy[1] >= 0.80);
  // The log as users of PyTorch know it.
  const std::regex line(R"(\nTrain Epoch: 1 \[640/60000 \(1%\)\]\tLoss: [0-9]\.[0-9]{6}\n)");
  CHECK(std::regex_search(outcome.out, line));
}

TEST_CASE("The seed network learns Fashion-MNIST with dropout", "[convergence][row16]") {
  CHECK(train({"--lr", "0.1", "--dropout"}).accuracy.at(0) >= 0.74);
}

TEST_CASE("The BatchNorm variant learns Fashion-MNIST", "[convergence][row16]") {
  CHECK(train({"--model", "seed-bn", "--lr", "0.01"}).accuracy.at(0) >= 0.80);
}

TEST_CASE("The seed network learns the generated images", "[convergence][row16]") {
  CHECK(train({"--data", "synthetic"}).accuracy.at(0) > 0.9);
}

// --- Stage 02: the same network on two devices ---------------------------------------------------

Outcome train_on_two(const std::vector<std::string>& options) {
  return train(options, "02-dataparallel", "cpu:0,cpu:1");
}

TEST_CASE("Two devices learn Fashion-MNIST as one does", "[convergence][dataparallel]") {
  // At this rate rounding changes the accuracy by 0.2 points; at lr 0.1 by more than a point.
  const std::vector<std::string> options{"--lr", "0.01", "--no-dropout"};
  const double one = train(options).accuracy.at(0);
  const double two = train_on_two(options).accuracy.at(0);
  INFO("one device " << one << ", two devices " << two);
  CHECK(std::abs(one - two) <= 0.005);
  CHECK(one > 0.5);
}

TEST_CASE("Two devices learn Fashion-MNIST at a high rate",
          "[convergence][dataparallel][highrate]") {
  CHECK(train_on_two({"--lr", "0.1", "--no-dropout"}).accuracy.at(0) >= 0.70);
}

// --- Stage 03: the network in pieces -------------------------------------------------------------

/// Another program: tensor-split.
const std::vector<std::string> kInsideLayers{"--layers", "auto"};

/// All schedules give the same weights, as tests/equivalence shows: the short campaign takes one.
std::vector<std::vector<std::string>> ways() {
  std::vector<std::vector<std::string>> all{{"--schedule", "1f1b"}, kInsideLayers};
  if (full_campaign()) {
    all.insert(all.end(),
               {{"--schedule", "naive"}, {"--schedule", "gpipe"}, {"--schedule", "interleaved"}});
  }
  return all;
}

/// The accuracy of the seed network after one epoch on two devices.
double train_in_pieces(const std::string& lr, std::vector<std::string> way) {
  const bool inside = way == kInsideLayers;
  way.insert(way.end(), {"--lr", lr, "--no-dropout"});
  return train(way, inside ? "03-model-split/tensor-split" : "03-model-split", "cpu:0,cpu:1")
      .accuracy.at(0);
}

TEST_CASE("A network in pieces learns Fashion-MNIST as a whole one does",
          "[convergence][pipeline][tensorsplit]") {
  const double whole = train({"--lr", "0.01", "--no-dropout"}).accuracy.at(0);
  for (const std::vector<std::string>& way : ways()) {
    const double pieces = train_in_pieces("0.01", way);
    INFO(way[1] << ": one device " << whole << ", two " << pieces);
    CHECK(std::abs(whole - pieces) <= 0.005);
  }
}

TEST_CASE("A network in pieces learns Fashion-MNIST at a high rate",
          "[convergence][pipeline][tensorsplit][highrate]") {
  for (const std::vector<std::string>& way : ways()) {
    INFO(way[1]);
    CHECK(train_in_pieces("0.1", way) >= 0.70);
  }
}

// --- Stage 04: a process per device --------------------------------------------------------------

TEST_CASE("Two ranks learn Fashion-MNIST as one process does", "[convergence][ddp]") {
  const std::vector<std::string> options{"--lr", "0.01", "--no-dropout", "--order", "sampler"};
  const double one = train(options).accuracy.at(0);
  const double two = train(options, "04-ddp", "cpu:0,cpu:1").accuracy.at(0);
  INFO("one process " << one << ", two ranks " << two);
  CHECK(std::abs(one - two) <= 0.005);
  CHECK(one > 0.5);
}

TEST_CASE("Two ranks learn Fashion-MNIST at a high rate", "[convergence][ddp][highrate]") {
  CHECK(train({"--lr", "0.1", "--no-dropout"}, "04-ddp", "cpu:0,cpu:1").accuracy.at(0) >= 0.70);
}

// --- Stage 05: batch normalisation over all ranks ------------------------------------------------

TEST_CASE("Two synchronised ranks learn Fashion-MNIST as one device does",
          "[convergence][syncbn]") {
  const std::vector<std::string> options{"--model", "seed-bn", "--lr",
                                         "0.01",    "--order", "sampler"};
  const double one = train(options).accuracy.at(0);
  const double two = train(options, "05-syncbn-checkpoint", "cpu:0,cpu:1").accuracy.at(0);
  INFO("one device " << one << ", two ranks " << two);
  CHECK(std::abs(one - two) <= 0.005);
  CHECK(one > 0.5);
}

/// One epoch takes minutes, so that the short campaign trains its first 60 steps.
TEST_CASE("Two synchronised ranks learn Fashion-MNIST with ResNet-18", "[convergence][syncbn]") {
  std::vector<std::string> options{"--model", "resnet18", "--width", "8",
                                   "--lr",    "0.05",     "--order", "sampler"};
  if (!full_campaign()) options.insert(options.end(), {"--max-steps", "60"});
  const double accuracy = train(options, "05-syncbn-checkpoint", "cpu:0,cpu:1").accuracy.at(0);
  INFO("accuracy " << accuracy);
  // Rounding errors grow in this network: five runs that differ only in the order of sums reached
  // 86.86, 83.86, 87.66, 83.29 and 81.29 %: stage 01, two ranks, three (Gloo, then TCP), four. The
  // floor is their minimum less 2 points.
  CHECK(accuracy >= (full_campaign() ? 0.7929 : 0.5));
}

// --- Stage 06: what the ranks kept whole is divided ----------------------------------------------

TEST_CASE("Two ranks that share out everything learn Fashion-MNIST as one process does",
          "[convergence][sharded]") {
  const std::vector<std::string> options{"--model", "seed",         "--optimizer", "sgd",    "--lr",
                                         "0.01",    "--no-dropout", "--order",     "sampler"};
  const double one = train(options).accuracy.at(0);
  const double two = train(options, "06-fully-sharded", "cpu:0,cpu:1").accuracy.at(0);
  INFO("one process " << one << ", two ranks " << two);
  CHECK(std::abs(one - two) <= 0.005);
  CHECK(one > 0.5);
}

}  // namespace
}  // namespace lockstep
