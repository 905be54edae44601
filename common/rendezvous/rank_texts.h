#pragma once
// Ranks exchange short texts through the store: the slow way, for what has to work before they are
// connected, and when their connections have failed.

#include <optional>
#include <string>
#include <vector>

#include "common/rendezvous/store.h"

namespace lockstep {

/// All ranks' texts by rank, each left in the store under `name`; nullopt for a rank that did not
/// come within `timeout_seconds`, or that left no text before it or another rank died. `name` is
/// the same on all ranks and new each time. Throws BadInput for mistakes that concern the whole
/// job.
std::vector<std::optional<std::string>> exchange_texts_of_present(Store& store,
                                                                  const std::string& name,
                                                                  const std::string& mine,
                                                                  double timeout_seconds);

/// The same where no rank may be missing. Throws PeerLost: "barrier 2: ranks 1, 3 did not come
/// within 5 s", "barrier 2: rank 3 closed the connection".
std::vector<std::string> exchange_texts(Store& store, const std::string& name,
                                        const std::string& mine, double timeout_seconds);

/// The text that this rank has left under `name`; nullopt if it has not yet.
std::optional<std::string> text_left(Store& store, const std::string& name, int rank);

/// The end of the first rank that left, since others may have left because of it: "rank 3 closed
/// the connection", "rank 3 gave up: " with its last words. Empty if all are there.
std::string who_went_first(Store& store);
/// Leaves the reason for which this rank is about to give up.
void leave_last_words(Store& store, const std::string& why);

/// How long rank 0 waits for the ranks that have not yet read them.
constexpr double kLastWordsSeconds = 1;

/// For the end, good or bad. Rank 0's process hosts the store, so rank 0 returns when all others
/// but `missing` have called this, too, or are gone, or after `timeout_seconds`, with the ranks
/// that did neither; the others return at once. Throws nothing.
std::vector<int> let_host_go_last(Store& store, const std::string& name, double timeout_seconds,
                                  const std::vector<int>& missing = {}) noexcept;

/// Returns when that rank, or the store, is gone, or after `timeout_seconds`. Throws nothing.
void wait_until_gone(Store& store, int rank, double timeout_seconds) noexcept;

/// Where another rank reaches this one: at this rank's end of its connection to the store. A
/// loopback address there is of no use to other hosts; but then this is rank 0's host, and
/// `addresses_of_host` (of rank 0's host, as each rank reaches it) may contain a better one.
std::string reachable_host(const std::string& own,
                           const std::vector<std::string>& addresses_of_host);

}  // namespace lockstep
