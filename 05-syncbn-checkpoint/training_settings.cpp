#include "05-syncbn-checkpoint/training_settings.h"

#include "common/core/error.h"
#include "common/io/json.h"

namespace lockstep {

using nlohmann::json;

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
  // First, since another optimizer also has other options.
  if (all.contains("optimizer")) require_same("optimizer");
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
