// Joins the shards of a checkpoint to one file of weights: join-weights CHECKPOINT OUT.

#include "06-fully-sharded/sharded_checkpoint.h"
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
  std::string checkpoint, out;

  explicit JoinOptions(OptionParser& parser) {
    parser.add("CHECKPOINT", checkpoint, "its first file, run/step-000000938.safetensors");
    parser.add_output("OUT", out, "the file of weights that is written, for --load and PyTorch");
    parser.check_afterwards([this] {
      require(!checkpoint.empty() && !out.empty(),
              "join-weights: found {}, expected two: join-weights CHECKPOINT OUT",
              checkpoint.empty() ? "no file" : "one file");
      require(!followed(out).filename().string().starts_with("step-"),
              "join-weights: OUT is {}, a name of checkpoints; give another name", out);
    });
  }
};

void join(const JoinOptions& options) {
  const ShardedCheckpoint checkpoint(options.checkpoint);
  for (size_t shard = 0; shard < checkpoint.shards(); ++shard) checkpoint.verify(shard);
  const std::vector<StateTensor> weights = join_weights(checkpoint);
  save_weights(options.out, weights);
  print_clean("Joined {} shard{} of {}: {} tensors, {} bytes in {}\n", checkpoint.shards(),
              checkpoint.shards() == 1 ? "" : "s", options.checkpoint, weights.size(),
              std::filesystem::file_size(options.out), options.out);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::hold_standard_streams();
  lockstep::report_uncaught_errors();
  lockstep::OptionParser parser("join-weights",
                                "Joins the shards of a checkpoint to one file of weights.");
  const lockstep::JoinOptions options(parser);
  if (parser.parse(argc, argv)) lockstep::join(options);
  lockstep::require_printed();
}
