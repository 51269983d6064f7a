// ThreadPool: threads that run one function together.
//
// The function's work is cut into phases, and each phase into pieces. A thread that finds no piece left waits until the
// other threads have finished their pieces. It does not wait for threads that have not begun: on a busy machine, a
// thread may get no CPU for milliseconds, and the other threads then compute all pieces. A waiting thread spins for
// about 20 microseconds, then sleeps on a futex. A longer spin could take the CPU from the thread for which the waiting
// thread waits.

#pragma once

#include <atomic>
#include <pthread.h>
#include <stdint.h>

// Numbers of taken and finished pieces of a phase. Both begin at 0, and each run of a phase has counters of its own.
struct alignas(64) PhaseCounters {
    std::atomic<uint32_t> taken{0};
    std::atomic<uint32_t> finished{0};
};

class ThreadPool {
public:
    using Work = void (*)(void* context, int thread);

    // Starts or stops threads so that `num_threads` run, the caller's included. Returns 0, or an errno.
    int resize(int num_threads, bool pin);

    // Calls work(context, thread) in the caller as thread 0, and in each other thread that wakes up before the caller's
    // call of `work` returns. Returns when all calls of `work` have returned.
    void run(Work work, void* context);

    // Takes those of the `num_pieces` pieces that no other thread takes, and calls piece(index) for each of them.
    // Returns when all pieces are finished. Every thread of `run` must call `share` for the same phases in the same
    // order.
    template <class Piece>
    void share(PhaseCounters& counters, int64_t num_pieces, Piece piece) {
        const uint32_t end = (uint32_t)num_pieces;
        while (counters.taken.load(std::memory_order_relaxed) < end) {
            const uint32_t index = counters.taken.fetch_add(1, std::memory_order_relaxed);
            if (index >= end) {
                break;
            }
            piece((int64_t)index);
            if (counters.finished.fetch_add(1, std::memory_order_seq_cst) + 1 == end) {
                wake(counters.finished);
            }
        }
        wait_for(counters.finished, end);
    }

    int size() const { return num_threads_; }

private:
    struct Argument {
        ThreadPool* pool;
        int index;
        uint32_t seen;
    };

    static void* main(void* argument);
    void stop();

    // Wakes the threads that sleep until `value` changes. The caller must have changed `value` by a sequentially
    // consistent operation.
    void wake(std::atomic<uint32_t>& value);
    // Returns when `value` is no longer equal to `seen`.
    void wait_for_change(std::atomic<uint32_t>& value, uint32_t seen);
    // Returns when `value` is equal to `target`.
    void wait_for(std::atomic<uint32_t>& value, uint32_t target);

    int num_threads_ = 1;
    bool is_pinned_ = false;
    pthread_t* threads_ = nullptr;
    Argument* arguments_ = nullptr;
    Work work_ = nullptr;
    void* context_ = nullptr;
    std::atomic<bool> is_stopping_{false};
    std::atomic<bool> is_open_{false};                // threads may begin the current work
    alignas(64) std::atomic<uint32_t> started_{0};    // number of calls of run and stop
    alignas(64) std::atomic<uint32_t> num_inside_{0};  // threads in `work`, without the caller
    alignas(64) std::atomic<uint32_t> num_sleepers_{0};
};
