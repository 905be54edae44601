#include "07-mesh/device_mesh.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "common/core/error.h"
#include "common/core/parse.h"

namespace lockstep {

constexpr const char* kAutomatic = "auto";
constexpr int64_t kMostRanks = 1 << 20;
constexpr int64_t kAnySize = std::numeric_limits<int64_t>::max();

// --- The shape -----------------------------------------------------------------------------------

MeshShape MeshShape::from(std::string_view text) {
  MeshShape shape;
  if (text == kAutomatic) return shape;
  for (bool more = true; more;) {
    const size_t comma = text.find(',');
    shape.add(text.substr(0, comma));
    more = comma != std::string_view::npos;
    if (more) text.remove_prefix(comma + 1);
  }
  return shape;
}

/// "data=2"
void MeshShape::add(std::string_view text) {
  const auto words = words_of(Axis());
  const size_t equals = text.find('=');
  const auto word = std::ranges::find(words, text.substr(0, equals));
  std::optional<int64_t> size;
  if (equals != std::string_view::npos) size = read_whole(text.substr(equals + 1), 1, kAnySize);
  require(word != words.end() && size,
          "--mesh: found '{}', expected axes with their numbers of ranks, such as data=2,tensor=2; "
          "the axes are {}",
          text, fmt::join(words, ", "));
  const auto axis = Axis(word - words.begin());
  require(std::ranges::count(extents_, axis, &Extent::axis) == 0,
          "--mesh: found the axis {} twice, expected once; leave one of them out", *word);
  require(*size <= kMostRanks / ranks(),  // a product that is larger might not fit
          "--mesh: found {} x {} ranks up to {}, expected {} at most; give as many ranks as the "
          "run has",
          ranks(), *size, text, kMostRanks);
  extents_.push_back({axis, int(*size)});
}

std::string MeshShape::text() const {
  if (extents_.empty()) return kAutomatic;
  std::vector<std::string> parts;
  for (const auto& [axis, size] : extents_) {
    parts.push_back(fmt::format("{}={}", name_of(axis), size));
  }
  return fmt::format("{}", fmt::join(parts, ","));
}

int64_t MeshShape::ranks() const {
  int64_t ranks = 1;
  for (const Extent& extent : extents_) ranks *= extent.size;
  return ranks;
}

int MeshShape::size(Axis axis) const {
  const auto extent = std::ranges::find(extents_, axis, &Extent::axis);
  return extent == extents_.end() ? 1 : extent->size;
}

// [task 07.1] coordinates and groups
int MeshShape::coordinate(int rank, Axis axis) const {
  for (auto extent = extents_.rbegin(); extent != extents_.rend(); ++extent) {
    if (extent->axis == axis) return rank % extent->size;
    rank /= extent->size;
  }
  return 0;
}

int MeshShape::first_of(int rank, const Axes& axes) const {
  int first = 0;
  for (const Extent& extent : extents_) {
    first = first * extent.size + (axes.contains(extent.axis) ? 0 : coordinate(rank, extent.axis));
  }
  return first;
}
// [end 07.1]

std::string MeshShape::place_of(int rank) const {
  std::vector<std::string> places;
  for (const auto& [axis, size] : extents_) {
    if (size == 1) continue;
    places.push_back(fmt::format("{} {}", name_of(axis), coordinate(rank, axis)));
  }
  return fmt::format("{}", fmt::join(places, ", "));
}

std::string MeshShape::name_along(const Axes& axes) const {
  std::vector<std::string> names;
  for (const auto& [axis, size] : extents_) {
    if (size > 1 && axes.contains(axis)) names.push_back(name_of(axis));
  }
  return names.empty() ? "" : fmt::format("along {}", fmt::join(names, " and "));
}

MeshShape default_mesh(const ProcessGroup& group) {
  const int per_host = group.local_world_size(), ranks = group.world_size();
  if (ranks % per_host != 0) return MeshShape::from(fmt::format("data={}", ranks));
  return MeshShape::from(fmt::format("data={},shard={}", ranks / per_host, per_host));
}

// --- The groups ----------------------------------------------------------------------------------

DeviceMesh::DeviceMesh(const MeshShape& shape, ProcessGroup& group, Device& device,
                       Communicator& world)
    : shape_(shape == MeshShape() ? default_mesh(group) : shape),
      group_(group),
      device_(device),
      world_(world) {
  group.together([&] {
    require(shape_.ranks() == group.world_size(),
            "--mesh {}: has {} rank{}, expected {}, as many as there are; change the sizes, or "
            "--devices",
            shape_.text(), shape_.ranks(), shape_.ranks() == 1 ? "" : "s", group.world_size());
  });
  group.name_places([shape = shape_](int rank) { return shape.place_of(rank); }, world);
  world.set_name(shape_.name_along({kAllAxes.begin(), kAllAxes.end()}));
}

Communicator& DeviceMesh::along(const Axes& axes) {
  Axes long_axes;
  bool all = true;
  for (const Axis axis : kAllAxes) {
    if (size(axis) == 1) continue;
    if (axes.contains(axis)) long_axes.insert(axis);
    all = all && axes.contains(axis);
  }
  if (all) return world_;
  std::unique_ptr<Communicator>& made = groups_[long_axes];
  if (!made) made = new_group(long_axes);
  return *made;
}

std::unique_ptr<Communicator> DeviceMesh::new_group(const Axes& axes) const {
  std::unique_ptr<Communicator> made =
      group_.new_group(device_, [&](int rank) { return shape_.first_of(rank, axes); });
  made->set_name(shape_.name_along(axes));
  return made;
}

}  // namespace lockstep
