#pragma once
// One call per element: operator()(i). A GPU moves the elements of `Arrays` (Members, portable.h).

#include "common/core/sixteen_bits.h"
#include "common/kernels/bodies/portable.h"

namespace lockstep::bodies {

template <class T>
struct Fill {
  T value;
  T* y;
  using Arrays = Members<&Fill::y>;
  LOCKSTEP_BODY void operator()(int64_t i) const { y[i] = value; }
};

template <class X, class Y>
struct Add {
  const X* x;
  Y* y;
  using Arrays = Members<&Add::x, &Add::y>;
  LOCKSTEP_BODY void operator()(int64_t i) const { y[i] = Real(y[i]) + Real(x[i]); }
};

struct Scale {
  Real factor;
  Real* y;
  using Arrays = Members<&Scale::y>;
  LOCKSTEP_BODY void operator()(int64_t i) const { y[i] *= factor; }
};

/// To numbers of 16 bits, and back.
template <class T>
struct Narrow {
  Real factor;
  const Real* x;
  T* y;
  using Arrays = Members<&Narrow::x, &Narrow::y>;
  LOCKSTEP_BODY void operator()(int64_t i) const { y[i] = float(factor * x[i]); }
};

template <class T>
struct Widen {
  const T* x;
  Real* y;
  using Arrays = Members<&Widen::x, &Widen::y>;
  LOCKSTEP_BODY void operator()(int64_t i) const { y[i] = x[i]; }
};

// What layers compute may have 16 bits, T. Formulas are in Real; assigning their result rounds it.

template <class T>
struct NormalizeImage {
  const uint8_t* x;
  Real mean, stddev;
  T* y;
  using Arrays = Members<&NormalizeImage::x, &NormalizeImage::y>;
  LOCKSTEP_BODY void operator()(int64_t i) const { y[i] = (Real(x[i]) / 255 - mean) / stddev; }
};

template <class T>
struct Relu {
  const T* x;
  T* y;
  using Arrays = Members<&Relu::x, &Relu::y>;
  LOCKSTEP_BODY void operator()(int64_t i) const { y[i] = positive_part(x[i]); }
};

template <class T>
struct ReluBackward {
  const T* y;
  const T* dy;
  T* dx;
  using Arrays = Members<&ReluBackward::y, &ReluBackward::dy, &ReluBackward::dx>;
  LOCKSTEP_BODY void operator()(int64_t i) const {
    const Real slope = dy[i];  // read whether needed or not: a load without a branch
    dx[i] = y[i] > 0 ? slope : Real(0);
  }
};

// One call per feature of a row: operator()(i, row, feature), where i counts the elements of all
// rows. A body with `FeatureArrays` reads these at `feature`, and must not use `row`, nor the
// feature otherwise: where its arrays lead to registers, both count from there.

template <class T>
struct AddBias {
  const Real* bias;  // [features]
  bool relu;
  T* y;  // [rows, features]
  using Arrays = Members<&AddBias::y>;
  using FeatureArrays = Members<&AddBias::bias>;
  LOCKSTEP_BODY void operator()(int64_t i, int64_t /*row*/, int64_t f) const {
    const Real sum = y[i] + bias[f];
    y[i] = relu ? positive_part(sum) : sum;
  }
};

/// Column sums, for the gradient of a bias.
template <class T>
struct AddColumnSums {
  const T* dy;
  Real* dbias;
  using Arrays = Members<&AddColumnSums::dy>;
  using FeatureArrays = Members<>;
  LOCKSTEP_BODY Terms terms(int64_t i, int64_t /*f*/) const { return {dy[i], 0}; }
  LOCKSTEP_BODY void finish(int64_t f, double sum, double) const { dbias[f] += Real(sum); }
};

// One call per pixel and channel: operator()(n, h, w, c).

/// [N,H,W,C] to [N,C,H,W], or back.
template <class T>
struct SwapChannels {
  const T* x;
  int64_t height, width, channels;
  bool to_first;
  T* y;
  LOCKSTEP_BODY void operator()(int64_t n, int64_t h, int64_t w, int64_t c) const {
    const int64_t last = ((n * height + h) * width + w) * channels + c;
    const int64_t first = ((n * channels + c) * height + h) * width + w;
    y[to_first ? first : last] = x[to_first ? last : first];
  }
};

}  // namespace lockstep::bodies
