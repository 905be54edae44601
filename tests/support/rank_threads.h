#pragma once
// Ranks as threads of one process, to test what connects processes.

#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::testing {

/// Calls body(rank) on a thread of its own for each of these ranks and waits for all. Returns each
/// rank's error as text, in the same order; "" if it threw nothing. `body` must not assert:
/// Catch2's assertions belong to the main thread.
template <class Body>
std::vector<std::string> run_ranks(const std::vector<int>& ranks, Body body) {
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        body(ranks[i]);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The same for ranks 0 to world_size - 1.
template <class Body>
std::vector<std::string> run_ranks(int world_size, Body body) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
  return run_ranks(ranks, body);
}

}  // namespace lockstep::testing
