#pragma once
// A unit: layers whose parameters are gathered, reduced and given back together.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "04-ddp/compression.h"
#include "06-fully-sharded/shards.h"
#include "common/comm/communicator.h"
#include "common/nn/module.h"
#include "common/training/phase_timer.h"

namespace lockstep {

/// How large units are: "layer", "block", "model", or a number of MiB.
struct UnitSize {
  enum class Kind {
    layer,  // each layer that a Sequential runs by itself; a residual block is one
    block,  // layers of the same block: block1.0 and block1.1
    model,  // all layers
    bytes,  // as many layers as it takes to reach `bytes` of parameters
  };
  Kind kind = Kind::layer;
  int64_t bytes = 0;

  static UnitSize from(std::string_view text);  // throws BadInput
  std::string text() const;
};

/// A layer, for the division of a network into units.
struct LayerSize {
  std::string name;   // "block1.0"
  int64_t bytes = 0;  // of its parameters
};

/// The number of layers of each unit, in order. Layers without parameters join the unit before them
/// (at the beginning: the unit behind them). So every unit has parameters to share, if any layer
/// has some. The result depends on the network alone, so it is the same on all ranks.
std::vector<size_t> divide_into_units(const std::vector<LayerSize>& layers, UnitSize size);
/// The same for the layers themselves.
std::vector<Layers> divide_into_units(Layers layers, UnitSize size);

/// The name of the unit's first layer with parameters; of its first layer if none has any.
std::string name_of_unit(const Layers& layers);

/// What the ranks divide instead of keeping it W times. Each kind also divides what the kind before
/// it divides (ZeRO, Rajbhandari et al., arXiv 1910.02054).
enum class ShardKind {
  none,        // nothing: DistributedDataParallel
  optimizer,   // the optimizer's state: ZeRO-1
  gradients,   // ZeRO-2
  parameters,  // ZeRO-3, fully sharded data parallel (FSDP)
};
constexpr auto words_of(ShardKind) {
  return std::array{"none", "optimizer", "gradients", "parameters"};
}

/// The types of the units' messages; shards stay as they are. Mirrors MixedPrecisionPolicy of
/// PyTorch's fully_shard, which also computes in the parameters' type.
struct MessageTypes {
  /// Parameters as they are gathered. Layers compute with the rounded ones, in float32.
  Compression parameters = Compression::none;
  /// Gradients; they are divided by the number of ranks first.
  Compression gradients = Compression::none;
};

/// One rank's side of its units' messages. They go over the communication stream, in the same order
/// on all ranks.
struct UnitMessages {
  ShardKind kind;
  Communicator& comm;
  Stream passes, communication;
  /// Ranks that keep the same shards of other samples' gradients (stage 07); null: there are none.
  Communicator* replicas = nullptr;
  PhaseTimer pass_times{passes}, communication_times{communication};
  MessageTypes types{};
  Precision precision = Precision::real;  // of what layers compute
  bool exact = false;                     // true: parameters are gathered as they are, to be saved
  bool counts = false;  // true: since a training pass has begun, and until evaluation

  bool shards(ShardKind what) const { return kind >= what; }
  /// The number of ranks over which gradients are averaged.
  int averaged() const { return comm.world_size() * (replicas ? replicas->world_size() : 1); }
  /// Makes the passes wait for `event`, after messages of `comm`; they do not compute in this
  /// time.
  void await(const Event& event) { await(event, "exposed"); }
  /// The same after messages of `replicas`.
  void await_replicas(const Event& event) { await(event, "exposed, replicas"); }
  /// Calls `send`, which enqueues messages. In training the messages are timed, and the
  /// communicator counts their bytes under `purpose`.
  template <class Send>
  void measure(Purpose purpose, Send send) {
    const CallPurpose counted(comm, counts ? purpose : Purpose::other);
    if (counts) communication_times.start();
    send();
    communication_times.end("communication");
    communication_times.stop();
  }
  /// The communicator's collectives in the messages' types. One rank sends and rounds nothing.
  void all_gather(Stream stream, const Tensor& mine, const Tensor& all) const;
  void reduce_scatter(Stream stream, const Tensor& all, const Tensor& mine) const;
  void all_reduce(Stream stream, const Tensor& x) const;
  /// Replaces x by the sum of all replicas' x; sends nothing without replicas.
  void add_replicas(Purpose purpose, const Tensor& x);

 private:
  void await(const Event& event, const char* phase);
  bool rounds(Compression type) const { return type == Compression::bf16 && comm.world_size() > 1; }
};

/// Layers one after another. Their parameters lie in one flat buffer [length], in reverse order of
/// registration. The buffer is padded so that the ranks' shards [length / W] are equally long. The
/// kind decides what a rank keeps of the buffer:
///
///              values          gradients         updated by this rank
///   none       whole           whole             all of it
///   optimizer  whole           whole             its shard, a view of both
///   gradients  whole           a shard           its shard
///   parameters a shard         a shard           its shard
///
/// Where a shard is kept, the whole is allocated when it is needed, and freed after that. Layers
/// find the whole in Parameter::value and Parameter::grad, which are undefined while the whole is
/// not there.
class Unit final : public Sequential {
 public:
  /// Allocates what is kept; values are undefined until initialize() or a load.
  Unit(Layers layers, UnitMessages& messages);
  /// Messages may still be under way: the memory is given back after them.
  ~Unit() override;
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  // --- Values ------------------------------------------------------------------------------------

  /// Enqueues the messages that bring the whole values to this rank, if they are not there. All
  /// ranks call it in the same order. With ShardKind::none the values are always there after the
  /// first load, and nothing is sent.
  void gather();
  /// Later work on the passes' stream waits for the whole values.
  void await_values();
  /// Frees the whole values, if only a shard is kept. Work enqueued so far may use them. A gather
  /// that nobody has waited for still writes to that memory: the passes wait for the gather first.
  void free_values();
  /// Makes the 16-bit copies of the whole values that products read, if the precision asks for such
  /// copies and the values have changed since.
  void round_values();
  /// Notes that all ranks have updated their shards: copies of others' shards are out of date.
  void shard_was_updated() {
    whole_ = !messages_.shards(ShardKind::optimizer);
    rounded_is_old_ = true;
  }
  /// [length], while they are there.
  const Tensor& values() const { return values_; }
  const AnyTensor& rounded() const { return rounded_; }
  /// begin_loading() allocates the whole values, for writing; end_loading() keeps the rank's part.
  void begin_loading();
  void end_loading();

  // --- Gradients ---------------------------------------------------------------------------------

  /// Makes sure that there are whole gradients for backward to add to; new ones are zeros.
  void provide_gradients();
  /// Enqueues the averaging of gradients over the ranks: of the whole, or of this rank's shard.
  /// Notes in `own_health` if a gradient of this rank is not finite.
  void reduce_gradients(const StepStateTensor& state, const HealthTensor& own_health);
  /// Later work on the passes' stream waits for the averaged gradients. Frees the whole gradients,
  /// if only a shard is kept.
  void free_gradients();
  /// [length], while they are there.
  const Tensor& gradients() const { return gradients_; }

  // --- What this rank keeps ----------------------------------------------------------------------

  /// The values and gradients that this rank updates, [length / W] (none: [length]).
  const Tensor& value_shard() const { return value_shard_; }
  const Tensor& gradient_shard() const { return gradient_shard_; }
  /// Parameters in reverse order of registration, and where each one lies in the flat buffer.
  const std::vector<Parameter*>& in_order() const { return in_order_; }
  const std::vector<FlatRange>& ranges() const { return ranges_; }
  int64_t length() const { return length_; }
  /// The part of the flat buffer that this rank updates.
  FlatRange shard() const;
  /// The parameters of the numbers in shard(); they count from `first_parameter` on, in order.
  std::vector<Stretch> stretches(int64_t first_parameter) const;

 private:
  void point_values();
  void point_gradients();
  void allocate();

  UnitMessages& messages_;
  std::vector<Parameter*> in_order_;
  std::vector<FlatRange> ranges_;
  int64_t length_ = 0;
  Tensor values_, gradients_;  // [length], undefined while only the shard is there
  AnyTensor rounded_;          // [length], as long as values_; undefined without 16 bits
  Tensor value_shard_, gradient_shard_;
  bool rounded_is_old_ = true;
  bool whole_ = false;             // values_ has, or will have, all ranks' shards
  std::optional<Event> gathered_;  // after the gather that the passes have not waited for
  std::optional<Event> reduced_;   // after the reduction, likewise
  std::optional<Event> added_;     // after the replicas' sum, likewise
};

}  // namespace lockstep
