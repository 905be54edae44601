#include "05-syncbn-checkpoint/training_state.h"

#include <utility>

#include "common/core/error.h"
#include "common/io/json.h"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr int64_t kMost = 1'000'000'000'000'000;  // steps; no run has counted more
constexpr const char* kVersion = "format_version";
constexpr const char* kSettings = "settings";
constexpr const char* kSampleParts = "sample_parts";  // may be missing
constexpr const char* kLossScale = "loss_scale";      // likewise
constexpr std::pair<const char*, int64_t TrainingState::*> kScaleCounts[] = {
    {"good_steps", &TrainingState::good_steps}, {"skipped_steps", &TrainingState::skipped_steps}};
constexpr std::pair<const char*, int64_t TrainingState::*> kWholeNumbers[] = {
    {"epoch", &TrainingState::epoch},
    {"step_in_epoch", &TrainingState::step_in_epoch},
    {"steps", &TrainingState::steps},
    {"world_size", &TrainingState::world_size}};
constexpr std::pair<const char*, double TrainingState::*> kNumbers[] = {
    {"learning_rate", &TrainingState::learning_rate},
    {"best_accuracy", &TrainingState::best_accuracy}};

/// A value for an error message: short, on one line.
std::string shown(const json& value) {
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 60) + "..." : text;
}

json parse(const std::string& text, const std::string& what) {
  json parsed = parse_strictly(text, what + ": training state", 2);  // settings, and plain values
  require(parsed.is_object(), "{}: training state: found {}, expected an object", what,
          shown(parsed));
  return parsed;
}

/// Removes a field and returns it.
json take(json& fields, const char* name, const std::string& what) {
  const auto found = fields.find(name);
  require(found != fields.end(), "{}: training state: no {}, expected one; take another checkpoint",
          what, name);
  json value = std::move(*found);
  fields.erase(found);
  return value;
}

int64_t take_whole_number(json& fields, const char* name, const std::string& what) {
  const json value = take(fields, name, what);
  return whole_number(value, fmt::format("{}: training state: {}", what, name), 0, INT64_MAX);
}

json scale_of(const TrainingState& state) {
  json fields = {{"scale", state.loss_scale}};
  for (const auto& [name, member] : kScaleCounts) fields[name] = state.*member;
  return fields;
}

/// Of a run in fp16.
void take_scale(TrainingState& state, json& fields, const std::string& what) {
  json scale = take(fields, kLossScale, what);
  require(scale.is_object(), "{}: training state: {} is {}, expected an object", what, kLossScale,
          shown(scale));
  const json value = take(scale, "scale", what);
  require(value.is_number() && value.get<double>() > 0,
          "{}: training state: scale is {}, expected a number above 0", what, shown(value));
  state.loss_scale = value.get<double>();
  for (const auto& [name, member] : kScaleCounts) {
    state.*member = take_whole_number(scale, name, what);
  }
  require(scale.empty(), "{}: training state: {} has {}, expected nothing else", what, kLossScale,
          shown(scale));
}

/// The version comes first: it decides which other fields there are.
void require_known_version(json& fields, const std::string& what) {
  const int64_t version = take_whole_number(fields, kVersion, what);
  require(version <= TrainingState::kFormatVersion,
          "{}: checkpoint format version {}, expected at most {}; resume with the newer Lockstep "
          "that wrote it, or begin anew from its weights with --load",
          what, version, TrainingState::kFormatVersion);
  require(version == TrainingState::kFormatVersion,
          "{}: checkpoint format version {}, expected {}; take another checkpoint", what, version,
          TrainingState::kFormatVersion);
}

}  // namespace

int64_t TrainingState::first_batch(int64_t epoch) const {
  // [task 05.4] resume position
  return epoch == this->epoch ? step_in_epoch : 0;
  // [end 05.4]
}

std::string TrainingState::to_json() const {
  json fields = {{kVersion, kFormatVersion}, {kSettings, settings}};
  for (const auto& [name, member] : kWholeNumbers) fields[name] = this->*member;
  for (const auto& [name, member] : kNumbers) fields[name] = this->*member;
  if (sample_parts > 0) fields[kSampleParts] = sample_parts;
  if (loss_scale > 0) fields[kLossScale] = scale_of(*this);
  return fields.dump();
}

TrainingState TrainingState::from_json(const std::string& text, const std::string& what) {
  json fields = parse(text, what);
  require_known_version(fields, what);
  TrainingState state;
  for (const auto& [name, member] : kWholeNumbers) {
    state.*member = take_whole_number(fields, name, what);
  }
  for (const auto& [name, member] : kNumbers) {
    const json value = take(fields, name, what);
    require(value.is_number() && value.get<double>() >= 0,
            "{}: training state: {} is {}, expected a number from 0 on", what, name, shown(value));
    state.*member = value.get<double>();
  }
  require(state.best_accuracy <= 1, "{}: training state: best_accuracy is {}, expected at most 1",
          what, state.best_accuracy);
  require(state.epoch <= state.steps && state.step_in_epoch <= state.steps && state.steps <= kMost,
          "{}: training state: epoch {} and step {} of it after {} steps, expected no more than "
          "those, and at most {}",
          what, state.epoch, state.step_in_epoch, state.steps, kMost);
  require(state.world_size > 0, "{}: training state: world_size is 0, expected 1 or more", what);
  if (fields.contains(kSampleParts)) {
    const json parts = take(fields, kSampleParts, what);
    state.sample_parts = whole_number(
        parts, fmt::format("{}: training state: {}", what, kSampleParts), 1, state.world_size);
  }
  if (fields.contains(kLossScale)) take_scale(state, fields, what);
  state.settings = take(fields, kSettings, what);
  require(state.settings.is_object(), "{}: training state: settings is {}, expected an object",
          what, shown(state.settings));
  for (const auto& [name, value] : state.settings.items()) {
    require(value.is_primitive(), "{}: training state: setting {} is {}, expected a plain value",
            what, shown(name), shown(value));
  }
  require(fields.empty(), "{}: training state: found {}, which format version {} does not know",
          what, shown(fields), kFormatVersion);
  return state;
}

}  // namespace lockstep
