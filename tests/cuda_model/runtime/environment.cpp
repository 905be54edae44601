#include "runtime/environment.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>

#include "runtime/model.h"

namespace cuda_model {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int to_integer(const char* name, const std::string& text) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') {
    die(std::string(name) + " is '" + text + "', expected an integer: set it to one or unset it");
  }
  return static_cast<int>(value);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

}  // namespace

void die(const std::string& message) {
  std::fprintf(stderr, "CUDA model: %s\n", message.c_str());
  std::abort();
}

int integer_variable(const char* name, int fallback) {
  const std::string text = variable(name);
  return text.empty() ? fallback : to_integer(name, text);
}

Capability capability() {
  const auto parts = split(variable("CUDA_MODEL_CAPABILITY"), '.');
  if (parts.empty()) return {};
  const int minor = parts.size() > 1 ? to_integer("CUDA_MODEL_CAPABILITY", parts[1]) : 0;
  return {to_integer("CUDA_MODEL_CAPABILITY", parts[0]), minor};
}

bool has_peer_access() { return integer_variable("CUDA_MODEL_PEER_ACCESS", 1) != 0; }

std::vector<int> visible_devices() {
  const int present = std::min(integer_variable("CUDA_MODEL_DEVICES", 2), kMaxDevices);
  std::vector<int> devices;
  if (const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES")) {
    for (const std::string& part : split(chosen, ',')) {
      char* end = nullptr;
      const long index = std::strtol(part.c_str(), &end, 10);
      // As NVIDIA's driver does: what follows the first invalid index is not visible.
      if (part.empty() || *end != '\0' || index < 0 || index >= present) break;
      devices.push_back(static_cast<int>(index));
    }
    return devices;
  }
  for (int i = 0; i < present; ++i) devices.push_back(i);
  return devices;
}

/// By the names of functions, which are literals.
static std::map<std::string_view, long>& calls_of_thread() {
  static thread_local std::map<std::string_view, long> calls;
  return calls;
}

void count_call(const char* function) { ++calls_of_thread()[function]; }

long cuda_model_calls(const char* function) {
  const auto found = calls_of_thread().find(function);
  return found == calls_of_thread().end() ? 0 : found->second;
}

Fault take_fault(const char* function) {
  count_call(function);
  static auto& mutex = *new std::mutex;
  static auto& planted = *new std::string;
  static int calls = 0;
  const std::string text = variable("CUDA_MODEL_FAULT");
  if (text.empty()) return {};
  const auto parts = split(text, ':');
  if (parts.size() < 2 || parts.size() > 4 || (parts.size() == 4 && parts[3] != "async")) {
    die("CUDA_MODEL_FAULT is '" + text + "', expected function:code[:nth[:async]]");
  }
  if (parts[0] != function) return {};
  const std::lock_guard lock(mutex);
  if (planted != text) {
    planted = text;
    calls = 0;
  }
  const int nth = parts.size() > 2 ? to_integer("CUDA_MODEL_FAULT", parts[2]) : 1;
  if (++calls != nth && nth != 0) return {};
  return {to_integer("CUDA_MODEL_FAULT", parts[1]), parts.size() == 4};
}

}  // namespace cuda_model
