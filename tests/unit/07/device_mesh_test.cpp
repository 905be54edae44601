// The arithmetic of meshes, and the groups of their axes.

#include <map>
#include <mutex>

#include "07-mesh/device_mesh.h"
#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/unit/comm/process_group_job.h"

namespace lockstep {
namespace {

using namespace lockstep::testing::group;

TEST_CASE("Coordinates are row-major, and the last axis is the nearest", "[unit][mesh]") {
  const MeshShape mesh = MeshShape::from("data=2,shard=3,tensor=2");
  CHECK(mesh.text() == "data=2,shard=3,tensor=2");
  CHECK(mesh.ranks() == 12);
  for (int rank = 0; rank < 12; ++rank) {
    const int data = mesh.coordinate(rank, Axis::data), shard = mesh.coordinate(rank, Axis::shard),
              tensor = mesh.coordinate(rank, Axis::tensor);
    CHECK(rank == (data * 3 + shard) * 2 + tensor);
    CHECK((data < 2 && shard < 3 && tensor < 2));
  }
  const MeshShape other = MeshShape::from("tensor=2,data=3");
  CHECK(other.coordinate(4, Axis::tensor) == 1);
  CHECK(other.coordinate(4, Axis::data) == 1);
  CHECK(other.coordinate(4, Axis::shard) == 0);
  CHECK(other.size(Axis::shard) == 1);
}

TEST_CASE("Ranks of a group differ along its axes only", "[unit][mesh]") {
  const MeshShape mesh = MeshShape::from("data=2,shard=2,tensor=2");
  std::map<int, std::vector<int>> along_shard, along_samples;
  for (int rank = 0; rank < 8; ++rank) {
    along_shard[mesh.first_of(rank, {Axis::shard})].push_back(rank);
    along_samples[mesh.first_of(rank, {Axis::data, Axis::shard})].push_back(rank);
    CHECK(mesh.first_of(rank, {}) == rank);
    CHECK(mesh.first_of(rank, {Axis::data, Axis::shard, Axis::tensor}) == 0);
  }
  CHECK(along_shard ==
        std::map<int, std::vector<int>>{{0, {0, 2}}, {1, {1, 3}}, {4, {4, 6}}, {5, {5, 7}}});
  CHECK(along_samples == std::map<int, std::vector<int>>{{0, {0, 2, 4, 6}}, {1, {1, 3, 5, 7}}});
}

TEST_CASE("A rank's name has its coordinates", "[unit][mesh]") {
  CHECK(MeshShape::from("data=2,shard=1,tensor=4").place_of(5) == "data 1, tensor 1");
  CHECK(MeshShape::from("data=1").place_of(0).empty());
  CHECK(MeshShape::from("auto") == MeshShape());
  CHECK(MeshShape().text() == "auto");
}

TEST_CASE("A group's name has its axes in the order of the mesh", "[unit][mesh]") {
  const MeshShape mesh = MeshShape::from("shard=2,data=2,pipeline=1,tensor=2");
  CHECK(mesh.name_along({Axis::data}) == "along data");
  CHECK(mesh.name_along({Axis::data, Axis::shard}) == "along shard and data");
  CHECK(mesh.name_along({Axis::tensor, Axis::pipeline}) == "along tensor");
  CHECK(mesh.name_along({Axis::pipeline}).empty());
}

/// Adds the ranks' numbers up along each axis: the sums tell who was in the group.
TEST_CASE("Each axis is a group of ranks, and axes of size 1 have none", "[unit][mesh]") {
  const MeshShape shape = MeshShape::from("data=2,shard=1,tensor=2");
  std::mutex mutex;
  std::map<int, std::vector<float>> sums;  // by rank: along data, tensor, both, and shard
  const auto errors = Job(4).run_connected([&](ProcessGroup& group, Communicator& world, Stream s) {
    DeviceMesh mesh(shape, group, s.device(), world);
    std::vector<float> found;
    for (const Axes& axes : {Axes{Axis::data}, Axes{Axis::tensor}, Axes{Axis::data, Axis::tensor},
                             Axes{Axis::shard}}) {
      const auto x = BasicTensor<float>::from_host(s, {1}, {float(1 << group.rank())});
      mesh.along(axes).all_reduce(s, x);
      found.push_back(x.to_host()[0]);
    }
    const bool made_once = &mesh.along({Axis::data, Axis::shard}) == &mesh.along({Axis::data}) &&
                           &mesh.along({Axis::data, Axis::tensor}) == &world;
    if (!made_once) fail<BadInput>("a group was made twice");
    const std::lock_guard lock(mutex);
    sums[group.rank()] = found;
  });
  CHECK(errors == std::vector<std::string>(4));
  CHECK(sums ==
        std::map<int, std::vector<float>>{
            {0, {5, 3, 15, 1}}, {1, {10, 3, 15, 2}}, {2, {5, 12, 15, 4}}, {3, {10, 12, 15, 8}}});
}

}  // namespace
}  // namespace lockstep
