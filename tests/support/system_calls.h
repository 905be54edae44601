#pragma once
// A program's calls on its files, watched and made to fail.

#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::testing {

/// Sees every fsync, rename and unlink of the process while it exists, and can make them fail.
/// Their order is the whole point of a durable save, and nothing but a power cut would show it
/// otherwise. For programs that contain support/replaced_system_calls.h.
class SystemCalls {
 public:
  SystemCalls() { watcher() = this; }
  ~SystemCalls() { watcher() = nullptr; }
  SystemCalls(const SystemCalls&) = delete;
  SystemCalls& operator=(const SystemCalls&) = delete;

  static std::atomic<SystemCalls*>& watcher() {
    static std::atomic<SystemCalls*> the_watcher;
    return the_watcher;
  }

  /// Notes the call, and the directory or the file (its inode) that it is for; true if it has to
  /// fail.
  bool note(const std::string& call, const std::string& directory, uint64_t file) {
    const std::lock_guard lock(mutex_);
    log.push_back(call);
    if (!directory.empty()) last_directory = directory;
    if (file != 0) last_file = file;
    threads.insert(std::this_thread::get_id());
    if (call != failing && std::ssize(log) - 1 != failing_number) return false;
    errno = EIO;
    return true;
  }

  std::vector<std::string> log;
  std::string last_directory;          // that was given to fsync
  uint64_t last_file = 0;              // likewise
  std::set<std::thread::id> threads;   // that made them
  std::string failing;                 // the entry of the log that fails with EIO
  std::ptrdiff_t failing_number = -1;  // or its place
  std::function<void(const char* from, const char* to)> before_rename;  // if it is set

 private:
  std::mutex mutex_;
};

inline bool note_system_call(const std::string& call, const std::string& directory = "",
                             uint64_t file = 0) {
  SystemCalls* const watcher = SystemCalls::watcher();
  return watcher != nullptr && watcher->note(call, directory, file);
}

/// Takes root's capabilities, by which root may write anywhere, from the calling thread. Lasts for
/// the rest of the thread's life.
inline void drop_capabilities() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2] = {};
  if (::syscall(SYS_capset, &header, none) != 0) throw std::runtime_error("capset failed");
}

/// Calls body() on a thread without these capabilities.
template <class Body>
void without_capabilities(Body body) {
  std::thread([&] {
    drop_capabilities();
    body();
  }).join();
}

/// The nearest thing to a full disk that needs no privilege: while this exists, the process can
/// write files only up to this many bytes.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

}  // namespace lockstep::testing
