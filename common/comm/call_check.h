#pragma once
// Do the ranks' calls fit together? Checked on the host, before any of them is enqueued: a
// collective whose ranks disagree would hang, or mix up memory.

#include <string>
#include <vector>

#include "common/comm/communicator.h"

namespace lockstep {

/// A call as a rank issued it in an open group.
struct IssuedCall {
  Stream stream;
  Call call;
};

/// calls[r] are those of rank r, in its order. `group` is the number of the group, `names` those of
/// the ranks' devices, for the text. Throws PeerLost naming the ranks, what each of them called,
/// and where: collectives must be the same on all ranks, and every send must meet its receive.
void compare_calls(const std::vector<std::vector<IssuedCall>>& calls, int64_t group,
                   const std::vector<std::string>& names);

/// The number of the call of `receiver` that takes what call number `send` of rank `sender` sends:
/// the n-th send of a pair of ranks meets the n-th receive. Only after compare_calls().
size_t matching_receive(const std::vector<std::vector<IssuedCall>>& calls, int sender, size_t send);

}  // namespace lockstep
