#pragma once
// The labs of this stage (labs.cpp), each with its mistake or, `fixed`, without it.

#include <cstdint>

#include "common/comm/process_group.h"

namespace lockstep {

constexpr int64_t kLabBatch = 64;  // of all ranks together

// batch_norm_labs.cpp
void plain_batch_norm(ProcessGroup& group, bool fixed);
void averaged_variances(ProcessGroup& group, bool fixed);
void sum_of_squares(ProcessGroup& group, bool fixed);

// saving_labs.cpp
void all_ranks_save(ProcessGroup& group, bool fixed);
void no_barrier(ProcessGroup& group, bool fixed);

}  // namespace lockstep
