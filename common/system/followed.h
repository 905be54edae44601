#pragma once

#include <cstddef>
#include <filesystem>

namespace lockstep {

/// The file that a path given by a user means: where its symbolic links lead, whether or not a file
/// is there. What replaces a file by a rename must know, since the rename would replace the link.
/// `path` itself where links lead in a circle.
std::filesystem::path followed(const std::filesystem::path& path);

/// The most bytes that a file's name may have in this directory; 255 on most file systems.
std::size_t longest_name(const std::filesystem::path& directory);

/// The directory that a path's last name is in: "." for a name alone.
std::filesystem::path directory_of(const std::filesystem::path& path);

}  // namespace lockstep
