#pragma once
// The store of a group of ranks: ranks leave texts for each other there before anything else
// connects them, and after their connections have failed.

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/core/text.h"
#include "common/rendezvous/job_key.h"
#include "common/rendezvous/launch_contract.h"
#include "common/rendezvous/socket.h"

namespace lockstep {

/// The texts that ranks have left under one name.
struct Meeting {
  std::vector<std::optional<std::string>> texts{};  // by rank; none of a rank that did not come
  std::vector<int> gone{};  // ranks that died or took their leave, in order of time
};

/// Mirrors torch.distributed.Store, and adds meet(), which ranks use most.
class Store {
 public:
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// This process's place in the group.
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// The ranks' names in errors, with their numbers in the whole job: "rank 2", "ranks 1, 3". After
  /// their places are known: "rank 1 (data 0, tensor 1), rank 3 (data 1, tensor 1)".
  virtual std::string names_of(const std::vector<int>& ranks) const;
  std::string name_of(int rank) const { return names_of({rank}); }
  /// Sets each rank's place, for these names. Other threads may ask for names meanwhile.
  virtual void name_places(PlaceOf place_of);

  /// Leaves `mine`, if any, under `name`, and returns all texts there. Returns when all `awaited`
  /// ranks have left theirs, when one of them is gone, or after `timeout_seconds`. Nobody asks
  /// repeatedly: the store answers by itself. The rank that hosts the store gets its answer last,
  /// when the others' are on their way. Throws PeerLost if the store is gone, BadInput for mistakes
  /// that concern the whole job.
  virtual Meeting meet(const std::string& name, const std::optional<std::string>& mine,
                       const std::vector<int>& awaited, double timeout_seconds) = 0;

  /// The whole job's store, if this is a part of it; else null.
  virtual Store* job() { return nullptr; }

  /// Sets the value of a key. Key and value together have at most kLargestValue bytes.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// The value of a key, once it has one. Throws PeerLost after `timeout_seconds`, and at once if a
  /// rank has died and the key has no value: "rank 2 left without a word".
  virtual std::string get(const std::string& key, double timeout_seconds) = 0;

  /// The job's key, by which its ranks recognize each other wherever they meet.
  virtual const JobKey& key() const = 0;
  /// Sets how soon the store must answer calls that wait for nothing; else the store counts as
  /// lost. For ranks that have waited long enough.
  virtual void answer_within(double seconds) = 0;
  /// The address of this rank's end of the connection, at which others reach its host.
  virtual Address local_address() const = 0;
  /// The address of the other end, as this rank reaches it: of the rank that hosts the store.
  virtual Address host_address() const = 0;
  /// Whether that rank of the group hosts the store.
  virtual bool is_host(int rank) const = 0;
  /// The reasons why strangers could reach the store, or join: "no job key: trusts its network".
  /// Empty if there are none.
  virtual std::string trust() const { return {}; }

 protected:
  Store() = default;

 private:
  mutable std::mutex naming_;
  PlaceOf place_of_;
};

/// A job's store for some of the job's ranks. Here these ranks have numbers from 0 on, in the order
/// given, and keys and meetings of their own. So they can do all that a whole job's ranks do.
/// Mirrors torch.distributed.PrefixStore.
class SubgroupStore final : public Store {
 public:
  /// `members` are ranks of `job` in rising order, and include this process's own. `name` is new
  /// for each group of the job, and the same on all members.
  SubgroupStore(std::shared_ptr<Store> job, std::vector<int> members, const std::string& name);

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(members_.size()); }
  std::string names_of(const std::vector<int>& ranks) const override {
    return job_->names_of(in_job(ranks));
  }
  void name_places(PlaceOf place_of) override { job_->name_places(std::move(place_of)); }
  Meeting meet(const std::string& name, const std::optional<std::string>& mine,
               const std::vector<int>& awaited, double timeout_seconds) override;
  Store* job() override { return job_.get(); }
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, double timeout_seconds) override;
  const JobKey& key() const override { return job_->key(); }
  void answer_within(double seconds) override { job_->answer_within(seconds); }
  Address local_address() const override { return job_->local_address(); }
  Address host_address() const override { return job_->host_address(); }
  bool is_host(int rank) const override { return job_->is_host(members_.at(size_t(rank))); }

 private:
  std::vector<int> in_job(const std::vector<int>& ranks) const;

  std::shared_ptr<Store> job_;
  std::vector<int> members_;
  std::string prefix_;
  int rank_;
};

// --- A job's store over TCP ---------------------------------------------------------------------

struct Request;
class StoreServer;

struct StoreOptions {
  Address address{};  // where rank 0 hosts the store; port 0 on rank 0: the system chooses
  int rank = 0;
  int world_size = 1;
  std::string run_id{};  // of the job; the same on all ranks
  /// The job's key. If none is given and the address is this host's only, rank 0 makes a key. Ranks
  /// of the same user get the key from rank 0 (KeyDesk).
  JobKey key{};
  double connect_seconds = 300;  // how long to wait for rank 0 to start
  /// How long three things may take. The listener shows that it is a store. A connection shows that
  /// it is from a rank. The store answers a call that waits for nothing.
  double answer_seconds = 10;
  /// How long after its own timeout a call that waits for other ranks may get its answer.
  double late_seconds = 0.8;
  /// The same as for name_places(), if known before the ranks have come.
  PlaceOf place_of{};
};

StoreOptions store_options(const LaunchContract& contract);

/// One rank's connection to the store by which the ranks of a job find each other. Rank 0's object
/// also hosts the store, as long as the object lives: rank 0 must leave last, or the others lose
/// the store. Calls from several threads take turns, even while one waits. Mirrors
/// torch.distributed.TCPStore.
///
/// Every call may throw, on every rank. BadInput: the ranks have different keys, two processes
/// claim one rank ("rank 1 claimed twice") or WORLD_SIZE differs (with both values). PeerLost: a
/// rank is missing or the store is gone. An error that concerns the whole job is the answer to all
/// later calls, too.
class TcpStore final : public Store {
 public:
  /// Rank 0 starts the store; every rank connects and introduces itself. Throws EnvironmentError.
  /// Rank 0 throws at once if the port is taken. Others throw at once if a host does not resolve,
  /// after connect_seconds where nothing listens. They throw after at most answer_seconds where
  /// something other than a store listens. Throws PeerLost after answer_seconds if nobody answers:
  /// the store's process may be stopped.
  explicit TcpStore(const StoreOptions& options);
  /// Takes leave of the store, unless an exception destroys the object: then the others see it as
  /// if the process had died.
  ~TcpStore() override;

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }
  void name_places(PlaceOf place_of) override;
  Meeting meet(const std::string& name, const std::optional<std::string>& mine,
               const std::vector<int>& awaited, double timeout_seconds) override;
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, double timeout_seconds) override;
  void answer_within(double seconds) override;
  Address local_address() const override;
  Address host_address() const override;
  const JobKey& key() const override { return options_.key; }
  bool is_host(int rank) const override { return rank == 0; }

  /// The store's address: for errors, and for tests, in which the system chooses the port.
  const Address& address() const { return options_.address; }
  std::string trust() const override;
  /// Returns once all ranks have connected. The first rank whose timeout passes ends the wait of
  /// all: PeerLost, "missing ranks: 1, 3".
  void wait_for_all(double timeout_seconds);

 private:
  Socket connect();
  std::string introduce(Socket& socket, const Deadline& deadline);
  [[noreturn]] void fail_no_store(const std::string& what) const;
  [[noreturn]] void fail_closed() const;
  [[noreturn]] void fail_silent(double seconds) const;
  std::string name_of_store() const;
  std::string call(const Request& request);

  StoreOptions options_;
  std::unique_ptr<StoreServer> server_;  // on rank 0
  Socket socket_;
  int exceptions_;  // uncaught when it was made
  std::mutex turn_;
  std::string broken_;  // why no further call can work
};

}  // namespace lockstep
