#pragma once
// Paths of files, and whole files in and out. Writing is atomic and durable: a reader, or a crash
// at any moment, finds either the complete old file or the complete new one.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "common/system/descriptor.h"

namespace lockstep {

/// The file that a user's path means: the end of its symbolic links, even if no file is there. Code
/// that replaces a file by a rename needs this, since the rename would replace the link. Returns
/// `path` itself if the links lead in a circle.
std::filesystem::path followed(const std::filesystem::path& path);

/// The most bytes that a file's name may have in this directory; 255 on most file systems.
std::size_t longest_name(const std::filesystem::path& directory);

/// The directory that a path's last name is in: "." for a name alone.
std::filesystem::path directory_of(const std::filesystem::path& path);

/// A regular file that is open for reading.
class InputFile {
 public:
  /// Throws BadInput if it cannot be opened or is not a regular file; the text names the path and
  /// the system's reason.
  explicit InputFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Bytes in the file when it was opened.
  std::uint64_t size() const { return size_; }
  /// Fills `bytes` from byte `at` on. Throws EnvironmentError if reading fails.
  void read(std::uint64_t at, std::span<std::byte> bytes) const;

 private:
  std::filesystem::path path_;
  Descriptor file_;
  std::uint64_t size_ = 0;
};

/// Reads a regular file into memory. Throws BadInput if it cannot be opened or is not a regular
/// file, EnvironmentError if reading fails. The text names the path and the system's reason.
std::vector<std::byte> read_file(const std::filesystem::path& path);

/// Writes the pieces, one after another, as the file `path`, replacing an older one.
///
/// The order of steps makes it safe:
///   - create a temporary file *in the same directory* (a rename across file systems is a copy),
///   - write, then fsync it: otherwise the rename may reach the disk before the data,
///   - rename it over `path`: atomic, readers see the old or the new file,
///   - fsync the directory: otherwise the rename may be lost in a power cut.
///
/// If an error occurs before the rename is done, the temporary file is removed and the old file is
/// untouched. Throws EnvironmentError with the path, the step, the system's reason and what to do;
/// BadInput if `path` names no file. The new file keeps the permissions of the one that it
/// replaces, else gets those of the process's umask. A symbolic link at `path` is replaced, not
/// followed: give followed() of a path that a user has named.
void write_file_atomically(const std::filesystem::path& path,
                           std::span<const std::span<const std::byte>> pieces);

/// Makes a directory, and any missing ones above it, durably (fsync of the directory that holds
/// each). Returns the directories that it made, the deepest first. Throws EnvironmentError if the
/// directory cannot be made or nothing may be written in it.
std::vector<std::filesystem::path> make_directory(const std::filesystem::path& directory);

/// Removes a file, and makes sure that a power cut does not bring it back (fsync of the directory).
/// Does nothing if there is none. Throws EnvironmentError.
void remove_file(const std::filesystem::path& path);

}  // namespace lockstep
