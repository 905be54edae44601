#include "06-fully-sharded/sharded_checkpointer.h"

#include <map>
#include <set>

#include "common/core/error.h"
#include "common/io/file.h"

namespace lockstep {

namespace fs = std::filesystem;

std::vector<ShardedCheckpointer::NamedNumbers> ShardedCheckpointer::kept_of(size_t unit) const {
  std::vector<NamedNumbers> kept{{kValues, network_.units()[unit]->value_shard()}};
  for (const OptimizerState& state : optimizer_.state()) {
    kept.push_back({state.name, state.ranges.at(unit)});
  }
  return kept;
}

// --- Saving --------------------------------------------------------------------------------------

/// What this rank writes: equal shards with --shard none, too, of which every rank keeps all.
std::vector<ShardPiece> ShardedCheckpointer::pieces() const {
  std::vector<ShardPiece> pieces;
  for (size_t u = 0; u < network_.units().size(); ++u) {
    const Unit& unit = *network_.units()[u];
    const FlatRange mine = shard_of(unit.length(), comm().rank(), comm().world_size());
    const int64_t offset = mine.first - unit.shard().first;
    for (const NamedNumbers& kept : kept_of(u)) {
      for (const Piece& piece : pieces_in(unit.ranges(), mine)) {
        const std::string& name = unit.in_order()[piece.parameter]->name;
        const FlatRange elements = piece.of_parameter;
        pieces.push_back({kept.state, name, elements.first,
                          kept.numbers.range(offset + piece.in_shard, {elements.count}).to_host()});
      }
    }
  }
  return pieces;
}

/// Whether the shards of the checkpoint at `path` have the present values.
bool ShardedCheckpointer::has_shards(const fs::path& path) const {
  std::error_code none;
  return present_ && fs::equivalent(present_->first, path, none);
}

std::vector<StateTensor> ShardedCheckpointer::parameters() const {
  std::vector<StateTensor> all;
  for (const Parameter* p : network_.parameters()) {
    all.push_back({.name = p->name, .shape = torch_shape(*p)});
  }
  return all;
}

std::map<std::string, double> ShardedCheckpointer::steps() const {
  std::map<std::string, double> by_name;
  const std::vector<int64_t> steps = optimizer_.steps();
  for (size_t i = 0; i < steps.size(); ++i) {
    by_name[optimizer_.parameters()[i]->name] = double(steps[i]);
  }
  return by_name;
}

ShardIndex ShardedCheckpointer::index_of(std::vector<std::string> checksums) const {
  ShardIndex index{.checksums = std::move(checksums)};
  for (const NamedNumbers& kept : kept_of(0)) index.states.push_back(kept.state);
  index.parameters = parameters();
  index.steps = steps();
  return index;
}

int64_t ShardedCheckpointer::write(const TrainingState& state) {
  const fs::path path = checkpoint_path(directory(), state.steps);
  std::vector<ShardPiece> mine;
  std::vector<StateTensor> running;
  const std::string present =
      together(exchange(), [&]() -> std::string {
        require_good_steps(optimizer_, directory());
        mine = pieces();
        running = this->running();
        for (const ShardPiece& piece : mine) {
          require_finite({{.name = piece.parameter, .real = piece.numbers}}, state);
        }
        if (!is_first()) return "";
        require_finite(running, state);
        make_directory(directory());
        remove_leftovers(directory());
        return has_shards(path) ? "present" : "";
      }).at(0);
  try {
    ShardIndex index;
    if (present.empty()) {
      const ShardPlace place{state.steps, comm().rank(), comm().world_size()};
      index = index_of(together(exchange(), [&] { return save_shard(path, place, mine); }));
    } else {
      index = present_->second;
    }
    const std::string bytes =
        on_first([&] { return std::to_string(commit(path, index, state, running)); });
    present_.emplace(path, index);
    return std::stoll(bytes);
  } catch (...) {
    if (is_first()) remove_leftovers(directory());
    throw;
  }
}

/// On rank 0. Returns the bytes of all files.
int64_t ShardedCheckpointer::commit(const fs::path& path, const ShardIndex& index,
                                    const TrainingState& state,
                                    const std::vector<StateTensor>& running) {
  commit_shards(path, index, state.to_json(), running);
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
std::string ShardedCheckpointer::read(const fs::path& path) {
  return together(exchange(),
                  [&] {
                    read_.reset();
                    read_.emplace(path);
                    for (size_t shard = size_t(comm().rank()); shard < read_->shards();
                         shard += size_t(comm().world_size())) {
                      read_->verify(shard);
                    }
                    return read_->training();
                  })
      .at(0);
}

void ShardedCheckpointer::require_fitting() const {
  std::vector<StateTensor> saved = read_->index().parameters;
  saved.insert(saved.end(), read_->running().begin(), read_->running().end());
  within(read_->path().string(), [&] { check(saved); });
  std::set<std::string> states(read_->index().states.begin(), read_->index().states.end());
  states.erase(kValues);
  require_same_states(read_->path(), states, optimizer_);
  within(read_->path().string(), [&] { steps_read(); });
}

std::vector<int64_t> ShardedCheckpointer::steps_read() const {
  return steps_of(optimizer_, own_steps(read_->index().steps),
                  TrainingState::from_json(read_->training(), read_->path().string()));
}

/// Each rank reads what it keeps; where it keeps the whole of which it updates a shard, the others
/// send theirs.
void ShardedCheckpointer::restore() {
  together(exchange(), [&] {
    for (size_t u = 0; u < network_.units().size(); ++u) {
      const Unit& unit = *network_.units()[u];
      for (const NamedNumbers& kept : kept_of(u)) {
        for (const Piece& piece : pieces_in(unit.ranges(), unit.shard())) {
          kept.numbers.range(piece.in_shard, {piece.of_parameter.count})
              .copy_from_host(read_from(*read_, kept.state, *unit.in_order()[piece.parameter],
                                        piece.of_parameter));
        }
      }
    }
    std::map<std::string, StateTensor> running;
    for (const StateTensor& tensor : read_->running()) running.emplace(tensor.name, tensor);
    load_running(running);
    optimizer_.set_steps(steps_read());
    present_.emplace(read_->path(), read_->index());
    read_.reset();
    return "";
  });
  network_.gather_parameters();
}

}  // namespace lockstep
