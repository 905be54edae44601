#include "common/group/agreement.h"

#include <algorithm>
#include <array>

#include "common/core/error.h"
#include "common/core/listed.h"
#include "common/sockets/wire.h"

namespace lockstep {

// --- The same on all ranks -----------------------------------------------------------------------

std::string as_text(const NamedValues& facts) {
  std::string text;
  for (const auto& [name, value] : facts) {
    put_text(text, name);
    put_text(text, value);
  }
  return text;
}

namespace {

NamedValues facts_from(const std::string& text) {
  NamedValues facts;
  for (WireReader reader(text); !reader.at_end();) {
    std::string name = reader.text();
    facts.emplace_back(std::move(name), reader.text());
  }
  return facts;
}

std::string value_in(const NamedValues& facts, const std::string& name) {
  const auto found = std::ranges::find(facts, name, &NamedValues::value_type::first);
  return found == facts.end() ? "nothing" : found->second;
}

}  // namespace

void require_same(const std::vector<std::string>& values_of_ranks, const std::string& advice) {
  const NamedValues first = facts_from(values_of_ranks.at(0));
  for (size_t rank = 1; rank < values_of_ranks.size(); ++rank) {
    if (values_of_ranks[rank] == values_of_ranks[0]) continue;
    const NamedValues other = facts_from(values_of_ranks[rank]);
    for (const NamedValues* names : {&first, &other}) {
      for (const auto& [name, value] : *names) {
        const std::string here = value_in(first, name), there = value_in(other, name);
        require(here == there, "{}: rank 0 has {}, rank {} has {}; {}", name, here, rank, there,
                advice);
      }
    }
  }
}

void require_same(const ExchangeTexts& exchange, const NamedValues& mine,
                  const std::string& advice) {
  require_same(exchange(as_text(mine)), advice);
}

// --- An error's way from one rank to all ---------------------------------------------------------

namespace {

template <class Kind>
bool is(const std::exception& error) {
  return dynamic_cast<const Kind*>(&error) != nullptr;
}
bool is_any(const std::exception&) { return true; }

template <class Kind>
std::exception_ptr made(const std::string& text) {
  return std::make_exception_ptr(Kind(text));
}

struct ErrorKind {
  const char* name;
  bool (*matches)(const std::exception&);
  std::exception_ptr (*make)(const std::string& text);
  int exit_status;
};

/// The last one is also used for every exception that is not ours.
constexpr std::array kErrorKinds = {
    ErrorKind{"BadInput", is<BadInput>, made<BadInput>, 1},
    ErrorKind{"NonFinite", is<NonFinite>, made<NonFinite>, 1},
    ErrorKind{"OpenTask", is<OpenTask>, made<OpenTask>, 1},
    ErrorKind{"DeviceError", is<DeviceError>, made<DeviceError>, 2},
    ErrorKind{"PeerLost", is<PeerLost>, made<PeerLost>, 2},
    ErrorKind{"EnvironmentError", is_any, made<EnvironmentError>, 1}};

/// Of an error, in bytes: it may quote a file of any size, and the store takes a MiB of a rank.
constexpr size_t kLongestText = size_t{16} << 10;

const ErrorKind& kind_called(const std::string& name) {
  const auto found = std::ranges::find(kErrorKinds, name, &ErrorKind::name);
  return found == kErrorKinds.end() ? kErrorKinds.back() : *found;
}

}  // namespace

RankOutcome RankOutcome::of(const std::function<std::string()>& work) {
  RankOutcome outcome;
  try {
    outcome.text_ = work();
  } catch (const std::exception& error) {
    const auto matches = [&](const ErrorKind& kind) { return kind.matches(error); };
    const ErrorKind& kind = *std::ranges::find_if(kErrorKinds, matches);
    outcome.kind_ = kind.name;
    outcome.text_ = error.what();
    outcome.thrown_ = std::current_exception();
    if (outcome.text_.size() <= kLongestText) return outcome;
    outcome.text_ = shortened(outcome.text_, kLongestText);
    outcome.thrown_ = kind.make(outcome.text_);
  }
  return outcome;
}

std::string RankOutcome::as_text() const {
  std::string text;
  put_text(text, kind_);
  return text + text_;
}

RankOutcome RankOutcome::from(const std::string& text) {
  RankOutcome outcome;
  outcome.kind_ = WireReader(text).text();
  outcome.text_ = text.substr(4 + outcome.kind_.size());
  return outcome;
}

int RankOutcome::exit_status() const { return failed() ? kind_called(kind_).exit_status : 0; }

void RankOutcome::throw_error() const { std::rethrow_exception(kind_called(kind_).make(text_)); }

std::string on_rank_0(int rank, const ExchangeTexts& exchange,
                      const std::function<std::string()>& work) {
  const std::string mine = rank == 0 ? RankOutcome::of(work).as_text() : "";
  const RankOutcome outcome = RankOutcome::from(exchange(mine).at(0));
  if (outcome.failed()) outcome.throw_error();
  return outcome.text();
}

std::vector<std::string> on_all_ranks(const ExchangeTexts& exchange,
                                      const std::function<std::string()>& work) {
  std::vector<std::string> texts = exchange(RankOutcome::of(work).as_text());
  for (std::string& text : texts) {
    const RankOutcome outcome = RankOutcome::from(text);
    if (outcome.failed()) outcome.throw_error();
    text = outcome.text();
  }
  return texts;
}

}  // namespace lockstep
