#pragma once
// Device memory, tied to the order of one stream, and tensors: a shape over a piece of it. Always
// contiguous, row major, no strides.
//
// Activations are NHWC ("channels last"): [batch, height, width, channels]. That is the layout in
// which oneDNN and cuDNN convolve fastest. Convolution weights are O,H,W,I; checkpoints use
// PyTorch's O,I,H,W (nn/state_dict.h converts at the border).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "common/core/real.h"
#include "common/core/sixteen_bits.h"
#include "common/core/stream.h"

namespace lockstep {

/// A block of device memory with one home stream. Allocating and freeing are operations in that
/// stream's order (cudaMallocAsync, cudaFreeAsync). Work enqueued on the home stream before the
/// Buffer is destroyed may still use the memory. A buffer that was used on another stream must be
/// handed back first: `home.wait(other.record())`. Contents are undefined at first. Throws
/// DeviceError when the device has no room.
class Buffer {
 public:
  Buffer(Stream home, size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Stream home() const { return home_; }

 private:
  Stream home_;
  size_t bytes_;
  void* data_;
};

/// Up to a handful of extents, outermost first. {} is a scalar with one element. A shape may come
/// from a file. Functions that multiply extents throw BadInput, naming the shape, if an extent is
/// negative. The same if the product needs over 63 bits, even if another extent is 0 (as in NumPy).
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> extents) : extents_(extents) {}
  explicit Shape(std::vector<int64_t> extents) : extents_(std::move(extents)) {}

  int axes() const { return static_cast<int>(extents_.size()); }
  int64_t operator[](int axis) const { return extents_[axis]; }
  int64_t& operator[](int axis) { return extents_[axis]; }
  int64_t elements() const { return product(0); }
  /// Elements of one row: the product of all extents after the first, even if there are no rows.
  int64_t row_elements() const { return product(1); }
  /// Bytes of memory for all elements, if one has `element` bytes.
  size_t bytes(size_t element) const;
  const std::vector<int64_t>& extents() const { return extents_; }
  /// "[64, 28, 28, 1]"
  std::string text() const;
  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  int64_t product(size_t first) const;  // of the extents from number `first` on
  std::vector<int64_t> extents_;
};

/// Throws BadInput, naming both shapes, unless they have the same number of elements.
void require_same_elements(const Shape& found, const Shape& expected);
/// Throws BadInput unless [first, first + count) lies within `extent`; names `what` and `shape`.
void require_within(const char* what, int64_t first, int64_t count, int64_t extent,
                    const Shape& shape);
/// Throws BadInput unless a tensor of this shape holds `count` values.
void require_values(int64_t count, const Shape& shape);

/// Throws BadInput unless the host can read values at `data`: see Device::require_readable().
void require_readable(Stream home, const void* data, const Shape& shape, bool floating);

/// Throws BadInput: a tensor of this shape is on home's device, and an operation of `s` uses it.
[[noreturn]] void fail_elsewhere(const Shape& shape, Stream home, Stream s);

class AnyTensor;

/// A shared view of device memory. Copying a tensor copies the view, not the elements. `data()` is
/// for kernels; the host reads values through to_host() only.
template <class T>
class BasicTensor {
 public:
  BasicTensor() = default;
  BasicTensor(std::shared_ptr<Buffer> buffer, Shape shape, int64_t offset = 0)
      : buffer_(std::move(buffer)), shape_(std::move(shape)), offset_(offset) {}

  /// New memory on the stream's device; contents undefined.
  static BasicTensor empty(Stream home, const Shape& shape) {
    const size_t bytes = std::max(sizeof(T), shape.bytes(sizeof(T)));
    return BasicTensor(std::make_shared<Buffer>(home, bytes), shape);
  }
  /// New memory holding `values` (row major). Synchronizes: for set-up and tests.
  static BasicTensor from_host(Stream home, const Shape& shape, const std::vector<T>& values) {
    BasicTensor tensor = empty(home, shape);
    tensor.copy_from_host(values);
    return tensor;
  }

  bool defined() const { return buffer_ != nullptr; }
  const Shape& shape() const { return shape_; }
  int64_t elements() const { return shape_.elements(); }
  size_t bytes() const { return shape_.bytes(sizeof(T)); }
  Stream home() const { return buffer_->home(); }
  T* data() const { return static_cast<T*>(buffer_->data()) + offset_; }
  /// data() for an operation of this stream. Throws BadInput, naming both devices, if the tensor is
  /// on another device. CPU devices share one address space: on them a forgotten copy would go
  /// unnoticed.
  T* on(Stream s) const {
    if (&home().device() != &s.device()) fail_elsewhere(shape_, home(), s);
    return data();
  }

  /// The same elements under another shape of the same size.
  BasicTensor reshaped(const Shape& shape) const {
    require_same_elements(shape, shape_);
    return BasicTensor(buffer_, shape, offset_);
  }
  /// Rows [first, first + count) along the first axis.
  BasicTensor rows(int64_t first, int64_t count) const {
    require_within("rows", first, count, shape_.axes() == 0 ? 0 : shape_[0], shape_);
    Shape shape = shape_;
    shape[0] = count;
    return BasicTensor(buffer_, shape, offset_ + first * shape_.row_elements());
  }
  /// `shape.elements()` elements from element `first` on: a bucket or a parameter of a flat buffer.
  BasicTensor range(int64_t first, const Shape& shape) const {
    require_within("elements", first, shape.elements(), elements(), shape_);
    return BasicTensor(buffer_, shape, offset_ + first);
  }

  /// Copies the elements to the host. Synchronizes the home stream. Throws BadInput on a simulated
  /// device, unless they are counts or states.
  std::vector<T> to_host() const {
    // All but whole numbers and states: Bf16 becomes a double, too.
    constexpr bool kFloating = std::is_convertible_v<T, double> && !std::is_integral_v<T>;
    require_readable(home(), data(), shape_, kFloating);
    std::vector<T> values(static_cast<size_t>(elements()));
    home().synchronize();  // CUDA's copy to such memory would block, where no one watches the peers
    home().copy(values.data(), data(), bytes());
    home().synchronize();
    return values;
  }
  /// Overwrites the elements. Synchronizes the home stream: for set-up and tests.
  void copy_from_host(const std::vector<T>& values) const {
    require_values(static_cast<int64_t>(values.size()), shape_);
    home().synchronize();  // see to_host()
    home().copy(data(), values.data(), bytes());
    home().synchronize();
  }

 private:
  friend class AnyTensor;
  std::shared_ptr<Buffer> buffer_;
  Shape shape_;
  int64_t offset_ = 0;
};

using Tensor = BasicTensor<Real>;
using ByteTensor = BasicTensor<uint8_t>;   // images
using IndexTensor = BasicTensor<int32_t>;  // positions of maxima
using LabelTensor = BasicTensor<int32_t>;  // class numbers
using Bf16Tensor = BasicTensor<Bf16>;      // messages
using Fp16Tensor = BasicTensor<Fp16>;

/// Hands out tensors of one stream and takes them back when their last handle is destroyed. Blocks
/// are reused at once: the next user of a block enqueues its work after the previous user's, on the
/// same stream. So a steady training step allocates nothing, and the tensors held at the same time
/// decide the peak.
/// A tensor that another stream used must be handed back before its handle is destroyed (see
/// Buffer).
class TensorPool {
 public:
  explicit TensorPool(Stream stream) : stream_(stream), free_(std::make_shared<FreeList>()) {}

  /// A tensor with undefined contents.
  template <class T>
  BasicTensor<T> take(const Shape& shape) {
    return BasicTensor<T>(take_block(shape.bytes(sizeof(T))), shape);
  }
  Stream stream() const { return stream_; }
  /// Blocks ever allocated: constant in a steady state. For tests.
  int64_t allocations() const { return allocations_; }

 private:
  using FreeList = std::vector<std::unique_ptr<Buffer>>;
  std::shared_ptr<Buffer> take_block(size_t bytes);

  Stream stream_;
  std::shared_ptr<FreeList> free_;  // outlives the pool while tensors are out
  int64_t allocations_ = 0;
};

}  // namespace lockstep
