#pragma once
// What ranks and the store say to each other.
//
// Both have proven the job's key to each other before (handshake.h). Frames follow, each after its
// length. A rank introduces itself by a Hello, which a Reply answers; then every Request is
// answered by one Reply, some only after a while. The last request, leave, gets no reply.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

constexpr const char* kStoreMeeting = "store";  // where ranks prove their key to it (handshake.h)
constexpr size_t kLargestValue = size_t{1} << 20;
constexpr size_t kLargestFrame = kLargestValue + 4096;
constexpr size_t kLargestHello = 1024;

struct Hello {
  int world_size = 1;
  int rank = 0;
  std::string run_id{};  // of the job: ranks of another job are turned away
};

struct Request {
  enum class Op : uint8_t { set, get, add, check, wait_for_all, gone, leave };
  Op op = Op::get;
  std::string key{};
  std::string value{};  // of set
  int64_t number = 0;   // of add
  double seconds = 0;   // how long get and wait_for_all may take
};

struct Reply {
  enum class Kind : uint8_t { ok, bad_input, peer_lost };
  Kind kind = Kind::ok;
  std::string text{};  // the value, or the error
  /// The text of a reply that is ok; throws the error of any other.
  std::string value() const;
};

/// Payload of a frame.
std::string encode(const Hello& hello);
std::string encode(const Request& request);
std::string encode(const Reply& reply);
std::string encode(const std::vector<int>& ranks);
/// Throw BadInput for anything that encode() cannot have made.
Hello decode_hello(std::string_view bytes);
Request decode_request(std::string_view bytes);
Reply decode_reply(std::string_view bytes);
std::vector<int> decode_ranks(std::string_view bytes);

/// The length, then the payload.
std::string frame(std::string_view payload);
constexpr size_t kFrameHead = 4;
/// The length in a frame's first bytes. Throws BadInput if it exceeds `most`.
size_t frame_length(std::string_view head, size_t most);
/// Takes the first frame out of the bytes received; nullopt if it is not complete. Throws BadInput
/// if it is longer than `most`.
std::optional<std::string> take_frame(std::string& bytes, size_t most);

}  // namespace lockstep
