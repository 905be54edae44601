#pragma once
// The frame of every main() that trains: parse, run, and have errors reported (options/report.h,
// the one place where they become a line and a status). Also the other work of one rank's program:
// it starts the other ranks if nobody did, opens its device, and reads and writes files together
// with the others.

#include <concepts>
#include <functional>
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "common/comm/process_group.h"
#include "common/data/dataset.h"
#include "common/nn/module.h"
#include "common/options/options.h"
#include "common/options/rank_options.h"

namespace lockstep {

/// Runs a program that trains: reads the command line into `options`, and trains. Returns the exit
/// status of main: 0; an Error's own status, after its text on one line of stderr; 1 for any other
/// exception. An exception that leaves `train` ends the process at once, at the point where it was
/// thrown. Nothing is unwound, so nothing waits for streams or peers that may never come. With
/// --baseline `train` runs in child processes only (verdict.h).
int run_program(const ProgramInfo& program, Options& options, int argc, const char* const* argv,
                const std::function<void()>& train);

// --- One rank of several -------------------------------------------------------------------------

/// If no launcher started this process and nothing says its rank, starts this program again, one
/// local rank per device. Waits, and returns their exit status. In a rank, does and returns
/// nothing. Simulated ranks are all in this process.
std::optional<int> start_ranks(const Options& options, RankOptions& rank_options);

/// The whole main() of a small program of several ranks. Parses the command line. Then starts
/// the ranks if nobody did, one per device of `devices` (as --devices; looked at after parsing).
/// Calls `work` in each rank. Returns the exit status.
int run_rank_program(OptionParser& parser, int argc, const char* const* argv,
                     RankOptions& rank_options, const std::string& devices,
                     const std::function<void(ProcessGroup&)>& work);

/// Opens the device of this rank: number local_rank of those that --devices names for its host. By
/// default GPU number local_rank, or a CPU device where there is no GPU. Throws BadInput if too few
/// are named, on all ranks if on any.
///
/// From now on a CPU device's process keeps to its share of the host's cores, if that is enough for
/// the device's threads. Otherwise one rank's threads that exchange data would push another rank's
/// computing from core to core. mpirun --bind-to core does the same; --no-bind turns it off. Call
/// it before the threads to be bound are started.
std::unique_ptr<Device> open_device_of_rank(const Options& options, ProcessGroup& group);

/// "2 ranks over shm (one host)", and what the job leaves open to strangers.
std::string ranks_text(const ProcessGroup& group);

/// The settings of the options with these roles, and the sizes of the data sets: weights depend on
/// the sizes, too.
nlohmann::json run_settings(const OptionTable& options, std::initializer_list<Role> roles,
                            const DatasetPair& data);
/// Everything that must be the same on all ranks: the weights, or the number of calls, depend on
/// it.
nlohmann::json shared_settings(const OptionTable& options, const DatasetPair& data);

/// Throws BadInput, on all ranks, with both values, if the ranks differ in one of these settings.
/// They would train different networks, or wait for each other. If the program splits the network,
/// all ranks load and save weights, or none does.
void require_same_settings(ProcessGroup& group, const OptionTable& options, const DatasetPair& data,
                           bool splits_network = false);
/// The same for all options of a program.
template <std::derived_from<Options> ProgramOptions>
void require_same_settings(ProcessGroup& group, const ProgramOptions& options,
                           const DatasetPair& data) {
  require_same_settings(group, table_of(options), data, options.splits_network());
}

/// Every rank reads the data set; an error on one is an error on all (ProcessGroup::together).
DatasetPair load_dataset(ProcessGroup& group, const Options& options);
/// Rank 0 loads or saves the weights, unless the path is empty; all ranks call it, and an error
/// ends all of them.
void load_weights(ProcessGroup& group, const std::string& path, Module& network);
void save_weights(ProcessGroup& group, const std::string& path, Module& network);

}  // namespace lockstep
