#pragma once
// Output of several ranks on one stdout and one stderr, line by line.

#include <poll.h>

#include <array>
#include <string>
#include <vector>

#include "common/system/descriptor.h"

namespace lockstep {

/// Passes on what ranks write, with "[rank 1] " before every line. A line arrives whole, whatever
/// the others write meanwhile; a line of more than a mebibyte arrives in parts. Nothing here
/// blocks: a reader who stops reading makes the ranks wait, not the launcher. A reader who leaves
/// makes the ranks' next writes fail (SIGPIPE), as if they wrote to that reader directly.
class LineRelay {
 public:
  /// Opens a pipe to stdout (0) or stderr (1). Returns the end that the rank writes to; close the
  /// launcher's copy once the rank has its own. Throws EnvironmentError.
  Descriptor open(int rank, size_t target);
  /// Writes a line of the launcher's own to stderr, after what ranks have written.
  void say(const std::string& line);
  /// Adds the descriptors to wait for.
  void add_polls(std::vector<pollfd>& polls) const;
  /// Reads and writes what can be read and written now.
  void pump();
  /// Call it when the ranks are gone: takes what they left and completes the last lines.
  void close();
  /// Whether everything that was read has been written.
  bool flushed() const;
  /// The errno of a write to stdout or stderr that failed; 0 if none did.
  int error() const { return targets_[0].error != 0 ? targets_[0].error : targets_[1].error; }

 private:
  struct Source {
    Descriptor fd;
    std::string mark;  // "[rank 1] "
    size_t target = 0;
    std::string line;  // begun, without its mark
  };
  struct Target {
    explicit Target(int output) : fd(output) {}
    int fd;
    std::string text;  // whole lines
    size_t written = 0;
    int error = 0;  // once not 0, nothing is written any more
  };
  bool read(Source& source);
  void add(Source& source, const char* bytes, size_t count);
  void finish_line(Source& source);
  static void write(Target& target);
  bool is_full(const Source& source) const;

  std::vector<Source> sources_;
  std::array<Target, 2> targets_{Target(STDOUT_FILENO), Target(STDERR_FILENO)};
};

}  // namespace lockstep
