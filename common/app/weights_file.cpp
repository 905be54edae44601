#include "common/app/weights_file.h"

#include <cstring>

#include "common/core/error.h"
#include "common/io/safetensors.h"
#include "common/nn/state.h"

namespace lockstep {
namespace {

constexpr DType kReal = sizeof(Real) == 4 ? DType::F32 : DType::F64;

template <class T>
std::vector<T> elements(const TensorEntry& entry) {
  std::vector<T> values(entry.bytes.size() / sizeof(T));
  std::memcpy(values.data(), entry.bytes.data(), entry.bytes.size());
  return values;
}

template <class T>
std::vector<Real> converted(const TensorEntry& entry) {
  const std::vector<T> values = elements<T>(entry);
  return std::vector<Real>(values.begin(), values.end());
}

StateTensor to_state(const std::string& path, const TensorEntry& entry) {
  StateTensor tensor{entry.name, Shape(entry.shape), {}, {}};
  const bool counter = entry.name.ends_with("num_batches_tracked");
  if (counter && entry.dtype == DType::I64) {
    tensor.integer = elements<int64_t>(entry);
  } else if (!counter && entry.dtype == DType::F32) {
    tensor.real = converted<float>(entry);
  } else if (!counter && entry.dtype == DType::F64) {
    tensor.real = converted<double>(entry);
  } else {
    fail<BadInput>("{}: tensor {} has dtype {}, expected {}; convert the file first", path,
                   entry.name, dtype_name(entry.dtype), counter ? "I64" : "F32 or F64");
  }
  return tensor;
}

}  // namespace

void save_weights(const std::string& path, Module& network) {
  save_weights(path, state_dict(network));
}

void save_weights(const std::string& path, const std::vector<StateTensor>& state) {
  std::vector<TensorEntry> entries;
  for (const StateTensor& tensor : state) {
    const bool counter = !tensor.integer.empty();
    entries.push_back({.name = tensor.name,
                       .dtype = counter ? DType::I64 : kReal,
                       .shape = tensor.shape.extents(),
                       .bytes = counter ? std::as_bytes(std::span(tensor.integer))
                                        : std::as_bytes(std::span(tensor.real))});
  }
  save_safetensors(path, entries, {{"format", "pt"}});
}

void load_weights(const std::string& path, Module& network) {
  load_weights(path, [&](const auto& state) { load_state_dict(network, state); });
}

void load_weights(const std::string& path,
                  const std::function<void(const std::vector<StateTensor>&)>& load) {
  const SafetensorsFile file = load_safetensors(path);
  std::vector<StateTensor> state;
  int64_t converted = 0;
  for (const TensorEntry& entry : file.tensors()) {
    state.push_back(to_state(path, entry));
    converted += entry.dtype != kReal && entry.dtype != DType::I64;
  }
  try {
    load(state);
  } catch (const BadInput& error) {
    fail<BadInput>("{}: {}", path, error.what());
  }
  fmt::print("Loaded {} tensors from {}{}\n", state.size(), path,
             converted == 0 ? ""
                            : fmt::format(", {} of them converted to {}", converted,
                                          sizeof(Real) == 4 ? "float32" : "float64"));
}

}  // namespace lockstep
