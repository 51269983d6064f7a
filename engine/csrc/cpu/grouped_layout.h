// The layout of grouped weights, which grouped.h multiplies.
//
// A block of 16 outputs has its weights, then its scales [K / group_size][16] and its offsets in the same shape, both in
// float16. Weights of 8 bits are [K / 4][16][4]. Weights of 4 bits are [K / 8][16][4] bytes: byte j of step i has input
// 8 i + j in its low half and input 8 i + 4 + j in its high half.

#pragma once

#include <stdint.h>

#include "rayloom_cpu.h"

struct GroupedLayout {
    int64_t num_inputs;
    int64_t bits;
    int64_t group_size;  // 32, 64 or 128
    bool has_offsets;

    int64_t scales_at() const { return num_inputs * bits * 2; }
    int64_t offsets_at() const { return scales_at() + num_inputs / group_size * 32; }
    int64_t block_bytes() const { return scales_at() + num_inputs / group_size * (has_offsets ? 64 : 32); }
    int shift() const { return group_size == 32 ? 0 : group_size == 64 ? 1 : 2; }
};

// Returns the layout of a grouped matrix.
inline GroupedLayout grouped_layout(const rl_groups& groups, int64_t num_inputs) {
    return {num_inputs, groups.bits, groups.size, groups.has_offsets != 0};
}

// Packs one block of 16 outputs. `weights` [num_outputs][num_inputs]: a byte each. `scales` and `offsets`
// [num_outputs][num_inputs / group_size]: float16; offsets may be null. Outputs behind the last become zeros.
void pack_grouped_block(const GroupedLayout& layout, const uint8_t* weights, const uint16_t* scales,
                        const uint16_t* offsets, void* packed, int64_t num_outputs, int64_t block);

// Row `id` of a packed matrix, as float32.
void embed_grouped(const rl_linear& matrix, int64_t id, float* out);
