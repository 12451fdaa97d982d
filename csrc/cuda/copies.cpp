#include "copies.h"

#include <algorithm>

namespace kvtier {

bool Copies::add(uint64_t host, uint64_t on_device, uint64_t nbytes) {
  while (nbytes) {
    const uint64_t left = pieces_.stride - (host - pieces_.base) % pieces_.stride;
    const uint64_t some = std::min(nbytes, left);
    if (!append(host, on_device, some)) return false;
    host += some;
    on_device += some;
    nbytes -= some;
  }
  return true;
}

bool Copies::append(uint64_t host, uint64_t on_device, uint64_t nbytes) {
  const uint64_t to = to_host_ ? host : on_device, from = to_host_ ? on_device : host;
  nbytes_ += nbytes;
  if (count_ && (host - pieces_.base) % pieces_.stride) {
    const size_t last = count_ - 1;
    if (to_[last] + sizes_[last] == to && from_[last] + sizes_[last] == from) {
      sizes_[last] += nbytes;
      return true;
    }
  }
  if (count_ == kMost) {
    nbytes_ -= nbytes;
    if (!flush()) return false;
    nbytes_ = nbytes;
  }
  to_[count_] = to;
  from_[count_] = from;
  sizes_[count_++] = nbytes;
  return true;
}

bool Copies::flush() {
  if (!count_) return true;
  const bool batches = count_ > 1 && device_.takes_batches();
  const Result result = batches ? enqueue_batch() : kNotSupported;
  // What of a refused call was enqueued is enqueued again: the same bytes to the same place. Other errors are of the
  // device, not of the call.
  if (result == kInvalidValue || result == kNotSupported) {
    if (!enqueue_each()) return false;
    if (batches) device_.refuse_batches();  // the copies were right, so it was the call that was refused
  } else if (result != kSuccess) {
    return device_.must(result, "enqueue a batch of copies");
  }
  count_ = 0;
  nbytes_ = 0;
  return true;
}

Result Copies::enqueue_batch() const {
  CopyAttributes attributes = {};
  // Page-locked slots do not change while they are loaded; what a store reads, the stream has just written.
  attributes.source_order = to_host_ ? kInStreamOrder : kInAnyOrder;
  attributes.flags = nbytes_ / count_ <= kShort ? kPreferOverlap : 0;
  const size_t first = 0;
  size_t failed = 0;
  return device_.driver().copy_batch(to_, from_, sizes_, count_, &attributes, &first, 1, &failed, stream_);
}

bool Copies::enqueue_each() const {
  for (size_t i = 0; i < count_; ++i) {
    const bool done =
        to_host_ ? device_.call(&Driver::copy_to_host, "copy to the host", reinterpret_cast<void*>(to_[i]), from_[i],
                                sizes_[i], stream_)
                 : device_.call(&Driver::copy_to_device, "copy to the device", to_[i],
                                reinterpret_cast<const void*>(from_[i]), sizes_[i], stream_);
    if (!done) return false;
  }
  return true;
}

}  // namespace kvtier
