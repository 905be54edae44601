// Ranks that save and resume what they share out.

#include "06-fully-sharded/sharded_checkpointer.h"

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/process.h"
#include "tests/unit/06/sharded_runs.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using namespace testing::sharded;
using Catch::Matchers::ContainsSubstring;
using testing::Samples;
using testing::small_network;
using testing::TempDir;
using Errors = std::vector<std::string>;

constexpr int64_t kSavedSteps = 2;

TrainingState after(int64_t steps) {
  TrainingState state;
  state.steps = steps;
  return state;
}

Setting setting_of(ShardKind kind, const OptimizerRule& rule, const std::string& unit = "layer") {
  return {{.kind = kind, .unit = UnitSize::from(unit)}, rule, small_network(ModelKind::seed_bn)};
}

/// Saves to `directory`, or resumes from `path`, whatever number of ranks has saved it.
ShardedCheckpointer checkpointer_of(ShardedMember& member, const fs::path& directory,
                                    const fs::path& path = {}) {
  const auto nothing = [](const std::string&) {};
  const SavingOptions options{.directory = directory,
                              .resume = path,
                              .allow_world_size = true,
                              .say = nothing,
                              .warn = nothing};
  return ShardedCheckpointer(member.network, member.optimizer, options, member.comm,
                             member.exchange);
}

void save(ShardedMember& member, const fs::path& directory, int64_t steps = kSavedSteps) {
  ShardedCheckpointer checkpointer = checkpointer_of(member, directory);
  checkpointer.save(after(steps));
  checkpointer.finish();
}

void resume(ShardedMember& member, const fs::path& path) {
  checkpointer_of(member, "", path).resume({});
}

/// Two steps of two ranks, saved. Returns the weights.
Values train_and_save(const Setting& setting, const fs::path& directory, int ranks = 2) {
  Values trained;
  const Errors errors = on_ranks(ranks, setting, [&](ShardedMember& member) {
    for (uint32_t step = 0; step < kSavedSteps; ++step) member.step(Samples(6, step + 1));
    const Values weights = member.weights();
    if (member.comm.rank() == 0) trained = weights;
    save(member, directory);
  });
  CHECK(errors == Errors(size_t(ranks)));
  return trained;
}

/// Everything that a checkpoint has, whoever wrote it: all parameters, states and statistics.
std::map<std::string, Values> contents_of(const fs::path& path) {
  const ShardedCheckpoint checkpoint(path);
  std::map<std::string, Values> contents;
  for (const std::string& state : checkpoint.index().states) {
    for (const StateTensor& parameter : checkpoint.index().parameters) {
      contents[state + "." + parameter.name] =
          checkpoint.read(state, parameter.name, {0, parameter.shape.elements()});
    }
  }
  for (const StateTensor& tensor : checkpoint.running()) {
    contents[tensor.name] = tensor.real;
    for (const int64_t count : tensor.integer) contents[tensor.name].push_back(Real(count));
  }
  return contents;
}

TEST_CASE("A checkpoint goes from any ranks, kind and units to any other, bit by bit",
          "[sharded][checkpoint]") {
  struct Way {
    ShardKind from, to;
    std::string unit;
    int ranks;
  };
  const std::vector<Way> ways{{ShardKind::parameters, ShardKind::optimizer, "model", 3},
                              {ShardKind::optimizer, ShardKind::none, "0.01", 1},
                              {ShardKind::none, ShardKind::parameters, "block", 4},
                              {ShardKind::gradients, ShardKind::parameters, "layer", 2}};
  for (const OptimizerRule& rule : {kMomentum, kAdam}) {
    for (const Way& way : ways) {
      if (rule.kind == kAdam.kind && way.ranks < 4 && !testing::full_campaign()) continue;
      INFO("kinds " << int(way.from) << " and " << int(way.to) << ", unit " << way.unit);
      const TempDir folder;
      const Values trained = train_and_save(setting_of(way.from, rule), folder / "first");
      const fs::path path = checkpoint_path(folder / "first", kSavedSteps);
      std::vector<Values> weights(size_t(way.ranks));
      const Errors errors =
          on_ranks(way.ranks, setting_of(way.to, rule, way.unit), [&](ShardedMember& member) {
            resume(member, path);
            save(member, folder / "second");
            weights[size_t(member.comm.rank())] = member.weights();
          });
      CHECK(errors == Errors(size_t(way.ranks)));
      const auto first = contents_of(path);
      CHECK((contents_of(checkpoint_path(folder / "second", kSavedSteps)) == first));
      CHECK(first.size() > 20);
      // All of it arrived on all ranks: the others' shards, too.
      for (const Values& other : weights) CHECK((other == trained));
    }
  }
}

TEST_CASE("Training that goes on in any other way ends with one device's weights",
          "[sharded][checkpoint]") {
  std::vector<Samples> steps;
  for (uint32_t step = 0; step < 4; ++step) steps.emplace_back(6, step + 1);
  const auto of_kind = [](ShardKind kind, const OptimizerRule& rule, const std::string& unit) {
    return Setting{{.kind = kind, .unit = UnitSize::from(unit)}, rule};
  };
  for (const OptimizerRule& rule : {kMomentum, kAdam}) {
    const Values expected = single_device_weights(steps, rule);
    for (const int ranks : {1, 2, 3}) {
      if (rule.kind == kAdam.kind && ranks < 3 && !testing::full_campaign()) continue;
      INFO("4 ranks, then " << ranks);
      const TempDir folder;
      const Setting before = of_kind(ShardKind::parameters, rule, "layer");
      const Errors saved = on_ranks(4, before, [&](ShardedMember& member) {
        for (int64_t step = 0; step < kSavedSteps; ++step) member.step(steps[size_t(step)]);
        save(member, folder.path());
      });
      CHECK(saved == Errors(4));
      Values found;
      const Setting after = of_kind(ShardKind::optimizer, rule, "model");
      const Errors resumed = on_ranks(ranks, after, [&](ShardedMember& member) {
        resume(member, checkpoint_path(folder.path(), kSavedSteps));
        for (member.steps = kSavedSteps; member.steps < 4;)
          member.step(steps[size_t(member.steps)]);
        const Values weights = member.weights();
        if (member.comm.rank() == 0) found = weights;
      });
      CHECK(resumed == Errors(size_t(ranks)));
      CHECK(testing::relative_error(found, expected) < testing::kTolerance);
    }
  }
}

TEST_CASE("A rank that cannot write keeps all from saving, and the checkpoint before stays",
          "[sharded][checkpoint][row116]") {
  const TempDir folder;
  const Setting setting = setting_of(ShardKind::parameters, kMomentum);
  train_and_save(setting, folder.path());
  const auto before = folder.names();
  const fs::path in_the_way = shard_path(checkpoint_path(folder.path(), 9), 1, 2);
  fs::create_directories(in_the_way / "not empty");
  const Errors errors =
      on_ranks(2, setting, [&](ShardedMember& member) { save(member, folder.path(), 9); });
  for (const std::string& error : errors) {
    CHECK_THAT(error, ContainsSubstring("cannot save " + in_the_way.string()));
  }
  fs::remove_all(in_the_way);
  CHECK(folder.names() == before);
  CHECK(on_ranks(2, setting, [&](ShardedMember& member) { save(member, folder.path(), 9); }) ==
        Errors(2));
  CHECK(find_checkpoints(folder.path()).size() == 2);
}

TEST_CASE("Where only the counters change the shards stay, whoever wrote them",
          "[sharded][checkpoint]") {
  const TempDir folder;
  const Setting setting = setting_of(ShardKind::parameters, kMomentum);
  train_and_save(setting, folder.path(), 3);
  const fs::path path = checkpoint_path(folder.path(), kSavedSteps);
  const fs::path shard = shard_path(path, 1, 3);
  const auto written = fs::last_write_time(shard);
  const Errors errors = on_ranks(2, setting, [&](ShardedMember& member) {
    ShardedCheckpointer checkpointer = checkpointer_of(member, folder.path(), path);
    TrainingState state = checkpointer.resume({});
    state.best_accuracy = 0.5;
    checkpointer.save(state);
    checkpointer.finish();
  });
  CHECK(errors == Errors(2));
  CHECK(folder.names().size() == 4);
  CHECK(fs::last_write_time(shard) == written);
  CHECK(TrainingState::from_json(ShardedCheckpoint(path).training(), "it").best_accuracy == 0.5);
}

TEST_CASE("Saving over a damaged checkpoint of the same step leaves only what was saved",
          "[sharded][checkpoint]") {
  const TempDir folder;
  const Setting setting = setting_of(ShardKind::parameters, kMomentum);
  train_and_save(setting, folder.path(), 3);
  train_and_save(setting, folder.path(), 2);
  CHECK(folder.names() == testing::Words{"step-000000002.rank-0-of-2.safetensors",
                                         "step-000000002.rank-1-of-2.safetensors",
                                         "step-000000002.safetensors"});
}

TEST_CASE("A damaged shard is found by whichever rank reads it, and told to all",
          "[sharded][checkpoint]") {
  const TempDir folder;
  const Setting setting = setting_of(ShardKind::parameters, kMomentum);
  train_and_save(setting, folder.path(), 3);
  const fs::path path = checkpoint_path(folder.path(), kSavedSteps);
  for (const int shard : {0, 1, 2}) {
    const fs::path file = shard_path(path, shard, 3);
    const std::string whole = testing::read_text(file);
    std::string damaged = whole;
    damaged.back() = char(damaged.back() ^ 1);
    testing::write_file(file, damaged);
    for (const std::string& error :
         on_ranks(2, setting, [&](ShardedMember& member) { resume(member, path); })) {
      CHECK_THAT(error, ContainsSubstring(file.string()) && ContainsSubstring("has the checksum"));
    }
    testing::write_file(file, whole);
  }
}

TEST_CASE("A checkpoint of another network or optimizer is refused", "[sharded][checkpoint]") {
  const TempDir folder;
  train_and_save(setting_of(ShardKind::parameters, kMomentum), folder.path(), 1);
  const fs::path path = checkpoint_path(folder.path(), kSavedSteps);
  const auto refusal = [&](const Setting& setting) {
    return on_ranks(1, setting, [&](ShardedMember& member) { resume(member, path); }).at(0);
  };
  CHECK_THAT(
      refusal(setting_of(ShardKind::parameters, kAdam)),
      ContainsSubstring("the optimizer that was saved has momentum, this run's has exp_avg"));
  Setting plain = setting_of(ShardKind::parameters, kMomentum);
  plain.make = small_network();
  CHECK_THAT(refusal(plain), ContainsSubstring("the tensors do not fit this network"));
}

}  // namespace
}  // namespace lockstep
