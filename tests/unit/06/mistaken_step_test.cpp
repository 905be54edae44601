// What `lockstep show` draws is what was enqueued: a mistake in a step changes the drawing.

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "06-fully-sharded/unit.h"
#include "common/comm/sim_communicator.h"
#include "common/core/stream_backend.h"
#include "common/kernels/devices.h"
#include "common/nn/layers.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using testing::TempDir;
using Texts = std::vector<std::string>;

enum class Mistake { none, other_order, dropped_wait, late_free };

/// The forward of two units, as FullyShardedDataParallel enqueues it, or with a mistake.
void enqueue(Unit& a, Unit& b, const Tensor& x, Context& context, Mistake mistake) {
  (mistake == Mistake::other_order ? b : a).gather();
  (mistake == Mistake::other_order ? a : b).gather();
  if (mistake != Mistake::dropped_wait) a.await_values();
  const Tensor y = a.forward(x, context);
  if (mistake != Mistake::late_free) a.free_values();
  b.await_values();
  b.forward(y, context);
  b.free_values();
  a.free_values();
}

std::unique_ptr<Unit> unit_of(const std::string& name, UnitMessages& messages) {
  Layers layers;
  layers.push_back(std::make_unique<Linear>(16, 16));
  layers.back()->set_name("linear");
  auto unit = std::make_unique<Unit>(std::move(layers), messages);
  unit->set_name(name);
  return unit;
}

/// What is drawn: the operations of both streams with what they had to wait for, and the memory.
struct Drawn {
  Texts passes, communication;
  int64_t most_bytes = 0;
};

Texts operations(Stream stream) {
  Texts texts;
  for (const Span& span : stream.backend().timeline()) {
    std::string text = span.scope == nullptr ? span.op : *span.scope;
    for (const SpanPlace& before : span.after) {
      const Span other = before.stream->timeline().at(before.number);
      text += fmt::format(" after {}", other.scope == nullptr ? other.op : *other.scope);
    }
    if (span.op != std::string("fill")) texts.push_back(text);
  }
  return texts;
}

Drawn draw(Mistake mistake) {
  const TempDir folder;
  const std::string profile = folder / "units.json";
  std::ofstream(profile) << R"({"device": "a unit each", "source": "made up",
    "memory_bytes": 1e9, "launch_seconds": 0, "batch_seconds": 0,
    "operations": {"default": {"seconds": 1e-6, "flops": 1e30, "bytes": 1e30}},
    "links": {"host": {"seconds": 0, "bytes": 1e30}, "device": {"seconds": 1e-6, "bytes": 1e30},
              "network": {"seconds": 1e-6, "bytes": 1e30}}})";
  const Devices devices = open_devices(parse_devices("sim:" + profile + "x1"), {.trace = true});
  const Stream passes = devices[0]->create_stream("compute"),
               communication = devices[0]->create_stream("communication");
  const auto comm = make_sim_communicator({0, 1}, 2);
  UnitMessages messages{ShardKind::parameters, *comm, passes, communication};
  const auto a = unit_of("a", messages), b = unit_of("b", messages);
  Context context(passes);
  enqueue(*a, *b, Tensor::empty(passes, {4, 16}), context, mistake);
  Drawn drawn{operations(passes), operations(communication), 0};
  int64_t bytes = 0;
  for (const MemoryChange& change : passes.backend().memory_changes()) {
    bytes += change.bytes;
    drawn.most_bytes = std::max(drawn.most_bytes, bytes);
  }
  return drawn;
}

TEST_CASE("A drawing tells what a step waits for, in which order, and what it keeps",
          "[sharded][sim]") {
  const Drawn right = draw(Mistake::none);
  CHECK(right.communication == Texts{"gather a after fill", "gather b after fill"});
  CHECK(right.passes ==
        Texts{"a.linear after gather a", "a.linear", "b.linear after gather b", "b.linear"});

  const Drawn other_order = draw(Mistake::other_order);
  CHECK(other_order.communication == Texts{"gather b after fill", "gather a after fill"});

  const Drawn dropped_wait = draw(Mistake::dropped_wait);
  CHECK(dropped_wait.passes ==
        Texts{"a.linear", "a.linear", "b.linear after gather a after gather b", "b.linear"});

  const Drawn late_free = draw(Mistake::late_free);
  CHECK(late_free.passes == right.passes);
  CHECK(late_free.most_bytes > right.most_bytes);
}

}  // namespace
}  // namespace lockstep
