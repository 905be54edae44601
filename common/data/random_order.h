#pragma once
// The order of an epoch's samples, bit-exact with PyTorch.
//
// torch.Generator is a Mersenne Twister, and so is std::mt19937: the same seed gives the same
// 32-bit draws. What remains is to consume them in PyTorch's order, which is what this file does.

#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace lockstep {

/// `torch.randperm(n, generator=generator)`: a permutation of 0..n-1 by the forward Fisher-Yates
/// shuffle; takes n-1 draws from `generator`. Refuses n below 0, and n of 2^32/20 and more, where
/// PyTorch changes to 64-bit draws.
std::vector<int64_t> randperm(int64_t n, std::mt19937& generator);

/// Which of PyTorch's orders an epoch follows.
enum class OrderKind {
  loader,   ///< `DataLoader(shuffle=True, generator=torch.Generator().manual_seed(seed))`
  sampler,  ///< `DistributedSampler(seed=seed)` after `set_epoch(epoch)`, over the whole set
  file,     ///< 0..n-1, as the samples are in the file
};
constexpr auto words_of(OrderKind) { return std::array{"loader", "sampler", "file"}; }

/// The counterpart of `torch.utils.data.Sampler`: says which sample comes when.
class EpochOrder {
 public:
  virtual ~EpochOrder() = default;

  /// Number of positions of an epoch.
  virtual int64_t size() const = 0;

  /// Sample indices by position, [size()], of epoch `epoch` (0, 1, ...). A function of the seed and
  /// the epoch alone: epochs may be skipped or asked for again.
  virtual std::vector<int64_t> order_of_epoch(int64_t epoch) = 0;
};

/// An order over samples 0..n-1.
std::unique_ptr<EpochOrder> make_order(OrderKind kind, int64_t n, uint64_t seed);

}  // namespace lockstep
