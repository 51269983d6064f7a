// Products with int8 weights: y = x W^T + bias with W = scale[n] * (w - 128), w unsigned, one scale for each output.
//
// Activations are quantised before a product: for each group of 32 elements of a row, x = s * q with q in [-127, 127]
// and s = max |x| / 127. The products w * q are summed exactly in int32 over a group. Because w is stored with 128
// added, this sum starts at -128 * (sum of q). The sums of the groups are added in float32, in the order of the groups:
//
//   y[n] = scale[n] * sum over groups of s[g] * (sum over the group of (w - 128) * q) + bias[n]
//
// So a row's result does not depend on the number of rows, as in linear.h. W is packed as [N / 16][K / 4][16][4].

#pragma once

#include <math.h>

#include "kernels.h"
#include "linear.h"
#include "operands.h"

namespace RL_ISA {

constexpr int64_t kGroup = 32;
constexpr int kInt8Depth = 4;
constexpr int kGroupSteps = (int)(kGroup / kInt8Depth);

// A quantised row has K int8 elements, then a GroupScale for each group of 32.
struct GroupScale {
    float scale;
    float sum;               // sum of scale * q, by which offsets of weights are multiplied
    int32_t start;           // -128 * (sum of q): sums of products over the group start at this value
    int32_t half_starts[2];  // -32 * (sum of q) over the first 16 elements, and over the last 16, for weights of 6 bits
};

RL_INLINE int64_t quantised_row_bytes(int64_t num_inputs) {
    return num_inputs + num_inputs / kGroup * (int64_t)sizeof(GroupScale);
}

#if defined(__AVX512VNNI__)

struct I16 {
    __m512i v;
};
RL_INLINE I16 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
RL_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

struct Int8Step {
    __m512i v;
};
RL_INLINE Int8Step load_int8_w(const uint8_t* w) { return {_mm512_loadu_si512(w)}; }
RL_INLINE Int8Step load_int8_x(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return {_mm512_set1_epi32(four)};
}
RL_INLINE I16 multiply_add_int8(Int8Step w, Int8Step x, I16 sum) { return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)}; }

#else

struct I16 {
    __m256i a, b;
};
RL_INLINE I16 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
RL_INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

// The four bytes of each lane, as pairs of int16: `even` has bytes 0 and 2, `odd` has bytes 1 and 3.
struct Int8Step {
    __m256i even_a, odd_a, even_b, odd_b;
};
RL_INLINE Int8Step load_int8_w(const uint8_t* w) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)w);
    const __m256i b = _mm256_loadu_si256((const __m256i*)(w + 32));
    const __m256i low = _mm256_set1_epi16(0xff);
    return {_mm256_and_si256(a, low), _mm256_srli_epi16(a, 8), _mm256_and_si256(b, low), _mm256_srli_epi16(b, 8)};
}
RL_INLINE Int8Step load_int8_x(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    const __m256i both = _mm256_set1_epi32(four);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8);
    const __m256i odd = _mm256_srai_epi16(both, 8);
    return {even, odd, even, odd};
}
RL_INLINE I16 multiply_add_int8(Int8Step w, Int8Step x, I16 sum) {
    const __m256i a = _mm256_add_epi32(_mm256_madd_epi16(w.even_a, x.even_a), _mm256_madd_epi16(w.odd_a, x.odd_a));
    const __m256i b = _mm256_add_epi32(_mm256_madd_epi16(w.even_b, x.even_b), _mm256_madd_epi16(w.odd_b, x.odd_b));
    return {_mm256_add_epi32(sum.a, a), _mm256_add_epi32(sum.b, b)};
}

#endif

// Quantises a row of x, which has the operand type.
template <class Operand>
static void quantise_row(const void* x, int64_t num_inputs, void* quantised) {
    const typename Operand::X* row = (const typename Operand::X*)x;
    int8_t* out = (int8_t*)quantised;
    GroupScale* groups = (GroupScale*)(out + num_inputs);
    for (int64_t first = 0; first < num_inputs; first += kGroup) {
        const F16 low = Operand::load_values(row + first);
        const F16 high = Operand::load_values(row + first + 16);
        const float largest = maximum(max(max(low, zero() - low), max(high, zero() - high)));
        const F16 inverse = splat(largest > 0.0f && largest < INFINITY ? 127.0f / largest : 0.0f);
        const F16 low_q = round(low * inverse);
        const F16 high_q = round(high * inverse);
        store_int8(out + first, low_q);
        store_int8(out + first + 16, high_q);
        // `check` is 0, or NaN if a value is NaN or infinite. A NaN in the scale reaches the logits, which are tested.
        const float check = sum((low - low) + (high - high));
        const int32_t low_sum = check == 0.0f ? (int32_t)sum(low_q) : 0;
        const int32_t high_sum = check == 0.0f ? (int32_t)sum(high_q) : 0;
        const int32_t total = low_sum + high_sum;
        const float scale = largest / 127.0f + check;
        groups[first / kGroup] = {scale, scale * (float)total, -128 * total, {-32 * low_sum, -32 * high_sum}};
    }
}

// A tile of y without the bias, for R rows and C blocks of 16 outputs.
struct Int8Tile {
    const int8_t* x;  // [R] quantised rows
    int64_t num_inputs;
    const uint8_t* w[kInt8WideColumns];
    int64_t ahead;  // distance, in elements, from weights that the tile reads to those that it prefetches meanwhile
    const float* factors[kInt8WideColumns];  // scales of the weights, [16] for each column
    float* out;  // [R][out_stride]
    int64_t out_stride;
};

template <int R, int C>
static void compute_int8_tile(const Int8Tile& tile) {
    const uint8_t* w[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
        w[c] = tile.w[c];
    }
    const int64_t num_inputs = tile.num_inputs;
    const int64_t row_bytes = quantised_row_bytes(num_inputs);
    const int8_t* x = tile.x;
    F16 sums[R][C];
    clear(sums);
    for (int64_t group = 0; group < num_inputs / kGroup; group++) {
        I16 parts[R][C];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const GroupScale* scales = (const GroupScale*)(x + r * row_bytes + num_inputs);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                parts[r][c] = splat_int(scales[group].start);
            }
        }
#pragma GCC unroll 8
        for (int step = 0; step < kGroupSteps; step++) {
            const int64_t at = group * kGroupSteps + step;
            Int8Step w_step[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                const uint8_t* source = w[c] + at * 16 * kInt8Depth;
                w_step[c] = load_int8_w(source);
                _mm_prefetch((const char*)(source + tile.ahead), _MM_HINT_T1);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const Int8Step x_step = load_int8_x(x + r * row_bytes + at * kInt8Depth);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    parts[r][c] = multiply_add_int8(w_step[c], x_step, parts[r][c]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const GroupScale* scales = (const GroupScale*)(x + r * row_bytes + num_inputs);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                sums[r][c] = fma(to_float(parts[r][c]), splat(scales[group].scale), sums[r][c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            store(tile.out + r * tile.out_stride + c * 16, sums[r][c] * load(tile.factors[c]));
        }
    }
}

template <int C, int MaxRows>
RL_INLINE void compute_int8_rows(const Int8Tile& tile, int64_t num_rows) {
    if (num_rows == MaxRows) {
        compute_int8_tile<MaxRows, C>(tile);
    } else if constexpr (MaxRows > 1) {
        compute_int8_rows<C, MaxRows - 1>(tile, num_rows);
    }
}

// Calls compute(stream) for each column of a tile; `stream` is a tile of this column alone. Used for tiles of at most
// kInt8WideRows rows. The speed of memory limits such tiles, and a core reads one column after the other faster than
// several columns at once.
template <class Tile, class Compute>
RL_INLINE void for_streams(const Tile& tile, int64_t num_columns, Compute compute) {
    Tile stream = tile;
    for (int64_t c = 0; c < num_columns; c++) {
        stream.w[0] = tile.w[c];
        stream.factors[0] = tile.factors[c];
        stream.out = tile.out + c * 16;
        compute(stream);
    }
}

static void compute_int8_tile(const Int8Tile& tile, int64_t num_rows, int64_t num_columns) {
    if (num_rows > kInt8WideRows) {
        return num_columns == 1 ? compute_int8_rows<1, kInt8Rows>(tile, num_rows)
                                : compute_int8_rows<2, kInt8Rows>(tile, num_rows);
    }
    for_streams(tile, num_columns,
                [&](const Int8Tile& stream) { compute_int8_rows<1, kInt8WideRows>(stream, num_rows); });
}

// Returns the number of columns of the next tile, if `left` blocks of the product are left. `is_wide`: the product has
// at most kInt8WideRows rows.
template <class Output>
RL_INLINE int64_t int8_columns(int64_t left, bool is_wide) {
    constexpr int64_t per_block = Output::columns_per_block;
    if (is_wide) {
        return left * per_block < kInt8WideColumns ? left * per_block : kInt8WideColumns;
    }
    return per_block == 2 ? 2 : tile_columns(left, kInt8NarrowColumns);
}

// Sets `tile.out` and calls compute(). If Output only stores the sums, and there is no bias, `tile.out` points into the
// task's output. Otherwise it points to a buffer, and Output::write computes the task's output from this buffer.
template <class Operand, class Output, class Tile, class Compute>
RL_INLINE void compute_into_output(const LinearTask& task, int64_t row, int64_t num_rows, int64_t block,
                                   int64_t num_columns, Tile& tile, Compute compute) {
    if (Output::addend(task, row, block, num_columns).first == kZeros) {
        tile.out = task.out + row * task.out_stride + block * 16;
        tile.out_stride = task.out_stride;
        compute();
        return;
    }
    LinearTile result;
    result.row = row;
    result.num_rows = num_rows;
    result.block = block;
    result.num_columns = num_columns;
    tile.out = result.sums;
    tile.out_stride = num_columns * 16;
    compute();
    Output::template write<Operand>(task, result);
}

// Computes one tile: rows [row, row + num_rows) x `num_columns` columns.
template <class Operand, class Output>
static void int8_tile(const LinearTask& task, int64_t row, int64_t num_rows, int64_t block, int64_t num_columns,
                      int64_t ahead) {
    alignas(64) float last_scales[16];
    Int8Tile tile;
    tile.x = (const int8_t*)task.x + row * quantised_row_bytes(task.num_inputs);
    tile.num_inputs = task.num_inputs;
    tile.ahead = ahead;
    for (int64_t c = 0; c < num_columns; c++) {
        const int64_t at = Output::weight_block(task, block, c, num_columns) * 16;
        tile.w[c] = (const uint8_t*)task.weight + at * task.num_inputs;
        tile.factors[c] = task.scales + at;
        if (task.num_outputs - at < 16) {
            store(last_scales, load_first(task.scales + at, (int)(task.num_outputs - at)));
            tile.factors[c] = last_scales;
        }
    }
    compute_into_output<Operand, Output>(task, row, num_rows, block, num_columns, tile,
                                         [&] { compute_int8_tile(tile, num_rows, num_columns); });
}

template <class Operand, class Output>
static void int8_blocks(const LinearTask& task, int64_t first, int64_t end) {
    constexpr int per_block = Output::columns_per_block;
    const bool is_wide = task.num_rows <= kInt8WideRows;
    for (int64_t block = first; block < end;) {
        const int64_t num_columns = int8_columns<Output>(end - block, is_wide);
        const int64_t num_blocks = num_columns / per_block;
        const int64_t next = is_wide ? kStreamAhead : num_blocks * 16 * task.num_inputs;
        for_row_tiles(task.num_rows, is_wide ? kInt8WideRows : kInt8Rows, [&](int64_t row, int64_t height) {
            int8_tile<Operand, Output>(task, row, height, block, num_columns, row == 0 ? next : 0);
        });
        block += num_blocks;
    }
}

template <class Operand>
static void int8_linear(const LinearTask& task, int64_t first, int64_t end) {
    int8_blocks<Operand, StoreOutput>(task, first, end);
}

template <class Operand>
static void int8_add_linear(const LinearTask& task, int64_t first, int64_t end) {
    int8_blocks<Operand, AddOutput>(task, first, end);
}

template <class Operand>
static void int8_gate_linear(const LinearTask& task, int64_t first, int64_t end) {
    int8_blocks<Operand, GateOutput>(task, first, end);
}

template <class Operand>
static void int8_scatter_linear(const LinearTask& task, int64_t first, int64_t end) {
    int8_blocks<Operand, ScatterOutput>(task, first, end);
}

// Quantises rows [16 block, 16 block + 16) of W [num_outputs][num_inputs], packs them and sets their scales. W has the
// type of Operand's weights. Rows behind the last row of W become zeros.
template <class Operand>
static void pack_int8_block(const void* weight, void* packed, float* scales, int64_t num_outputs, int64_t num_inputs,
                            int64_t block) {
    constexpr int64_t lane_bytes = kInt8Depth;
    constexpr int64_t step_bytes = 16 * lane_bytes;
    char* to = (char*)packed + block * 16 * num_inputs;
    for (int64_t lane = 0; lane < 16; lane++) {
        const int64_t row = block * 16 + lane;
        const typename Operand::W* from = (const typename Operand::W*)weight + row * num_inputs;
        F16 largest_of_lanes = zero();
        F16 check = zero();  // 0, or NaN if a weight is NaN or infinite; a NaN in the scale reaches the logits
        for (int64_t k = 0; row < num_outputs && k < num_inputs; k += 16) {
            const F16 values = Operand::load_weights(from + k);
            largest_of_lanes = max(max(values, zero() - values), largest_of_lanes);
            check = check + (values - values);
        }
        const float largest = maximum(largest_of_lanes);
        const F16 inverse = splat(largest > 0.0f && largest < INFINITY ? 127.0f / largest : 0.0f);
        for (int64_t k = 0; k < num_inputs; k += 16) {
            int8_t quantised[16] = {0};
            if (row < num_outputs) {
                store_int8(quantised, round(Operand::load_weights(from + k) * inverse));
            }
            for (int64_t step = 0; step < 16 / lane_bytes; step++) {
                uint32_t four;
                memcpy(&four, quantised + step * lane_bytes, sizeof(four));
                four ^= 0x80808080u;  // adds 128 to each of the four bytes
                memcpy(to + (k / lane_bytes + step) * step_bytes + lane * lane_bytes, &four, sizeof(four));
            }
        }
        if (row < num_outputs) {
            scales[row] = largest / 127.0f + sum(check);
        }
    }
}

// Writes row `id` of a packed int8 matrix to `out`, as float32.
static void embed_int8(const void* packed, const float* scales, int64_t width, int64_t id, float* out) {
    const uint8_t* block = (const uint8_t*)packed + id / 16 * 16 * width + id % 16 * kInt8Depth;
    for (int64_t k = 0; k < width; k++) {
        out[k] = scales[id] * (float)((int)block[k / kInt8Depth * 16 * kInt8Depth + k % kInt8Depth] - 128);
    }
}

}  // namespace RL_ISA
