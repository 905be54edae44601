#include "06-fully-sharded/sharded_checkpoint.h"

#include <algorithm>
#include <limits>
#include <span>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// --- Texts: JSON in the files' free text ---------------------------------------------------------

constexpr int64_t kFormatVersion = 1;
constexpr const char* kVersion = "format_version";
constexpr int kMostWorld = std::numeric_limits<int>::max();
constexpr const char* kAdvice = "take another checkpoint";

/// The fields of a JSON object, each of which is taken once.
class Fields {
 public:
  Fields(const std::string& text, const std::string& file)
      : what_(file + ": its description of shards"), fields_(parse_strictly(text, what_, 3)) {
    require(fields_.is_object(), "{} is no JSON object; {}", what_, kAdvice);
    const int64_t version = take_number(kVersion, 0);
    require(version == kFormatVersion,
            "{}: sharded format version {}, expected {}; resume with the Lockstep that wrote it",
            file, version, kFormatVersion);
  }

  bool has(const std::string& name) const { return fields_.contains(name); }
  json take(const std::string& name) {
    const auto found = fields_.find(name);
    require(found != fields_.end(), "{} has no {}, expected one; {}", what_, name, kAdvice);
    json value = std::move(*found);
    fields_.erase(found);
    return value;
  }
  int64_t take_number(const std::string& name, int64_t low, int64_t high = INT64_MAX) {
    return whole_number(take(name), of(name), low, high);
  }
  json take_object(const std::string& name) {
    json object = take(name);
    require(object.is_object(), "{} is no JSON object; {}", of(name), kAdvice);
    return object;
  }
  std::vector<std::string> take_texts(const std::string& name) {
    const json array = take(name);
    const bool texts =
        array.is_array() && !array.empty() &&
        std::ranges::all_of(array, [](const json& each) { return each.is_string(); });
    require(texts, "{} is not an array of texts; {}", of(name), kAdvice);
    return array.get<std::vector<std::string>>();
  }
  void require_no_others() const {
    if (fields_.empty()) return;
    fail<BadInput>("{} has {}, which format version {} does not know; {}", what_,
                   shortened(fields_.begin().key()), kFormatVersion, kAdvice);
  }

  /// A field, or a part of one, for errors.
  std::string of(const std::string& name) const { return what_ + ": " + shortened(name); }

 private:
  std::string what_;
  json fields_;
};

/// The shape of a parameter. No network has one with more than four extents, or with an extent of
/// 0.
Shape shape_of(const json& extents, const std::string& what) {
  require(extents.is_array() && extents.size() <= 4, "{} is no shape of up to 4 extents; {}", what,
          kAdvice);
  std::vector<int64_t> numbers;
  for (const json& each : extents) numbers.push_back(whole_number(each, what, 1, INT64_MAX));
  Shape shape(numbers);
  within(what, [&] { shape.bytes(sizeof(Real)); });
  return shape;
}

/// What a shard says of itself.
struct ShardText {
  ShardPlace place{};
  std::map<std::string, int64_t>
      first{};  // the element of each parameter that its piece begins with

  std::string to_json() const;
  /// Throws BadInput, naming `what`, for text that is not what to_json() makes.
  static ShardText from_json(const std::string& text, const std::string& what);
};

std::string ShardText::to_json() const {
  return json{{kVersion, kFormatVersion},
              {"steps", place.steps},
              {"rank", place.rank},
              {"world_size", place.world_size},
              {"first", first}}
      .dump();
}

ShardText ShardText::from_json(const std::string& text, const std::string& what) {
  Fields fields(text, what);
  ShardText shard;
  shard.place.steps = fields.take_number("steps", 0);
  const int64_t world_size = fields.take_number("world_size", 1, kMostWorld);
  shard.place.world_size = static_cast<int>(world_size);
  shard.place.rank = static_cast<int>(fields.take_number("rank", 0, world_size - 1));
  const json first = fields.take_object("first");
  for (const auto& [name, element] : first.items()) {
    shard.first[name] = whole_number(element, fields.of("first " + name), 0, INT64_MAX);
  }
  fields.require_no_others();
  return shard;
}

}  // namespace

std::string ShardIndex::to_json() const {
  json shapes = json::object();
  for (const StateTensor& parameter : parameters) {
    shapes[parameter.name] = parameter.shape.extents();
  }
  return json{{kVersion, kFormatVersion},
              {"checksums", checksums},
              {"states", states},
              {"parameters", shapes},
              {kStep, std::map<std::string, int64_t>(steps.begin(), steps.end())}}
      .dump();
}

ShardIndex ShardIndex::from_json(const std::string& text, const std::string& what) {
  Fields fields(text, what);
  ShardIndex index{.checksums = fields.take_texts("checksums"),
                   .states = fields.take_texts("states")};
  const json parameters = fields.take_object("parameters");
  for (const auto& [name, shape] : parameters.items()) {
    index.parameters.push_back({.name = name, .shape = shape_of(shape, fields.of(name))});
  }
  // Files of Lockstep before parameters had steps of their own have none.
  const json steps = fields.has(kStep) ? fields.take_object(kStep) : json::object();
  for (const auto& [name, step] : steps.items()) {
    index.steps[name] = double(whole_number(step, fields.of("step " + name), 0, INT64_MAX));
  }
  fields.require_no_others();
  require(!index.parameters.empty() && index.states.front() == kValues,
          "{}: shards without values, expected those of a network; {}", what, kAdvice);
  std::vector<std::string> states = index.states;
  std::ranges::sort(states);
  const auto twice = std::ranges::adjacent_find(states);
  require(twice == states.end(), "{}: the state {} is listed twice, expected once; {}", what,
          twice == states.end() ? "" : shortened(*twice), kAdvice);
  return index;
}

namespace {

// Keys of the free text of the checkpoint's own file, and of a shard.
constexpr const char* kShardsKey = "lockstep.shards";
constexpr const char* kShardKey = "lockstep.shard";

/// What other programs say of a file of the checkpoint at `path`.
std::string incomplete(const char* what, const fs::path& path) {
  return fmt::format(
      "{} of a sharded checkpoint; resume from it with 06-fully-sharded, or join its shards: "
      "build/06-fully-sharded/join-weights DIR/{} OUT (for stage 05's --resume: --checkpoint-dir "
      "FOLDER in place of OUT)",
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
            "{}: has the tensor {} itself, but lists it as sharded; take another checkpoint",
            path.string(), shortened(parameter.name));
  }
  const int64_t steps = TrainingState::from_json(training_, path.string()).steps;
  for (size_t rank = 0; rank < index_.checksums.size(); ++rank) open_shard(rank, steps);
  require_complete();
  require_steps(steps);
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
            "{}: has {}, expected only tensors that {} lists, with a first element; take another "
            "checkpoint",
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

/// Where parameters have counts of their steps, each has one, and none is above training's.
void ShardedCheckpoint::require_steps(int64_t of_training) const {
  if (index_.steps.empty()) return;
  within(path_.string(), [&] {
    require_equal(index_.steps.size(), index_.parameters.size(), "parameters with a step");
    for (const StateTensor& parameter : index_.parameters) {
      const auto found = index_.steps.find(parameter.name);
      require(found != index_.steps.end() && found->second <= double(of_training),
              "{}: {}, expected one from 0 to {}, the steps of training; {}",
              shortened(tensor_name(kStep, parameter.name)),
              found == index_.steps.end() ? "no number" : fmt::format("{}", found->second),
              of_training, kAdvice);
    }
  });
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

/// Appends one state of every parameter.
void join(const ShardedCheckpoint& checkpoint, const std::string& state,
          std::vector<StateTensor>& all) {
  for (const StateTensor& saved : checkpoint.index().parameters) {
    const std::vector<Real> numbers =
        checkpoint.read(state, saved.name, {0, saved.shape.elements()});
    all.push_back({.name = state == kValues ? saved.name : tensor_name(state, saved.name),
                   .shape = saved.shape,
                   .real = to_torch_layout(parameter_of(saved), numbers)});
  }
}

}  // namespace

std::vector<StateTensor> join_weights(const ShardedCheckpoint& checkpoint) {
  std::vector<StateTensor> weights = checkpoint.running();
  join(checkpoint, kValues, weights);
  return weights;
}

std::vector<StateTensor> join_optimizer(const ShardedCheckpoint& checkpoint) {
  std::vector<StateTensor> all;
  for (const std::string& state : checkpoint.index().states) {
    if (state != kValues) join(checkpoint, state, all);
  }
  for (const auto& [parameter, step] : checkpoint.index().steps) {
    all.push_back({.name = tensor_name(kStep, parameter), .real = {Real(step)}});
  }
  return all;
}

}  // namespace lockstep
