#include "files.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <memory>
#include <numeric>

namespace kvtier {
namespace {

constexpr unsigned kDepth = 32;
// Several reads of this size at once reach the speed of a disk; a single large one does not. A file that grows takes
// one write at a time, so writes are large.
constexpr size_t kPieceOfRead = size_t{512} << 10, kPieceOfWrite = size_t{32} << 20;

// The part of a move that one request asks for.
struct Piece {
  size_t move;
  size_t offset;
  size_t nbytes;
};

class Mapping {
 public:
  Mapping(int fd, size_t nbytes, off_t what)
      : nbytes_(nbytes), at_(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what)) {}
  ~Mapping() {
    if (*this) munmap(at_, nbytes_);
  }
  Mapping(const Mapping&) = delete;

  explicit operator bool() const { return at_ != MAP_FAILED; }
  template <typename T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(at_) + offset);
  }

 private:
  size_t nbytes_;
  void* at_;
};

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

// The two queues of an io_uring, used by one thread. What the kernel also reads or writes is accessed with acquire and
// release.
class Ring {
 public:
  static std::unique_ptr<Ring> open() {
    io_uring_params params{};
    const int fd = static_cast<int>(syscall(__NR_io_uring_setup, kDepth, &params));
    if (fd < 0) return nullptr;
    auto ring = std::unique_ptr<Ring>(new Ring(fd, params));
    // Linux 5.6 has all three: plain reads and writes, and no completion is ever dropped.
    constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
    return (params.features & kNeeded) == kNeeded && ring->queues_ && ring->entries_ ? std::move(ring) : nullptr;
  }

  // `tag` comes back with the result.
  void push(const Move& move, const Piece& piece, Direction direction, unsigned tag) {
    const unsigned tail = *sq_tail_, index = tail & sq_mask_;
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index] = {};
    entry.opcode = direction == Direction::kRead ? IORING_OP_READ : IORING_OP_WRITE;
    entry.fd = move.fd;
    entry.off = move.at + piece.offset;
    entry.addr = reinterpret_cast<uintptr_t>(move.memory + piece.offset);
    entry.len = static_cast<unsigned>(piece.nbytes);
    entry.user_data = tag;
    sq_array_[index] = index;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    unsubmitted_++;
  }

  // Submits what was pushed and waits for at least one result; calls on_result(tag, result) for each.
  template <typename OnResult>
  void turn(OnResult on_result) {
    const long taken = syscall(__NR_io_uring_enter, ring_.fd, unsubmitted_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0) {
      unsubmitted_ -= static_cast<unsigned>(taken);
    } else if (errno != EINTR) {  // short of memory, for instance; requests under way must be waited for
      const timespec moment{0, 1'000'000};
      nanosleep(&moment, nullptr);
    }
    unsigned head = *cq_head_;
    for (; head != std::atomic_ref(*cq_tail_).load(std::memory_order_acquire); head++) {
      const io_uring_cqe& event = events_[head & cq_mask_];
      on_result(static_cast<unsigned>(event.user_data), event.res);
    }
    std::atomic_ref(*cq_head_).store(head, std::memory_order_release);
  }

 private:
  Ring(int fd, const io_uring_params& params)
      : ring_{fd},
        queues_(fd,
                std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                 params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe)),
                IORING_OFF_SQ_RING),
        entries_(fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
    if (!queues_) return;
    sq_tail_ = queues_.at<unsigned>(params.sq_off.tail);
    sq_mask_ = *queues_.at<unsigned>(params.sq_off.ring_mask);
    sq_array_ = queues_.at<unsigned>(params.sq_off.array);
    cq_head_ = queues_.at<unsigned>(params.cq_off.head);
    cq_tail_ = queues_.at<unsigned>(params.cq_off.tail);
    cq_mask_ = *queues_.at<unsigned>(params.cq_off.ring_mask);
    events_ = queues_.at<io_uring_cqe>(params.cq_off.cqes);
  }

  Descriptor ring_;
  Mapping queues_, entries_;
  unsigned unsubmitted_ = 0;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* events_ = nullptr;
};

Ring* ring_of_this_thread() {
  thread_local const std::unique_ptr<Ring> ring = Ring::open();
  return ring.get();
}

// The outcomes of moves: the first error, or else where the file ended.
class Tally {
 public:
  explicit Tally(const std::vector<Move>& moves) : outcomes_(moves.size()) {
    for (size_t i = 0; i < moves.size(); i++) outcomes_[i] = static_cast<int64_t>(moves[i].nbytes);
  }

  // What is left to ask for after `result` came for `piece`; nothing if its nbytes are 0.
  Piece after(Piece piece, int64_t result, Direction direction) {
    int64_t& outcome = outcomes_[piece.move];
    if (result == -EINTR || result == -EAGAIN) return piece;
    if (result == 0 && direction == Direction::kWrite) result = -EIO;
    if (outcome >= 0 && result <= 0) outcome = result ? result : std::min(outcome, static_cast<int64_t>(piece.offset));
    const size_t done = result > 0 ? static_cast<size_t>(result) : piece.nbytes;
    return {piece.move, piece.offset + done, piece.nbytes - done};
  }

  bool failed(size_t move) const { return outcomes_[move] < 0; }
  std::vector<int64_t> outcomes() { return std::move(outcomes_); }

 private:
  std::vector<int64_t> outcomes_;
};

std::vector<Piece> pieces_of(const std::vector<Move>& moves, Direction direction) {
  const size_t most = direction == Direction::kRead ? kPieceOfRead : kPieceOfWrite;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < moves.size(); i++)
    for (size_t at = 0; at < moves[i].nbytes; at += most)
      pieces.push_back({i, at, std::min(most, moves[i].nbytes - at)});
  return pieces;
}

}  // namespace

std::optional<std::vector<int64_t>> move_all(const std::vector<Move>& moves, Direction direction) {
  Ring* ring = ring_of_this_thread();
  if (!ring) return std::nullopt;
  Tally tally(moves);
  std::vector<Piece> todo = pieces_of(moves, direction);
  std::reverse(todo.begin(), todo.end());
  Piece under_way[kDepth];
  std::vector<unsigned> free(kDepth);
  std::iota(free.begin(), free.end(), 0);
  for (;;) {
    for (; !todo.empty() && !free.empty(); todo.pop_back()) {
      if (tally.failed(todo.back().move)) continue;
      under_way[free.back()] = todo.back();
      ring->push(moves[todo.back().move], todo.back(), direction, free.back());
      free.pop_back();
    }
    if (free.size() == kDepth) return tally.outcomes();
    ring->turn([&](unsigned tag, int result) {
      const Piece rest = tally.after(under_way[tag], result, direction);
      if (rest.nbytes) todo.push_back(rest);
      free.push_back(tag);
    });
  }
}

bool ring_works() { return ring_of_this_thread() != nullptr; }

}  // namespace kvtier
