#include "common/comm/roll_call.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "common/core/error.h"
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
std::string other_place(const Store& store, const Answers& answers, const std::string& doing) {
  const auto other =
      std::find_if(answers.begin(), answers.end(), [&](const auto& it) { return it != doing; });
  if (other == answers.end()) return "all ranks have come";
  return fmt::format("{} was at {}; LOCKSTEP_DEBUG=collectives compares the ranks' calls",
                     store.name_of(int(other - answers.begin())), **other);
}

}  // namespace

std::string RollCall::text_of(const Call& call) const {
  return call.text(call.is_transfer() ? store_->name_of(call.peer) : "");
}

std::string RollCall::difference(HostTransport& transport, const Call& collective,
                                 uint64_t number) const {
  Fingerprint mine = fingerprint_of(collective);
  constexpr auto kCount = int64_t{std::tuple_size_v<Fingerprint>};
  const auto ranks = static_cast<size_t>(store_->world_size());
  std::vector<Fingerprint> all(ranks);
  transport.run({.op = Call::Op::all_gather,
                 .mine = {mine.data(), kCount, ElementType::i64},
                 .all = {all.data(), kCount * int64_t(ranks), ElementType::i64}},
                number);
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const auto& x) { return x != all[0]; });
  if (other == all.end()) return "";
  return fmt::format(
      "{} called {}, {} called {}; all ranks must make the same calls in the same order",
      store_->name_of(0), call_of(all[0]).text(), store_->name_of(int(other - all.begin())),
      call_of(*other).text());
}

std::string RollCall::explain(const std::vector<Call>& calls, uint64_t number,
                              const std::string& reason) const {
  std::string doing = text_of(calls[0]);
  if (!calls[0].is_transfer()) doing = fmt::format("collective {} ({})", number, doing);
  if (calls.size() > 1) doing += fmt::format(" and {} more", calls.size() - 1);
  try {
    store_->answer_within(kRollCallSeconds);  // rank 0, its host, may be the silent rank
    std::vector<int> absent;
    std::string why = who_went_first(*store_);
    if (why.empty()) why = call_roll(calls, doing, reason, absent);
    give_up(*store_, doing + ": " + why, absent);
    return why;
  } catch (const Error& error) {
    return fmt::format("{}; {}", reason, error.what());  // the store, and rank 0 with it, is lost
  }
}

/// Where all ranks seem to be there: who is not, or what the others are doing. A transfer concerns
/// its peers only.
std::string RollCall::call_roll(const std::vector<Call>& calls, const std::string& doing,
                                const std::string& reason, std::vector<int>& absent) const {
  Answers answers = store_->meet(kRollCall, doing, all_ranks(*store_), kRollCallSeconds).texts;
  const std::string why = who_went_first(*store_);  // while the others were awaited
  if (!why.empty()) return why;
  absent = silent_ranks(answers);
  for (size_t rank = 0; calls[0].is_transfer() && rank < answers.size(); ++rank) {
    const auto is_peer = [&](const Call& call) { return call.peer == static_cast<int>(rank); };
    if (std::ranges::none_of(calls, is_peer)) answers[rank] = doing;
  }
  const std::vector<int> silent = silent_ranks(answers);
  if (silent.empty()) return fmt::format("{}; {}", reason, other_place(*store_, answers, doing));
  return fmt::format("no answer from {} within {:g} s", store_->names_of(silent), timeout_);
}

}  // namespace lockstep
