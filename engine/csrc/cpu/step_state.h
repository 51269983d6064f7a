// Step: the data that the threads of one step share. Phase: a part of a half layer, cut into pieces for the threads.

#pragma once

#include <stdint.h>

#include "adapters.h"
#include "attention_plan.h"
#include "experts.h"
#include "kernels.h"
#include "library.h"
#include "rayloom_cpu.h"

// The highest number of phases of a half layer. Attention has 12: norm, product (3 phases), rotation, choice of rows,
// attention (2), product (3), sum with the residual stream.
constexpr int kMaxPhases = 12;

// The data that the threads of a step share.
struct Step {
    const Kernels* kernels;
    ThreadPool* pool;
    const rl_model* model;
    const rl_batch* batch;
    int first_half;
    int end_half;
    float* partial;
    volatile int64_t* progress;
    const AttentionPlan* attention;
    PhaseCounters* counters;         // [halves][kMaxPhases]
    void* normed;                    // [T][D], the operand type
    float* qkv;                      // [T][(H + 2 K) d]
    void* query;                     // [T][H][d], the operand type
    void* attended;                  // [T][H][d], the operand type
    void* gated;                     // [T][I], the operand type
    float* update;                   // [T][D] output of a half layer; null: products are added to the residual stream
    void* quantised;                 // [T] quantised rows, as wide as the widest input, if a matrix is quantised
    const ExpertBuffers* experts;    // null: no layer has experts
    const AdapterRows* adapters;     // null: no row has an adapter
    float* gate_up;                  // [T][2 I], if there are adapters
    const Step* last;                // step for the wanted rows of the last layer (wanted_rows.h); null: all are wanted
};

// One phase of a half layer. The threads divide its pieces among themselves.
class Phase {
public:
    Phase(const Step& step, int half, int phase)
        : counters_(step.counters[(half - step.first_half) * kMaxPhases + phase]), pool_(*step.pool) {}

    template <class Piece>
    void run(int64_t num_pieces, Piece piece) {
        pool_.share(counters_, num_pieces, piece);
    }

private:
    PhaseCounters& counters_;
    ThreadPool& pool_;
};
