#include "common/step/weights_file.h"

#include <algorithm>
#include <cstring>

#include "common/core/error.h"

namespace lockstep {
namespace {

constexpr DType kReal = sizeof(Real) == 4 ? DType::F32 : DType::F64;
constexpr std::string_view kWrapper = "module.";

template <class T>
std::vector<T> elements(const TensorEntry& entry) {
  std::vector<T> values(entry.bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), entry.bytes.data(), entry.bytes.size());
  return values;
}

template <class T>
std::vector<Real> converted(const TensorEntry& entry) {
  const std::vector<T> values = elements<T>(entry);
  return std::vector<Real>(values.begin(), values.end());
}

StateTensor to_state(const TensorEntry& entry, FileTypes types) {
  StateTensor tensor{entry.name, Shape(entry.shape), {}, {}};
  const bool counter = entry.name.ends_with("num_batches_tracked");
  const bool any = types == FileTypes::any;
  if (counter && entry.dtype == DType::I64) {
    tensor.integer = elements<int64_t>(entry);
  } else if (!counter && entry.dtype == DType::F32 && (any || kReal == DType::F32)) {
    tensor.real = converted<float>(entry);
  } else if (!counter && entry.dtype == DType::F64 && (any || kReal == DType::F64)) {
    tensor.real = converted<double>(entry);
  } else {
    tensor.problem = fmt::format("has dtype {}, expected {}", dtype_name(entry.dtype),
                                 counter ? "I64"
                                 : any   ? "F32 or F64"
                                         : dtype_name(kReal));
  }
  return tensor;
}

/// Removes the prefix that a wrapper put before every name; true if there was one. If only some
/// names begin with it, they belong to a module called "module".
bool unwrap_names(std::vector<StateTensor>& state) {
  const bool wrapped = !state.empty() && std::ranges::all_of(state, [](const StateTensor& tensor) {
    return tensor.name.starts_with(kWrapper);
  });
  for (StateTensor& tensor : state) {
    if (wrapped) tensor.name.erase(0, kWrapper.size());
  }
  return wrapped;
}

/// What is said about a loaded file.
std::string remarks(const SafetensorsFile& file, bool unwrapped) {
  const auto converted = std::ranges::count_if(file.tensors(), [](const TensorEntry& entry) {
    return entry.dtype != kReal && entry.dtype != DType::I64;
  });
  std::string text;
  if (converted > 0) {
    text += fmt::format(", {} of them converted to {}", converted,
                        sizeof(Real) == 4 ? "float32" : "float64");
  }
  if (unwrapped) text += fmt::format(", without the \"{}\" before their names", kWrapper);
  if (file.checksums() == Checksums::none) text += " (it has no checksums)";
  return text;
}

}  // namespace

std::vector<TensorEntry> file_entries(const std::vector<StateTensor>& state) {
  std::vector<TensorEntry> entries;
  for (const StateTensor& tensor : state) {
    const bool counter = !tensor.integer.empty();
    entries.push_back({.name = tensor.name,
                       .dtype = counter ? DType::I64 : kReal,
                       .shape = tensor.shape.extents(),
                       .bytes = counter ? std::as_bytes(std::span(tensor.integer))
                                        : std::as_bytes(std::span(tensor.real))});
  }
  return entries;
}

std::vector<StateTensor> state_of(const std::vector<TensorEntry>& entries, FileTypes types) {
  std::vector<StateTensor> state;
  for (const TensorEntry& entry : entries) state.push_back(to_state(entry, types));
  return state;
}

void save_weights(const std::string& path, Module& network) {
  save_weights(path, state_dict(network));
}

void save_weights(const std::string& path, const std::vector<StateTensor>& state) {
  save_safetensors(path, file_entries(state), {{"format", "pt"}}, Checksums::crc32);
}

void load_weights(const std::string& path, Module& network) {
  load_weights(path, [&](const auto& state) { load_state_dict(network, state); });
}

void load_weights(const std::string& path,
                  const std::function<void(const std::vector<StateTensor>&)>& load) {
  const SafetensorsFile file = load_safetensors(path);
  std::vector<StateTensor> state = state_of(file.tensors(), FileTypes::any);
  const bool unwrapped = unwrap_names(state);
  within(path, [&] { load(state); });
  fmt::print("Loaded {} tensors from {}{}\n", state.size(), path, remarks(file, unwrapped));
}

}  // namespace lockstep
