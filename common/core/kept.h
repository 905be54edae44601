#pragma once
// What queued tasks keep alive together.

#include <atomic>
#include <utility>

namespace lockstep {

/// A value that lives as long as one of the copies, on whatever thread. As std::shared_ptr, but the
/// count of copies is no order between threads: with a shared_ptr's, a host that copies the next
/// task's reference would be behind all that earlier tasks did before they dropped theirs, and
/// ThreadSanitizer would not see that a stream does not wait for them.
template <class T>
class Kept {
 public:
  explicit Kept(T value) : block_(new Block{std::move(value)}) {}
  Kept(const Kept& other) : block_(other.block_) {
    block_->copies.fetch_add(1, std::memory_order_relaxed);
  }
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    if (block_->copies.fetch_sub(1, std::memory_order_release) > 1) return;
    block_->copies.load(std::memory_order_acquire);  // the last one is behind all others
    delete block_;
  }
  T& operator*() const { return block_->value; }
  T* operator->() const { return &block_->value; }

 private:
  struct Block {
    T value;
    std::atomic<int> copies{1};
  };
  Block* block_;
};

}  // namespace lockstep
