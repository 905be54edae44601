#pragma once
// Ranks that are simulated (kernels/sim/). Some are alike: they make the same calls at the same
// moments, so one of them stands for all of its kind. Ranks of other kinds are threads of the same
// process.

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/rendezvous/store.h"

namespace lockstep {

/// The place where the ranks that stand for their kinds leave texts for each other.
class KindsMeeting {
 public:
  /// Returns the kind for which the calling thread stands: 0, 1, 2, ..., a new number at each call.
  int take_kind();
  /// Like Store::meet(), with kinds instead of ranks. Texts are forgotten once all kinds in
  /// `awaited` have seen them.
  std::map<int, std::string> meet(const std::string& name, int kind,
                                  const std::optional<std::string>& mine,
                                  const std::vector<int>& awaited, double timeout_seconds);

 private:
  struct Left {
    std::map<int, std::string> texts;  // by kind
    size_t seen = 0;                   // how many kinds have seen the texts
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Left> left_;  // by name
  int taken_ = 0;
};

/// How many ranks there are, and how many of them share a host. Rank r is of kind r / apart %
/// kinds; the first rank of each kind stands for it.
struct SimulatedRanks {
  int world_size = 1, per_host = 1;
  int kinds = 1, apart = 1;
  std::shared_ptr<KindsMeeting> meeting = std::make_shared<KindsMeeting>();

  int kind_of(int rank) const { return rank / apart % kinds; }
  int first_of(int kind) const { return kind * apart; }
  /// The number of ranks of each kind.
  int alike() const { return world_size / kinds; }
  bool are_alike(const std::vector<int>& ranks) const;
};

/// The store of the rank that stands for a kind. Answers as if all ranks had come, and each had
/// left the text that the first rank of its kind leaves.
class LikeRanksStore final : public Store {
 public:
  LikeRanksStore(SimulatedRanks ranks, int rank) : ranks_(std::move(ranks)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return ranks_.world_size; }
  Meeting meet(const std::string& name, const std::optional<std::string>& mine,
               const std::vector<int>& awaited, double timeout_seconds) override;
  void set(const std::string& key, const std::string& value) override { values_[key] = value; }
  std::string get(const std::string& key, double) override { return values_.at(key); }
  const JobKey& key() const override { return key_; }
  void answer_within(double) override {}
  Address local_address() const override { return {}; }
  Address host_address() const override { return {}; }
  bool is_host(int rank) const override { return rank == 0; }

 private:
  SimulatedRanks ranks_;
  int rank_;
  std::map<std::string, std::string> values_;
  JobKey key_;
};

}  // namespace lockstep
