#include "common/io/foreign_files.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "common/core/error.h"

namespace lockstep::safetensors {
namespace {

constexpr const char* kTorchSave =
    "a file of torch.save(), expected safetensors; in Python: "
    "safetensors.torch.save_file(model.state_dict(), \"weights.safetensors\")";
constexpr std::string_view kZip = "PK\x03\x04";

struct Format {
  std::string_view begin;
  const char* found_and_advice;
};
constexpr Format kFormats[] = {
    {"\x80\x02", kTorchSave},  // a pickle of protocol 2
    {"\x80\x03",
     "a pickle of Python (protocol 3), expected safetensors; load it where it was made, "
     "and save its arrays with safetensors.numpy.save_file()"},
    {"\x80\x04",
     "a pickle of Python (protocol 4), expected safetensors; load it where it was made, "
     "and save its arrays with safetensors.numpy.save_file()"},
    {"\x80\x05",
     "a pickle of Python (protocol 5), expected safetensors; load it where it was made, "
     "and save its arrays with safetensors.numpy.save_file()"},
    {"\x93NUMPY",
     "one array of numpy.save() (.npy), expected safetensors; save all arrays by their "
     "names with safetensors.numpy.save_file()"},
    {"version https://git-lfs",
     "a pointer of Git LFS, not the file that it stands for; fetch that "
     "with: git lfs pull"},
    {"GGUF", "a GGUF file (llama.cpp), expected safetensors; take those that it was made from"},
    {"\x89HDF\r\n\x1a\n",
     "an HDF5 file (Keras, h5py), expected safetensors; load it where it was "
     "made, and save its arrays with safetensors.numpy.save_file()"},
    {"\x1f\x8b", "gzip data, expected safetensors; unpack it first (gunzip)"},
};

/// The name of the first member of a ZIP archive: bytes 26 and 27 are its length, it begins at 30.
std::string_view first_member(std::string_view zip) {
  if (zip.size() < 30) return {};
  const size_t length =
      static_cast<unsigned char>(zip[26]) + 256 * static_cast<unsigned char>(zip[27]);
  return zip.substr(30, length);
}

bool is_web_page(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  const auto begins = [&](std::string_view tag) {
    return std::ranges::equal(text.substr(0, tag.size()), tag, {},
                              [](unsigned char c) { return char(std::tolower(c)); });
  };
  return begins("<!doctype html") || begins("<html");
}

/// What such a file is, and what to do; null for one that is not known.
const char* found_and_advice(std::string_view text) {
  if (text.starts_with(kZip)) {
    return first_member(text).ends_with(".npy")
               ? "a file of numpy.savez() (.npz), expected safetensors; in Python: "
                 "safetensors.numpy.save_file(dict(numpy.load(FILE)), \"weights.safetensors\")"
               : kTorchSave;
  }
  if (is_web_page(text)) {
    return "a web page (HTML), expected safetensors; what was downloaded is an error or a log-in, "
           "get "
           "the file itself";
  }
  constexpr size_t kTarMark = 257;  // POSIX.1-1988, ustar
  if (text.size() > kTarMark && text.substr(kTarMark).starts_with("ustar")) {
    return "a tar archive, expected safetensors; unpack it first (tar -xf)";
  }
  const auto* const format = std::ranges::find_if(
      kFormats, [&](const Format& each) { return text.starts_with(each.begin); });
  return format == std::end(kFormats) ? nullptr : format->found_and_advice;
}

}  // namespace

void refuse_foreign(std::span<const std::byte> first, const std::string& what) {
  const char* const found =
      found_and_advice({reinterpret_cast<const char*>(first.data()), first.size()});
  if (found != nullptr) fail<BadInput>("{}: found {}", what, found);
}

}  // namespace lockstep::safetensors
