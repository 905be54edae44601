// Five mistakes in synchronising batch normalisation and in saving. Run each with the mistake, and
// without it.
//
//   build/05-syncbn-checkpoint/labs plain-batch-norm
//   build/05-syncbn-checkpoint/labs plain-batch-norm --fixed
//
// Two ranks, unless a launcher starts more.

#include "05-syncbn-checkpoint/labs.h"

#include "common/training/lab.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  return run_rank_labs(argc, argv,
                       {{"plain-batch-norm", plain_batch_norm},
                        {"averaged-variances", averaged_variances},
                        {"sum-of-squares", sum_of_squares},
                        {"all-ranks-save", all_ranks_save},
                        {"no-barrier", no_barrier}});
}
