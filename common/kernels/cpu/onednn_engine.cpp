// Convolution and matrix product by oneDNN, on plain NHWC activations. Where they are
// faster, our own ways of convolving are taken (winograd.h, few_channels.h).
//
// oneDNN compiles code for each shape, a "primitive". It belongs to the worker thread of one stream
// and is made there: a primitive that two threads shared gave wrong gradients, and a primitive
// keeps the number of OpenMP threads that its maker had. Activations and OHWI weights go in as they
// are; where a primitive prefers another order of the weights, it gets a reordered copy.

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/kernels/cpu/engine.h"
#include "common/kernels/cpu/few_channels.h"
#include "common/kernels/cpu/onednn_api.h"
#include "common/kernels/cpu/winograd.h"

namespace lockstep::cpu {
namespace {

using namespace onednn;
using Tag = dnnl::memory::format_tag;
constexpr auto kFloat = dnnl::memory::data_type::f32;
static_assert(sizeof(Real) == 4, "oneDNN computes in float32; the double build has no oneDNN");

// --- Primitives --------------------------------------------------------------------------------

using Arguments = std::unordered_map<int, dnnl::memory>;

/// A primitive and the memories it works on, whose addresses are filled in per call.
struct Primitive {
  dnnl::primitive primitive;
  Arguments arguments;
  size_t scratch_bytes = 0;
  bool has_run = false;
};

/// A convolution pass: its primitive, and one that reorders the weights before it (their gradient
/// after it) where needed.
struct Pass {
  Primitive main, reorder;
  int weight_argument = 0;  // DNNL_ARG_WEIGHTS, or DNNL_ARG_DIFF_WEIGHTS for the weights' gradient
  size_t reordered_bytes = 0;  // 0: OHWI goes in as it is
};

struct ConvPrimitives {
  Pass forward, backward_data, backward_weights;
};

/// If its compiler gets no memory, oneDNN may be killed by a signal, so this checks for memory
/// first. oneDNN compiles when a primitive is made, and more when the primitive first runs: a few
/// MiB. Another thread may take memory meanwhile: glibc maps 64 MiB at a thread's first allocation.
void require_room_for_code() {
  constexpr size_t kRoom = size_t{128} << 20;
  void* room = ::mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) {
    fail<EnvironmentError>(
        "no room for the code that oneDNN makes for a shape: the system refused {} MiB{}; use a "
        "smaller "
        "batch or model, or fewer devices",
        kRoom >> 20, memory_limit_note().data());
  }
  ::munmap(room, kRoom);
}

/// Memory whose address is filled in per call.
dnnl::memory empty(const dnnl::engine& engine, const Desc& desc) {
  return dnnl::memory(desc, engine, nullptr);
}

/// Whoever runs a primitive provides its scratchpad.
dnnl::primitive_attr scratchpad_from_caller() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

template <class Pd>
Pass make_pass(const dnnl::engine& engine, const Pd& pd, Arguments arguments, int weight_argument,
               const Desc& preferred, const Desc& ohwi) {
  Pass pass;
  pass.weight_argument = weight_argument;
  arguments.emplace(weight_argument, empty(engine, preferred));
  arguments.emplace(DNNL_ARG_SCRATCHPAD, empty(engine, pd.scratchpad_desc()));
  if (preferred != ohwi) {
    pass.reordered_bytes = preferred.get_size();
    const bool gradient = weight_argument == DNNL_ARG_DIFF_WEIGHTS;
    dnnl::memory from = empty(engine, gradient ? preferred : ohwi);
    dnnl::memory to = empty(engine, gradient ? ohwi : preferred);
    pass.reorder = {dnnl::reorder(from, to), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}, 0};
  }
  pass.main = {dnnl::primitive(pd.get()), std::move(arguments), pd.scratchpad_desc().get_size()};
  return pass;
}

ConvPrimitives make_primitives(const dnnl::engine& engine, const Window2d& g) {
  require_room_for_code();
  const dnnl::primitive_attr attr = scratchpad_from_caller();
  const Dims x_dims{g.batch, g.in_channels, g.in_height, g.in_width};
  const Dims y_dims{g.batch, g.out_channels, g.out_height, g.out_width};
  const Dims weight_dims{g.out_channels, g.in_channels, g.kernel, g.kernel};
  const ConvDescs descs{.x = Desc(x_dims, kFloat, Tag::nhwc),
                        .weight = Desc(weight_dims, kFloat, Tag::any),
                        .bias = Desc({g.out_channels}, kFloat, Tag::x),
                        .y = Desc(y_dims, kFloat, Tag::nhwc),
                        .strides = {g.stride, g.stride},
                        .padding = {g.padding, g.padding}};
  const Desc ohwi(weight_dims, kFloat, Tag::ohwi);
  const dnnl::memory x = empty(engine, descs.x), y = empty(engine, descs.y),
                     bias = empty(engine, descs.bias);
  const auto forward = forward_pd(engine, descs, attr);
  const auto data = backward_data_pd(engine, descs, forward, attr);
  const auto weights = backward_weights_pd(engine, descs, forward, attr);
  ConvPrimitives made;
  made.forward =
      make_pass(engine, forward, {{DNNL_ARG_SRC, x}, {DNNL_ARG_BIAS, bias}, {DNNL_ARG_DST, y}},
                DNNL_ARG_WEIGHTS, forward.weights_desc(), ohwi);
  made.backward_data = make_pass(engine, data, {{DNNL_ARG_DIFF_DST, y}, {DNNL_ARG_DIFF_SRC, x}},
                                 DNNL_ARG_WEIGHTS, data.weights_desc(), ohwi);
  made.backward_weights = make_pass(
      engine, weights, {{DNNL_ARG_SRC, x}, {DNNL_ARG_DIFF_DST, y}, {DNNL_ARG_DIFF_BIAS, bias}},
      DNNL_ARG_DIFF_WEIGHTS, weights.diff_weights_desc(), ohwi);
  return made;
}

Primitive make_primitives(const dnnl::engine& engine, const MatMul& shape) {
  require_room_for_code();
  const Desc a({shape.m, shape.k}, kFloat, shape.transpose_a ? Tag::ba : Tag::ab);
  const Desc b({shape.k, shape.n}, kFloat, shape.transpose_b ? Tag::ba : Tag::ab);
  const Desc c({shape.m, shape.n}, kFloat, Tag::ab);
  dnnl::primitive_attr attr = scratchpad_from_caller();
  dnnl::post_ops accumulate;
  if (shape.accumulate) accumulate.append_sum();
  attr.set_post_ops(accumulate);
  const auto pd = matmul_pd(engine, a, b, c, attr);
  const Arguments arguments{{DNNL_ARG_SRC, empty(engine, a)},
                            {DNNL_ARG_WEIGHTS, empty(engine, b)},
                            {DNNL_ARG_DST, empty(engine, c)},
                            {DNNL_ARG_SCRATCHPAD, empty(engine, pd.scratchpad_desc())}};
  return {dnnl::matmul(pd), arguments, pd.scratchpad_desc().get_size()};
}

/// oneDNN 2.6.3 writes to the memory of an engine without a look whether it got any. So a larger
/// block is asked for first: where there is none, that is told as everywhere.
dnnl::engine make_engine() {
  release_aligned(allocate_aligned(size_t{1} << 20));
  return {dnnl::engine::kind::cpu, 0};
}

// --- The engine ---------------------------------------------------------------------------------

/// Channels that an implementation takes together, at most: the floats of a vector register.
constexpr int64_t kLargestBlock = 16;

/// For the gradient of 1x1 weights with a stride oneDNN copies the pixels that count into its
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

/// Keeps its primitives and its workspaces.
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
      return winograd::conv2d(g, x, weight, bias, y, other(winograd::workspace_bytes(g)), *this);
    }
    Pass& pass = made_for(g, convolutions_).forward;
    set(pass, DNNL_ARG_SRC, x);
    set(pass, DNNL_ARG_BIAS, bias);
    set(pass, DNNL_ARG_DST, y);
    run(pass, const_cast<Real*>(weight), nullptr);
  }

  void conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight,
                             Real* dx) override {
    if (winograd::fits(g)) {
      return winograd::conv2d_backward_input(g, dy, weight, dx, other(winograd::workspace_bytes(g)),
                                             *this);
    }
    if (few_channels::fits_backward_input(g)) {
      return few_channels::conv2d_backward_input(g, dy, weight, dx,
                                                 other(few_channels::workspace_bytes(g)));
    }
    Pass& pass = made_for(g, convolutions_).backward_data;
    set(pass, DNNL_ARG_DIFF_DST, dy);
    set(pass, DNNL_ARG_DIFF_SRC, dx);
    run(pass, const_cast<Real*>(weight), nullptr);
  }

  /// oneDNN overwrites, the catalogue adds: the result goes to the workspace first.
  void conv2d_backward_parameters(const Window2d& g, const Real* x, const Real* dy, Real* dweight,
                                  Real* dbias) override {
    if (winograd::fits(g)) {
      return winograd::conv2d_backward_parameters(g, x, dy, dweight, dbias,
                                                  other(winograd::workspace_bytes(g)), *this);
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
    Pass& pass = made_for(g, convolutions_).backward_weights;
    const int64_t weights = g.weight().elements();
    const size_t weight_bytes = align(weights * sizeof(Real));
    const size_t bias_bytes = align(g.out_channels * sizeof(Real));
    char* base =
        static_cast<char*>(workspace_.at_least(weight_bytes + bias_bytes + pass_bytes(pass)));
    Real* weight_sum = reinterpret_cast<Real*>(base);
    Real* bias_sum = reinterpret_cast<Real*>(base + weight_bytes);
    set(pass, DNNL_ARG_SRC, x);
    set(pass, DNNL_ARG_DIFF_DST, dy);
    set(pass, DNNL_ARG_DIFF_BIAS, bias_sum);
    run(pass, weight_sum, base + weight_bytes + bias_bytes);
    for (int64_t i = 0; i < weights; ++i) dweight[i] += weight_sum[i];
    for (int64_t o = 0; o < g.out_channels; ++o) dbias[o] += bias_sum[o];
  }

  void matmul(const MatMul& shape, const Real* a, const Real* b, Real* c) override {
    Primitive& product = made_for(shape, products_);
    Arguments& arguments = product.arguments;
    arguments.at(DNNL_ARG_SRC).set_data_handle(const_cast<Real*>(a));
    arguments.at(DNNL_ARG_WEIGHTS).set_data_handle(const_cast<Real*>(b));
    arguments.at(DNNL_ARG_DST).set_data_handle(c);
    arguments.at(DNNL_ARG_SCRATCHPAD).set_data_handle(workspace_.at_least(product.scratch_bytes));
    execute(product);
  }

 private:
  static void set(Pass& pass, int argument, const Real* data) {
    pass.main.arguments.at(argument).set_data_handle(const_cast<Real*>(data));
  }

  /// Workspace for the convolutions that are not oneDNN's.
  void* other(size_t bytes) { return other_ways_.at_least(bytes); }

  static size_t pass_bytes(const Pass& pass) {
    return align(pass.reordered_bytes) + align(pass.main.scratch_bytes);
  }

  void execute(Primitive& p) {
    if (!p.has_run) require_room_for_code();
    p.has_run = true;
    p.primitive.execute(stream_, p.arguments);
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

  /// The primitives for a shape, made by its first call.
  template <class Sizes, class Primitives>
  Primitives& made_for(const Sizes& sizes, std::map<Sizes, Primitives>& made) {
    const auto found = made.find(sizes);
    return found != made.end() ? found->second
                               : made.emplace(sizes, make_primitives(engine_, sizes)).first->second;
  }

  dnnl::engine engine_ = make_engine();
  dnnl::stream stream_{engine_};
  std::map<Window2d, ConvPrimitives> convolutions_;
  std::map<MatMul, Primitive> products_;
  Workspace workspace_, pixels_, other_ways_;
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
