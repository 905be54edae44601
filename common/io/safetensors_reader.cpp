#include <algorithm>
#include <utility>

#include "common/io/checksums.h"
#include "common/io/file.h"
#include "common/io/foreign_files.h"
#include "common/io/safetensors.h"
#include "common/io/safetensors_entries.h"
#include "common/io/safetensors_format.h"
#include "common/io/safetensors_header.h"

namespace lockstep {

using safetensors::kLengthBytes;
using Bytes = std::span<const std::byte>;

SafetensorsFile parse_safetensors(std::vector<std::byte> bytes, const std::string& what) {
  const Bytes all(bytes);
  const Bytes first = all.first(std::min(all.size(), safetensors::kTellingBytes));
  const Bytes head = all.first(kLengthBytes + safetensors::header_length(first, all.size(), what));
  safetensors::Header header = safetensors::read_header(head, all.size(), what);
  const Bytes payload = all.subspan(head.size());
  std::vector<TensorEntry> tensors;
  for (StoredTensor& stored : header.tensors) {
    tensors.push_back({.name = std::move(stored.name),
                       .dtype = stored.dtype,
                       .shape = std::move(stored.shape),
                       .bytes = payload.subspan(stored.begin, stored.end - stored.begin)});
  }
  for (std::size_t i = 0; i < header.checksums.tensors.size(); ++i) {
    safetensors::verify_tensor(tensors[i].bytes, header.checksums.tensors[i], tensors[i].name,
                               what);
  }
  return {std::move(bytes), std::move(tensors), std::move(header.metadata),
          std::move(header.checksums.header)};
}

SafetensorsFile load_safetensors(const std::filesystem::path& path) {
  return parse_safetensors(read_file(path), path.string());
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::ranges::find(tensors_, name, &TensorEntry::name);
  return found == tensors_.end() ? nullptr : &*found;
}

}  // namespace lockstep
