#include "common/group/process_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <utility>

#include "common/comm/nccl/nccl.h"
#include "common/core/error.h"
#include "common/group/backend_choice.h"
#include "common/rendezvous/rank_names.h"
#include "common/rendezvous/rank_texts.h"
#include "common/system/launcher_line.h"
#include "common/transports/gloo_transport.h"
#include "common/transports/tcp_transport.h"
#include "common/transports/watched_transport.h"

namespace lockstep {
namespace {

constexpr double kGoodbyeSeconds = 5;  // so long rank 0 waits for the others at the end
constexpr double kAnswerSeconds = 10;
constexpr const char* kDebug = "LOCKSTEP_DEBUG";

bool debug_from_environment() {
  const char* value = std::getenv(kDebug);
  if (value == nullptr || *value == '\0') return false;
  require(value == std::string("collectives"), "{}={}: expected collectives, or nothing", kDebug,
          value);
  return true;
}

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string shown(const std::string& backend) {
  return backend.empty() ? "not given" : fmt::format("'{}'", backend);
}

LaunchContract checked(const LaunchContract& contract, const ProcessGroupOptions& options) {
  check_backend_name(options.backend);
  require(options.timeout_seconds > 0, "--timeout {:g}: expected seconds, more than 0",
          options.timeout_seconds);
  return contract;
}

StoreOptions options_of_store(const LaunchContract& contract, double timeout_seconds) {
  StoreOptions options = store_options(contract);
  options.connect_seconds = timeout_seconds;
  options.answer_seconds = std::min(timeout_seconds, kAnswerSeconds);
  return options;
}

}  // namespace

ProcessGroup::ProcessGroup(const LaunchContract& contract, const ProcessGroupOptions& options)
    : contract_(checked(contract, options)),
      timeout_(options.timeout_seconds),
      backend_(options.backend),
      debug_(debug_from_environment()),
      exceptions_(std::uncaught_exceptions()) {
  const Deadline deadline(timeout_);  // for both: finding rank 0, and the others
  store_ = std::make_shared<TcpStore>(options_of_store(contract, timeout_));
  store_->wait_for_all(deadline.seconds_left());
  require_agreement();
}

ProcessGroup::~ProcessGroup() {
  if (std::uncaught_exceptions() > exceptions_) return;
  communicator_.reset();
  let_host_go_last(*store_, "goodbye", kGoodbyeSeconds);
}

void ProcessGroup::require_agreement() {
  const std::vector<std::string> backends = collect("backend", backend_);
  const std::vector<std::string> debug = collect("debug", debug_ ? "'collectives'" : "not set");
  together([&] {
    for (size_t other = 1; other < backends.size(); ++other) {
      require(backends[other] == backends[0],
              "--backend is {} on rank 0 but {} on rank {}; give all ranks the same",
              shown(backends[0]), shown(backends[other]), other);
      require(debug[other] == debug[0],
              "{} is {} on rank 0 but {} on rank {}; set it on all ranks or on none", kDebug,
              debug[0], debug[other], other);
    }
  });
}

// --- Texts ---------------------------------------------------------------------------------------

std::vector<std::string> ProcessGroup::collect(const std::string& name, const std::string& mine) {
  std::vector<std::string> texts;
  within(fmt::format("rank {}", rank()),
         [&] { texts = exchange_texts(*store_, name, mine, timeout_); });
  return texts;
}

std::vector<std::string> ProcessGroup::exchange(const std::string& mine) {
  return collect_and_part(fmt::format("exchange {}", ++exchanges_), mine);
}

std::vector<std::string> ProcessGroup::collect_and_part(const std::string& name,
                                                        const std::string& mine) {
  std::vector<std::string> texts = collect(name, mine);
  // What rank 0 makes of them may end it, and the store with it.
  const std::vector<int> silent = let_host_go_last(*store_, name + " is read", timeout_);
  if (silent.empty()) return texts;
  fail<PeerLost>("rank 0: {}: {} did not go on within {:g} s", name, name_ranks(silent), timeout_);
}

namespace {

/// How `work` went: "0", or the exit status and the text of its error, which comes out in `error`.
std::string outcome_of(const std::function<void()>& work, std::exception_ptr& error) {
  try {
    work();
    return "0";
  } catch (const Error& e) {
    error = std::current_exception();
    return fmt::format("{} {}", e.exit_status(), e.what());
  } catch (const std::exception& e) {
    error = std::current_exception();
    return fmt::format("1 {}", e.what());
  }
}

}  // namespace

void ProcessGroup::together(const std::function<void()>& work) {
  std::exception_ptr error;
  const std::vector<std::string> outcomes =
      collect_and_part(fmt::format("agreement {}", ++agreements_), outcome_of(work, error));
  const auto failed = std::ranges::find_if(outcomes, [](const auto& text) { return text != "0"; });
  if (failed == outcomes.end()) return;
  const int speaker = static_cast<int>(failed - outcomes.begin());
  const size_t space = failed->find(' ');
  const std::string text = failed->substr(space + 1), who = fmt::format("rank {}", speaker);
  const bool named =
      speaker == 0 || text.starts_with(who);  // where all fail, rank 0 speaks for them
  if (speaker != rank()) {
    wait_until_gone(*store_, speaker, kGoodbyeSeconds);
    throw SaidByAnother(named ? text : who + ": " + text, std::stoi(failed->substr(0, space)));
  }
  say_through_launcher("");  // all is said
  if (named) std::rethrow_exception(error);
  within(who, [&] { std::rethrow_exception(error); });
}

void ProcessGroup::barrier() { collect(fmt::format("barrier {}", ++barriers_), ""); }

// --- Devices -------------------------------------------------------------------------------------

DeviceId ProcessGroup::device_of(const std::vector<DeviceId>& ids) const {
  const auto number = static_cast<size_t>(local_rank());
  require(number < ids.size(),
          "rank {} has local rank {} on its host, but --devices names {} device{}; name one for "
          "each rank of the host, or start fewer ranks there",
          rank(), number, ids.size(), ids.size() == 1 ? "" : "s");
  return ids[number];
}

Communicator& ProcessGroup::connect(Device& device) {
  require(!communicator_, "rank {}: connect() called twice: the group is connected, by {}", rank(),
          backend_);
  backend_ = agreed_backend(device);
  communicator_ = backend_ == "nccl" ? connect_nccl(device) : connect_host();
  return *communicator_;
}

std::string ProcessGroup::agreed_backend(const Device& device) {
  const RankOffer mine{.host = host_name(),
                       .hardware = device.hardware(),
                       .device = device.name(),
                       .gpu = device.id().kind == DeviceId::Kind::cuda,
                       .no_gloo = gloo_availability(),
                       .no_nccl = nccl_availability()};
  std::vector<RankOffer> offers;
  for (const std::string& text : collect("devices", mine.text())) {
    offers.push_back(RankOffer::from(text));
  }
  return lockstep::together(*this, [&] { return choose_backend(backend_, offers); });
}

std::unique_ptr<Communicator> ProcessGroup::connect_nccl(Device& device) {
  const std::string mine = rank() == 0 ? nccl_unique_id() : "";
  const std::string id = collect("NCCL's id", mine)[0];
  return make_nccl_rank(device, rank(), world_size(), id, timeout_);
}

std::unique_ptr<Communicator> ProcessGroup::connect_host() {
  std::shared_ptr<HostTransport> transport;
  if (backend_ == "tcp") {
    transport = connect_tcp(*store_, timeout_);
  } else {
    const auto hosts = collect("address of rank 0's host", store_->host_address().host);
    const RendezvousStore keys{
        [&](const std::string& key, const std::string& value) { store_->set(key, value); },
        [&, deadline = Deadline(timeout_)](const std::string& key) {
          return store_->get(key, deadline.seconds_left());
        }};
    transport = connect_gloo(rank(), world_size(), keys,
                             reachable_host(store_->local_address().host, hosts), timeout_);
  }
  return std::make_unique<HostCommunicator>(
      rank(), world_size(),
      std::make_shared<WatchedTransport>(transport, store_, timeout_, debug_));
}

// --- The group of this process -------------------------------------------------------------------

namespace {
ProcessGroup* the_group = nullptr;
}

ProcessGroup& init_process_group(const ProcessGroupOptions& options) {
  require(!is_initialized(),
          "the process group is initialised twice: this process is rank {} of {} already; call "
          "destroy_process_group() before",
          is_initialized() ? get_rank() : 0, is_initialized() ? get_world_size() : 0);
  const auto contract =
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
  the_group = new ProcessGroup(*contract, options);
  return *the_group;
}

bool is_initialized() { return the_group != nullptr; }

ProcessGroup& process_group() {
  require(is_initialized(), "there is no process group yet; call init_process_group() before");
  return *the_group;
}

int get_rank() { return process_group().rank(); }
int get_world_size() { return process_group().world_size(); }

void destroy_process_group() { delete std::exchange(the_group, nullptr); }

}  // namespace lockstep
