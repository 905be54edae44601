#pragma once
// Which cores a thread computes on.

#include <vector>

namespace lockstep {

/// By their numbers, in order.
using Cores = std::vector<int>;

/// The cores that the calling thread may use; empty if the machine has more than can be named.
Cores usable_cores();

/// Part number `share` of `shares` equal parts of the cores that the calling thread may use; what
/// does not divide is left over. Empty where a part has fewer cores than `threads`.
Cores share_of_cores(int share, int shares, int threads);

/// The calling thread, and the threads that it starts from now on, keep to these cores. If there
/// are none, everything stays as it is.
void keep_to(const Cores& cores);

}  // namespace lockstep
