// Hidden cases of stage 04: all but the ring.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage04_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

TEST_CASE("Buckets of other gradients", "[hidden04.2]") {
  Hidden hidden("04.2");
  for (int time = 0; time < 12; ++time) {
    Sizes bytes;
    for (int64_t i = hidden.whole(0, 12); i > 0; --i) bytes.push_back(hidden.whole(0, 30));
    const BucketCaps caps{.first_bytes = hidden.whole(0, 40), .bytes = hidden.whole(0, 60)};
    const std::string which =
        fmt::format("gradients of {} bytes, caps of {} and {}: ", fmt::join(bytes, " "),
                    caps.first_bytes, caps.bytes);
    const std::vector<Bucket> buckets = make_buckets(bytes, caps);
    hidden.tell(which + "bytes", bytes_of(buckets));
    for (const Bucket& bucket : buckets) hidden.tell(which + "a bucket", bucket.parameters);
  }
}

TEST_CASE("Backward in other orders", "[hidden04.3]") {
  Hidden hidden("04.3");
  for (int time = 0; time < 6; ++time) {
    const std::string order =
        hidden.one_of<std::string>({"abc", "acb", "bac", "bca", "cab", "cba"});
    const double cap = hidden.one_of<double>({0, 3.0 * sizeof(Real) / (1 << 20), 1});
    BackwardPass pass(cap, order);
    pass.run();
    const std::string which = fmt::format("order {}, buckets of {} MB: ", order, cap);
    for (const std::string& seen : pass.seen) hidden.tell(which + "reduced so far", seen);
    hidden.tell(which + "reduced", pass.reduced());
    hidden.tell(which + "gradients", pass.gradients());
  }
}

TEST_CASE("Other samples, dealt to other ranks", "[hidden04.4]") {
  Hidden hidden("04.4");
  for (int time = 0; time < 10; ++time) {
    const int64_t samples = hidden.whole(0, 40);
    const int ranks = hidden.whole(1, 7);
    const bool drop_last = hidden.coin(), shuffle = hidden.coin();
    const std::string which = fmt::format("{} samples, {} ranks, drop_last {}, shuffle {}", samples,
                                          ranks, drop_last, shuffle);
    for (const Samples& mine : dealt(samples, ranks, drop_last, shuffle)) hidden.tell(which, mine);
  }
}

TEST_CASE("Weights in other batches", "[hidden04.5]") {
  Hidden hidden("04.5");
  for (int time = 0; time < 10; ++time) {
    HostBatch batch;
    batch.size = hidden.whole(1, 20);
    batch.global_size = batch.size + hidden.whole(0, 60);
    const int ranks = hidden.whole(1, 8);
    hidden.tell(fmt::format("{} of {} samples, {} ranks", batch.size, batch.global_size, ranks),
                loss_weight(batch, ranks));
  }
}

}  // namespace
}  // namespace lockstep
