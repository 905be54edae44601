#pragma once
// What a loader reads from: a number of equally large labelled images, any of which can be read at
// any time. `torch.utils.data.Dataset` with __len__ and __getitem__.

#include <cstdint>

namespace lockstep {

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

}  // namespace lockstep
