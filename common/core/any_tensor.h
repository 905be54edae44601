#pragma once
// Tensors of layers, whose numbers may have 16 bits.

#include <vector>

#include "common/core/element_type.h"
#include "common/core/tensor.h"

namespace lockstep {

/// Throws BadInput: a tensor of this shape has other numbers than `expected`.
[[noreturn]] void fail_type(const Shape& shape, ElementType found, ElementType expected);

/// A Tensor, or a tensor of numbers of 16 bits; the program chooses which when it runs. Layers take
/// and give AnyTensors. Weights, their gradients, sums and losses are Tensors always. Either kind
/// becomes an AnyTensor implicitly. An AnyTensor becomes a Tensor implicitly, too, and throws
/// BadInput if its numbers are not Real.
class AnyTensor {
 public:
  AnyTensor() = default;
  template <class T>
  AnyTensor(const BasicTensor<T>& x)
      : buffer_(x.buffer_), shape_(x.shape_), offset_(x.offset_), type_(kTypeOf<T>) {}

  /// As BasicTensor::empty().
  static AnyTensor empty(Stream stream, const Shape& shape, ElementType type);

  template <class T>
  BasicTensor<T> as() const {
    if (defined()) require_type(kTypeOf<T>);
    return BasicTensor<T>(buffer_, shape_, offset_);
  }
  operator Tensor() const { return as<Real>(); }

  bool defined() const { return buffer_ != nullptr; }
  ElementType type() const { return type_; }
  const Shape& shape() const { return shape_; }
  int64_t elements() const { return shape_.elements(); }
  size_t bytes() const { return shape_.bytes(size_t(size_of(type_))); }
  Stream home() const { return buffer_->home(); }
  void* data() const { return static_cast<char*>(buffer_->data()) + offset_ * size_of(type_); }
  /// data() for an operation of this stream, as BasicTensor::on(). With a type T, throws BadInput
  /// if the numbers have another type.
  void* on(Stream s) const {
    if (&home().device() != &s.device()) fail_elsewhere(shape_, home(), s);
    return data();
  }
  template <class T>
  T* on(Stream s) const {
    require_type(kTypeOf<T>);
    return static_cast<T*>(on(s));
  }

  /// The same as BasicTensor's functions.
  AnyTensor reshaped(const Shape& shape) const;
  AnyTensor rows(int64_t first, int64_t count) const;
  AnyTensor range(int64_t first, const Shape& shape) const;
  /// The same as BasicTensor's; numbers of 16 bits become Real.
  std::vector<Real> to_host() const;

 private:
  void require_type(ElementType expected) const {
    if (type_ != expected) fail_type(shape_, type_, expected);
  }

  std::shared_ptr<Buffer> buffer_;
  Shape shape_;
  int64_t offset_ = 0;  // in elements
  ElementType type_ = kTypeOf<Real>;
};

}  // namespace lockstep
