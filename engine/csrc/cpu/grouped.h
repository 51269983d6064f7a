// Products with grouped weights: every `group_size` inputs of an output share a float16 scale, and perhaps an offset.
//
//   W[n][k] = factor[n] * (scale[n][g] * (q[n][k] - zero) + offset[n][g]),  g = k / group_size
//
// q is an unsigned integer of 4, 6 or 8 bits, or stands for a float of 4 bits (grouped_layout.h). `zero` is one number
// for the whole matrix. The float32 factor keeps the scales of a row near 1, because float16 is inexact for small
// numbers. In a matrix without factors, it is 1.
// Activations are quantised as in int8.h: a group h of 32 inputs is s[h] * x with x in [-127, 127]. The products q * x
// are summed exactly within a group h. The sums of the groups are added in float32, in the order of the groups:
//
//   y[n] = factor * sum over h of s[h] * (scale * (sum of q * x - zero * (sum of x)) + offset * (sum of x)) + bias[n]
//
// Weights of 6 bits have two groups of 16 inputs in h, so they have two such sums, each with a scale, and no offset.
// So a row's result does not depend on the number of rows, as in linear.h. grouped_layout.h has the layout of W.

#pragma once

#include "grouped_layout.h"
#include "grouped_weights.h"
#include "int8.h"
#include "kernels.h"
#include "linear.h"

namespace RL_ISA {

RL_INLINE F16 load_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
#else
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
#endif
}

// A tile of y without the bias, for R rows and C blocks of 16 outputs.
struct GroupedTile {
    const int8_t* x;  // [R] quantised rows
    int64_t num_inputs;
    const uint8_t* w[kInt8WideColumns];
    int64_t chunk_parts;  // number of groups of 32 inputs in a chunk
    int64_t chunk_bytes;
    int64_t scales_at;  // offset of the first scales in a chunk, in bytes
    bool has_offsets;
    int shift;      // a scale belongs to 2^shift groups of 32 inputs
    int32_t zero;   // as in the formula above
    int64_t ahead;  // distance, in bytes, from weights that the tile reads to those that it prefetches meanwhile
    const float* factors[kInt8WideColumns];  // [16] for each column, or null
    float* out;  // [R][out_stride]
    int64_t out_stride;
};

// The scales of a row's groups of 32 inputs.
RL_INLINE const GroupScale* row_scales(const GroupedTile& tile, int row) {
    return (const GroupScale*)(tile.x + row * quantised_row_bytes(tile.num_inputs) + tile.num_inputs);
}

// -zero * (sum of x) over the inputs of an integer sum. In weights of 6 bits, `zero` is 32.
template <class Weights>
RL_INLINE int32_t sum_start(const GroupedTile& tile, const GroupScale& of_x, int index) {
    return Weights::num_sums == 1 ? (of_x.start >> 7) * tile.zero : of_x.half_starts[index];
}

// Sums (q - zero) * x over the inputs of the integer sum `index` of a group of 32, for all rows and columns. `w_at`:
// byte offset of the sum's weights.
template <class Weights, int R, int C>
RL_INLINE void sum_inputs(const GroupedTile& tile, int64_t group, int index, int64_t w_at, F16 (&totals)[R][C]) {
    const int64_t row_bytes = quantised_row_bytes(tile.num_inputs);
    const int8_t* x = tile.x + group * kGroup + index * Weights::steps * Weights::step_inputs;
    typename Weights::Part parts[R][C];
    int32_t starts[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        starts[r] = sum_start<Weights>(tile, row_scales(tile, r)[group], index);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            parts[r][c] = Weights::first(starts[r]);
        }
    }
#pragma GCC unroll 8
    for (int step = 0; step < Weights::steps; step++) {
        typename Weights::WStep w_step[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const uint8_t* source = tile.w[c] + w_at + step * Weights::step_lines * 64;
            w_step[c] = Weights::load_w(source);
#pragma GCC unroll 4
            for (int line = 0; line < Weights::step_lines; line++) {
                _mm_prefetch((const char*)(source + line * 64 + tile.ahead), _MM_HINT_T1);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const typename Weights::XStep x_step = Weights::load_x(x + r * row_bytes + step * Weights::step_inputs);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                parts[r][c] = Weights::multiply_add(w_step[c], x_step, parts[r][c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            totals[r][c] = Weights::total(parts[r][c], starts[r]);
        }
    }
}

template <int C>
RL_INLINE void load_halves(const GroupedTile& tile, int64_t at, F16 (&values)[C]) {
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
        values[c] = load_half((const uint16_t*)(tile.w[c] + at));
    }
}

// Adds the products of a group of 32 inputs, each of whose halves has a scale of its own, to the sums.
template <class Weights, int R, int C>
RL_INLINE void add_two_sums(const GroupedTile& tile, int64_t group, int64_t w_at, int64_t scales_at,
                            F16 (&sums)[R][C]) {
    F16 firsts[R][C];
    F16 first_scales[C];
    sum_inputs<Weights>(tile, group, 0, w_at, firsts);
    load_halves(tile, scales_at, first_scales);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            firsts[r][c] = firsts[r][c] * first_scales[c];
        }
    }
    F16 seconds[R][C];
    F16 second_scales[C];
    sum_inputs<Weights>(tile, group, 1, w_at + Weights::steps * Weights::step_lines * 64, seconds);
    load_halves(tile, scales_at + 32, second_scales);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const F16 x_scale = splat(row_scales(tile, r)[group].scale);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            sums[r][c] = fma(fma(seconds[r][c], second_scales[c], firsts[r][c]), x_scale, sums[r][c]);
        }
    }
}

// Adds the products of a group of 32 inputs, which has one scale, to the sums. `w_at`, `scales_at`: byte offsets of the
// group's weights and scales.
template <class Weights, int R, int C>
RL_INLINE void add_sum(const GroupedTile& tile, int64_t group, int64_t w_at, int64_t scales_at, F16 (&sums)[R][C]) {
    F16 totals[R][C];
    F16 scales[C];
    sum_inputs<Weights>(tile, group, 0, w_at, totals);
    load_halves(tile, scales_at, scales);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const F16 x_scale = splat(row_scales(tile, r)[group].scale);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            sums[r][c] = fma(totals[r][c] * x_scale, scales[c], sums[r][c]);
        }
    }
    if (!tile.has_offsets) {
        return;
    }
    F16 offsets[C];
    load_halves(tile, scales_at + 32, offsets);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const F16 x_sum = splat(row_scales(tile, r)[group].sum);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            sums[r][c] = fma(offsets[c], x_sum, sums[r][c]);
        }
    }
}

template <class Weights, int R, int C>
static void compute_grouped_tile(const GroupedTile& tile) {
    constexpr int64_t part_bytes = kGroup * Weights::bits * 2;
    const int64_t num_parts = tile.num_inputs / kGroup;
    F16 sums[R][C];
    clear(sums);
    int64_t chunk_at = 0;
    for (int64_t first = 0; first < num_parts; first += tile.chunk_parts) {
        const int64_t count = num_parts - first < tile.chunk_parts ? num_parts - first : tile.chunk_parts;
        for (int64_t part = 0; part < count; part++) {
            const int64_t scales_at = chunk_at + tile.scales_at + (part >> tile.shift) * 32;
            const int64_t w_at = chunk_at + part * part_bytes;
            if constexpr (Weights::num_sums == 2) {
                add_two_sums<Weights>(tile, first + part, w_at, scales_at, sums);
            } else {
                add_sum<Weights>(tile, first + part, w_at, scales_at, sums);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            _mm_prefetch((const char*)(tile.w[c] + chunk_at + tile.scales_at + tile.ahead), _MM_HINT_T1);
        }
        chunk_at += tile.chunk_bytes;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const F16 y = tile.factors[c] == nullptr ? sums[r][c] : sums[r][c] * load(tile.factors[c]);
            store(tile.out + r * tile.out_stride + c * 16, y);
        }
    }
}

template <class Weights, int C, int MaxRows>
RL_INLINE void compute_grouped_rows(const GroupedTile& tile, int64_t num_rows) {
    if (num_rows == MaxRows) {
        compute_grouped_tile<Weights, MaxRows, C>(tile);
    } else if constexpr (MaxRows > 1) {
        compute_grouped_rows<Weights, C, MaxRows - 1>(tile, num_rows);
    }
}

template <class Weights>
static void compute_grouped_tile(const GroupedTile& tile, int64_t num_rows, int64_t num_columns) {
    if (num_rows > kInt8WideRows && num_columns == Weights::tile_columns) {
        return compute_grouped_rows<Weights, Weights::tile_columns, kInt8Rows>(tile, num_rows);
    }
    for_streams(tile, num_columns, [&](const GroupedTile& stream) {
        compute_grouped_rows<Weights, 1, kInt8Rows>(stream, num_rows);
    });
}

// One tile: rows [row, row + num_rows) x `num_columns` columns. `ahead`: as in GroupedTile.
template <class Operand, class Weights, class Output>
static void grouped_tile(const LinearTask& task, int64_t row, int64_t num_rows, int64_t block, int64_t num_columns,
                         int64_t ahead) {
    const GroupedLayout layout = {task.num_inputs, Weights::bits, task.groups.size, task.groups.has_offsets != 0};
    alignas(64) float last_factors[16];
    GroupedTile tile;
    tile.x = (const int8_t*)task.x + row * quantised_row_bytes(task.num_inputs);
    tile.num_inputs = task.num_inputs;
    for (int64_t c = 0; c < num_columns; c++) {
        const int64_t weight_block = Output::weight_block(task, block, c, num_columns);
        tile.w[c] = (const uint8_t*)task.weight + weight_block * layout.block_bytes();
        tile.factors[c] = task.scales == nullptr ? nullptr : task.scales + weight_block * 16;
        const int64_t left = task.num_outputs - weight_block * 16;
        if (task.scales != nullptr && left < 16) {
            store(last_factors, load_first(task.scales + weight_block * 16, (int)left));
            tile.factors[c] = last_factors;
        }
    }
    tile.chunk_parts = layout.chunk_groups() * layout.group_size / kGroup;
    tile.chunk_bytes = layout.chunk_bytes();
    tile.scales_at = layout.scales_at(0);
    tile.has_offsets = layout.has_offsets;
    tile.shift = layout.group_size <= 32 ? 0 : layout.group_size == 64 ? 1 : 2;
    tile.zero = task.groups.zero;
    tile.ahead = ahead;
    compute_into_output<Operand, Output>(task, row, num_rows, block, num_columns, tile,
                                         [&] { compute_grouped_tile<Weights>(tile, num_rows, num_columns); });
}

template <class Operand, class Weights, class Output>
static void grouped_blocks(const LinearTask& task, int64_t first, int64_t end) {
    constexpr int per_block = Output::columns_per_block;
    const GroupedLayout layout = {task.num_inputs, Weights::bits, task.groups.size, task.groups.has_offsets != 0};
    const bool is_wide = task.num_rows <= kInt8WideRows;
    for (int64_t block = first; block < end;) {
        const int64_t num_columns = int8_columns<Output>(end - block, is_wide);
        const int64_t num_blocks = num_columns / per_block;
        const int64_t next = is_wide ? kStreamAhead : num_blocks * layout.block_bytes();
        for_row_tiles(task.num_rows, is_wide ? kInt8WideRows : kInt8Rows, [&](int64_t row, int64_t height) {
            grouped_tile<Operand, Weights, Output>(task, row, height, block, num_columns, row == 0 ? next : 0);
        });
        block += num_blocks;
    }
}

template <class Operand, class Weights>
constexpr LinearKernels grouped_kernels() {
    return {
        grouped_blocks<Operand, Weights, StoreOutput>,
        grouped_blocks<Operand, Weights, AddOutput>,
        grouped_blocks<Operand, Weights, GateOutput>,
        grouped_blocks<Operand, Weights, ScatterOutput>,
    };
}

}  // namespace RL_ISA
