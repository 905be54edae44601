#pragma once
// What must stay the same from one run to the one that goes on from its checkpoint.

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "05-syncbn-checkpoint/stage_options.h"

namespace lockstep {

/// The settings of a run that must not change from saving to resuming: options, and a fingerprint
/// of the training data.
nlohmann::json training_settings(const Options& options, const CheckpointStageOptions& own,
                                 const DatasetPair& data);

/// Throws BadInput with the first setting in which a run (`found`) differs from the one that
/// `what` was saved by (`saved`), both values and what to do. What only changes the order of sums
/// may differ: backend and threads.
void require_saved_settings(const nlohmann::json& saved, const nlohmann::json& found,
                            const std::string& what);
/// Which of those differ, as a warning says it: backend "tcp" instead of "gloo". Empty if none
/// does.
std::string other_order_of_sums(const nlohmann::json& saved, const nlohmann::json& found);

}  // namespace lockstep
