#pragma once
// Do the ranks' calls fit together? Checked on the host, before any of them is enqueued: a
// collective whose ranks disagree would hang, or mix up memory.

#include <string>
#include <vector>

#include "common/comm/communicator.h"

namespace lockstep {

/// A call as a rank issued it in an open group.
struct IssuedCall {
  int rank;
  Stream stream;
  Call call;
};
/// The calls of a group: [r] are those of rank r, in its order.
using GroupCalls = std::vector<std::vector<IssuedCall>>;

bool is_transfer(const Call& call);
/// What must be the same on all ranks, as one number.
uint64_t number_of(const Call& call);

/// `group` is the number of the group and `names` are the names of the ranks' devices, for the
/// text. Throws PeerLost naming the ranks, what each of them called, and where: collectives must be
/// the same on all ranks, and every send must meet its receive.
void compare_calls(const GroupCalls& calls, int64_t group, const std::vector<std::string>& names);

/// What the ranks do together, in the order in which they called it: each list is one collective,
/// rank by rank, or the transfers between two collectives, which may need each other, every send
/// followed by its receive. The n-th send of a pair of ranks meets the n-th receive; a transfer
/// comes after the collectives that either side called before it. Call compare_calls() first.
std::vector<std::vector<IssuedCall>> in_order(const GroupCalls& calls);

}  // namespace lockstep
