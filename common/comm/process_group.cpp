#include "common/comm/process_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <utility>

#include "common/comm/backend_choice.h"
#include "common/comm/host_communicator.h"
#include "common/comm/nccl_communicator.h"
#include "common/comm/sim_communicator.h"
#include "common/core/error.h"
#include "common/core/text.h"
#include "common/system/rank.h"

namespace lockstep {
namespace {

constexpr double kGoodbyeSeconds = 5;  // how long rank 0 waits for the others at the end
constexpr double kAnswerSeconds = 10;
constexpr const char* kDebug = "LOCKSTEP_DEBUG";

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

LaunchContract checked(const LaunchContract& contract, const ProcessGroupOptions& options) {
  check_backend_name(options.backend);
  require(options.timeout_seconds > 0, "--timeout {:g}: expected seconds, more than 0",
          options.timeout_seconds);
  return contract;
}

StoreOptions options_of_store(const LaunchContract& contract, double timeout_seconds,
                              const PlaceOf& place_of) {
  StoreOptions options = store_options(contract);
  options.place_of = place_of;
  options.connect_seconds = timeout_seconds;
  options.answer_seconds = std::min(timeout_seconds, kAnswerSeconds);
  return options;
}

/// exchange(), whose errors say on which rank.
std::vector<std::string> texts_of_all(Store& store, const std::string& name,
                                      const std::string& mine, double timeout_seconds) {
  std::vector<std::string> texts;
  within(store.name_of(store.rank()),
         [&] { texts = exchange(store, name, mine, timeout_seconds); });
  return texts;
}

}  // namespace

bool debug_from_environment() {
  const char* value = std::getenv(kDebug);
  if (value == nullptr || *value == '\0') return false;
  require(value == std::string("collectives"), "{}={}: expected collectives, or nothing", kDebug,
          value);
  return true;
}

ProcessGroup::ProcessGroup(const LaunchContract& contract, const ProcessGroupOptions& options)
    : ProcessGroup(contract, options, nullptr) {}

ProcessGroup::ProcessGroup(const LaunchContract& contract, const ProcessGroupOptions& options,
                           std::atomic<bool>* only)
    : contract_(checked(contract, options)),
      simulated_(options.simulated),
      timeout_(options.timeout_seconds),
      backend_(options.backend),
      debug_(debug_from_environment()),
      exceptions_(std::uncaught_exceptions()),
      only_(only) {
  const std::string& file = options.flight_file;
  // The local rank is its place in our launcher's memory; other launchers may not tell it.
  flight_ = std::make_shared<FlightRecorder>(rank(), world_size(), contract_.local_rank.value_or(0),
                                             file.empty() ? "" : path_of_rank(file, rank()));
  if (options.place_of) set_place(options.place_of(rank()));
  store_ = find_ranks(options);
  const NamedValues mine = {{"--backend", backend_.empty() ? "auto" : backend_},
                            {kDebug, debug_ ? "collectives" : "nothing"}};
  const auto asked = exchange_as("what the group was asked for", as_text(mine));
  fail_alike([&] {
    lockstep::require_same(asked, "start all ranks with the same options and environment");
  });
  contract_.find_place(exchange_as("hosts", host_name()));
  if (only_ != nullptr) *only_ = true;
}

/// Returns when all are there.
std::shared_ptr<Store> ProcessGroup::find_ranks(const ProcessGroupOptions& options) {
  if (options.simulated) return std::make_shared<LikeRanksStore>(*options.simulated, rank());
  const Deadline deadline(timeout_);  // for both: finding rank 0, and the others
  auto store = std::make_shared<TcpStore>(options_of_store(contract_, timeout_, options.place_of));
  store->wait_for_all(deadline.seconds_left());
  return store;
}

ProcessGroup::~ProcessGroup() {
  ended_ = ended_ || std::uncaught_exceptions() > exceptions_;
  end();
}

void ProcessGroup::end() {
  if (!ended_) take_leave(*store_, kGoodbye, "", kGoodbyeSeconds);
  ended_ = true;
  if (std::atomic<bool>* only = std::exchange(only_, nullptr)) *only = false;
}

// --- Texts ---------------------------------------------------------------------------------------

void ProcessGroup::set_place(const std::string& place) {
  place_ = place;
  flight_->name_place(place_);
}

void ProcessGroup::name_places(const PlaceOf& place_of, Communicator& world) {
  set_place(place_of(rank()));
  store_->name_places(place_of);
  world.set_names([store = store_](int rank) { return store->name_of(rank); });
  if (auto* const host = dynamic_cast<HostCommunicator*>(&world)) host->name_peers();
}

std::vector<std::string> ProcessGroup::exchange_as(const std::string& name,
                                                   const std::string& mine) {
  require(!ended_, "{}: {}: the process group has ended; make the call before",
          store_->name_of(rank()), name);
  return texts_of_all(*store_, name, mine, timeout_);
}

std::vector<std::string> ProcessGroup::exchange(const std::string& mine) {
  return exchange_as(fmt::format("exchange {}", ++exchanges_), mine);
}

void ProcessGroup::do_together(const std::function<void()>& work) {
  const auto exchanged = [&](const std::string& mine) {
    return exchange_as(fmt::format("agreement {}", ++agreements_), mine);
  };
  const Outcomes all = outcomes(exchanged, [&] {
    work();
    return "";
  });
  if (all.failed >= 0) fail_once(all.failed, all.error, all.thrown);
}

/// Work that ends alike on all ranks, which need not tell each other then: rank 0 reports an error.
void ProcessGroup::fail_alike(const std::function<void()>& work) try {
  work();
} catch (const Error&) {
  fail_once(0, std::current_exception(), std::current_exception());
}

/// Ends all ranks with the `error` of rank `speaker`; `mine` is what was thrown on this one.
void ProcessGroup::fail_once(int speaker, const std::exception_ptr& error,
                             const std::exception_ptr& mine) try {
  std::rethrow_exception(error);
} catch (const Error& failed) {
  const std::string text = failed.what(), who = store_->name_of(speaker);
  const bool named =  // where all fail, rank 0 speaks
      speaker == 0 || text.starts_with(fmt::format("rank {}", speaker));
  if (speaker != rank()) {
    wait_until_gone(*store_, speaker, kGoodbyeSeconds);
    throw SaidByAnother(named ? text : who + ": " + text, failed.exit_status());
  }
  say_through_launcher("");  // all is said
  if (named) std::rethrow_exception(mine);
  within(who, [&] { std::rethrow_exception(mine); });
}

void ProcessGroup::require_same(const NamedValues& mine, const std::string& advice) {
  const std::vector<std::string> all = exchange(as_text(mine));
  fail_alike([&] { lockstep::require_same(all, advice); });
}

void ProcessGroup::barrier() { exchange_as(fmt::format("barrier {}", ++barriers_), ""); }

// --- Devices -------------------------------------------------------------------------------------

DeviceId ProcessGroup::device_of(const std::vector<DeviceId>& ids) const {
  const auto number = static_cast<size_t>(local_rank());
  require(number < ids.size(),
          "rank {} has local rank {} on its host, but --devices names {} device{}; name one for "
          "each rank of the host, or start fewer ranks there",
          rank(), number, ids.size(), ids.size() == 1 ? "" : "s");
  return ids[number];
}

std::unique_ptr<Communicator> ProcessGroup::connect(Device& device) {
  require(!connected_, "rank {}: connect() called twice: the group is connected, by {}", rank(),
          backend_);
  agree_on_backend(device);
  connected_ = true;
  std::unique_ptr<Communicator> made = communicator(device, store_, all_ranks(*store_));
  made->record_in({.recorder = flight_});
  return made;
}

std::unique_ptr<Communicator> ProcessGroup::new_group(
    Device& device, const std::function<int(int rank)>& color_of) {
  require(connected_, "rank {}: new_group() before connect(), which chooses what connects ranks",
          rank());
  const int color = color_of(rank());
  const std::string name = fmt::format("group {}", ++groups_);
  exchange_as(name, "");  // all have come to it
  std::vector<int> members;
  for (int other = 0; other < world_size(); ++other) {
    if (color_of(other) == color) members.push_back(other);
  }
  const auto store =
      std::make_shared<SubgroupStore>(store_, members, fmt::format("{} of color {}", name, color));
  std::unique_ptr<Communicator> made;
  within(fmt::format("{}: a group of {}", store_->name_of(rank()), name_ranks(members)),
         [&] { made = communicator(device, store, members); });
  made->set_names([store](int member) { return store->name_of(member); }, name_ranks(members));
  made->record_in({flight_, uint64_t(groups_) << 32 | uint64_t(members[0]), members});
  return made;
}

/// A membership of the ranks that share `store`, `members` in the whole group, by the backend that
/// was chosen.
std::unique_ptr<Communicator> ProcessGroup::communicator(Device& device,
                                                         const std::shared_ptr<Store>& store,
                                                         const std::vector<int>& members) {
  const int me = store->rank(), count = store->world_size();
  if (simulated_) {
    return make_sim_communicator(members, simulated_->per_host,
                                 simulated_->are_alike(members) ? nullptr : store, timeout_);
  }
  if (backend_ == "nccl") {
    const std::string mine = me == 0 ? nccl_unique_id() : "";
    const std::string id = texts_of_all(*store, "NCCL's id", mine, timeout_)[0];
    return make_nccl_rank(device, me, count, id, timeout_);
  }
  const std::shared_ptr<HostTransport> transport = connect_host(*store);
  transports_->add(transport);
  return std::make_unique<HostCommunicator>(me, count, transport, RollCall(store, timeout_, debug_),
                                            flight_, transports_);
}

void ProcessGroup::agree_on_backend(const Device& device) {
  if (simulated_) {
    const int hosts = (world_size() + simulated_->per_host - 1) / simulated_->per_host;
    backend_ = "simulated links";
    why_backend_ = fmt::format("{} host{}", hosts, hosts == 1 ? "" : "s");
    return;
  }
  const RankOffer mine{.host = host_name(),
                       .hardware = device.hardware(),
                       .device = device.name(),
                       .gpu = device.id().kind == DeviceId::Kind::cuda,
                       .no_gloo = backend_ == "gloo" ? gloo_availability() : "",
                       .no_nccl = nccl_availability()};
  std::vector<RankOffer> offers;
  for (const std::string& text : exchange_as("devices", mine.text())) {
    offers.push_back(RankOffer::from(text));
  }
  asked_ = !backend_.empty();
  fail_alike([&] {
    const BackendChoice choice = choose_backend(backend_, offers);
    backend_ = choice.name;
    why_backend_ = choice.why;
  });
}

std::string reachable_host(const std::string& own,
                           const std::vector<std::string>& addresses_of_host) {
  if (!is_loopback(own)) return own;
  for (const std::string& address : addresses_of_host) {
    if (!is_loopback(address)) return address;
  }
  return own;
}

std::shared_ptr<HostTransport> ProcessGroup::connect_host(Store& store) {
  if (backend_ == "shm") return connect_one_host(store);
  if (backend_ == "tcp") return connect_tcp(store, timeout_);
  const auto hosts =
      texts_of_all(store, "address of the store's host", store.host_address().host, timeout_);
  const RendezvousStore keys{
      [&](const std::string& key, const std::string& value) { store.set(key, value); },
      [&, deadline = Deadline(timeout_)](const std::string& key) {
        return store.get(key, deadline.seconds_left());
      }};
  return connect_gloo(store.rank(), store.world_size(), keys,
                      reachable_host(store.local_address().host, hosts), timeout_);
}

/// Ranks of one host by its name, which need not be one: if they cannot share memory, and were not
/// told to, all go on by TCP. A further group's ranks share memory where the whole job's do.
std::shared_ptr<HostTransport> ProcessGroup::connect_one_host(Store& store) {
  try {
    return connect_shm(store, timeout_);
  } catch (const NoSharedMemory& error) {
    if (&store != store_.get()) return connect_tcp(store, timeout_);  // descriptors may run out
    fail_alike([&] {
      if (!asked_) return;
      fail<EnvironmentError>("--backend shm: {}; leave it out, or give --backend tcp",
                             error.what());
    });
    backend_ = "tcp";
    why_backend_ = fmt::format("no shared memory: {}", error.what());
    return connect_tcp(store, timeout_);
  }
}

// --- The group of this process -------------------------------------------------------------------

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  static std::atomic<bool> exists = false;
  require(!exists,
          "the process group is initialised twice: this process has one already; end that one "
          "before");
  if (options.simulated) {
    const SimulatedRanks& ranks = *options.simulated;
    LaunchContract contract;
    contract.rank = ranks.first_of(ranks.meeting->take_kind() % ranks.kinds);
    contract.world_size = ranks.world_size;
    contract.local_rank = contract.rank % ranks.per_host;
    contract.local_world_size = ranks.per_host;
    return ProcessGroup(contract, options, ranks.kinds > 1 ? nullptr : &exists);
  }
  auto contract =
      read_launch_contract({.variable = [](const char* name) { return std::getenv(name); },
                            .init_method = options.init_method,
                            .rank = options.rank,
                            .world_size = options.world_size,
                            .local_rank = options.local_rank,
                            .program = options.program});
  require(contract.has_value(),
          "no launcher has started this process, so it has no rank; start it with: ./lockstep "
          "launch --nproc-per-node 2 {} (or by torchrun --no-python, mpirun, srun)",
          options.program);
  contract->key = take_job_key();  // this process's threads come with the group
  return ProcessGroup(*contract, options, &exists);
}

}  // namespace lockstep
