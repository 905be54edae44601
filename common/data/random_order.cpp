#include "common/data/random_order.h"

#include <numeric>

#include "common/core/error.h"

namespace lockstep {
namespace {

std::vector<int64_t> identity(int64_t n) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), int64_t{0});
  return order;
}

void check_epoch(int64_t epoch) {
  require(epoch >= 0, "epoch order: epoch {} is negative; epochs count from 0", epoch);
}

class LoaderOrder : public EpochOrder {
 public:
  LoaderOrder(int64_t n, uint64_t seed)
      : n_(n), seed_(static_cast<uint32_t>(seed)), generator_(seed_) {}

  int64_t size() const override { return n_; }

  std::vector<int64_t> order_of_epoch(int64_t epoch) override {
    check_epoch(epoch);
    if (epoch < next_) {
      generator_.seed(seed_);
      next_ = 0;
    }
    const auto draws_of_randperm = static_cast<unsigned long long>(n_ > 0 ? n_ - 1 : 0);
    for (; next_ < epoch; ++next_) generator_.discard(2 + 2 * draws_of_randperm);

    generator_.discard(2);  // for the seed of the workers' own generators
    std::vector<int64_t> order = randperm(n_, generator_);
    // RandomSampler draws one more permutation when it is exhausted, and uses none of it.
    generator_.discard(draws_of_randperm);
    ++next_;
    return order;
  }

 private:
  int64_t n_;
  uint32_t seed_;
  std::mt19937 generator_;
  int64_t next_ = 0;  // the epoch whose draws come next from generator_
};

class SamplerOrder : public EpochOrder {
 public:
  SamplerOrder(int64_t n, uint64_t seed) : n_(n), seed_(seed) {}

  int64_t size() const override { return n_; }

  std::vector<int64_t> order_of_epoch(int64_t epoch) override {
    check_epoch(epoch);
    std::mt19937 generator(static_cast<uint32_t>(seed_ + static_cast<uint64_t>(epoch)));
    return randperm(n_, generator);
  }

 private:
  int64_t n_;
  uint64_t seed_;
};

class FileOrder : public EpochOrder {
 public:
  explicit FileOrder(int64_t n) : n_(n) {}

  int64_t size() const override { return n_; }

  std::vector<int64_t> order_of_epoch(int64_t epoch) override {
    check_epoch(epoch);
    return identity(n_);
  }

 private:
  int64_t n_;
};

}  // namespace

std::vector<int64_t> randperm(int64_t n, std::mt19937& generator) {
  constexpr int64_t kFirstOf64BitDraws = (int64_t{1} << 32) / 20;
  require(n >= 0 && n < kFirstOf64BitDraws, "randperm: n is {}, expected 0 to {}", n,
          kFirstOf64BitDraws - 1);
  std::vector<int64_t> order = identity(n);
  for (int64_t i = 0; i + 1 < n; ++i) {
    const int64_t offset = generator() % static_cast<uint32_t>(n - i);
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(i + offset)]);
  }
  return order;
}

std::unique_ptr<EpochOrder> make_order(OrderKind kind, int64_t n, uint64_t seed) {
  require(n >= 0, "epoch order: {} samples, expected 0 or more", n);
  switch (kind) {
    case OrderKind::loader:
      return std::make_unique<LoaderOrder>(n, seed);
    case OrderKind::sampler:
      return std::make_unique<SamplerOrder>(n, seed);
    case OrderKind::file:
      return std::make_unique<FileOrder>(n);
  }
  fail<BadInput>("epoch order: {} is not a kind of order", static_cast<int>(kind));
}

}  // namespace lockstep
