// What steps cost, according to the reports.

#include "04-ddp/manual_ddp.h"
#include "05-syncbn-checkpoint/sync_batchnorm.h"
#include "tests/support/captured_output.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/ddp_test_support.h"
#include "tests/support/json.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

TEST_CASE("From a step's first pass to its last one all time is that of the passes", "[ddp]") {
  const testing::Ranks ranks = testing::tcp_ranks(2);
  std::vector<double> compute(2);
  const std::vector<std::string> errors = testing::run_ranks(2, [&](int rank) {
    testing::Member member(rank, testing::small_network(), 1);
    member.network = std::make_unique<ManualDdp>(std::move(member.network), member.parameters,
                                                 *ranks.processes[size_t(rank)],
                                                 member.communication, AllReduceKind::library);
    for (const bool last : {false, true}) {
      member.context.facts.last_contribution = last;
      member.accumulate(testing::Samples(2), 1);
      if (last) break;
      testing::enqueue(member.stream,
                       [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    }
    compute[size_t(rank)] = member.wrapper().times(1).compute;
  });
  CHECK(errors == std::vector<std::string>(2));
  for (const double seconds : compute) CHECK(seconds >= 0.020);
}

TEST_CASE("Waiting for batch statistics is reported per step of this run", "[syncbn]") {
  const testing::TempDir folder;
  Options options;
  options.metrics = folder / "metrics";
  const testing::Ranks ranks = testing::tcp_ranks(2);
  double waited = 0;
  const std::vector<std::string> errors = testing::run_ranks(2, [&](int rank) {
    testing::Member member(rank, testing::small_network(ModelKind::seed_bn), 1);
    const auto synchronised = convert_sync_batchnorm(
        *member.network, *ranks.processes[size_t(rank)], member.communication);
    member.accumulate(testing::Samples(4), 1);
    member.stream.synchronize();
    if (rank != 0) return;
    const testing::CapturedOutput output(folder / "output");
    TrainingLog log("a stage", options, member.stream, {member.device.get()}, 4);
    log.resume(9, 0);
    log.begin_epoch(0);
    log.step({.global_size = 4}, member.loss, {member.optimizer.health()});
    log.end_epoch();
    waited = synchronised->seconds_waited();
    report(*synchronised, log);
    log.finish(0);
  });
  CHECK(errors == std::vector<std::string>(2));
  const nlohmann::json told = testing::read_json(folder / "metrics").at("batch_norm");
  CHECK(told.at("layers") == 2);
  CHECK(waited > 0);
  CHECK(told.at("seconds_per_step") == waited);
}

}  // namespace
}  // namespace lockstep
