#pragma once
// Every operation that takes numbers of 16 bits, to be compared with itself on Real numbers.

#include <functional>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/unit/kernels/kernels_test_support.h"

namespace lockstep::testing::sixteen {

using Values = std::vector<Real>;

inline Values rounded(Values values, ElementType type) {
  with_numbers(type, [&](auto number) {
    for (Real& value : values) value = Real(decltype(number)(value));
  });
  return values;
}

/// The shapes that operations get: images [N,H,W,C], and rows [N,F].
struct Shapes {
  Shape images, rows;
};
inline const Shapes kUneven{{3, 6, 4, 7}, {9, 11}};  // no row is whole packs of a GPU
inline const Shapes kEven{{3, 6, 4, 16}, {9, 32}};

/// A call of an operation, with tensors of type `stored`. Numbers are of `type` in any case.
struct Trial {
  const TestDevice& d;
  ElementType stored, type;
  Shapes shapes;
  struct Given {
    AnyTensor tensor;
    bool rounds;  // the operation rounds it
  };
  std::vector<Given> given{};

  Kernels& kernels() const { return d.kernels(); }
  AnyTensor in(const Shape& shape, uint32_t seed) const {
    return put(shape, rounded(random_values(shape, seed), type));
  }
  /// An activation that the operation writes.
  AnyTensor out(const Shape& shape) {
    given.push_back({in(shape, 99), true});
    return given.back().tensor;
  }
  /// A sum, or a gradient of parameters: Real always.
  Tensor sum(const Shape& shape, bool rounds = false) {
    const Tensor tensor = d.put(shape, rounded(random_values(shape, 98), type));
    given.push_back({tensor, rounds});
    return tensor;
  }
  Tensor real(const Shape& shape, uint32_t seed) const {
    return d.put(shape, random_values(shape, seed));
  }
  Positions positions(const Shape& shape) const {
    if (stored == kTypeOf<Real>) return IndexTensor::empty(d.stream, shape);
    return BasicTensor<int16_t>::empty(d.stream, shape);
  }

 private:
  AnyTensor put(const Shape& shape, const Values& values) const {
    return with_numbers(stored, [&](auto number) -> AnyTensor {
      using T = decltype(number);
      std::vector<T> all;
      for (const Real value : values) all.push_back(T(value));
      return BasicTensor<T>::from_host(d.stream, shape, all);
    });
  }
};

struct Operation {
  std::string name;
  std::function<void(Trial&)> call;
  bool by_library = false;  // a product, whose order of sums is the library's
};

inline void norm_and_backward(Trial& t, bool relu, bool skip) {
  const int64_t c = t.shapes.images[3];
  const AnyTensor x = t.in(t.shapes.images, 1), dy = t.in(t.shapes.images, 2);
  const Tensor weight = t.real({c}, 3), bias = t.real({c}, 4), norm = t.sum({2 * c + 1});
  t.kernels().batch_norm_measure(t.d.stream, x, Real(1e-5), Real(0.1), t.sum({c}), t.sum({c}),
                                 norm);
  t.kernels().batch_norm_statistics(t.d.stream, x, t.sum({2 * c + 1}));
  t.kernels().batch_norm(t.d.stream, x, norm, weight, bias,
                         skip ? t.in(t.shapes.images, 5) : AnyTensor(), relu,
                         t.out(t.shapes.images));
  const Tensor sums = t.sum({2, c});
  t.kernels().batch_norm_backward_sums(t.d.stream, x, dy, norm, weight, bias, relu, sums,
                                       t.sum({c}), t.sum({c}));
  t.kernels().batch_norm_backward_input(t.d.stream, x, dy, norm, weight, bias, relu, sums,
                                        t.out(t.shapes.images));
}

inline void pool(Trial& t, int64_t kernel, int64_t stride, bool relu) {
  const Window2d g = make_window("pool", t.shapes.images, t.shapes.images[3], t.shapes.images[3],
                                 kernel, stride, 0);
  const Positions where = t.positions(g.output());
  t.kernels().max_pool2d(t.d.stream, g, relu, t.in(t.shapes.images, 1), t.out(g.output()), where);
  t.kernels().max_pool2d_backward(t.d.stream, g, t.in(g.output(), 2), where,
                                  t.out(t.shapes.images));
}

inline void averages(Trial& t, int64_t height, int64_t width) {
  const Shape few{t.shapes.images[0], height, width, t.shapes.images[3]};
  t.kernels().adaptive_avg_pool2d(t.d.stream, t.in(t.shapes.images, 1), t.out(few));
  t.kernels().adaptive_avg_pool2d_backward(t.d.stream, t.in(few, 2), t.out(t.shapes.images));
}

inline void convolve(Trial& t, const Window2d& g) {
  const AnyTensor x = t.in(g.input(), 1), weight = t.in(g.weight(), 2), dy = t.in(g.output(), 3);
  t.kernels().conv2d(t.d.stream, g, x, weight, t.real({g.out_channels}, 4), t.out(g.output()));
  t.kernels().conv2d_backward_input(t.d.stream, g, dy, weight, t.out(g.input()));
}

/// Makes log-probabilities y of random numbers, then uses y backward.
inline void softmax(Trial& t) {
  const Tensor y = t.sum(t.shapes.rows);
  t.kernels().log_softmax(t.d.stream, t.in(t.shapes.rows, 1), y);
  t.kernels().log_softmax_backward(t.d.stream, y, t.real(t.shapes.rows, 2), t.out(t.shapes.rows));
}

inline const std::vector<Operation> kOperations{
    {"add",
     [](Trial& t) { t.kernels().add(t.d.stream, t.in(t.shapes.rows, 1), t.out(t.shapes.rows)); }},
    {"add to Real",
     [](Trial& t) { t.kernels().add(t.d.stream, t.in(t.shapes.rows, 1), t.sum(t.shapes.rows)); }},
    {"normalize_images",
     [](Trial& t) {
       const auto pixels = ByteTensor::from_host(t.d.stream, {4}, {0, 7, 128, 255});
       t.kernels().normalize_images(t.d.stream, pixels, Real(0.3), Real(0.2), t.out({4}));
     }},
    {"relu",
     [](Trial& t) {
       t.kernels().relu(t.d.stream, t.in(t.shapes.rows, 1), t.out(t.shapes.rows));
       t.kernels().relu_backward(t.d.stream, t.in(t.shapes.rows, 1), t.in(t.shapes.rows, 2),
                                 t.out(t.shapes.rows));
     }},
    {"channels",
     [](Trial& t) {
       t.kernels().to_channels_first(t.d.stream, t.in(t.shapes.images, 1), t.out(t.shapes.images));
       t.kernels().to_channels_last(t.d.stream, t.in(t.shapes.images, 1), t.out(t.shapes.images));
     }},
    {"bias",
     [](Trial& t) {
       for (const bool relu : {false, true}) {
         t.kernels().add_bias(t.d.stream, t.real({t.shapes.rows[1]}, 1), relu,
                              t.out(t.shapes.rows));
       }
       t.kernels().add_column_sums(t.d.stream, t.in(t.shapes.rows, 2), t.sum({t.shapes.rows[1]}));
     }},
    {"max_pool2d, windows side by side", [](Trial& t) { pool(t, 2, 2, true); }},
    {"max_pool2d, windows that overlap", [](Trial& t) { pool(t, 3, 1, false); }},
    {"averages", [](Trial& t) { averages(t, 4, 2); }},
    {"averages of all", [](Trial& t) { averages(t, 1, 1); }},
    {"batch_norm", [](Trial& t) { norm_and_backward(t, false, false); }},
    {"batch_norm with ReLU", [](Trial& t) { norm_and_backward(t, true, false); }},
    {"batch_norm with skip", [](Trial& t) { norm_and_backward(t, true, true); }},
    {"dropout",
     [](Trial& t) {
       const AnyTensor mask = t.out(t.shapes.rows);
       t.kernels().dropout_mask(t.d.stream, t.d.state({}), {.seed = 1}, Real(0.5), mask);
       t.kernels().apply_mask(t.d.stream, t.in(t.shapes.rows, 1), mask, t.out(t.shapes.rows));
     }},
    {"log_softmax", softmax},
    {"convolution", [](Trial& t) { convolve(t, kernels::window(2, 7, 6, 3, 5, 3, 2, 1)); }, true},
    {"convolution of few channels",
     [](Trial& t) { convolve(t, kernels::window(16, 9, 9, 1, 10, 5, 1, 0)); }, true},
    {"convolution of single pixels",
     [](Trial& t) { convolve(t, kernels::window(2, 6, 5, 8, 16, 1, 2, 0)); }, true},
    {"matmul",
     [](Trial& t) {
       const MatMul ab{
           .m = 5, .n = 6, .k = 40, .transpose_a = false, .transpose_b = true, .accumulate = false};
       t.kernels().matmul(t.d.stream, ab, t.in({5, 40}, 1), t.in({6, 40}, 2), t.out({5, 6}));
     },
     true},
};

/// Calls compare(found, expected) for each result of an operation on numbers of 16 bits, of both
/// types. `expected` is the operation's result with the same numbers as Real, rounded if it is an
/// activation.
template <class Compare>
void each_result(const TestDevice& d, const Operation& operation, const Shapes& shapes,
                 Compare compare) {
  for (const ElementType type : {ElementType::bf16, ElementType::fp16}) {
    INFO(operation.name << " in " << name_of(type));
    Trial sixteen{d, type, type, shapes}, real{d, kTypeOf<Real>, type, shapes};
    operation.call(sixteen);
    operation.call(real);
    REQUIRE(sixteen.given.size() == real.given.size());
    for (size_t i = 0; i < real.given.size(); ++i) {
      const Values expected = real.given[i].tensor.to_host();
      INFO("result " << i);
      compare(sixteen.given[i].tensor.to_host(),
              real.given[i].rounds ? rounded(expected, type) : expected);
    }
  }
}

}  // namespace lockstep::testing::sixteen
