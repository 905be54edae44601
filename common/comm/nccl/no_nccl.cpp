// NCCL in a build without it.

#include "common/comm/nccl/nccl.h"
#include "common/core/error.h"

namespace lockstep {
namespace {
constexpr const char* kReason = "this build has no NCCL";
}

std::string nccl_availability() { return kReason; }

std::unique_ptr<LocalWorld> make_nccl_world(const std::vector<Device*>&, double) {
  fail<EnvironmentError>("{}; configure it where NCCL is, or use one GPU", kReason);
}

}  // namespace lockstep
