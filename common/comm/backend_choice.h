#pragma once
// The backend that carries the collectives of a group of processes: each rank makes an offer, and
// all ranks choose from the offers.

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "common/core/device.h"

namespace lockstep {

/// The facts that a rank tells the others before they connect.
struct RankOffer {
  std::string host;      // name of its machine
  std::string hardware;  // Device::hardware(): which GPU it is, whatever its name is there
  std::string device;    // "cuda:0"
  bool gpu = false;
  std::string no_gloo;  // why Gloo is not available there; empty if it is, or if nobody asked
  std::string no_nccl;  // the same for NCCL
  /// Writes the offer as text, and reads it back. from() throws BadInput.
  std::string text() const;
  static RankOffer from(std::string_view text);
};

/// The connection between the ranks; automatic: the fastest that fits.
enum class Backend { automatic, nccl, shm, tcp, gloo };
constexpr auto words_of(Backend) { return std::array{"auto", "nccl", "shm", "tcp", "gloo"}; }

/// Throws BadInput unless `backend` is empty or one of these words other than "auto". Throws
/// EnvironmentError for Gloo if this build has no Gloo.
void check_backend_name(const std::string& backend);

struct BackendChoice {
  std::string name;  // "shm"
  std::string why;   // "one host"
};

/// Returns the backend of all ranks, the same on every rank. offers[r] is rank r's. If `asked` is
/// empty, chooses the fastest that fits. That is NCCL where every rank has NCCL and a GPU of its
/// own, else shared memory where all are on one host, else TCP. Throws BadInput, naming the ranks,
/// if NCCL is asked for with a CPU device, or with one GPU used twice. Throws EnvironmentError for
/// a rank without the library that was asked for.
BackendChoice choose_backend(const std::string& asked, const std::vector<RankOffer>& offers);

}  // namespace lockstep
