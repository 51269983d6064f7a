// The MLP of a layer with experts. For each token, the router selects some experts, which are gated MLPs. The token's
// output is the weighted sum of the outputs of these experts and of the shared expert.
//
// The pairs of a token and one of its experts are sorted by expert, then by token. So each expert multiplies all of its
// rows at once. A phase of the step is divided into pieces of work, and every thread computes the number of pieces for
// itself. This number must not depend on the router's selection: when a late thread computes the number, the tables may
// already have the selection of the next layer.

#pragma once

#include <stdint.h>

#include "arena.h"
#include "rayloom_cpu.h"

class PhaseClock;
struct Kernels;
struct Step;

// Buffers of a step for its layers with experts. E: the number of experts from which the router selects. K: the number
// of experts that the router selects for a token. P: the number of pairs, T * K, plus T if there is a shared expert.
struct ExpertBuffers {
    float* logits;      // [T][E + shared] the router's outputs; for the shared expert, its weight instead of the output
    int32_t* selected;  // [T][K]
    float* weights;     // [T][K]
    // The token, the expert and the expert's weight of each pair; the pairs are sorted.
    int32_t* tokens;   // [P]
    int32_t* experts;  // [P]
    float* factors;    // [P]
    int32_t* starts;   // [E + shared + 1] the first pair of each expert, then the number of pairs
    int32_t* active;   // [E + shared] the experts that have pairs, ascending
    int32_t* num_active;
    char* rows;            // [P] inputs of gate and up
    char* gated;           // [P] gated products, of the operand type
    char* quantised_rows;  // [P] `gated` in quantised form, if a matrix is quantised

    // Returns null if no layer has experts.
    static const ExpertBuffers* make(const rl_model& model, int64_t num_tokens, const Kernels& kernels, Arena& arena);
};

// Adds the experts' outputs for the normalised tokens of a step to the residual stream, or stores them for a sum over
// ranks. Uses phases 1 to 8 of the half layer.
void run_experts(const Step& step, int half, PhaseClock& clock);
