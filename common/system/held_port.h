#pragma once
// A port that the system gives to nobody else.

#include "common/system/descriptor.h"

namespace lockstep {

/// A free TCP port of this host. A socket is bound to it, and does not listen. As long as this
/// object lives, the system gives the port to no process that lets it choose one. A process that
/// names the port may listen there if its socket has SO_REUSEADDR, as servers' sockets do.
class HeldPort {
 public:
  /// Throws EnvironmentError.
  HeldPort();
  int number() const { return number_; }

 private:
  Descriptor socket_;
  int number_;
};

}  // namespace lockstep
