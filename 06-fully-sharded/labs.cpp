// Five mistakes in sharing out a network. Run each with the mistake, and without it.
//
//   build/06-fully-sharded/labs stale-parameters
//   build/06-fully-sharded/labs stale-parameters --fixed
//
// Two ranks, unless a launcher starts more.

#include "06-fully-sharded/labs.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  return run_rank_labs(argc, argv,
                       {{"stale-parameters", stale_parameters},
                        {"norm-of-one-shard", norm_of_one_shard},
                        {"summed-for-averaged", summed_for_averaged},
                        {"freed-too-early", freed_too_early},
                        {"all-initialise-in-full", all_initialise_in_full}});
}
