// The launcher as a program: `./lockstep launch --nproc-per-node 2 PROGRAM [arguments]`.

#include "common/launch/launcher.h"
#include "common/options/report.h"

int main(int argc, char** argv) {
  lockstep::hold_standard_streams();
  try {
    const auto line = lockstep::parse_launch_line(argc, argv);
    return line ? lockstep::launch(line->options, line->program) : 0;
  } catch (...) {
    return lockstep::report_current_exception();  // the ranks have been ended
  }
}
