// Meshes of ranks that have a GPU each: several groups of NCCL at once.

#include <fmt/ranges.h>

#include <cstdlib>

#include "common/core/stream_backend.h"
#include "common/launch/flight_table.h"
#include "tests/gpu/nccl_test_support.h"
#include "tests/support/data_test_files.h"
#include "tests/support/mesh_training.h"
#include "tests/support/stage.h"
#include "tests/unit/comm/process_group_job.h"

namespace lockstep {
namespace {

using namespace testing::nccl;
using Catch::Matchers::ContainsSubstring;
using testing::kLong;
using testing::Samples;
using testing::ScopedEnvironment;
using testing::group::Job;
using testing::mesh::MeshMember;
using testing::mesh::MeshResult;
using testing::mesh::MeshSetting;
using Numbers = std::vector<double>;

/// Calls work(member) on each of the job's ranks, on a thread with a GPU and NCCL: what they threw.
std::vector<std::string> on_mesh(const Job& job, const MeshSetting& setting,
                                 const std::function<void(MeshMember&)>& work) {
  return job.run([&](ProcessGroup& group) {
    const auto device = open_device({kCuda, group.rank()}, {});
    const std::unique_ptr<Communicator> world = group.connect(*device);
    MeshMember member(group, *world, device->create_stream("compute"),
                      device->create_stream("communication"), setting);
    work(member);
  });
}

Numbers numbers_of(const std::vector<Real>& values) { return {values.begin(), values.end()}; }

/// In the model a call of NCCL keeps its host until all ranks have called, and its stream until all
/// have come; a GPU has room for one such call of all groups.
void check_mesh(const MeshSetting& setting) {
  INFO(setting.mesh);
  const int64_t ranks = MeshShape::from(setting.mesh).ranks();
  const bool pipeline = setting.mesh.find("pipeline") != std::string::npos;
  const ScopedEnvironment room("CUDA_MODEL_NCCL_ROOM", pipeline ? "3" : "1");  // its streams
  const std::vector<Samples> batches{Samples(9, 1), Samples(6, 2)};
  const MeshResult alone = testing::mesh::train_in_one_process(batches, setting.model);
  std::vector<MeshResult> found(static_cast<size_t>(ranks));
  const Job job(int(ranks), "nccl");
  CHECK(on_mesh(job, setting, [&](MeshMember& member) {
          for (const Samples& batch : batches) member.step(batch);
          found[static_cast<size_t>(member.mesh.group().rank())] = member.trained();
        }) == std::vector<std::string>(static_cast<size_t>(ranks)));
  for (const MeshResult& rank : found) {
    CHECK(testing::relative_l2(numbers_of(rank.weights), numbers_of(alone.weights)) <= 1e-4);
    CHECK(rank.loss == Approx(alone.loss).epsilon(1e-4));
  }
}

TEST_CASE("Meshes of GPUs with NCCL lead to one process's weights", "[cuda][stage][mesh]") {
  const ScopedEnvironment gpus("CUDA_MODEL_DEVICES", "8");
  LOCKSTEP_NEEDS_NCCL(4);
  check_mesh({"data=2,shard=2", testing::mesh::kSeedBn});
  check_mesh({"data=2,tensor=2"});
  if (!testing::full_campaign()) return;
  check_mesh({"pipeline=2,data=2", testing::mesh::kSeed, {.micro_batches = 2}});
  check_mesh({"shard=2,tensor=2", testing::mesh::kSeedBn});
  check_mesh({"tensor=2,pipeline=2", testing::mesh::kSeed, {ScheduleKind::gpipe, 3}});
  if (testing::without_nccl(8).empty()) check_mesh({"data=2,shard=2,tensor=2"});
}

/// The errors of four ranks, copies of two shards each, whose GPUs have room for one of NCCL's
/// kernels. A step ends with gathers of shards; then `next` makes calls of another group. Ranks 0
/// and 3 come late to the gathers, ranks 1 and 2 to what their passes do next.
std::vector<std::string> beside_late_gathers(const ModelOptions& model,
                                             const std::function<void(MeshMember&)>& next) {
  const ScopedEnvironment room("CUDA_MODEL_NCCL_ROOM", "1");
  testing::Gate gate;
  const auto pass = [&] { gate.pass(); };
  const MeshSetting setting{
      .mesh = "data=2,shard=2", .model = model, .sharding = {.kind = ShardKind::gradients}};
  return on_mesh(Job(4, "nccl", 4), setting, [&](MeshMember& member) {
    const int rank = member.mesh.group().rank();
    member.feed(Samples(8, 1));
    member.forward_and_backward();
    member.optimizer.step(member.context.state(), member.network.loss());
    if (rank == 0 || rank == 3) member.communication.backend().host_task("gate", pass);
    member.network.gather_parameters();
    if (rank == 1 || rank == 2) member.stream.backend().host_task("gate", pass);
    next(member);
    member.mesh.group().barrier();
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      gate.open();
    }
    member.stream.synchronize();
  });
}

TEST_CASE("Calls of a mesh's groups do not wait in a circle where the passes make some",
          "[cuda][stage][mesh]") {
  const ScopedEnvironment gpus("CUDA_MODEL_DEVICES", "4");
  LOCKSTEP_NEEDS_NCCL(4);
  LOCKSTEP_NEEDS_THE_MODEL();
  const std::vector<std::string> none(4);
  // Running statistics are broadcast before the next step.
  CHECK(beside_late_gathers(testing::mesh::kSeedBn,
                            [](MeshMember& member) { member.forward_and_backward(); }) == none);
  // An evaluation begins and ends with sums over all.
  CHECK(beside_late_gathers(testing::mesh::kSeed, [](MeshMember& member) {
          member.network.broadcast_buffers();
          member.samples.all_reduce(member.stream, member.network.loss());
        }) == none);
}

TEST_CASE("A pipeline's last gradient is sent before its ranks wait for each other",
          "[cuda][stage][mesh]") {
  LOCKSTEP_NEEDS_NCCL(2);
  LOCKSTEP_NEEDS_THE_MODEL();
  // What the next step receives has a place on the GPU already: one is left.
  const ScopedEnvironment room("CUDA_MODEL_NCCL_ROOM", "2");
  const MeshSetting setting{.mesh = "pipeline=2", .plan = {.micro_batches = 2}};
  CHECK(on_mesh(Job(2, "nccl", 4), setting, [](MeshMember& member) {
          const auto sleep = [] { std::this_thread::sleep_for(std::chrono::milliseconds(300)); };
          member.step(Samples(8, 1));  // the links are connected
          member.feed(Samples(8, 1));
          for (const auto& stream : member.stream.device().streams()) {
            if (stream->name() == "gradients") stream->host_task("sleep", sleep);
          }
          for (int step = 0; step < 2; ++step) member.forward_and_backward();
          member.stream.synchronize();
        }) == std::vector<std::string>(2));
}

TEST_CASE("A pipeline of GPUs that NCCL does not connect is refused in one line",
          "[cuda][stage][mesh]") {
  LOCKSTEP_NEEDS_NCCL(1);
  const testing::ProcessResult run = testing::run_process(
      {testing::stage_binary("07-mesh"), "--devices", "cuda:0,cuda:0", "--mesh", "pipeline=2",
       "--data", "synthetic:48:16", "--batch-size", "16"},
      60);
  INFO(testing::story(run));
  CHECK(run.status == 1);
  CHECK_FALSE(run.timed_out);
  CHECK_THAT(run.err,
             ContainsSubstring("--mesh pipeline=2: stages on GPUs send and receive by NCCL, "
                               "which serves each GPU once; found shm (one host) between"));
  CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
}

TEST_CASE("A rank of a mesh that dies", "[.mesh-rank-dies]") {
  report_uncaught_errors();
  Job job(4, "nccl", 4);
  const std::string flight_file = std::getenv("FLIGHT_FILE");  // other threads may set variables
  job.options_of_rank = [&](int, ProcessGroupOptions& options) {
    options.flight_file = flight_file;
  };
  on_mesh(job, {"data=2,tensor=2"}, [](MeshMember& member) {
    member.step(Samples(8, 1));
    member.stream.synchronize();
    if (member.mesh.group().rank() == 3) wait_for_the_end();
    member.step(Samples(8, 2));
    member.stream.synchronize();
  });
}

TEST_CASE("A rank that dies in a mesh of NCCL's ends the others, and is named by its coordinates",
          "[cuda][stage][mesh][row125]") {
  const ScopedEnvironment gpus("CUDA_MODEL_DEVICES", "4");
  LOCKSTEP_NEEDS_NCCL(4);
  const testing::TempDir folder;
  const testing::ProcessResult ended =
      run_hidden("[.mesh-rank-dies]", {{"FLIGHT_FILE", folder / "flight"}});
  check_lost(ended, "of ranks ");
  CHECK_THAT(ended.err, ContainsSubstring("did not come") || ContainsSubstring("no answer from"));
  // What the launcher says, which knows how each rank ended.
  std::vector<FlightRank> ranks = read_flight_files(folder / "flight");
  REQUIRE(ranks.size() == 4);
  ranks[3].end = "died";
  ranks[3].failed = true;
  CHECK_THAT(fmt::format("{}", fmt::join(flight_table(ranks, 0), "\n")),
             ContainsSubstring("rank 3 (data 1, tensor 1) died"));
}

}  // namespace
}  // namespace lockstep
