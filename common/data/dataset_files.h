#pragma once
// Where the files of a data set are.

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

/// The folder that holds `files` (or some of them; plain or with ".gz" added) of data set `name`:
///  1. `dir` (--data-dir), if given, and then nowhere else: a user who names a folder means it;
///  2. the folder of the environment variable LOCKSTEP_DATA;
///  3. data/NAME below the current directory;
///  4. for fashion-mnist the folder of Debian's package dataset-fashion-mnist.
/// In the folders of 1 and 2 the files may be in a sub-folder NAME. Throws EnvironmentError with
/// all places looked at and how to get the data.
std::filesystem::path find_dataset_dir(const std::string& name, const std::string& dir,
                                       const std::vector<std::string>& files);

/// `dir`/`file`, or the same with ".gz" if only that is there. Throws EnvironmentError, saying how
/// to get data set `name`, if neither is.
std::filesystem::path find_dataset_file(const std::string& name, const std::filesystem::path& dir,
                                        const std::string& file);

}  // namespace lockstep
