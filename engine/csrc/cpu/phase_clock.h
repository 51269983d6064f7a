// PhaseClock: measures phases. add_to adds the time since the previous call of add_to to the seconds of a phase.

#pragma once

#include <time.h>

class PhaseClock {
public:
    // `seconds` [RL_NUM_PHASES], or null: nothing is measured.
    explicit PhaseClock(double* seconds) : seconds_(seconds), last_(seconds == nullptr ? 0.0 : now()) {}

    void add_to(int phase) {
        if (seconds_ != nullptr) {
            const double time = now();
            seconds_[phase] += time - last_;
            last_ = time;
        }
    }

private:
    static double now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
    }

    double* seconds_;
    double last_;
};
