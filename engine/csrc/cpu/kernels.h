// Kernels: the table of one instruction set's functions for one type of weights, and the arguments of these functions.
//
// Each function computes one piece of an operation, on one thread. step.cpp cuts operations into pieces.

#pragma once

#include <stdint.h>

#include "rayloom_cpu.h"

// A block of the KV cache has this many positions: one for each lane of a product (kv_layout.h).
constexpr int64_t kBlockSize = 16;
// Attention sums over segments of this many positions, counted from the start of the sequence (attention.h).
constexpr int64_t kSegment = 256;
// An attention tile has at most this many rows. A tile belongs to one key/value head. It has a row for each pair of a
// query token and a query head of this key/value head.
constexpr int64_t kTileRows = 48;

struct LinearTask {
    const void* x;  // [num_rows][num_inputs], the operand type
    int64_t num_rows;
    const void* weight;
    // Memory to prefetch, or null. When a kernel of dense weights reads at an offset of `weight`, it prefetches at the
    // same offset of `next_weight`.
    const void* next_weight;
    const float* scales;  // [num_outputs] of int8 or grouped weights, or null
    const float* bias;    // [num_outputs], or null
    int64_t num_inputs;
    int64_t num_outputs;
    float* out;  // [num_rows][out_stride]
    int64_t out_stride;
    // Only for gate_linear: its output [num_rows][num_outputs / 2], of the operand type, and the formula of its elements.
    void* gated;
    rl_activation activation;
    rl_groups groups;
    // Only for scatter_linear, for each row of x: the row of `out` to which its product is added, and its factor.
    const int32_t* out_rows;
    const float* factors;
};

// Products for blocks [first, end) of 16 outputs.
struct LinearKernels {
    // y = x W^T + bias
    void (*linear)(const LinearTask& task, int64_t first, int64_t end);
    // As linear, but adds y to `out`.
    void (*add_linear)(const LinearTask& task, int64_t first, int64_t end);
    // gated = the activation of gate and up, for blocks [first, end) of the gate. The first half of W's outputs is the
    // gate, the second half is up.
    void (*gate_linear)(const LinearTask& task, int64_t first, int64_t end);
    // For each row of x: adds factor * y to the row of `out` that out_rows gives. num_outputs is a multiple of 16.
    void (*scatter_linear)(const LinearTask& task, int64_t first, int64_t end);
};

struct RotaryTask {
    const float* qkv;  // [(H + 2 K) d] of one token
    const float* cosines;
    const float* sines;
    const float* q_norm;
    const float* k_norm;
    float eps;
    bool has_wide_norms;  // q_norm normalises all query heads together, and k_norm all key heads
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t rotary_dim;
    void* query;  // [H][d], the operand type
    void* pages;
    int64_t slot;  // block id * 16 + offset
};

// Some query tokens of one sequence with all query heads of one key/value head.
struct AttentionTask {
    const void* query;  // [tokens][H][d] from the first token of the tile on
    int64_t num_tokens;
    int64_t first_position;  // position of the first token
    int64_t window;          // 0: all
    const int64_t* block_table;
    int64_t end_block;  // index in the block table: the task reads only blocks before it
    const void* pages;
    int64_t kv_head;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    float scale;
    float cap;           // 0: none
    const float* sinks;  // [H], or null: no head has a sink
    void* out;  // [tokens][H][d], the operand type
    // Results of segments, only for tiles that are cut into segments: values [rows][d], highest [rows], total [rows].
    // The row of a query is token * (H / K) + head, where `head` counts the H / K query heads of the tile from 0.
    float* values;
    float* highest;
    float* total;
};

struct Kernels {
    int32_t operand_bytes;
    void (*pack_weight)(const void* weight, void* packed, int64_t num_outputs, int64_t num_inputs);
    void (*embed)(const void* packed, int64_t width, int64_t id, float* out);
    LinearKernels dense;
    // For quantised weights. The task's `x` holds rows that quantise_row has written.
    LinearKernels int8;
    LinearKernels grouped4;  // grouped weights of 4 bits, integers
    LinearKernels grouped4_floats;
    LinearKernels grouped6;
    LinearKernels grouped8;
    // Packs one block of 16 rows.
    void (*pack_int8_block)(const void* weight, void* packed, float* scales, int64_t num_outputs, int64_t num_inputs,
                            int64_t block);
    void (*embed_int8)(const void* packed, const float* scales, int64_t width, int64_t id, float* out);
    void (*quantise_row)(const void* x, int64_t num_inputs, void* quantised);
    int64_t (*quantised_row_bytes)(int64_t num_inputs);
    // x [count] = factor * values, in the operand type; count is a multiple of 16.
    void (*scale)(const float* values, float factor, int64_t count, void* x);
    // gated = the activation of gate and up, in the operand type, for blocks [first, end) of a row [2 * width] of gate_up.
    void (*gate)(const float* gate_up, int64_t width, int64_t first, int64_t end, const rl_activation& activation,
                 void* gated);
    // x [width] = weight * row / sqrt(mean(row^2) + eps), or x = row if there is no weight
    void (*rms_norm)(const float* row, const float* weight, float eps, int64_t width, void* x);
    // residual [width] += scale * update, or scale * weight * update / sqrt(mean(update^2) + eps) with a weight
    void (*add_row)(const float* update, const float* weight, float eps, float scale, int64_t width, float* residual);
    // Selects the experts of a token, and computes their weights: see routing.h.
    void (*route)(const float* logits, int64_t count, int64_t num_selected, bool normalises, int32_t* experts,
                  float* weights);
    // x = 1 / (1 + exp(-x)) of one number.
    void (*sigmoid)(float* x);
    // Rotates the queries and keys of a token, and writes keys and values into the pages.
    void (*rotate_and_write)(const RotaryTask& task);
    // Computes the attention of a tile over the whole context.
    void (*attend)(const AttentionTask& task);
    // Computes the attention of a tile over one segment; `combine` then combines the segments.
    void (*attend_segment)(const AttentionTask& task, int64_t segment);
    // Combines the results of attend_segment for segments 0 to num_segments - 1. The rows of segment i begin at row
    // i * (rows of the tile) of the task's values, highest and total.
    void (*combine)(const AttentionTask& task, int64_t num_segments);
};

extern const Kernels kAvx2Float32;
extern const Kernels kAvx2BFloat16;
extern const Kernels kAvx512Float32;
extern const Kernels kAvx512BFloat16;
