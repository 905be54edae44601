#pragma once
// One process per device: how the processes of a job become ranks that know each other. Mirrors
// torch.distributed.

#include <fmt/core.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/comm/communicator.h"
#include "common/comm/host_transport.h"
#include "common/core/device.h"
#include "common/core/text.h"
#include "common/rendezvous/agreement.h"
#include "common/rendezvous/launch_contract.h"
#include "common/rendezvous/simulated_ranks.h"
#include "common/rendezvous/store.h"

namespace lockstep {

struct ProcessGroupOptions {
  /// "nccl", "shm", "tcp" or "gloo"; empty: the best for the ranks' devices (backend_choice.h).
  std::string backend{};
  /// env:// or tcp://HOST:PORT, and options of the command line: see LaunchInput.
  std::string init_method = "env://";
  std::optional<int> rank{}, world_size{}, local_rank{};
  /// How long the ranks may take to find each other, and a peer to come to a collective.
  double timeout_seconds = 300;
  /// Rank 0 leaves its last calls here (system/flight_recorder.h), rank 3 in FILE.rank3; may be
  /// empty.
  std::string flight_file{};
  /// Set if the ranks are simulated: then this thread stands for one kind of them.
  std::optional<SimulatedRanks> simulated{};
  /// The same as for name_places(), if known before the ranks have come. Then the group's errors
  /// say places from the start.
  PlaceOf place_of{};
  /// The program and its options as typed, for the commands that errors propose.
  std::string program = "PROGRAM OPTIONS...";
};

/// Whether LOCKSTEP_DEBUG asks that collectives compare the ranks' calls. Throws BadInput for a
/// value that asks for something else.
bool debug_from_environment();

/// This process's place in its job. Unlike PyTorch's, this group has no collectives: connect()
/// returns the Communicator that has them. Nothing waits longer than the timeout, and every error
/// names the ranks concerned. Use the group from one host thread.
///
/// With LOCKSTEP_DEBUG=collectives in the environment of all ranks, each collective begins with a
/// comparison of the ranks' calls; not for NCCL (roll_call.h).
class ProcessGroup {
 public:
  /// Finds the other ranks; returns when all have come. Throws BadInput for options that make no
  /// sense or differ among the ranks (with both values, on all), and what TcpStore and its
  /// wait_for_all() throw.
  ProcessGroup(const LaunchContract& contract, const ProcessGroupOptions& options);
  /// Calls end(), but not while an exception is being thrown.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const { return contract_.rank; }
  int world_size() const { return contract_.world_size; }
  int local_rank() const { return contract_.local_rank.value(); }
  int local_world_size() const { return contract_.local_world_size.value(); }
  /// The ranks, if they are simulated.
  const std::optional<SimulatedRanks>& simulated() const { return simulated_; }
  /// "nccl", "shm", "tcp" or "gloo" once connected; before that, what was asked for.
  const std::string& backend() const { return backend_; }
  /// The same with the reason: "shm (one host)".
  std::string backend_and_why() const { return fmt::format("{} ({})", backend_, why_backend_); }
  /// The ways in which this job is open to strangers; empty if in none: see TcpStore::trust().
  std::string trust() const { return world_size() > 1 ? store_->trust() : ""; }
  Store& store() { return *store_; }
  /// Makes errors say where ranks are among the others: "rank 3 (data 1, tensor 1)". This holds for
  /// this group, for `world` (made by connect()), for further groups and for the launcher.
  void name_places(const PlaceOf& place_of, Communicator& world);
  /// This rank's place among the others; may be empty.
  const std::string& place() const { return place_; }
  /// The recorder of this rank's last calls.
  const FlightRecorder& flight() const { return *flight_; }

  /// Takes leave of the others, as the destructor does. Rank 0, which hosts the store, waits for
  /// them, at most a few seconds. Every later call that needs the others throws BadInput. end()
  /// itself throws nothing. Mirrors destroy_process_group().
  void end();

  /// This rank's device: number local_rank of those named for its host. Throws BadInput if too few
  /// are named.
  DeviceId device_of(const std::vector<DeviceId>& ids) const;
  /// Connects the devices of all ranks. All ranks call it, once. Destroy the communicator before
  /// the device and the group, when all enqueued work is done. Throws what choose_backend() throws,
  /// on all ranks, and PeerLost.
  std::unique_ptr<Communicator> connect(Device& device);
  /// Makes a further group, of all ranks with this rank's color. They are numbered from 0 in the
  /// order of their ranks here. All ranks call it in the same order, after connect(). The calls of
  /// different groups have no common order, so a rank in several groups enqueues all their calls on
  /// one stream. Destroy the communicator like connect()'s. Throws what connect() throws. Mirrors
  /// torch.distributed.new_group, and names groups by colors as MPI_Comm_split does.
  std::unique_ptr<Communicator> new_group(Device& device,
                                          const std::function<int(int rank)>& color_of);

  /// All ranks call the next functions in the same order, any number of times. These go through the
  /// store: use them for rare things, or for those that must work without a connection.
  /// exchange() returns all ranks' texts, by rank. Throws PeerLost naming ranks that did not come.
  std::vector<std::string> exchange(const std::string& mine);
  /// exchange(), for code that needs nothing else of the group. The group must outlive the result.
  ExchangeTexts exchanger() {
    return [this](const std::string& mine) { return exchange(mine); };
  }
  /// Each rank does its `work`. If the work fails on some ranks, it has failed on all. The first of
  /// them throws the error, and tells the launcher that this error will be reported. All other
  /// ranks throw SaidByAnother once that rank is gone. So one line reports an error, whether one
  /// rank found it or all. Returns what this rank's work returned.
  template <class Work>
  auto together(Work&& work) {
    if constexpr (std::is_void_v<decltype(work())>) {
      do_together(work);
    } else {
      std::optional<decltype(work())> result;
      do_together([&] { result.emplace(work()); });
      return *std::move(result);
    }
  }
  /// lockstep::require_same(), reported by one rank.
  void require_same(const NamedValues& mine, const std::string& advice);
  /// Returns when all ranks have come. Throws PeerLost: "rank 0: barrier 3: rank 1 did not come
  /// within 300 s". Work queued on streams may still run (Communicator::barrier).
  void barrier();

 private:
  friend ProcessGroup init_process_group(const ProcessGroupOptions& options);
  ProcessGroup(const LaunchContract& contract, const ProcessGroupOptions& options,
               std::atomic<bool>* only);

  std::shared_ptr<Store> find_ranks(const ProcessGroupOptions& options);
  std::vector<std::string> exchange_as(const std::string& name, const std::string& mine);
  void do_together(const std::function<void()>& work);
  void set_place(const std::string& place);
  void fail_alike(const std::function<void()>& work);
  void fail_once(int speaker, const std::exception_ptr& error, const std::exception_ptr& mine);
  void agree_on_backend(const Device& device);
  std::unique_ptr<Communicator> communicator(Device& device, const std::shared_ptr<Store>& store,
                                             const std::vector<int>& members);
  std::shared_ptr<HostTransport> connect_host(Store& store);
  std::shared_ptr<HostTransport> connect_one_host(Store& store);

  LaunchContract contract_;
  std::optional<SimulatedRanks> simulated_;
  double timeout_;
  std::string backend_, why_backend_, place_;
  bool asked_ = false;  // for that backend
  bool debug_;
  int exceptions_;  // uncaught when it was made
  std::shared_ptr<FlightRecorder> flight_;
  std::shared_ptr<RankTransports> transports_ = std::make_shared<RankTransports>();
  std::shared_ptr<Store> store_;
  bool connected_ = false, ended_ = false;
  std::atomic<bool>* only_;  // true while the process's only group lives; may be null
  int64_t exchanges_ = 0, agreements_ = 0, barriers_ = 0, groups_ = 0;  // so far
};

/// The address at which other ranks reach this one: `own`, its end of its connection to the store.
/// Other hosts cannot use a loopback address. But if `own` is one, this is rank 0's host, and
/// `addresses_of_host` (rank 0's host, as each rank reaches it) may contain a better address.
std::string reachable_host(const std::string& own,
                           const std::vector<std::string>& addresses_of_host);

/// Makes the process group of this process, as its launcher and the options say. Throws BadInput
/// while there is another group ("initialised twice"), and for a process that no launcher has
/// started.
ProcessGroup init_process_group(const ProcessGroupOptions& options);

}  // namespace lockstep
