#include "common/comm/backend_choice.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/comm/host_transport.h"
#include "common/core/error.h"
#include "common/core/parse.h"
#include "common/rendezvous/wire.h"

namespace lockstep {
namespace {

std::string place_of(int rank, const RankOffer& offer) {
  return fmt::format("rank {} ({} on {})", rank, offer.device, offer.host);
}

/// The first two ranks on one GPU.
std::optional<std::pair<int, int>> sharing_ranks(const std::vector<RankOffer>& offers) {
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      const bool same = offers[rank].host == offers[other].host &&
                        offers[rank].hardware == offers[other].hardware;
      if (same) return std::pair(int(other), int(rank));
    }
  }
  return std::nullopt;
}

void require_nccl_possible(const std::vector<RankOffer>& offers) {
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    require(offers[rank].gpu, "--backend nccl serves GPUs, {} is none; leave --backend out",
            place_of(int(rank), offers[rank]));
  }
  if (const auto sharing = sharing_ranks(offers)) {
    const auto [first, second] = *sharing;
    fail<BadInput>(
        "{} and {} are on the same GPU ({}): NCCL serves each GPU once; name different GPUs, or "
        "leave --backend out",
        place_of(first, offers[first]), place_of(second, offers[second]), offers[first].hardware);
  }
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    if (offers[rank].no_nccl.empty()) continue;
    fail<EnvironmentError>("{}: no NCCL: {}; leave --backend out",
                           place_of(int(rank), offers[rank]), offers[rank].no_nccl);
  }
}

void require_gloo_possible(const std::vector<RankOffer>& offers) {
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    if (offers[rank].no_gloo.empty()) continue;
    fail<EnvironmentError>("{}: {}; give --backend tcp", place_of(int(rank), offers[rank]),
                           offers[rank].no_gloo);
  }
}

}  // namespace

std::string RankOffer::text() const {
  std::string out;
  for (const std::string& field : {host, hardware, device, no_gloo, no_nccl}) put_text(out, field);
  put_number(out, gpu ? 1 : 0, 1);
  return out;
}

RankOffer RankOffer::from(std::string_view text) {
  WireReader in(text);
  RankOffer offer;
  for (std::string* field :
       {&offer.host, &offer.hardware, &offer.device, &offer.no_gloo, &offer.no_nccl}) {
    *field = in.text();
  }
  offer.gpu = in.number(1) == 1;
  return offer;
}

void check_backend_name(const std::string& backend) {
  static constexpr auto kWords = words_of(Backend());
  const bool known =
      backend.empty() || std::find(kWords.begin() + 1, kWords.end(), backend) != kWords.end();
  require(known, "--backend: Invalid backend: '{}', expected {}", backend, alternatives(kWords));
  if (backend == "gloo" && !gloo_availability().empty()) {
    fail<EnvironmentError>("--backend gloo: {}; give --backend tcp", gloo_availability());
  }
}

BackendChoice choose_backend(const std::string& asked, const std::vector<RankOffer>& offers) {
  if (asked == "nccl") require_nccl_possible(offers);
  if (asked == "gloo") require_gloo_possible(offers);
  if (!asked.empty()) return {asked, "as asked"};
  const bool nccl = std::ranges::all_of(
      offers, [](const RankOffer& offer) { return offer.gpu && offer.no_nccl.empty(); });
  if (nccl && !sharing_ranks(offers)) return {"nccl", "a GPU for each rank"};
  const bool one_host = std::ranges::all_of(
      offers, [&](const RankOffer& offer) { return offer.host == offers[0].host; });
  if (one_host) return {"shm", "one host"};
  return {"tcp", "several hosts"};
}

}  // namespace lockstep
