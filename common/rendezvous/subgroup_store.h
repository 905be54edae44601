#pragma once
// A job's store as some of its ranks see it.

#include <memory>

#include "common/rendezvous/store.h"

namespace lockstep {

/// The members have numbers from 0 on here, in the order given, and keys of their own, so that they
/// can do all that a whole job's ranks do. Mirrors torch.distributed.PrefixStore.
class SubgroupStore final : public Store {
 public:
  /// `members`: ranks of `job`, rising, this process's own among them. `name` is new for each group
  /// of the job, and the same on all members.
  SubgroupStore(std::shared_ptr<Store> job, std::vector<int> members, const std::string& name);

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(members_.size()); }
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, double timeout_seconds) override;
  bool check(const std::string& key) override;
  std::vector<int> gone() override;
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
