#include "05-syncbn-checkpoint/stage_options.h"

#include "common/core/error.h"
#include "common/io/json.h"
#include "common/nn/batch_norm.h"
#include "common/nn/models.h"

namespace lockstep {

using nlohmann::json;

namespace {

/// Refuses a network in which nothing would be synchronised.
void require_batch_norm(const OptionParser& parser) {
  for (const OptionRow& row : parser.table()) {
    if (row.name != "--model") continue;
    const auto& name = std::get<std::string>(row.value);
    const ModelKind kind = choice_of<ModelKind>(name, row.name);
    require(!batch_norms(*make_model({.kind = kind}).network).empty(),
            "--sync-bn-group: --model {} has no batch normalisation; leave it out, or take another "
            "network, such as seed-bn",
            name);
  }
}

/// Refuses options that do not go together.
void check(const SavingOptions& o, const OptionParser& parser) {
  for (const char* option : {"--save-every", "--keep"}) {
    require(!o.directory.empty() || !parser.given(option),
            "{}: nothing is saved without --checkpoint-dir; give it, too", option);
  }
  require(!o.directory.empty() || o.resume != "auto",
          "--resume auto: looks in --checkpoint-dir, found none; give it, or a file to resume");
  require(
      !o.allow_world_size || !o.resume.empty(),
      "--allow-world-size-change: has an effect on --resume only, found none; give --resume, too");
  for (const char* option : {"--checkpoint-dir", "--resume"}) {
    require(!parser.given(option) || !parser.given("--baseline"),
            "{}: --baseline compares whole runs; leave one of them out", option);
  }
  require(o.resume.empty() || !parser.given("--load"),
          "--resume: a checkpoint has weights of its own; leave out --load");
}

}  // namespace

void CheckpointStageOptions::add_to(OptionParser& parser) {
  Options::add_to(parser);
  ranks.add_to(parser);
  replica.add_to(parser);
  step.add_to(parser);
  sync_bn.add_to(parser);
  saving.add_to(parser);
  parser.check_afterwards([this] {
    check_saved_statistics(step, sync_bn, saving);
    refuse_simulated(*this, saving);
  });
}

void refuse_simulated(const Options& options, const SavingOptions& saving) {
  for (const auto& [name, value] :
       {std::pair("--checkpoint-dir", saving.directory), {"--resume", saving.resume}}) {
    require(!options.simulated() || value.empty(),
            "{}: a checkpoint has weights, and simulated devices compute none; leave it out, or "
            "give --devices cpu:0,cpu:1",
            name);
  }
}

void SyncBatchNormOptions::add_to(OptionParser& parser) {
  parser.begin_group("Network");
  parser.add_flag("--no-sync-bn", no_sync_bn,
                  {"batch normalisation sees its rank's part of the batch only, as in stage 04",
                   Role::all_runs, "sync_bn", [this] { return !no_sync_bn; }});
  parser.add("--sync-bn-group", sync_bn_group,
             "how many ranks, with consecutive numbers, normalise together; 0: all of them",
             {0, 65536});
  parser.check_afterwards([this, &parser] {
    require(!no_sync_bn || sync_bn_group == 0,
            "--no-sync-bn and --sync-bn-group: leave one of them out");
    if (sync_bn_group > 0) require_batch_norm(parser);
  });
}

void SavingOptions::add_to(OptionParser& parser) {
  parser.begin_group("Output");
  // Ranks may have the folder, or the file, at different places; but all save, or none does.
  parser.add_output("--checkpoint-dir", directory,
                    {"save checkpoints to this folder, after every epoch", Role::all_ranks, "saves",
                     [this] { return !directory.empty(); }},
                    Output::folder);
  parser.add("--save-every", save_every,
             {"save every so many steps, too; 0: never", Role::all_ranks}, {0, 1000000000});
  parser.add("--keep", keep, {"how many of the newest checkpoints stay", Role::per_rank},
             {2, 1000000});
  parser.add("--resume", resume,
             {"go on from this checkpoint; auto: from the newest in --checkpoint-dir, if any",
              Role::all_ranks, "resumes", [this] { return !resume.empty(); }});
  parser.add_flag(
      "--allow-world-size-change", allow_world_size,
      {"allow --resume of a checkpoint that another number of ranks has saved", Role::per_rank});
  parser.check_afterwards([this, &parser] { check(*this, parser); });
}

void check_saved_statistics(const StepOptions& step, const SyncBatchNormOptions& norm,
                            const SavingOptions& saving) {
  if (!step.no_broadcast_buffers || (saving.directory.empty() && saving.resume.empty())) return;
  require(
      !norm.no_sync_bn,
      "--no-sync-bn and --no-broadcast-buffers: every rank has running statistics of its own "
      "then, but a checkpoint has only rank 0's; leave out one of them, or --checkpoint-dir and "
      "--resume");
  require(norm.sync_bn_group == 0,
          "--sync-bn-group and --no-broadcast-buffers: every group has running statistics of its "
          "own then, but a checkpoint has only rank 0's; leave out one of them, or "
          "--checkpoint-dir and --resume");
}

std::string SyncBatchNormOptions::emulation(const StepOptions& step, size_t world_size) const {
  if (no_sync_bn) return step.emulation(world_size);
  require(sync_bn_group == 0 || size_t(sync_bn_group) == world_size,
          "--sync-bn-group: stage 01 has no groups of {} to normalise with; leave out --baseline",
          sync_bn_group);
  return step.emulation_together(world_size);
}

std::shared_ptr<Communicator> SyncBatchNormOptions::comm(ProcessGroup& group, Device& device,
                                                         Communicator& all) const {
  if (no_sync_bn) return nullptr;
  if (sync_bn_group == 0) return {std::shared_ptr<Communicator>(), &all};  // not owned
  group.together([&] {
    require(group.world_size() % sync_bn_group == 0,
            "--sync-bn-group: {} ranks make no groups of {}; give a divisor of {}",
            group.world_size(), sync_bn_group, group.world_size());
  });
  return group.new_group(device, [&](int rank) { return rank / sync_bn_group; });
}

TrainingState first_state(const OptionTable& options, const DatasetPair& data,
                          const ProcessGroup& group, const LearningRateSchedule& schedule) {
  TrainingState state;
  state.learning_rate = schedule.at(0);
  state.world_size = group.world_size();
  state.settings = training_settings(options, data);
  state.settings["backend"] = group.backend();  // what "auto" was resolved to
  return state;
}

// --- The settings of a run that another one resumes ----------------------------------------------

namespace {

OptionTable defaults() { return table_of(CheckpointStageOptions()); }

/// What may differ in a run that resumes: it changes the numbers only by rounding.
json order_of_sums() { return settings_of(defaults(), {Role::rounding}); }

}  // namespace

json training_settings(const OptionTable& options, const DatasetPair& data) {
  json settings = run_settings(options, {Role::all_runs, Role::rounding}, data);
  settings["data_crc32"] = fmt::format("{:08x}", data.train.fingerprint());
  return settings;
}

void require_saved_settings(const json& saved, const json& found, const std::string& what) {
  json all = saved;
  all.update(found);  // the names of both
  const json roundings = order_of_sums(), initial = settings_of(defaults(), {Role::all_runs});
  const auto require_same = [&](const std::string& name) {
    // An option that there was not yet, or is no longer, has its default.
    const json usual = initial.value(name, json());
    const json before = saved.value(name, usual), now = found.value(name, usual);
    require(before == now || roundings.contains(name),
            "{} was saved with {} {}, this run has {}; resume with the options and data that it "
            "was saved with, or begin anew from its weights with --load",
            what, name, before.dump(), now.dump());
  };
  // First, since another optimizer or precision also has other options.
  for (const std::string name : {"optimizer", "precision"}) {
    if (all.contains(name)) require_same(name);
  }
  for (const auto& [name, value] : all.items()) require_same(name);
}

std::string other_order_of_sums(const json& saved, const json& found) {
  const json roundings = order_of_sums();
  std::string text;
  for (const auto& [name, value] : roundings.items()) {
    const json before = saved.value(name, json()), now = found.value(name, json());
    if (before == now) continue;
    text += fmt::format("{}{} {} instead of {}", text.empty() ? "" : ", ", name, now.dump(),
                        before.dump());
  }
  return text;
}

}  // namespace lockstep
