#include "common/nn/models.h"

#include <fmt/format.h>

#include "common/nn/layers.h"
#include "common/nn/residual.h"

namespace lockstep {
namespace {

constexpr Real kDropout = Real(0.5);

template <class M, class... Args>
std::unique_ptr<Module> layer(Args&&... args) {
  return std::make_unique<M>(std::forward<Args>(args)...);
}

std::unique_ptr<Module> conv5x5(int64_t in, int64_t out) {
  return layer<Conv2d>(in, out, Conv2d::Options{.kernel = 5});
}

std::unique_ptr<Sequential> seed_network(const ModelOptions& o) {
  // Two rounds of "5x5 convolution, halve" leave ((size - 4) / 2 - 4) / 2 pixels a side.
  const int64_t height = ((o.height - 4) / 2 - 4) / 2, width = ((o.width_pixels - 4) / 2 - 4) / 2;
  const bool norm = o.kind == ModelKind::seed_bn;
  auto net = std::make_unique<Sequential>();
  net->add("conv1", conv5x5(o.channels, 10));
  if (norm) net->add("bn1", layer<BatchNorm2d>(10));
  net->add("pool1", layer<MaxPool2d>(2, Activation::relu));
  net->add("conv2", conv5x5(10, 20));
  if (norm) net->add("bn2", layer<BatchNorm2d>(20));
  if (o.dropout) net->add("drop2d", layer<Dropout2d>(kDropout, o.seed));
  net->add("pool2", layer<MaxPool2d>(2, Activation::relu));
  net->add("flatten", layer<Flatten>());
  net->add("fc1", layer<Linear>(20 * height * width, 50, Activation::relu));
  if (o.dropout) net->add("drop1d", layer<Dropout>(kDropout, o.seed));
  if (o.kind == ModelKind::seed_skip) {
    net->add("extra", layer<EverySecondStep>(layer<Linear>(50, 50, Activation::relu)));
  }
  net->add("fc2", layer<Linear>(50, o.classes));
  net->add("log_softmax", layer<LogSoftmax>());
  return net;
}

std::unique_ptr<Sequential> mlp(const ModelOptions& o) {
  const int64_t features = 4 * o.width;
  int64_t in = o.height * o.width_pixels * o.channels;
  auto net = std::make_unique<Sequential>();
  net->add("flatten", layer<Flatten>());
  for (int64_t i = 1; i < o.depth; ++i) {
    net->add(fmt::format("fc{}", i), layer<Linear>(in, features, Activation::relu));
    in = features;
  }
  net->add(fmt::format("fc{}", o.depth), layer<Linear>(in, o.classes));
  return net;
}

/// Two residuals; the first changes the number of channels and halves the image, unless `first`.
std::unique_ptr<Sequential> block(int64_t in, int64_t out, bool first) {
  auto block = std::make_unique<Sequential>();
  block->add("0", layer<Residual>(in, out, first ? 1 : 2));
  block->add("1", layer<Residual>(out, out, 1));
  return block;
}

std::unique_ptr<Sequential> resnet18(const ModelOptions& o) {
  const int64_t w = o.width;
  auto net = std::make_unique<Sequential>();
  net->add("stem_conv",
           layer<Conv2d>(o.channels, w, Conv2d::Options{.kernel = 3, .stride = 1, .padding = 1}));
  net->add("stem_bn", layer<BatchNorm2d>(w, Activation::relu));
  net->add("block1", block(w, w, true));
  net->add("block2", block(w, 2 * w, false));
  net->add("block3", block(2 * w, 4 * w, false));
  net->add("block4", block(4 * w, 8 * w, false));
  net->add("gap", layer<AdaptiveAvgPool2d>(1, 1));
  net->add("flatten", layer<Flatten>());
  net->add("fc", layer<Linear>(8 * w, o.classes));
  return net;
}

}  // namespace

bool has_batch_norm(ModelKind kind) {
  return kind == ModelKind::seed_bn || kind == ModelKind::resnet18;
}

Model make_model(const ModelOptions& options) {
  const bool residual = options.kind == ModelKind::resnet18,
             linear = options.kind == ModelKind::mlp;
  Model model{residual ? resnet18(options)
              : linear ? mlp(options)
                       : seed_network(options),
              residual || linear ? make_cross_entropy_loss() : make_nll_loss()};
  model.network->set_name("");
  model.network->skip_input_gradient();
  return model;
}

}  // namespace lockstep
