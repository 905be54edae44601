#pragma once
// Tensors and files for the tests of the safetensors format.

#include <fmt/ranges.h>

#include <array>
#include <cstdio>
#include <memory>
#include <random>

#include "common/io/safetensors_format.h"
#include "tests/support/safetensors_support.h"

namespace lockstep::testing::samples {

using namespace testing::io;
using namespace std::string_literals;  // "...\0..."s keeps its zero bytes

// --- Samples -------------------------------------------------------------------------------------

/// Tensors together with the bytes that their entries view.
class Sample {
 public:
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
           const std::string& bytes) {
    storage_.push_back(std::make_unique<std::vector<std::byte>>(to_bytes(bytes)));
    entries.push_back({name, dtype, std::move(shape), *storage_.back()});
  }

  std::vector<TensorEntry> entries;

 private:
  std::vector<std::unique_ptr<std::vector<std::byte>>> storage_;
};

/// Every case for which the format has a rule: a scalar, an empty tensor, NaN and -0, I64 and BOOL,
/// names that are empty, non-ASCII, or need escapes. In an order that the writer must change.
inline Sample golden_tensors() {
  Sample sample;
  sample.add("pixels", DType::U8, {1, 1}, "\xFF");
  sample.add("a\"b\\c\n\x01/", DType::F16, {2}, "\x01\x3C\x02\x3C");
  sample.add("mask", DType::BOOL, {3}, "\x01\x00\x01"s);
  sample.add("weight", DType::F64, {2}, "\0\0\0\0\0\0\xF8\x3F\0\0\0\0\0\0\0\xC0"s);
  sample.add("empty", DType::F32, {0, 4}, "");
  sample.add("", DType::I8, {1}, "\x80");
  sample.add("bias", DType::F32, {1, 3}, "\0\0\x80\x3F\0\0\xC0\x7F\0\0\0\x80"s);
  sample.add("gr\u00F6\u00DFe.\u91CD", DType::BF16, {1}, "\x80\x3F");
  sample.add("steps", DType::I64, {}, "\xF9\xFF\xFF\xFF\xFF\xFF\xFF\xFF");
  return sample;
}

/// The output of the reference implementation (Python package safetensors 0.8.0, `serialize`) for
/// the same tensors and the metadata {"format": "pt ✓<tab>"}, byte for byte.
inline std::string golden_file() {
  const std::string header =
      R"({"__metadata__":{"format":"pt ✓\t"},)"
      R"("steps":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("weight":{"dtype":"F64","shape":[2],"data_offsets":[8,24]},)"
      R"("bias":{"dtype":"F32","shape":[1,3],"data_offsets":[24,36]},)"
      R"("empty":{"dtype":"F32","shape":[0,4],"data_offsets":[36,36]},)"
      R"("größe.重":{"dtype":"BF16","shape":[1],"data_offsets":[36,38]},)"
      R"("a\"b\\c\n\u0001/":{"dtype":"F16","shape":[2],"data_offsets":[38,42]},)"
      R"("":{"dtype":"I8","shape":[1],"data_offsets":[42,43]},)"
      R"("pixels":{"dtype":"U8","shape":[1,1],"data_offsets":[43,44]},)"
      R"("mask":{"dtype":"BOOL","shape":[3],"data_offsets":[44,47]}} )";
  const std::string payload =
      "\xF9\xFF\xFF\xFF\xFF\xFF\xFF\xFF"                // steps
      "\0\0\0\0\0\0\xF8\x3F\0\0\0\0\0\0\0\xC0"          // weight
      "\0\0\x80\x3F\0\0\xC0\x7F\0\0\0\x80"              // bias
      "\x80\x3F\x01\x3C\x02\x3C\x80\xFF\x01\x00\x01"s;  // the small ones
  return "\x48\x02\0\0\0\0\0\0"s + header + payload;
}

inline Metadata golden_metadata() { return {{"format", "pt \u2713\t"}}; }

/// One tensor of every type, with random bytes (among them every kind of NaN) and shapes.
inline Sample random_tensors(std::mt19937& random) {
  Sample sample;
  for (int i = 0; i <= static_cast<int>(DType::U64); ++i) {
    const auto dtype = static_cast<DType>(i);
    std::vector<std::int64_t> shape(random() % 4);
    for (auto& dimension : shape) dimension = random() % 4;
    std::string bytes(safetensors::tensor_bytes(shape, dtype).value(), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    sample.add(fmt::format("layer{}.{}", random() % 100, dtype_name(dtype)), dtype, shape, bytes);
  }
  return sample;
}

/// A header with one entry, and the text of the error that it and `payload` cause.
inline std::string entry_header(const std::string& dtype, const std::string& shape,
                                const std::string& offsets) {
  return fmt::format(R"({{"w":{{"dtype":{},"shape":{},"data_offsets":{}}}}})", dtype, shape,
                     offsets);
}

inline std::string why_not(const std::string& header, const std::string& payload = "") {
  return check_parser(file_of(header, payload));
}

constexpr const char* kOne = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
constexpr const char* kTwo = R"({"dtype":"U8","shape":[1],"data_offsets":[1,2]})";

/// What a command prints.
inline std::string output_of(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return "popen failed";
  std::string output;
  std::array<char, 4096> buffer;
  while (const std::size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    output.append(buffer.data(), n);
  }
  return ::pclose(pipe) == 0 ? output : "the reader failed: " + output;
}

}  // namespace lockstep::testing::samples
