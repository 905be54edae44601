#pragma once
// A data set in memory, as bytes: pixels become numbers only on the device, batch by batch.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lockstep {

/// The source that a loader reads: equally large labelled images, each of which can be read at any
/// time. Mirrors `torch.utils.data.Dataset` with __len__ and __getitem__.
class ImageSource {
 public:
  virtual ~ImageSource() = default;

  /// Number of samples.
  virtual int64_t count() const = 0;

  /// Bytes of one image: height x width x channels.
  virtual int64_t image_bytes() const = 0;

  /// Writes sample `index` (0..count()-1): its image, [height, width, channels] bytes, to `image`,
  /// and its class to `label`. Called by several loader workers at the same time.
  virtual void read(int64_t index, uint8_t* image, int32_t* label) const = 0;
};

inline constexpr int64_t kClasses = 10;  ///< of every data set here

/// Labelled images. Movable, not copyable: nobody should hold 47 MB twice by accident.
struct Dataset final : ImageSource {
  Dataset() = default;
  Dataset(Dataset&&) = default;
  Dataset& operator=(Dataset&&) = default;

  std::string name;
  int64_t height = 0;
  int64_t width = 0;
  int64_t channels = 0;
  int64_t classes = 0;
  double mean = 0;    ///< of pixels in 0..1; a network's input is (byte/255 - mean) / stddev
  double stddev = 1;  ///< the same for all channels
  std::vector<uint8_t> images;  ///< [count, height, width, channels], row major; or none: all black
  std::vector<uint8_t> labels;  ///< [count], each below `classes`

  int64_t count() const override { return static_cast<int64_t>(labels.size()); }
  int64_t image_bytes() const override { return height * width * channels; }
  void read(int64_t index, uint8_t* image, int32_t* label) const override;

  /// CRC-32 over shape, images and labels: shows whether a checkpoint is used with the data it was
  /// made with. Reads all bytes (about 20 ms for 47 MB), so ask once.
  uint32_t fingerprint() const;
};

struct DatasetPair {
  Dataset train;
  Dataset test;
};

/// Loads "fashion-mnist", "mnist", "cifar10", "synthetic", "synthetic:TRAIN:TEST" (numbers of
/// samples) or "blank:TRAIN:TEST" (black images, which take no memory). `dir` is the value of
/// --data-dir, empty if not given; find_dataset_dir() in dataset_files.h says where else files are
/// looked for. Throws BadInput on an unknown name and on a file that breaks its format,
/// EnvironmentError on missing or unreadable files.
DatasetPair load_dataset(const std::string& name, const std::string& dir = "");

/// Throws BadInput, with index and value, for the first label that is not below `classes`; `what`
/// names the file.
void check_labels(std::span<const uint8_t> labels, int64_t classes, const std::string& what);

}  // namespace lockstep
