#include "common/rendezvous/agreement.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/wire.h"

namespace lockstep {

// --- Texts ---------------------------------------------------------------------------------------

std::vector<std::string> exchange(Store& store, const std::string& name, const std::string& mine,
                                  double timeout_seconds) {
  std::vector<std::string> texts;
  within(name, [&] {
    std::vector<int> missing;
    for (auto& text : store.meet(name, mine, all_ranks(store), timeout_seconds).texts) {
      if (!text) missing.push_back(static_cast<int>(texts.size()));
      texts.push_back(std::move(text).value_or(""));
    }
    if (missing.empty()) return;
    std::string why = who_went_first(store);
    if (!why.empty()) missing.clear();  // they may be on their way
    if (why.empty()) {
      why = fmt::format("{} did not come within {:g} s", store.names_of(missing), timeout_seconds);
    }
    give_up(store, name + ": " + why, missing);
    throw PeerLost(why);
  });
  return texts;
}

// --- Work ----------------------------------------------------------------------------------------

namespace {

/// A kind of error that goes from one rank to all.
struct ErrorKind {
  bool (*matches)(const std::exception&);
  std::exception_ptr (*make)(const std::string& text);
};

template <class Kind>
constexpr ErrorKind error_kind() {
  return {[](const std::exception& error) { return dynamic_cast<const Kind*>(&error) != nullptr; },
          [](const std::string& text) { return std::make_exception_ptr(Kind(text)); }};
}

/// The last one is also used for every exception that is not ours.
constexpr std::array kErrorKinds = {error_kind<BadInput>(), error_kind<NonFinite>(),
                                    error_kind<OpenTask>(), error_kind<DeviceError>(),
                                    error_kind<PeerLost>(), error_kind<EnvironmentError>()};

/// Of an error, in bytes: it may quote a file of any size, and the store takes a MiB of a rank.
constexpr size_t kLongestText = size_t{16} << 10;

/// How the work of a rank ended, as a text: which of kErrorKinds, or as many where it did not fail,
/// then what it returned, or the error.
std::string outcome_of(const std::function<std::string()>& work, std::exception_ptr& thrown) {
  size_t kind = kErrorKinds.size();
  std::string text;
  try {
    text = work();
  } catch (const std::exception& error) {
    thrown = std::current_exception();
    const auto matches = [&](const ErrorKind& each) { return each.matches(error); };
    kind = size_t(std::ranges::find_if(kErrorKinds, matches) - kErrorKinds.begin());
    kind = std::min(kind, kErrorKinds.size() - 1);
    text = error.what();
    if (text.size() > kLongestText) {
      text = shortened(text, kLongestText);
      thrown = kErrorKinds.at(kind).make(text);
    }
  }
  std::string outcome;
  put_number(outcome, kind, 1);
  return outcome + text;
}

size_t kind_in(const std::string& outcome) { return WireReader(outcome).number(1); }

}  // namespace

Outcomes outcomes(const ExchangeTexts& exchange, const std::function<std::string()>& work) {
  Outcomes all;
  all.results = exchange(outcome_of(work, all.thrown));
  for (size_t rank = 0; rank < all.results.size(); ++rank) {
    std::string& text = all.results[rank];
    const size_t kind = kind_in(text);
    text.erase(0, 1);
    if (kind >= kErrorKinds.size() || all.failed >= 0) continue;
    all.failed = static_cast<int>(rank);
    all.error = kErrorKinds.at(kind).make(text);
  }
  return all;
}

bool is_failure(const std::string& outcome) { return kind_in(outcome) < kErrorKinds.size(); }

std::vector<std::string> together(const ExchangeTexts& exchange,
                                  const std::function<std::string()>& work) {
  Outcomes all = outcomes(exchange, work);
  if (all.failed >= 0) std::rethrow_exception(all.error);
  return std::move(all.results);
}

// --- The same on all ranks -----------------------------------------------------------------------

std::string as_text(const NamedValues& values) {
  std::string text;
  for (const auto& [name, value] : values) {
    put_text(text, name);
    put_text(text, value);
  }
  return text;
}

namespace {

NamedValues values_from(const std::string& text) {
  NamedValues values;
  for (WireReader reader(text); !reader.at_end();) {
    std::string name = reader.text();
    values.emplace_back(std::move(name), reader.text());
  }
  return values;
}

std::string value_in(const NamedValues& values, const std::string& name) {
  const auto found = std::ranges::find(values, name, &NamedValues::value_type::first);
  return found == values.end() ? "nothing" : found->second;
}

}  // namespace

void require_same(const ExchangeTexts& exchange, const NamedValues& mine,
                  const std::string& advice) {
  require_same(exchange(as_text(mine)), advice);
}

void require_same(const std::vector<std::string>& values_of_ranks, const std::string& advice) {
  const NamedValues first = values_from(values_of_ranks.at(0));
  for (size_t rank = 1; rank < values_of_ranks.size(); ++rank) {
    if (values_of_ranks[rank] == values_of_ranks[0]) continue;
    const NamedValues other = values_from(values_of_ranks[rank]);
    for (const NamedValues* names : {&first, &other}) {
      for (const auto& [name, value] : *names) {
        const std::string here = value_in(first, name), there = value_in(other, name);
        require(here == there, "{}: rank 0 has {}, rank {} has {}; {}", name, here, rank, there,
                advice);
      }
    }
  }
}

// --- Ranks that go -------------------------------------------------------------------------------

namespace {

constexpr const char* kLastWords = "last words";
constexpr double kLastWordsSeconds = 1;  // for the ranks that have not yet heard why

/// The first rank that left without a goodbye; empty if there is none.
std::string who_died(Store& store) {
  const auto [texts, gone] = look(store, kGoodbye);
  const auto died = std::ranges::find_if(gone, [&](int rank) { return !texts.at(size_t(rank)); });
  return died == gone.end() ? "" : store.name_of(*died) + " closed the connection";
}

}  // namespace

std::vector<int> all_ranks(const Store& store) {
  std::vector<int> ranks(static_cast<size_t>(store.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Meeting look(Store& store, const std::string& name) { return store.meet(name, {}, {}, 0); }

std::string who_went_first(Store& store) {
  const auto [texts, gone] = look(store, kLastWords);
  if (gone.empty()) return store.job() == nullptr ? "" : who_died(*store.job());
  const std::optional<std::string>& last_words = texts.at(size_t(gone.front()));
  const std::string name = store.name_of(gone.front());
  if (!last_words) return name + " closed the connection";
  return fmt::format("{} gave up: {}", name, *last_words);
}

void take_leave(Store& store, const std::string& name, const std::string& text,
                double timeout_seconds, const std::vector<int>& missing) noexcept {
  const Deadline deadline(timeout_seconds);
  try {
    Meeting met = store.meet(name, text, {}, 0);
    std::vector<int> awaited = store.is_host(store.rank()) ? all_ranks(store) : std::vector<int>{};
    while (true) {
      std::erase_if(awaited, [&](int rank) {
        return met.texts.at(size_t(rank)) || std::ranges::count(met.gone, rank) > 0 ||
               std::ranges::count(missing, rank) > 0;
      });
      if (awaited.empty() || deadline.passed()) return;
      met = store.meet(name, {}, awaited, deadline.seconds_left());
    }
  } catch (const std::exception&) {
    // Then no rank is left that needs the store, or the store is gone.
  }
}

void give_up(Store& store, const std::string& why, const std::vector<int>& missing) noexcept {
  take_leave(store, kLastWords, why, kLastWordsSeconds, missing);
}

void wait_until_gone(Store& store, int rank, double timeout_seconds) noexcept {
  try {
    store.meet("nobody comes here", {}, {rank}, timeout_seconds);
  } catch (const std::exception&) {
    // The store ended with its rank.
  }
}

}  // namespace lockstep
