#include "common/rendezvous/store_protocol.h"

#include <cmath>
#include <limits>

#include "common/sockets/wire.h"

namespace lockstep {
namespace {

constexpr double kTicksPerSecond = 1e6;

void require_end(const WireReader& in, const char* what) {
  require(in.at_end(), "{}: bytes after its end", what);
}

int small_number(WireReader& in, const char* what) {
  const uint64_t value = in.number(4);
  require(value <= uint64_t{std::numeric_limits<int>::max()}, "{}: {} is too large", what, value);
  return static_cast<int>(value);
}

}  // namespace

std::string Reply::value() const {
  if (kind == Kind::bad_input) throw BadInput(text);
  if (kind == Kind::peer_lost) throw PeerLost(text);
  return text;
}

std::string encode(const Hello& hello) {
  std::string out;
  put_number(out, static_cast<uint64_t>(hello.world_size), 4);
  put_number(out, static_cast<uint64_t>(hello.rank), 4);
  put_text(out, hello.run_id);
  return out;
}

Hello decode_hello(std::string_view bytes) {
  WireReader in(bytes);
  Hello hello;
  hello.world_size = small_number(in, "world size");
  hello.rank = small_number(in, "rank");
  hello.run_id = in.text();
  require_end(in, "hello");
  return hello;
}

std::string encode(const Request& request) {
  std::string out;
  put_number(out, static_cast<uint64_t>(request.op), 1);
  put_text(out, request.key);
  put_text(out, request.value);
  put_number(out, static_cast<uint64_t>(request.number), 8);
  put_number(out, static_cast<uint64_t>(std::llround(request.seconds * kTicksPerSecond)), 8);
  return out;
}

Request decode_request(std::string_view bytes) {
  WireReader in(bytes);
  const uint64_t op = in.number(1);
  require(op <= uint64_t(Request::Op::leave), "request: unknown operation {}", op);
  Request request{.op = static_cast<Request::Op>(op)};
  request.key = in.text();
  request.value = in.text();
  request.number = static_cast<int64_t>(in.number(8));
  request.seconds = static_cast<double>(in.number(8)) / kTicksPerSecond;
  require_end(in, "request");
  return request;
}

std::string encode(const Reply& reply) {
  std::string out;
  put_number(out, static_cast<uint64_t>(reply.kind), 1);
  put_text(out, reply.text);
  return out;
}

Reply decode_reply(std::string_view bytes) {
  WireReader in(bytes);
  const uint64_t kind = in.number(1);
  require(kind <= uint64_t(Reply::Kind::peer_lost), "reply: unknown kind {}", kind);
  Reply reply{.kind = static_cast<Reply::Kind>(kind), .text = in.text()};
  require_end(in, "reply");
  return reply;
}

std::string encode(const std::vector<int>& ranks) {
  std::string out;
  for (const int rank : ranks) put_number(out, static_cast<uint64_t>(rank), 4);
  return out;
}

std::vector<int> decode_ranks(std::string_view bytes) {
  WireReader in(bytes);
  std::vector<int> ranks;
  while (!in.at_end()) ranks.push_back(small_number(in, "rank"));
  return ranks;
}

std::string frame(std::string_view payload) {
  std::string out;
  put_text(out, payload);
  return out;
}

size_t frame_length(std::string_view head, size_t most) {
  const uint64_t length = WireReader(head).number(kFrameHead);
  require(length <= most, "a frame of {} bytes, expected at most {}", length, most);
  return length;
}

std::optional<std::string> take_frame(std::string& bytes, size_t most) {
  if (bytes.size() < kFrameHead) return std::nullopt;
  const size_t length = frame_length(bytes, most);
  if (bytes.size() < kFrameHead + length) return std::nullopt;
  std::string payload = bytes.substr(kFrameHead, length);
  bytes.erase(0, kFrameHead + length);
  return payload;
}

}  // namespace lockstep
