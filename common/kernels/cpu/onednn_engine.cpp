// Convolution and matrix product by oneDNN, on plain NHWC activations. Where they are
// faster, our own ways of convolving are taken (winograd.h, few_channels.h).
//
// oneDNN works by plans ("primitives"), made once per shape. A plan belongs to the worker thread of
// one stream and is made there: a primitive that two threads shared gave wrong gradients, and a
// primitive keeps the number of OpenMP threads that its maker had. Activations and OHWI weights go
// in as they are; where a plan prefers another order of the weights, it gets a reordered copy.

#include <algorithm>
#include <map>
#include <memory>

#include "common/core/error.h"
#include "common/kernels/cpu/engine.h"
#include "common/kernels/cpu/few_channels.h"
#include "common/kernels/cpu/onednn_plans.h"
#include "common/kernels/cpu/winograd.h"

namespace lockstep::cpu {
namespace {

using namespace onednn;

/// Channels that an implementation takes together, at most: the floats of a vector register.
constexpr int64_t kLargestBlock = 16;

/// For the gradient of 1x1 weights with a stride oneDNN gathers the pixels that count into its
/// scratchpad, in whole blocks of channels. With fewer channels than a block, the last block ends
/// past the scratchpad (versions 2 and 3, github.com/uxlfoundation/oneDNN/issues/6035).
bool overruns_scratchpad(const Window2d& g) {
  return g.kernel == 1 && g.stride > 1 && g.in_channels < kLargestBlock;
}

/// The pixels of x that a 1x1 window meets, one after another: [batch, out height, out width, C].
void copy_met_pixels(const Window2d& g, const Real* x, Real* pixels) {
  for (int64_t row = 0; row < g.batch * g.out_height; ++row) {
    const int64_t h = row % g.out_height * g.stride - g.padding;
    for (int64_t column = 0; column < g.out_width; ++column, pixels += g.in_channels) {
      const int64_t w = column * g.stride - g.padding;
      const bool inside = h >= 0 && h < g.in_height && w >= 0 && w < g.in_width;
      const int64_t pixel = (row / g.out_height * g.in_height + h) * g.in_width + w;
      if (inside) std::copy_n(x + pixel * g.in_channels, g.in_channels, pixels);
      if (!inside) std::fill_n(pixels, g.in_channels, Real(0));
    }
  }
}

size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

/// Keeps its plans and its workspace.
class OneDnnEngine final : public Engine {
 public:
  explicit OneDnnEngine(CpuStream& stream)
      : workspace_(stream), pixels_(stream), other_ways_(stream) {}

  void conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
              Real* y) override {
    if (few_channels::fits(g)) {
      return few_channels::conv2d(g, x, weight, bias, y, other(few_channels::workspace_bytes(g)));
    }
    if (winograd::fits(g)) {
      return winograd::conv2d(g, x, weight, bias, y, other(winograd::workspace_bytes(g)), product_);
    }
    Pass& pass = plan(g).forward;
    set(pass, DNNL_ARG_SRC, x);
    set(pass, DNNL_ARG_BIAS, bias);
    set(pass, DNNL_ARG_DST, y);
    run(pass, const_cast<Real*>(weight), nullptr);
  }

  void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight,
                             Real* dx) override {
    if (winograd::fits(g)) {
      return winograd::conv2d_backward_input(g, dy, weight, dx, other(winograd::workspace_bytes(g)),
                                             product_);
    }
    if (few_channels::fits_backward_input(g)) {
      return few_channels::conv2d_backward_input(g, dy, weight, dx,
                                                 other(few_channels::workspace_bytes(g)));
    }
    Pass& pass = plan(g).backward_data;
    set(pass, DNNL_ARG_DIFF_DST, dy);
    set(pass, DNNL_ARG_DIFF_SRC, dx);
    run(pass, const_cast<Real*>(weight), nullptr);
  }

  /// oneDNN overwrites, the catalogue adds: the result goes to the workspace first.
  void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                  Real* dbias) override {
    if (winograd::fits(g)) {
      return winograd::conv2d_backward_parameters(g, x, dy, dweight, dbias,
                                                  other(winograd::workspace_bytes(g)), product_);
    }
    if (few_channels::fits(g)) {
      return few_channels::conv2d_backward_parameters(g, x, dy, dweight, dbias,
                                                      other(few_channels::workspace_bytes(g)));
    }
    if (overruns_scratchpad(g)) {
      Window2d dense = g;  // over the pixels that count, side by side
      dense.in_height = g.out_height, dense.in_width = g.out_width;
      dense.stride = 1, dense.padding = 0;
      auto* pixels =
          static_cast<Real*>(pixels_.at_least(size_t(dense.input().elements()) * sizeof(Real)));
      copy_met_pixels(g, x, pixels);
      return conv2d_backward_parameters(dense, pixels, dy, dweight, dbias);
    }
    ConvPlan& conv = plan(g);
    Pass& pass = conv.backward_weights;
    const size_t weight_bytes = align(conv.dweight_elements * sizeof(Real));
    const size_t bias_bytes = align(g.out_channels * sizeof(Real));
    char* base =
        static_cast<char*>(workspace_.at_least(weight_bytes + bias_bytes + pass_bytes(pass)));
    Real* weight_sum = reinterpret_cast<Real*>(base);
    Real* bias_sum = reinterpret_cast<Real*>(base + weight_bytes);
    set(pass, DNNL_ARG_SRC, x);
    set(pass, DNNL_ARG_DIFF_DST, dy);
    set(pass, DNNL_ARG_DIFF_BIAS, bias_sum);
    run(pass, weight_sum, base + weight_bytes + bias_bytes);
    for (size_t i = 0; i < conv.dweight_elements; ++i) dweight[i] += weight_sum[i];
    for (int64_t o = 0; o < g.out_channels; ++o) dbias[o] += bias_sum[o];
  }

  void matmul(const MatMul& shape, const Real* a, const Real* b, Real* c) override {
    MatMulPlan& product = plan(shape);
    Arguments& arguments = product.step.arguments;
    arguments.at(DNNL_ARG_SRC).set_data_handle(const_cast<Real*>(a));
    arguments.at(DNNL_ARG_WEIGHTS).set_data_handle(const_cast<Real*>(b));
    arguments.at(DNNL_ARG_DST).set_data_handle(c);
    arguments.at(DNNL_ARG_SCRATCHPAD).set_data_handle(workspace_.at_least(product.scratch_bytes));
    execute(product.step);
  }

 private:
  static void set(Pass& pass, int argument, const Real* data) {
    pass.main.arguments.at(argument).set_data_handle(const_cast<Real*>(data));
  }

  /// Workspace for the convolutions that are not oneDNN's.
  void* other(size_t bytes) { return other_ways_.at_least(bytes); }

  static size_t pass_bytes(const Pass& pass) {
    return align(pass.reordered_bytes) + align(pass.scratch_bytes);
  }

  void execute(Step& step) {
    step.primitive.execute(stream_, step.arguments);
    stream_.wait();
  }

  /// Runs a pass on OHWI `weight`. `workspace`: pass_bytes() bytes, or null to take them here.
  void run(Pass& pass, Real* weight, char* workspace) {
    if (workspace == nullptr) workspace = static_cast<char*>(workspace_.at_least(pass_bytes(pass)));
    const bool gradient = pass.weight_argument == DNNL_ARG_DIFF_WEIGHTS;
    pass.main.arguments.at(DNNL_ARG_SCRATCHPAD)
        .set_data_handle(workspace + align(pass.reordered_bytes));
    if (pass.reordered_bytes == 0) {
      set(pass, pass.weight_argument, weight);
      execute(pass.main);
      return;
    }
    dnnl::memory& preferred = pass.main.arguments.at(pass.weight_argument);
    preferred.set_data_handle(workspace);
    pass.reorder.arguments.at(gradient ? DNNL_ARG_TO : DNNL_ARG_FROM).set_data_handle(weight);
    pass.reorder.arguments.at(gradient ? DNNL_ARG_FROM : DNNL_ARG_TO).set_data_handle(workspace);
    if (!gradient) execute(pass.reorder);
    execute(pass.main);
    if (gradient) execute(pass.reorder);
  }

  ConvPlan& plan(const Window2d& g) {
    const auto found = convolutions_.find(g);
    return found != convolutions_.end()
               ? found->second
               : convolutions_.emplace(g, make_plan(engine_, g)).first->second;
  }

  MatMulPlan& plan(const MatMul& shape) {
    const auto found = products_.find(shape);
    return found != products_.end()
               ? found->second
               : products_.emplace(shape, make_plan(engine_, shape)).first->second;
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<Window2d, ConvPlan> convolutions_;
  std::map<MatMul, MatMulPlan> products_;
  Workspace workspace_, pixels_, other_ways_;
  const winograd::Product product_ = [this](const MatMul& shape, const Real* a, const Real* b,
                                            Real* c) { matmul(shape, a, b, c); };
};

}  // namespace

EngineMaker onednn_engine() {
  const dnnl_version_t* v = dnnl_version();
  return {fmt::format("oneDNN {}.{}.{}", v->major, v->minor, v->patch),
          [](CpuStream& stream) -> std::unique_ptr<Engine> {
            return std::make_unique<OneDnnEngine>(stream);
          }};
}

}  // namespace lockstep::cpu
