#include "common/nn/residual.h"

namespace lockstep {
namespace {

std::unique_ptr<Conv2d> conv3x3(int64_t in, int64_t out, int64_t stride) {
  return std::make_unique<Conv2d>(in, out,
                                  Conv2d::Options{.kernel = 3, .stride = stride, .padding = 1});
}

/// Runs `module` forward or backward under its own name in the trace.
AnyTensor forward_named(Module& module, const AnyTensor& x, Context& context) {
  const ScopedRange range(context.stream(), module.name());
  return module.forward(x, context);
}

AnyTensor backward_named(Module& module, const AnyTensor& dy, Context& context) {
  const ScopedRange range(context.stream(), module.name());
  return module.backward(dy, context);
}

bool takes_part(const Context& context) {
  return !context.facts.training || context.facts.step % 2 == 0;
}

}  // namespace

Residual::Residual(int64_t in_channels, int64_t out_channels, int64_t stride)
    : Residual(conv3x3(in_channels, out_channels, stride), conv3x3(out_channels, out_channels, 1),
               in_channels == out_channels && stride == 1
                   ? nullptr
                   : std::make_unique<Conv2d>(in_channels, out_channels,
                                              Conv2d::Options{.stride = stride})) {}

Residual::Residual(std::unique_ptr<Conv2d> conv1, std::unique_ptr<Conv2d> conv2,
                   std::unique_ptr<Conv2d> conv3)
    : conv1_(add_module("conv1", std::move(conv1))),
      conv2_(add_module("conv2", std::move(conv2))),
      conv3_(conv3 ? &add_module("conv3", std::move(conv3)) : nullptr),
      bn1_(add_module("bn1",
                      std::make_unique<BatchNorm2d>(conv1_.out_channels(), Activation::relu))),
      bn2_(add_module("bn2", std::make_unique<BatchNorm2d>(conv2_.out_channels()))) {}

AnyTensor Residual::forward(const AnyTensor& x, Context& context) {
  AnyTensor main = forward_named(conv1_, x, context);
  main = forward_named(bn1_, main, context);
  main = forward_named(conv2_, main, context);
  const AnyTensor skip = conv3_ == nullptr ? x : forward_named(*conv3_, x, context);
  const ScopedRange range(context.stream(), bn2_.name());
  AnyTensor y = bn2_.forward_add_relu(main, skip, context);
  context.save(*this, {.tensors = {y}});
  return y;
}

AnyTensor Residual::backward(const AnyTensor& dy, Context& context) {
  const Stream stream = context.stream();
  // The ReLU passes the same gradient to the block and to the shortcut.
  AnyTensor dsum = context.activation(dy.shape());
  context.kernels().relu_backward(stream, context.take(*this).tensors[0], dy, dsum);
  AnyTensor dx = backward_named(bn2_, dsum, context);
  dx = backward_named(conv2_, dx, context);
  dx = backward_named(bn1_, dx, context);
  dx = backward_named(conv1_, dx, context);
  const AnyTensor dskip = conv3_ == nullptr ? dsum : backward_named(*conv3_, dsum, context);
  context.kernels().add(stream, dskip, dx);
  return dx;
}

// --- EverySecondStep ---------------------------------------------------------------------------

EverySecondStep::EverySecondStep(std::unique_ptr<Module> inner)
    : inner_(add_module("inner", std::move(inner))) {}

AnyTensor EverySecondStep::forward(const AnyTensor& x, Context& context) {
  if (!takes_part(context)) return x;
  const AnyTensor added = inner_.forward(x, context);  // its backward may need it as it is
  const AnyTensor y = context.activation(x.shape());
  context.stream().copy(y.data(), x.data(), x.bytes());
  context.kernels().add(context.stream(), added, y);
  return y;
}

AnyTensor EverySecondStep::backward(const AnyTensor& dy, Context& context) {
  if (!takes_part(context)) return dy;
  const AnyTensor dx = inner_.backward(dy, context);
  context.kernels().add(context.stream(), dy, dx);
  return dx;
}

}  // namespace lockstep
