// ThreadPool: threads that run one function together and meet at barriers inside it.
//
// A thread that waits spins for about 20 microseconds, then sleeps on a futex. Longer spinning would take the CPU from
// the very thread that it waits for, if the CPUs have other work.

#pragma once

#include <atomic>
#include <pthread.h>
#include <stdint.h>

class ThreadPool {
public:
    using Work = void (*)(void* context, int thread);

    // Starts or stops threads so that `num_threads` run, the caller's included. Returns 0, or an errno.
    int resize(int num_threads, bool pin);

    // Runs work(context, thread) on all threads, the caller as thread 0, and returns when all are done.
    void run(Work work, void* context);

    // Waits inside `work` until all threads are here.
    void meet();

    int size() const { return num_threads_; }

private:
    struct Argument {
        ThreadPool* pool;
        int index;
        uint32_t seen;
    };

    // A counter that threads wait for.
    struct alignas(64) Signal {
        std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> num_sleepers{0};
    };

    static void* main(void* argument);
    static void change(Signal& signal);
    static void wait_for_change(Signal& signal, uint32_t seen);
    void stop();

    int num_threads_ = 1;
    bool is_pinned_ = false;
    pthread_t* threads_ = nullptr;
    Argument* arguments_ = nullptr;
    bool is_stopping_ = false;
    Work work_ = nullptr;
    void* context_ = nullptr;
    Signal started_;                               // number of calls of run
    Signal passed_;                                // number of barriers that were passed
    alignas(64) std::atomic<uint32_t> arrived_{0};  // threads at the current barrier
};
