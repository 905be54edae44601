#include "common/options/described.h"

#include <algorithm>

#include "common/io/json.h"

namespace lockstep {

nlohmann::json settings_of(const OptionTable& table, std::initializer_list<Role> roles) {
  nlohmann::json settings = nlohmann::json::object();
  for (const OptionRow& row : table) {
    if (std::ranges::find(roles, row.role) == roles.end()) continue;
    std::visit([&](const auto& value) { settings[row.setting_name] = value; }, row.setting_value);
  }
  return settings;
}

nlohmann::json reported_settings(const OptionTable& table) {
  return settings_of(table, {Role::all_runs, Role::all_ranks, Role::rounding, Role::per_rank});
}

}  // namespace lockstep
