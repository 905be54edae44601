#include "common/kernels/cuda/convolution.h"

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

Convolutions::Convolutions(CudaStream& stream, cudaStream_t raw, bool tf32)
    : stream_(stream), tf32_(tf32) {
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
  const auto tensor = [&](int64_t n, int64_t height, int64_t width, int64_t channels) {
    TensorDescriptor made =
        make<TensorDescriptor>(cudnnCreateTensorDescriptor, "cudnnCreateTensorDescriptor", device);
    check_call(cudnnSetTensor4dDescriptor(made.get(), CUDNN_TENSOR_NHWC, CUDNN_DATA_FLOAT, int(n),
                                          int(channels), int(height), int(width)),
               "cudnnSetTensor4dDescriptor");
    return made;
  };
  Plan plan{};
  plan.x = tensor(g.batch, g.in_height, g.in_width, g.in_channels);
  plan.y = tensor(g.batch, g.out_height, g.out_width, g.out_channels);
  plan.bias = tensor(1, 1, 1, g.out_channels);
  plan.weight =
      make<FilterDescriptor>(cudnnCreateFilterDescriptor, "cudnnCreateFilterDescriptor", device);
  check_call(cudnnSetFilter4dDescriptor(plan.weight.get(), CUDNN_DATA_FLOAT, CUDNN_TENSOR_NHWC,
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

/// Runs a pass with the first of its choices that cuDNN runs, and forgets those before it.
template <class Algorithm, class Run>
void Convolutions::run(Choices<Algorithm>& choices, const Window2d& g, const char* call, Run run) {
  for (; !choices.empty(); choices.erase(choices.begin())) {
    const auto [algorithm, workspace] = choices.front();
    const cudnnStatus_t status = run(algorithm, stream_.scratch(workspace), workspace);
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
          return cudnnGetConvolutionForwardAlgorithm_v7(handle_.get(), p.x.get(), p.weight.get(),
                                                        p.convolution.get(), p.y.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionForwardWorkspaceSize(handle_.get(), p.x.get(), p.weight.get(),
                                                         p.convolution.get(), p.y.get(), answer...);
        });
  }
  if (forward_with_bias(p, x, weight, bias, y)) return true;
  run(p.forward, g, "cudnnConvolutionForward", [&](auto... algorithm_and_scratch) {
    return cudnnConvolutionForward(handle_.get(), &kOne, p.x.get(), x, p.weight.get(), weight,
                                   p.convolution.get(), algorithm_and_scratch..., &kZero, p.y.get(),
                                   y);
  });
  return false;
}

/// Only for the one algorithm for which cuDNN documents a bias without an activation after it.
bool Convolutions::forward_with_bias(Plan& p, const Real* x, const Real* weight, const Real* bias,
                                     Real* y) {
  const auto [algorithm, workspace] = p.forward.front();
  if (!p.fuse_bias || algorithm != CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM) return false;
  const cudnnStatus_t status = cudnnConvolutionBiasActivationForward(
      handle_.get(), &kOne, p.x.get(), x, p.weight.get(), weight, p.convolution.get(), algorithm,
      stream_.scratch(workspace), workspace, &kZero, p.y.get(), y, p.bias.get(), bias,
      identity_.get(), p.y.get(), y);
  if (is_refusal(status)) return p.fuse_bias = false;  // found out once per shape
  check_call(status, "cudnnConvolutionBiasActivationForward");
  return true;
}

void Convolutions::backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx) {
  Plan& p = plan(g);
  if (p.backward_input.empty()) {
    p.backward_input = choose<cudnnConvolutionBwdDataAlgoPerf_t>(
        g, "cudnnGetConvolutionBackwardDataAlgorithm_v7",
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardDataAlgorithm_v7(
              handle_.get(), p.weight.get(), p.y.get(), p.convolution.get(), p.x.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardDataWorkspaceSize(
              handle_.get(), p.weight.get(), p.y.get(), p.convolution.get(), p.x.get(), answer...);
        });
  }
  run(p.backward_input, g, "cudnnConvolutionBackwardData", [&](auto... algorithm_and_scratch) {
    return cudnnConvolutionBackwardData(handle_.get(), &kOne, p.weight.get(), weight, p.y.get(), dy,
                                        p.convolution.get(), algorithm_and_scratch..., &kZero,
                                        p.x.get(), dx);
  });
}

void Convolutions::backward_weight(const Window2d& g, const Real* x, const Real* dy,
                                   Real* dweight) {
  Plan& p = plan(g);
  if (p.backward_weight.empty()) {
    p.backward_weight = choose<cudnnConvolutionBwdFilterAlgoPerf_t>(
        g, "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardFilterAlgorithm_v7(
              handle_.get(), p.x.get(), p.y.get(), p.convolution.get(), p.weight.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardFilterWorkspaceSize(
              handle_.get(), p.x.get(), p.y.get(), p.convolution.get(), p.weight.get(), answer...);
        });
  }
  run(p.backward_weight, g, "cudnnConvolutionBackwardFilter", [&](auto... algorithm_and_scratch) {
    return cudnnConvolutionBackwardFilter(handle_.get(), &kOne, p.x.get(), x, p.y.get(), dy,
                                          p.convolution.get(), algorithm_and_scratch..., &kOne,
                                          p.weight.get(), dweight);
  });
}

}  // namespace lockstep::cuda
