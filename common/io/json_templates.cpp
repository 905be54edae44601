// Compiled by itself: no sanitizer needs to check it.

#include "common/io/json.h"

template class nlohmann::basic_json<>;
