#pragma once
// Weights in safetensors files: --save and --load.

#include <functional>
#include <string>
#include <vector>

#include "common/io/safetensors.h"
#include "common/nn/module.h"
#include "common/nn/state_dict.h"

namespace lockstep {

/// The type of Real in a file.
inline constexpr DType kRealType = sizeof(Real) == 4 ? DType::F32 : DType::F64;

/// Which types of numbers a file may hold.
enum class FileTypes {
  any,   // F32, F64, BF16 and F16 become Real
  exact  // Real's own type only
};

/// A state as a file stores it: Real, and I64 for num_batches_tracked. The entries view `state`.
std::vector<TensorEntry> file_entries(const std::vector<StateTensor>& state);
/// Makes a state from entries. Tensors of another type have no values, but a problem (StateTensor).
std::vector<StateTensor> state_of(const std::vector<TensorEntry>& entries, FileTypes types);

/// Writes a network's whole state under PyTorch's names and shapes, atomically, with checksums,
/// to where symbolic links lead. Synchronizes.
void save_weights(const std::string& path, Module& network);
void save_weights(const std::string& path, const std::vector<StateTensor>& state);
/// The same with numbers rounded to 16 bits, BF16 or F16. Throws BadInput for a number beyond the
/// type's largest.
void save_rounded_weights(const std::string& path, const std::vector<StateTensor>& state,
                          DType dtype);

/// The key of the free text in a file that does not have all weights. The text says what the file
/// is, and what to do. "DIR/" in the text stands for the file's folder.
inline constexpr const char* kIncompleteKey = "lockstep.incomplete";
/// Throws BadInput for a file that has this key, with the key's text.
void refuse_incomplete(const Metadata& metadata, const std::string& path);

/// Weights as --load takes them, read from the disk a tensor at a time.
class WeightsFile {
 public:
  /// Throws BadInput for a malformed file, and for one that does not have all weights.
  explicit WeightsFile(const std::string& path);

  std::string path() const { return file_.path().string(); }
  /// All tensors without their values, for check_state_dict().
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  /// Number `tensor` of tensors() with its values. Throws BadInput if the tensor is damaged.
  StateTensor read(size_t tensor) const;
  /// A line that names the file, and says what was unusual about it.
  void say_loaded() const;

 private:
  SafetensorsStream file_;
  std::vector<StateTensor> tensors_;
  std::string wrapper_{};  // "module." and the like, which was removed from their names
};

/// Reads a weights file into the network, whatever wrote the file. F32, F64, BF16 and F16 become
/// Real. num_batches_tracked (I64) may be missing. If PyTorch's wrappers have put "module.",
/// "_orig_mod." or "_fsdp_wrapped_module." before every name, that is removed, and a line says so.
/// The line also says if there are no checksums. Throws BadInput for a malformed or damaged file.
/// Also throws a BadInput that lists all tensors that are missing, unexpected, or of another dtype
/// or shape; the network is then unchanged.
void load_weights(const std::string& path, Module& network);
/// The same for a network that is set by `load`, which throws if the state does not fit.
void load_weights(const std::string& path,
                  const std::function<void(const std::vector<StateTensor>&)>& load);

}  // namespace lockstep
