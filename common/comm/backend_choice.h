#pragma once
// What carries the collectives of a group of processes: what each rank has to offer, and what all
// ranks choose from it.

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "common/core/device.h"

namespace lockstep {

/// What a rank tells the others before they connect.
struct RankOffer {
  std::string host;      // name of its machine
  std::string hardware;  // Device::hardware(): which GPU it is, whatever its name is there
  std::string device;    // "cuda:0"
  bool gpu = false;
  std::string no_gloo;  // why Gloo is not available there; empty if it is, or if nobody asked
  std::string no_nccl;  // the same for NCCL
  /// As text, and back. from() throws BadInput.
  std::string text() const;
  static RankOffer from(std::string_view text);
};

/// What connects the ranks; automatic: the fastest that fits.
enum class Backend { automatic, nccl, shm, tcp, gloo };
constexpr auto words_of(Backend) { return std::array{"auto", "nccl", "shm", "tcp", "gloo"}; }

/// Throws BadInput unless `backend` is empty or one of these words other than "auto". Throws
/// EnvironmentError for Gloo if this build has no Gloo.
void check_backend_name(const std::string& backend);

struct BackendChoice {
  std::string name;  // "shm"
  std::string why;   // "one host"
};

/// The backend of all ranks, from rank r's offers[r]: the one that was asked for or, if none was,
/// the fastest that fits: NCCL where every rank has a GPU of its own and NCCL, else shared memory
/// where all are on one host, else TCP. The same on every rank. Throws BadInput, naming the ranks,
/// if NCCL is asked for with a CPU device, or with one GPU used twice; EnvironmentError for a rank
/// without the library.
BackendChoice choose_backend(const std::string& asked, const std::vector<RankOffer>& offers);

}  // namespace lockstep
