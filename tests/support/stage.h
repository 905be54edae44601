#pragma once
// Running a stage's program and looking at what it leaves.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/io/safetensors.h"
#include "tests/support/process.h"

namespace lockstep::testing {

/// Runs stage 01 on one CPU device with these options.
inline ProcessResult run_stage01(
    const std::vector<std::string>& options, double deadline_seconds,
    std::vector<std::pair<std::string, std::string>> environment = {}) {
  std::vector<std::string> argv{stage_binary("01-single-gpu"), "--devices", "cpu:0"};
  argv.insert(argv.end(), options.begin(), options.end());
  return run_process(argv, deadline_seconds, std::move(environment));
}

/// Why a run did not end well, for INFO.
inline std::string story(const ProcessResult& run) {
  return "status " + std::to_string(run.status) + (run.timed_out ? " (deadline passed)" : "") +
         "\nstdout: " + run.out + "\nstderr: " + run.err;
}

/// The tensors of a file by name, whatever their type, as double.
using Weights = std::map<std::string, std::vector<double>>;

template <class T>
std::vector<double> as_doubles(const TensorEntry& entry) {
  std::vector<T> values(entry.bytes.size() / sizeof(T));
  std::memcpy(values.data(), entry.bytes.data(), entry.bytes.size());
  return {values.begin(), values.end()};
}

inline Weights read_weights(const std::filesystem::path& path) {
  Weights weights;
  const SafetensorsFile file = load_safetensors(path);
  for (const TensorEntry& entry : file.tensors()) {
    weights[entry.name] = entry.dtype == DType::F64   ? as_doubles<double>(entry)
                          : entry.dtype == DType::I64 ? as_doubles<int64_t>(entry)
                                                      : as_doubles<float>(entry);
  }
  return weights;
}

/// The learnt tensors alone, without BatchNorm's running statistics.
inline Weights parameters_of(Weights weights) {
  std::erase_if(weights, [](const auto& tensor) {
    return tensor.first.find("running_") != std::string::npos ||
           tensor.first.ends_with("num_batches_tracked");
  });
  return weights;
}

inline double l2(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

inline double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double value : values) {
    if (std::isnan(value)) return value;  // NaN must not hide behind a number
    most = std::max(most, std::abs(value));
  }
  return most;
}

inline std::vector<double> difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return {std::nan("")};
  std::vector<double> values(a.size());
  std::transform(a.begin(), a.end(), b.begin(), values.begin(), std::minus<>());
  return values;
}

/// |a - b| / |b| with all tensors as one vector; NaN if their names differ.
inline double relative_l2(const Weights& a, const Weights& b) {
  const auto same_name = [](const auto& x, const auto& y) { return x.first == y.first; };
  if (!std::equal(a.begin(), a.end(), b.begin(), b.end(), same_name)) return std::nan("");
  double moved = 0, length = 0;
  for (const auto& [name, values] : b) {
    moved += std::pow(l2(difference(a.at(name), values)), 2);
    length += std::pow(l2(values), 2);
  }
  return std::sqrt(moved / length);
}

}  // namespace lockstep::testing
