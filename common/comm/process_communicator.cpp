#include "common/comm/process_communicator.h"

#include <utility>

#include "common/core/error.h"

namespace lockstep {

void ProcessCommunicator::issue(Stream stream, const Call& call) {
  issued_.push_back({rank(), stream, call});
  if (!open_) close_group();
}

void ProcessCommunicator::open_group() {
  require(!open_, "rank {}: a group of calls is open already; close it before", rank());
  open_ = true;
}

void ProcessCommunicator::close_group() {
  open_ = false;
  const std::vector<IssuedCall> issued = std::exchange(issued_, {});
  for (size_t i = 0; i < issued.size();) {
    const Stream stream = issued[i].stream;
    std::vector<Call> together{issued[i].call};
    const auto goes_along = [&](const IssuedCall& next) {
      return is_transfer(together[0]) && is_transfer(next.call) && next.stream == stream;
    };
    for (++i; i < issued.size() && goes_along(issued[i]); ++i) together.push_back(issued[i].call);
    enqueue(stream, together);
  }
}

}  // namespace lockstep
