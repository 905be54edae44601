#include "06-fully-sharded/sharded_checkpoint.h"

#include <algorithm>
#include <span>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "06-fully-sharded/joining.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Keys of the free text of the checkpoint's own file, and of a shard.
constexpr const char* kShardsKey = "lockstep.shards";
constexpr const char* kShardKey = "lockstep.shard";

/// What other programs say of a file of the checkpoint at `path`.
std::string incomplete(const char* what, const fs::path& path) {
  return fmt::format(
      "{} of a sharded checkpoint; resume from it with 06-fully-sharded, or join its shards: "
      "build/06-fully-sharded/gather DIR/{} OUT",
      what, path.filename().string());
}

/// "momentum.conv1.weight"
std::string tensor_name(const std::string& state, const std::string& parameter) {
  return state + "." + parameter;
}

/// The text under `key`. Throws BadInput if there is none.
std::string text_of(const SafetensorsStream& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  require(
      key == kShardKey || !file.metadata().contains(kShardKey),
      "{}: is one shard of a checkpoint; give the file that joins them, without .rank-... in its "
      "name",
      file.path().string());
  require(found != file.metadata().end() && file.checksums() == Checksums::crc32,
          "{}: found no {}, expected a file of a sharded checkpoint; whole weights need no "
          "joining, and a run begins from them with --load",
          file.path().string(), key);
  return found->second;
}

}  // namespace

// --- Saving --------------------------------------------------------------------------------------

std::string save_shard(const fs::path& path, const ShardPlace& place,
                       const std::vector<ShardPiece>& pieces) {
  ShardText text{.place = place};
  std::vector<TensorEntry> entries;
  for (const ShardPiece& piece : pieces) {
    text.first[piece.parameter] = piece.first;
    entries.push_back({.name = tensor_name(piece.state, piece.parameter),
                       .dtype = kRealType,
                       .shape = {int64_t(piece.numbers.size())},
                       .bytes = std::as_bytes(std::span(piece.numbers))});
  }
  return save_safetensors(shard_path(path, place.rank, place.world_size), entries,
                          {{"format", "pt"},
                           {kShardKey, text.to_json()},
                           {kIncompleteKey, incomplete("one shard", path)}},
                          Checksums::crc32);
}

void commit_shards(const fs::path& path, const ShardIndex& index, const std::string& training,
                   const std::vector<StateTensor>& running) {
  const int world_size = int(index.checksums.size());
  for (int rank = 0; rank < world_size; ++rank) {
    const fs::path shard = shard_path(path, rank, world_size);
    std::error_code none;
    require(fs::exists(shard, none) &&
                SafetensorsStream(shard).header_checksum() == index.checksums[size_t(rank)],
            "{}: rank 0 does not find what rank {} has just written; give all ranks the same "
            "directory, on a disk that they share",
            shard.string(), rank);
  }
  save_safetensors(path, file_entries(running),
                   {{"format", "pt"},
                    {kTrainingKey, training},
                    {kShardsKey, index.to_json()},
                    {kIncompleteKey, incomplete("the first file", path)}},
                   Checksums::crc32);
}

// --- Loading -------------------------------------------------------------------------------------

ShardedCheckpoint::ShardedCheckpoint(const fs::path& path) : path_(path) {
  const SafetensorsStream own(path);
  training_ = text_of(own, kTrainingKey);
  index_ = ShardIndex::from_json(text_of(own, kShardsKey), path.string());
  for (const StoredTensor& tensor : own.tensors()) {
    const std::vector<std::byte> bytes = own.read(tensor);
    running_.push_back(
        state_of({{tensor.name, tensor.dtype, tensor.shape, bytes}}, FileTypes::exact).at(0));
    require(running_.back().problem.empty(),
            "{}: {} {}; resume with the precision that it was "
            "saved with",
            path.string(), shortened(tensor.name), running_.back().problem);
  }
  for (const StateTensor& parameter : index_.parameters) {
    require(own.find(parameter.name) == nullptr,
            "{}: has {} itself, which it lists as sharded; take another checkpoint", path.string(),
            shortened(parameter.name));
  }
  const int64_t steps = TrainingState::from_json(training_, path.string()).steps;
  for (size_t rank = 0; rank < index_.checksums.size(); ++rank) open_shard(rank, steps);
  require_complete();
}

void ShardedCheckpoint::open_shard(size_t rank, int64_t steps) {
  const size_t world_size = index_.checksums.size();
  const fs::path shard = shard_path(path_, int(rank), int(world_size));
  std::error_code none;
  require(fs::exists(shard, none) || none,
          "{}: is missing, shard {} of {} of {}; bring it back, or take another checkpoint",
          shard.string(), rank + 1, world_size, path_.string());
  SafetensorsStream file(shard);
  require(file.header_checksum() == index_.checksums[rank],
          "{}: has the checksum {}, expected {} as {} says; the files were not saved together, "
          "take another checkpoint",
          shard.string(), file.header_checksum(), index_.checksums[rank], path_.string());
  ShardText text = ShardText::from_json(text_of(file, kShardKey), shard.string());
  const ShardPlace &place = text.place, expected{steps, int(rank), int(world_size)};
  require(place == expected,
          "{}: the shard of rank {} of {} after {} steps, expected that of rank {} of {} after {}; "
          "take another checkpoint",
          shard.string(), place.rank, place.world_size, place.steps, expected.rank,
          expected.world_size, expected.steps);
  for (const StoredTensor& tensor : file.tensors()) {
    require(tensor.dtype == kRealType && tensor.shape.size() == 1,
            "{}: {} has dtype {} and {} extents, expected {} and 1; resume with the precision that "
            "it was saved with",
            shard.string(), tensor.name, dtype_name(tensor.dtype), tensor.shape.size(),
            dtype_name(kRealType));
  }
  files_.push_back(std::move(file));
  first_.push_back(std::move(text.first));
}

/// A shard has nothing but pieces of what the index lists: `names`.
void ShardedCheckpoint::require_listed(size_t rank, const std::set<std::string>& names) const {
  for (const StoredTensor& tensor : files_[rank].tensors()) {
    require(names.contains(tensor.name),
            "{}: has {}, which {} does not list, or not where it begins; take another checkpoint",
            files_[rank].path().string(), shortened(tensor.name), path_.string());
  }
}

/// Every element of every parameter is there once, and no other.
void ShardedCheckpoint::require_complete() const {
  std::vector<std::set<std::string>> names(files_.size());
  for (const std::string& state : index_.states) {
    for (const StateTensor& parameter : index_.parameters) {
      const std::string name = tensor_name(state, parameter.name);
      const FlatRange whole{0, parameter.shape.elements()};
      const std::vector<FlatRange> ranges = saved(state, parameter.name);
      for (size_t rank = 0; rank < ranges.size(); ++rank) {
        const FlatRange& range = ranges[rank];
        if (first_[rank].contains(parameter.name)) names[rank].insert(name);
        require(
            range.count <= whole.count && range.first <= whole.count - range.count,
            "{}: {} begins with element {} and has {}, expected to end with the {} of shape {}; "
            "take another checkpoint",
            files_[rank].path().string(), shortened(name), range.first, range.count, whole.count,
            parameter.shape.text());
      }
      within(path_.string() + ": " + shortened(name), [&] { join_shards(ranges, whole); });
    }
  }
  for (size_t rank = 0; rank < files_.size(); ++rank) require_listed(rank, names[rank]);
}

std::vector<FlatRange> ShardedCheckpoint::saved(const std::string& state,
                                                const std::string& parameter) const {
  std::vector<FlatRange> ranges(files_.size());
  for (size_t rank = 0; rank < files_.size(); ++rank) {
    const StoredTensor* const tensor = files_[rank].find(tensor_name(state, parameter));
    const auto first = first_[rank].find(parameter);
    if (tensor == nullptr || first == first_[rank].end()) continue;
    ranges[rank] = {first->second, tensor->shape[0]};
  }
  return ranges;
}

void ShardedCheckpoint::verify(size_t shard) const {
  for (const StoredTensor& tensor : files_.at(shard).tensors()) files_[shard].read(tensor);
}

std::vector<Real> ShardedCheckpoint::read(const std::string& state, const std::string& parameter,
                                          FlatRange elements) const {
  std::vector<Real> numbers(size_t(elements.count));
  for (const Extract& extract : join_shards(saved(state, parameter), elements)) {
    const SafetensorsStream& file = files_[extract.saved];
    file.read(*file.find(tensor_name(state, parameter)), uint64_t(extract.of_saved.first),
              std::as_writable_bytes(std::span(numbers).subspan(size_t(extract.in_wanted),
                                                                size_t(extract.of_saved.count))));
  }
  return numbers;
}

namespace {

/// A parameter whose shape in PyTorch is this one, which tells how it lies in memory.
Parameter parameter_of(const StateTensor& saved) {
  const Shape& shape = saved.shape;
  const bool conv = shape.axes() == 4;  // [O,I,kh,kw]; in memory [O,kh,kw,I]
  return {.name = saved.name,
          .kind = conv ? ParameterKind::conv_weight : ParameterKind::linear_weight,
          .shape = conv ? Shape{shape[0], shape[2], shape[3], shape[1]} : shape,
          .fan_in = 0};
}

}  // namespace

std::vector<StateTensor> join_weights(const ShardedCheckpoint& checkpoint) {
  std::vector<StateTensor> weights = checkpoint.running();
  for (const StateTensor& saved : checkpoint.index().parameters) {
    const std::vector<Real> numbers =
        checkpoint.read(kValues, saved.name, {0, saved.shape.elements()});
    weights.push_back({.name = saved.name,
                       .shape = saved.shape,
                       .real = to_torch_layout(parameter_of(saved), numbers)});
  }
  return weights;
}

}  // namespace lockstep
