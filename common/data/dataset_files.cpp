#include "common/data/dataset_files.h"

#include <algorithm>
#include <cstdlib>

#include "common/core/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Whether something is there, readable or not: opening it then gives the precise error.
bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::status(path, error).type() != fs::file_type::not_found;
}

fs::path with_gz(const fs::path& path) { return path.string() + ".gz"; }

// The sub-folder comes first: MNIST and Fashion-MNIST use the same file names.
void add_folder(const fs::path& dir, const std::string& name, std::vector<fs::path>& places) {
  places.push_back(dir / name);
  places.push_back(dir);
}

std::vector<fs::path> places_to_look(const std::string& name, const std::string& dir) {
  std::vector<fs::path> places;
  if (!dir.empty()) {
    add_folder(dir, name, places);
    return places;
  }
  const char* environment = std::getenv("LOCKSTEP_DATA");
  if (environment != nullptr && *environment != '\0') add_folder(environment, name, places);
  places.push_back(fs::path("data") / name);
  if (name == "fashion-mnist") places.push_back("/usr/share/datasets/fashion-mnist");
  return places;
}

std::string how_to_get(const std::string& name) {
  return fmt::format(
      "fetch the data set with './lockstep data {}' or train on generated images with "
      "'--data synthetic'",
      name);
}

}  // namespace

fs::path find_dataset_dir(const std::string& name, const std::string& dir,
                          const std::vector<std::string>& files) {
  std::string looked_at;
  for (const fs::path& place : places_to_look(name, dir)) {
    const bool found = std::any_of(files.begin(), files.end(), [&](const std::string& file) {
      return is_there(place / file) || is_there(with_gz(place / file));
    });
    if (found) return place;
    looked_at += (looked_at.empty() ? "" : ", ") + place.string();
  }
  fail<EnvironmentError>("{}: no file '{}' or '{}.gz' in {}; {}", name, files.front(),
                         files.front(), looked_at, how_to_get(name));
}

fs::path find_dataset_file(const std::string& name, const fs::path& dir, const std::string& file) {
  const fs::path path = dir / file;
  if (is_there(path)) return path;
  if (is_there(with_gz(path))) return with_gz(path);
  fail<EnvironmentError>("{}: {} is missing (and so is {}.gz); {}", name, path.string(), file,
                         how_to_get(name));
}

}  // namespace lockstep
