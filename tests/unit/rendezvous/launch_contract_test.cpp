// What launchers set, in their own variables, and everything that can be wrong with it.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "common/rendezvous/launch_contract.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using Variables = std::map<std::string, std::string>;

const Variables kTorchrun{{"RANK", "3"},
                          {"WORLD_SIZE", "4"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "node0"},
                          {"MASTER_PORT", "29500"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kHydra{
    {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm{{"SLURM_PROCID", "3"},
                       {"SLURM_STEP_NUM_TASKS", "4"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "1"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}};
const Variables kMaster{{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}};

/// `variables`, with these set on top of them.
Variables operator+(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}
Variables operator-(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

/// `variables` must outlive it.
LaunchInput input_of(const Variables& variables) {
  return {.variable = [&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  }};
}

std::optional<LaunchContract> read(const Variables& variables) {
  return read_launch_contract(input_of(variables));
}

/// The one-line error about these variables, with `change` made to the input.
std::string refusal(const Variables& variables, void (*change)(LaunchInput&) = nullptr) {
  LaunchInput input = input_of(variables);
  if (change != nullptr) change(input);
  const std::string text = message_of<BadInput>([&] { read_launch_contract(input); });
  CHECK(text.find('\n') == text.npos);
  return text;
}

void check_told(const std::optional<LaunchContract>& told, const std::string& launcher) {
  REQUIRE(told.has_value());
  CHECK(told->launcher == launcher);
  CHECK(told->rank == 3);
  CHECK(told->world_size == 4);
  CHECK(told->local_rank == 1);
  CHECK(told->local_world_size == 2);
  CHECK(told->master == Address{"node0", 29500});
}

TEST_CASE("Where torchrun listens on the port itself, the store is at the next one", "[launch]") {
  for (const auto& [port, expected] : {std::pair("29500", 29501), {"65535", 65534}}) {
    const auto contract = read({{"RANK", "0"},
                                {"WORLD_SIZE", "2"},
                                {"MASTER_ADDR", "localhost"},
                                {"MASTER_PORT", port},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
    REQUIRE(contract.has_value());
    CHECK(contract->master.port == expected);
  }
}

TEST_CASE("The variables of torchrun, OpenMPI, MPICH and Slurm say the same", "[launch]") {
  check_told(read(kTorchrun), "torchrun");
  check_told(read(kOpenMpi + kMaster), "OpenMPI");
  // A shell has exported one of torchrun's names, and mpirun passes it on.
  check_told(read(kOpenMpi + kMaster + Variables{{"WORLD_SIZE", "2"}}), "OpenMPI");
  check_told(read(kHydra + kMaster), "MPICH");
  check_told(read(kHydra + kMaster + Variables{{"WORLD_SIZE", "2"}}), "MPICH");
  check_told(read(kSlurm + kMaster), "Slurm");
  // Nearer to the program: torchrun under mpirun under srun.
  check_told(read(kSlurm + kOpenMpi + kTorchrun), "torchrun");
  check_told(read(kSlurm + kHydra + kTorchrun), "torchrun");
  // mpiexec has srun start one helper per host, whose numbers its ranks inherit.
  check_told(read(kSlurm + kHydra + kMaster + Variables{{"SLURM_PROCID", "0"}}), "MPICH");
  // srun --mpi=pmi2 gives the rank twice, the place on the host only in its own words.
  const Variables twice{{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}};
  check_told(read(kSlurm + twice + kMaster), "Slurm");
}

TEST_CASE("Without any variable it is a bare start", "[launch]") {
  CHECK_FALSE(read({}).has_value());
  CHECK_FALSE(read({{"RANK", ""}, {"WORLD_SIZE", ""}, {"MASTER_ADDR", ""}}).has_value());
  CHECK_FALSE(read({{"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "7"}}).has_value());  // salloc's shell
  // A batch script is a task, but none of srun's.
  CHECK_FALSE(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}).has_value());
}

TEST_CASE("One process, started by MPI's launcher or Slurm without an address, is a bare start",
          "[launch]") {
  const Variables one_of[] = {
      {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}},
      {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}},
      {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_NTASKS", "4"}}};
  for (const Variables& one : one_of) {
    CHECK_FALSE(read(one).has_value());
    CHECK(read(one + kMaster).has_value());
  }
  // torchrun always gives the address.
  CHECK_THAT(refusal({{"RANK", "0"}, {"WORLD_SIZE", "1"}}), ContainsSubstring("MASTER_ADDR"));
}

TEST_CASE("The sign of a launcher that is not known is refused, unless ours is there too",
          "[launch]") {
  for (const std::string name :
       {"PMIX_RANK", "PMI_ID", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "ALPS_APP_PE",
        "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "MP_CHILD"}) {
    const Variables sign{{name, "1"}};
    CHECK_THAT(refusal(sign), ContainsSubstring(name + "=1: ") &&
                                  ContainsSubstring("started this process as one of several") &&
                                  ContainsSubstring("unset " + name));
    CHECK_FALSE(read({{name, ""}}).has_value());
    for (const Variables& known : {kTorchrun, kOpenMpi + kMaster, kSlurm + kMaster}) {
      CHECK(read(sign + known)->rank == 3);
    }
  }
}

TEST_CASE("Slurm names the hosts: rank 0's, and a port that follows from the job", "[launch]") {
  const Variables step =
      kSlurm + Variables{{"SLURM_STEP_NODELIST", "node[07-08,12]"}, {"SLURM_JOB_ID", "123456"}};
  CHECK(read(step)->master == Address{"node07", 23456});
  CHECK(read(step + Variables{{"MASTER_PORT", "29500"}})->master == Address{"node07", 29500});
  CHECK(read(step + Variables{{"MASTER_ADDR", "[::1]"}})->master == Address{"::1", 23456});
  CHECK(read(step + kMaster)->master == Address{"node0", 29500});
  CHECK_THAT(refusal(step - "SLURM_STEP_NODELIST"),
             ContainsSubstring("without SLURM_STEP_NODELIST; start it with: MASTER_ADDR=HOST "
                               "MASTER_PORT=29500 srun --ntasks=4 "));
  CHECK_THAT(refusal(step - "SLURM_JOB_ID"), ContainsSubstring("without SLURM_JOB_ID"));
  const std::pair<const char*, const char*> lists[] = {{"n1", "n1"},
                                                       {"n1,n2", "n1"},
                                                       {"n[1-3]", "n1"},
                                                       {"n[001,7-9]", "n001"},
                                                       {"r[2]-a,b", "r2-a"},
                                                       {"r[1-2]n[3-4]", "r1n3"},
                                                       {"n[", "n"},
                                                       {"a-b,c-[1-2]", "a-b"},
                                                       {"", ""}};
  for (const auto& [list, first] : lists) CHECK(first_host(list) == first);
}

TEST_CASE("Steps of a Slurm job, and jobs with the next numbers, have ports of their own",
          "[launch]") {
  std::set<int> ports;
  for (int job = 123456; job < 123476; ++job) {
    for (int step = 0; step < 20; ++step) {
      const Variables variables = kSlurm + Variables{{"SLURM_STEP_NODELIST", "n1"},
                                                     {"SLURM_JOB_ID", std::to_string(job)},
                                                     {"SLURM_STEP_ID", std::to_string(step)}};
      ports.insert(read(variables)->master.port);
    }
  }
  CHECK(ports.size() == 400);
  CHECK(*ports.begin() >= 20'000);
  CHECK(*ports.rbegin() < 30'000);
  const Variables step = kSlurm + Variables{{"SLURM_STEP_NODELIST", "n1"}, {"SLURM_JOB_ID", "7"}};
  CHECK(read(step + Variables{{"SLURM_STEP_ID", "0"}})->master.port == 20'007);
  CHECK(read(step + Variables{{"SLURM_STEP_ID", "4294967290"}})->master.port >= 20'000);  // salloc
  CHECK_THAT(refusal(step + Variables{{"SLURM_STEP_ID", "x"}}), ContainsSubstring("SLURM_STEP_ID"));
}

TEST_CASE("How many ranks a host has is what Slurm's step has there, not what was asked for",
          "[launch]") {
  const Variables asked{{"SLURM_NTASKS_PER_NODE", "1"}};
  CHECK(read(kSlurm + kMaster + asked)->local_world_size == 2);
  const auto on_node = [&](const char* counts, const char* node) {
    return read(kSlurm + kMaster +
                Variables{{"SLURM_STEP_TASKS_PER_NODE", counts}, {"SLURM_NODEID", node}})
        ->local_world_size;
  };
  CHECK(on_node("4", "0") == 4);
  CHECK(on_node("2(x3),3", "2") == 2);
  CHECK(on_node("2(x3),3", "3") == 3);
  CHECK(on_node("3,2(x1),4", "1") == 2);
  CHECK(on_node("3,2(x1),4", "2") == 4);
  const std::string name = "SLURM_STEP_TASKS_PER_NODE";
  for (const std::string wrong : {"x", "2x", "2(x", "2(x)", "2(3)", ",2", "-1", "2(x9999999999)",
                                  "0", "5(x2)", "2(x1)", ")", "()"}) {
    CHECK_THAT(refusal(kSlurm + kMaster + Variables{{name, wrong}}), ContainsSubstring(name + "="));
  }
  CHECK_THAT(refusal(kSlurm + kMaster + Variables{{"SLURM_LOCALID", "2"}}),
             ContainsSubstring("from 0 to 1: there are 2 ranks on this host"));
}

TEST_CASE("What Kubernetes puts into MASTER_PORT is named, to those who need the port",
          "[launch]") {
  const Variables service{{"MASTER_PORT", "tcp://10.0.0.1:80"}};
  CHECK(sign_of_several([](const char* name) {
          return std::string(name) == "MASTER_PORT" ? "tcp://10.0.0.1:80" : nullptr;
        }) == "");
  for (const Variables& all : {service, kTorchrun + service}) {
    CHECK_THAT(refusal(all), ContainsSubstring("MASTER_PORT=tcp://10.0.0.1:80: found an address, "
                                               "expected a port number; Kubernetes sets it"));
  }
}

TEST_CASE("A variable that is missing, or empty, while others are set is named",
          "[launch][row58]") {
  for (const std::string name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    const std::string expected = "environment variable " + name + " expected, but not set";
    CHECK_THAT(refusal(kTorchrun - name), ContainsSubstring(expected));
    CHECK_THAT(refusal(kTorchrun + Variables{{name, ""}}), ContainsSubstring(expected));
  }
  CHECK_THAT(refusal({{"LOCAL_RANK", "0"}}), ContainsSubstring("variable RANK expected"));
  CHECK_THAT(refusal(kMaster), ContainsSubstring("variable RANK expected"));
  CHECK_THAT(refusal({{"OMPI_COMM_WORLD_SIZE", "2"}}),
             ContainsSubstring("OMPI_COMM_WORLD_RANK expected"));
  CHECK_THAT(refusal({{"PMI_SIZE", "2"}}), ContainsSubstring("PMI_RANK expected"));
  CHECK_THAT(refusal({{"PMI_RANK", "1"}}), ContainsSubstring("PMI_SIZE expected"));
}

TEST_CASE("A launcher that leaves the address out gets the command that gives it",
          "[launch][row58]") {
  const auto named = [](LaunchInput& input) { input.program = "build/04-ddp/04-ddp --epochs 2"; };
  CHECK_THAT(refusal(kOpenMpi, named),
             ContainsSubstring("OpenMPI started this rank 3 of 4 without MASTER_ADDR") &&
                 ContainsSubstring("mpirun -n 4 -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 "
                                   "build/04-ddp/04-ddp --epochs 2"));
  CHECK_THAT(refusal(kOpenMpi + Variables{{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}),
             ContainsSubstring("-x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 "));
  CHECK_THAT(refusal(kOpenMpi + Variables{{"MASTER_ADDR", "node7"}}),
             ContainsSubstring("without MASTER_PORT") &&
                 ContainsSubstring("-x MASTER_ADDR=node7 -x MASTER_PORT=29500 "));
  CHECK_THAT(
      refusal(kHydra, named),
      ContainsSubstring("MPICH started this rank 3 of 4 without MASTER_ADDR") &&
          ContainsSubstring("mpiexec.hydra -n 4 -genv MASTER_ADDR $(hostname) -genv MASTER_PORT "
                            "29500 build/04-ddp/04-ddp --epochs 2"));
}

TEST_CASE("A number that cannot be right is refused with variable, value and range",
          "[launch][row59]") {
  const struct {
    const char *name, *value, *expected;
  } cases[] = {
      {"WORLD_SIZE", "abc", "from 1 to "},
      {"WORLD_SIZE", "0", "from 1 to "},
      {"WORLD_SIZE", "-2", "from 1 to "},
      {"WORLD_SIZE", "2000000000", "from 1 to 100000"},
      {"WORLD_SIZE", "99999999999", "from 1 to "},
      {"RANK", "-1", "from 0 to 3, since WORLD_SIZE is 4"},
      {"RANK", "4", "from 0 to 3, since WORLD_SIZE is 4"},
      {"RANK", "1x", "from 0 to 3"},
      {"RANK", " 1", "from 0 to 3"},
      {"RANK", "+1", "from 0 to 3"},
      {"LOCAL_RANK", "2", "from 0 to 1"},
      {"LOCAL_WORLD_SIZE", "5", "from 1 to 4, since WORLD_SIZE is 4"},
      {"MASTER_PORT", "70000", "from 0 to 65535"},
      {"MASTER_PORT", "65536", "from 0 to 65535"},
      {"MASTER_PORT", "-1", "from 0 to 65535"},
      {"MASTER_PORT", "http", "from 0 to 65535"},
      {"MASTER_PORT", "0", "1 to 65535"},
  };
  for (const auto& [name, value, expected] : cases) {
    const std::string text = refusal(kTorchrun + Variables{{name, value}});
    CHECK_THAT(text, ContainsSubstring(std::string(name) + "=" + value + ":") &&
                         ContainsSubstring(expected));
  }
}

TEST_CASE("The numbers at the limits are taken", "[launch][row59]") {
  CHECK(read(kTorchrun + Variables{{"MASTER_PORT", "65535"}})->master.port == 65535);
  CHECK(read(kTorchrun + Variables{{"MASTER_PORT", "1"}})->master.port == 1);
  CHECK(read(kTorchrun + Variables{{"RANK", "0"}})->rank == 0);
  const Variables alone{{"RANK", "0"},
                        {"WORLD_SIZE", "1"},
                        {"LOCAL_RANK", "0"},
                        {"LOCAL_WORLD_SIZE", "1"},
                        {"MASTER_PORT", "0"}};
  CHECK(read(kMaster + alone)->master.port == 0);
  CHECK(read(kMaster + alone + Variables{{"MASTER_ADDR", "[::1]"}})->master.host == "::1");
}

TEST_CASE("An old launcher's --local_rank counts, unless LOCAL_RANK says otherwise",
          "[launch][row65]") {
  const Variables without = kTorchrun - "LOCAL_RANK";
  LaunchInput input = input_of(without);
  input.local_rank = 0;
  CHECK(read_launch_contract(input)->local_rank == 0);
  input = input_of(kTorchrun);
  input.local_rank = 1;
  CHECK(read_launch_contract(input)->local_rank == 1);

  const auto zero = [](LaunchInput& given) { given.local_rank = 0; };
  const auto two = [](LaunchInput& given) { given.local_rank = 2; };
  CHECK_THAT(refusal(kTorchrun, zero), ContainsSubstring("LOCAL_RANK=1 and --local-rank=0"));
  CHECK_THAT(refusal(kOpenMpi + kMaster, zero),
             ContainsSubstring("OMPI_COMM_WORLD_LOCAL_RANK=1 and --local-rank=0"));
  CHECK_THAT(refusal(without, two), ContainsSubstring("--local-rank=2: expected"));
  CHECK_THAT(refusal({}, zero), ContainsSubstring("variable RANK expected"));
}

TEST_CASE("Where nobody tells the place on a host, it follows from the names of all ranks' hosts",
          "[launch]") {
  const std::vector<std::string> same_name(4, "localhost"), two{"a", "a", "b", "b"},
      in_turn{"a", "b", "b", "b"}, four{"a", "b", "c", "d"};
  const auto place = [](const Variables& variables, const std::vector<std::string>& hosts) {
    LaunchContract told = read(variables).value();
    told.find_place(hosts);
    return std::pair(told.local_rank.value(), told.local_world_size.value());
  };
  const Variables plain = kTorchrun - "LOCAL_RANK";  // rank 3, two on each host
  CHECK(place(plain, two) == std::pair(1, 2));
  CHECK(place(plain, same_name) == std::pair(1, 2));
  CHECK(place(kTorchrun, four) == std::pair(1, 2));  // as it was told
  // No count: the ranks beside this one are those on hosts of its name, never all there are.
  for (const auto& [variables, count] :
       {std::pair(plain, "LOCAL_WORLD_SIZE"),
        {kOpenMpi + kMaster - "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
        {kSlurm + kMaster - "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
        {kSlurm + kMaster - "SLURM_LOCALID", "SLURM_NODEID"}}) {
    CHECK_FALSE(read(variables - count)->local_world_size.has_value());
    CHECK(place(variables - count, two) == std::pair(1, 2));
    CHECK(place(variables - count, in_turn) == std::pair(2, 3));
    CHECK(place(variables - count, four) == std::pair(0, 1));
    CHECK(place(variables - count, same_name) == std::pair(3, 4));
  }
  // A container has a name of its own, but its rank is the second of the machine.
  CHECK(place(kTorchrun - "LOCAL_WORLD_SIZE", four) == std::pair(1, 2));
}

TEST_CASE("tcp:// gives the address; rank and world size come from options or the launcher",
          "[launch]") {
  const Variables none;
  LaunchInput input = input_of(none);
  input.init_method = "tcp://node1:4000";
  input.rank = 1;
  input.world_size = 2;
  auto told = read_launch_contract(input);
  REQUIRE(told.has_value());
  CHECK(told->master == Address{"node1", 4000});
  CHECK(told->rank == 1);
  CHECK(told->world_size == 2);

  input = input_of(kOpenMpi);
  input.init_method = "tcp://[fe80::7]:4000";
  told = read_launch_contract(input);
  CHECK(told->master == Address{"fe80::7", 4000});
  CHECK(told->rank == 3);

  CHECK_THAT(refusal(none, [](LaunchInput& in) { in.init_method = "tcp://node1:4000"; }),
             ContainsSubstring("neither --rank is given nor RANK set"));
  CHECK_THAT(refusal(none,
                     [](LaunchInput& in) {
                       in.init_method = "tcp://node1:4000";
                       in.rank = 0;
                     }),
             ContainsSubstring("neither --world-size is given nor WORLD_SIZE set"));
  CHECK_THAT(refusal(kTorchrun, [](LaunchInput& in) { in.rank = 2; }),
             ContainsSubstring("RANK=3 and --rank=2 contradict"));
}

TEST_CASE("Another scheme, or an address that is none, is refused", "[launch][row59]") {
  CHECK_THAT(refusal({}, [](LaunchInput& in) { in.init_method = "foo://x"; }),
             ContainsSubstring("No rendezvous handler for foo://"));
  CHECK_THAT(refusal(kTorchrun, [](LaunchInput& in) { in.init_method = "file:///tmp/x"; }),
             ContainsSubstring("No rendezvous handler for file://"));
  const std::vector<std::string> none{
      "tcp://",           "tcp://node1",       "tcp://:80",   "tcp://::1:80", "tcp://node1:",
      "tcp://node1:http", "tcp://node1:65536", "tcp://[]:80", "tcp://node1:0"};
  for (const std::string& method : none) {
    LaunchInput input = input_of(kTorchrun);
    input.init_method = method;
    CHECK_THAT(message_of<BadInput>([&] { read_launch_contract(input); }),
               ContainsSubstring("--init-method") && ContainsSubstring("expected"));
  }
}

TEST_CASE("A launcher's run id tells jobs apart", "[launch]") {
  CHECK(read(kTorchrun)->run_id.empty());
  CHECK(read(kTorchrun + Variables{{"TORCHELASTIC_RUN_ID", "job7"}})->run_id == "job7");
  CHECK(read(kTorchrun + Variables{{"TORCHELASTIC_RUN_ID", "none"}})->run_id.empty());
}

}  // namespace
}  // namespace lockstep
