#pragma once
// What ranks agree on: a value that must be the same on all, and how the work of one rank ended.

#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// Takes this rank's text and returns all ranks' texts, by rank. All ranks make the same calls.
using ExchangeTexts = std::function<std::vector<std::string>(const std::string& mine)>;

/// Names, no two alike, each with its value in readable form.
using NamedValues = std::vector<std::pair<std::string, std::string>>;

/// All ranks call it. Throws BadInput, on all ranks, for the first fact that is not the same on
/// every rank: "momentum: rank 0 has 0.9, rank 2 has 0; start all ranks with the same options".
/// `advice` comes last. A fact that a rank does not have counts as "nothing".
void require_same(const ExchangeTexts& exchange, const NamedValues& mine,
                  const std::string& advice);

/// The two halves of require_same(), for callers that do something in between: the facts as a text,
/// and the comparison of all ranks' texts.
std::string as_text(const NamedValues& facts);
void require_same(const std::vector<std::string>& values_of_ranks, const std::string& advice);

/// All ranks call it: rank 0 does `work`. Every rank gets the text that the work returned, or
/// throws an error of the same kind and with the same text as the work did (an EnvironmentError for
/// an exception that is not an Error). No rank returns before that.
std::string on_rank_0(int rank, const ExchangeTexts& exchange,
                      const std::function<std::string()>& work);

/// All ranks call it, and each does its `work`. Every rank gets all texts, by rank, or throws the
/// error of the first rank on which the work failed, as in on_rank_0(). No rank returns before all
/// have done it.
std::vector<std::string> on_all_ranks(const ExchangeTexts& exchange,
                                      const std::function<std::string()>& work);

/// How work ended on one rank, and the same as a text for the others.
class RankOutcome {
 public:
  /// Does the work.
  static RankOutcome of(const std::function<std::string()>& work);
  static RankOutcome from(const std::string& text);
  std::string as_text() const;

  bool failed() const { return !kind_.empty(); }
  /// What the work returned, or its error's text.
  const std::string& text() const { return text_; }
  /// The exit status of a program that ends with this error.
  int exit_status() const;
  /// Throws an error of the same kind with the same text.
  [[noreturn]] void throw_error() const;
  /// The exception that was thrown, if that was on this rank.
  const std::exception_ptr& thrown() const { return thrown_; }

 private:
  std::string kind_, text_;  // kind of the error: empty where there is none
  std::exception_ptr thrown_;
};

}  // namespace lockstep
