#pragma once
// The ranks of a job as a grid: an axis for each way in which they divide the work.

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common/comm/process_group.h"

namespace lockstep {

/// How the ranks along an axis differ.
enum class Axis {
  data,      // other samples, the same weights: stage 04
  shard,     // other samples, other parts of the weights, gathered for use: stage 06
  tensor,    // the same samples, other parts of the layers: stage 03
  pipeline,  // the same samples, other layers: stage 03
};
constexpr auto words_of(Axis) { return std::array{"data", "shard", "tensor", "pipeline"}; }

inline constexpr std::array kAllAxes{Axis::data, Axis::shard, Axis::tensor, Axis::pipeline};

using Axes = std::set<Axis>;

/// Names and sizes of the axes. Rank r's coordinates are row-major: ranks along the last axis have
/// consecutive numbers. Mirrors the mesh_shape and mesh_dim_names of
/// torch.distributed.init_device_mesh.
class MeshShape {
 public:
  /// Reads "data=2,tensor=2", outermost axis first; an axis without a name there has size 1. "auto"
  /// names none: see default_mesh(). Throws BadInput for anything else.
  static MeshShape from(std::string_view text);
  std::string text() const;
  friend bool operator==(const MeshShape&, const MeshShape&) = default;

  int64_t ranks() const;
  int size(Axis axis) const;
  /// The place of `rank` along an axis, from 0 to its size - 1.
  int coordinate(int rank, Axis axis) const;
  /// The first rank of the group of `rank` along `axes`. Coordinates in a group differ only along
  /// these axes. Ranks with the same first rank belong to the same group.
  int first_of(int rank, const Axes& axes) const;
  /// "along data and shard": names the axes that are longer than 1, in the order of the mesh.
  std::string name_along(const Axes& axes) const;
  /// A rank's coordinates along the axes that are longer than 1: "data 1, tensor 1"; may be empty.
  std::string place_of(int rank) const;

 private:
  void add(std::string_view text);

  struct Extent {
    Axis axis;
    int size;
    friend bool operator==(const Extent&, const Extent&) = default;
  };
  std::vector<Extent> extents_;
};

/// This rank's place in the mesh, and its groups. Mirrors torch.distributed.DeviceMesh.
///
/// All groups enqueue their collectives on one stream; outside of a step on another stream, after
/// all that are on the first (MeshParallel::await_messages()). Ranks of the same stage run the same
/// program, so their k-th collectives all belong to the same axes. So no two ranks can wait for
/// each other: of all collectives under way, the one with the smallest k waits for none. Stages of
/// a pipeline make different passes; rank_pipeline.h says why they cannot wait for each other
/// either.
class DeviceMesh {
 public:
  /// `world` has all ranks of `group`, as connect() made it. All must outlive this object. Throws
  /// BadInput, on all ranks, if the shape has another number of ranks.
  DeviceMesh(const MeshShape& shape, ProcessGroup& group, Device& device, Communicator& world);

  const MeshShape& shape() const { return shape_; }
  int size(Axis axis) const { return shape_.size(axis); }
  int coordinate(Axis axis) const { return shape_.coordinate(world_.rank(), axis); }
  /// The ranks that differ from this one along these axes only, in the order of their ranks. All
  /// ranks ask for the same axes in the same order: the first time they connect.
  Communicator& along(const Axes& axes);
  /// A further group of the same ranks, for messages that must not wait for those of along(axes).
  std::unique_ptr<Communicator> new_group(const Axes& axes) const;
  ProcessGroup& group() const { return group_; }
  Device& device() const { return device_; }

 private:
  MeshShape shape_;
  ProcessGroup& group_;
  Device& device_;
  Communicator& world_;
  std::map<Axes, std::unique_ptr<Communicator>> groups_;  // by the axes that are longer than 1
};

/// The mesh of W ranks if the options name none. The ranks of a host share the weights out; every
/// host has a copy of them. So as little as possible has to pass the network.
MeshShape default_mesh(const ProcessGroup& group);

}  // namespace lockstep
