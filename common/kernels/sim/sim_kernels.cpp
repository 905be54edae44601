#include "common/kernels/sim/sim_kernels.h"

#include <string>

#include "common/kernels/sim/sim_stream.h"

namespace lockstep::sim {
namespace {

SimStream& sim_stream(Stream s) { return static_cast<SimStream&>(s.backend()); }

/// Bytes of a tensor that an operation of this stream reads or writes.
template <class T>
double traffic(Stream s, const BasicTensor<T>& x) {
  if (!x.defined()) return 0;
  x.on(s);  // refuses one of another device
  return double(x.bytes());
}
double traffic(Stream s, const AnyTensor& x) {
  if (!x.defined()) return 0;
  x.on(s);
  return double(x.bytes());
}
double traffic(Stream s, const Positions& x) { return traffic(s, x.wide) + traffic(s, x.narrow); }

/// Enqueues an operation that needs so many additions and multiplications, and reads or writes
/// `touched`: a tensor that is read and written is named twice.
template <class... Tensors>
void run(Stream s, const char* op, const OperationCost& cost, double flops,
         const Tensors&... touched) {
  SimStream& stream = sim_stream(s);
  stream.enqueue(op, stream.operation_ns(cost, flops, (traffic(s, touched) + ...)));
}

/// The same where memory takes the time.
template <class... Tensors>
void pass(Stream s, const char* op, const Tensors&... touched) {
  run(s, op, sim_stream(s).profile().cost_of(op), 0, touched...);
}

/// The same for a convolution, or one of its gradients, whose result has so many channels.
template <class... Tensors>
void convolve(Stream s, const char* op, const Window2d& g, int64_t channels,
              const Tensors&... touched) {
  if (g.empty()) return;
  const Profile& profile = sim_stream(s).profile();
  run(s, op, profile.cost_of(op, g.kernel), g.flops() * profile.padding_factor(channels),
      touched...);
}

/// Where statistics [2C+1], or those of one part among several, have their number of rows.
const Real* row_count(const Tensor& statistics, int64_t part = 0) {
  const int64_t length = statistics.shape()[statistics.shape().axes() - 1];
  return statistics.data() + (part + 1) * length - 1;
}

class SimKernels final : public Kernels {
 public:
  std::string engine() const override { return "simulated"; }

  // --- Element by element ------------------------------------------------------------------------

  void fill(Stream s, Real, const Tensor& y) override { pass(s, "fill", y); }
  void fill_count(Stream s, int64_t value, const CountTensor& y) override {
    pass(s, "fill_count", y);
    if (!SimHost::is_memory(y.data())) return;
    std::fill(y.data(), y.data() + y.elements(), value);
  }
  void add(Stream s, const AnyTensor& x, const AnyTensor& y) override { pass(s, "add", x, y, y); }
  void scale(Stream s, Real, const Tensor& y) override { pass(s, "scale", y, y); }
  void to_sixteen_bits(Stream s, Real, const Tensor& x, const AnyTensor& y) override {
    pass(s, "to_sixteen_bits", x, y);
  }
  void from_sixteen_bits(Stream s, const AnyTensor& x, const Tensor& y) override {
    pass(s, "from_sixteen_bits", x, y);
  }
  void normalize_images(Stream s, const ByteTensor& x, Real, Real, const AnyTensor& y) override {
    pass(s, "normalize_images", x, y);
  }
  void relu(Stream s, const AnyTensor& x, const AnyTensor& y) override { pass(s, "relu", x, y); }
  void relu_backward(Stream s, const AnyTensor& y, const AnyTensor& dy,
                     const AnyTensor& dx) override {
    pass(s, "relu_backward", y, dy, dx);
  }
  void to_channels_first(Stream s, const AnyTensor& x, const AnyTensor& y) override {
    pass(s, "to_channels_first", x, y);
  }
  void to_channels_last(Stream s, const AnyTensor& x, const AnyTensor& y) override {
    pass(s, "to_channels_last", x, y);
  }

  // --- Convolution and matrix product ------------------------------------------------------------

  void conv2d(Stream s, const Window2d& g, const AnyTensor& x, const AnyTensor& weight,
              const Tensor& bias, const AnyTensor& y) override {
    convolve(s, "conv2d", g, g.out_channels, x, weight, bias, y);
  }
  void conv2d_backward_input(Stream s, const Window2d& g, const AnyTensor& dy,
                             const AnyTensor& weight, const AnyTensor& dx) override {
    convolve(s, "conv2d_backward_input", g, g.in_channels, dy, weight, dx);
  }
  void conv2d_backward_parameters(Stream s, const Window2d& g, const AnyTensor& x,
                                  const AnyTensor& dy, const Tensor& dweight,
                                  const Tensor& dbias) override {
    convolve(s, "conv2d_backward_parameters", g, g.out_channels, x, dy, dweight, dweight, dbias);
  }
  void matmul(Stream s, const MatMul& shape, const AnyTensor& a, const AnyTensor& b,
              const AnyTensor& c) override {
    if (!shape.empty()) {
      const double flops = 2.0 * double(shape.m) * double(shape.n) * double(shape.k);
      run(s, "matmul", sim_stream(s).profile().cost_of("matmul"), flops, a, b, c);
    } else if (!shape.accumulate) {
      pass(s, "fill", c);
    }
  }

  // --- Bias --------------------------------------------------------------------------------------

  void add_bias(Stream s, const Tensor& bias, bool, const AnyTensor& y) override {
    pass(s, "add_bias", bias, y, y);
  }
  void add_column_sums(Stream s, const AnyTensor& dy, const Tensor& dbias) override {
    pass(s, "add_column_sums", dy, dbias, dbias);
  }

  // --- Pooling -----------------------------------------------------------------------------------

  void max_pool2d(Stream s, const Window2d&, bool, const AnyTensor& x, const AnyTensor& y,
                  const Positions& where) override {
    pass(s, "max_pool2d", x, y, where);
  }
  void max_pool2d_backward(Stream s, const Window2d&, const AnyTensor& dy, const Positions& where,
                           const AnyTensor& dx) override {
    pass(s, "max_pool2d_backward", dy, where, dx);
  }
  void adaptive_avg_pool2d(Stream s, const AnyTensor& x, const AnyTensor& y) override {
    pass(s, "adaptive_avg_pool2d", x, y);
  }
  void adaptive_avg_pool2d_backward(Stream s, const AnyTensor& dy, const AnyTensor& dx) override {
    pass(s, "adaptive_avg_pool2d_backward", dy, dx);
  }

  // --- Batch normalisation: the numbers of rows are known ----------------------------------------

  void batch_norm_statistics(Stream s, const AnyTensor& x, const Tensor& statistics) override {
    pass(s, "batch_norm_statistics", x, statistics);
    const int64_t channels = statistics.elements() / 2;
    sim_stream(s).host().know(row_count(statistics), double(x.elements() / channels));
  }
  void batch_norm_merge(Stream s, const Tensor& gathered, const Tensor& statistics) override {
    pass(s, "batch_norm_merge", gathered, statistics);
    SimHost& host = sim_stream(s).host();
    double rows = 0;
    for (int64_t part = 0; part < gathered.shape()[0]; ++part) {
      const double* const known = host.known(row_count(gathered, part));
      if (known != nullptr) rows += *known;
    }
    host.know(row_count(statistics), rows);
  }
  void batch_norm_prepare(Stream s, const Tensor& statistics, Real, Real,
                          const Tensor& running_mean, const Tensor& running_var,
                          const Tensor& norm) override {
    pass(s, "batch_norm_prepare", statistics, running_mean, running_mean, running_var, running_var,
         norm);
  }
  void batch_norm_measure(Stream s, const AnyTensor& x, Real, Real, const Tensor& running_mean,
                          const Tensor& running_var, const Tensor& norm) override {
    pass(s, "batch_norm_measure", x, running_mean, running_mean, running_var, running_var, norm);
  }
  void batch_norm_prepare_eval(Stream s, const Tensor& running_mean, const Tensor& running_var,
                               Real, const Tensor& norm) override {
    pass(s, "batch_norm_prepare_eval", running_mean, running_var, norm);
  }
  void batch_norm(Stream s, const AnyTensor& x, const Tensor& norm, const Tensor& weight,
                  const Tensor& bias, const AnyTensor& skip, bool, const AnyTensor& y) override {
    pass(s, "batch_norm", x, norm, weight, bias, skip, y);
  }
  void batch_norm_backward_sums(Stream s, const AnyTensor& x, const AnyTensor& dy,
                                const Tensor& norm, const Tensor& weight, const Tensor& bias, bool,
                                const Tensor& sums, const Tensor& dweight,
                                const Tensor& dbias) override {
    pass(s, "batch_norm_backward_sums", x, dy, norm, weight, bias, sums, dweight, dweight, dbias,
         dbias);
  }
  void batch_norm_backward_input(Stream s, const AnyTensor& x, const AnyTensor& dy,
                                 const Tensor& norm, const Tensor& weight, const Tensor& bias, bool,
                                 const Tensor& sums, const AnyTensor& dx) override {
    pass(s, "batch_norm_backward_input", x, dy, norm, weight, bias, sums, dx);
  }

  // --- Dropout -----------------------------------------------------------------------------------

  void dropout_mask(Stream s, const StepStateTensor& state, DropoutKey, Real,
                    const AnyTensor& mask) override {
    pass(s, "dropout_mask", state, mask);
  }
  void apply_mask(Stream s, const AnyTensor& x, const AnyTensor& mask,
                  const AnyTensor& y) override {
    pass(s, "apply_mask", x, mask, y);
  }

  // --- Loss and metrics --------------------------------------------------------------------------

  void log_softmax(Stream s, const AnyTensor& x, const Tensor& y) override {
    pass(s, "log_softmax", x, y);
  }
  void log_softmax_backward(Stream s, const Tensor& y, const Tensor& dy,
                            const AnyTensor& dx) override {
    pass(s, "log_softmax_backward", y, dy, dx);
  }
  void nll_loss(Stream s, const StepStateTensor& state, const Tensor& log_probabilities,
                const LabelTensor& labels, const Tensor& loss) override {
    pass(s, "nll_loss", state, log_probabilities, labels, loss, loss);
  }
  void nll_loss_backward(Stream s, const StepStateTensor& state, const LabelTensor& labels,
                         const Tensor& dx) override {
    pass(s, "nll_loss_backward", state, labels, dx);
  }
  void count_correct(Stream s, const AnyTensor& scores, const LabelTensor& labels,
                     const CountTensor& count) override {
    pass(s, "count_correct", scores, labels, count, count);
  }

  // --- Optimizer: no number is anything but finite -----------------------------------------------

  void check_finite(Stream s, const StepStateTensor& state, const Tensor& x,
                    const HealthTensor& health) override {
    pass(s, "check_finite", state, x, health);
  }
  void scale_loss(Stream s, const HealthTensor& health, const Tensor& x) override {
    pass(s, "scale_loss", health, x, x);
  }
  void unscale(Stream s, const StepStateTensor& state, const HealthTensor& health,
               const Tensor& x) override {
    pass(s, "unscale", health, x, x);
    pass(s, "find_overflow", state, x, health);
  }
  void update_scale(Stream s, int64_t, const HealthTensor& health) override {
    pass(s, "update_scale", health, health);
  }
  void poison(Stream s, const HealthTensor& health, const Tensor& x) override {
    pass(s, "poison", health, x);
  }
  void sum_squares(Stream s, const Tensor& x, const Tensor& sums) override {
    pass(s, "sum_squares_parts", x, sums);
    pass(s, "sum_squares", sums);
  }
  void clip_to_norm(Stream s, Real, const Tensor& squares, const Tensor& x) override {
    pass(s, "clip_to_norm", squares, x, x);
  }
  void sgd_update(Stream s, const StepStateTensor& state, const HealthTensor& health,
                  const Owners& owners, SgdRule, const Tensor& gradient, const Tensor& velocity,
                  const Tensor& weight) override {
    pass(s, "sgd_update", state, health, owners.stretches, owners.marks, gradient, velocity,
         velocity, weight, weight);
  }
  void adam_count(Stream s, const StepStateTensor& state, const HealthTensor& health,
                  const Tensor& marks, const AdamRule&, const CountTensor& steps,
                  const Tensor& factors) override {
    pass(s, "adam_count", state, health, marks, steps, steps, factors);
  }
  void adam_update(Stream s, const StepStateTensor& state, const HealthTensor& health,
                   const Owners& owners, const AdamRule&, const Tensor& factors,
                   const Tensor& gradient, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                   const Tensor& weight) override {
    pass(s, "adam_update", state, health, owners.stretches, owners.marks, factors, gradient,
         exp_avg, exp_avg, exp_avg_sq, exp_avg_sq, weight, weight);
  }
};

}  // namespace

std::unique_ptr<Kernels> make_kernels() { return std::make_unique<SimKernels>(); }

}  // namespace lockstep::sim
