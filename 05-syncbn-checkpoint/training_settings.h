#pragma once
// What must stay the same in a run that resumes from another one's checkpoint.

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "05-syncbn-checkpoint/stage_options.h"

namespace lockstep {

/// The settings of a run that must not change between saving and resuming: options, and a
/// fingerprint of the training data.
nlohmann::json training_settings(const OptionTable& options, const DatasetPair& data);

/// Throws BadInput with the first setting in which this run (`found`) differs from the run that
/// saved `what` (`saved`), both values and what to do. Settings that only change the order of sums
/// may differ: backend and threads.
void require_saved_settings(const nlohmann::json& saved, const nlohmann::json& found,
                            const std::string& what);
/// Which of those differ, in the words of a warning: backend "tcp" instead of "gloo". Empty if none
/// does.
std::string other_order_of_sums(const nlohmann::json& saved, const nlohmann::json& found);

}  // namespace lockstep
