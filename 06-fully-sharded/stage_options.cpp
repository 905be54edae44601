#include "06-fully-sharded/stage_options.h"

#include <cmath>

#include "04-ddp/compression.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/io/json.h"
#include "common/training/training_log.h"

namespace lockstep {

void ShardedStageOptions::add_to(OptionParser& parser) {
  Options::add_to(parser);
  ranks.add_to(parser);
  step.add_to(parser);
  sync_bn.add_to(parser);
  saving.add_to(parser);
  sharding.add_to(parser);
  parser.check_afterwards([this] {
    check_saved_statistics(step, sync_bn, saving);
    refuse_simulated(*this, saving);
  });
}

void ShardingOptions::add_to(OptionParser& parser) {
  parser.begin_group("Sharding");
  parser.add("--shard", kind,
             {"what the ranks divide among them; none: DDP, optimizer: ZeRO-1, gradients: ZeRO-2, "
              "parameters: FSDP",
              Role::all_ranks});
  parser.add("--unit", unit,
             {"what is gathered and reduced together: layer, block, model, or MiB of parameters",
              Role::all_ranks});
  parser.add("--prefetch", prefetch,
             {"how many units are gathered ahead, while another one computes", Role::all_ranks},
             {0, 1024});
  parser.add(
      "--reshard-after-forward", reshard_after_forward,
      {"yes: free gathered parameters after forward, gather them again for backward; no: keep them",
       Role::all_ranks});
  parser.add("--param-dtype", messages.parameters,
             {"type in which parameters are gathered; bf16: 16 bits, half of the bytes; shards "
              "stay float32",
              Role::all_ranks});
  parser.add(
      "--reduce-dtype", messages.gradients,
      {"type in which gradients are reduced; bf16: 16 bits, half of the bytes", Role::all_ranks});
  parser.check_afterwards([this, &parser] {
    if (messages.parameters != Compression::none) {
      check_compression("--param-dtype bf16", "parameters", parser);
    }
    if (messages.gradients != Compression::none) {
      check_compression("--reduce-dtype bf16", "gradients", parser);
    }
    for (const char* option : {"--prefetch", "--reshard-after-forward", "--param-dtype"}) {
      require(kind == ShardKind::parameters || !parser.given(option),
              "{}: found --shard {}, which keeps parameters whole, expected parameters; leave one "
              "of them out",
              option, name_of(kind));
    }
  });
}

FullyShardedDataParallel& shard(Model& model, Stream passes, ProcessGroup& group,
                                Communicator& comm, Stream communication,
                                const ShardedStageOptions& options) {
  ShardingOptions sharding = options.sharding;
  sharding.broadcast_buffers = !options.step.no_broadcast_buffers;
  sharding.precision = options.precision;
  return model.wrap<FullyShardedDataParallel>(passes, comm, group.exchanger(), communication,
                                              sharding);
}

// --- The report ----------------------------------------------------------------------------------

namespace {

/// How often half an all-reduce goes over all parameters in a step: all-gathers and
/// reduce-scatters. One in bf16 is half of one.
double halves_per_step(const ShardingOptions& options, int micro_batches) {
  const auto of = [](Compression type) { return type == Compression::bf16 ? 0.5 : 1.0; };
  const double gather = of(options.messages.parameters), reduce = of(options.messages.gradients);
  if (options.kind == ShardKind::none) return 2 * reduce;
  if (options.kind != ShardKind::parameters) return gather + reduce;
  return micro_batches * (options.reshard_after_forward ? 2 : 1) * gather + reduce;
}

/// Of all parameters, with what makes the shards equal.
int64_t padded_bytes(const FullyShardedDataParallel& sharded) {
  int64_t bytes = 0;
  for (const Unit* unit : sharded.units()) bytes += unit->length() * int64_t(sizeof(Real));
  return bytes;
}

/// What a rank keeps between steps, in bytes: of the tensors that are there.
struct KeptBytes {
  int64_t values = 0, gradients = 0, state = 0;
};

/// The whole, and the shard where that is no part of it.
int64_t bytes_kept(const Tensor& whole, const Tensor& shard) {
  if (!whole.defined()) return int64_t(shard.bytes());
  const auto offset = shard.data() - whole.data();
  const bool inside = offset >= 0 && offset < whole.elements();
  return int64_t(whole.bytes()) + (inside ? 0 : int64_t(shard.bytes()));
}

KeptBytes kept_by(const FullyShardedDataParallel& sharded, const Optimizer& optimizer) {
  KeptBytes kept;
  for (const Unit* unit : sharded.units()) {
    kept.values += bytes_kept(unit->values(), unit->value_shard());
    kept.gradients += bytes_kept(unit->gradients(), unit->gradient_shard());
  }
  for (const OptimizerState& state : optimizer.state()) {
    for (const Tensor& range : state.ranges) kept.state += int64_t(range.bytes());
  }
  return kept;
}

}  // namespace

int64_t bytes_by_formula(const FullyShardedDataParallel& sharded, int micro_batches,
                         int world_size) {
  const int64_t half = padded_bytes(sharded) / world_size * (world_size - 1);  // all shards but one
  return std::llround(halves_per_step(sharded.options(), micro_batches) * double(half));
}

void report(FullyShardedDataParallel& sharded, const Optimizer& optimizer, int micro_batches,
            int world_size, TrainingLog& log) {
  const double steps = double(std::max<int64_t>(log.own_steps(), 1));
  const StepTimes times = sharded.times(log.own_steps());
  log.note("ms per step",
           fmt::format("compute {:.2f}, communication {:.2f}, exposed {:.2f}", 1e3 * times.compute,
                       1e3 * times.communication, 1e3 * times.exposed),
           "per_step_seconds",
           {{"compute", times.compute},
            {"communication", times.communication},
            {"exposed_communication", times.exposed}});

  const double halves = halves_per_step(sharded.options(), micro_batches);
  const Communicator& comm = sharded.comm();  // it has counted: times() waits for the last step
  const double sent =
      double(comm.bytes_sent(Purpose::parameters) + comm.bytes_sent(Purpose::gradients)) / steps;
  log.note_sent({.what = "parameters and gradients",
                 .bytes = sent,
                 .counted_in = comm.bytes_counted_in(),
                 .formula = fmt::format("{} (W-1)/W times the padded model is", halves),
                 .predicted = double(bytes_by_formula(sharded, micro_batches, world_size))});

  const int64_t padded = padded_bytes(sharded);
  const KeptBytes kept = kept_by(sharded, optimizer);
  log.note("kept per rank",
           fmt::format("{:.2f} MiB of parameters, {:.2f} of gradients, {:.2f} of the optimizer; "
                       "the padded model has {:.2f}",
                       mebibytes(kept.values), mebibytes(kept.gradients), mebibytes(kept.state),
                       mebibytes(padded)),
           "kept_bytes",
           {{"parameters", kept.values},
            {"gradients", kept.gradients},
            {"optimizer", kept.state},
            {"padded_model", padded}});
}

}  // namespace lockstep
