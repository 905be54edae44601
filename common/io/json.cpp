#include "common/io/json.h"

template class nlohmann::basic_json<>;

namespace lockstep {

nlohmann::json parse_json(std::string_view text) { return nlohmann::json::parse(text); }

}  // namespace lockstep
