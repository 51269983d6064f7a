#include "grouped_layout.h"

#include <string.h>

namespace {

float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7fff;
    if (magnitude < 0x0400) {  // zero or subnormal
        const float value = (float)magnitude * (1.0f / (1 << 24));
        return sign != 0 ? -value : value;
    }
    const uint32_t exponent = magnitude >= 0x7c00 ? 0x7f800000 : ((magnitude >> 10) + 112) << 23;
    const uint32_t bits = sign | exponent | ((magnitude & 0x3ff) << 13);
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

float half_at(const uint8_t* p) {
    uint16_t half;
    memcpy(&half, p, sizeof(half));
    return half_to_float(half);
}

// Packs `count` weights of one output into lane `lane`.
void pack_lane(const GroupedLayout& layout, const uint8_t* from, int64_t count, int64_t lane, uint8_t* to) {
    if (layout.bits == 8) {
        for (int64_t k = 0; k < count; k += 4) {
            memcpy(to + k * 16 + lane * 4, from + k, 4);
        }
        return;
    }
    if (layout.bits == 6) {
        for (int64_t k = 0; k < count; k += 16) {
            uint32_t parts[4];
            memcpy(parts, from + k, sizeof(parts));
            for (int vector = 0; vector < 3; vector++) {
                const uint32_t two_bits = (parts[3] >> (4 - 2 * vector)) & 0x03030303u;
                const uint32_t both = parts[vector] | (two_bits << 6);
                memcpy(to + k * 12 + vector * 64 + lane * 4, &both, 4);
            }
        }
        return;
    }
    for (int64_t k = 0; k < count; k += 8) {
        uint32_t low, high;
        memcpy(&low, from + k, 4);
        memcpy(&high, from + k + 4, 4);
        const uint32_t both = low | (high << 4);
        memcpy(to + k * 8 + lane * 4, &both, 4);
    }
}

// Returns weight k of lane `lane` of a group that begins at `weights`.
int weight_at(int64_t bits, const uint8_t* weights, int64_t lane, int64_t k) {
    if (bits == 8) {
        return weights[k / 4 * 64 + lane * 4 + k % 4];
    }
    if (bits == 4) {
        return (weights[k / 8 * 64 + lane * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4)) & 15;
    }
    const uint8_t* bytes = weights + k / 16 * 192 + lane * 4 + k % 4;
    const int64_t vector = k % 16 / 4;
    return vector < 3 ? bytes[vector * 64] & 63 : (bytes[0] >> 6 << 4) | (bytes[64] >> 6 << 2) | (bytes[128] >> 6);
}

}  // namespace

void pack_grouped_block(const GroupedLayout& layout, const uint8_t* weights, const uint16_t* scales,
                        const uint16_t* offsets, void* packed, int64_t num_outputs, int64_t block) {
    const int64_t num_groups = layout.num_groups();
    uint8_t* to = (uint8_t*)packed + block * layout.block_bytes();
    memset(to, 0, (size_t)layout.block_bytes());
    for (int64_t lane = 0; lane < 16 && block * 16 + lane < num_outputs; lane++) {
        const int64_t row = block * 16 + lane;
        for (int64_t group = 0; group < num_groups; group++) {
            const uint8_t* from = weights + row * layout.num_inputs + group * layout.group_size;
            pack_lane(layout, from, layout.group_size, lane, to + layout.weights_at(group));
            memcpy(to + layout.scales_at(group) + lane * 2, scales + row * num_groups + group, 2);
            if (layout.has_offsets) {
                memcpy(to + layout.offsets_at(group) + lane * 2, offsets + row * num_groups + group, 2);
            }
        }
    }
}

void embed_grouped(const rl_linear& matrix, int64_t id, float* out) {
    const GroupedLayout layout = grouped_layout(matrix.groups, matrix.num_inputs);
    const uint8_t* block = (const uint8_t*)matrix.weight + id / 16 * layout.block_bytes();
    const int64_t lane = id % 16;
    const float factor = matrix.scales == nullptr ? 1.0f : matrix.scales[id];
    for (int64_t group = 0; group < layout.num_groups(); group++) {
        const float scale = half_at(block + layout.scales_at(group) + lane * 2);
        const float offset = layout.has_offsets ? half_at(block + layout.offsets_at(group) + lane * 2) : 0.0f;
        const uint8_t* weights = block + layout.weights_at(group);
        for (int64_t k = 0; k < layout.group_size; k++) {
            const int bits = weight_at(layout.bits, weights, lane, k);
            const int weight = matrix.groups.numbers == RL_FLOATS ? kFloatIntegers[bits] : bits;
            out[group * layout.group_size + k] = factor * (scale * (float)(weight - matrix.groups.zero) + offset);
        }
    }
}
