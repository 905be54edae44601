#include "common/comm/watched_transport.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/rendezvous/agreement.h"

namespace lockstep {
namespace {

/// How long the other ranks, and the store, may take to report. Ranks that wait in a collective
/// learn of a failure as soon as the first rank closes its connections.
constexpr double kRollCallSeconds = 0.8;
constexpr const char* kRollCall = "roll call";

/// A call as numbers, which the existing transport can send: its facts, then its label, cut to the
/// letters that fit.
constexpr size_t kFacts = 5, kLabelWords = 4;
using Fingerprint = std::array<int64_t, kFacts + kLabelWords>;

Fingerprint fingerprint_of(const Call& call) {
  Fingerprint print{int64_t(call.op), call.mine.count, int64_t(call.mine.type),
                    int64_t(call.reduction), call.peer};
  const size_t room = kLabelWords * sizeof(int64_t);
  std::memcpy(&print[kFacts], call.label.data(), std::min(call.label.size(), room));
  return print;
}

Call call_of(const Fingerprint& print) {
  std::string label(kLabelWords * sizeof(int64_t), '\0');
  std::memcpy(label.data(), &print[kFacts], label.size());
  return {.op = Call::Op(print[0]),
          .mine = {nullptr, print[1], ElementType(print[2])},
          .all = {},
          .peer = int(print[4]),
          .reduction = Reduction(print[3]),
          .label = label.c_str()};
}

using Answers = std::vector<std::optional<std::string>>;

std::vector<int> silent_ranks(const Answers& answers) {
  std::vector<int> silent;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (!answers[rank]) silent.push_back(static_cast<int>(rank));
  }
  return silent;
}

/// Says where another rank is, if not where this one is.
std::string difference(const Answers& answers, const std::string& doing) {
  const auto other =
      std::find_if(answers.begin(), answers.end(), [&](const auto& it) { return it != doing; });
  if (other == answers.end()) return "all ranks have come";
  return fmt::format("rank {} was at {}; LOCKSTEP_DEBUG=collectives compares the ranks' calls",
                     other - answers.begin(), **other);
}

std::string doing_of(const Call& collective, uint64_t number) {
  return fmt::format("collective {} ({})", number, collective.text());
}

}  // namespace

WatchedTransport::WatchedTransport(std::shared_ptr<HostTransport> transport,
                                   std::shared_ptr<Store> store, double timeout_seconds,
                                   bool compare_calls, std::shared_ptr<const void> kept)
    : description_(transport->description()),
      counted_in_(transport->counted_in()),
      transport_(std::move(transport)),
      store_(std::move(store)),
      timeout_(timeout_seconds),
      compare_calls_(compare_calls),
      kept_(std::move(kept)) {}

void WatchedTransport::run(const Call& collective, uint64_t number) {
  if (compare_calls_) compare(collective, number);
  // Comparisons are collectives, too, with numbers of their own.
  const uint64_t transports_number = compare_calls_ ? 2 * number : number;
  watched([&] { transport_->run(collective, transports_number); },
          [&] { return Doing{doing_of(collective, number)}; });
}

void WatchedTransport::transfer(const std::vector<Call>& calls) {
  watched([&] { transport_->transfer(calls); },
          [&] {
            const size_t more = calls.size() - 1;
            Doing doing{calls[0].text() + (more > 0 ? fmt::format(" and {} more", more) : ""), {}};
            for (const Call& call : calls) doing.peers.insert(call.peer);
            return doing;
          });
}

template <class Work, class Describe>
void WatchedTransport::watched(Work work, Describe describe) {
  if (!broken_.empty()) throw PeerLost(broken_);
  try {
    work();
  } catch (const PeerLost& error) {
    // Closing the connections tells peers that wait for this rank; they must come to the roll call.
    transport_.reset();
    broken_ = explain(describe(), error.what());
    throw PeerLost(broken_);
  }
}

void WatchedTransport::compare(const Call& collective, uint64_t number) {
  Fingerprint mine = fingerprint_of(collective);
  constexpr auto kCount = int64_t{std::tuple_size_v<Fingerprint>};
  const auto ranks = static_cast<size_t>(store_->world_size());
  std::vector<Fingerprint> all(ranks);
  const Call exchange{.op = Call::Op::all_gather,
                      .mine = {mine.data(), kCount, ElementType::i64},
                      .all = {all.data(), kCount * int64_t(ranks), ElementType::i64}};
  watched([&] { transport_->run(exchange, 2 * number - 1); },
          [&] { return Doing{doing_of(collective, number)}; });
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const auto& x) { return x != all[0]; });
  if (other == all.end()) return;
  broken_ = fmt::format(
      "rank 0 called {}, rank {} called {}; all ranks must make the same calls in the same order",
      call_of(all[0]).text(), other - all.begin(), call_of(*other).text());
  throw PeerLost(broken_);
}

/// What all ranks together know about a failure.
std::string WatchedTransport::explain(const Doing& doing, const std::string& reason) {
  try {
    store_->answer_within(kRollCallSeconds);  // rank 0, its host, may be the silent rank
    std::vector<int> absent;
    std::string why = who_went_first(*store_);
    if (why.empty()) why = call_roll(doing, reason, absent);
    give_up(*store_, doing.text + ": " + why, absent);
    return why;
  } catch (const Error& error) {
    return fmt::format("{}; {}", reason, error.what());  // the store, and rank 0 with it, is lost
  }
}

/// Where all ranks seem to be there: who is not, or what the others are doing.
std::string WatchedTransport::call_roll(const Doing& doing, const std::string& reason,
                                        std::vector<int>& absent) {
  Answers answers = store_->meet(kRollCall, doing.text, all_ranks(*store_), kRollCallSeconds).texts;
  const std::string why = who_went_first(*store_);  // while the others were awaited
  if (!why.empty()) return why;
  absent = silent_ranks(answers);
  for (size_t rank = 0; !doing.peers.empty() && rank < answers.size(); ++rank) {
    if (!doing.peers.contains(static_cast<int>(rank))) answers[rank] = doing.text;
  }
  const std::vector<int> silent = silent_ranks(answers);
  if (silent.empty()) return fmt::format("{}; {}", reason, difference(answers, doing.text));
  return fmt::format("no answer from {} within {:g} s", name_ranks(silent), timeout_);
}

}  // namespace lockstep
