// The layout of grouped weights, which grouped.h multiplies.
//
// A block of 16 outputs is one stream of chunks. Without offsets, a chunk has the weights of two groups, then their
// scales [2][16]; if the number of groups is odd, the last chunk has zeros in place of its second group. With offsets,
// a chunk has the weights of one group, then its scales [16] and its offsets [16]. So a chunk is a whole number of
// cache lines. Scales and offsets are float16.
//
// A float of 4 bits (e2m1) is a sign, 2 bits of exponent and 1 bit of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
// negatives. Twice these values are integers from -12 to 12. Products use kFloatIntegers instead of the 4 bits: these
// integers plus 12. So `zero` is 12, and the scale of a group is half of the scale of its floats.
//
// Weights of 8 bits are [inputs / 4][16][4]. Weights of 4 bits are [inputs / 8][16][4] bytes: byte j of step i has
// input 8 i + j in its low half and input 8 i + 4 + j in its high half. Weights of 6 bits are [inputs / 16][3][16][4]
// bytes: the lower 6 bits of byte j of vector v of step i are input 16 i + 4 v + j. The upper 2 bits of the bytes j of
// the three vectors are bits 4 and 5, 2 and 3, 0 and 1 of input 16 i + 12 + j.

#pragma once

#include <stdint.h>

#include "rayloom_cpu.h"

alignas(16) constexpr uint8_t kFloatIntegers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct GroupedLayout {
    int64_t num_inputs;
    int64_t bits;
    int64_t group_size;  // 32, 64 or 128; 16 with 6 bits
    bool has_offsets;    // never with 6 bits

    int64_t num_groups() const { return num_inputs / group_size; }
    int64_t chunk_groups() const { return has_offsets ? 1 : 2; }
    int64_t group_bytes() const { return group_size * bits * 2; }  // weights of a group
    int64_t chunk_bytes() const { return chunk_groups() * group_bytes() + 64; }
    int64_t block_bytes() const { return (num_groups() + chunk_groups() - 1) / chunk_groups() * chunk_bytes(); }
    // Byte offsets of a group's weights, scales and offsets in a block of 16 outputs.
    int64_t weights_at(int64_t group) const {
        return group / chunk_groups() * chunk_bytes() + group % chunk_groups() * group_bytes();
    }
    int64_t scales_at(int64_t group) const {
        const int64_t chunk = group / chunk_groups() * chunk_bytes();
        return chunk + chunk_groups() * group_bytes() + group % chunk_groups() * 32;
    }
    int64_t offsets_at(int64_t group) const { return scales_at(group) + 32; }
};

// Returns the layout of a grouped matrix.
inline GroupedLayout grouped_layout(const rl_groups& groups, int64_t num_inputs) {
    return {num_inputs, groups.bits, groups.size, groups.has_offsets != 0};
}

// Packs one block of 16 outputs. `weights` [num_outputs][num_inputs]: a byte each. `scales` and `offsets`
// [num_outputs][num_inputs / group_size]: float16; offsets may be null. Outputs behind the last become zeros.
void pack_grouped_block(const GroupedLayout& layout, const uint8_t* weights, const uint16_t* scales,
                        const uint16_t* offsets, void* packed, int64_t num_outputs, int64_t block);

// Writes row `id` of a packed matrix to `out`, as float32.
void embed_grouped(const rl_linear& matrix, int64_t id, float* out);
