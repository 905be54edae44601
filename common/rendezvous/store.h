#pragma once
// The store of a group of ranks: what they tell each other before anything else connects them, and
// when their connections have failed.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/rendezvous/address.h"
#include "common/rendezvous/job_key.h"

namespace lockstep {

/// What ranks have left under one name.
struct Meeting {
  std::vector<std::optional<std::string>> texts{};  // by rank; none of a rank that did not come
  std::vector<int> gone{};  // who died or took its leave, in the order in which they did
};

/// Mirrors torch.distributed.Store, and adds what ranks mostly want of it: to meet.
class Store {
 public:
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// This process's place in the group.
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// Leaves `mine` under `name`, if there is any, and returns all that is there: when the texts of
  /// all `awaited` ranks are, when one of those is gone, or after `timeout_seconds`. Nobody asks
  /// again and again: the store answers by itself, and the rank that hosts it last, when the
  /// others' answers are on their way. Throws PeerLost where the store is gone, BadInput for
  /// mistakes that concern the whole job.
  virtual Meeting meet(const std::string& name, const std::optional<std::string>& mine,
                       const std::vector<int>& awaited, double timeout_seconds) = 0;

  /// At most kLargestValue bytes.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// The value of a key, once it has one. Throws PeerLost after `timeout_seconds`, and at once if a
  /// rank has died and the key has no value: "rank 2 left without a word".
  virtual std::string get(const std::string& key, double timeout_seconds) = 0;

  /// The job's, with which its ranks know each other again wherever they meet.
  virtual const JobKey& key() const = 0;
  /// From now on calls that wait for nothing are answered within that many seconds, or the store is
  /// lost: for ranks that have waited long enough.
  virtual void answer_within(double seconds) = 0;
  /// This rank's own end of the connection: where others reach its host.
  virtual Address local_address() const = 0;
  /// The other end, as this rank reaches it: where the rank that hosts the store is.
  virtual Address host_address() const = 0;
  /// Whether that rank of the group hosts the store.
  virtual bool is_host(int rank) const = 0;

 protected:
  Store() = default;
};

/// A job's store as some of its ranks see it: they have numbers from 0 on here, in the order given,
/// and names of their own, so that they can do all that a whole job's ranks do. Mirrors
/// torch.distributed.PrefixStore.
class SubgroupStore final : public Store {
 public:
  /// `members`: ranks of `job`, rising, this process's own among them. `name` is new for each group
  /// of the job, and the same on all members.
  SubgroupStore(std::shared_ptr<Store> job, std::vector<int> members, const std::string& name);

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(members_.size()); }
  Meeting meet(const std::string& name, const std::optional<std::string>& mine,
               const std::vector<int>& awaited, double timeout_seconds) override;
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, double timeout_seconds) override;
  const JobKey& key() const override { return job_->key(); }
  void answer_within(double seconds) override { job_->answer_within(seconds); }
  Address local_address() const override { return job_->local_address(); }
  Address host_address() const override { return job_->host_address(); }
  bool is_host(int rank) const override { return job_->is_host(members_.at(size_t(rank))); }

 private:
  std::shared_ptr<Store> job_;
  std::vector<int> members_;
  std::string prefix_;
  int rank_;
};

}  // namespace lockstep
