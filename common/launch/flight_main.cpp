// Joins the flight recordings that ranks left with --flight FILE: flight FILE, which is what
// `./lockstep show --flight FILE` runs.

#include <cstdio>

#include "common/core/error.h"
#include "common/core/text.h"
#include "common/launch/flight_table.h"
#include "common/options/option_parser.h"
#include "common/options/report.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  hold_standard_streams();
  try {
    std::string file;
    OptionParser parser("flight",
                        "Joins the files of --flight FILE: which rank is late, and where.");
    parser.add("file", file, "FILE; the other ranks' are FILE.rank1, FILE.rank2, ...");
    if (!parser.parse(argc, argv)) return 0;
    const std::vector<std::string> table = flight_table(read_flight_files(file), 0);
    for (const std::string& line : table) print_clean("{}\n", line);
    if (table.empty()) print_clean("flight recorder: no rank has recorded a call\n");
    require_printed();
    return 0;
  } catch (...) {
    return report_current_exception();
  }
}
