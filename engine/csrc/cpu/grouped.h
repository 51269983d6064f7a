// Products with grouped weights: every `group_size` inputs of an output share a float16 scale, and perhaps an offset.
//
//   W[n][k] = factor[n] * (scale[n][g] * (q[n][k] - zero) + offset[n][g]),  g = k / group_size
//
// q has 4 or 8 bits without a sign, and `zero` is one number of the matrix. The factor is float32, because float16 lacks
// small numbers; a matrix that does not need it has none. Activations are quantised as in int8.h, in
// groups of 32, which are s[h] * x with x in [-127, 127]. The products q * x are summed exactly over each of these groups
// h, which are added in float32, in their order:
//
//   y[n] = factor * sum over h of s[h] * (scale * (sum of q * x - zero * (sum of x)) + offset * (sum of x)) + bias[n]
//
// So a row's result does not depend on the number of rows, as in linear.h. grouped_layout.h has the layout of W.

#pragma once

#include "grouped_layout.h"
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

// Weights of 4 bits: a step has 8 inputs of 16 outputs.
struct Nibbles {
    static constexpr int bits = 4;
    static constexpr int steps = 4;  // of 32 inputs
    static constexpr int step_inputs = 8;

#if defined(__AVX512VNNI__)
    using Part = I16;
    struct WStep {
        __m512i low, high;
    };
    using XStep = WStep;

    static RL_INLINE_MEMBER Part clear() { return splat_int(0); }
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) {
        const __m512i both = _mm512_loadu_si512(w);
        const __m512i mask = _mm512_set1_epi8(15);
        return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
    }
    static RL_INLINE_MEMBER XStep load_x(const int8_t* x) { return {load_int8_x(x).v, load_int8_x(x + 4).v}; }
    static RL_INLINE_MEMBER Part multiply_add(WStep w, XStep x, Part part) {
        return {_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(part.v, w.low, x.low), w.high, x.high)};
    }
    static RL_INLINE_MEMBER F16 total(Part part) { return to_float(part); }
#else
    // Sums of int16: each adds 8 pairs of products, at most 8 * 2 * 15 * 127 = 30480.
    struct Part {
        __m256i a, b;
    };
    struct WStep {
        __m256i low_a, high_a, low_b, high_b;
    };
    struct XStep {
        __m256i low, high;
    };

    static RL_INLINE_MEMBER Part clear() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) {
        const __m256i a = _mm256_loadu_si256((const __m256i*)w);
        const __m256i b = _mm256_loadu_si256((const __m256i*)(w + 32));
        const __m256i mask = _mm256_set1_epi8(15);
        return {_mm256_and_si256(a, mask), _mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(b, mask),
                _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
    }
    static RL_INLINE_MEMBER XStep load_x(const int8_t* x) {
        int32_t low, high;
        memcpy(&low, x, 4);
        memcpy(&high, x + 4, 4);
        return {_mm256_set1_epi32(low), _mm256_set1_epi32(high)};
    }
    static RL_INLINE_MEMBER Part multiply_add(WStep w, XStep x, Part part) {
        const __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_a, x.low), _mm256_maddubs_epi16(w.high_a, x.high));
        const __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_b, x.low), _mm256_maddubs_epi16(w.high_b, x.high));
        return {_mm256_add_epi16(part.a, a), _mm256_add_epi16(part.b, b)};
    }
    static RL_INLINE_MEMBER F16 total(Part part) {
        const __m256i ones = _mm256_set1_epi16(1);
        return to_float(I16{_mm256_madd_epi16(part.a, ones), _mm256_madd_epi16(part.b, ones)});
    }
#endif
};

// Weights of 8 bits: a step has 4 inputs of 16 outputs.
struct Bytes {
    static constexpr int bits = 8;
    static constexpr int steps = kGroupSteps;
    static constexpr int step_inputs = kInt8Depth;

    using Part = I16;
    using WStep = Int8Step;
    using XStep = Int8Step;

    static RL_INLINE_MEMBER Part clear() { return splat_int(0); }
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) { return load_int8_w(w); }
    static RL_INLINE_MEMBER XStep load_x(const int8_t* x) { return load_int8_x(x); }
    static RL_INLINE_MEMBER Part multiply_add(WStep w, XStep x, Part part) { return multiply_add_int8(w, x, part); }
    static RL_INLINE_MEMBER F16 total(Part part) { return to_float(part); }
};

// A tile of y without the bias, for R rows and C blocks of 16 outputs.
struct GroupedTile {
    const int8_t* x;  // [R] quantised rows
    int64_t num_inputs;
    const uint8_t* w[kInt8WideColumns];
    int64_t scales_at;   // distance, in bytes, from a block's weights to its scales
    int64_t offsets_at;  // and to its offsets; 0: there are none
    int shift;           // a scale belongs to 2^shift groups of 32 inputs
    float zero;          // as in the formula above
    int64_t ahead;       // distance, in bytes, from this tile's weights to those that are read next
    int64_t scales_ahead;
    const float* factors[kInt8WideColumns];  // [16] for each column, or null
    float* out;  // [R][out_stride]
    int64_t out_stride;
};

// Sums over the 32 inputs of a group, for all rows and columns.
template <class Weights, int R, int C>
RL_INLINE void sum_group(const GroupedTile& tile, int64_t group, F16 (&totals)[R][C]) {
    const int64_t row_bytes = quantised_row_bytes(tile.num_inputs);
    typename Weights::Part parts[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            parts[r][c] = Weights::clear();
        }
    }
#pragma GCC unroll 8
    for (int step = 0; step < Weights::steps; step++) {
        const int64_t at = group * Weights::steps + step;
        typename Weights::WStep w_step[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const uint8_t* source = tile.w[c] + at * 64;
            w_step[c] = Weights::load_w(source);
            _mm_prefetch((const char*)(source + tile.ahead), _MM_HINT_T1);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const typename Weights::XStep x_step = Weights::load_x(tile.x + r * row_bytes + at * Weights::step_inputs);
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
            totals[r][c] = Weights::total(parts[r][c]);
        }
    }
}

template <class Weights, int R, int C>
static void compute_grouped_tile(const GroupedTile& tile) {
    const int64_t row_bytes = quantised_row_bytes(tile.num_inputs);
    F16 sums[R][C];
    clear(sums);
    for (int64_t group = 0; group < tile.num_inputs / kGroup; group++) {
        F16 totals[R][C];
        sum_group<Weights>(tile, group, totals);
        const int64_t scales_at = tile.scales_at + (group >> tile.shift) * 32;
        F16 scales[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const uint8_t* source = tile.w[c] + scales_at;
            scales[c] = load_half((const uint16_t*)source);
            _mm_prefetch((const char*)(source + tile.scales_ahead), _MM_HINT_T1);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const GroupScale& of_x = ((const GroupScale*)(tile.x + r * row_bytes + tile.num_inputs))[group];
            const float sum_of_x = (float)of_x.start * (-1.0f / 128.0f);
            const F16 start = splat(-tile.zero * sum_of_x);
            const F16 x_scale = splat(of_x.scale);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                sums[r][c] = fma((totals[r][c] + start) * x_scale, scales[c], sums[r][c]);
            }
            if (tile.offsets_at != 0) {
                const F16 scaled_sum = splat(of_x.scale * sum_of_x);
                const int64_t offsets_at = tile.offsets_at + (group >> tile.shift) * 32;
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    sums[r][c] = fma(load_half((const uint16_t*)(tile.w[c] + offsets_at)), scaled_sum, sums[r][c]);
                }
            }
        }
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
    if (num_columns == 1) {
        compute_grouped_rows<Weights, 1, kInt8Rows>(tile, num_rows);
    } else if (num_columns == 2) {
        compute_grouped_rows<Weights, 2, kInt8Rows>(tile, num_rows);
    } else {
        compute_grouped_rows<Weights, kInt8WideColumns, kInt8WideRows>(tile, num_rows);
    }
}

// One tile: rows [row, row + num_rows) x `num_columns` columns. `ahead`, `scales_ahead`: as in GroupedTile.
template <class Operand, class Weights, class Output>
static void grouped_tile(const LinearTask& task, int64_t row, int64_t num_rows, int64_t block, int64_t num_columns,
                         int64_t ahead, int64_t scales_ahead) {
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
    tile.scales_at = layout.scales_at();
    tile.offsets_at = layout.has_offsets ? layout.offsets_at() : 0;
    tile.shift = layout.shift();
    tile.zero = (float)task.groups.zero;
    tile.ahead = ahead;
    tile.scales_ahead = scales_ahead;
    compute_into_output<Operand, Output>(task, row, num_rows, block, num_columns, tile,
                                         [&] { compute_grouped_tile<Weights>(tile, num_rows, num_columns); });
}

template <class Operand, class Weights, class Output>
static void grouped_blocks(const LinearTask& task, int64_t first, int64_t end) {
    constexpr int per_block = Output::columns_per_block;
    constexpr int64_t scales_ahead = 256;
    int64_t block = first;
    if (task.num_rows <= kInt8WideRows) {
        for (; block + kInt8WideColumns / per_block <= end; block += kInt8WideColumns / per_block) {
            grouped_tile<Operand, Weights, Output>(task, 0, task.num_rows, block, kInt8WideColumns, kStreamAhead,
                                                   scales_ahead);
        }
    }
    const GroupedLayout layout = {task.num_inputs, Weights::bits, task.groups.size, task.groups.has_offsets != 0};
    while (block < end) {
        const int64_t num_columns = per_block == 2 ? 2 : tile_columns(end - block, kInt8NarrowColumns);
        const int64_t num_blocks = num_columns / per_block;
        const int64_t next = num_blocks * layout.block_bytes();
        for_row_tiles(task.num_rows, kInt8Rows, [&](int64_t row, int64_t height) {
            const int64_t ahead = row == 0 ? next : 0;
            grouped_tile<Operand, Weights, Output>(task, row, height, block, num_columns, ahead, ahead);
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
