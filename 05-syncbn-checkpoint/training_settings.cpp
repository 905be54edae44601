#include "05-syncbn-checkpoint/training_settings.h"

#include "common/core/error.h"

namespace lockstep {

using nlohmann::json;

json training_settings(const Options& options, const DdpStageOptions& own,
                       const DatasetPair& data) {
  json settings = shared_settings(options, own, data);
  for (const char* how_long : {"epochs", "max_steps"}) settings.erase(how_long);
  settings["data_crc32"] = fmt::format("{:08x}", data.train.fingerprint());
  return settings;
}

void require_settings(const json& saved, const json& found, const std::string& what) {
  json all = saved;
  all.update(found);  // the names of both
  for (const auto& [name, value] : all.items()) {
    const json before = saved.value(name, json()), now = found.value(name, json());
    require(before == now,
            "{} was saved with {} {}, this run has {}; resume with the options and data that it "
            "was saved with, or begin anew from its weights with --load",
            what, name, before.dump(), now.dump());
  }
}

}  // namespace lockstep
