#pragma once
// What a world does between the opening and the closing of a group: it records what the ranks call,
// and passes nothing on that they do not agree on.

#include <memory>
#include <string>
#include <vector>

#include "common/comm/call_check.h"
#include "common/core/device.h"

namespace lockstep {

class GroupRecorder {
 public:
  /// Rank r is on devices[r]. `counted_in`: where the world counts what the ranks send.
  GroupRecorder(const std::vector<Device*>& devices, const std::string& counted_in);

  /// One communicator per rank; they record here.
  std::vector<std::unique_ptr<Communicator>> communicators();

  /// Opens the next group. Throws the error that broke the world, if there was one; BadInput if a
  /// group is open.
  void open();
  /// Forgets the calls of the open group.
  void abandon();
  /// Ends the group and hands its calls out. Throws PeerLost if they differ among the ranks; the
  /// world is then broken.
  GroupCalls close();

  /// What a rank has sent: for the world, which counts it.
  SentBytes& sent(int rank) const { return *sent_[static_cast<size_t>(rank)]; }
  /// The number of the last group, from 1.
  int64_t group() const { return group_; }
  /// "rank 1 (cuda:1)"
  std::string rank_name(int rank) const;

  /// From here on every group is refused with this text.
  void break_world(const std::string& why) { broken_ = why; }
  /// Throws PeerLost if the world is broken.
  void refuse_if_broken() const;
  bool is_broken() const { return !broken_.empty(); }

 private:
  class Member;
  void record(int rank, Stream stream, const Call& call);

  std::vector<Device*> devices_;
  int64_t group_ = 0;
  bool open_ = false;
  std::vector<std::shared_ptr<SentBytes>> sent_;  // by rank
  GroupCalls calls_;                              // of the open group
  std::string broken_;                            // why there can be no further group
};

}  // namespace lockstep
