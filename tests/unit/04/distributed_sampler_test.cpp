// Which samples a rank sees: PyTorch's DistributedSampler, and shards of the global batch.

#include "04-ddp/distributed_sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "04-ddp/shard_loader.h"
#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using Indices = std::vector<int64_t>;

/// The ranks' samples of one epoch.
std::vector<Indices> all_ranks(int64_t n, int world_size, DistributedSampler::Options options,
                               int64_t epoch = 0) {
  std::vector<Indices> found;
  options.world_size = world_size;
  for (options.rank = 0; options.rank < world_size; ++options.rank) {
    DistributedSampler sampler(n, options);
    sampler.set_epoch(epoch);
    found.push_back(sampler.order_of_epoch(0));
    CHECK(std::ssize(found.back()) == sampler.size());
  }
  return found;
}

Indices united(const std::vector<Indices>& ranks) {
  Indices all;
  for (const Indices& rank : ranks) all.insert(all.end(), rank.begin(), rank.end());
  std::sort(all.begin(), all.end());
  return all;
}

Indices counted(int64_t n) {
  Indices all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// --- PyTorch's -----------------------------------------------------------------------------------

TEST_CASE("The sampler deals as PyTorch's does", "[sampler][row92]") {
  using Ranks = std::vector<Indices>;
  CHECK(all_ranks(10, 4, {}) == Ranks{{4, 3, 6}, {1, 9, 2}, {7, 0, 4}, {5, 8, 1}});
  CHECK(all_ranks(10, 4, {.drop_last = true}) == Ranks{{4, 3}, {1, 9}, {7, 0}, {5, 8}});
  CHECK(all_ranks(10, 4, {}, 1) == Ranks{{5, 0, 7}, {6, 8, 4}, {1, 9, 5}, {2, 3, 6}});
  // Seed and epoch are added.
  CHECK(all_ranks(10, 4, {}, 1) == all_ranks(10, 4, {.seed = 1}, 0));
  CHECK(all_ranks(10, 4, {.shuffle = false}) == Ranks{{0, 4, 8}, {1, 5, 9}, {2, 6, 0}, {3, 7, 1}});
}

TEST_CASE("Padded, all samples come; cut, none comes twice", "[sampler][row93]") {
  for (int64_t n = 0; n <= 50; ++n) {
    for (int world_size = 1; world_size <= 9; ++world_size) {
      INFO("N = " << n << ", W = " << world_size);
      for (const bool drop_last : {false, true}) {
        const auto ranks = all_ranks(n, world_size, {.seed = 3, .drop_last = drop_last}, 2);
        // The formula as PyTorch writes it.
        const double w = world_size, samples = double(n);
        const double length =
            std::ceil(drop_last && n % world_size != 0 ? (samples - w) / w : samples / w);
        for (const Indices& rank : ranks) REQUIRE(double(rank.size()) == length);
        Indices all = united(ranks);
        const size_t with_repeats = all.size();
        all.erase(std::unique(all.begin(), all.end()), all.end());
        if (drop_last) {
          REQUIRE(all.size() == with_repeats);
        } else {
          REQUIRE(all == counted(n));
        }
      }
    }
  }
}

TEST_CASE("Fewer samples than ranks are repeated as often as needed", "[sampler][row96]") {
  const auto ranks = all_ranks(3, 8, {.shuffle = false});
  CHECK(united(ranks) == Indices{0, 0, 0, 1, 1, 1, 2, 2});
  for (const Indices& rank : all_ranks(3, 8, {.drop_last = true})) CHECK(rank.empty());
  for (const Indices& rank : all_ranks(0, 2, {})) CHECK(rank.empty());
}

TEST_CASE("A forgotten set_epoch repeats the order, and is told", "[sampler][row94]") {
  std::vector<std::string> warnings;
  const auto warn = [&](const std::string& line) { warnings.push_back(line); };
  DistributedSampler sampler(100, {.rank = 1, .world_size = 2, .warn = warn});
  const Indices first = sampler.order_of_epoch(0);
  CHECK(warnings.empty());
  CHECK(sampler.order_of_epoch(1) == first);  // the loader's number does not count
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(warnings[0], ContainsSubstring("epoch 0") && ContainsSubstring("set_epoch()"));
  sampler.set_epoch(1);
  CHECK(sampler.order_of_epoch(1) != first);
  CHECK(warnings.size() == 1);
  sampler.set_epoch(0);
  CHECK(sampler.order_of_epoch(2) == first);
  CHECK(warnings.size() == 1);
  // Without shuffling there is one order, as it should be.
  DistributedSampler in_order(100, {.shuffle = false, .warn = warn});
  for (int i = 0; i < 2; ++i) in_order.order_of_epoch(0);
  CHECK(warnings.size() == 1);
}

TEST_CASE("Ranks that cannot be are refused", "[sampler][row95]") {
  for (const auto& [rank, world_size] : {std::pair(-1, 2), {2, 2}, {7, 2}, {0, 0}, {0, -1}}) {
    const std::string expected = fmt::format("rank {} of {} ranks", rank, world_size);
    INFO(expected);
    const auto sampler = [&, rank = rank, world_size = world_size] {
      DistributedSampler(10, {.rank = rank, .world_size = world_size});
    };
    const auto shard = [&, rank = rank, world_size = world_size] {
      make_evaluation_shard(10, rank, world_size);
    };
    CHECK_THAT(message_of<BadInput>(sampler), ContainsSubstring(expected));
    CHECK_THAT(message_of<BadInput>(shard), ContainsSubstring(expected));
  }
  DistributedSampler sampler(10, {});
  CHECK_THAT(message_of<BadInput>([&] { sampler.set_epoch(-1); }), ContainsSubstring("epoch -1"));
}

// --- Shards of the global batch ------------------------------------------------------------------

/// Samples of the ranks, batch by batch, from what their loaders would take.
std::vector<std::vector<Indices>> batches(int64_t n, int world_size, int64_t batch_size,
                                          OrderKind kind) {
  std::vector<std::vector<Indices>> found;  // [rank][batch]
  for (int rank = 0; rank < world_size; ++rank) {
    GlobalBatchShard shard(make_order(kind, n, 5), rank, world_size, batch_size);
    const Indices mine = shard.order_of_epoch(1);
    CHECK(std::ssize(mine) == shard.size());
    std::vector<Indices> of_rank;
    int64_t at = 0;
    for (int64_t begin = 0; begin < n; begin += batch_size) {
      const int64_t count = shard.part_of(std::min(batch_size, n - begin));
      of_rank.emplace_back(mine.begin() + at, mine.begin() + at + count);
      at += count;
    }
    CHECK(at == shard.size());
    found.push_back(of_rank);
  }
  return found;
}

TEST_CASE("The ranks' shards together are stage 01's batches", "[sampler]") {
  for (const int64_t n : {7, 12, 23, 24, 50}) {
    for (int world_size = 1; world_size <= 5; ++world_size) {
      for (const int64_t batch_size : {5, 8, 24}) {
        INFO("N = " << n << ", W = " << world_size << ", B = " << batch_size);
        const Indices order = make_order(OrderKind::sampler, n, 5)->order_of_epoch(1);
        const auto ranks = batches(n, world_size, batch_size, OrderKind::sampler);
        for (size_t batch = 0; batch < ranks[0].size(); ++batch) {
          const int64_t begin = static_cast<int64_t>(batch) * batch_size;
          Indices together;  // dealt back: one of each rank in turn
          for (size_t i = 0; i < ranks[0][batch].size(); ++i) {
            for (const auto& rank : ranks) {
              if (i < rank[batch].size()) together.push_back(rank[batch][i]);
            }
          }
          const Indices expected(order.begin() + begin,
                                 order.begin() + std::min(n, begin + batch_size));
          REQUIRE(together == expected);
        }
      }
    }
  }
}

TEST_CASE("Where everything divides, shards are those of PyTorch's sampler", "[sampler]") {
  for (int rank = 0; rank < 4; ++rank) {
    GlobalBatchShard shard(make_order(OrderKind::sampler, 48, 9), rank, 4, 12);
    DistributedSampler sampler(48, {.rank = rank, .world_size = 4, .seed = 9});
    sampler.set_epoch(3);
    CHECK(shard.order_of_epoch(3) == sampler.order_of_epoch(3));
  }
}

TEST_CASE("A global batch that leaves a rank without samples is refused", "[sampler][row96]") {
  const std::string text =
      message_of<BadInput>([] { GlobalBatchShard(make_order(OrderKind::file, 10, 0), 0, 4, 3); });
  CHECK_THAT(text, ContainsSubstring("3 samples for 4 ranks"));
}

// --- Loaders of shards ---------------------------------------------------------------------------

/// Images of one byte, their own number.
Dataset numbered_images(int64_t count) {
  Dataset set;
  set.height = set.width = set.channels = 1;
  set.classes = 10;
  for (int64_t i = 0; i < count; ++i) {
    set.images.push_back(static_cast<uint8_t>(i));
    set.labels.push_back(static_cast<uint8_t>(i % 10));
  }
  return set;
}

/// A rank's part of a global batch.
struct Part {
  Indices samples;
  int64_t index, global_size, first, stride;
  friend bool operator==(const Part&, const Part&) = default;
};

/// What is left of the epoch.
std::vector<Part> parts_of(ShardLoader& loader) {
  std::vector<Part> parts;
  while (const std::optional<HostBatch> batch = loader.next()) {
    parts.push_back(
        {{}, batch->index, batch->global_size, batch->global_first, batch->global_stride});
    for (int64_t i = 0; i < batch->size; ++i) parts.back().samples.push_back(batch->images[i]);
  }
  return parts;
}

/// These samples in parts of `size`, as rank `rank` of four has them of global batches of 4 `size`.
std::vector<Part> cut(const Indices& samples, int64_t size, int rank) {
  std::vector<Part> parts;
  for (int64_t first = 0; first < std::ssize(samples); first += size) {
    const int64_t count = std::min(size, std::ssize(samples) - first);
    parts.push_back({{samples.begin() + first, samples.begin() + first + count},
                     first / size,
                     4 * count,
                     rank,
                     4});
  }
  return parts;
}

/// Rank `rank` of four deals ten samples in the order of PyTorch's sampler, epoch by epoch.
void check_padded(const Dataset& ten, const Options& options, int rank) {
  INFO("rank " << rank << ", order " << name_of(options.order) << ", batches of "
               << options.batch_size << (options.drop_last ? ", drop last" : ""));
  ShardLoader loader(ten, options, allocate_host, rank, 4, Sharding::padded);
  DistributedSampler sampler(10, {.rank = rank,
                                  .world_size = 4,
                                  .shuffle = options.order == OrderKind::sampler,
                                  .seed = static_cast<uint64_t>(options.seed),
                                  .drop_last = options.drop_last});
  for (const int64_t epoch : {0, 1, 3}) {
    loader.begin_epoch(epoch);
    sampler.set_epoch(epoch);
    const std::vector<Part> expected = cut(sampler.order_of_epoch(0), options.batch_size / 4, rank);
    CHECK(loader.batches_per_epoch() == std::ssize(expected));
    CHECK(parts_of(loader) == expected);
  }
}

TEST_CASE("Padded, a loader's epochs are those of PyTorch's sampler, whole batches for all ranks",
          "[sampler][row92]") {
  const Dataset ten = numbered_images(10);
  Options options;
  options.workers = 0;
  for (const int64_t batch_size : {4, 8}) {
    options.batch_size = batch_size;
    for (const bool drop_last : {false, true}) {
      options.drop_last = drop_last;
      for (const OrderKind order : {OrderKind::sampler, OrderKind::file}) {
        options.order = order;
        for (int rank = 0; rank < 4; ++rank) check_padded(ten, options, rank);
      }
    }
  }
}

TEST_CASE("Not padded, a loader's parts are those of stage 01's batches, from any batch on",
          "[sampler]") {
  const Dataset set = numbered_images(10);
  Options options;
  options.batch_size = 8;
  options.workers = 0;
  options.order = OrderKind::sampler;
  for (int rank = 0; rank < 4; ++rank) {
    INFO("rank " << rank);
    ShardLoader loader(set, options, allocate_host, rank, 4, Sharding::global_batch);
    CHECK(loader.batches_per_epoch() == 2);
    for (const int64_t epoch : {0, 1}) {
      const Indices order = make_order(OrderKind::sampler, 10, 1)->order_of_epoch(epoch);
      const auto at = [&](int position) { return order[static_cast<size_t>(position)]; };
      std::vector<Part> expected{{{at(rank), at(rank + 4)}, 0, 8, rank, 4}, {{}, 1, 2, rank, 4}};
      if (rank < 2) expected[1].samples = {at(8 + rank)};  // the others have none of the last two
      loader.begin_epoch(epoch);
      CHECK(parts_of(loader) == expected);
      loader.begin_epoch(epoch, 1);
      CHECK(parts_of(loader) == std::vector<Part>{expected[1]});
      loader.begin_epoch(epoch, 2);
      CHECK(parts_of(loader).empty());
    }
    for (const int64_t batch : {-1, 3}) {
      CHECK_THAT(
          message_of<BadInput>([&] { loader.begin_epoch(0, batch); }),
          ContainsSubstring(fmt::format("first batch {} of an epoch, expected 0 to 2", batch)));
    }
  }
  options.drop_last = true;
  CHECK(
      ShardLoader(set, options, allocate_host, 3, 4, Sharding::global_batch).batches_per_epoch() ==
      1);
}

TEST_CASE("A world of no ranks is refused before anything is dealt to it", "[sampler][row95]") {
  const Dataset set = numbered_images(10);
  Options options;
  options.order = OrderKind::sampler;
  for (const int world_size : {0, -1}) {
    const auto told = [&](const std::function<void()>& deal) {
      CHECK(message_of<BadInput>(deal) ==
            fmt::format("sampler: rank 0 of {} ranks, expected one rank or more", world_size));
    };
    told([&] { DistributedSampler(10, {.rank = 0, .world_size = world_size}); });
    told([&] { make_evaluation_shard(10, 0, world_size); });
    told([&] { evaluation_loader(set, options, allocate_host, 0, world_size); });
    for (const Sharding sharding : {Sharding::global_batch, Sharding::padded}) {
      told([&] { ShardLoader(set, options, allocate_host, 0, world_size, sharding); });
    }
  }
  // A rank outside the world is reported before what it would have to do.
  const Dataset few = numbered_images(2);
  CHECK_THAT(message_of<BadInput>([&] { evaluation_loader(few, options, allocate_host, 7, 4); }),
             ContainsSubstring("rank 7 of 4 ranks, expected 0 to 3"));
}

TEST_CASE("An evaluation counts every sample once, whatever the number of ranks",
          "[sampler][row97]") {
  for (const int64_t n : {0, 1, 3, 10, 11}) {
    for (int world_size = 1; world_size <= 6; ++world_size) {
      std::vector<Indices> ranks;
      for (int rank = 0; rank < world_size; ++rank) {
        ranks.push_back(make_evaluation_shard(n, rank, world_size)->order_of_epoch(0));
        for (size_t i = 0; i < ranks.back().size(); ++i) {
          REQUIRE(ranks.back()[i] == rank + static_cast<int64_t>(i) * world_size);
        }
      }
      REQUIRE(united(ranks) == counted(n));
    }
  }
}

}  // namespace
}  // namespace lockstep
