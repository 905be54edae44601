#pragma once
// The key-value store of a group of ranks.

#include <string>
#include <vector>

#include "common/rendezvous/job_key.h"
#include "common/sockets/address.h"

namespace lockstep {

/// What the ranks of a group know of each other before anything else connects them. Mirrors
/// torch.distributed.Store.
class Store {
 public:
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// This process's place in the group.
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// At most kLargestValue bytes.
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// The value of a key, once it has one. Throws PeerLost after `timeout_seconds`, and at once if a
  /// rank has died and the key has no value: "rank 2 left without a word".
  virtual std::string get(const std::string& key, double timeout_seconds) = 0;
  /// True if the key has a value.
  virtual bool check(const std::string& key) = 0;
  /// The ranks that died or took their leave, in the order in which they did.
  virtual std::vector<int> gone() = 0;

  /// The job's, with which its ranks know each other again wherever they meet.
  virtual const JobKey& key() const = 0;
  /// From now on calls that wait for nothing are answered within that many seconds, or the store is
  /// lost: for ranks that have waited long enough.
  virtual void answer_within(double seconds) = 0;
  /// This rank's own end of the connection: where others reach its host.
  virtual Address local_address() const = 0;
  /// The other end, as this rank reaches it: where the rank that hosts the store is.
  virtual Address host_address() const = 0;
  /// Whether that rank of the group hosts the store.
  virtual bool is_host(int rank) const = 0;

 protected:
  Store() = default;
};

}  // namespace lockstep
