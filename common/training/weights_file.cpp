#include "common/training/weights_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>

#include "common/core/error.h"
#include "common/core/sixteen_bits.h"
#include "common/core/text.h"
#include "common/io/file.h"

namespace lockstep {
namespace {

/// What PyTorch's wrappers put before all names: DistributedDataParallel and DataParallel,
/// compile(), FullyShardedDataParallel.
constexpr std::string_view kWrappers[] = {"module.", "_orig_mod.", "_fsdp_wrapped_module."};

/// What all names begin with of that, one wrapper within another: "module._orig_mod.". If only some
/// names begin with it, they belong to a module of that name.
std::string wrapper_of(const std::vector<StoredTensor>& tensors) {
  std::string wrapper;
  const auto all_begin_with = [&](std::string_view more) {
    return !tensors.empty() && std::ranges::all_of(tensors, [&](const StoredTensor& tensor) {
      return tensor.name.starts_with(wrapper + std::string(more));
    });
  };
  const auto* more = std::begin(kWrappers);
  while ((more = std::ranges::find_if(kWrappers, all_begin_with)) != std::end(kWrappers)) {
    wrapper += *more;
  }
  return wrapper;
}

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

/// Numbers of one of the types of FileTypes::any. Those of 16 bits become a Real without rounding.
std::vector<Real> reals(const TensorEntry& entry) {
  switch (entry.dtype) {
    case DType::BF16:
      return converted<Bf16>(entry);
    case DType::F16:
      return converted<Fp16>(entry);
    case DType::F64:
      return converted<double>(entry);
    default:
      return converted<float>(entry);
  }
}

bool is_counter(const std::string& name) { return name.ends_with("num_batches_tracked"); }

/// What is wrong with the type of a tensor; empty if it can be taken.
std::string problem_of(const std::string& name, DType dtype, FileTypes types) {
  constexpr std::array kAny{DType::F32, DType::F64, DType::BF16, DType::F16};
  const bool any = types == FileTypes::any;
  const bool real = any ? std::ranges::count(kAny, dtype) > 0 : dtype == kRealType;
  if (is_counter(name) ? dtype == DType::I64 : real) return "";
  return fmt::format("has dtype {}, expected {}", dtype_name(dtype),
                     is_counter(name) ? "I64"
                     : any            ? "F32, F64, BF16 or F16"
                                      : dtype_name(kRealType));
}

StateTensor to_state(const TensorEntry& entry, FileTypes types) {
  StateTensor tensor{.name = entry.name,
                     .shape = Shape(entry.shape),
                     .problem = problem_of(entry.name, entry.dtype, types)};
  if (!tensor.problem.empty()) return tensor;
  if (is_counter(entry.name)) {
    tensor.integer = elements<int64_t>(entry);
  } else {
    tensor.real = reals(entry);
  }
  return tensor;
}

}  // namespace

std::vector<TensorEntry> file_entries(const std::vector<StateTensor>& state) {
  std::vector<TensorEntry> entries;
  for (const StateTensor& tensor : state) {
    const bool counter = !tensor.integer.empty();
    entries.push_back({.name = tensor.name,
                       .dtype = counter ? DType::I64 : kRealType,
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

namespace {

void save_entries(const std::string& path, const std::vector<TensorEntry>& entries) {
  save_safetensors(followed(path), entries, {{"format", "pt"}}, Checksums::crc32);
}

template <class T>
std::vector<T> rounded(const StateTensor& tensor, const std::string& path, DType dtype) {
  std::vector<T> values;
  for (const Real x : tensor.real) {
    values.push_back(T(float(x)));
    require(!std::isfinite(x) || std::isfinite(float(values.back())),
            "{}: {} holds {}, more than {} can; nothing was written; take bf16 or float32", path,
            tensor.name, x, dtype_name(dtype));
  }
  return values;
}

template <class T>
void save_as(const std::string& path, const std::vector<StateTensor>& state, DType dtype) {
  std::vector<TensorEntry> entries = file_entries(state);
  std::vector<std::vector<T>> numbers(state.size());  // which the entries view
  for (size_t i = 0; i < state.size(); ++i) {
    if (entries[i].dtype != kRealType) continue;
    numbers[i] = rounded<T>(state[i], path, dtype);
    entries[i].dtype = dtype;
    entries[i].bytes = std::as_bytes(std::span(numbers[i]));
  }
  save_entries(path, entries);
}

}  // namespace

void save_weights(const std::string& path, const std::vector<StateTensor>& state) {
  save_entries(path, file_entries(state));
}

void save_rounded_weights(const std::string& path, const std::vector<StateTensor>& state,
                          DType dtype) {
  dtype == DType::BF16 ? save_as<Bf16>(path, state, dtype) : save_as<Fp16>(path, state, dtype);
}

void refuse_incomplete(const Metadata& metadata, const std::string& path) {
  const auto found = metadata.find(kIncompleteKey);
  if (found == metadata.end()) return;
  std::string text = shortened(found->second, 1000);  // a file may say anything
  const std::string folder = path.substr(0, path.rfind('/') + 1), placeholder = "DIR/";
  if (const size_t at = text.find(placeholder); at != std::string::npos) {
    text.replace(at, placeholder.size(), folder);
  }
  fail<BadInput>("{}: expected all weights in one file, found {}", path, text);
}

// --- Loading -------------------------------------------------------------------------------------

WeightsFile::WeightsFile(const std::string& path) : file_(path) {
  refuse_incomplete(file_.metadata(), path);
  const std::vector<StoredTensor>& stored = file_.tensors();
  wrapper_ = wrapper_of(stored);
  for (const StoredTensor& tensor : stored) {
    const std::string name = tensor.name.substr(wrapper_.size());
    tensors_.push_back({.name = name,
                        .shape = Shape(tensor.shape),
                        .problem = problem_of(name, tensor.dtype, FileTypes::any)});
  }
}

StateTensor WeightsFile::read(size_t tensor) const {
  const StoredTensor& stored = file_.tensors().at(tensor);
  const std::vector<std::byte> bytes = file_.read(stored);
  return to_state({tensors_[tensor].name, stored.dtype, stored.shape, bytes}, FileTypes::any);
}

void WeightsFile::say_loaded() const {
  const auto converted = std::ranges::count_if(file_.tensors(), [](const StoredTensor& tensor) {
    return tensor.dtype != kRealType && tensor.dtype != DType::I64;
  });
  std::string text = fmt::format("Loaded {} tensors from {}", tensors_.size(), path());
  if (converted > 0) {
    text += fmt::format(", {} of them converted to {}", converted,
                        sizeof(Real) == 4 ? "float32" : "float64");
  }
  if (!wrapper_.empty()) text += fmt::format(", without the \"{}\" before their names", wrapper_);
  if (file_.checksums() == Checksums::none) text += " (it has no checksums)";
  print_clean("{}\n", text);
}

void load_weights(const std::string& path, Module& network) {
  load_weights(path, [&](const auto& state) { load_state_dict(network, state); });
}

void load_weights(const std::string& path,
                  const std::function<void(const std::vector<StateTensor>&)>& load) {
  const WeightsFile file(path);
  std::vector<StateTensor> state;
  for (size_t i = 0; i < file.tensors().size(); ++i) state.push_back(file.read(i));
  within(path, [&] { load(state); });
  file.say_loaded();
}

}  // namespace lockstep
