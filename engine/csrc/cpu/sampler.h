// Sampling: the choice of the next token from a row of logits, and its log-probabilities.
//
// sampler_passes.h has the passes over a row (one thread, one instruction set). sampler.cpp and logprobs.cpp combine
// them. worker/sampler.py and worker/noise.py define the results.
//
// Legend: V tokens of the vocabulary, P = V rounded up to a multiple of kBlock.

#pragma once

#include <stdint.h>

#include "rayloom_cpu.h"

// The number of tokens in a block. Arrays named `highest` have the highest value of each block.
constexpr int64_t kBlock = 64;

constexpr int64_t num_blocks_of(int64_t vocab_size) { return (vocab_size + kBlock - 1) / kBlock; }

// The first tokens of a row, ordered by descending x, and by ascending id where x is equal. They are the tokens with
// x > value, and those with x == value and id < end.
struct Prefix {
    float value;
    int64_t end;
};

struct Candidate {
    float x;
    int64_t id;
    float score;  // x + noise
};

// The passes over a row. `x` [P] is padded with -infinity.
struct SamplerPasses {
    // Writes the maximum of each block of `values` [V] to `highest` [P / kBlock]. Returns false if a value is a NaN.
    bool (*find_highest)(const float* values, int64_t vocab_size, float* highest);
    // Sets x [P] = values / divisor, and pads x. Then does the same as find_highest, with the values of x.
    bool (*divide)(const float* values, int64_t vocab_size, float divisor, float* x, float* highest);
    // Copies `values` [V] to `x`, with -infinity for tokens whose bit in `allowed` is 0.
    void (*mask)(const float* values, int64_t vocab_size, const int32_t* allowed, float* x);
    // Returns the prefix's token with the best score. `first`: any token of the prefix. If scores are equal, the first
    // token in the prefix's order wins, or with `by_id` the token with the lowest id.
    Candidate (*draw)(const float* x, int64_t padded_size, Prefix prefix, uint64_t key, Candidate first, bool by_id);
    // Returns the sum of exp(x - highest) over the prefix.
    double (*mass)(const float* x, int64_t padded_size, Prefix prefix, float highest);
    // Writes x and id of the prefix's tokens in ascending order of ids. Returns their number.
    int64_t (*collect)(const float* x, int64_t padded_size, Prefix prefix, float* values, int32_t* ids);
    // Returns the number of tokens of the prefix.
    int64_t (*count)(const float* x, int64_t padded_size, Prefix prefix);
};

extern const SamplerPasses kAvx2Sampler;
extern const SamplerPasses kAvx512Sampler;

// Memory of a thread that samples one row after the other.
struct RowBuffers {
    float* x;         // [P]
    float* highest;   // [P / kBlock]
    float* values;    // [P]
    int32_t* ids;     // [P]
    int32_t* counts;  // [V], with undefined content

    static int64_t bytes(int64_t vocab_size);
    static RowBuffers at(char* memory, int64_t vocab_size);
};

// Returns the next token of a row, or -1 if the row has a NaN or its highest logit is infinite.
int64_t sample_row(const SamplerPasses& passes, const float* logits, int64_t vocab_size, const rl_sampling& row,
                   const RowBuffers& buffers);

// Writes the log-probabilities of a row to entry `index` of `out`. Writes nothing if sample_row returns -1 for the row.
void describe_row(const SamplerPasses& passes, const float* logits, int64_t vocab_size, const rl_logprobs& out,
                  int64_t index, const RowBuffers& buffers);

// Returns the first token with the highest x. `highest`: the highest x of each block. `x` need not be padded.
Candidate most_likely(const float* x, int64_t vocab_size, const float* highest);

// Returns the prefix of the first k tokens, 0 < k <= V. Overwrites `values` and `ids` of the buffers.
Prefix first_tokens(const SamplerPasses& passes, int64_t vocab_size, int64_t k, const RowBuffers& buffers);
