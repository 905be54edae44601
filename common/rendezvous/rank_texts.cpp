#include "common/rendezvous/rank_texts.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/core/error.h"
#include "common/rendezvous/rank_names.h"
#include "common/sockets/deadline.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kPoll{2};
constexpr const char* kLastWords = "last words";

std::string key_of(const std::string& name, int rank) { return fmt::format("{}/{}", name, rank); }

}  // namespace

std::vector<std::optional<std::string>> exchange_texts_of_present(Store& store,
                                                                  const std::string& name,
                                                                  const std::string& mine,
                                                                  double timeout_seconds) {
  const Deadline deadline(timeout_seconds);
  std::vector<std::optional<std::string>> texts(static_cast<size_t>(store.world_size()));
  store.set(key_of(name, store.rank()), mine);
  for (int rank = 0; rank < store.world_size(); ++rank) {
    try {
      // A text that is there is returned even when no time is left: a late rank does not cost us
      // the others' texts.
      texts[static_cast<size_t>(rank)] = store.get(key_of(name, rank), deadline.seconds_left());
    } catch (const PeerLost&) {
      // Then this rank has no text.
    }
  }
  return texts;
}

std::vector<std::string> exchange_texts(Store& store, const std::string& name,
                                        const std::string& mine, double timeout_seconds) {
  std::vector<std::string> texts;
  std::vector<int> missing;
  within(name, [&] {
    for (auto& text : exchange_texts_of_present(store, name, mine, timeout_seconds)) {
      if (!text) missing.push_back(static_cast<int>(texts.size()));
      texts.push_back(std::move(text).value_or(""));
    }
    if (missing.empty()) return;
    std::string why = who_went_first(store);
    if (!why.empty()) missing.clear();  // they may be on their way
    if (why.empty()) {
      why = fmt::format("{} did not come within {:g} s", name_ranks(missing), timeout_seconds);
    }
    leave_last_words(store, name + ": " + why);
    let_host_go_last(store, name + " has failed", kLastWordsSeconds, missing);
    throw PeerLost(why);
  });
  return texts;
}

std::optional<std::string> text_left(Store& store, const std::string& name, int rank) {
  if (!store.check(key_of(name, rank))) return std::nullopt;
  return store.get(key_of(name, rank), 0);
}

std::string who_went_first(Store& store) {
  const std::vector<int> gone = store.gone();
  if (gone.empty()) return "";
  const std::string last_words = key_of(kLastWords, gone.front());
  if (!store.check(last_words)) return fmt::format("rank {} closed the connection", gone.front());
  return fmt::format("rank {} gave up: {}", gone.front(), store.get(last_words, 0));
}

void leave_last_words(Store& store, const std::string& why) {
  store.set(key_of(kLastWords, store.rank()), why);
}

std::vector<int> let_host_go_last(Store& store, const std::string& name, double timeout_seconds,
                                  const std::vector<int>& missing) noexcept {
  const Deadline deadline(timeout_seconds);
  std::vector<int> silent;
  const auto waits_for = [&](int rank) {
    const std::vector<int> gone = store.gone();
    return std::ranges::count(missing, rank) == 0 && std::ranges::count(gone, rank) == 0 &&
           !store.check(key_of(name, rank));
  };
  try {
    if (store.rank() != 0) store.set(key_of(name, store.rank()), "");
    for (int rank = 1; store.rank() == 0 && rank < store.world_size(); ++rank) {
      // No wait in the store: such a wait ends for all when one rank dies.
      bool waits = false;
      while ((waits = waits_for(rank)) && !deadline.passed()) std::this_thread::sleep_for(kPoll);
      if (waits) silent.push_back(rank);
    }
  } catch (const std::exception&) {
    // Then no rank is left that needs the store, or the store is gone.
  }
  return silent;
}

void wait_until_gone(Store& store, int rank, double timeout_seconds) noexcept {
  const Deadline deadline(timeout_seconds);
  try {
    for (std::vector<int> gone; !deadline.passed() && std::ranges::count(gone, rank) == 0;
         gone = store.gone()) {
      std::this_thread::sleep_for(kPoll);
    }
  } catch (const std::exception&) {
    // The store ended with its rank.
  }
}

std::string reachable_host(const std::string& own,
                           const std::vector<std::string>& addresses_of_host) {
  if (!is_loopback(own)) return own;
  for (const std::string& address : addresses_of_host) {
    if (!is_loopback(address)) return address;
  }
  return own;
}

}  // namespace lockstep
