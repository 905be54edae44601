#include "common/rendezvous/store.h"

#include <algorithm>
#include <utility>

namespace lockstep {

SubgroupStore::SubgroupStore(std::shared_ptr<Store> job, std::vector<int> members,
                             const std::string& name)
    : job_(std::move(job)),
      members_(std::move(members)),
      prefix_(name + "/"),
      rank_(int(std::ranges::find(members_, job_->rank()) - members_.begin())) {}

Meeting SubgroupStore::meet(const std::string& name, const std::optional<std::string>& mine,
                            const std::vector<int>& awaited, double timeout_seconds) {
  std::vector<int> in_job;
  for (const int member : awaited) in_job.push_back(members_.at(size_t(member)));
  const Meeting all = job_->meet(prefix_ + name, mine, in_job, timeout_seconds);
  Meeting meeting;
  for (const int rank : members_) meeting.texts.push_back(all.texts.at(size_t(rank)));
  for (const int rank : all.gone) {
    const auto member = std::ranges::find(members_, rank);
    if (member != members_.end()) meeting.gone.push_back(int(member - members_.begin()));
  }
  return meeting;
}

void SubgroupStore::set(const std::string& key, const std::string& value) {
  job_->set(prefix_ + key, value);
}

std::string SubgroupStore::get(const std::string& key, double timeout_seconds) {
  return job_->get(prefix_ + key, timeout_seconds);
}

}  // namespace lockstep
