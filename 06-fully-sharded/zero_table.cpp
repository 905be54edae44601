// What a rank keeps of a network in float32, as here, and in mixed precision, as in the ZeRO paper:
// bytes that a simulated device counts, which takes no memory for them.
//
//   build/06-fully-sharded/zero-table
//   build/06-fully-sharded/zero-table --width 64 --ranks 4

#include <array>
#include <utility>

#include "06-fully-sharded/unit.h"
#include "common/core/text.h"
#include "common/kernels/devices.h"
#include "common/nn/models.h"
#include "common/options/option_parser.h"
#include "common/options/report.h"
#include "common/system/process.h"

namespace lockstep {
namespace {

struct TableOptions {
  int64_t width = 12467;  // 7.5e9 parameters
  int ranks = 64;

  explicit TableOptions(OptionParser& parser) {
    parser.add("--width", width, "of the network, --model mlp; 12467: 7.5e9 parameters",
               {1, 100000});
    parser.add("--ranks", ranks, "that share it out", {1, 65536});
  }
};

/// Bytes for a parameter: of its value, its gradient, and what only the optimizer reads.
struct PerParameter {
  double values, gradients, state;
};
constexpr PerParameter kFloat32{4, 4, 8};  // the state: AdamW's two means
/// Layers compute with values and gradients in 16 bits. The weights that remember updates are
/// float32, and state.
constexpr PerParameter kMixed{2, 2, 4 + 8};

/// What a rank keeps whole, or its shard of.
struct Kept {
  ShardKind kind;
  int64_t whole, shard;

  int64_t of(ShardKind first) const { return kind >= first ? shard : whole; }
  int64_t values() const { return of(ShardKind::parameters); }
  int64_t gradients() const { return of(ShardKind::gradients); }
  int64_t state() const { return of(ShardKind::optimizer); }
};

using Floats = BasicTensor<float>;

int64_t count_float32(Stream stream, const Kept& kept) {
  const auto values = Floats::empty(stream, {kept.values()});
  const auto gradients = Floats::empty(stream, {kept.gradients()});
  const auto mean = Floats::empty(stream, {kept.state()});
  const auto mean_of_squares = Floats::empty(stream, {kept.state()});
  return stream.device().memory().current();
}

int64_t count_mixed(Stream stream, const Kept& kept) {
  const auto values = Bf16Tensor::empty(stream, {kept.values()});
  const auto gradients = Bf16Tensor::empty(stream, {kept.gradients()});
  const auto weights = Floats::empty(stream, {kept.state()});
  const auto mean = Floats::empty(stream, {kept.state()});
  const auto mean_of_squares = Floats::empty(stream, {kept.state()});
  return stream.device().memory().current();
}

double by_formula(const PerParameter& bytes, ShardKind kind, double parameters, int ranks) {
  const auto share = [&](ShardKind first) { return kind >= first ? 1.0 / ranks : 1.0; };
  return parameters * (bytes.values * share(ShardKind::parameters) +
                       bytes.gradients * share(ShardKind::gradients) +
                       bytes.state * share(ShardKind::optimizer));
}

/// The network's parameters, one after another, as a rank's flat buffer has them.
std::pair<int64_t, int64_t> parameters_and_end(int64_t width) {
  const Model model = make_model({.kind = ModelKind::mlp, .width = width});
  int64_t parameters = 0, end = 0;
  for (const Parameter* p : model.network->parameters()) {
    parameters += p->shape.elements();
    end += aligned(p->shape.elements());
  }
  return {parameters, end};
}

void print_table(const TableOptions& options) {
  const auto device = open_device(parse_devices("sim:1").front(), {});
  const Stream stream = device->create_stream("compute");
  const auto [parameters, end] = parameters_and_end(options.width);
  const int64_t whole = padded_length(end, options.ranks);
  print_clean("{} parameters, {} ranks: GB on each, counted (by formula)\n", parameters,
              options.ranks);
  print_clean("{:<10}  {:>18}  {:>18}\n", "--shard", "float32: 4+4+8", "mixed: 2+2+12");
  for (const ShardKind kind :
       {ShardKind::none, ShardKind::optimizer, ShardKind::gradients, ShardKind::parameters}) {
    const Kept kept{kind, whole, whole / options.ranks};
    const auto cell = [&](int64_t counted, const PerParameter& bytes) {
      const double predicted = by_formula(bytes, kind, double(parameters), options.ranks);
      return fmt::format("{:.3f} ({:.3f})", double(counted) / 1e9, predicted / 1e9);
    };
    print_clean("{:<10}  {:>18}  {:>18}\n", name_of(kind),
                cell(count_float32(stream, kept), kFloat32),
                cell(count_mixed(stream, kept), kMixed));
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  lockstep::hold_standard_streams();
  lockstep::report_uncaught_errors();
  lockstep::OptionParser parser("zero-table",
                                "What a rank keeps, in float32 and in mixed precision.");
  const lockstep::TableOptions options(parser);
  if (parser.parse(argc, argv)) lockstep::print_table(options);
  lockstep::require_printed();
}
