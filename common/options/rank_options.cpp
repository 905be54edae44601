#include "common/options/rank_options.h"

#include <cstdlib>

#include "common/core/error.h"
#include "common/rendezvous/launch_contract.h"
#include "common/system/process.h"

namespace lockstep {
namespace {

std::optional<int> if_given(int number) {
  return number < 0 ? std::nullopt : std::optional<int>(number);
}

}  // namespace

void RankOptions::add_to(OptionParser& parser) {
  parser.begin_group("Ranks");
  parser.add(
      "--backend", backend,
      {"what connects the ranks; shm: shared memory; auto: the fastest that fits", Role::rounding});
  parser.add(
      "--init-method", init_method,
      {"where rank 0 is: env:// (MASTER_ADDR and MASTER_PORT) or tcp://HOST:PORT", Role::per_rank});
  parser.add("--rank", rank, {"this process's rank, where no launcher says it", Role::per_rank});
  parser.add("--world-size", world_size,
             {"number of ranks, where no launcher says it", Role::per_rank});
  parser.add("--local_rank,--local-rank", local_rank,
             {"rank among those of this host, where no launcher says it", Role::per_rank});
  parser.add("--timeout", timeout,
             {"seconds of silence after which a rank counts as lost", Role::per_rank},
             {0.1, 86400});
  parser.add_output(
      "--flight", flight,
      {"keep each rank's last 64 collectives in this file, for ./lockstep show", Role::report},
      Output::file_of_each_rank);
  parser.check_afterwards([this, &parser] {
    check_backend_name(group_options().backend);
    for (const auto& [name, value] :
         {std::pair("--rank", rank), {"--world-size", world_size}, {"--local-rank", local_rank}}) {
      require(value >= 0 || !parser.given(name), "{}: found {}, expected 0 or more", name, value);
    }
    // What is wrong with these is wrong on all ranks: said once.
    debug_from_environment();
    if (started_as_rank()) read_job_key();
    require(!parser.given("--baseline") || !started_as_rank(),
            "--baseline: compares whole runs, and this process is one rank of a run; start it "
            "without a launcher");
  });
}

bool RankOptions::started_as_rank() const {
  return read_launch_contract({.variable = [](const char* name) { return std::getenv(name); },
                               .init_method = init_method,
                               .rank = if_given(rank),
                               .world_size = if_given(world_size),
                               .local_rank = if_given(local_rank),
                               .program = typed_command_line()})
      .has_value();
}

ProcessGroupOptions RankOptions::group_options() const {
  return {.backend = backend == Backend::automatic ? "" : name_of(backend),
          .init_method = init_method,
          .rank = if_given(rank),
          .world_size = if_given(world_size),
          .local_rank = if_given(local_rank),
          .timeout_seconds = timeout,
          .flight_file = flight,
          .simulated = simulated,
          .place_of = place_of,
          .program = typed_command_line()};
}

}  // namespace lockstep
