#include "common/comm/group_recorder.h"

#include <utility>

#include "common/core/error.h"

namespace lockstep {

class GroupRecorder::Member final : public Communicator {
 public:
  Member(GroupRecorder& recorder, int rank)
      : Communicator(rank, static_cast<int>(recorder.devices_.size()),
                     recorder.sent_[static_cast<size_t>(rank)]),
        recorder_(recorder) {}

 private:
  void issue(Stream stream, const Call& call) override { recorder_.record(rank(), stream, call); }
  GroupRecorder& recorder_;
};

GroupRecorder::GroupRecorder(const std::vector<Device*>& devices, const std::string& counted_in)
    : devices_(devices), calls_(devices.size()) {
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    sent_.push_back(std::make_shared<SentBytes>(counted_in));
  }
}

std::vector<std::unique_ptr<Communicator>> GroupRecorder::communicators() {
  std::vector<std::unique_ptr<Communicator>> members;
  for (size_t rank = 0; rank < devices_.size(); ++rank) {
    members.push_back(std::make_unique<Member>(*this, static_cast<int>(rank)));
  }
  return members;
}

void GroupRecorder::open() {
  refuse_if_broken();
  require(!open_, "group {} of collectives is still open; close it before the next", group_);
  open_ = true;
  ++group_;
}

void GroupRecorder::abandon() {
  open_ = false;
  for (auto& calls : calls_) calls.clear();
}

void GroupRecorder::record(int rank, Stream stream, const Call& call) {
  refuse_if_broken();
  require(open_, "rank {}: {} outside a CollectiveGroup; the calls of all ranks belong in one",
          rank, call.text());
  require(&stream.device() == devices_[rank], "rank {}: {} on a stream of {}, the rank is on {}",
          rank, call.text(), stream.device().name(), devices_[rank]->name());
  calls_[rank].push_back({rank, stream, call});
}

GroupCalls GroupRecorder::close() {
  GroupCalls calls = std::exchange(calls_, GroupCalls(devices_.size()));
  open_ = false;
  std::vector<std::string> names;
  for (const Device* device : devices_) names.push_back(device->name());
  try {
    compare_calls(calls, group_, names);
  } catch (const PeerLost& error) {
    break_world(error.what());
    throw;
  }
  return calls;
}

std::string GroupRecorder::rank_name(int rank) const {
  return fmt::format("rank {} ({})", rank, devices_[rank]->name());
}

void GroupRecorder::refuse_if_broken() const {
  if (is_broken()) throw PeerLost(broken_);
}

}  // namespace lockstep
