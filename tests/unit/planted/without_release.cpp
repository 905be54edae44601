// Two ranks whose transport was built without a release: ThreadSanitizer must find the race.

#include "common/comm/host_transport.h"
#include "tests/support/rank_threads.h"
#include "tests/support/shm_peers.h"

int main() {
  using namespace lockstep;
  auto peers = testing::shm_peers(2, 20);
  testing::run_ranks(2, [&](int rank) {
    const auto transport = make_shm_transport(std::move(peers[size_t(rank)]));
    std::vector<float> x(1000);
    const Call sum{
        .op = Call::Op::all_reduce, .mine = {x.data(), 1000, ElementType::f32}, .all = {}};
    for (uint64_t round = 1; round <= 1000; ++round) transport->run(sum, round);
  });
}
