#include "common/kernels/cuda/convolution.h"

#include <optional>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep::cuda {
namespace {

constexpr float kZero = 0, kOne = 1;
constexpr size_t kMostWorkspace = size_t{1} << 30;
constexpr int kProposals = 16;  // more than cuDNN has algorithms for any pass

/// Whether a status says that cuDNN has no such kernel (3000 to 3999 say why), not that it failed.
bool is_refusal(cudnnStatus_t status) { return status / 1000 == CUDNN_STATUS_NOT_SUPPORTED / 1000; }

/// Whether a status says that cuDNN does not take these arguments (2000 to 2999).
bool is_bad_call(cudnnStatus_t status) { return status / 1000 == CUDNN_STATUS_BAD_PARAM / 1000; }

/// Whether a proposal may be for us. cuDNN answers with several kinds of math, whatever the
/// descriptor says. Those for tensor cores round to TF32, and ALLOW_CONVERSION even to half.
bool is_for_us(cudnnMathType_t math, bool tf32) {
  return math == CUDNN_DEFAULT_MATH || math == CUDNN_FMA_MATH ||
         (tf32 && math == CUDNN_TENSOR_OP_MATH);
}

/// Makes a descriptor with cuDNN's own function and hands it to its owner.
template <class Owner, class Pointer>
Owner make(cudnnStatus_t (*create)(Pointer*), const char* call, const std::string& device) {
  Pointer made = nullptr;
  check(create(&made), call, device);
  return Owner(made);
}

}  // namespace

Convolutions::Convolutions(CudaStream& stream, cudaStream_t raw)
    : stream_(stream),
      tf32_(stream.device().options().tf32),
      channels_first_(stream.device().options().nchw) {
  const std::string device = stream_.device().name();
  handle_ = make<CudnnHandle>(cudnnCreate, "cudnnCreate", device);
  check_call(cudnnSetStream(handle_.get(), raw), "cudnnSetStream");
  identity_ = make<ActivationDescriptor>(cudnnCreateActivationDescriptor,
                                         "cudnnCreateActivationDescriptor", device);
  check_call(cudnnSetActivationDescriptor(identity_.get(), CUDNN_ACTIVATION_IDENTITY,
                                          CUDNN_NOT_PROPAGATE_NAN, 0),
             "cudnnSetActivationDescriptor");
}

void Convolutions::check_call(cudnnStatus_t status, const char* call) const {
  check(status, call, stream_.device().name());
}

// --- Plans -------------------------------------------------------------------------------------

Convolutions::Plan& Convolutions::plan(const Window2d& g) {
  const auto found = plans_.find(g);
  return found != plans_.end() ? found->second : plans_.emplace(g, make_plan(g)).first->second;
}

Convolutions::Plan Convolutions::make_plan(const Window2d& g) const {
  const std::string device = stream_.device().name();
  Plan plan{};
  plan.x = Operand(g.input(), channels_first_, device);
  plan.y = Operand(g.output(), channels_first_, device);
  plan.weight = Operand(g.weight(), channels_first_, device);
  plan.bias = Operand({1, 1, 1, g.out_channels}, channels_first_, device);
  plan.filter =
      make<FilterDescriptor>(cudnnCreateFilterDescriptor, "cudnnCreateFilterDescriptor", device);
  check_call(cudnnSetFilter4dDescriptor(plan.filter.get(), CUDNN_DATA_FLOAT,
                                        channels_first_ ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC,
                                        int(g.out_channels), int(g.in_channels), int(g.kernel),
                                        int(g.kernel)),
             "cudnnSetFilter4dDescriptor");
  plan.convolution = make<ConvolutionDescriptor>(cudnnCreateConvolutionDescriptor,
                                                 "cudnnCreateConvolutionDescriptor", device);
  const int padding = int(g.padding), stride = int(g.stride), dilation = 1;
  check_call(cudnnSetConvolution2dDescriptor(plan.convolution.get(), padding, padding, stride,
                                             stride, dilation, dilation, CUDNN_CROSS_CORRELATION,
                                             CUDNN_DATA_FLOAT),
             "cudnnSetConvolution2dDescriptor");
  // The default math may use TF32; FMA is float32 throughout.
  check_call(cudnnSetConvolutionMathType(plan.convolution.get(),
                                         tf32_ ? CUDNN_DEFAULT_MATH : CUDNN_FMA_MATH),
             "cudnnSetConvolutionMathType");
  return plan;
}

/// What is left of cuDNN's proposals. A proposal's memory size is for the math that it proposes;
/// asked for is that of the plan's math, and cuDNN may refuse the algorithm only then.
template <class Proposal, class Propose, class WorkspaceSize>
Convolutions::Choices<decltype(Proposal::algo)> Convolutions::choose(
    const Window2d& g, const char* call, Propose propose, WorkspaceSize workspace_size) const {
  int count = 0;
  Proposal proposals[kProposals];
  check_call(propose(kProposals, &count, proposals), call);
  Choices<decltype(Proposal::algo)> choices;
  for (const Proposal* p = proposals; p < proposals + count; ++p) {
    if (p->status != CUDNN_STATUS_SUCCESS || p->determinism != CUDNN_DETERMINISTIC ||
        !is_for_us(p->mathType, tf32_)) {
      continue;
    }
    size_t workspace = 0;
    const cudnnStatus_t status = workspace_size(p->algo, &workspace);
    if (is_refusal(status)) continue;
    check_call(status, "cudnnGetConvolution...WorkspaceSize");
    if (workspace <= kMostWorkspace) choices.push_back({p->algo, workspace});
  }
  if (choices.empty()) fail_without_algorithm(g);
  return choices;
}

void Convolutions::fail_without_algorithm(const Window2d& g) const {
  fail<DeviceError>(
      "{}: cuDNN runs no deterministic algorithm for a {}x{} convolution of {} to {} with stride "
      "{} and padding {}; use another shape, or --devices cpu:0",
      stream_.device().name(), g.kernel, g.kernel, g.input().text(), g.output().text(), g.stride,
      g.padding);
}

// --- Passes ------------------------------------------------------------------------------------

/// Runs a pass with the first of its choices that cuDNN runs and for which there is room, and
/// forgets those before it. `pass` gets the memory, the algorithm and the size of its workspace.
template <class Algorithm, class Pass>
void Convolutions::run(Choices<Algorithm>& choices, const Window2d& g, const char* call,
                       std::initializer_list<const Operand*> operands, Pass pass) {
  for (; !choices.empty(); choices.erase(choices.begin())) {
    const auto [algorithm, workspace] = choices.front();
    std::optional<PassMemory> memory;
    try {
      memory.emplace(stream_, handle_.get(), operands, workspace);
    } catch (const DeviceError&) {
      if (choices.size() == 1) throw;
      continue;
    }
    const cudnnStatus_t status = pass(*memory, algorithm, workspace);
    if (is_refusal(status)) continue;
    return check_call(status, call);
  }
  fail_without_algorithm(g);
}

bool Convolutions::forward(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
                           Real* y) {
  Plan& p = plan(g);
  if (p.forward.empty()) {
    p.forward = choose<cudnnConvolutionFwdAlgoPerf_t>(
        g, "cudnnGetConvolutionForwardAlgorithm_v7",
        [&](auto... answer) {
          return cudnnGetConvolutionForwardAlgorithm_v7(handle_.get(), p.x.given.get(),
                                                        p.filter.get(), p.convolution.get(),
                                                        p.y.given.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionForwardWorkspaceSize(handle_.get(), p.x.given.get(),
                                                         p.filter.get(), p.convolution.get(),
                                                         p.y.given.get(), answer...);
        });
  }
  bool has_bias = false;
  run(p.forward, g, "cudnnConvolutionForward", {&p.x, &p.weight, &p.y},
      [&](PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_x = memory.read(p.x, x);
        const Real* const given_weight = memory.read(p.weight, weight);
        Real* const written = memory.write(p.y, y);
        has_bias = forward_with_bias(p, given_x, given_weight, bias, written, memory.workspace());
        const cudnnStatus_t status =
            has_bias ? CUDNN_STATUS_SUCCESS
                     : cudnnConvolutionForward(handle_.get(), &kOne, p.x.given.get(), given_x,
                                               p.filter.get(), given_weight, p.convolution.get(),
                                               algorithm, memory.workspace(), bytes, &kZero,
                                               p.y.given.get(), written);
        if (status == CUDNN_STATUS_SUCCESS) memory.take_back(p.y, written, y, 0);
        return status;
      });
  return has_bias;
}

/// Only for the one algorithm for which cuDNN documents a bias without an activation after it.
bool Convolutions::forward_with_bias(Plan& p, const Real* x, const Real* weight, const Real* bias,
                                     Real* y, void* memory) {
  const auto [algorithm, workspace] = p.forward.front();
  if (!p.fuse_bias || algorithm != CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM) return false;
  const cudnnStatus_t status = cudnnConvolutionBiasActivationForward(
      handle_.get(), &kOne, p.x.given.get(), x, p.filter.get(), weight, p.convolution.get(),
      algorithm, memory, workspace, &kZero, p.y.given.get(), y, p.bias.given.get(), bias,
      identity_.get(), p.y.given.get(), y);
  // An optimisation that cuDNN does not offer here, or does not know: found out once per shape.
  if (is_refusal(status) || is_bad_call(status)) return p.fuse_bias = false;
  check_call(status, "cudnnConvolutionBiasActivationForward");
  return true;
}

void Convolutions::backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx) {
  Plan& p = plan(g);
  if (p.backward_input.empty()) {
    p.backward_input = choose<cudnnConvolutionBwdDataAlgoPerf_t>(
        g, "cudnnGetConvolutionBackwardDataAlgorithm_v7",
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardDataAlgorithm_v7(handle_.get(), p.filter.get(),
                                                             p.y.given.get(), p.convolution.get(),
                                                             p.x.given.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardDataWorkspaceSize(handle_.get(), p.filter.get(),
                                                              p.y.given.get(), p.convolution.get(),
                                                              p.x.given.get(), answer...);
        });
  }
  run(p.backward_input, g, "cudnnConvolutionBackwardData", {&p.weight, &p.y, &p.x},
      [&](PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_weight = memory.read(p.weight, weight);
        const Real* const given_dy = memory.read(p.y, dy);
        Real* const written = memory.write(p.x, dx);
        const cudnnStatus_t status = cudnnConvolutionBackwardData(
            handle_.get(), &kOne, p.filter.get(), given_weight, p.y.given.get(), given_dy,
            p.convolution.get(), algorithm, memory.workspace(), bytes, &kZero, p.x.given.get(),
            written);
        if (status == CUDNN_STATUS_SUCCESS) memory.take_back(p.x, written, dx, 0);
        return status;
      });
}

void Convolutions::backward_weight(const Window2d& g, const Real* x, const Real* dy,
                                   Real* dweight) {
  Plan& p = plan(g);
  if (p.backward_weight.empty()) {
    p.backward_weight = choose<cudnnConvolutionBwdFilterAlgoPerf_t>(
        g, "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle_.get(), p.x.given.get(),
                                                               p.y.given.get(), p.convolution.get(),
                                                               p.filter.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardFilterWorkspaceSize(
              handle_.get(), p.x.given.get(), p.y.given.get(), p.convolution.get(), p.filter.get(),
              answer...);
        });
  }
  run(p.backward_weight, g, "cudnnConvolutionBackwardFilter", {&p.x, &p.y, &p.weight},
      [&](PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_x = memory.read(p.x, x);
        const Real* const given_dy = memory.read(p.y, dy);
        Real* const written = memory.write(p.weight, dweight);
        const float* const beta = written == dweight ? &kOne : &kZero;  // a copy is added after it
        const cudnnStatus_t status = cudnnConvolutionBackwardFilter(
            handle_.get(), &kOne, p.x.given.get(), given_x, p.y.given.get(), given_dy,
            p.convolution.get(), algorithm, memory.workspace(), bytes, beta, p.filter.get(),
            written);
        if (status == CUDNN_STATUS_SUCCESS) memory.take_back(p.weight, written, dweight, 1);
        return status;
      });
}

}  // namespace lockstep::cuda
