#include "common/io/safetensors_stream.h"

#include <algorithm>
#include <utility>

#include "common/core/error.h"
#include "common/io/checksums.h"
#include "common/io/foreign_files.h"
#include "common/io/safetensors_entries.h"
#include "common/io/safetensors_format.h"
#include "common/io/safetensors_header.h"

namespace lockstep {

using safetensors::kLengthBytes;

SafetensorsStream::SafetensorsStream(const std::filesystem::path& path) : file_(path) {
  const std::string what = path.string();
  std::vector<std::byte> head(std::min<std::uint64_t>(file_.size(), safetensors::kTellingBytes));
  file_.read(0, head);
  head.resize(kLengthBytes + safetensors::header_length(head, file_.size(), what));
  file_.read(0, head);
  safetensors::Header header = safetensors::read_header(head, file_.size(), what);
  payload_ = head.size();
  tensors_ = std::move(header.tensors);
  metadata_ = std::move(header.metadata);
  header_checksum_ = std::move(header.checksums.header);
  checksums_ = std::move(header.checksums.tensors);
}

const StoredTensor* SafetensorsStream::find(std::string_view name) const {
  const auto found = std::ranges::find(tensors_, name, &StoredTensor::name);
  return found == tensors_.end() ? nullptr : &*found;
}

std::vector<std::byte> SafetensorsStream::read(const StoredTensor& tensor) const {
  std::vector<std::byte> bytes(tensor.end - tensor.begin);
  file_.read(payload_ + tensor.begin, bytes);
  if (!checksums_.empty()) {
    const auto at = std::size_t(&tensor - tensors_.data());
    safetensors::verify_tensor(bytes, checksums_.at(at), tensor.name, path().string());
  }
  return bytes;
}

void SafetensorsStream::read(const StoredTensor& tensor, std::uint64_t first,
                             std::span<std::byte> bytes) const {
  const std::uint64_t size = dtype_size(tensor.dtype), all = tensor.end - tensor.begin;
  require(first <= all / size && bytes.size() <= all - first * size,
          "{}: tensor {} has {} bytes, expected {} from element {} on", path().string(),
          safetensors::in_quotes(tensor.name), all, bytes.size(), first);
  file_.read(payload_ + tensor.begin + first * size, bytes);
}

}  // namespace lockstep
