#include "common/kernels/cuda/libraries.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/kernels/cuda/cuda_kernels.h"
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

Layout describe(const Window2d& g, bool channels_first, const std::string& device) {
  const auto format = channels_first ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC;
  Layout made{.channels_first = channels_first,
              .x = describe_tensor(g.input(), format, device),
              .y = describe_tensor(g.output(), format, device),
              .bias = describe_tensor({1, 1, 1, g.out_channels}, format, device),
              .weight = make<FilterDescriptor>(cudnnCreateFilterDescriptor,
                                               "cudnnCreateFilterDescriptor", device)};
  check(cudnnSetFilter4dDescriptor(made.weight.get(), CUDNN_DATA_FLOAT, format, int(g.out_channels),
                                   int(g.in_channels), int(g.kernel), int(g.kernel)),
        "cudnnSetFilter4dDescriptor", device);
  return made;
}

/// What is fastest in float32 without tensor cores, as measured on an H200 for the convolutions of
/// the seed network and ResNet-18, batches of 64 and 256 (docs/results/convolutions-h200.md). There
/// cuDNN's first proposal took up to 4.7 times as long.
///
/// Both ways need channels first. A Fourier transform makes one product per number of the window's
/// spectrum, which pays where the image is not smaller than the transform. Winograd's takes 36
/// products for 16 outputs of a 3x3 window, where a sum takes 144; it also fits small images.
enum class Favourite { none, fourier, winograd };

constexpr int64_t kSmallestSpectrum = 12, kLargestSpectrum = 32;  // pixels of an image's side
constexpr int64_t kManyChannels = 32;

bool has_many_channels(const Window2d& g) {
  return std::min(g.in_channels, g.out_channels) >= kManyChannels;
}

Favourite favourite(const Window2d& g) {
  if (g.stride != 1 || g.kernel == 1) return Favourite::none;
  const auto [small, large] = std::minmax(g.in_height, g.in_width);
  if (small >= kSmallestSpectrum && large <= kLargestSpectrum) return Favourite::fourier;
  const bool fits = g.kernel == 3 && large < kSmallestSpectrum && has_many_channels(g);
  return fits ? Favourite::winograd : Favourite::none;
}

/// A favourite's algorithm in one pass.
template <class Algorithm>
std::optional<Algorithm> one_of(Favourite favourite, Algorithm fourier, Algorithm winograd) {
  if (favourite == Favourite::none) return std::nullopt;
  return favourite == Favourite::fourier ? fourier : winograd;
}

/// The copies and the workspace begin where cuDNN's vector loads want them.
size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Of a tensor that looks the same in both layouts no copy is made.
bool is_copied(const Shape& shape) { return shape[3] > 1 && shape[1] * shape[2] > 1; }

/// Scratch memory of one pass: the workspace of its algorithm and, for channels first, the copies.
class PassMemory {
 public:
  /// `copied`: the shapes (channels last) of the tensors that the pass reads or writes.
  PassMemory(CudaStream& stream, bool channels_first, std::initializer_list<Shape> copied,
             size_t workspace)
      : stream_(stream), channels_first_(channels_first) {
    size_t bytes = workspace;
    for (const Shape& shape : copied) bytes += bytes_of_copy(shape);
    next_ = static_cast<char*>(stream_.scratch(bytes));
  }

  void* workspace() const { return next_; }
  /// Where cuDNN writes: the tensor itself, or room for a copy.
  Real* write(const Shape& shape, Real* tensor) {
    const size_t bytes = bytes_of_copy(shape);
    return bytes == 0 ? tensor : reinterpret_cast<Real*>(std::exchange(next_, next_ + bytes));
  }
  /// What cuDNN reads: the tensor itself, or a copy made here.
  const Real* read(const Shape& shape, const Real* tensor) {
    if (bytes_of_copy(shape) == 0) return tensor;
    Real* const copy = write(shape, nullptr);
    transpose(stream_, {.images = shape[0],
                        .rows = shape[1] * shape[2],
                        .columns = shape[3],
                        .from = tensor,
                        .to = copy});
    return copy;
  }
  /// tensor = written + bias, or += written, unless cuDNN wrote there itself: whether that was
  /// done.
  bool take_back(const Shape& shape, const Real* written, Real* tensor, const Real* bias,
                 bool add) const {
    if (written == tensor) return false;
    transpose(stream_, {.images = shape[0],
                        .rows = shape[3],
                        .columns = shape[1] * shape[2],
                        .from = written,
                        .to = tensor,
                        .bias = bias,
                        .add = add});
    return true;
  }

 private:
  size_t bytes_of_copy(const Shape& shape) const {
    return channels_first_ && is_copied(shape) ? aligned(shape.elements() * sizeof(Real)) : 0;
  }

  CudaStream& stream_;
  const bool channels_first_;
  char* next_;  // free memory; after all copies it is the workspace
};

}  // namespace

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
  Convolution made;
  for (const bool channels_first : {false, true})
    made.layouts[channels_first] = describe(g, channels_first, device_);
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

/// Fills `ways`: the favourite, then cuDNN's proposals with the channels where the run has them,
/// then with the channels elsewhere; after each the algorithm that cuDNN always had (PyTorch's last
/// resort, too). A proposal's memory size is for the math that it proposes; asked for is that of
/// the descriptor's math, and cuDNN may refuse the algorithm only then.
template <class Proposal, class Propose, class WorkspaceSize>
void Libraries::choose(Ways<decltype(Proposal::algo)>& ways, const Convolution& conv,
                       const Window2d& g, std::optional<decltype(Proposal::algo)> favourite,
                       decltype(Proposal::algo) always, const char* call, Propose propose,
                       WorkspaceSize workspace_size) const {
  for (const bool channels_first : {channels_first_, !channels_first_}) {
    const Layout& layout = conv.layouts[channels_first];
    const auto add = [&](auto algorithm) {
      size_t workspace = 0;
      const cudnnStatus_t status = workspace_size(layout, algorithm, &workspace);
      if (is_refusal(status)) return;
      check_call(status, "cudnnGetConvolution...WorkspaceSize");
      if (workspace > kMostWorkspace) return;
      const bool first = channels_first && favourite == algorithm;
      ways.insert(first ? ways.begin() : ways.end(), {channels_first, algorithm, workspace});
    };
    int count = 0;
    Proposal proposals[kProposals];
    check_call(propose(layout, kProposals, &count, proposals), call);
    for (const Proposal* p = proposals; p < proposals + count; ++p) {
      if (p->status == CUDNN_STATUS_SUCCESS && p->determinism == CUDNN_DETERMINISTIC &&
          is_for_us(p->mathType, tf32_)) {
        add(p->algo);
      }
    }
    add(always);
  }
  if (ways.empty()) fail_without_algorithm(g);
}

void Libraries::fail_without_algorithm(const Window2d& g) const {
  fail<DeviceError>(
      "{}: cuDNN runs no deterministic algorithm for a {}x{} convolution of {} to {} with stride "
      "{} and padding {}; use another shape, or --devices cpu:0",
      device_, g.kernel, g.kernel, g.input().text(), g.output().text(), g.stride, g.padding);
}

// --- Passes ------------------------------------------------------------------------------------

/// Runs a pass in the first of its ways that cuDNN runs and for which there is room, and forgets
/// those before it. `pass` gets the layout, the memory, the algorithm and its workspace's size.
template <class Algorithm, class Pass>
void Libraries::run(Ways<Algorithm>& ways, const Convolution& conv, const Window2d& g,
                    const char* call, std::initializer_list<Shape> copied, Pass pass) {
  for (; !ways.empty(); ways.erase(ways.begin())) {
    const auto [channels_first, algorithm, workspace] = ways.front();
    std::optional<PassMemory> memory;
    try {
      memory.emplace(stream_, channels_first, copied, workspace);
    } catch (const DeviceError&) {
      if (ways.size() == 1) throw;
      continue;
    }
    const cudnnStatus_t status = pass(conv.layouts[channels_first], *memory, algorithm, workspace);
    if (is_refusal(status)) continue;
    return check_call(status, call);
  }
  fail_without_algorithm(g);
}

bool Libraries::conv2d(const Window2d& g, const Real* x, const Real* weight, const Real* bias,
                       Real* y) {
  Convolution& conv = convolution(g);
  if (conv.forward.empty()) {
    // Few channels: a sum over the window is faster than any transform.
    const Favourite best = tf32_ || !has_many_channels(g) ? Favourite::none : favourite(g);
    choose<cudnnConvolutionFwdAlgoPerf_t>(
        conv.forward, conv, g,
        one_of(best, CUDNN_CONVOLUTION_FWD_ALGO_FFT, CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED),
        CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, "cudnnGetConvolutionForwardAlgorithm_v7",
        [&](const Layout& in, auto... answer) {
          return cudnnGetConvolutionForwardAlgorithm_v7(cudnn_.get(), in.x.get(), in.weight.get(),
                                                        conv.descriptor.get(), in.y.get(),
                                                        answer...);
        },
        [&](const Layout& in, auto... answer) {
          return cudnnGetConvolutionForwardWorkspaceSize(cudnn_.get(), in.x.get(), in.weight.get(),
                                                         conv.descriptor.get(), in.y.get(),
                                                         answer...);
        });
  }
  bool has_bias = false;
  run(conv.forward, conv, g, "cudnnConvolutionForward", {g.input(), g.weight(), g.output()},
      [&](const Layout& in, PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_x = memory.read(g.input(), x);
        const Real* const given_weight = memory.read(g.weight(), weight);
        Real* const written = memory.write(g.output(), y);
        has_bias = written == y &&
                   conv2d_with_bias(conv, in, given_x, given_weight, bias, y, memory.workspace());
        if (has_bias) return CUDNN_STATUS_SUCCESS;
        const cudnnStatus_t status =
            cudnnConvolutionForward(cudnn_.get(), &kOne, in.x.get(), given_x, in.weight.get(),
                                    given_weight, conv.descriptor.get(), algorithm,
                                    memory.workspace(), bytes, &kZero, in.y.get(), written);
        if (status == CUDNN_STATUS_SUCCESS)
          has_bias = memory.take_back(g.output(), written, y, bias, /*add=*/false);
        return status;
      });
  return has_bias;
}

/// Only for the one algorithm for which cuDNN documents a bias without an activation after it.
bool Libraries::conv2d_with_bias(Convolution& conv, const Layout& layout, const Real* x,
                                 const Real* weight, const Real* bias, Real* y, void* memory) {
  const auto [channels_first, algorithm, workspace] = conv.forward.front();
  if (!conv.fuse_bias || algorithm != CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM)
    return false;
  const cudnnStatus_t status = cudnnConvolutionBiasActivationForward(
      cudnn_.get(), &kOne, layout.x.get(), x, layout.weight.get(), weight, conv.descriptor.get(),
      algorithm, memory, workspace, &kZero, layout.y.get(), y, layout.bias.get(), bias,
      identity_.get(), layout.y.get(), y);
  // An optimisation that cuDNN does not offer here, or does not know: found out once per shape.
  if (is_refusal(status) || is_bad_call(status)) return conv.fuse_bias = false;
  check_call(status, "cudnnConvolutionBiasActivationForward");
  return true;
}

void Libraries::conv2d_backward_input(const Window2d& g, const Real* dy, const Real* weight,
                                      Real* dx) {
  Convolution& conv = convolution(g);
  if (conv.backward_input.empty()) {
    choose<cudnnConvolutionBwdDataAlgoPerf_t>(
        conv.backward_input, conv, g,
        one_of(tf32_ ? Favourite::none : favourite(g), CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT,
               CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD_NONFUSED),
        CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, "cudnnGetConvolutionBackwardDataAlgorithm_v7",
        [&](const Layout& in, auto... answer) {
          return cudnnGetConvolutionBackwardDataAlgorithm_v7(cudnn_.get(), in.weight.get(),
                                                             in.y.get(), conv.descriptor.get(),
                                                             in.x.get(), answer...);
        },
        [&](const Layout& in, auto... answer) {
          return cudnnGetConvolutionBackwardDataWorkspaceSize(cudnn_.get(), in.weight.get(),
                                                              in.y.get(), conv.descriptor.get(),
                                                              in.x.get(), answer...);
        });
  }
  run(conv.backward_input, conv, g, "cudnnConvolutionBackwardData",
      {g.weight(), g.output(), g.input()},
      [&](const Layout& in, PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_weight = memory.read(g.weight(), weight);
        const Real* const given_dy = memory.read(g.output(), dy);
        Real* const written = memory.write(g.input(), dx);
        const cudnnStatus_t status =
            cudnnConvolutionBackwardData(cudnn_.get(), &kOne, in.weight.get(), given_weight,
                                         in.y.get(), given_dy, conv.descriptor.get(), algorithm,
                                         memory.workspace(), bytes, &kZero, in.x.get(), written);
        if (status == CUDNN_STATUS_SUCCESS)
          memory.take_back(g.input(), written, dx, /*bias=*/nullptr, /*add=*/false);
        return status;
      });
}

void Libraries::conv2d_backward_weight(const Window2d& g, const Real* x, const Real* dy,
                                       Real* dweight) {
  Convolution& conv = convolution(g);
  if (conv.backward_weight.empty()) {
    choose<cudnnConvolutionBwdFilterAlgoPerf_t>(
        conv.backward_weight, conv, g,
        one_of(tf32_ ? Favourite::none : favourite(g), CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT,
               CUDNN_CONVOLUTION_BWD_FILTER_ALGO_WINOGRAD_NONFUSED),
        CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, "cudnnGetConvolutionBackwardFilterAlgorithm_v7",
        [&](const Layout& in, auto... answer) {
          return cudnnGetConvolutionBackwardFilterAlgorithm_v7(cudnn_.get(), in.x.get(), in.y.get(),
                                                               conv.descriptor.get(),
                                                               in.weight.get(), answer...);
        },
        [&](const Layout& in, auto... answer) {
          return cudnnGetConvolutionBackwardFilterWorkspaceSize(cudnn_.get(), in.x.get(),
                                                                in.y.get(), conv.descriptor.get(),
                                                                in.weight.get(), answer...);
        });
  }
  run(conv.backward_weight, conv, g, "cudnnConvolutionBackwardFilter",
      {g.input(), g.output(), g.weight()},
      [&](const Layout& in, PassMemory& memory, auto algorithm, size_t bytes) {
        const Real* const given_x = memory.read(g.input(), x);
        const Real* const given_dy = memory.read(g.output(), dy);
        Real* const written = memory.write(g.weight(), dweight);
        const float* const beta = written == dweight ? &kOne : &kZero;  // a copy is added after it
        const cudnnStatus_t status = cudnnConvolutionBackwardFilter(
            cudnn_.get(), &kOne, in.x.get(), given_x, in.y.get(), given_dy, conv.descriptor.get(),
            algorithm, memory.workspace(), bytes, beta, in.weight.get(), written);
        if (status == CUDNN_STATUS_SUCCESS)
          memory.take_back(g.weight(), written, dweight, /*bias=*/nullptr, /*add=*/true);
        return status;
      });
}

}  // namespace lockstep::cuda
