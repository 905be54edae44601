#include "06-fully-sharded/shard_files.h"

#include <map>
#include <optional>
#include <set>
#include <utility>

#include "06-fully-sharded/sharded_checkpoint.h"
#include "common/core/error.h"
#include "common/io/file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// Numbers of a unit that this rank keeps of unit.shard(): values, or a state of the optimizer.
struct Kept {
  std::string state;
  Tensor numbers{};
};

class FilesOfAllRanks final : public StateFiles {
 public:
  explicit FilesOfAllRanks(const ShardedTraining& training) : training_(training) {}

  int64_t save(const CheckpointRanks& ranks, const fs::path& directory,
               const TrainingState& state) override;
  std::string read(const CheckpointRanks& ranks, const fs::path& path) override;
  void require_fitting() const override;
  void restore(const CheckpointRanks& ranks) override;

 private:
  std::vector<int64_t> steps_read() const;
  std::vector<Kept> kept_of(size_t unit) const;
  std::vector<ShardPiece> pieces(int rank, int world_size, const TrainingState& state) const;
  bool has_shards(const fs::path& path) const;
  ShardIndex index_of(std::vector<std::string> checksums) const;
  int64_t commit(const fs::path& path, const ShardIndex& index, const TrainingState& state);

  ShardedTraining training_;
  std::optional<ShardedCheckpoint> read_;  // what was read last
  /// The checkpoint whose shards have the present values, and what it says of them.
  std::optional<std::pair<fs::path, ShardIndex>> present_;
};

std::vector<Kept> FilesOfAllRanks::kept_of(size_t unit) const {
  std::vector<Kept> kept{{kValues, training_.network.units()[unit]->value_shard()}};
  for (const OptimizerState& state : training_.optimizer.state()) {
    kept.push_back({state.name, state.ranges.at(unit)});
  }
  return kept;
}

// --- Saving --------------------------------------------------------------------------------------

/// What this rank writes: equal shards with --shard none, too, of which every rank keeps all.
std::vector<ShardPiece> FilesOfAllRanks::pieces(int rank, int world_size,
                                                const TrainingState& state) const {
  std::vector<ShardPiece> pieces;
  for (size_t u = 0; u < training_.network.units().size(); ++u) {
    const Unit& unit = *training_.network.units()[u];
    const FlatRange mine = shard_of(unit.length(), rank, world_size);
    const int64_t offset = mine.first - unit.shard().first;
    for (const Kept& kept : kept_of(u)) {
      for (const Piece& piece : pieces_in(unit.ranges(), mine)) {
        const std::string& name = unit.in_order()[piece.parameter]->name;
        const FlatRange elements = piece.of_parameter;
        pieces.push_back({kept.state, name, elements.first,
                          kept.numbers.range(offset + piece.in_shard, {elements.count}).to_host()});
        require_finite({{.name = name, .real = pieces.back().numbers}}, state);
      }
    }
  }
  return pieces;
}

/// Whether the shards of the checkpoint at `path` have the present values.
bool FilesOfAllRanks::has_shards(const fs::path& path) const {
  std::error_code none;
  return present_ && fs::equivalent(present_->first, path, none);
}

ShardIndex FilesOfAllRanks::index_of(std::vector<std::string> checksums) const {
  ShardIndex index{.checksums = std::move(checksums)};
  for (const Kept& kept : kept_of(0)) index.states.push_back(kept.state);
  for (const Parameter* p : training_.network.parameters()) {
    index.parameters.push_back({.name = p->name, .shape = torch_shape(*p)});
  }
  const std::vector<int64_t> steps = training_.optimizer.steps();
  for (size_t i = 0; i < steps.size(); ++i) {
    index.steps[training_.optimizer.parameters()[i]->name] = double(steps[i]);
  }
  return index;
}

int64_t FilesOfAllRanks::save(const CheckpointRanks& ranks, const fs::path& directory,
                              const TrainingState& state) {
  const int rank = ranks.comm.rank(), world_size = ranks.comm.world_size();
  const fs::path path = checkpoint_path(directory, state.steps);
  std::vector<ShardPiece> mine;
  const std::string present = together(ranks.exchange, [&]() -> std::string {
                                require_good_steps(training_.optimizer, directory);
                                mine = pieces(rank, world_size, state);
                                if (rank != 0) return "";
                                require_finite(running_state(training_.network), state);
                                make_directory(directory);
                                remove_leftovers(directory);
                                return has_shards(path) ? "present" : "";
                              }).at(0);
  try {
    ShardIndex index;
    if (present.empty()) {
      const ShardPlace place{state.steps, rank, world_size};
      const auto save_mine = [&] { return save_shard(path, place, mine); };
      index = index_of(together(ranks.exchange, save_mine));
    } else {
      index = present_->second;
    }
    const std::string bytes =
        ranks.on_first([&] { return std::to_string(commit(path, index, state)); });
    present_.emplace(path, index);
    return std::stoll(bytes);
  } catch (...) {
    if (rank == 0) remove_leftovers(directory);
    throw;
  }
}

/// On rank 0. Returns the bytes of all files.
int64_t FilesOfAllRanks::commit(const fs::path& path, const ShardIndex& index,
                                const TrainingState& state) {
  commit_shards(path, index, state.to_json(), running_state(training_.network));
  auto bytes = int64_t(fs::file_size(path));
  std::set<fs::path> shards;
  for (size_t rank = 0; rank < index.checksums.size(); ++rank) {
    shards.insert(shard_path(path, int(rank), int(index.checksums.size())));
  }
  for (const fs::path& shard : shards) bytes += int64_t(fs::file_size(shard));
  try {
    remove_companions(path, shards);  // of a damaged checkpoint that was here
  } catch (const EnvironmentError&) {
    // They stay until this checkpoint is removed.
  }
  return bytes;
}

// --- Loading -------------------------------------------------------------------------------------

/// The ranks share out the work of comparing checksums.
std::string FilesOfAllRanks::read(const CheckpointRanks& ranks, const fs::path& path) {
  return together(ranks.exchange,
                  [&] {
                    read_.reset();
                    read_.emplace(path);
                    for (size_t shard = size_t(ranks.comm.rank()); shard < read_->shards();
                         shard += size_t(ranks.comm.world_size())) {
                      read_->verify(shard);
                    }
                    return read_->training();
                  })
      .at(0);
}

void FilesOfAllRanks::require_fitting() const {
  std::vector<StateTensor> saved = read_->index().parameters;
  saved.insert(saved.end(), read_->running().begin(), read_->running().end());
  within(read_->path().string(), [&] { check_state_dict(training_.network, saved); });
  std::set<std::string> states(read_->index().states.begin(), read_->index().states.end());
  states.erase(kValues);
  require_same_states(read_->path(), states, training_.optimizer);
  within(read_->path().string(), [&] { steps_read(); });
}

std::vector<int64_t> FilesOfAllRanks::steps_read() const {
  return steps_of(training_.optimizer, read_->index().steps,
                  TrainingState::from_json(read_->training(), read_->path().string()));
}

/// Each rank reads what it keeps; where it keeps the whole of which it updates a shard, the others
/// send theirs.
void FilesOfAllRanks::restore(const CheckpointRanks& ranks) {
  together(ranks.exchange, [&] {
    for (size_t u = 0; u < training_.network.units().size(); ++u) {
      const Unit& unit = *training_.network.units()[u];
      for (const Kept& kept : kept_of(u)) {
        for (const Piece& piece : pieces_in(unit.ranges(), unit.shard())) {
          kept.numbers.range(piece.in_shard, {piece.of_parameter.count})
              .copy_from_host(read_->read(kept.state, unit.in_order()[piece.parameter]->name,
                                          piece.of_parameter));
        }
      }
    }
    std::map<std::string, StateTensor> running;
    for (const StateTensor& tensor : read_->running()) running.emplace(tensor.name, tensor);
    load_running_state(training_.network, running);
    training_.optimizer.set_steps(steps_read());
    present_.emplace(read_->path(), read_->index());
    read_.reset();
    return "";
  });
  training_.network.gather_parameters();
}

}  // namespace

std::unique_ptr<StateFiles> files_of(const ShardedTraining& training) {
  return std::make_unique<FilesOfAllRanks>(training);
}

}  // namespace lockstep
