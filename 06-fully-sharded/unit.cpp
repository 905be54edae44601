#include "06-fully-sharded/unit.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <iterator>
#include <utility>

#include "common/core/error.h"
#include "common/kernels/kernels.h"

namespace lockstep {

// --- Which layers make a unit --------------------------------------------------------------------

namespace {

/// "block1" of "block1.0".
std::string block_of(const std::string& layer) { return layer.substr(0, layer.find('.')); }

/// Whether `next`, which has parameters, begins a unit after one of `bytes` that ends with `last`.
bool begins_unit(const LayerSize& last, int64_t bytes, const LayerSize& next, UnitSize size) {
  switch (size.kind) {
    case UnitSize::Kind::layer:
      return true;
    case UnitSize::Kind::block:
      return block_of(last.name) != block_of(next.name);
    case UnitSize::Kind::model:
      return false;
    case UnitSize::Kind::bytes:
      return bytes >= size.bytes;
  }
  return false;
}

}  // namespace

UnitSize UnitSize::from(std::string_view text) {
  if (text == "layer") return {Kind::layer};
  if (text == "block") return {Kind::block};
  if (text == "model") return {Kind::model};
  double mebibytes = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, mebibytes);
  require(error == std::errc() && rest == end && mebibytes > 0 && mebibytes <= 1e6,
          "--unit: found '{}', expected layer, block, model, or MiB of parameters from above 0 to "
          "1e6",
          text);
  return {Kind::bytes, int64_t(mebibytes * (1 << 20))};
}

std::string UnitSize::text() const {
  if (kind == Kind::bytes) return fmt::format("{}", double(bytes) / (1 << 20));
  return kind == Kind::layer ? "layer" : kind == Kind::block ? "block" : "model";
}

std::vector<size_t> divide_into_units(const std::vector<LayerSize>& layers, UnitSize size) {
  std::vector<size_t> units;
  int64_t bytes = 0;  // of the unit at hand
  LayerSize last;     // of its layers with parameters
  for (const LayerSize& layer : layers) {
    const bool begins = layer.bytes > 0 && bytes > 0 && begins_unit(last, bytes, layer, size);
    if (units.empty() || begins) {
      units.push_back(0);
      bytes = 0;
    }
    ++units.back();
    bytes += layer.bytes;
    if (layer.bytes > 0) last = layer;
  }
  return units;
}

std::vector<Layers> divide_into_units(Layers layers, UnitSize size) {
  std::vector<LayerSize> sizes;
  for (const auto& layer : layers) {
    int64_t elements = 0;
    for (const Parameter* p : layer->parameters()) elements += p->shape.elements();
    sizes.push_back({layer->name(), elements * int64_t(sizeof(Real))});
  }
  std::vector<Layers> units;
  auto next = layers.begin();
  for (const size_t count : divide_into_units(sizes, size)) {
    const auto end = next + std::ptrdiff_t(count);
    units.emplace_back(std::make_move_iterator(next), std::make_move_iterator(end));
    next = end;
  }
  return units;
}

std::string name_of_unit(const Layers& layers) {
  const auto named =
      std::ranges::find_if(layers, [](const auto& layer) { return !layer->parameters().empty(); });
  return (named == layers.end() ? layers.front() : *named)->name();
}

// --- A unit --------------------------------------------------------------------------------------

void UnitMessages::await(const Event& event, const char* phase) {
  pass_times.end("compute");
  passes.wait(event);
  pass_times.end(phase);
}

void UnitMessages::all_gather(Stream stream, const Tensor& mine, const Tensor& all) const {
  if (rounds(types.parameters) && !exact) return Bf16Messages(comm, stream).all_gather(mine, all);
  comm.all_gather(stream, mine, all);
}

void UnitMessages::reduce_scatter(Stream stream, const Tensor& all, const Tensor& mine) const {
  if (rounds(types.gradients)) return Bf16Messages(comm, stream).reduce_scatter(all, mine);
  comm.reduce_scatter(stream, all, mine);
}

void UnitMessages::all_reduce(Stream stream, const Tensor& x) const {
  if (rounds(types.gradients)) return Bf16Messages(comm, stream).all_reduce(1, x);
  comm.all_reduce(stream, x);
}

void UnitMessages::add_replicas(Purpose purpose, const Tensor& x) {
  if (replicas == nullptr) return;
  const CallPurpose counted(*replicas, counts ? purpose : Purpose::other);
  measure(purpose, [&] { replicas->all_reduce(communication, x); });
}

Unit::Unit(Layers layers, UnitMessages& messages) : messages_(messages) {
  for (std::unique_ptr<Module>& layer : layers) {
    const std::string name = layer->name();
    add(name, std::move(layer));
  }
  const std::vector<Parameter*> registered = parameters();
  in_order_.assign(registered.rbegin(), registered.rend());
  int64_t end = 0;
  for (const Parameter* p : in_order_) {
    ranges_.push_back({end, p->shape.elements()});
    end += aligned(p->shape.elements());
  }
  length_ = padded_length(end, messages.comm.world_size());
  allocate();
}

Unit::~Unit() {
  if (gathered_) messages_.passes.wait(*gathered_);
  if (reduced_) messages_.passes.wait(*reduced_);
  if (added_) messages_.passes.wait(*added_);
}

FlatRange Unit::shard() const {
  if (!messages_.shards(ShardKind::optimizer)) return {0, length_};
  return shard_of(length_, messages_.comm.rank(), messages_.comm.world_size());
}

std::vector<Stretch> Unit::stretches(int64_t first_parameter) const {
  const FlatRange mine = shard();
  std::vector<Stretch> all;
  for (const Piece& piece : pieces_in(ranges_, mine)) {
    if (!all.empty()) all.back().end = piece.in_shard;
    all.push_back({mine.count, first_parameter + int64_t(piece.parameter)});
  }
  if (all.empty()) all.push_back({mine.count, first_parameter});  // padding alone
  return all;
}

void Unit::allocate() {
  const auto zeros = [&](int64_t elements) {
    Tensor x = Tensor::empty(messages_.passes, {elements});
    messages_.passes.kernels().fill(messages_.passes, 0, x);
    return x;
  };
  const FlatRange mine = shard();
  if (messages_.shards(ShardKind::parameters)) {
    value_shard_ = zeros(mine.count);
  } else {
    values_ = zeros(length_);
    value_shard_ = values_.range(mine.first, {mine.count});
    point_values();
  }
  if (messages_.shards(ShardKind::gradients)) {
    gradient_shard_ = zeros(mine.count);
  } else {
    gradients_ = zeros(length_);
    gradient_shard_ = gradients_.range(mine.first, {mine.count});
    point_gradients();
  }
}

/// Parameters are views into the whole, or undefined where that is not there. So are their copies
/// in 16 bits, for which there is memory as long as for the values.
void Unit::point_values() {
  rounded_ = values_.defined() ? rounded_copies(messages_.precision, messages_.passes, length_)
                               : AnyTensor();
  rounded_is_old_ = true;
  for (size_t i = 0; i < in_order_.size(); ++i) {
    Parameter& p = *in_order_[i];
    const int64_t first = ranges_[i].first;
    p.value = values_.defined() ? values_.range(first, p.shape) : Tensor();
    p.rounded = rounded_.defined() ? rounded_.range(first, p.shape) : AnyTensor();
  }
}

void Unit::point_gradients() {
  for (size_t i = 0; i < in_order_.size(); ++i) {
    Parameter& p = *in_order_[i];
    p.grad = gradients_.defined() ? gradients_.range(ranges_[i].first, p.shape) : Tensor();
  }
}

// --- Values --------------------------------------------------------------------------------------

/// The whole values go from undefined to gathered, in use and undefined again, each time anew;
/// where the whole is kept, from out of date to gathered. Nothing here makes the host wait. Two
/// events keep the two streams in order:
///  1. of the passes, before the gather: then the memory is free to be written to, and the shard
///     has been updated, by all that is enqueued so far;
///  2. of the communication, `gathered_`, after the gather: the passes wait for it before they use
///     the values, and not earlier, so that a unit can be fetched ahead. It is waited for once.
/// `whole_` is true from gather() to shard_was_updated() or, where only the shard is kept, to
/// free_values(), also of a unit that nobody has waited for. point_values() belongs after every
/// change of `values_`, whose memory is the passes'. The passes wait by messages_.await(), and the
/// message goes through messages_.measure(), as one of parameters: time and bytes are measured.
/// messages_.all_gather() is the communicator's, in 16 bits where the options say so.
// [task 06.3] gather, use and free
void Unit::gather() {
  if (whole_) return;
  if (!values_.defined()) {
    values_ = Tensor::empty(messages_.passes, {length_});
    point_values();
  }
  const Stream passes = messages_.passes, communication = messages_.communication;
  const ScopedRange range(communication, "gather " + name());  // its name in traces
  communication.wait(passes.record());  // the memory is free, the shard has been updated
  messages_.measure(Purpose::parameters,
                    [&] { messages_.all_gather(communication, value_shard_, values_); });
  gathered_ = communication.record();
  whole_ = true;
}

void Unit::await_values() {
  if (gathered_) messages_.await(*gathered_);
  gathered_.reset();
}

void Unit::free_values() {
  if (!messages_.shards(ShardKind::parameters) || !values_.defined()) return;
  await_values();  // the gather writes to this memory: it must be over before that is freed
  values_ = Tensor();
  point_values();
  whole_ = false;
}
// [end 06.3]

void Unit::round_values() {
  if (!rounded_.defined() || !rounded_is_old_) return;
  messages_.passes.kernels().to_sixteen_bits(messages_.passes, 1, values_, rounded_);
  rounded_is_old_ = false;
}

void Unit::begin_loading() {
  if (values_.defined()) return;
  values_ = Tensor::empty(messages_.passes, {length_});
  messages_.passes.kernels().fill(messages_.passes, 0, values_);  // the padding
  point_values();
}

void Unit::end_loading() {
  whole_ = rounded_is_old_ = true;
  if (!messages_.shards(ShardKind::parameters)) return;
  const FlatRange mine = shard();
  messages_.passes.copy(value_shard_.data(), values_.range(mine.first, {mine.count}).data(),
                        value_shard_.bytes());
  free_values();
}

// --- Gradients -----------------------------------------------------------------------------------

void Unit::provide_gradients() {
  if (gradients_.defined()) return;
  gradients_ = Tensor::empty(messages_.passes, {length_});
  messages_.passes.kernels().fill(messages_.passes, 0, gradients_);
  point_gradients();
}

void Unit::reduce_gradients(const StepStateTensor& state, const HealthTensor& own_health) {
  const Stream communication = messages_.communication;
  const ScopedRange range(communication, "reduce " + name());
  Kernels& kernels = communication.kernels();
  communication.wait(messages_.passes.record());  // backward has written them
  kernels.check_finite(communication, state, gradients_, own_health);
  kernels.scale(communication, Real(1) / Real(messages_.averaged()), gradients_);
  if (messages_.shards(ShardKind::optimizer)) {
    messages_.measure(Purpose::gradients, [&] {
      messages_.reduce_scatter(communication, gradients_, gradient_shard_);
    });
  } else {
    messages_.measure(Purpose::gradients, [&] { messages_.all_reduce(communication, gradients_); });
  }
  reduced_ = communication.record();
  messages_.add_replicas(Purpose::gradients, gradient_shard_);
  if (messages_.replicas) added_ = communication.record();
}

void Unit::free_gradients() {
  if (reduced_) messages_.await(*reduced_);
  if (added_) messages_.await_replicas(*added_);
  reduced_.reset();
  added_.reset();
  if (!messages_.shards(ShardKind::gradients)) return;
  gradients_ = Tensor();
  point_gradients();
}

}  // namespace lockstep
