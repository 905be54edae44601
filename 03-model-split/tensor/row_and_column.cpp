#include "03-model-split/tensor/row_and_column.h"

#include "common/core/error.h"

namespace lockstep {

// --- The ranks -----------------------------------------------------------------------------------

int64_t SplitRanks::share(const Module& layer, int64_t total, const char* what) const {
  require(total % world_size() == 0,
          "{}: {} {} cannot be split evenly over {} ranks; use a number of devices that divides "
          "them, or leave the layer whole",
          layer.name(), total, what, world_size());
  return total / world_size();
}

void SplitRanks::all_reduce(const Module& layer, const AnyTensor& x, Context& context) {
  if (world_size() == 1 || !x.defined()) return;  // nobody needs the gradient of the images
  calls_.run(layer.name(), Purpose::activations, context,
             [&](Stream stream) { comm().all_reduce(stream, x); });
  if (!context.facts.training) return;
  Traffic& traffic = traffic_[layer.name()];
  ++traffic.all_reduces;
  traffic.numbers += x.elements();
  traffic.bytes += double(comm().bytes_of_all_reduce(x));
}

void SplitRanks::all_gather(const Module& layer, const AnyTensor& mine, const AnyTensor& all,
                            Context& context) {
  calls_.run(layer.name(), Purpose::activations, context,
             [&](Stream stream) { comm().all_gather(stream, mine, all); });
  if (!context.facts.training) return;
  Traffic& traffic = traffic_[layer.name()];
  ++traffic.all_gathers;
  traffic.numbers += mine.elements();
  traffic.bytes += double(world_size() - 1) * double(mine.bytes());
}

void SplitRanks::add_overflows(const OverflowNumber& overflow, Context& context) {
  if (world_size() == 1) return;
  after_passes_.run("overflow", Purpose::other, context,
                    [&](Stream stream) { comm().all_reduce(stream, overflow.number()); });
}

std::vector<HealthTensor> SplitRanks::healths(const HealthTensor& mine, Context& context) {
  if (world_size() == 1) return {mine};
  constexpr int64_t kWords = sizeof(Health) / sizeof(int64_t);
  static_assert(kWords * sizeof(int64_t) == sizeof(Health));
  const auto all = context.pool().take<Health>({world_size()});
  after_passes_.run("health", Purpose::other, context, [&](Stream stream) {
    comm().all_gather(stream, {mine.data(), kWords, ElementType::i64},
                      {all.data(), world_size() * kWords, ElementType::i64});
  });
  std::vector<HealthTensor> each;
  for (int r = 0; r < world_size(); ++r) each.push_back(all.range(r, {}));
  return each;
}

// --- Split outputs -------------------------------------------------------------------------------

ColumnLinear::ColumnLinear(const Linear& whole, SplitRanks& ranks)
    : Linear(whole.in_features(), ranks.share(whole, whole.out_features(), "output features"),
             whole.activation()),
      ranks_(ranks) {}

AnyTensor ColumnLinear::backward(const AnyTensor& dy, Context& context) {
  AnyTensor dx = Linear::backward(dy, context);
  ranks_.all_reduce(*this, dx, context);
  return dx;
}

ColumnConv2d::ColumnConv2d(const Conv2d& whole, SplitRanks& ranks)
    : Conv2d(whole.in_channels(), ranks.share(whole, whole.out_channels(), "output channels"),
             whole.options()),
      ranks_(ranks) {}

AnyTensor ColumnConv2d::backward(const AnyTensor& dy, Context& context) {
  AnyTensor dx = Conv2d::backward(dy, context);
  ranks_.all_reduce(*this, dx, context);
  return dx;
}

// --- Split inputs --------------------------------------------------------------------------------

RowLinear::RowLinear(const Linear& whole, SplitRanks& ranks)
    : InputSplit(ranks, ranks.share(whole, whole.in_features(), "input features"),
                 whole.out_features(), whole.activation()) {}

RowConv2d::RowConv2d(const Conv2d& whole, SplitRanks& ranks)
    : InputSplit(ranks, ranks.share(whole, whole.in_channels(), "input channels"),
                 whole.out_channels(), whole.options()) {}

template <class Layer>
AnyTensor InputSplit<Layer>::forward(const AnyTensor& x, Context& context) {
  // [task 03.4] row-parallel Linear
  AnyTensor y = this->product(x, context);
  ranks_.all_reduce(*this, y, context);
  this->add_bias(y, context);
  return y;
  // [end 03.4]
}

template class InputSplit<Linear>;
template class InputSplit<Conv2d>;

// --- From split to whole, and back ---------------------------------------------------------------

namespace {

/// x [a,b] as [b,a].
AnyTensor transposed(const AnyTensor& x, int64_t a, int64_t b, Context& context) {
  AnyTensor y = context.empty({1, b, a, 1}, x.type());
  context.kernels().to_channels_first(context.stream(), x.reshaped({1, a, 1, b}), y);
  return y;
}

int64_t& channels_of(Shape& shape) { return shape[shape.axes() - 1]; }

}  // namespace

AnyTensor ChannelLayer::join(const AnyTensor& x, Context& context) {
  const int64_t ranks = ranks_.world_size();
  if (ranks == 1) return x;
  Shape shape = x.shape();
  const int64_t c = channels_of(shape), rows = shape.elements() / c;
  channels_of(shape) *= ranks;
  const AnyTensor mine = transposed(x, rows, c, context),
                  all = context.empty({ranks * c, rows}, x.type());
  ranks_.all_gather(*this, mine, all, context);
  return transposed(all, ranks * c, rows, context).reshaped(shape);
}

AnyTensor ChannelLayer::take(const AnyTensor& x, Context& context) const {
  const int64_t ranks = ranks_.world_size();
  if (ranks == 1) return x;
  Shape shape = x.shape();
  const int64_t c = ranks_.share(*this, channels_of(shape), "channels");
  const int64_t rows = shape.elements() / channels_of(shape);
  channels_of(shape) = c;
  const AnyTensor all = transposed(x, rows, ranks * c, context);
  const AnyTensor mine = all.range(ranks_.rank() * c * rows, {c, rows});
  return transposed(mine, c, rows, context).reshaped(shape);
}

}  // namespace lockstep
