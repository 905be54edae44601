#include "05-syncbn-checkpoint/training_settings.h"

#include <algorithm>
#include <array>

#include "common/core/error.h"
#include "common/io/json.h"

namespace lockstep {

using nlohmann::json;

namespace {

/// What may differ when a run goes on: it changes no number but by roundings.
constexpr std::array kOrderOfSums{"backend", "threads_per_device"};

bool is_order_of_sums(const std::string& name) {
  return std::ranges::find(kOrderOfSums, name) != kOrderOfSums.end();
}

}  // namespace

json training_settings(const Options& options, const DdpStageOptions& own,
                       const DatasetPair& data) {
  json settings = shared_settings(options, own, data);
  for (const char* how_long : {"epochs", "max_steps"}) settings.erase(how_long);
  settings["threads_per_device"] = options.threads_per_device;
  settings["data_crc32"] = fmt::format("{:08x}", data.train.fingerprint());
  return settings;
}

void require_settings(const json& saved, const json& found, const std::string& what) {
  json all = saved;
  all.update(found);  // the names of both
  for (const auto& [name, value] : all.items()) {
    const json before = saved.value(name, json()), now = found.value(name, json());
    require(before == now || is_order_of_sums(name),
            "{} was saved with {} {}, this run has {}; resume with the options and data that it "
            "was saved with, or begin anew from its weights with --load",
            what, name, before.dump(), now.dump());
  }
}

std::string other_order_of_sums(const json& saved, const json& found) {
  std::string text;
  for (const char* name : kOrderOfSums) {
    const json before = saved.value(name, json()), now = found.value(name, json());
    if (before == now) continue;
    text += fmt::format("{}{} {} instead of {}", text.empty() ? "" : ", ", name, now.dump(),
                        before.dump());
  }
  return text;
}

}  // namespace lockstep
