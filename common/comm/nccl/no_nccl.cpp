// NCCL in a build without it.

#include "common/comm/nccl/nccl.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

constexpr const char* kReason = "this build has no NCCL";

[[noreturn]] void refuse() {
  fail<EnvironmentError>("{}; configure it where NCCL is, or use one GPU", kReason);
}

}  // namespace

std::string nccl_availability() { return kReason; }

std::unique_ptr<SingleProcessWorld> make_nccl_world(const std::vector<Device*>&, double) {
  refuse();
}

std::string nccl_unique_id() { refuse(); }

std::unique_ptr<ProcessCommunicator> make_nccl_rank(Device&, int, int, const std::string&, double) {
  refuse();
}

}  // namespace lockstep
