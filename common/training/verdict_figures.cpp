#include "common/training/verdict_figures.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "common/core/error.h"
#include "common/io/json.h"
#include "common/io/safetensors.h"

namespace lockstep {
namespace {

struct Weight {
  std::vector<int64_t> shape;
  std::vector<double> values;
};
/// The parameters of a file by name.
using Weights = std::map<std::string, Weight>;

/// BatchNorm's state that no gradient moves.
bool is_running_statistic(const std::string& name) {
  return name.ends_with("running_mean") || name.ends_with("running_var") ||
         name.ends_with("num_batches_tracked");
}

template <class T>
std::vector<double> as_doubles(const TensorEntry& entry) {
  std::vector<T> values(entry.bytes.size() / sizeof(T));
  std::memcpy(values.data(), entry.bytes.data(), entry.bytes.size());
  return {values.begin(), values.end()};
}

Weights read_parameters(const std::string& path) {
  Weights weights;
  const SafetensorsFile file = load_safetensors(path);
  for (const TensorEntry& entry : file.tensors()) {
    if (is_running_statistic(entry.name)) continue;
    require(entry.dtype == DType::F32 || entry.dtype == DType::F64,
            "{}: tensor {} has dtype {}, expected F32 or F64; compare files that --save wrote",
            path, entry.name, dtype_name(entry.dtype));
    weights[entry.name] = {entry.shape, entry.dtype == DType::F64 ? as_doubles<double>(entry)
                                                                  : as_doubles<float>(entry)};
  }
  return weights;
}

/// Refuses a pair of files that do not hold the same parameters.
void require_same_parameters(const Weights& weights, const std::string& path,
                             const Weights& reference, const std::string& reference_path) {
  constexpr const char* kAdvice = "compare weights of the same --model, --width and --data";
  for (const auto& [name, tensor] : weights) {
    const auto other = reference.find(name);
    require(other != reference.end(), "{}: tensor {} is not in {}; {}", path, name, reference_path,
            kAdvice);
    require(tensor.shape == other->second.shape,
            "{}: tensor {} has shape [{}], expected [{}] as "
            "in {}; {}",
            path, name, fmt::join(tensor.shape, ", "), fmt::join(other->second.shape, ", "),
            reference_path, kAdvice);
  }
  for (const auto& [name, tensor] : reference) {
    require(weights.contains(name), "{}: tensor {} is missing, which {} has; {}", path, name,
            reference_path, kAdvice);
  }
}

/// |a - b| / |b - origin|; without an origin |a - b| / |b|.
double relative_distance(const Weights& a, const Weights& b, const Weights* origin) {
  double apart = 0, length = 0;
  for (const auto& [name, tensor] : b) {
    const std::vector<double>& values = a.at(name).values;
    const double* start = origin == nullptr ? nullptr : origin->at(name).values.data();
    for (size_t i = 0; i < values.size(); ++i) {
      apart += std::pow(values[i] - tensor.values[i], 2);
      length += std::pow(tensor.values[i] - (start == nullptr ? 0 : start[i]), 2);
    }
  }
  return std::sqrt(apart / length);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

/// Samples of a usual step. The batch, unless the whole epoch is one smaller batch.
double samples_per_step(const nlohmann::json& metrics) {
  const auto steps = metrics.at("steps").get<int64_t>(),
             epochs = metrics.at("epochs").get<int64_t>();
  if (steps > epochs) return metrics.at("batch_size").get<double>();
  double seconds = 0;
  for (const double epoch : metrics.at("epoch_seconds")) seconds += epoch;
  return metrics.at("samples_per_second").get<double>() * seconds / double(steps);
}

}  // namespace

double weights_distance(const std::string& path, const std::string& reference) {
  const Weights own = read_parameters(path), other = read_parameters(reference);
  require_same_parameters(own, path, other, reference);
  return relative_distance(own, other, nullptr);
}

double change_distance(const std::string& path, const std::string& reference,
                       const std::string& initial) {
  const Weights own = read_parameters(path), other = read_parameters(reference);
  const Weights origin = read_parameters(initial);
  require_same_parameters(own, path, other, reference);
  require_same_parameters(origin, initial, other, reference);
  return relative_distance(own, other, &origin);
}

WarmSpeed warm_speed(const nlohmann::json& metrics, const std::string& what) try {
  auto seconds = metrics.at("step_seconds").get<std::vector<double>>();
  require(seconds.size() >= 2,
          "{}: step_seconds has {} entries, expected at least 2 to leave the first one out; train "
          "more steps",
          what, seconds.size());
  const auto cold = static_cast<std::ptrdiff_t>((seconds.size() + 9) / 10);
  seconds.erase(seconds.begin(), seconds.begin() + cold);
  const double step = median(std::move(seconds));
  const WarmSpeed speed{step, samples_per_step(metrics) / step};
  require(step > 0 && std::isfinite(speed.samples_per_second) && speed.samples_per_second > 0,
          "{}: a step took {} s, which gives {} samples/s, expected positive numbers; run it again",
          what, step, speed.samples_per_second);
  return speed;
} catch (const nlohmann::json::exception& error) {
  fail<BadInput>("{}: {}; expected what --metrics of a stage writes", what, error.what());
}

SpeedUp speed_up(const WarmSpeed& own, const WarmSpeed& reference, size_t devices) {
  const double factor = reference.step_seconds / own.step_seconds;
  return {.factor = factor, .efficiency = factor / double(devices)};
}

}  // namespace lockstep
