// The files of a sharded checkpoint: what is in them, and what is refused.

#include "06-fully-sharded/sharded_checkpoint.h"

#include <map>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/core/error.h"
#include "common/io/file.h"
#include "common/training/weights_file.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/process.h"
#include "tests/support/sharded_checkpoint_support.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using testing::TempDir;
using testing::Words;

constexpr int64_t kSteps = 7;

/// Numbers from `first` on.
std::vector<Real> numbers(int64_t first, int64_t count) {
  std::vector<Real> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(Real(first + i));
  return all;
}

/// Saves two parameters of 12 and 3 numbers, with momentum, by two ranks: the first one is cut.
fs::path save_two(const fs::path& directory, int64_t steps = kSteps,
                  const std::map<std::string, double>& of_parameters = {}) {
  fs::create_directories(directory);
  const fs::path path = checkpoint_path(directory, steps);
  TrainingState state;
  state.steps = steps;
  ShardIndex index{
      .states = {kValues, "momentum"},
      .parameters = {{.name = "conv", .shape = {2, 3, 1, 2}}, {.name = "bias", .shape = {3}}},
      .steps = of_parameters};
  const std::vector<ShardPiece> of_0{{kValues, "bias", 0, numbers(100, 3)},
                                     {kValues, "conv", 0, numbers(0, 5)},
                                     {"momentum", "bias", 0, numbers(200, 3)},
                                     {"momentum", "conv", 0, numbers(50, 5)}};
  const std::vector<ShardPiece> of_1{{kValues, "conv", 5, numbers(5, 7)},
                                     {"momentum", "conv", 5, numbers(55, 7)}};
  index.checksums = {save_shard(path, {steps, 0, 2}, of_0), save_shard(path, {steps, 1, 2}, of_1)};
  commit_shards(path, index, state.to_json(), {{.name = "mean", .shape = {1}, .real = {4}}});
  return path;
}

void read_all(const fs::path& path) {
  const ShardedCheckpoint checkpoint(path);
  for (size_t shard = 0; shard < checkpoint.shards(); ++shard) checkpoint.verify(shard);
}

std::string refusal_of_shards(const fs::path& path) {
  try {
    read_all(path);
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("What ranks have written is read from whichever shards have it",
          "[sharded][checkpoint]") {
  const TempDir folder;
  const fs::path path = save_two(folder.path());
  CHECK(folder.names() == Words{"step-000000007.rank-0-of-2.safetensors",
                                "step-000000007.rank-1-of-2.safetensors",
                                "step-000000007.safetensors"});
  const ShardedCheckpoint checkpoint(path);
  CHECK(checkpoint.read(kValues, "conv", {0, 12}) == numbers(0, 12));
  CHECK(checkpoint.read(kValues, "conv", {3, 4}) == numbers(3, 4));
  CHECK(checkpoint.read("momentum", "conv", {4, 8}) == numbers(54, 8));
  CHECK(checkpoint.read("momentum", "bias", {1, 2}) == numbers(201, 2));
  CHECK(checkpoint.running().at(0).real == std::vector<Real>{4});
  CHECK(TrainingState::from_json(checkpoint.training(), "it").steps == kSteps);
}

TEST_CASE("Joined weights have PyTorch's layout", "[sharded][checkpoint]") {
  const TempDir folder;
  std::map<std::string, StateTensor> joined;
  for (const StateTensor& tensor : join_weights(ShardedCheckpoint(save_two(folder.path())))) {
    joined.emplace(tensor.name, tensor);
  }
  CHECK(joined.size() == 3);
  CHECK(joined.at("bias").real == numbers(100, 3));
  // [2,3,1,2] from memory's [2,1,2,3]: element (o, i, 0, w) is number 6 o + 3 w + i.
  CHECK(joined.at("conv").shape == Shape{2, 3, 1, 2});
  CHECK(joined.at("conv").real == std::vector<Real>{0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11});
}

TEST_CASE("The optimizer's joined state has the names and layout of stage 05's checkpoints",
          "[sharded][checkpoint]") {
  const TempDir folder;
  const fs::path path = save_two(folder / "shards", kSteps, {{"bias", 5}, {"conv", 7}});
  const ShardedCheckpoint shards(path);
  const TrainingState state = TrainingState::from_json(shards.training(), "it");
  write_checkpoint(folder / "whole", join_weights(shards), join_optimizer(shards), state);
  const Checkpoint whole = read_checkpoint(checkpoint_path(folder / "whole", kSteps));
  CHECK(whole.training == shards.training());
  CHECK(whole.network.size() == 3);
  std::map<std::string, StateTensor> optimizer;
  for (const StateTensor& tensor : whole.optimizer) optimizer.emplace(tensor.name, tensor);
  CHECK(optimizer.size() == 4);
  CHECK(optimizer.at("momentum.bias").real == numbers(200, 3));
  CHECK(optimizer.at("momentum.conv").shape == Shape{2, 3, 1, 2});
  CHECK(optimizer.at("momentum.conv").real ==
        std::vector<Real>{50, 53, 51, 54, 52, 55, 56, 59, 57, 60, 58, 61});
  CHECK(optimizer.at("step.bias").real == std::vector<Real>{5});
  CHECK(optimizer.at("step.conv").shape.axes() == 0);
}

TEST_CASE("Counts of steps that no training can have are refused", "[sharded][checkpoint]") {
  const TempDir folder;
  const auto refusal = [&](const std::map<std::string, double>& steps) {
    return refusal_of_shards(save_two(folder.path(), kSteps, steps));
  };
  CHECK(refusal({{"bias", 0}, {"conv", 7}}).empty());
  CHECK_THAT(refusal({{"bias", 8}, {"conv", 7}}),
             ContainsSubstring("step-000000007.safetensors: step.bias: 8, expected one from 0 to "
                               "7, the steps of training"));
  CHECK_THAT(refusal({{"other", 7}, {"conv", 7}}), ContainsSubstring("step.bias: no number"));
  CHECK_THAT(refusal({{"conv", 7}}), ContainsSubstring("parameters with a step"));
}

TEST_CASE("Each bit of each file is under a checksum, and no file may be cut off",
          "[sharded][checkpoint][row113]") {
  const TempDir folder;
  const fs::path path = save_two(folder.path());
  REQUIRE(refusal_of_shards(path).empty());
  for (const std::string& name : folder.names()) {
    const std::string whole = testing::read_text(folder / name);
    for (size_t byte = 0; byte < whole.size(); byte += testing::full_campaign() ? 1 : 7) {
      std::string damaged = whole;
      damaged[byte] = char(damaged[byte] ^ (1 << byte % 8));
      testing::write_file(folder / name, damaged);
      if (refusal_of_shards(path).find(name) == std::string::npos) {
        FAIL(name << " with a bit of byte " << byte << " flipped: " << refusal_of_shards(path));
      }
      testing::write_file(folder / name, whole.substr(0, byte));
      if (refusal_of_shards(path).find(name) == std::string::npos) FAIL(name << " cut to " << byte);
    }
    testing::write_file(folder / name, whole);
  }
  CHECK(refusal_of_shards(path).empty());
}

TEST_CASE("Shards that are missing, or of another save, are named", "[sharded][checkpoint]") {
  const TempDir folder;
  const fs::path path = save_two(folder.path()), other = save_two(folder.path(), kSteps + 1);
  const fs::path shard_0 = shard_path(path, 0, 2), shard_1 = shard_path(path, 1, 2);
  const std::string whole = testing::read_text(shard_1);
  fs::remove(shard_1);
  CHECK_THAT(refusal_of_shards(path),
             ContainsSubstring("rank-1-of-2.safetensors: is missing, shard 2 of 2 of") &&
                 ContainsSubstring("bring it back, or take another checkpoint"));
  for (const fs::path& wrong : {shard_0, shard_path(other, 1, 2)}) {
    fs::copy_file(wrong, shard_1, fs::copy_options::overwrite_existing);
    CHECK_THAT(refusal_of_shards(path),
               ContainsSubstring("rank-1-of-2.safetensors: has the checksum") &&
                   ContainsSubstring("were not saved together"));
  }
  testing::write_file(shard_1, whole);
  CHECK(refusal_of_shards(path).empty());
  // A single file is no checkpoint of this kind.
  CHECK_THAT(refusal_of_shards(shard_0),
             ContainsSubstring("is one shard of a checkpoint; give the file"));
}

TEST_CASE("Shards that do not make up the network are refused", "[sharded][checkpoint]") {
  const TempDir folder;
  const fs::path path = checkpoint_path(folder.path(), 1);
  TrainingState state;
  state.steps = 1;
  ShardIndex index{.states = {kValues}, .parameters = {{.name = "w", .shape = {6}}}};
  const auto refusal = [&](int64_t first, int64_t count, const ShardPlace& place) {
    index.checksums = {save_shard(path, {1, 0, 2}, {{kValues, "w", 0, numbers(0, 3)}}),
                       save_shard(path, place, {{kValues, "w", first, numbers(first, count)}})};
    fs::rename(shard_path(path, place.rank, place.world_size), shard_path(path, 1, 2));
    commit_shards(path, index, state.to_json(), {});
    return refusal_of_shards(path);
  };
  CHECK(refusal(3, 3, {1, 1, 2}).empty());
  CHECK_THAT(refusal(4, 2, {1, 1, 2}), ContainsSubstring("value.w: element 3 is in no shard"));
  CHECK_THAT(refusal(2, 4, {1, 1, 2}), ContainsSubstring("value.w: element 2 is in two shards"));
  CHECK_THAT(refusal(3, 3, {1, 2, 3}), ContainsSubstring("the shard of rank 2 of 3"));
  CHECK_THAT(refusal(3, 3, {4, 1, 2}), ContainsSubstring("after 4 steps"));
}

TEST_CASE("What is written is only valid once rank 0 finds it", "[sharded][checkpoint]") {
  const TempDir folder;
  const fs::path path = checkpoint_path(folder.path(), 1);
  const ShardIndex index{
      .checksums = {"00000000"}, .states = {kValues}, .parameters = {{.name = "w", .shape = {1}}}};
  const auto commit = [&] { commit_shards(path, index, TrainingState().to_json(), {}); };
  CHECK_THAT(message_of<BadInput>(commit), ContainsSubstring("on a disk that they share"));
  save_shard(path, {1, 0, 1}, {{kValues, "w", 0, {1}}});  // another one
  CHECK_THAT(message_of<BadInput>(commit), ContainsSubstring("on a disk that they share"));
  CHECK(!fs::exists(path));
}

TEST_CASE("An index that is none is refused", "[sharded][checkpoint]") {
  const ShardIndex index{.checksums = {"a"}, .states = {kValues}, .parameters = {{.name = "w"}}};
  CHECK(ShardIndex::from_json(index.to_json(), "it").checksums == index.checksums);
  // As it was before parameters had steps of their own.
  CHECK(ShardIndex::from_json(R"({"format_version":1,"checksums":["a"],"states":["value"],)"
                              R"("parameters":{"w":[]}})",
                              "it")
            .steps.empty());
  for (const char* text :
       {"", "[]", "{}", R"({"format_version":1})", R"({"format_version":"one"})",
        R"({"format_version":1,"checksums":[1],"states":["value"],"parameters":{"w":[1]}})",
        R"({"format_version":1,"checksums":["a"],"states":["value"],"parameters":{"w":"x"}})",
        R"({"format_version":1,"checksums":[],"states":["value"],"parameters":{"w":[1]}})"}) {
    INFO(text);
    CHECK_THAT(message_of<BadInput>([&] { ShardIndex::from_json(text, "it"); }),
               ContainsSubstring("; take another c"));
  }
  CHECK_THAT(message_of<BadInput>([] { ShardIndex::from_json(R"({"format_version":2})", "it"); }),
             ContainsSubstring("it: sharded format version 2, expected 1"));
}

TEST_CASE("Files that are sound in form and mad in content are refused",
          "[sharded][checkpoint][row113]") {
  const auto is_whole = [](const fs::path& file) {
    return file.filename().string().starts_with("whole");
  };
  int refused = 0, whole = 0;
  for (const auto& sample : fs::directory_iterator(LOCKSTEP_SOURCE "/tests/fuzz/corpus/sharded")) {
    const TempDir folder;
    const std::string refusal =
        testing::check_sharded(testing::read_text(sample.path()), folder.path());
    INFO(sample.path().filename().string() << ": " << refusal);
    // The first two are of the network that resumes, the third is of another.
    CHECK((refusal.empty() || refusal.find("do not fit this network") != refusal.npos) ==
          is_whole(sample.path()));
    CHECK(refusal.find("no such files") == refusal.npos);
    (is_whole(sample.path()) ? whole : refused) += 1;
  }
  CHECK(whole == 4);
  CHECK(refused >= 45);
}

TEST_CASE("A shape that nothing can count, a fraction, a state listed twice: the line names it",
          "[sharded][checkpoint]") {
  const auto refusal = [](const std::string& name) {
    const TempDir folder;
    const std::string sample = LOCKSTEP_SOURCE "/tests/fuzz/corpus/sharded/" + name + ".txt";
    return testing::check_sharded(testing::read_text(sample), folder.path());
  };
  CHECK_THAT(refusal("shape_wraps_to_0"),
             ContainsSubstring("step-000000007.safetensors: its description of shards: x: shape "
                               "[4294967296, 4294967296, 1, 1]") &&
                 ContainsSubstring("less than 2^63"));
  CHECK_THAT(refusal("first_fraction"),
             ContainsSubstring("rank-1-of-2.safetensors: ") &&
                 ContainsSubstring("first conv.weight is 4.5, expected a whole number from 0 on"));
  CHECK_THAT(refusal("state_twice"), ContainsSubstring("the state momentum is listed twice"));
  CHECK_THAT(
      refusal("shape_smaller_by_a_shard"),
      ContainsSubstring("rank-1-of-2.safetensors: value.conv.weight begins with element 4 and "
                        "has 2, expected to end with the 4 of shape [2, 2, 1, 1]"));
}

TEST_CASE("Other programs say what a sharded checkpoint is, and the command to type",
          "[sharded][checkpoint]") {
  const TempDir folder;
  const fs::path path = save_two(folder.path());
  const std::string command = "build/06-fully-sharded/join-weights " + path.string() + " OUT";
  CHECK_THAT(
      message_of<BadInput>([&] { read_checkpoint(path); }),
      ContainsSubstring("the first file of a sharded checkpoint") && ContainsSubstring(command));
  const auto nothing = [](const auto&) {};
  CHECK_THAT(message_of<BadInput>([&] { load_weights(path.string(), nothing); }),
             ContainsSubstring(command));
  CHECK_THAT(message_of<BadInput>([&] { load_weights(shard_path(path, 1, 2).string(), nothing); }),
             ContainsSubstring("one shard of a sharded checkpoint") && ContainsSubstring(command));
}

TEST_CASE("Shards are removed with their checkpoint, and without one they are leftovers",
          "[sharded][checkpoint]") {
  const TempDir folder;
  for (const int64_t steps : {1, 2, 3}) save_two(folder.path(), steps);
  testing::write_file(folder / "step-000000001.mine.safetensors", "not Lockstep's");
  remove_old_checkpoints(folder.path(), 3, 2);
  CHECK(folder.names().size() == 7);
  CHECK(find_checkpoints(folder.path()).size() == 2);
  CHECK(!fs::exists(folder / "step-000000001.rank-1-of-2.safetensors"));
  fs::remove(folder / "step-000000002.safetensors");
  testing::write_file(folder / ".step-000000004.rank-0-of-2.safetensors.12-0.tmp", "half of it");
  remove_leftovers(folder.path());
  CHECK(folder.names() ==
        Words{"step-000000001.mine.safetensors", "step-000000003.rank-0-of-2.safetensors",
              "step-000000003.rank-1-of-2.safetensors", "step-000000003.safetensors"});
}

}  // namespace
}  // namespace lockstep
