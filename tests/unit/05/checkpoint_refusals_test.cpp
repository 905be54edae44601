// Checkpoints and settings that do not fit the run that they are given to.

#include <sys/stat.h>

#include <cmath>
#include <fstream>

#include "common/core/error.h"
#include "common/io/json.h"
#include "common/nn/layers.h"
#include "common/training/weights_file.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/process.h"
#include "tests/support/replaced_system_calls.h"
#include "tests/unit/05/checkpoint_runs.h"

namespace lockstep {
namespace {

using namespace testing::checkpoints;
namespace fs = std::filesystem;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
using nlohmann::json;
using testing::message_of;
using testing::operator+;
using testing::relative_error;
using testing::TempDir;
using testing::Words;

// --- Names ---------------------------------------------------------------------------------------

/// Saves a file of weights whose names `rename` changed.
template <class Rename>
void save_renamed(const fs::path& path, Module& network, Rename rename) {
  std::vector<StateTensor> state = state_dict(network);
  for (size_t i = 0; i < state.size(); ++i) state[i].name = rename(state[i].name, i);
  save_weights(path, state);
}

TEST_CASE("Weights of other types, and files of torch.save(), are refused with the way out",
          "[checkpoint][row110]") {
  const TempDir folder;
  SmallRun run(5);
  const auto refusal = [&](const std::string& file) {
    return message_of<BadInput>([&] { load_weights(folder / file, *run.network); });
  };
  const std::vector<StateTensor> state = state_dict(*run.network);
  std::vector<TensorEntry> entries = file_entries(state);
  for (TensorEntry& entry : entries) {
    if (entry.dtype == DType::I64) continue;
    entry.dtype = DType::I16;
    entry.bytes = entry.bytes.first(entry.bytes.size() / sizeof(Real) * 2);
  }
  save_safetensors(folder / "whole", entries);
  CHECK_THAT(refusal("whole"),
             ContainsSubstring("has dtype I16, expected F32, F64, BF16 or F16") &&
                 ContainsSubstring("; convert them in the program that saved them"));
  for (const std::string& begin :
       {std::string("PK\x03\x04 and more"), std::string("\x80\x02 and more")}) {
    testing::write_file(folder / "model.pt", begin);
    CHECK_THAT(refusal("model.pt"), ContainsSubstring("found a file of torch.save()") &&
                                        ContainsSubstring("safetensors.torch.save_file("));
  }
}

TEST_CASE("A file of many strange tensors is refused in a short line", "[checkpoint][row110]") {
  const TempDir folder;
  SmallRun run(5);
  std::vector<TensorEntry> entries;
  for (int i = 0; i < 2000; ++i)
    entries.push_back({fmt::format("odd\n{:04}", i), DType::F32, {0}, {}});
  entries.push_back({std::string(5000, 'x'), DType::F32, {0}, {}});
  save_safetensors(folder / "many", entries);
  const std::string text =
      message_of<BadInput>([&] { load_weights(folder / "many", *run.network); });
  CHECK_THAT(text, ContainsSubstring("unexpected odd?0000, ") && ContainsSubstring(", ... and "));
  CHECK(text.size() < 1500);
  CHECK(text.find('\n') == text.npos);
  save_safetensors(folder / "long", std::span(entries).last(1));
  CHECK_THAT(message_of<BadInput>([&] { load_weights(folder / "long", *run.network); }),
             ContainsSubstring("unexpected xxx") && ContainsSubstring("xxx...; use the --model"));
  CHECK(run.network_holds(5));
}

TEST_CASE("The names of a wrapped model lose their prefix if all of them have it",
          "[checkpoint][row110]") {
  const TempDir folder;
  SmallRun saved(5), loaded;
  const auto all = [](const std::string& name, size_t) { return "module." + name; };
  save_renamed(folder / "all", *saved.network, all);
  load_weights(folder / "all", *loaded.network);
  CHECK(loaded.network_holds(5));
  for (const std::string wrapper : {"_orig_mod.", "module._orig_mod.", "_orig_mod.module.",
                                    "_fsdp_wrapped_module.", "_fsdp_wrapped_module._orig_mod."}) {
    INFO(wrapper);
    loaded.set(0);
    save_renamed(folder / "all", *saved.network,
                 [&](const std::string& name, size_t) { return wrapper + name; });
    load_weights(folder / "all", *loaded.network);
    CHECK(loaded.network_holds(5));
  }

  loaded.set(0);
  save_renamed(folder / "some", *saved.network,
               [](const std::string& name, size_t i) { return i == 0 ? "module." + name : name; });
  CHECK_THAT(message_of<BadInput>([&] { load_weights(folder / "some", *loaded.network); }),
             ContainsSubstring("missing fc.weight, unexpected module.fc.weight"));
  CHECK(loaded.holds(0));

  // A DDP run's file has the names of the bare network, and is loaded by it.
  saved.save(folder.path());
  load_weights(folder / checkpoint_name(5), *loaded.network);
  CHECK(loaded.network_holds(5));
}

// --- What does not fit ---------------------------------------------------------------------------

/// Writes the checkpoint of `run` anew with tensors that `change` changed.
void save_changed(const fs::path& path, const SmallRun& run,
                  const std::function<void(std::vector<TensorEntry>&)>& change) {
  const std::vector<StateTensor> state = state_dict(*run.network);
  std::vector<TensorEntry> entries = file_entries(state);
  change(entries);
  save_safetensors(path, entries, {{"lockstep.training", run.state.to_json()}}, Checksums::crc32);
}

TEST_CASE("Tensors that do not fit are all listed, and nothing is changed",
          "[checkpoint][row111]") {
  const TempDir folder;
  const SmallRun saved(5, 0);
  const std::vector<double> doubles(8, 7.0);
  const std::vector<float> floats(8, 7.0F);
  const auto other_precision = [&](std::vector<TensorEntry>& entries) {
    entries[0].dtype = testing::kDouble ? DType::F32 : DType::F64;
    entries[0].bytes =
        testing::kDouble ? std::as_bytes(std::span(floats)) : std::as_bytes(std::span(doubles));
  };
  save_changed(folder / "other", saved, [&](std::vector<TensorEntry>& entries) {
    entries[0].dtype = DType::I32;  // fc.weight
    entries[0].shape = {2, 4};
    entries[0].bytes = std::as_bytes(std::span(floats));
    entries[1].name = "fc.bais";
    entries.push_back({"more", DType::F16, {0}, {}});
  });
  const std::vector<int64_t> four_by_two{4, 2};
  save_changed(folder / "shape", saved,
               [&](std::vector<TensorEntry>& entries) { entries[0].shape = four_by_two; });
  save_changed(folder / "precision", saved, other_precision);

  SmallRun run(0, 0);
  const auto refusal = [&](const std::string& file) {
    const std::string loaded =
        message_of<BadInput>([&] { load_weights(folder / file, *run.network); });
    const std::string restored =
        message_of<BadInput>([&] { restore(read_checkpoint(folder / file), run.trained()); });
    CHECK(run.holds(0));
    return loaded + "\n" + restored;
  };
  for (const char* part :
       {"fc.weight has dtype I32, expected F32, F64, BF16 or F16, missing fc.bias, "
        "unexpected fc.bais, unexpected more; ",
        testing::kDouble ? "dtype I32, expected F64, missing"
                         : "dtype I32, expected F32, missing"}) {
    CHECK_THAT(refusal("other"), ContainsSubstring(part));
  }
  CHECK_THAT(refusal("shape"), ContainsSubstring("fc.weight has shape [4, 2], expected [2, 4]"));

  CHECK_THAT(
      message_of<BadInput>([&] { restore(read_checkpoint(folder / "precision"), run.trained()); }),
      ContainsSubstring(testing::kDouble ? "fc.weight has dtype F32, expected F64"
                                         : "fc.weight has dtype F64, expected F32"));
  CHECK(run.holds(0));
  load_weights(folder / "precision", *run.network);  // converts
  CHECK(run.parameters.parameters()[0]->value.to_host() == std::vector<Real>(8, 7));
}

/// The network's weight [2, 4] and bias [2] as numbers of 16 bits.
void save_half(const fs::path& path, DType dtype, const std::vector<uint16_t>& weight,
               const std::vector<uint16_t>& bias) {
  save_safetensors(
      path, std::vector<TensorEntry>{{"fc.weight", dtype, {2, 4}, std::as_bytes(std::span(weight))},
                                     {"fc.bias", dtype, {2}, std::as_bytes(std::span(bias))}});
}

TEST_CASE("Weights of 16 bits become what they are worth, to the bit", "[checkpoint][sixteen]") {
  const TempDir folder;
  // By the two formats: 0, -0, 1, -1.5, the smallest number, the smallest normal one, the largest.
  save_half(folder / "bf16", DType::BF16,
            {0x0000, 0x8000, 0x3f80, 0xbfc0, 0x0001, 0x0080, 0x7f7f, 0x3dcd}, {0x4049, 0xc2f7});
  save_half(folder / "fp16", DType::F16,
            {0x0000, 0x8000, 0x3c00, 0xbe00, 0x0001, 0x0400, 0x7bff, 0x2e66}, {0x4248, 0xd7b8});
  SmallRun run(5);
  const auto loaded = [&](const std::string& file) {
    load_weights(folder / file, *run.network);
    std::vector<Real> values;
    for (const StateTensor& tensor : state_dict(*run.network)) {
      values.insert(values.end(), tensor.real.begin(), tensor.real.end());
    }
    CHECK(std::signbit(values.at(1)));
    return values;
  };
  CHECK(loaded("bf16") == std::vector<Real>{0, 0, 1, -1.5, Real(0x1p-133), Real(0x1p-126),
                                            Real(0x1.fep127), Real(0.10009765625), Real(3.140625),
                                            Real(-123.5)});
  CHECK(loaded("fp16") == std::vector<Real>{0, 0, 1, -1.5, Real(0x1p-24), Real(0x1p-14), 65504,
                                            Real(0.0999755859375), Real(3.140625), Real(-123.5)});
  // A checkpoint has what its run had: Real, without rounding.
  save_changed(folder / "half", SmallRun(3), [](std::vector<TensorEntry>& entries) {
    for (TensorEntry& entry : entries) {
      entry.dtype = DType::BF16;
      entry.bytes = entry.bytes.first(entry.bytes.size() / sizeof(Real) * 2);
    }
  });
  CHECK_THAT(
      message_of<BadInput>([&] { restore(read_checkpoint(folder / "half"), run.trained()); }),
      ContainsSubstring(testing::kDouble ? "has dtype BF16, expected F64"
                                         : "has dtype BF16, expected F32"));
}

TEST_CASE("Weights are written in 16 bits, rounded to the nearest, or refused",
          "[checkpoint][sixteen]") {
  const TempDir folder;
  std::vector<StateTensor> state{
      {.name = "fc.weight",
       .shape = {2, 4},
       .real = {0, 1, Real(-1.5), Real(3.14159), Real(1.00390625), Real(65519), -2, 7}},
      {.name = "bn.num_batches_tracked", .integer = {3}}};
  const auto written = [&](const std::string& file, DType dtype) {
    save_rounded_weights(folder / file, state, dtype);
    const SafetensorsFile saved = load_safetensors(folder / file);
    CHECK(saved.checksums() == Checksums::crc32);
    std::vector<Real> values;
    for (const TensorEntry& entry : saved.tensors()) {
      CHECK(entry.dtype == (entry.name == "fc.weight" ? dtype : DType::I64));
    }
    for (const StateTensor& tensor : state_of(saved.tensors(), FileTypes::any)) {
      values.insert(values.end(), tensor.real.begin(), tensor.real.end());
      if (!tensor.integer.empty()) CHECK(tensor.integer == std::vector<int64_t>{3});
    }
    return values;
  };
  CHECK(written("bf16", DType::BF16) ==
        std::vector<Real>{0, 1, Real(-1.5), Real(3.140625), 1, 65536, -2, 7});
  CHECK(written("fp16", DType::F16) ==
        std::vector<Real>{0, 1, Real(-1.5), Real(3.140625), Real(1.00390625), 65504, -2, 7});
  state[0].real[5] = 65520;
  CHECK_THAT(message_of<BadInput>([&] { save_rounded_weights(folder / "no", state, DType::F16); }),
             ContainsSubstring("fc.weight holds 65520, more than F16 can; nothing was written"));
  CHECK(!fs::exists(folder / "no"));
}

TEST_CASE("A run with other settings is told the first difference", "[checkpoint]") {
  const TempDir folder;
  train_and_save(2, RunOptions(folder.path()), 2);
  const std::string path = folder / checkpoint_name(2);
  const auto refusal = [&](const std::function<void(Options&)>& change) {
    RunOptions run(folder.path());
    change(run.options);
    std::vector<RunResult> before(2), after(2);
    const Words errors = run_group(2, run, [&](Trainee& trainee, int rank) {
      before[size_t(rank)] = trainee.result();
      const std::string error = message_of<BadInput>([&] { trainee.resume(path); });
      after[size_t(rank)] = trainee.result();
      fail<BadInput>("{}", error);
    });
    CHECK(errors[0] == errors[1]);
    CHECK(before == after);
    return errors[0];
  };
  CHECK(refusal([](Options& o) { o.batch_size = 5; }) ==
        path +
            " was saved with batch_size 6, this run has 5; resume with the options and data that "
            "it was saved with, or begin anew from its weights with --load");
  const auto differs = [&](const std::function<void(Options&)>& change, const std::string& text) {
    CHECK_THAT(refusal(change), ContainsSubstring(text));
  };
  differs([](Options& o) { o.model = ModelKind::seed; },
          "saved with model \"seed-bn\", this run has");
  differs([](Options& o) { o.order = OrderKind::file; },
          "order \"sampler\", this run has \"file\"");
  differs([](Options& o) { o.momentum = 0; }, "momentum 0.9, this run has 0");
  differs([](Options& o) { o.optimizer = OptimizerKind::adamw, o.momentum = 0, o.betas[0] = 0.8; },
          "saved with optimizer \"sgd\", this run has \"adamw\"; resume with the options");
  differs([](Options& o) { o.seed = 2; }, "seed 1, this run has 2");
  differs([](Options& o) { o.dropout = false; }, "dropout true, this run has false");

  const json settings = {{"a", 1}, {"b", "x"}};
  CHECK_NOTHROW(require_saved_settings(settings, settings, "F"));
  const json fewer = {{"a", 1}};
  CHECK_THROWS_WITH(require_saved_settings(settings, fewer, "F"), ContainsSubstring("b \"x\""));
  CHECK_THROWS_WITH(require_saved_settings(fewer, settings, "F"),
                    ContainsSubstring("b null, this run has \"x\""));
}

TEST_CASE("Another world size is refused, or allowed with a statement", "[checkpoint][row119]") {
  const TempDir folder;
  RunOptions run(folder.path());
  run.options.model = ModelKind::seed;  // batch normalisation sees a rank's part
  train_and_save(4, run, 3);
  const auto straight = trained_straight(4, 6, run);

  const Words errors = run_group(2, run, [](Trainee& trainee, int) { trainee.resume(); });
  CHECK_THAT(errors[0], ContainsSubstring("was saved by 4 ranks, this run has 2; start as many, or "
                                          "allow the change with --allow-world-size-change"));
  CHECK(errors[1] == errors[0]);

  std::string warning;
  run.saving.allow_world_size = true;
  run.saving.warn = [&](const std::string& line) { warning += line; };  // rank 0 alone
  run.options.threads_per_device = 2;                                   // may differ, too
  const auto resumed = results_of(2, run, [](Trainee& trainee) {
    trainee.resume();
    trainee.train(6);
    trainee.save();
  });
  CHECK_THAT(warning, ContainsSubstring("The same as before: parameters") &&
                          ContainsSubstring("dropout, which samples each global batch has. Not"));
  CHECK(resumed[0].weights == resumed[1].weights);
  CHECK(relative_error(resumed[0].weights, straight[0].weights) <
        (testing::kDouble ? 1e-12 : 1e-4));
  // From then on it is a run of two ranks.
  const TrainingState state = TrainingState::from_json(
      read_checkpoint(folder / checkpoint_name(6)).training, "the checkpoint");
  CHECK(state.world_size == 2);
  CHECK(state.settings["threads_per_device"] == 2);
}

TEST_CASE("What another number of ranks changes is told by the run's settings", "[checkpoint]") {
  const TempDir folder;
  RunOptions run(folder.path());
  run.saving.allow_world_size = true;
  Words warnings;
  run.saving.warn = [&](const std::string& line) { warnings.push_back(line); };
  const std::vector<json> changes{
      {{"sync_bn", true}}, {{"pad", true}}, {{"sync_bn", false}}, {{"accumulate", 2}}};
  const Words errors = run_group(1, run, [&](Trainee& trainee, int) {
    const json settings = trainee.state.settings;
    for (const json& change : changes) {
      trainee.state.settings = settings;
      trainee.state.settings.update(change);
      ++trainee.state.steps;
      trainee.state.world_size = 3;  // as if three had saved it
      trainee.save();
      trainee.state.world_size = 1;
      trainee.resume();
    }
  });
  CHECK(errors == no_errors(1));
  const std::string always =
      "Not the same: the order of sums, so that weights will differ by rounding errors";
  const Words expected{
      always, always + ", which samples each global batch has",
      always + ", the part of a batch that is normalised together",
      always + ", the samples of a micro-batch, which batch normalisation sees together"};
  REQUIRE(warnings.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK_THAT(warnings[i],
               ContainsSubstring("was saved by 3 ranks, this run has 1. The same as before: "));
    CHECK_THAT(warnings[i], EndsWith(expected[i]));
  }
}

TEST_CASE("A checkpoint of a newer format version is refused with both versions",
          "[checkpoint][row121]") {
  const TempDir folder;
  SmallRun run(7, 0);
  json newer = json::parse(run.state.to_json());
  newer["format_version"] = 2;
  newer["something"] = {{"new", 1}};
  save_safetensors(folder / checkpoint_name(7), file_entries(state_dict(*run.network)),
                   {{"lockstep.training", newer.dump()}}, Checksums::crc32);
  const Words errors =
      run_group(2, RunOptions(folder.path()), [](Trainee& trainee, int) { trainee.resume(); });
  CHECK_THAT(errors[0], ContainsSubstring("format version 2, expected at most 1"));
  CHECK(errors[1] == errors[0]);
}

TEST_CASE("A directory that cannot be written to is told before the first step, by all ranks",
          "[checkpoint][row116]") {
  const TempDir folder;
  std::ofstream(folder / "file") << "x";
  const Words errors = run_group(2, RunOptions(folder / "file" / "run"),
                                 [](Trainee& trainee, int) { trainee.resume(""); });
  CHECK_THAT(errors[0],
             ContainsSubstring("file/run: Not a directory; give one that you may write"));
  CHECK(errors[1] == errors[0]);
  const TempDir closed;
  ::chmod(closed.path().c_str(), 0555);
  const Words closed_errors =
      run_group(2, RunOptions(closed.path()), [](Trainee& trainee, int rank) {
        if (rank == 0) testing::drop_capabilities();  // this thread's
        trainee.resume("");
      });
  ::chmod(closed.path().c_str(), 0755);
  CHECK_THAT(closed_errors[0], ContainsSubstring("Permission denied; give one that you may write"));
  CHECK(closed_errors[1] == closed_errors[0]);
}

TEST_CASE(
    "A directory that is not there is made and locked before the choice; a refused run leaves none",
    "[checkpoint]") {
  const TempDir folder;
  RunOptions run(folder / "new/one");
  std::string second = "not asked";
  run.saving.say = [&](const std::string&) {  // nothing was found, and nothing is saved yet
    second = message_of<BadInput>([&] { DirectoryLock(folder / "new/one"); });
  };
  CHECK(run_group(2, run, [](Trainee& trainee, int) { trainee.resume(); }) == no_errors(2));
  CHECK_THAT(second, ContainsSubstring("another run saves to it"));
  CHECK_FALSE(std::filesystem::exists(folder / "new"));
  for (const char* source : {"auto", ""}) {
    run_group(2, run, [&](Trainee& trainee, int) {
      trainee.resume(source);
      fail<BadInput>("refused");
    });
    CHECK_FALSE(std::filesystem::exists(folder / "new"));
  }
  const Words errors =
      run_group(2, run, [](Trainee& trainee, int) { trainee.resume("no-such-checkpoint"); });
  CHECK_THAT(errors[1], ContainsSubstring("no-such-checkpoint"));
  CHECK_FALSE(std::filesystem::exists(folder / "new"));
}

}  // namespace
}  // namespace lockstep
