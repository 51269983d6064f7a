// Product of activations and a packed weight matrix: y = x W^T + bias.
//
// W [N][K] is packed as [N / 16][K / depth][16][depth] (operands.h); N is padded with rows of zeros to a multiple of 16.
// A call computes some blocks of 16 columns of y for all rows of x. With few rows, the time to read W from memory
// decides, so many blocks are read at once. With many rows, arithmetic decides: tiles of up to 12 rows x 2 blocks keep
// their sums in registers, and 2 blocks of W stay in the cache while the tiles of rows pass.

#pragma once

#include "kernels.h"
#include "operands.h"

namespace RL_ISA {

RL_INLINE F16 with_bias(const LinearTask& task, int64_t block, F16 y) {
    if (task.bias == nullptr) {
        return y;
    }
    int64_t left = task.num_outputs - block * 16;
    return y + (left >= 16 ? load(task.bias + block * 16) : load_first(task.bias + block * 16, (int)left));
}

// Stores y.
struct StoreOutput {
    static RL_INLINE_MEMBER int64_t weight_block(const LinearTask&, int64_t block, int c, int) { return block + c; }

    template <class Operand, int R, int C>
    static RL_INLINE_MEMBER void write(const LinearTask& task, int64_t row, int64_t block, const F16 (&sums)[R][C]) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            int64_t left = task.num_outputs - (block + c) * 16;
#pragma GCC unroll 24
            for (int r = 0; r < R; r++) {
                float* out = task.out + (row + r) * task.out_stride + (block + c) * 16;
                F16 y = with_bias(task, block + c, sums[r][c]);
                if (left >= 16) {
                    store(out, y);
                } else {
                    store_first(out, y, (int)left);
                }
            }
        }
    }
};

// Adds y to the output, whose width is a multiple of 16.
struct AddOutput {
    static RL_INLINE_MEMBER int64_t weight_block(const LinearTask&, int64_t block, int c, int) { return block + c; }

    template <class Operand, int R, int C>
    static RL_INLINE_MEMBER void write(const LinearTask& task, int64_t row, int64_t block, const F16 (&sums)[R][C]) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
#pragma GCC unroll 24
            for (int r = 0; r < R; r++) {
                float* out = task.out + (row + r) * task.out_stride + (block + c) * 16;
                store(out, load(out) + with_bias(task, block + c, sums[r][c]));
            }
        }
    }
};

// Stores silu(gate) * up as an operand. The first half of a tile's columns are blocks of the gate, the second half the
// same blocks of up. silu(g) = g / (1 + exp(-g)).
struct GateOutput {
    static RL_INLINE_MEMBER int64_t weight_block(const LinearTask& task, int64_t block, int c, int num_columns) {
        int half = num_columns / 2;
        return c < half ? block + c : task.num_outputs / 32 + block + c - half;
    }

    template <class Operand, int R, int C>
    static RL_INLINE_MEMBER void write(const LinearTask& task, int64_t row, int64_t block, const F16 (&sums)[R][C]) {
        static_assert(C % 2 == 0, "gate and up come in pairs");
        const int64_t width = task.num_outputs / 2;
#pragma GCC unroll 4
        for (int c = 0; c < C / 2; c++) {
#pragma GCC unroll 24
            for (int r = 0; r < R; r++) {
                F16 gate = with_bias(task, block + c, sums[r][c]);
                F16 up = with_bias(task, width / 16 + block + c, sums[r][C / 2 + c]);
                F16 silu = gate / (splat(1.0f) + exp(zero() - gate));
                typename Operand::X* out = (typename Operand::X*)task.gated + (row + r) * width + (block + c) * 16;
                Operand::store_x(out, silu * up);
            }
        }
    }
};

// One tile: R rows x C columns of blocks. `ahead`: elements from this tile's weights to those that are read next.
template <class Operand, class Output, int R, int C, bool Prefetch>
static void linear_tile(const LinearTask& task, int64_t row, int64_t block, int64_t ahead) {
    using W = typename Operand::W;
    const W* w[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
        w[c] = (const W*)task.weight + Output::weight_block(task, block, c, C) * 16 * task.num_inputs;
    }
    F16 sums[R][C];
    clear(sums);
    const typename Operand::X* x = (const typename Operand::X*)task.x + row * task.num_inputs;
    add_products<Operand, R, C, Prefetch>(x, task.num_inputs, w, task.num_inputs / Operand::depth, sums, ahead);
    Output::template write<Operand>(task, row, block, sums);
}

// Calls linear_tile with R = `num_rows`, which is at most MaxRows.
template <class Operand, class Output, int C, bool Prefetch, int MaxRows>
RL_INLINE void linear_rows(const LinearTask& task, int64_t row, int64_t num_rows, int64_t block, int64_t ahead) {
    if (num_rows == MaxRows) {
        linear_tile<Operand, Output, MaxRows, C, Prefetch>(task, row, block, ahead);
    } else if constexpr (MaxRows > 1) {
        linear_rows<Operand, Output, C, Prefetch, MaxRows - 1>(task, row, num_rows, block, ahead);
    }
}

// Few rows: reads `num_columns` blocks of W at once, at most MaxColumns.
template <class Operand, class Output, int MaxColumns, int Multiple>
RL_INLINE void linear_streams(const LinearTask& task, int64_t block, int64_t num_columns) {
    if (num_columns == MaxColumns) {
        linear_rows<Operand, Output, MaxColumns, true, kWideRows>(task, 0, task.num_rows, block, kStreamAhead);
    } else if constexpr (MaxColumns > Multiple) {
        linear_streams<Operand, Output, MaxColumns - Multiple, Multiple>(task, block, num_columns);
    }
}

// All rows of blocks [block, block + C or C / 2), in tiles of nearly equal height. The first tile fetches the weights
// that the next call reads.
template <class Operand, class Output, int C, int MaxRows>
static void linear_columns(const LinearTask& task, int64_t block, int64_t ahead) {
    const int64_t num_tiles = (task.num_rows + MaxRows - 1) / MaxRows;
    int64_t row = 0;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t num_rows = (task.num_rows - row + num_tiles - tile - 1) / (num_tiles - tile);
        if (tile == 0) {
            linear_rows<Operand, Output, C, true, MaxRows>(task, row, num_rows, block, ahead);
        } else {
            linear_rows<Operand, Output, C, false, MaxRows>(task, row, num_rows, block, 0);
        }
        row += num_rows;
    }
}

template <class Operand, class Output, bool IsGate>
static void linear_blocks(const LinearTask& task, int64_t first, int64_t end) {
    constexpr int wide = kWideColumns;
    constexpr int narrow = IsGate ? 2 : kNarrowColumns;
    constexpr int narrow_rows = IsGate ? kGateRows : kNarrowRows;
    constexpr int per_block = IsGate ? 2 : 1;  // columns of a tile for each block of the output
    const int64_t block_size = 16 * task.num_inputs;
    int64_t block = first;
    if (task.num_rows <= kWideRows) {
        while (block < end) {
            const int64_t num_columns = (end - block) * per_block < wide ? (end - block) * per_block : wide;
            linear_streams<Operand, Output, wide, per_block>(task, block, num_columns);
            block += num_columns / per_block;
        }
        return;
    }
    if constexpr (!IsGate && kTallRows > narrow_rows) {
        if (task.num_rows > narrow_rows && task.num_rows <= kTallRows) {
            for (; block < end; block++) {
                linear_rows<Operand, Output, 1, true, kTallRows>(task, 0, task.num_rows, block, block_size);
            }
            return;
        }
    }
    for (; block + narrow / per_block <= end; block += narrow / per_block) {
        linear_columns<Operand, Output, narrow, narrow_rows>(task, block, narrow / per_block * block_size);
    }
    if constexpr (!IsGate && narrow > 1) {
        for (; block < end; block++) {
            linear_columns<Operand, Output, 1, narrow_rows>(task, block, block_size);
        }
    }
}

template <class Operand>
static void linear(const LinearTask& task, int64_t first, int64_t end) {
    linear_blocks<Operand, StoreOutput, false>(task, first, end);
}

template <class Operand>
static void add_linear(const LinearTask& task, int64_t first, int64_t end) {
    linear_blocks<Operand, AddOutput, false>(task, first, end);
}

template <class Operand>
static void gate_linear(const LinearTask& task, int64_t first, int64_t end) {
    linear_blocks<Operand, GateOutput, true>(task, first, end);
}

// Packs W [num_outputs][num_inputs].
template <class Operand>
static void pack_weight(const void* weight, void* packed, int64_t num_outputs, int64_t num_inputs) {
    using W = typename Operand::W;
    constexpr int depth = Operand::depth;
    const W* from = (const W*)weight;
    W* to = (W*)packed;
    for (int64_t block = 0; block < (num_outputs + 15) / 16; block++) {
        for (int64_t step = 0; step < num_inputs / depth; step++) {
            for (int64_t lane = 0; lane < 16; lane++) {
                int64_t row = block * 16 + lane;
                for (int part = 0; part < depth; part++) {
                    *to++ = row < num_outputs ? from[row * num_inputs + step * depth + part] : W(0);
                }
            }
        }
    }
}

// Row `id` of a packed matrix with `width` columns, as float32.
template <class Operand>
static void embed(const void* packed, int64_t width, int64_t id, float* out) {
    constexpr int depth = Operand::depth;
    const typename Operand::W* block = (const typename Operand::W*)packed + id / 16 * 16 * width;
    for (int64_t step = 0; step < width / depth; step++) {
        for (int part = 0; part < depth; part++) {
            out[step * depth + part] = Operand::from_w(block[(step * 16 + id % 16) * depth + part]);
        }
    }
}

}  // namespace RL_ISA
