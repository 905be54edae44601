#include "common/launch/launch_options.h"

#include <algorithm>
#include <cstdio>

#include "common/core/error.h"
#include "common/options/option_parser.h"

namespace lockstep {
namespace {

/// "--max-restarts,--max_restarts": torchrun takes both spellings, and people use both.
std::string both_spellings(const std::string& name) {
  std::string other = name;
  for (size_t i = 2; i < other.size(); ++i) {
    if (other[i] == '-') other[i] = '_';
  }
  return other == name ? name : name + "," + other;
}

void add_options(OptionParser& parser, LaunchOptions& o) {
  const auto add = [&](const char* name, auto& value, const char* text) {
    parser.add(both_spellings(name), value, text);
  };
  add("--nproc-per-node", o.nproc_per_node, "ranks to start on this node");
  add("--nnodes", o.nnodes, "nodes; the launcher is started once on each");
  add("--node-rank", o.node_rank, "this node's number, 0 to nnodes - 1");
  add("--master-addr", o.master_addr, "host of node 0, the same on all nodes; one node: 127.0.0.1");
  add("--master-port", o.master_port, "port that rank 0 listens on; one node: 0 takes a free one");
  parser.add_flag("--standalone", o.standalone, "one node, address and port are chosen here");
  add("--max-restarts", o.max_restarts, "how often to start all ranks again after a failure");
  add("--redirect", o.redirect, "write output to rank_0.out, rank_0.err, ... in this folder");
  parser.add_flag("--prefix", o.prefix, "put \"[rank 0] \" before every line of output");
  add("--grace", o.grace_seconds, "seconds between SIGTERM and SIGKILL for ranks to be stopped");
}

/// The index of the program's name, argc if there is none. The word after an option that takes a
/// value belongs to the option.
int program_at(const OptionParser& parser, int argc, const char* const* argv) {
  int at = 1;
  for (; at < argc && argv[at][0] == '-' && std::string(argv[at]) != "--"; ++at) {
    if (parser.takes_value(argv[at])) ++at;
  }
  return std::min(at, argc);
}

void check_range(const char* option, double found, double low, double high) {
  // Written so that NaN counts as out of range.
  require(found >= low && found <= high, "{}: found {}, expected {} to {}", option, found, low,
          high);
}

}  // namespace

void check_launch_options(const LaunchOptions& o) {
  check_range("--nproc-per-node", o.nproc_per_node, 1, 1024);
  check_range("--nnodes", o.nnodes, 1, 65536);
  require(o.node_rank >= 0 && o.node_rank < o.nnodes,
          "--node-rank: found {}, expected 0 to {}, since --nnodes is {}", o.node_rank,
          o.nnodes - 1, o.nnodes);
  check_range("--master-port", o.master_port, 0, 65535);
  check_range("--max-restarts", o.max_restarts, 0, 1000000);
  check_range("--grace", o.grace_seconds, 0, 3600);
  require(!o.prefix || o.redirect.empty(),
          "--prefix: with --redirect {} no output is left to mark; leave one of them out",
          o.redirect);
  if (o.standalone) {
    require(o.nnodes == 1, "--standalone: found --nnodes {}, expected 1; leave one of them out",
            o.nnodes);
    require(o.master_addr.empty(), "--standalone: it chooses the address; leave out --master-addr");
    require(o.master_port == 0, "--standalone: it chooses the port; leave out --master-port");
  }
  if (o.nnodes > 1) {
    require(!o.master_addr.empty(),
            "--master-addr is missing: {} nodes need it; give the host of node 0, on every node",
            o.nnodes);
    require(o.master_port != 0,
            "--master-port is missing: {} nodes need it; give a free port of {}, on every node",
            o.nnodes, o.master_addr);
  }
}

std::optional<LaunchLine> parse_launch_line(int argc, const char* const* argv) {
  LaunchLine line;
  OptionParser parser("launch",
                      "Starts PROGRAM as several ranks and ends them together:\n"
                      "launch [options] PROGRAM [the program's own options and arguments]");
  add_options(parser, line.options);
  const int program = program_at(parser, argc, argv);
  if (!parser.parse(program, argv)) return {};
  const bool separated = program < argc && std::string(argv[program]) == "--";
  line.program.assign(argv + program + (separated ? 1 : 0), argv + argc);
  check_launch_options(line.options);
  require(!line.program.empty(),
          "no program was given; expected: launch [options] PROGRAM [arguments]");
  return line;
}

}  // namespace lockstep
