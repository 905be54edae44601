// Joins the shards of a checkpoint to one file of weights: join-weights CHECKPOINT OUT. Or, with
// the optimizer's state, to a checkpoint of stage 05: join-weights CHECKPOINT --checkpoint-dir DIR.

#include "05-syncbn-checkpoint/checkpoint.h"
#include "06-fully-sharded/sharded_checkpoint.h"
#include "common/core/element_type.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/file.h"
#include "common/options/option_parser.h"
#include "common/options/report.h"
#include "common/system/process.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

struct JoinOptions {
  std::string checkpoint, out, directory;
  Precision dtype = Precision::real;

  explicit JoinOptions(OptionParser& parser) {
    parser.add("CHECKPOINT", checkpoint, "its first file, run/step-000000938.safetensors");
    parser.add_output("OUT", out, "the file of weights that is written, for --load and PyTorch");
    parser.add_output("--checkpoint-dir", directory,
                      "in place of OUT: an empty folder, which gets a checkpoint with the "
                      "optimizer's state, for --resume of stage 05",
                      Output::folder);
    parser.add("--dtype", dtype, "numbers in OUT: of 16 bits they make it half as large");
    parser.check_afterwards([this] {
      require(!checkpoint.empty() && !(out.empty() && directory.empty()),
              "join-weights: found {}, expected two: join-weights CHECKPOINT OUT (or "
              "--checkpoint-dir DIR in place of OUT)",
              checkpoint.empty() ? "no file" : "one file");
      require(out.empty() || directory.empty(),
              "join-weights: found OUT {} and --checkpoint-dir {}, expected one of them; leave the "
              "other out",
              out, directory);
      require(directory.empty() || dtype == Precision::real,
              "--dtype: {} is for OUT, a checkpoint keeps {}; leave it out", name_of(dtype),
              name_of(Precision::real));
      require(!followed(out).filename().string().starts_with("step-"),
              "join-weights: OUT is {}, a name of checkpoints; give another name, or "
              "--checkpoint-dir",
              out);
    });
  }
};

/// Makes the folder's only checkpoint, and returns the bytes of its files. The folder is refused if
/// it has others: this one would replace some of their files, or pass for one of their run.
int64_t write_to(const std::string& directory, const std::vector<StateTensor>& weights,
                 const std::vector<StateTensor>& optimizer, const TrainingState& state) try {
  const DirectoryLock lock(directory);
  const std::vector<int64_t> found = find_checkpoints(directory);
  require(found.empty(),
          "--checkpoint-dir: {} is there, expected no checkpoint; give an empty folder",
          found.empty() ? "" : checkpoint_path(directory, found.front()).string());
  return write_checkpoint(directory, weights, optimizer, state);
} catch (...) {
  throw;  // by way of here the lock goes: an error that nobody catches unwinds nothing
}

/// Returns the bytes that were written.
int64_t write(const JoinOptions& options, const ShardedCheckpoint& checkpoint,
              const std::vector<StateTensor>& weights) {
  if (options.directory.empty()) {
    if (options.dtype == Precision::real) {
      save_weights(options.out, weights);
    } else {
      save_rounded_weights(options.out, weights,
                           options.dtype == Precision::bf16 ? DType::BF16 : DType::F16);
    }
    return int64_t(std::filesystem::file_size(options.out));
  }
  return write_to(options.directory, weights, join_optimizer(checkpoint),
                  TrainingState::from_json(checkpoint.training(), options.checkpoint));
}

void join(const JoinOptions& options) {
  const ShardedCheckpoint checkpoint(options.checkpoint);
  for (size_t shard = 0; shard < checkpoint.shards(); ++shard) checkpoint.verify(shard);
  const std::vector<StateTensor> weights = join_weights(checkpoint);
  const int64_t bytes = write(options, checkpoint, weights);
  print_clean("Joined {} shard{} of {}: {} tensors, {} bytes in {}\n", checkpoint.shards(),
              checkpoint.shards() == 1 ? "" : "s", options.checkpoint, weights.size(), bytes,
              options.out.empty() ? options.directory : options.out);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::hold_standard_streams();
  lockstep::report_uncaught_errors();
  lockstep::OptionParser parser("join-weights",
                                "Joins the shards of a checkpoint to one file of weights, or to a "
                                "checkpoint of stage 05.");
  const lockstep::JoinOptions options(parser);
  if (parser.parse(argc, argv)) lockstep::join(options);
  lockstep::require_printed();
}
