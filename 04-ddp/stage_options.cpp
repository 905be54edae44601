#include "04-ddp/stage_options.h"

#include <algorithm>

#include "04-ddp/manual_ddp.h"
#include "common/core/error.h"
#include "common/io/json.h"
#include "common/training/training_log.h"

namespace lockstep {
namespace {

/// Refuses what gradients in 16 bits cannot be together with.
void check_compressed_gradients(AllReduceKind all_reduce, const OptionParser& parser) {
  check_compression("--compress bf16", "gradients", parser);
  require(all_reduce == AllReduceKind::library,
          "--compress bf16: found --all-reduce {}, which adds float32, expected library; leave one "
          "of them out",
          name_of(all_reduce));
}

}  // namespace

void DdpStageOptions::add_to(OptionParser& parser) {
  Options::add_to(parser);
  ranks.add_to(parser);
  replica.add_to(parser);
  step.add_to(parser);
}

void BucketOptions::add_to(OptionParser& parser) {
  parser.add("--bucket-mb", bucket_mb,
             "bucket size: MiB of gradients in one all-reduce; 0: one parameter each; -1: first 1 "
             "MiB, then 25 MiB",
             {-1, 1e6});
  parser.check_afterwards([this] { caps(); });
}

void ReplicaOptions::add_to(OptionParser& parser) {
  parser.begin_group("Ranks");
  parser.add("--ddp", ddp,
             "bucketed: reduce gradients in buckets during backward; manual: reduce each "
             "parameter's gradient after backward");
  parser.add("--all-reduce", all_reduce,
             "algorithm that sums gradients: library (the backend's own), or ring or naive of "
             "all_reduce.cpp");
  parser.add("--compress", compress,
             "type in which gradients are sent; bf16: 16 bits, half of the bytes");
  buckets.add_to(parser);
  parser.add_flag("--no-overlap", no_overlap,
                  {"reduce gradients only after backward has ended", Role::per_rank});
  parser.add_flag("--find-unused-parameters", find_unused_parameters,
                  "allow steps in which a parameter gets no gradient; such a step is an error "
                  "without this option");
  parser.check_afterwards([this, &parser] {
    for (const char* option :
         {"--bucket-mb", "--no-overlap", "--no-broadcast-buffers", "--find-unused-parameters"}) {
      require(ddp == ReplicaKind::bucketed || !parser.given(option),
              "{}: found --ddp manual, which has no such option, expected bucketed; leave one of "
              "them out",
              option);
    }
    if (compress != Compression::none) check_compressed_gradients(all_reduce, parser);
  });
}

void StepOptions::add_to(OptionParser& parser) {
  parser.begin_group("Data");
  parser.add_flag(
      "--pad", pad,
      "give all ranks equally many samples, as PyTorch does; some samples then count twice");
  parser.begin_group("Training");
  parser.add(
      "--accumulate", accumulate,
      "cut a rank's part of the batch into so many micro-batches; reduce their gradients once",
      {1, 1024});
  parser.add("--clip-norm", clip_norm, "scale the reduced gradient down to this L2 norm; 0: off",
             {0, 1e12});
  parser.begin_group("Ranks");
  parser.add_flag(
      "--no-broadcast-buffers", no_broadcast_buffers,
      "every rank keeps its own running statistics of batch normalisation, instead of rank 0's");
  parser.check_afterwards([this, &parser] {
    require(!pad || !parser.given("--baseline"),
            "--pad: counts samples twice, so its weights are not those of one device; leave out "
            "--baseline");
    require(clip_norm == 0 || !parser.given("--baseline"),
            "--clip-norm: stage 01 has no such option; leave out --baseline");
  });
}

std::string StepOptions::emulation(size_t world_size) const {
  require(accumulate == 1,
          "--accumulate: batch normalisation sees each of the {} micro-batches by itself, and "
          "stage 01 cannot do that; leave out --baseline",
          accumulate);
  return fmt::format("stride:{}", world_size);
}

std::string StepOptions::emulation_together(size_t world_size) const {
  return accumulate == 1 ? "none" : fmt::format("micro:{}x{}", accumulate, world_size);
}

Replica& wrap_in_replica(Model& model, const FlatParameters& parameters, ProcessGroup& group,
                         Communicator& comm, Stream communication, ReplicaOptions replica,
                         const StepOptions& step) {
  if (replica.ddp == ReplicaKind::manual) {
    return model.wrap<ManualDdp>(parameters, comm, communication, replica.all_reduce,
                                 replica.compress);
  }
  replica.broadcast_buffers = !step.no_broadcast_buffers;
  return model.wrap<DistributedDataParallel>(parameters, comm, group.exchanger(), communication,
                                             replica);
}

std::string batch_line(const Options& options, const StepOptions& step, const ProcessGroup& group) {
  const int world_size = group.world_size();
  const int64_t largest = (options.batch_size + world_size - 1) / world_size;
  return fmt::format(
      "{}: global batch {} = {} x at most {} samples{}; learning rate {:.6g}", ranks_text(group),
      options.batch_size, world_size, largest,
      step.accumulate > 1 ? fmt::format(" in {} micro-batches", step.accumulate) : "",
      options.schedule(1).base);
}

void report(Replica& replica, const FlatParameters& parameters, int world_size, TrainingLog& log) {
  const StepTimes times = replica.times(log.own_steps());
  const double steps = double(std::max<int64_t>(log.own_steps(), 1));
  const Communicator& comm = replica.comm();  // it has counted: times() waits for the last step
  const bool in_16_bits = replica.compression() == Compression::bf16;
  const double model = double(parameters.count()) * double(in_16_bits ? 2 : sizeof(Real));
  log.note("ms per step", times.text(world_size > 1 && replica.overlaps()), "per_step_seconds",
           {{"compute", times.compute},
            {"communication", times.communication},
            {"exposed_communication", times.exposed}});
  log.note_sent({.what = "gradients",
                 .bytes = double(comm.bytes_sent(Purpose::gradients)) / steps,
                 .counted_in = comm.bytes_counted_in(),
                 .formula = in_16_bits ? "2(W-1)/W times the model in bf16 is"
                                       : "2(W-1)/W times the model is",
                 .predicted = 2.0 * (world_size - 1) / world_size * model});
}

}  // namespace lockstep
