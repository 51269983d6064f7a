// Arena: the memory of a step's buffers. The memory is kept from step to step, and grows to the size that the largest
// step needed.

#pragma once

#include <new>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

class Arena {
public:
    // Invalidates all buffers. Enlarges the arena if the buffers did not fit into it.
    void clear() {
        if (needed_ > size_) {
            release();
            map(needed_);
        }
        used_ = 0;
        needed_ = 0;
        for (int i = 0; i < num_extra_; i++) {
            free(extra_[i]);
        }
        num_extra_ = 0;
    }

    // Returns memory for `count` elements, valid until the next clear. Its content is undefined. Throws std::bad_alloc.
    template <class T>
    T* take(int64_t count) {
        const int64_t bytes = (count * (int64_t)sizeof(T) + 127) / 64 * 64;
        needed_ += bytes;
        if (used_ + bytes <= size_) {
            T* start = reinterpret_cast<T*>(memory_ + used_);
            used_ += bytes;
            return start;
        }
        // The arena is full, as in the first step of this size. This buffer is allocated outside of the arena, and the
        // next clear enlarges the arena for all buffers.
        void* start = num_extra_ < kMaxExtra ? aligned_alloc(64, (size_t)bytes) : nullptr;
        if (start == nullptr) {
            throw std::bad_alloc();
        }
        extra_[num_extra_++] = start;
        return static_cast<T*>(start);
    }

    // Bytes of all buffers since the last clear.
    int64_t needed() const { return needed_; }

private:
    static constexpr int kMaxExtra = 64;

    void map(int64_t bytes) {
        void* start = mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) {
            return;
        }
        madvise(start, (size_t)bytes, MADV_HUGEPAGE);
        memory_ = static_cast<char*>(start);
        size_ = bytes;
    }

    void release() {
        if (memory_ != nullptr) {
            munmap(memory_, (size_t)size_);
        }
        memory_ = nullptr;
        size_ = 0;
    }

    char* memory_ = nullptr;
    int64_t size_ = 0;
    int64_t used_ = 0;
    int64_t needed_ = 0;
    void* extra_[kMaxExtra];
    int num_extra_ = 0;
};
