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

/// Where the ranks that stand for their kinds leave texts for each other.
class KindsMeeting {
 public:
  /// Another number for each thread that asks, from 0 on: the kind for which it stands.
  int take_kind();
  /// As Store::meet(), of kinds instead of ranks. Texts are forgotten once all kinds in `awaited`
  /// have seen them.
  std::map<int, std::string> meet(const std::string& name, int kind,
                                  const std::optional<std::string>& mine,
                                  const std::vector<int>& awaited, double timeout_seconds);

 private:
  struct Left {
    std::map<int, std::string> texts;  // by kind
    size_t seen = 0;                   // by so many kinds
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
  /// Of how many ranks there are of each kind.
  int alike() const { return world_size / kinds; }
  bool are_alike(const std::vector<int>& ranks) const;
};

/// The store of the rank that stands for a kind: it answers as if all ranks had come, and left what
/// the first one of their kind leaves.
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
