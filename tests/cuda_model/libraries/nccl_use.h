#pragma once
// NCCL's rules about who may use a communicator, and until when.

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "libraries/nccl_clique.h"

namespace cuda_model::nccl {

/// Lives as long as a call on a communicator lasts. Ends the process where NCCL would use freed
/// memory: a communicator is gone after ncclCommAbort or ncclCommDestroy, which wait for NCCL's own
/// threads and for the GPU, but not for another thread that is in a call on it. So only one thread
/// may be in one at a time ("Thread Safety" in NCCL's user guide), also in one that blocks.
class Use {
 public:
  Use(const char* function, std::shared_ptr<Member> member) : member_(std::move(member)) {
    const std::lock_guard lock(mutex());
    const std::string call = std::string("NCCL: ") + function;
    if (member_->gone) die(call + " on a communicator that was aborted or destroyed");
    if (member_->calls > 0 && member_->caller != std::this_thread::get_id()) {
      die(call + " while another thread is in " + member_->function + " on this communicator");
    }
    if (member_->calls++ > 0) return;  // NCCL's calls that use each other
    member_->caller = std::this_thread::get_id();
    member_->function = function;
  }
  ~Use() {
    const std::lock_guard lock(mutex());
    --member_->calls;
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  /// The communicator's memory is freed.
  void end() const {
    const std::lock_guard lock(mutex());
    member_->gone = true;
  }

 private:
  static std::mutex& mutex() {
    static std::mutex of_all;
    return of_all;
  }
  std::shared_ptr<Member> member_;
};

}  // namespace cuda_model::nccl
