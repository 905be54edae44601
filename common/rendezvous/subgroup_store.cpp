#include "common/rendezvous/subgroup_store.h"

#include <algorithm>
#include <utility>

namespace lockstep {

SubgroupStore::SubgroupStore(std::shared_ptr<Store> job, std::vector<int> members,
                             const std::string& name)
    : job_(std::move(job)),
      members_(std::move(members)),
      prefix_(name + "/"),
      rank_(int(std::ranges::find(members_, job_->rank()) - members_.begin())) {}

void SubgroupStore::set(const std::string& key, const std::string& value) {
  job_->set(prefix_ + key, value);
}

std::string SubgroupStore::get(const std::string& key, double timeout_seconds) {
  return job_->get(prefix_ + key, timeout_seconds);
}

bool SubgroupStore::check(const std::string& key) { return job_->check(prefix_ + key); }

std::vector<int> SubgroupStore::gone() {
  std::vector<int> members;
  for (const int rank : job_->gone()) {
    const auto member = std::ranges::find(members_, rank);
    if (member != members_.end()) members.push_back(int(member - members_.begin()));
  }
  return members;
}

}  // namespace lockstep
