#include "common/kernels/cpu/onednn_plans.h"

#include <sys/mman.h>

#include <utility>

#include "common/core/error.h"
#include "common/core/host.h"
#include "common/kernels/cpu/onednn_api.h"

namespace lockstep::cpu::onednn {
namespace {

using Tag = dnnl::memory::format_tag;
constexpr auto kFloat = dnnl::memory::data_type::f32;

/// If its compiler gets no memory, oneDNN may be killed by a signal, so this checks for memory
/// first.
void require_room_for_code() {
  constexpr size_t kRoom = size_t{32} << 20;
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

/// The caller that runs a plan provides its scratchpad.
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
  pass.scratch_bytes = pd.scratchpad_desc().get_size();
  arguments.emplace(weight_argument, empty(engine, preferred));
  arguments.emplace(DNNL_ARG_SCRATCHPAD, empty(engine, pd.scratchpad_desc()));
  if (preferred != ohwi) {
    pass.reordered_bytes = preferred.get_size();
    const bool gradient = weight_argument == DNNL_ARG_DIFF_WEIGHTS;
    dnnl::memory from = empty(engine, gradient ? preferred : ohwi);
    dnnl::memory to = empty(engine, gradient ? ohwi : preferred);
    pass.reorder = {dnnl::reorder(from, to), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}};
  }
  pass.main = {dnnl::primitive(pd.get()), std::move(arguments)};
  return pass;
}

}  // namespace

ConvPlan make_plan(const dnnl::engine& engine, const Window2d& g) {
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
  ConvPlan plan;
  plan.dweight_elements = static_cast<size_t>(g.weight().elements());
  plan.forward =
      make_pass(engine, forward, {{DNNL_ARG_SRC, x}, {DNNL_ARG_BIAS, bias}, {DNNL_ARG_DST, y}},
                DNNL_ARG_WEIGHTS, forward.weights_desc(), ohwi);
  plan.backward_data = make_pass(engine, data, {{DNNL_ARG_DIFF_DST, y}, {DNNL_ARG_DIFF_SRC, x}},
                                 DNNL_ARG_WEIGHTS, data.weights_desc(), ohwi);
  plan.backward_weights = make_pass(
      engine, weights, {{DNNL_ARG_SRC, x}, {DNNL_ARG_DIFF_DST, y}, {DNNL_ARG_DIFF_BIAS, bias}},
      DNNL_ARG_DIFF_WEIGHTS, weights.diff_weights_desc(), ohwi);
  return plan;
}

MatMulPlan make_plan(const dnnl::engine& engine, const MatMul& shape) {
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
  return {{dnnl::matmul(pd), arguments}, pd.scratchpad_desc().get_size()};
}

}  // namespace lockstep::cpu::onednn
