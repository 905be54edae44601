#include "common/kernels/cuda/libraries.h"

#include <optional>
#include <utility>

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

/// NVIDIA's recommendation (cuBLAS documentation, cublasSetWorkspace): 32 MiB from Hopper on.
size_t recommended_workspace(int device, const std::string& name) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "cudaDeviceGetAttribute", name);
  return size_t{major >= 9 ? 32u : 4u} << 20;
}

cublasOperation_t operation(bool transpose) { return transpose ? CUBLAS_OP_T : CUBLAS_OP_N; }

TensorDescriptor describe_tensor(const Shape& shape, cudnnTensorFormat_t format,
                                 const std::string& device) {
  auto descriptor =
      make<TensorDescriptor>(cudnnCreateTensorDescriptor, "cudnnCreateTensorDescriptor", device);
  const int n = int(shape[0]), height = int(shape[1]), width = int(shape[2]);
  const int channels = int(shape[3]);
  check(cudnnSetTensor4dDescriptor(descriptor.get(), format, CUDNN_DATA_FLOAT, n, channels, height,
                                   width),
        "cudnnSetTensor4dDescriptor", device);
  return descriptor;
}

/// The copies and the workspace begin where cuDNN's vector loads want them.
size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Scratch memory of one pass: the copies of its operands, if there are any, and the workspace of
/// its algorithm.
class PassMemory {
 public:
  PassMemory(CudaStream& stream, cudnnHandle_t cudnn,
             std::initializer_list<const Operand*> operands, size_t workspace)
      : stream_(stream), cudnn_(cudnn) {
    size_t bytes = workspace;
    for (const Operand* operand : operands) bytes += operand->bytes;
    next_ = static_cast<char*>(stream_.scratch(bytes));
  }

  void* workspace() const { return next_; }
  /// Where cuDNN writes: the tensor itself, or room for a copy.
  Real* write(const Operand& operand, Real* tensor) {
    if (!operand.ours) return tensor;
    return reinterpret_cast<Real*>(std::exchange(next_, next_ + operand.bytes));
  }
  /// What cuDNN reads: the tensor itself, or a copy made here.
  const Real* read(const Operand& operand, const Real* tensor) {
    if (!operand.ours) return tensor;
    Real* const copy = write(operand, nullptr);
    check(cudnnTransformTensor(cudnn_, &kOne, operand.ours.get(), tensor, &kZero,
                               operand.given.get(), copy),
          "cudnnTransformTensor", stream_.device().name());
    return copy;
  }
  /// tensor = written + beta * tensor, unless cuDNN wrote there itself.
  void take_back(const Operand& operand, const Real* written, Real* tensor, float beta) const {
    if (!operand.ours) return;
    check(cudnnTransformTensor(cudnn_, &kOne, operand.given.get(), written, &beta,
                               operand.ours.get(), tensor),
          "cudnnTransformTensor", stream_.device().name());
  }

 private:
  CudaStream& stream_;
  cudnnHandle_t cudnn_;
  char* next_;  // free memory; after all copies it is the workspace
};

}  // namespace

Operand::Operand(const Shape& shape, bool channels_first, const std::string& device)
    : given(describe_tensor(shape, channels_first ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC, device)),
      ours(channels_first ? describe_tensor(shape, CUDNN_TENSOR_NHWC, device) : nullptr),
      bytes(channels_first ? aligned(shape.elements() * sizeof(Real)) : 0) {}

Libraries::Libraries(CudaStream& stream, cudaStream_t raw)
    : stream_(stream),
      raw_(raw),
      device_(stream.device().name()),
      tf32_(stream.device().options().tf32),
      channels_first_(stream.device().options().nchw) {}

// --- Matrix products (cuBLAS) -------------------------------------------------------------------

void Libraries::make_cublas() {
  cublasHandle_t made = nullptr;
  check(cublasCreate(&made), "cublasCreate", device_);
  cublas_.reset(made);
  check(cublasSetStream(made, raw_), "cublasSetStream", device_);
  // A workspace of our own is counted, and keeps results the same from run to run.
  workspace_ = std::make_unique<Buffer>(
      Stream(stream_), recommended_workspace(stream_.device().id().index, device_));
  check(cublasSetWorkspace(made, workspace_->data(), workspace_->bytes()), "cublasSetWorkspace",
        device_);
  check(cublasSetMathMode(made, tf32_ ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH),
        "cublasSetMathMode", device_);
}

/// cuBLAS stores columns first. A row-major matrix read in that way is its transpose, so we ask for
/// C^T = op(B)^T op(A)^T: the operands change places, and each keeps its flag.
void Libraries::matmul(const MatMul& shape, const Real* a, const Real* b, Real* c) {
  if (!cublas_) make_cublas();
  const int m = static_cast<int>(shape.m), n = static_cast<int>(shape.n),
            k = static_cast<int>(shape.k);
  const float* const beta = shape.accumulate ? &kOne : &kZero;
  check(
      cublasSgemm(cublas_.get(), operation(shape.transpose_b), operation(shape.transpose_a), n, m,
                  k, &kOne, b, shape.transpose_b ? k : n, a, shape.transpose_a ? m : k, beta, c, n),
      "cublasSgemm", device_);
}

// --- Convolutions (cuDNN) of one shape ---------------------------------------------------------

void Libraries::make_cudnn() {
  auto cudnn = make<CudnnHandle>(cudnnCreate, "cudnnCreate", device_);
  check_call(cudnnSetStream(cudnn.get(), raw_), "cudnnSetStream");
  identity_ = make<ActivationDescriptor>(cudnnCreateActivationDescriptor,
                                         "cudnnCreateActivationDescriptor", device_);
  check_call(cudnnSetActivationDescriptor(identity_.get(), CUDNN_ACTIVATION_IDENTITY,
                                          CUDNN_NOT_PROPAGATE_NAN, 0),
             "cudnnSetActivationDescriptor");
  cudnn_ = std::move(cudnn);
}

void Libraries::check_call(cudnnStatus_t status, const char* call) const {
  check(status, call, device_);
}

Libraries::Convolution& Libraries::convolution(const Window2d& g) {
  if (!cudnn_) make_cudnn();
  const auto found = convolutions_.find(g);
  return found != convolutions_.end() ? found->second
                                      : convolutions_.emplace(g, make_convolution(g)).first->second;
}

Libraries::Convolution Libraries::make_convolution(const Window2d& g) const {
  Convolution made{};
  made.x = Operand(g.input(), channels_first_, device_);
  made.y = Operand(g.output(), channels_first_, device_);
  made.weight = Operand(g.weight(), channels_first_, device_);
  made.bias = Operand({1, 1, 1, g.out_channels}, channels_first_, device_);
  made.filter =
      make<FilterDescriptor>(cudnnCreateFilterDescriptor, "cudnnCreateFilterDescriptor", device_);
  check_call(cudnnSetFilter4dDescriptor(made.filter.get(), CUDNN_DATA_FLOAT,
                                        channels_first_ ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC,
                                        int(g.out_channels), int(g.in_channels), int(g.kernel),
                                        int(g.kernel)),
             "cudnnSetFilter4dDescriptor");
  made.descriptor = make<ConvolutionDescriptor>(cudnnCreateConvolutionDescriptor,
                                                "cudnnCreateConvolutionDescriptor", device_);
  const int padding = int(g.padding), stride = int(g.stride), dilation = 1;
  check_call(cudnnSetConvolution2dDescriptor(made.descriptor.get(), padding, padding, stride,
                                             stride, dilation, dilation, CUDNN_CROSS_CORRELATION,
                                             CUDNN_DATA_FLOAT),
             "cudnnSetConvolution2dDescriptor");
  // The default math may use TF32; FMA is float32 throughout.
  check_call(cudnnSetConvolutionMathType(made.descriptor.get(),
                                         tf32_ ? CUDNN_DEFAULT_MATH : CUDNN_FMA_MATH),
             "cudnnSetConvolutionMathType");
  return made;
}

/// What is left of cuDNN's proposals. A proposal's memory size is for the math that it proposes;
/// asked for is that of the descriptor's math, and cuDNN may refuse the algorithm only then.
template <class Proposal, class Propose, class WorkspaceSize>
Libraries::Choices<decltype(Proposal::algo)> Libraries::choose(const Window2d& g, const char* call,
                                                               Propose propose,
                                                               WorkspaceSize workspace_size) const {
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

void Libraries::fail_without_algorithm(const Window2d& g) const {
  fail<DeviceError>(
      "{}: cuDNN runs no deterministic algorithm for a {}x{} convolution of {} to {} with stride "
      "{} and padding {}; use another shape, or --devices cpu:0",
      device_, g.kernel, g.kernel, g.input().text(), g.output().text(), g.stride, g.padding);
}

// --- Passes ------------------------------------------------------------------------------------

/// Runs a pass with the first of its choices that cuDNN runs and for which there is room, and
/// forgets those before it. `pass` gets the memory, the algorithm and the size of its workspace.
template <class Algorithm, class Pass>
void Libraries::run(Choices<Algorithm>& choices, const Window2d& g, const char* call,
                    std::initializer_list<const Operand*> operands, Pass pass) {
  for (; !choices.empty(); choices.erase(choices.begin())) {
    const auto [algorithm, workspace] = choices.front();
    std::optional<PassMemory> memory;
    try {
      memory.emplace(stream_, cudnn_.get(), operands, workspace);
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

bool Libraries::conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
                       Real* y) {
  Convolution& conv = convolution(g);
  if (conv.forward.empty()) {
    conv.forward = choose<cudnnConvolutionFwdAlgoPerf_t>(
        g, "cudnnGetConvolutionForwardAlgorithm_v7",
        [&](auto... answer) {
          return cudnnGetConvolutionForwardAlgorithm_v7(cudnn_.get(), conv.x.given.get(),
                                                        conv.filter.get(), conv.descriptor.get(),
                                                        conv.y.given.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionForwardWorkspaceSize(cudnn_.get(), conv.x.given.get(),
                                                         conv.filter.get(), conv.descriptor.get(),
                                                         conv.y.given.get(), answer...);
        });
  }
  bool has_bias = false;
  run(conv.forward, g, "cudnnConvolutionForward", {&conv.x, &conv.weight, &conv.y},
      [&](PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_x = memory.read(conv.x, x);
        const Real* const given_weight = memory.read(conv.weight, weight);
        Real* const written = memory.write(conv.y, y);
        has_bias = conv2d_with_bias(conv, given_x, given_weight, bias, written, memory.workspace());
        const cudnnStatus_t status =
            has_bias ? CUDNN_STATUS_SUCCESS
                     : cudnnConvolutionForward(cudnn_.get(), &kOne, conv.x.given.get(), given_x,
                                               conv.filter.get(), given_weight,
                                               conv.descriptor.get(), algorithm, memory.workspace(),
                                               bytes, &kZero, conv.y.given.get(), written);
        if (status == CUDNN_STATUS_SUCCESS) memory.take_back(conv.y, written, y, 0);
        return status;
      });
  return has_bias;
}

/// Only for the one algorithm for which cuDNN documents a bias without an activation after it.
bool Libraries::conv2d_with_bias(Convolution& conv, const Real* x, const Real* weight,
                                 const Real* bias, Real* y, void* memory) {
  const auto [algorithm, workspace] = conv.forward.front();
  if (!conv.fuse_bias || algorithm != CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM)
    return false;
  const cudnnStatus_t status = cudnnConvolutionBiasActivationForward(
      cudnn_.get(), &kOne, conv.x.given.get(), x, conv.filter.get(), weight, conv.descriptor.get(),
      algorithm, memory, workspace, &kZero, conv.y.given.get(), y, conv.bias.given.get(), bias,
      identity_.get(), conv.y.given.get(), y);
  // An optimisation that cuDNN does not offer here, or does not know: found out once per shape.
  if (is_refusal(status) || is_bad_call(status)) return conv.fuse_bias = false;
  check_call(status, "cudnnConvolutionBiasActivationForward");
  return true;
}

void Libraries::conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight,
                                      Real* dx) {
  Convolution& conv = convolution(g);
  if (conv.backward_input.empty()) {
    conv.backward_input = choose<cudnnConvolutionBwdDataAlgoPerf_t>(
        g, "cudnnGetConvolutionBackwardDataAlgorithm_v7",
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardDataAlgorithm_v7(
              cudnn_.get(), conv.filter.get(), conv.y.given.get(), conv.descriptor.get(),
              conv.x.given.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardDataWorkspaceSize(
              cudnn_.get(), conv.filter.get(), conv.y.given.get(), conv.descriptor.get(),
              conv.x.given.get(), answer...);
        });
  }
  run(conv.backward_input, g, "cudnnConvolutionBackwardData", {&conv.weight, &conv.y, &conv.x},
      [&](PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_weight = memory.read(conv.weight, weight);
        const Real* const given_dy = memory.read(conv.y, dy);
        Real* const written = memory.write(conv.x, dx);
        const cudnnStatus_t status = cudnnConvolutionBackwardData(
            cudnn_.get(), &kOne, conv.filter.get(), given_weight, conv.y.given.get(), given_dy,
            conv.descriptor.get(), algorithm, memory.workspace(), bytes, &kZero, conv.x.given.get(),
            written);
        if (status == CUDNN_STATUS_SUCCESS) memory.take_back(conv.x, written, dx, 0);
        return status;
      });
}

void Libraries::conv2d_backward_weight(const Window2d& g, const Real* x, const Real* dy,
                                       Real* dweight) {
  Convolution& conv = convolution(g);
  if (conv.backward_weight.empty()) {
    conv.backward_weight = choose<cudnnConvolutionBwdFilterAlgoPerf_t>(
        g, "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardFilterAlgorithm_v7(
              cudnn_.get(), conv.x.given.get(), conv.y.given.get(), conv.descriptor.get(),
              conv.filter.get(), answer...);
        },
        [&](auto... answer) {
          return cudnnGetConvolutionBackwardFilterWorkspaceSize(
              cudnn_.get(), conv.x.given.get(), conv.y.given.get(), conv.descriptor.get(),
              conv.filter.get(), answer...);
        });
  }
  run(conv.backward_weight, g, "cudnnConvolutionBackwardFilter", {&conv.x, &conv.y, &conv.weight},
      [&](PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_x = memory.read(conv.x, x);
        const Real* const given_dy = memory.read(conv.y, dy);
        Real* const written = memory.write(conv.weight, dweight);
        const float* const beta = written == dweight ? &kOne : &kZero;  // a copy is added after it
        const cudnnStatus_t status = cudnnConvolutionBackwardFilter(
            cudnn_.get(), &kOne, conv.x.given.get(), given_x, conv.y.given.get(), given_dy,
            conv.descriptor.get(), algorithm, memory.workspace(), bytes, beta, conv.filter.get(),
            written);
        if (status == CUDNN_STATUS_SUCCESS) memory.take_back(conv.weight, written, dweight, 1);
        return status;
      });
}

}  // namespace lockstep::cuda
