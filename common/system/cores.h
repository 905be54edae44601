#pragma once
// Which cores a process computes on.

namespace lockstep {

/// The calling thread, and the threads that it starts from now on, keep to part number `share` of
/// `shares` equal parts of the cores that it may use now. Where a part has fewer cores than
/// `threads`, everything stays as it is.
void bind_to_share_of_cores(int share, int shares, int threads);

}  // namespace lockstep
