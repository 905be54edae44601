// Gloo in a build without it.

#include "common/comm/gloo_transport.h"
#include "common/core/error.h"

namespace lockstep {
namespace {
constexpr const char* kReason = "this build has no Gloo";
}

std::string gloo_availability() { return kReason; }

std::shared_ptr<HostTransport> connect_gloo(int, int, const RendezvousStore&, const std::string&,
                                            double) {
  fail<EnvironmentError>("{}; configure it where Gloo is, or give --backend tcp", kReason);
}

}  // namespace lockstep
