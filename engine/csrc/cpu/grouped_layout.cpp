#include "grouped_layout.h"

#include <string.h>

namespace {

float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t magnitude = half & 0x7fff;
    if (magnitude < 0x0400) {  // zero, or below the normal numbers
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

// Packs the weights of one output into lane `lane` of a block.
void pack_lane(const GroupedLayout& layout, const uint8_t* row, int64_t lane, uint8_t* to) {
    if (layout.bits == 8) {
        for (int64_t k = 0; k < layout.num_inputs; k += 4) {
            memcpy(to + k * 16 + lane * 4, row + k, 4);
        }
        return;
    }
    for (int64_t k = 0; k < layout.num_inputs; k += 8) {
        uint32_t low, high;
        memcpy(&low, row + k, 4);
        memcpy(&high, row + k + 4, 4);
        const uint32_t both = low | (high << 4);
        memcpy(to + k * 8 + lane * 4, &both, 4);
    }
}

void pack_halves(const uint16_t* from, int64_t num_groups, int64_t lane, uint8_t* to) {
    for (int64_t group = 0; group < num_groups; group++) {
        memcpy(to + group * 32 + lane * 2, from + group, 2);
    }
}

}  // namespace

void pack_grouped_block(const GroupedLayout& layout, const uint8_t* weights, const uint16_t* scales,
                        const uint16_t* offsets, void* packed, int64_t num_outputs, int64_t block) {
    const int64_t num_groups = layout.num_inputs / layout.group_size;
    uint8_t* to = (uint8_t*)packed + block * layout.block_bytes();
    memset(to, 0, (size_t)layout.block_bytes());
    for (int64_t lane = 0; lane < 16 && block * 16 + lane < num_outputs; lane++) {
        const int64_t row = block * 16 + lane;
        pack_lane(layout, weights + row * layout.num_inputs, lane, to);
        pack_halves(scales + row * num_groups, num_groups, lane, to + layout.scales_at());
        if (layout.has_offsets) {
            pack_halves(offsets + row * num_groups, num_groups, lane, to + layout.offsets_at());
        }
    }
}

void embed_grouped(const rl_linear& matrix, int64_t id, float* out) {
    const GroupedLayout layout = grouped_layout(matrix.groups, matrix.num_inputs);
    const uint8_t* block = (const uint8_t*)matrix.weight + id / 16 * layout.block_bytes();
    const int64_t lane = id % 16;
    const float factor = matrix.scales == nullptr ? 1.0f : matrix.scales[id];
    for (int64_t k = 0; k < layout.num_inputs; k++) {
        const int64_t group = k / layout.group_size * 32 + lane * 2;
        const float scale = half_at(block + layout.scales_at() + group);
        const float offset = layout.has_offsets ? half_at(block + layout.offsets_at() + group) : 0.0f;
        int weight;
        if (layout.bits == 8) {
            weight = block[k / 4 * 64 + lane * 4 + k % 4];
        } else {
            weight = (block[k / 8 * 64 + lane * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4)) & 15;
        }
        out[k] = factor * (scale * (float)(weight - matrix.groups.zero) + offset);
    }
}
