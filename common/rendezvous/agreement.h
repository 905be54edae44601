#pragma once
// How ranks agree, through the store: before they are connected, and when their connections have
// failed. There are three verbs. Ranks exchange() texts; they do work together(), which fails on
// all if it fails on one; and they require_same() values. All ranks make the same calls in the same
// order.

#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/rendezvous/store.h"

namespace lockstep {

/// All ranks' texts by rank, each left in the store under `name`, which is the same on all ranks
/// and new each time. Throws PeerLost: "barrier 2: ranks 1, 3 did not come within 5 s", "barrier 2:
/// rank 3 closed the connection".
std::vector<std::string> exchange(Store& store, const std::string& name, const std::string& mine,
                                  double timeout_seconds);

/// The same for code that does not know the store: takes this rank's text.
using ExchangeTexts = std::function<std::vector<std::string>(const std::string& mine)>;

/// Each rank does its `work`. Every rank gets the texts that it returned, by rank, or throws an
/// error of the same kind and with the same text as the work did on the first rank on which it
/// failed (an EnvironmentError for an exception that is not an Error). No rank returns before all
/// have done it.
std::vector<std::string> together(const ExchangeTexts& exchange,
                                  const std::function<std::string()>& work);

/// What together() knows when all have done their work.
struct Outcomes {
  std::vector<std::string> results{};  // by rank
  int failed = -1;                     // the first rank on which the work failed
  std::exception_ptr error{};          // of that rank, as all ranks throw it
  std::exception_ptr thrown{};         // what was thrown on this rank
};
Outcomes outcomes(const ExchangeTexts& exchange, const std::function<std::string()>& work);
/// Whether a text that a rank leaves there says that its work failed.
bool is_failure(const std::string& outcome);

/// Names, no two alike, each with its value in readable form.
using NamedValues = std::vector<std::pair<std::string, std::string>>;

/// Throws BadInput, on all ranks, for the first value that is not the same on every rank:
/// "momentum: rank 0 has 0.9, rank 2 has 0; start all ranks with the same options". `advice` comes
/// last. A value that a rank does not have counts as "nothing".
void require_same(const ExchangeTexts& exchange, const NamedValues& mine,
                  const std::string& advice);
/// The two halves of that: the values as a text, and the comparison of all ranks' texts.
std::string as_text(const NamedValues& values);
void require_same(const std::vector<std::string>& values_of_ranks, const std::string& advice);

// --- Ranks that go -------------------------------------------------------------------------------

/// All ranks of a store.
std::vector<int> all_ranks(const Store& store);

/// What has been left under `name` so far; waits for nobody.
Meeting look(Store& store, const std::string& name);

/// The end of the first rank that left, since others may have left because of it: "rank 3 closed
/// the connection", "rank 3 gave up: " with its last words. Where all of a group are there, the
/// first of the job's others that died: members may have lost it in another group. Else empty.
std::string who_went_first(Store& store);

/// What ranks leave at their good end.
constexpr const char* kGoodbye = "goodbye";

/// The end of a rank, good or bad: leaves a text under `name`. The store ends with the process that
/// hosts it, so that rank returns when the others but `missing` have called this, too, or are gone,
/// or after `timeout_seconds`; the others return at once. Throws nothing.
void take_leave(Store& store, const std::string& name, const std::string& text,
                double timeout_seconds, const std::vector<int>& missing = {}) noexcept;

/// The same for a rank that gives up: `why` are its last words.
void give_up(Store& store, const std::string& why, const std::vector<int>& missing) noexcept;

/// Returns when that rank, or the store, is gone, or after `timeout_seconds`. Throws nothing.
void wait_until_gone(Store& store, int rank, double timeout_seconds) noexcept;

}  // namespace lockstep
