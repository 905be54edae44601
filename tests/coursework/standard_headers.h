// The headers of libraries that most sources include. A build for grading compiles them once, and
// all its sources begin with them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#if __has_include(<fmt/format.h>)
#include <fmt/format.h>
#endif
