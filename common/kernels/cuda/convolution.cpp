#include "common/kernels/cuda/convolution.h"

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda_stream.h"

namespace lockstep::cuda {
namespace {

constexpr float kZero = 0, kOne = 1;
constexpr size_t kMostWorkspace = size_t{1} << 30;
constexpr int kProposals = 16;  // more than cuDNN has algorithms for any pass

/// Takes the fastest proposal, by cuDNN's estimate, that gives the same bits every time.
template <class Proposal>
const Proposal& first_deterministic(const Proposal* proposals, int count, const Window2d& g,
                                    const std::string& device) {
  for (const Proposal* p = proposals; p < proposals + count; ++p) {
    if (p->status == CUDNN_STATUS_SUCCESS && p->determinism == CUDNN_DETERMINISTIC &&
        p->memory <= kMostWorkspace) {
      return *p;
    }
  }
  fail<DeviceError>(
      "{}: cuDNN proposes no deterministic algorithm for a {}x{} convolution of {} to {} with "
      "stride "
      "{} and padding {}; use another shape, or --devices cpu:0",
      device, g.kernel, g.kernel, g.input().text(), g.output().text(), g.stride, g.padding);
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

Convolutions::Plan Convolutions::make_plan(const Window2d& g) {
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
  choose_algorithms(plan, g);
  return plan;
}

/// A proposal's memory size is for the math that it proposes; we allocate for the math that the
/// plan uses.
void Convolutions::choose_algorithms(Plan& plan, const Window2d& g) {
  const std::string device = stream_.device().name();
  int count = 0;
  cudnnConvolutionFwdAlgoPerf_t forward[kProposals];
  check_call(cudnnGetConvolutionForwardAlgorithm_v7(handle_.get(), plan.x.get(), plan.weight.get(),
                                                    plan.convolution.get(), plan.y.get(),
                                                    kProposals, &count, forward),
             "cudnnGetConvolutionForwardAlgorithm_v7");
  const auto& f = first_deterministic(forward, count, g, device);
  plan.forward.algorithm = f.algo;
  check_call(cudnnGetConvolutionForwardWorkspaceSize(handle_.get(), plan.x.get(), plan.weight.get(),
                                                     plan.convolution.get(), plan.y.get(), f.algo,
                                                     &plan.forward.workspace),
             "cudnnGetConvolutionForwardWorkspaceSize");
  // The only algorithm for which cuDNN documents a bias without an activation after it.
  plan.fuse_bias = f.algo == CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;

  cudnnConvolutionBwdDataAlgoPerf_t input[kProposals];
  check_call(cudnnGetConvolutionBackwardDataAlgorithm_v7(handle_.get(), plan.weight.get(),
                                                         plan.y.get(), plan.convolution.get(),
                                                         plan.x.get(), kProposals, &count, input),
             "cudnnGetConvolutionBackwardDataAlgorithm_v7");
  const auto& i = first_deterministic(input, count, g, device);
  plan.backward_input.algorithm = i.algo;
  check_call(cudnnGetConvolutionBackwardDataWorkspaceSize(
                 handle_.get(), plan.weight.get(), plan.y.get(), plan.convolution.get(),
                 plan.x.get(), i.algo, &plan.backward_input.workspace),
             "cudnnGetConvolutionBackwardDataWorkspaceSize");

  cudnnConvolutionBwdFilterAlgoPerf_t weight[kProposals];
  check_call(cudnnGetConvolutionBackwardFilterAlgorithm_v7(
                 handle_.get(), plan.x.get(), plan.y.get(), plan.convolution.get(),
                 plan.weight.get(), kProposals, &count, weight),
             "cudnnGetConvolutionBackwardFilterAlgorithm_v7");
  const auto& w = first_deterministic(weight, count, g, device);
  plan.backward_weight.algorithm = w.algo;
  check_call(cudnnGetConvolutionBackwardFilterWorkspaceSize(
                 handle_.get(), plan.x.get(), plan.y.get(), plan.convolution.get(),
                 plan.weight.get(), w.algo, &plan.backward_weight.workspace),
             "cudnnGetConvolutionBackwardFilterWorkspaceSize");
}

// --- Passes ------------------------------------------------------------------------------------

bool Convolutions::forward(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
                           Real* y) {
  Plan& p = plan(g);
  if (p.fuse_bias && forward_with_bias(p, x, weight, bias, y)) return true;
  check_call(cudnnConvolutionForward(handle_.get(), &kOne, p.x.get(), x, p.weight.get(), weight,
                                     p.convolution.get(), p.forward.algorithm,
                                     stream_.scratch(p.forward.workspace), p.forward.workspace,
                                     &kZero, p.y.get(), y),
             "cudnnConvolutionForward");
  return false;
}

bool Convolutions::forward_with_bias(Plan& p, const Real* x, const Real* weight, const Real* bias,
                                     Real* y) {
  const cudnnStatus_t status = cudnnConvolutionBiasActivationForward(
      handle_.get(), &kOne, p.x.get(), x, p.weight.get(), weight, p.convolution.get(),
      p.forward.algorithm, stream_.scratch(p.forward.workspace), p.forward.workspace, &kZero,
      p.y.get(), y, p.bias.get(), bias, identity_.get(), p.y.get(), y);
  // Statuses 3000 to 3999 say why something is not supported. This is found out once per shape.
  if (status / 1000 == CUDNN_STATUS_NOT_SUPPORTED / 1000) return p.fuse_bias = false;
  check_call(status, "cudnnConvolutionBiasActivationForward");
  return true;
}

void Convolutions::backward_input(const Window2d& g, const Real* dy, const Real* weight, Real* dx) {
  Plan& p = plan(g);
  check_call(cudnnConvolutionBackwardData(handle_.get(), &kOne, p.weight.get(), weight, p.y.get(),
                                          dy, p.convolution.get(), p.backward_input.algorithm,
                                          stream_.scratch(p.backward_input.workspace),
                                          p.backward_input.workspace, &kZero, p.x.get(), dx),
             "cudnnConvolutionBackwardData");
}

void Convolutions::backward_weight(const Window2d& g, const Real* x, const Real* dy,
                                   Real* dweight) {
  Plan& p = plan(g);
  check_call(cudnnConvolutionBackwardFilter(
                 handle_.get(), &kOne, p.x.get(), x, p.y.get(), dy, p.convolution.get(),
                 p.backward_weight.algorithm, stream_.scratch(p.backward_weight.workspace),
                 p.backward_weight.workspace, &kOne, p.weight.get(), dweight),
             "cudnnConvolutionBackwardFilter");
}

}  // namespace lockstep::cuda
