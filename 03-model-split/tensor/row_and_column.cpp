#include "03-model-split/tensor/row_and_column.h"

namespace lockstep {
namespace {

/// The P-th part of the `total` outputs or inputs of a layer.
int64_t share(const std::string& layer, int64_t total, const char* what, int world_size) {
  require(total % world_size == 0,
          "{}: {} {} cannot be split evenly over {} ranks; use a number of devices that divides "
          "them, or leave the layer whole",
          layer, total, what, world_size);
  return total / world_size;
}

/// A module of type M with its final name.
template <class M, class... Args>
std::unique_ptr<M> named(const std::string& name, Args&&... args) {
  auto module = std::make_unique<M>(std::forward<Args>(args)...);
  module->set_name(name);
  return module;
}

}  // namespace

// --- Split outputs -------------------------------------------------------------------------------

ColumnLinear::ColumnLinear(const Linear& whole, const RankModules& trees)
    : OutputSplit(whole.name(), trees) {
  const int64_t outputs =
      share(name(), whole.out_features(), "output features", trees.world_size());
  for (int r = 0; r < trees.world_size(); ++r) {
    shards_.push_back(
        trees.add(r, named<Linear>(name(), whole.in_features(), outputs, whole.activation())));
  }
}

ColumnConv2d::ColumnConv2d(const Conv2d& whole, const RankModules& trees)
    : OutputSplit(whole.name(), trees) {
  const int64_t outputs =
      share(name(), whole.out_channels(), "output channels", trees.world_size());
  for (int r = 0; r < trees.world_size(); ++r) {
    shards_.push_back(
        trees.add(r, named<Conv2d>(name(), whole.in_channels(), outputs, whole.options())));
  }
}

template <class Shard>
Tensors OutputSplit<Shard>::forward(const Tensors& x, const Contexts& contexts) {
  return forward_each(shards_, x, contexts);
}

template <class Shard>
Tensors OutputSplit<Shard>::backward(const Tensors& dy, const Contexts& contexts) {
  const Tensors dx = backward_each(shards_, dy, contexts);
  all_reduce(dx, contexts);
  return dx;
}

template class OutputSplit<Linear>;
template class OutputSplit<Conv2d>;

// --- Split inputs --------------------------------------------------------------------------------

RowLinear::RowLinear(const Linear& whole, const RankModules& trees)
    : InputSplit(whole.name(), trees) {
  const int64_t inputs = share(name(), whole.in_features(), "input features", trees.world_size());
  for (int r = 0; r < trees.world_size(); ++r) {
    shards_.push_back(
        trees.add(r, named<Linear>(name(), inputs, whole.out_features(), whole.activation())));
  }
}

Traffic RowLinear::predicted(const Shape& x) const {
  return one_all_reduce(x[0] * shards_[0]->out_features());
}

RowConv2d::RowConv2d(const Conv2d& whole, const RankModules& trees)
    : InputSplit(whole.name(), trees) {
  const int64_t inputs = share(name(), whole.in_channels(), "input channels", trees.world_size());
  for (int r = 0; r < trees.world_size(); ++r) {
    shards_.push_back(
        trees.add(r, named<Conv2d>(name(), inputs, whole.out_channels(), whole.options())));
  }
}

Traffic RowConv2d::predicted(const Shape& x) const {
  return one_all_reduce(shards_[0]->window(x).output().elements());
}

template <class Shard>
Tensors InputSplit<Shard>::forward(const Tensors& x, const Contexts& contexts) {
  // [task 03.4] row-parallel Linear
  const Tensors y = from_each_rank(
      contexts, [&](int r, Context& context) { return shards_[r]->product(x[r], context); });
  all_reduce(y, contexts);
  on_each_rank(contexts, [&](int r, Context& context) { shards_[r]->add_bias(y[r], context); });
  return y;
  // [end 03.4]
}

template <class Shard>
Tensors InputSplit<Shard>::backward(const Tensors& dy, const Contexts& contexts) {
  return backward_each(shards_, dy, contexts);
}

template class InputSplit<Linear>;
template class InputSplit<Conv2d>;

// --- From split to whole, and back ---------------------------------------------------------------

namespace {

/// x [n,a,b] as [n,b,a]: it also turns [N,H,W,C] into [N,C,H,W].
Tensor swapped(const Tensor& x, int64_t n, int64_t a, int64_t b, Context& context) {
  Tensor y = context.empty({n, b, a, 1});
  context.kernels().to_channels_first(context.stream(), x.reshaped({n, a, 1, b}), y);
  return y;
}

/// parts [P,...,c], those of rank 0, 1, ..., side by side: [...,P c].
Tensor side_by_side(const Tensor& parts, int64_t rows, int64_t world_size, Context& context) {
  const int64_t c = parts.elements() / (rows * world_size);
  const Tensor numbers_together = swapped(parts, 1, world_size, rows * c, context);  // [rows,c,P]
  return swapped(numbers_together, rows, c, world_size, context);                    // [rows,P,c]
}

/// The other way round: x [...,P c] as [P,...,c].
Tensor one_by_one(const Tensor& x, int64_t rows, int64_t world_size, Context& context) {
  const int64_t c = x.elements() / (rows * world_size);
  const Tensor numbers_together = swapped(x, rows, world_size, c, context);  // [rows,c,P]
  return swapped(numbers_together, 1, rows * c, world_size, context);        // [P,rows,c]
}

int64_t& channels_of(Shape& shape) { return shape[shape.rank() - 1]; }

}  // namespace

Tensors ChannelLayer::join(const Tensors& x, const Contexts& contexts) {
  if (world_size() == 1) return x;
  Shape shape = x[0].shape();
  const int64_t rows = shape.elements() / channels_of(shape);
  channels_of(shape) *= world_size();
  const Tensors parts =
      from_each_rank(contexts, [&](int, Context& context) { return context.empty(shape); });
  all_gather(x, parts, contexts);
  return from_each_rank(contexts, [&](int r, Context& context) {
    return side_by_side(parts[r], rows, world_size(), context).reshaped(shape);
  });
}

Tensors ChannelLayer::take(const Tensors& x, const Contexts& contexts) const {
  if (world_size() == 1) return x;
  Shape shape = x[0].shape();
  const int64_t rows = shape.elements() / channels_of(shape);
  channels_of(shape) = share(name(), channels_of(shape), "channels", world_size());
  return from_each_rank(contexts, [&](int r, Context& context) {
    const Tensor parts = one_by_one(x[r], rows, world_size(), context);
    const Tensor mine = parts.range(r * shape.elements(), shape);
    const Tensor y = context.empty(shape);  // a copy: the other ranks' parts need not be kept
    context.stream().copy(y.data(), mine.data(), mine.bytes());
    return y;
  });
}

// --- Residual block ------------------------------------------------------------------------------

ParallelResidual::ParallelResidual(const Residual& whole, const RankModules& trees)
    : ParallelLayer(whole.name(), trees),
      conv1_(whole.conv1(), trees),
      conv2_(whole.conv2(), trees) {
  const auto like = [](const BatchNorm2d& norm, int64_t channels) {
    return named<BatchNorm2d>(norm.name(), channels, norm.activation());
  };
  if (const Conv2d* conv3 = whole.conv3()) {
    conv3_.emplace(conv3->name(), trees, [&](int) {
      return named<Conv2d>(conv3->name(), conv3->in_channels(), conv3->out_channels(),
                           conv3->options());
    });
  }
  const BatchNorm2d &bn1 = whole.bn1(), &bn2 = whole.bn2();
  bn1_.emplace(bn1.name(), trees,
               [&](int) { return like(bn1, bn1.channels() / trees.world_size()); });
  for (int r = 0; r < trees.world_size(); ++r) {
    bn2_.push_back(trees.add(r, like(bn2, bn2.channels())));
    relu_.push_back(named<Relu>(name()));
  }
}

Tensors ParallelResidual::forward(const Tensors& x, const Contexts& contexts) {
  Tensors main = conv1_.forward(x, contexts);
  main = bn1_->forward(main, contexts);
  main = conv2_.forward(main, contexts);
  const Tensors skip = conv3_ ? conv3_->forward(x, contexts) : x;
  return from_each_rank(contexts, [&](int r, Context& context) {
    const Tensor y = bn2_[r]->forward_add_relu(main[r], skip[r], context);
    context.save(*relu_[r], {.tensors = {y}});  // its backward() needs y
    return y;
  });
}

Tensors ParallelResidual::backward(const Tensors& dy, const Contexts& contexts) {
  // The ReLU passes the same gradient to the block and to the shortcut.
  const Tensors dsum = backward_each(relu_, dy, contexts);
  Tensors dx = backward_each(bn2_, dsum, contexts);
  dx = conv2_.backward(dx, contexts);
  dx = bn1_->backward(dx, contexts);
  dx = conv1_.backward(dx, contexts);
  const Tensors dskip = conv3_ ? conv3_->backward(dsum, contexts) : dsum;
  on_each_rank(contexts, [&](int r, Context& context) {
    context.kernels().add(context.stream(), dskip[r], dx[r]);
  });
  return dx;
}

Traffic ParallelResidual::traffic() const {
  Traffic sum = conv1_.traffic();
  return sum += conv2_.traffic();
}

Traffic ParallelResidual::predicted(const Shape& x) const {
  Traffic sum = conv1_.predicted(x);
  return sum += conv2_.predicted(conv1_.output(x));
}

}  // namespace lockstep
