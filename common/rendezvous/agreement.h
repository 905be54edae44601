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

/// Leaves `mine` in the store, and returns all ranks' texts, by rank. `name` is the same on all
/// ranks, and new each time. Throws PeerLost: "barrier 2: ranks 1, 3 did not come within 5 s",
/// "barrier 2: rank 3 closed the connection".
std::vector<std::string> exchange(Store& store, const std::string& name, const std::string& mine,
                                  double timeout_seconds);

/// exchange() for code that does not know the store: takes only this rank's text.
using ExchangeTexts = std::function<std::vector<std::string>(const std::string& mine)>;

/// Does this rank's `work`, and waits until all ranks have done theirs. Returns the texts of all
/// ranks' work, by rank. If the work failed on any rank, all ranks throw instead. Their error has
/// the kind and the text of the error on the first rank that failed. The kind is EnvironmentError
/// for an exception that is not an Error.
std::vector<std::string> together(const ExchangeTexts& exchange,
                                  const std::function<std::string()>& work);

/// The facts that together() knows when all ranks have done their work.
struct Outcomes {
  std::vector<std::string> results{};  // by rank
  int failed = -1;                     // the first rank on which the work failed
  std::exception_ptr error{};          // of that rank, as all ranks throw it
  std::exception_ptr thrown{};         // what was thrown on this rank
};
Outcomes outcomes(const ExchangeTexts& exchange, const std::function<std::string()>& work);
/// Whether a text that a rank leaves in this exchange says that its work failed.
bool is_failure(const std::string& outcome);

/// Names, all different, each with its value in readable form.
using NamedValues = std::vector<std::pair<std::string, std::string>>;

/// Throws BadInput, on all ranks, for the first value that is not the same on every rank. Example:
/// "momentum: rank 0 has 0.9, rank 2 has 0; start all ranks with the same options". `advice` comes
/// last. A value that a rank does not have counts as "nothing".
void require_same(const ExchangeTexts& exchange, const NamedValues& mine,
                  const std::string& advice);
/// The two halves of require_same(): the values as a text, and the comparison of all ranks' texts.
std::string as_text(const NamedValues& values);
void require_same(const std::vector<std::string>& values_of_ranks, const std::string& advice);

// --- Ranks that go -------------------------------------------------------------------------------

/// All ranks of a store.
std::vector<int> all_ranks(const Store& store);

/// Returns the texts that ranks have left under `name` so far. Waits for nobody.
Meeting look(Store& store, const std::string& name);

/// The end of the first rank that left: others may have left because of it. Texts: "rank 3 closed
/// the connection", "rank 3 gave up: " with its last words. If all of a group are there, the end of
/// the first rank of the job that died. Members may have lost it in another group. Else empty.
std::string who_went_first(Store& store);

/// The name under which ranks leave a text at their good end.
constexpr const char* kGoodbye = "goodbye";

/// Ends a rank, well or badly: leaves a text under `name`. The store ends with the process that
/// hosts it. So its rank returns when all others but `missing` have called this function or are
/// gone, or after `timeout_seconds`. The other ranks return at once. Throws nothing.
void take_leave(Store& store, const std::string& name, const std::string& text,
                double timeout_seconds, const std::vector<int>& missing = {}) noexcept;

/// The same for a rank that gives up: `why` are its last words.
void give_up(Store& store, const std::string& why, const std::vector<int>& missing) noexcept;

/// Returns when that rank, or the store, is gone, or after `timeout_seconds`. Throws nothing.
void wait_until_gone(Store& store, int rank, double timeout_seconds) noexcept;

}  // namespace lockstep
