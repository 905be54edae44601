// Convolutions by cuDNN: which algorithm, in which layout, with which memory.

#include <algorithm>
#include <optional>
#include <utility>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/kernels/cuda/cuda_kernels.h"
#include "common/kernels/cuda/cuda_stream.h"
#include "common/kernels/cuda/libraries.h"

namespace lockstep::cuda {
namespace {

constexpr size_t kMostWorkspace = size_t{1} << 30;
constexpr int kProposals = 16;  // more than cuDNN has algorithms for any pass

/// Whether a status says that cuDNN has no such kernel (3000 to 3999 say why), not that it failed.
bool is_refusal(cudnnStatus_t status) { return status / 1000 == CUDNN_STATUS_NOT_SUPPORTED / 1000; }

/// Whether a status says that cuDNN does not take these arguments (2000 to 2999).
bool is_bad_call(cudnnStatus_t status) { return status / 1000 == CUDNN_STATUS_BAD_PARAM / 1000; }

/// Whether a proposal may be for us. cuDNN answers with several kinds of math, whatever the
/// descriptor says. Those for tensor cores round float32 to TF32, and ALLOW_CONVERSION even to
/// half.
bool is_for_us(cudnnMathType_t math, bool tensor_cores) {
  return math == CUDNN_DEFAULT_MATH || math == CUDNN_FMA_MATH ||
         (tensor_cores && math == CUDNN_TENSOR_OP_MATH);
}

cudnnDataType_t cudnn_type(ElementType type) {
  if (type == ElementType::bf16) return CUDNN_DATA_BFLOAT16;
  return type == ElementType::fp16 ? CUDNN_DATA_HALF : CUDNN_DATA_FLOAT;
}

const char* place_of_channels(bool first) { return first ? "first" : "last"; }

/// Makes a descriptor with cuDNN's own function and hands it to its owner.
template <class Owner, class Pointer>
Owner make(cudnnStatus_t (*create)(Pointer*), const char* call, const std::string& device) {
  Pointer made = nullptr;
  check(create(&made), call, device);
  return Owner(made);
}

TensorDescriptor describe_tensor(const Shape& shape, cudnnTensorFormat_t format,
                                 cudnnDataType_t type, const std::string& device) {
  auto descriptor =
      make<TensorDescriptor>(cudnnCreateTensorDescriptor, "cudnnCreateTensorDescriptor", device);
  const int n = int(shape[0]), height = int(shape[1]), width = int(shape[2]);
  const int channels = int(shape[3]);
  check(cudnnSetTensor4dDescriptor(descriptor.get(), format, type, n, channels, height, width),
        "cudnnSetTensor4dDescriptor", device);
  return descriptor;
}

Layout layout_of(const Window2d& g, bool channels_first, cudnnDataType_t type,
                 const std::string& device) {
  const auto format = channels_first ? CUDNN_TENSOR_NCHW : CUDNN_TENSOR_NHWC;
  Layout made{.x = describe_tensor(g.input(), format, type, device),
              .y = describe_tensor(g.output(), format, type, device),
              .bias = describe_tensor({1, 1, 1, g.out_channels}, format, CUDNN_DATA_FLOAT, device),
              .weight = make<FilterDescriptor>(cudnnCreateFilterDescriptor,
                                               "cudnnCreateFilterDescriptor", device)};
  check(cudnnSetFilter4dDescriptor(made.weight.get(), type, format, int(g.out_channels),
                                   int(g.in_channels), int(g.kernel), int(g.kernel)),
        "cudnnSetFilter4dDescriptor", device);
  return made;
}

// --- What is fastest -----------------------------------------------------------------------------

// In float32 without tensor cores, as measured on an H200 for the convolutions of the seed network
// and ResNet-18, batches of 64 and 256 (docs/results/convolutions-h200.md). cuDNN's estimates miss
// it: the first deterministic algorithm that they name took up to 5 times as long.

/// Ways to compute a convolution with few multiplications. Both need channels first. A Fourier
/// transform makes one product per number of the window's spectrum, which pays where the image is
/// as large as the transform. Winograd's algorithm takes 36 products for 16 outputs of a 3x3
/// window, where sums take 144; it fits small images, too.
enum class Fast { none, fourier, winograd };

constexpr int64_t kSmallestSpectrum = 12, kLargestSpectrum = 32;  // pixels of an image's side
constexpr int64_t kManyChannels = 32;

bool has_many_channels(const Window2d& g) {
  return std::min(g.in_channels, g.out_channels) >= kManyChannels;
}

Fast fast_way(const Window2d& g) {
  if (g.stride != 1 || g.kernel == 1) return Fast::none;
  const auto [small, large] = std::minmax(g.in_height, g.in_width);
  if (small >= kSmallestSpectrum && large <= kLargestSpectrum) return Fast::fourier;
  const bool fits = g.kernel == 3 && large < kSmallestSpectrum && has_many_channels(g);
  return fits ? Fast::winograd : Fast::none;
}

Window2d at_every_pixel(Window2d g) {
  g.stride = 1;
  g.out_height = g.in_height + 2 * g.padding - g.kernel + 1;
  g.out_width = g.in_width + 2 * g.padding - g.kernel + 1;
  return g;
}

/// Whether the gradient of the input is computed as that of the same window at every pixel, with
/// zeros between the pixels of dy: four times the pixels, but a fast way serves, which knows no
/// stride.
bool is_spread(const Window2d& g) {
  return g.stride == 2 && g.kernel == 3 && has_many_channels(g) &&
         fast_way(at_every_pixel(g)) != Fast::none;
}

// --- cuDNN's functions and algorithms, by pass ---------------------------------------------------

// `always` is what PyTorch falls back to, too: cuDNN has it for every convolution.

struct Forward {
  using Proposal = cudnnConvolutionFwdAlgoPerf_t;
  using Algorithm = cudnnConvolutionFwdAlgo_t;
  static constexpr Algorithm fourier = CUDNN_CONVOLUTION_FWD_ALGO_FFT,
                             winograd = CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED,
                             always = CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;
  static constexpr const char* asked = "cudnnGetConvolutionForwardAlgorithm_v7";
  static constexpr const char* computes = "outputs";
  static constexpr const char* called = "cudnnConvolutionForward";
  template <class... Answer>
  static cudnnStatus_t propose(cudnnHandle_t cudnn, const Layout& in,
                               cudnnConvolutionDescriptor_t conv, Answer... answer) {
    return cudnnGetConvolutionForwardAlgorithm_v7(cudnn, in.x.get(), in.weight.get(), conv,
                                                  in.y.get(), answer...);
  }
  static cudnnStatus_t workspace(cudnnHandle_t cudnn, const Layout& in,
                                 cudnnConvolutionDescriptor_t conv, Algorithm algorithm,
                                 size_t* bytes) {
    return cudnnGetConvolutionForwardWorkspaceSize(cudnn, in.x.get(), in.weight.get(), conv,
                                                   in.y.get(), algorithm, bytes);
  }
};

struct BackwardInput {
  using Proposal = cudnnConvolutionBwdDataAlgoPerf_t;
  using Algorithm = cudnnConvolutionBwdDataAlgo_t;
  static constexpr Algorithm fourier = CUDNN_CONVOLUTION_BWD_DATA_ALGO_FFT,
                             winograd = CUDNN_CONVOLUTION_BWD_DATA_ALGO_WINOGRAD_NONFUSED,
                             always = CUDNN_CONVOLUTION_BWD_DATA_ALGO_1;
  static constexpr const char* asked = "cudnnGetConvolutionBackwardDataAlgorithm_v7";
  static constexpr const char* computes = "gradients of inputs";
  static constexpr const char* called = "cudnnConvolutionBackwardData";
  template <class... Answer>
  static cudnnStatus_t propose(cudnnHandle_t cudnn, const Layout& in,
                               cudnnConvolutionDescriptor_t conv, Answer... answer) {
    return cudnnGetConvolutionBackwardDataAlgorithm_v7(cudnn, in.weight.get(), in.y.get(), conv,
                                                       in.x.get(), answer...);
  }
  static cudnnStatus_t workspace(cudnnHandle_t cudnn, const Layout& in,
                                 cudnnConvolutionDescriptor_t conv, Algorithm algorithm,
                                 size_t* bytes) {
    return cudnnGetConvolutionBackwardDataWorkspaceSize(cudnn, in.weight.get(), in.y.get(), conv,
                                                        in.x.get(), algorithm, bytes);
  }
};

struct BackwardWeight {
  using Proposal = cudnnConvolutionBwdFilterAlgoPerf_t;
  using Algorithm = cudnnConvolutionBwdFilterAlgo_t;
  static constexpr Algorithm fourier = CUDNN_CONVOLUTION_BWD_FILTER_ALGO_FFT,
                             winograd = CUDNN_CONVOLUTION_BWD_FILTER_ALGO_WINOGRAD_NONFUSED,
                             always = CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1;
  static constexpr const char* asked = "cudnnGetConvolutionBackwardFilterAlgorithm_v7";
  static constexpr const char* computes = "gradients of weights";
  static constexpr const char* called = "cudnnConvolutionBackwardFilter";
  template <class... Answer>
  static cudnnStatus_t propose(cudnnHandle_t cudnn, const Layout& in,
                               cudnnConvolutionDescriptor_t conv, Answer... answer) {
    return cudnnGetConvolutionBackwardFilterAlgorithm_v7(cudnn, in.x.get(), in.y.get(), conv,
                                                         in.weight.get(), answer...);
  }
  static cudnnStatus_t workspace(cudnnHandle_t cudnn, const Layout& in,
                                 cudnnConvolutionDescriptor_t conv, Algorithm algorithm,
                                 size_t* bytes) {
    return cudnnGetConvolutionBackwardFilterWorkspaceSize(cudnn, in.x.get(), in.y.get(), conv,
                                                          in.weight.get(), algorithm, bytes);
  }
};

template <class Pass>
std::optional<typename Pass::Algorithm> algorithm_of(Fast way) {
  if (way == Fast::none) return std::nullopt;
  return way == Fast::fourier ? Pass::fourier : Pass::winograd;
}

// --- Memory --------------------------------------------------------------------------------------

/// Copies and workspaces begin where cuDNN's vector loads want them.
template <class T>
size_t aligned_bytes(const Shape& shape) {
  return (shape.elements() * sizeof(T) + 255) / 256 * 256;
}

/// A tensor that looks the same in both layouts is not copied.
bool looks_different(const Shape& shape) { return shape[3] > 1 && shape[1] * shape[2] > 1; }

}  // namespace

/// Scratch memory of one pass: the workspace of its algorithm, the copies for channels first, and
/// room for what the pass makes itself. All are numbers T.
template <class T>
class PassMemory {
 public:
  /// `tensors`: the shapes (channels last) of what the pass reads or writes. `made`: of what it
  /// makes; empty: nothing.
  PassMemory(CudaStream& stream, bool channels_first, std::initializer_list<Shape> tensors,
             const std::optional<Shape>& made, size_t workspace)
      : stream_(stream), channels_first_(channels_first) {
    size_t bytes = workspace + (made ? aligned_bytes<T>(*made) : 0);
    for (const Shape& shape : tensors) bytes += is_copied(shape) ? aligned_bytes<T>(shape) : 0;
    next_ = static_cast<char*>(stream_.scratch(bytes));
  }

  void* workspace() const { return next_; }
  T* room(const Shape& shape) {
    return reinterpret_cast<T*>(std::exchange(next_, next_ + aligned_bytes<T>(shape)));
  }
  /// Where cuDNN writes: the tensor itself, or room for a copy.
  T* write(const Shape& shape, T* tensor) { return is_copied(shape) ? room(shape) : tensor; }
  /// What cuDNN reads: the tensor itself, or a copy made here.
  const T* read(const Shape& shape, const T* tensor) {
    if (!is_copied(shape)) return tensor;
    T* const copy = room(shape);
    transpose(stream_, Transpose<T, T>{.images = shape[0],
                                       .rows = shape[1] * shape[2],
                                       .columns = shape[3],
                                       .from = tensor,
                                       .to = copy});
    return copy;
  }
  /// tensor = written + bias; nothing if cuDNN wrote there itself.
  void take_back(const Shape& shape, const T* written, T* tensor, const Real* bias) const {
    if (written == tensor) return;
    transpose(stream_, Transpose<T, T>{.images = shape[0],
                                       .rows = shape[3],
                                       .columns = shape[1] * shape[2],
                                       .from = written,
                                       .to = tensor,
                                       .bias = bias});
  }
  /// Where cuDNN writes what is added to a tensor: there itself, if it can add and writes Real.
  T* write_sum(const Shape& shape, Real* tensor) {
    if constexpr (std::is_same_v<T, Real>) {
      return write(shape, tensor);
    } else {
      return room(shape);
    }
  }
  /// tensor += written; nothing if cuDNN added there itself.
  void add_back(const Shape& shape, const T* written, Real* tensor) const {
    if (static_cast<const void*>(written) == tensor) return;
    if constexpr (!std::is_same_v<T, Real>) {
      if (!is_copied(shape)) return add_to(stream_, shape.elements(), written, tensor);
    }
    transpose(stream_, Transpose<T, Real>{.images = shape[0],
                                          .rows = shape[3],
                                          .columns = shape[1] * shape[2],
                                          .from = written,
                                          .to = tensor,
                                          .add = true});
  }

 private:
  bool is_copied(const Shape& shape) const { return channels_first_ && looks_different(shape); }

  CudaStream& stream_;
  const bool channels_first_;
  char* next_;  // free memory; after all copies it is the workspace
};

// --- Convolutions of one shape -------------------------------------------------------------------

void Libraries::make_cudnn() {
  auto cudnn = make<CudnnHandle>(cudnnCreate, "cudnnCreate", device_);
  check(cudnnSetStream(cudnn.get(), raw_), "cudnnSetStream", device_);
  identity_ = make<ActivationDescriptor>(cudnnCreateActivationDescriptor,
                                         "cudnnCreateActivationDescriptor", device_);
  check(cudnnSetActivationDescriptor(identity_.get(), CUDNN_ACTIVATION_IDENTITY,
                                     CUDNN_NOT_PROPAGATE_NAN, 0),
        "cudnnSetActivationDescriptor", device_);
  cudnn_ = std::move(cudnn);
}

Libraries::Convolution& Libraries::convolution(const Window2d& g, ElementType type) {
  if (!cudnn_) make_cudnn();
  const std::pair key(type, g);
  const auto found = convolutions_.find(key);
  if (found != convolutions_.end()) return found->second;
  return convolutions_.emplace(key, make_convolution(g, type)).first->second;
}

Libraries::Convolution Libraries::make_convolution(const Window2d& g, ElementType type) const {
  require_products_of(type);
  Convolution made;
  made.type = type;
  made.tensor_cores = tf32_ || type != kTypeOf<Real>;
  for (const bool channels_first : {false, true})
    made.layouts[channels_first] = layout_of(g, channels_first, cudnn_type(type), device_);
  made.descriptor = make<ConvolutionDescriptor>(cudnnCreateConvolutionDescriptor,
                                                "cudnnCreateConvolutionDescriptor", device_);
  const int padding = int(g.padding), stride = int(g.stride), dilation = 1;
  check(cudnnSetConvolution2dDescriptor(made.descriptor.get(), padding, padding, stride, stride,
                                        dilation, dilation, CUDNN_CROSS_CORRELATION,
                                        CUDNN_DATA_FLOAT),
        "cudnnSetConvolution2dDescriptor", device_);
  // Products and sums are of the descriptor's type, float32. In float32 the default math may use
  // TF32, and FMA is float32 throughout.
  const auto of_real = tf32_ ? CUDNN_DEFAULT_MATH : CUDNN_FMA_MATH;
  check(cudnnSetConvolutionMathType(made.descriptor.get(),
                                    type == kTypeOf<Real> ? of_real : CUDNN_TENSOR_OP_MATH),
        "cudnnSetConvolutionMathType", device_);
  return made;
}

/// Fills `ways`: the `fastest`, if cuDNN has it, then its proposals with the channels where the run
/// wants them, then with the channels elsewhere; `always` is the last of each. A proposal's memory
/// is for the math that it proposes; asked for is that of the descriptor's math, and cuDNN may
/// refuse the algorithm only then.
template <class Pass>
void Libraries::choose(Ways<typename Pass::Algorithm>& ways, const Convolution& conv,
                       const Window2d& g, std::optional<typename Pass::Algorithm> fastest) const {
  bool proposed = false;
  for (const bool channels_first : {channels_first_, !channels_first_}) {
    const Layout& layout = conv.layouts[channels_first];
    const auto add = [&](typename Pass::Algorithm algorithm) {
      size_t bytes = 0;
      const cudnnStatus_t status =
          Pass::workspace(cudnn_.get(), layout, conv.descriptor.get(), algorithm, &bytes);
      if (is_refusal(status)) return false;
      check(status, "cudnnGetConvolution...WorkspaceSize", device_);
      if (bytes > kMostWorkspace) return false;
      const bool first = channels_first && fastest == algorithm;
      ways.insert(first ? ways.begin() : ways.end(), {channels_first, algorithm, bytes});
      return true;
    };
    int count = 0;
    typename Pass::Proposal proposals[kProposals];
    check(Pass::propose(cudnn_.get(), layout, conv.descriptor.get(), kProposals, &count, proposals),
          Pass::asked, device_);
    for (const auto* p = proposals; p < proposals + count; ++p) {
      if (p->status == CUDNN_STATUS_SUCCESS && p->determinism == CUDNN_DETERMINISTIC &&
          is_for_us(p->mathType, conv.tensor_cores)) {
        proposed = add(p->algo) || proposed;
      }
    }
    if (!add(Pass::always) && ways.empty())
      warn_of_refusal(Pass::computes, channels_first, Pass::always);
  }
  if (ways.empty()) fail_without_algorithm(g);
  if (!proposed) warn_without_proposal(conv, Pass::computes);
  const auto& [channels_first, algorithm, bytes] = ways.front();
  if (channels_first != channels_first_ && fastest != algorithm)
    warn_of_copies(Pass::computes, channels_first);
}

/// The shapes of a network have this in common: it is said once.
void Libraries::warn_once(const std::string& text) const {
  if (stream_.device_state().is_new(text)) warn(device_ + ": " + text);
}

/// Of an algorithm that cuDNN should have for all convolutions. That a proposal does not fit is
/// usual.
void Libraries::warn_of_refusal(const char* computes, bool channels_first, int algorithm) const {
  warn_once(
      fmt::format("cuDNN refuses algorithm {} with the channels {} for {} of convolutions; the "
                  "next way is tried, which may be slower",
                  algorithm, place_of_channels(channels_first), computes));
}

void Libraries::warn_without_proposal(const Convolution& conv, const char* computes) const {
  const char* const of_real = tf32_ ? "for TF32" : "in float32";
  const std::string numbers =
      conv.type == kTypeOf<Real> ? of_real : fmt::format("in {}", name_of(conv.type));
  warn_once(
      fmt::format("cuDNN proposes no deterministic algorithm {} for {} of convolutions; one that "
                  "it has for all is taken, which may be slow",
                  numbers, computes));
}

void Libraries::warn_of_copies(const char* computes, bool channels_first) const {
  warn_once(
      fmt::format("{} of convolutions are computed on copies with the channels {}: cuDNN has "
                  "no deterministic algorithm with the channels {}",
                  computes, place_of_channels(channels_first), place_of_channels(!channels_first)));
}

void Libraries::fail_without_algorithm(const Window2d& g) const {
  fail<DeviceError>(
      "{}: cuDNN runs no deterministic algorithm for a {}x{} convolution of {} to {} with stride "
      "{} and padding {}; use another shape, or --devices cpu:0",
      device_, g.kernel, g.kernel, g.input().text(), g.output().text(), g.stride, g.padding);
}

// --- Passes --------------------------------------------------------------------------------------

/// Runs a pass in the first of its ways that cuDNN runs and for which there is room, and forgets
/// those before it. enqueue(layout, way, memory) enqueues it; `tensors` and `made` as in
/// PassMemory.
template <class T, class Pass, class Enqueue>
void Libraries::run(Ways<typename Pass::Algorithm>& ways, const Convolution& conv,
                    const Window2d& g, std::initializer_list<Shape> tensors,
                    const std::optional<Shape>& made, Enqueue enqueue) {
  for (; !ways.empty(); ways.erase(ways.begin())) {
    const Way<typename Pass::Algorithm> way = ways.front();
    std::optional<PassMemory<T>> memory;
    try {
      memory.emplace(stream_, way.channels_first, tensors, made, way.workspace);
    } catch (const DeviceError&) {
      if (ways.size() == 1) throw;
      continue;
    }
    const cudnnStatus_t status = enqueue(conv.layouts[way.channels_first], way, *memory);
    if (!is_refusal(status)) return check(status, Pass::called, device_);
    if (way.algorithm == Pass::always)
      warn_of_refusal(Pass::computes, way.channels_first, way.algorithm);
  }
  fail_without_algorithm(g);
}

template <class T>
bool Libraries::conv2d_by_cudnn(const Window2d& g, const T* x, const T* weight, const Real* bias,
                                T* y) {
  Convolution& conv = convolution(g, kTypeOf<T>);
  if (conv.forward.empty()) {
    // With few channels a sum over the window is faster than any transform.
    const Fast fastest = conv.tensor_cores || !has_many_channels(g) ? Fast::none : fast_way(g);
    choose<Forward>(conv.forward, conv, g, algorithm_of<Forward>(fastest));
  }
  bool has_bias = false;
  run<T, Forward>(
      conv.forward, conv, g, {g.input(), g.weight(), g.output()}, {},
      [&](const Layout& in, const auto& way, PassMemory<T>& memory) {
        const T* const given_x = memory.read(g.input(), x);
        const T* const given_weight = memory.read(g.weight(), weight);
        T* const written = memory.write(g.output(), y);
        void* const workspace = memory.workspace();
        has_bias = written != y;  // taking y back adds it
        if constexpr (std::is_same_v<T, Real>) {
          if (!has_bias && conv2d_with_bias(conv, in, given_x, given_weight, bias, y, workspace)) {
            has_bias = true;
            return CUDNN_STATUS_SUCCESS;
          }
        }
        const cudnnStatus_t status =
            cudnnConvolutionForward(cudnn_.get(), &kOne, in.x.get(), given_x, in.weight.get(),
                                    given_weight, conv.descriptor.get(), way.algorithm, workspace,
                                    way.workspace, &kZero, in.y.get(), written);
        if (status == CUDNN_STATUS_SUCCESS) memory.take_back(g.output(), written, y, bias);
        return status;
      });
  return has_bias;
}

/// Only for the one algorithm for which cuDNN documents a bias without an activation after it.
bool Libraries::conv2d_with_bias(Convolution& conv, const Layout& in, const Real* x,
                                 const Real* weight, const Real* bias, Real* y, void* memory) {
  const auto [channels_first, algorithm, workspace] = conv.forward.front();
  if (!conv.fuse_bias || algorithm != CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM)
    return false;
  const cudnnStatus_t status = cudnnConvolutionBiasActivationForward(
      cudnn_.get(), &kOne, in.x.get(), x, in.weight.get(), weight, conv.descriptor.get(), algorithm,
      memory, workspace, &kZero, in.y.get(), y, in.bias.get(), bias, identity_.get(), in.y.get(),
      y);
  // An optimisation that cuDNN does not offer here, or does not know: found out once per shape.
  if (is_refusal(status) || is_bad_call(status)) return conv.fuse_bias = false;
  check(status, "cudnnConvolutionBiasActivationForward", device_);
  return true;
}

template <class T>
void Libraries::backward_input_by_cudnn(const Window2d& given, const T* dy, const T* weight,
                                        T* dx) {
  const bool float32 = !tf32_ && std::is_same_v<T, Real>;
  const bool spread = float32 && is_spread(given);
  const Window2d g = spread ? at_every_pixel(given) : given;
  Convolution& conv = convolution(g, kTypeOf<T>);
  if (conv.backward_input.empty()) {
    const Fast fastest = float32 ? fast_way(g) : Fast::none;
    choose<BackwardInput>(conv.backward_input, conv, g, algorithm_of<BackwardInput>(fastest));
  }
  run<T, BackwardInput>(conv.backward_input, conv, g, {g.weight(), g.output(), g.input()},
                        spread ? std::optional<Shape>(g.output()) : std::nullopt,
                        [&](const Layout& in, const auto& way, PassMemory<T>& memory) {
                          const T* all_dy = dy;
                          if (spread) {
                            T* const room = memory.room(g.output());
                            spread_pixels(stream_, pixel_grid(given, g.output()), dy, room);
                            all_dy = room;
                          }
                          const T* const given_weight = memory.read(g.weight(), weight);
                          const T* const given_dy = memory.read(g.output(), all_dy);
                          T* const written = memory.write(g.input(), dx);
                          const cudnnStatus_t status = cudnnConvolutionBackwardData(
                              cudnn_.get(), &kOne, in.weight.get(), given_weight, in.y.get(),
                              given_dy, conv.descriptor.get(), way.algorithm, memory.workspace(),
                              way.workspace, &kZero, in.x.get(), written);
                          if (status == CUDNN_STATUS_SUCCESS)
                            memory.take_back(g.input(), written, dx, /*bias=*/nullptr);
                          return status;
                        });
}

template <class T>
void Libraries::backward_weight_by_cudnn(const Window2d& g, const T* x, const T* dy,
                                         Real* dweight) {
  constexpr bool kRounds = !std::is_same_v<T, Real>;
  Convolution& conv = convolution(g, kTypeOf<T>);
  if (conv.backward_weight.empty()) {
    const Fast fastest = conv.tensor_cores ? Fast::none : fast_way(g);
    choose<BackwardWeight>(conv.backward_weight, conv, g, algorithm_of<BackwardWeight>(fastest));
  }
  run<T, BackwardWeight>(
      conv.backward_weight, conv, g, {g.input(), g.output(), g.weight()},
      kRounds ? std::optional(g.weight()) : std::nullopt,
      [&](const Layout& in, const auto& way, PassMemory<T>& memory) {
        const T* const given_x = memory.read(g.input(), x);
        const T* const given_dy = memory.read(g.output(), dy);
        T* const written = memory.write_sum(g.weight(), dweight);
        const bool adds = static_cast<void*>(written) == dweight;
        const float* const beta = adds ? &kOne : &kZero;  // a copy is added after it
        const cudnnStatus_t status = cudnnConvolutionBackwardFilter(
            cudnn_.get(), &kOne, in.x.get(), given_x, in.y.get(), given_dy, conv.descriptor.get(),
            way.algorithm, memory.workspace(), way.workspace, beta, in.weight.get(), written);
        if (status == CUDNN_STATUS_SUCCESS) memory.add_back(g.weight(), written, dweight);
        return status;
      });
}

// --- For numbers of each type --------------------------------------------------------------------

template bool Libraries::conv2d_by_cudnn(const Window2d&, const Real*, const Real*, const Real*,
                                         Real*);
template void Libraries::backward_input_by_cudnn(const Window2d&, const Real*, const Real*, Real*);
template void Libraries::backward_weight_by_cudnn(const Window2d&, const Real*, const Real*, Real*);

template bool Libraries::conv2d_by_cudnn(const Window2d&, const Bf16*, const Bf16*, const Real*,
                                         Bf16*);
template void Libraries::backward_input_by_cudnn(const Window2d&, const Bf16*, const Bf16*, Bf16*);
template void Libraries::backward_weight_by_cudnn(const Window2d&, const Bf16*, const Bf16*, Real*);

template bool Libraries::conv2d_by_cudnn(const Window2d&, const Fp16*, const Fp16*, const Real*,
                                         Fp16*);
template void Libraries::backward_input_by_cudnn(const Window2d&, const Fp16*, const Fp16*, Fp16*);
template void Libraries::backward_weight_by_cudnn(const Window2d&, const Fp16*, const Fp16*, Real*);

}  // namespace lockstep::cuda
