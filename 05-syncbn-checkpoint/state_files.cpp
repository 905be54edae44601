#include "05-syncbn-checkpoint/state_files.h"

#include <string>
#include <system_error>

#include "common/io/json.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class FilesOfRank0 final : public StateFiles {
 public:
  explicit FilesOfRank0(const Trained& trained) : trained_(trained) {}

  int64_t save(const CheckpointRanks& ranks, const fs::path& directory,
               const TrainingState& state) override {
    return std::stoll(ranks.on_first([&] {
      require_good_steps(trained_.optimizer, directory);
      save_checkpoint(directory, trained_, state);
      return std::to_string(bytes_of(checkpoint_path(directory, state.steps)));
    }));
  }

  std::string read(const CheckpointRanks& ranks, const fs::path& path) override {
    return ranks.on_first([&] {
      checkpoint_ = read_checkpoint(path);
      return checkpoint_.training;
    });
  }

  void require_fitting() const override { lockstep::require_fitting(checkpoint_, trained_); }

  /// Rank 0 takes over what it has read; then the tensors of all ranks become rank 0's.
  void restore(const CheckpointRanks& ranks) override {
    const json counts = parse_json(ranks.on_first([&] {
      lockstep::restore(checkpoint_, trained_);
      checkpoint_ = {};
      return json{batches_tracked(trained_.network), trained_.optimizer.steps()}.dump();
    }));
    set_batches_tracked(trained_.network, counts.at(0).get<std::vector<int64_t>>());
    trained_.optimizer.set_steps(counts.at(1).get<std::vector<int64_t>>());
    const Stream stream = trained_.parameters.stream();
    ranks.comm.broadcast(stream, trained_.parameters.values(), 0);
    if (!trained_.parameters.buffers().empty()) {
      ranks.comm.broadcast(stream, trained_.parameters.buffer_values(), 0);
    }
    for (const OptimizerState& state : trained_.optimizer.state()) {
      ranks.comm.broadcast(stream, state.ranges.at(0), 0);
    }
  }

 private:
  /// The size of a checkpoint, with its optimizer's file if there is any.
  static std::uintmax_t bytes_of(const fs::path& checkpoint) {
    std::error_code none;
    const std::uintmax_t optimizer = fs::file_size(optimizer_path(checkpoint), none);
    return fs::file_size(checkpoint) + (none ? 0 : optimizer);
  }

  Trained trained_;
  Checkpoint checkpoint_;  // on rank 0: what was read last
};

}  // namespace

std::unique_ptr<StateFiles> files_of(const Trained& trained) {
  return std::make_unique<FilesOfRank0>(trained);
}

}  // namespace lockstep
