#include "common/io/json_file.h"

#include "common/io/file.h"
#include "common/io/json.h"
#include "common/system/followed.h"

namespace lockstep {

void write_json(const std::string& path, const nlohmann::json& value) {
  const std::string text = value.dump() + "\n";
  const std::span<const std::byte> piece = std::as_bytes(std::span(text));
  write_file_atomically(followed(path), std::span(&piece, 1));
}

}  // namespace lockstep
