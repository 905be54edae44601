#pragma once
// The frame of a program of labs: mistakes to be run and seen.

#include <functional>
#include <string>
#include <vector>

#include "common/comm/process_group.h"

namespace lockstep {

/// A mistake that a program shows under its name: with it, or without it (`fixed`).
struct Lab {
  std::string name;
  std::function<void(bool fixed)> run;
};
/// The same on several ranks, each of which calls `run`.
struct RankLab {
  std::string name;
  std::function<void(ProcessGroup& group, bool fixed)> run;
  std::string devices = "cpu:0,cpu:1";  // unless a launcher starts the ranks
};

/// What main() of a program of labs does: labs NAME [--fixed]. Returns the exit status.
int run_labs(int argc, const char* const* argv, const std::vector<Lab>& labs);
/// The same on the lab's ranks, unless a launcher started others.
int run_rank_labs(int argc, const char* const* argv, const std::vector<RankLab>& labs);

/// Prints a line at once.
void say(const std::string& line);
/// Rank 0 speaks; the others only empty their buffers, so that lines keep their order.
void say(const ProcessGroup& group, const std::string& line);

}  // namespace lockstep
