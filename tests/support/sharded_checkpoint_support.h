#pragma once
// Shared by the tests of sharded checkpoints and the fuzzer. Free of Catch2: the fuzzer has its own
// main.

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "05-syncbn-checkpoint/checkpoint.h"
#include "06-fully-sharded/sharded_checkpoint.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/nn/layers.h"
#include "common/training/weights_file.h"
#include "tests/support/process.h"
#include "tests/support/safetensors_support.h"

namespace lockstep::testing {

/// The files of a sharded checkpoint, described in lines, so that a fuzzer changes what the files
/// say and not their checksums:
///
///   training TEXT        of the checkpoint's own file; all others of a kind come after the first
///   index TEXT           "@0" in it becomes the checksum of shard 0
///   running NAME COUNT   a tensor of the own file, the numbers 0, 1, ...
///   shard TEXT           begins another shard
///   tensor NAME COUNT    of the shard that was begun last
struct ShardedSample {
  struct File {
    std::string text{};
    std::vector<std::pair<std::string, int64_t>> tensors{};
  };
  std::string training{};
  File own{};
  std::vector<File> shards{};

  explicit ShardedSample(const std::string& lines) {
    std::istringstream all(lines);
    for (std::string line; std::getline(all, line);) {
      const size_t blank = std::min(line.find(' '), line.size());
      const std::string word = line.substr(0, blank),
                        rest = line.substr(std::min(blank + 1, line.size()));
      if (word == "training") training = rest;
      if (word == "index") own.text = rest;
      if (word == "shard" && shards.size() < 4) shards.push_back({.text = rest});
      if (word == "running") add(own, rest);
      if (word == "tensor" && !shards.empty()) add(shards.back(), rest);
    }
  }

  /// Writes the files below `folder`, with right checksums; returns the path of the first.
  std::filesystem::path write(const std::filesystem::path& folder) const {
    const std::filesystem::path path = checkpoint_path(folder, 7);
    std::string index = own.text;
    for (size_t rank = 0; rank < shards.size(); ++rank) {
      const std::string checksum =
          write_file(shard_path(path, int(rank), int(shards.size())), shards[rank],
                     {{"lockstep.shard", shards[rank].text}});
      const std::string mark = "@" + std::to_string(rank);
      if (const size_t at = index.find(mark); at != index.npos)
        index.replace(at, mark.size(), checksum);
    }
    write_file(path, own, {{kTrainingKey, training}, {"lockstep.shards", index}});
    return path;
  }

 private:
  static void add(File& file, const std::string& rest) {
    const size_t blank = rest.rfind(' ');
    if (blank == rest.npos || file.tensors.size() >= 16) return;
    file.tensors.emplace_back(
        rest.substr(0, blank),
        int64_t(rest.size() - blank > 3 ? 0 : std::atoi(rest.c_str() + blank)) & 63);
  }
  static std::string write_file(const std::filesystem::path& path, const File& file,
                                const Metadata& texts) {
    std::vector<Real> numbers(64);
    std::iota(numbers.begin(), numbers.end(), Real(0));
    std::vector<TensorEntry> entries;
    for (const auto& [name, count] : file.tensors) {
      entries.push_back({.name = name,
                         .dtype = kRealType,
                         .shape = {count},
                         .bytes = std::as_bytes(std::span(numbers).first(size_t(count)))});
    }
    const auto bytes = serialize_safetensors(entries, texts, Checksums::crc32);
    testing::write_file(path, io::to_string(bytes));
    return parse_safetensors(bytes, "written").header_checksum();
  }
};

/// The network that resumes: conv.weight [2,3,1,1] and conv.bias [2].
class SmallNetwork final : public Sequential {
 public:
  SmallNetwork() {
    add("conv", std::make_unique<Conv2d>(3, 2, Conv2d::Options{}));
    set_name("");
  }
};

/// Does with the checkpoint at `path` what join-weights and a run that resumes do.
inline void use_sharded(const std::filesystem::path& path, const std::filesystem::path& out) {
  const ShardedCheckpoint checkpoint(path);
  for (size_t shard = 0; shard < checkpoint.shards(); ++shard) checkpoint.verify(shard);
  // As join-weights does.
  for (const StateTensor& tensor : join_weights(checkpoint)) {
    if (int64_t(tensor.real.size()) != tensor.shape.elements())
      throw std::logic_error("not its shape");
  }
  save_weights(out.string(), join_weights(checkpoint));
  const WeightsFile written(out.string());
  for (size_t i = 0; i < written.tensors().size(); ++i) written.read(i);
  // As join-weights does for stage 05.
  const TrainingState state = TrainingState::from_json(checkpoint.training(), path.string());
  const std::filesystem::path whole = out.parent_path() / "whole";
  write_checkpoint(whole, join_weights(checkpoint), join_optimizer(checkpoint), state);
  if (read_checkpoint(checkpoint_path(whole, state.steps)).training != state.to_json())
    throw std::logic_error("another state of training");
  // As ranks of another number do.
  for (const std::string& state : checkpoint.index().states) {
    for (const StateTensor& parameter : checkpoint.index().parameters) {
      const int64_t all = parameter.shape.elements(), cut = all / 3;
      std::vector<Real> parts = checkpoint.read(state, parameter.name, {0, cut});
      const std::vector<Real> rest = checkpoint.read(state, parameter.name, {cut, all - cut});
      parts.insert(parts.end(), rest.begin(), rest.end());
      if (parts != checkpoint.read(state, parameter.name, {0, all}))
        throw std::logic_error("parts differ");
    }
  }
  SmallNetwork network;
  std::vector<StateTensor> saved = checkpoint.index().parameters;
  saved.insert(saved.end(), checkpoint.running().begin(), checkpoint.running().end());
  within(path.string(), [&] { check_state_dict(network, saved); });
}

/// Checks the promise of `join-weights` and of a run that resumes, for any description of files: it
/// throws BadInput (returned here as its text), or it accepts (returned as ""). Anything else is a
/// std::logic_error, or ends the process.
inline std::string check_sharded(const std::string& lines, const std::filesystem::path& folder) {
  std::filesystem::path path;
  try {
    path = ShardedSample(lines).write(folder);
  } catch (const BadInput&) {
    return "no such files can be written";
  }
  try {
    use_sharded(path, folder / "joined");
  } catch (const BadInput& error) {
    const std::string refusal = error.what();
    if (refusal.find_first_of("\n\r") != refusal.npos || refusal.size() > 2000 ||
        (refusal.find("step-000000007") == refusal.npos && !refusal.starts_with("cannot save")) ||
        !is_valid_utf8(refusal)) {
      throw std::logic_error("not one line of text that names the file: " + refusal);
    }
    return refusal;
  }
  return "";
}

}  // namespace lockstep::testing
