// Orders against values that PyTorch printed (torch.randperm, DataLoader, DistributedSampler).

#include "common/data/random_order.h"

#include <algorithm>
#include <numeric>

#include "common/core/error.h"
#include "common/core/parse.h"
#include "tests/support/catch.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using Order = std::vector<int64_t>;

Order randperm_of_seed(int64_t n, uint64_t seed) {
  std::mt19937 generator(static_cast<uint32_t>(seed));
  return randperm(n, generator);
}

TEST_CASE("randperm gives the permutations of torch.randperm", "[order][row21]") {
  CHECK(randperm_of_seed(10, 0) == Order{4, 1, 7, 5, 3, 9, 0, 8, 6, 2});
  CHECK(randperm_of_seed(10, 1) == Order{5, 6, 1, 2, 0, 8, 9, 3, 7, 4});
  CHECK(randperm_of_seed(10, 42) == Order{2, 6, 1, 8, 4, 5, 0, 9, 3, 7});
  CHECK(randperm_of_seed(10, 0xffffffff) == Order{1, 4, 6, 2, 0, 5, 8, 7, 9, 3});
  // Seeds are cut to 32 bits.
  CHECK(randperm_of_seed(10, (uint64_t{1} << 32) + 5) == Order{1, 4, 9, 6, 3, 5, 0, 2, 8, 7});

  Order large = randperm_of_seed(60000, 0);
  CHECK(Order(large.begin(), large.begin() + 5) == Order{36044, 10678, 57327, 55074, 21567});
  Order all(60000);
  std::iota(all.begin(), all.end(), 0);
  std::sort(large.begin(), large.end());
  CHECK(large == all);
}

TEST_CASE("randperm of no and of one sample draws nothing", "[order][row21]") {
  std::mt19937 generator(7), untouched(7);
  CHECK(randperm(0, generator).empty());
  CHECK(randperm(1, generator) == Order{0});
  CHECK(generator == untouched);
  CHECK_THROWS_WITH(randperm(-1, generator), ContainsSubstring("n is -1"));
  CHECK_THROWS_AS(randperm(int64_t{1} << 32, generator), BadInput);
}

TEST_CASE("order loader is the sequence of a shuffling DataLoader over the epochs",
          "[order][row22]") {
  const auto order = make_order(OrderKind::loader, 10, 0);
  CHECK(order->size() == 10);
  CHECK(order->order_of_epoch(0) == Order{3, 7, 5, 2, 0, 8, 1, 6, 9, 4});
  CHECK(order->order_of_epoch(1) == Order{1, 3, 2, 7, 5, 9, 0, 6, 4, 8});
  CHECK(order->order_of_epoch(2) == Order{6, 8, 5, 7, 2, 4, 1, 0, 3, 9});
  CHECK(order->order_of_epoch(3) == Order{3, 7, 9, 0, 8, 1, 6, 4, 2, 5});

  const auto other = make_order(OrderKind::loader, 7, 123);
  CHECK(other->order_of_epoch(0) == Order{0, 1, 2, 5, 4, 6, 3});
  CHECK(other->order_of_epoch(1) == Order{4, 0, 5, 3, 2, 1, 6});
  CHECK(other->order_of_epoch(2) == Order{1, 2, 5, 6, 4, 0, 3});
  CHECK(other->order_of_epoch(3) == Order{6, 2, 4, 3, 1, 5, 0});
}

TEST_CASE("order loader can skip epochs and go back", "[order][row22]") {
  const auto order = make_order(OrderKind::loader, 10, 0);
  CHECK(order->order_of_epoch(2) == Order{6, 8, 5, 7, 2, 4, 1, 0, 3, 9});
  CHECK(order->order_of_epoch(0) == Order{3, 7, 5, 2, 0, 8, 1, 6, 9, 4});
  CHECK(order->order_of_epoch(3) == Order{3, 7, 9, 0, 8, 1, 6, 4, 2, 5});
  CHECK_THROWS_WITH(order->order_of_epoch(-1), ContainsSubstring("epoch -1 is negative"));
}

// DistributedSampler's shards of four ranks: pad by the first positions, then every fourth.
std::vector<Order> shards_of_four(Order order) {
  for (size_t i = 0; order.size() % 4 != 0; ++i) order.push_back(order[i]);
  std::vector<Order> shards(4);
  for (size_t i = 0; i < order.size(); ++i) shards[i % 4].push_back(order[i]);
  return shards;
}

TEST_CASE("order sampler is the order of DistributedSampler after set_epoch", "[order][row22]") {
  const auto order = make_order(OrderKind::sampler, 10, 0);
  CHECK(shards_of_four(order->order_of_epoch(0)) ==
        std::vector<Order>{{4, 3, 6}, {1, 9, 2}, {7, 0, 4}, {5, 8, 1}});
  CHECK(shards_of_four(order->order_of_epoch(1)) ==
        std::vector<Order>{{5, 0, 7}, {6, 8, 4}, {1, 9, 5}, {2, 3, 6}});
  // Seed and epoch are added.
  CHECK(make_order(OrderKind::sampler, 10, 1)->order_of_epoch(0) == order->order_of_epoch(1));
}

TEST_CASE("order file leaves the samples as they lie", "[order]") {
  const auto order = make_order(OrderKind::file, 4, 99);
  CHECK(order->order_of_epoch(0) == Order{0, 1, 2, 3});
  CHECK(order->order_of_epoch(5) == Order{0, 1, 2, 3});
  CHECK(make_order(OrderKind::loader, 0, 1)->order_of_epoch(0).empty());
}

TEST_CASE("an unknown order is refused with the list of those known", "[order]") {
  CHECK(choice_of<OrderKind>("loader", "") == OrderKind::loader);
  CHECK(choice_of<OrderKind>("sampler", "") == OrderKind::sampler);
  CHECK(choice_of<OrderKind>("file", "") == OrderKind::file);
  CHECK_THROWS_WITH(
      choice_of<OrderKind>("random", "--order"),
      Catch::Matchers::Equals("--order: found 'random', expected loader, sampler or file"));
}

}  // namespace
}  // namespace lockstep
