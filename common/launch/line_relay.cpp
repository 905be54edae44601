#include "common/launch/line_relay.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "common/core/error.h"
#include "common/core/text.h"

namespace lockstep {
namespace {

constexpr size_t kLongestLine = size_t{1} << 20;
constexpr size_t kFull = size_t{1} << 20;  // bytes that wait for a slow reader

}  // namespace

Descriptor LineRelay::open(int rank, size_t target) {
  std::array<int, 2> ends{-1, -1};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    fail<EnvironmentError>("cannot open a pipe for rank {}: {}", rank, std::strerror(errno));
  }
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  sources_.push_back({Descriptor(ends[0]), fmt::format("[rank {}] ", rank), target, ""});
  return Descriptor(ends[1]);
}

void LineRelay::say(const std::string& line) {
  if (targets_[1].error == 0) targets_[1].text += on_one_line(line) + '\n';
  write(targets_[1]);
}

void LineRelay::add_polls(std::vector<pollfd>& polls) const {
  for (const Source& source : sources_) {
    if (!is_full(source)) polls.push_back({source.fd.get(), POLLIN, 0});
  }
  for (const Target& target : targets_) {
    if (!target.text.empty()) polls.push_back({target.fd, POLLOUT, 0});
  }
}

void LineRelay::pump() {
  std::erase_if(sources_, [&](Source& source) {
    if (targets_[source.target].error != 0) return true;
    if (is_full(source) || read(source)) return false;
    finish_line(source);
    return true;
  });
  for (Target& target : targets_) write(target);
}

void LineRelay::close() {
  for (Source& source : sources_) {
    // The writer is gone, so this is no more than a pipe can hold, and its end. A process that
    // escaped and still writes is not waited for.
    pollfd more{source.fd.get(), POLLIN, 0};
    for (int chunks = 0; chunks < 17 && ::poll(&more, 1, 0) > 0 && read(source); ++chunks) {
    }
    finish_line(source);
  }
  sources_.clear();
  for (Target& target : targets_) write(target);
}

bool LineRelay::flushed() const { return targets_[0].text.empty() && targets_[1].text.empty(); }

bool LineRelay::is_full(const Source& source) const {
  return targets_[source.target].text.size() >= kFull;
}

/// False at the end of the stream.
bool LineRelay::read(Source& source) {
  std::array<char, 65536> chunk;
  const ssize_t count = ::read(source.fd.get(), chunk.data(), chunk.size());
  if (count > 0) add(source, chunk.data(), static_cast<size_t>(count));
  return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

void LineRelay::add(Source& source, const char* bytes, size_t count) {
  for (const char* const end = bytes + count; bytes != end;) {
    const auto* newline = static_cast<const char*>(std::memchr(bytes, '\n', size_t(end - bytes)));
    source.line.append(bytes, newline != nullptr ? newline : end);
    bytes = newline != nullptr ? newline + 1 : end;
    if (newline != nullptr) source.line += '\n';
    if (newline != nullptr || source.line.size() >= kLongestLine) finish_line(source);
  }
}

void LineRelay::finish_line(Source& source) {
  Target& target = targets_[source.target];
  if (source.line.empty() || target.error != 0) return;
  target.text += source.mark + source.line;
  if (source.line.back() != '\n') target.text += '\n';
  source.line.clear();
}

void LineRelay::write(Target& target) {
  // A pipe that can be written has room for PIPE_BUF bytes: writing no more never blocks.
  pollfd ready{target.fd, POLLOUT, 0};
  while (!target.text.empty() && ::poll(&ready, 1, 0) > 0) {
    const size_t rest = std::min(target.text.size() - target.written, size_t{PIPE_BUF});
    const ssize_t count = ::write(target.fd, target.text.data() + target.written, rest);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (count < 0) target.error = errno;
    if (count > 0) target.written += static_cast<size_t>(count);
    if (target.error != 0 || target.written == target.text.size()) {
      target.text.clear();
      target.written = 0;
    }
  }
}

}  // namespace lockstep
