// Product of activations and a packed weight matrix: y = x W^T + bias.
//
// W [N][K] is packed as [N / 16][K / depth][16][depth] (operands.h); N is padded with rows of zeros to a multiple of
// 16. A call computes some blocks of 16 columns of y for all rows of x. With few rows, the speed of memory limits a
// product, so many blocks are read at once. With many rows, arithmetic limits a product. Then tiles of up to 12 rows x
// 2 blocks keep their sums in registers, and 2 blocks of W stay in the cache until all tiles of rows are multiplied by
// these blocks.

#pragma once

#include "kernels.h"
#include "operands.h"
#include "product_tiles.h"

namespace RL_ISA {

RL_INLINE F16 with_bias(const LinearTask& task, int64_t block, F16 y) {
    if (task.bias == nullptr) {
        return y;
    }
    int64_t left = task.num_outputs - block * 16;
    return y + (left >= 16 ? load(task.bias + block * 16) : load_first(task.bias + block * 16, (int)left));
}

// The results of a tile: the sums of `num_rows` rows from `row` on, and of `num_columns` blocks from `block` on.
struct LinearTile {
    int64_t row;
    int64_t num_rows;
    int64_t block;
    int64_t num_columns;
    alignas(64) float sums[kMostSums * 16];  // [num_rows][num_columns][16]

    RL_INLINE_MEMBER F16 sum(int64_t r, int64_t c) const { return load(sums + (r * num_columns + c) * 16); }
};

struct Addend {
    const float* first;
    int64_t stride;
};

// Stores y in the task's output.
struct StoreOutput {
    static constexpr int columns_per_block = 1;
    static constexpr int narrow_columns = kNarrowColumns;
    static constexpr int narrow_rows = kNarrowRows;
    static constexpr int tall_rows = kTallRows;

    static RL_INLINE_MEMBER int64_t weight_block(const LinearTask&, int64_t block, int64_t c, int64_t) {
        return block + c;
    }

    // Returns the addend of a tile's sums, if the tile can store its results directly in the task's output. Null: the
    // sums go to a buffer, and `write` computes the task's output from the buffer.
    static RL_INLINE_MEMBER Addend addend(const LinearTask& task, int64_t, int64_t block, int64_t num_columns) {
        if ((block + num_columns) * 16 > task.num_outputs) {
            return {nullptr, 0};
        }
        return {task.bias == nullptr ? kZeros : task.bias + block * 16, 0};
    }

    template <class Operand>
    static void write(const LinearTask& task, const LinearTile& tile) {
        for (int64_t r = 0; r < tile.num_rows; r++) {
            for (int64_t c = 0; c < tile.num_columns; c++) {
                const int64_t block = tile.block + c;
                const int64_t left = task.num_outputs - block * 16;
                float* out = task.out + (tile.row + r) * task.out_stride + block * 16;
                F16 y = with_bias(task, block, tile.sum(r, c));
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
struct AddOutput : StoreOutput {
    static RL_INLINE_MEMBER Addend addend(const LinearTask& task, int64_t row, int64_t block, int64_t) {
        return {task.bias == nullptr ? task.out + row * task.out_stride + block * 16 : nullptr, task.out_stride};
    }

    template <class Operand>
    static void write(const LinearTask& task, const LinearTile& tile) {
        for (int64_t r = 0; r < tile.num_rows; r++) {
            for (int64_t c = 0; c < tile.num_columns; c++) {
                float* out = task.out + (tile.row + r) * task.out_stride + (tile.block + c) * 16;
                store(out, load(out) + with_bias(task, tile.block + c, tile.sum(r, c)));
            }
        }
    }
};

// Adds factor * y to the rows `out_rows` of the output, whose width is a multiple of 16.
struct ScatterOutput : StoreOutput {
    static RL_INLINE_MEMBER Addend addend(const LinearTask&, int64_t, int64_t, int64_t) { return {nullptr, 0}; }

    template <class Operand>
    static void write(const LinearTask& task, const LinearTile& tile) {
        for (int64_t r = 0; r < tile.num_rows; r++) {
            const F16 factor = splat(task.factors[tile.row + r]);
            float* row = task.out + task.out_rows[tile.row + r] * task.out_stride;
            for (int64_t c = 0; c < tile.num_columns; c++) {
                float* out = row + (tile.block + c) * 16;
                store(out, fma(factor, with_bias(task, tile.block + c, tile.sum(r, c)), load(out)));
            }
        }
    }
};

// (up + 1) * g / (1 + exp(-slope * g)), as in rl_activation. A NaN stays a NaN, because max and min return their second
// operand if one of the two is a NaN.
RL_INLINE F16 clamped_silu(F16 gate, F16 up, float slope, float limit) {
    gate = min(splat(limit), gate);
    up = max(splat(-limit), min(splat(limit), up));
    return (up + splat(1.0f)) * (gate / (splat(1.0f) + exp(gate * splat(-slope))));
}

// The activation of gate and up. gelu(g) = 0.5 g (1 + tanh(u)) = g / (1 + exp(-2 u)) with u = sqrt(2 / pi) (g +
// 0.044715 g^3).
RL_INLINE F16 activated(F16 gate, F16 up, const rl_activation& activation) {
    constexpr float linear_factor = 1.5957691216f;                       // 2 sqrt(2 / pi)
    constexpr float cubic_factor = linear_factor * 0.044715f;
    if (activation.kind == RL_CLAMPED_SILU) {
        return clamped_silu(gate, up, activation.slope, activation.limit);
    }
    F16 exponent = gate;
    if (activation.kind == RL_GELU_TANH) {
        exponent = gate * fma(gate * gate, splat(cubic_factor), splat(linear_factor));
    }
    return gate / (splat(1.0f) + exp(zero() - exponent)) * up;
}

// Stores the activation of gate and up as an operand. The first half of a tile's columns are blocks of the gate, and the
// second half are the same blocks of up.
struct GateOutput {
    static constexpr int columns_per_block = 2;
    static constexpr int narrow_columns = 2;
    static constexpr int narrow_rows = kPairRows;
    static constexpr int tall_rows = 0;

    static RL_INLINE_MEMBER int64_t weight_block(const LinearTask& task, int64_t block, int64_t c, int64_t num_columns) {
        const int64_t half = num_columns / 2;
        return c < half ? block + c : task.num_outputs / 32 + block + c - half;
    }

    static RL_INLINE_MEMBER Addend addend(const LinearTask&, int64_t, int64_t, int64_t) { return {nullptr, 0}; }

    template <class Operand>
    static void write(const LinearTask& task, const LinearTile& tile) {
        const int64_t width = task.num_outputs / 2;
        const int64_t half = tile.num_columns / 2;
        for (int64_t r = 0; r < tile.num_rows; r++) {
            for (int64_t c = 0; c < half; c++) {
                const int64_t block = tile.block + c;
                F16 gate = with_bias(task, block, tile.sum(r, c));
                F16 up = with_bias(task, width / 16 + block, tile.sum(r, half + c));
                typename Operand::X* out = (typename Operand::X*)task.gated + (tile.row + r) * width + block * 16;
                Operand::store_x(out, activated(gate, up, task.activation));
            }
        }
    }
};

// Computes one tile: rows [row, row + num_rows) x `num_columns` columns. `ahead`: as in ProductTile.
template <class Operand, class Output>
static void linear_tile(const LinearTask& task, int64_t row, int64_t num_rows, int64_t block, int64_t num_columns,
                        int64_t ahead) {
    ProductTile<Operand> tile;
    tile.x = (const typename Operand::X*)task.x + row * task.num_inputs;
    tile.x_stride = task.num_inputs;
    for (int64_t c = 0; c < num_columns; c++) {
        const int64_t weight_block = Output::weight_block(task, block, c, num_columns);
        tile.w[c] = (const typename Operand::W*)task.weight + weight_block * 16 * task.num_inputs;
    }
    tile.num_steps = task.num_inputs / Operand::depth;
    tile.ahead = ahead;
    tile.factor = 1.0f;
    const Addend addend = Output::addend(task, row, block, num_columns);
    if (addend.first != nullptr) {
        tile.addend = addend.first;
        tile.addend_stride = addend.stride;
        tile.out = task.out + row * task.out_stride + block * 16;
        tile.out_stride = task.out_stride;
        compute_tile(tile, num_rows, num_columns);
        return;
    }
    LinearTile result;
    result.row = row;
    result.num_rows = num_rows;
    result.block = block;
    result.num_columns = num_columns;
    tile.addend = kZeros;
    tile.addend_stride = 0;
    tile.out = result.sums;
    tile.out_stride = num_columns * 16;
    compute_tile(tile, num_rows, num_columns);
    Output::template write<Operand>(task, result);
}

// Computes blocks [first, end) of the output, in tiles of at most `most_columns` columns and `most_rows` rows. The tile
// of the first rows prefetches the weights that lie `ahead` elements behind its own weights. With `ahead` = 0, it
// prefetches the weights of the next columns.
template <class Operand, class Output>
static void linear_columns(const LinearTask& task, int64_t first, int64_t end, int64_t most_columns, int64_t most_rows,
                           int64_t ahead) {
    constexpr int per_block = Output::columns_per_block;
    for (int64_t block = first; block < end;) {
        const int64_t num_columns = tile_columns((end - block) * per_block, most_columns);
        const int64_t num_blocks = num_columns / per_block;
        const int64_t next = ahead != 0 ? ahead : num_blocks * 16 * task.num_inputs;
        for_row_tiles(task.num_rows, most_rows, [&](int64_t row, int64_t height) {
            linear_tile<Operand, Output>(task, row, height, block, num_columns, row == 0 ? next : 0);
        });
        block += num_blocks;
    }
}

template <class Operand, class Output>
static void linear_blocks(const LinearTask& task, int64_t first, int64_t end) {
    using W = typename Operand::W;
    int64_t ahead = task.num_rows <= kWideRows ? kStreamAhead : 0;
    if (task.next_weight != nullptr) {
        ahead = (const W*)task.next_weight - (const W*)task.weight;
    }
    if (task.num_rows <= kWideRows) {
        linear_columns<Operand, Output>(task, first, end, kWideColumns, kWideRows, ahead);
    } else if (task.num_rows > Output::narrow_rows && task.num_rows <= Output::tall_rows) {
        linear_columns<Operand, Output>(task, first, end, 1, Output::tall_rows, ahead);
    } else {
        linear_columns<Operand, Output>(task, first, end, Output::narrow_columns, Output::narrow_rows, ahead);
    }
}

template <class Operand>
static void linear(const LinearTask& task, int64_t first, int64_t end) {
    linear_blocks<Operand, StoreOutput>(task, first, end);
}

template <class Operand>
static void add_linear(const LinearTask& task, int64_t first, int64_t end) {
    linear_blocks<Operand, AddOutput>(task, first, end);
}

template <class Operand>
static void gate_linear(const LinearTask& task, int64_t first, int64_t end) {
    linear_blocks<Operand, GateOutput>(task, first, end);
}

template <class Operand>
static void scatter_linear(const LinearTask& task, int64_t first, int64_t end) {
    linear_blocks<Operand, ScatterOutput>(task, first, end);
}

template <class Operand>
static void scale(const float* values, float factor, int64_t count, void* x) {
    for (int64_t i = 0; i < count; i += 16) {
        Operand::store_x((typename Operand::X*)x + i, splat(factor) * load(values + i));
    }
}

template <class Operand>
static void gate(const float* gate_up, int64_t width, int64_t first, int64_t end, const rl_activation& activation,
                 void* out) {
    for (int64_t i = first * 16; i < end * 16; i += 16) {
        const F16 gated = activated(load(gate_up + i), load(gate_up + width + i), activation);
        Operand::store_x((typename Operand::X*)out + i, gated);
    }
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

// Writes row `id` of a packed matrix with `width` columns to `out`, as float32.
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
