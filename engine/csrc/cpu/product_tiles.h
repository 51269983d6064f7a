// Tiles of products: out[r][c] = factor * x[r] . w[c] + addend[r][c], for R rows of x and C blocks of 16 rows of W.
//
// A tile keeps its sums in registers, so each size R x C is a function of its own. linear.h and attention.h share these
// functions, because each function adds to the library's compile time. C is 1, or even.

#pragma once

#include <array>
#include <utility>

#include "operands.h"

namespace RL_ISA {

constexpr int kMostSums = 24;  // the most sums of a tile, each of 16 lanes

template <class Operand>
struct ProductTile {
    const typename Operand::X* x;
    int64_t x_stride;
    const typename Operand::W* w[kWideColumns];
    int64_t num_steps;
    int64_t ahead;  // distance, in elements, from weights that the tile reads to those that it prefetches meanwhile
    float factor;
    const float* addend;  // [R][addend_stride], which may be `out`
    int64_t addend_stride;
    float* out;  // [R][out_stride], 16 elements for each column
    int64_t out_stride;
};

// The addend of all rows of a tile, if the tile adds nothing to its products.
alignas(64) static const float kZeros[16 * kWideColumns] = {0};

template <class Operand, int R, int C>
static void compute_tile(const ProductTile<Operand>& tile) {
    static_assert(R * C <= kMostSums, "the sums fit into the registers");
    const typename Operand::W* w[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
        w[c] = tile.w[c];
    }
    F16 sums[R][C];
    clear(sums);
    add_products<Operand, R, C, true>(tile.x, tile.x_stride, w, tile.num_steps, sums, tile.ahead);
    const F16 factor = splat(tile.factor);
#pragma GCC unroll 24
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const F16 addend = load(tile.addend + r * tile.addend_stride + c * 16);
            store(tile.out + r * tile.out_stride + c * 16, fma(sums[r][c], factor, addend));
        }
    }
}

template <class Operand>
using TileFunction = void (*)(const ProductTile<Operand>&);

// Returns the functions for tiles of C columns and 1, 2, .. rows.
template <class Operand, int C, int... R>
constexpr std::array<TileFunction<Operand>, sizeof...(R)> tile_functions(std::integer_sequence<int, R...>) {
    return {compute_tile<Operand, R + 1, C>...};
}

template <class Operand, int C, int MaxRows>
constexpr auto kTileFunctions = tile_functions<Operand, C>(std::make_integer_sequence<int, MaxRows>());

template <class Operand>
static void compute_tile(const ProductTile<Operand>& tile, int64_t num_rows, int64_t num_columns) {
    const int64_t row = num_rows - 1;
    switch (num_columns) {
        case 1:
            return kTileFunctions<Operand, 1, kSingleRows>[row](tile);
        case 2:
            return kTileFunctions<Operand, 2, kPairRows>[row](tile);
#if defined(__AVX512F__)
        case 6:
            return kTileFunctions<Operand, 6, kWideRows>[row](tile);
        case 8:
            return kTileFunctions<Operand, 8, kWideRows>[row](tile);
#endif
        case 4:
            return kTileFunctions<Operand, 4, kWideRows>[row](tile);
    }
}

// Returns the number of columns of the next tile, if `left` columns are left and a tile has at most `most` columns.
RL_INLINE int64_t tile_columns(int64_t left, int64_t most) {
    if (left >= most) {
        return most;
    }
    return left > 1 ? left / 2 * 2 : left;
}

// Calls tile(row, height) for all rows, in tiles of nearly equal height, at most `most`.
template <class Tile>
RL_INLINE void for_row_tiles(int64_t rows, int64_t most, Tile tile) {
    const int64_t num_tiles = (rows + most - 1) / most;
    int64_t row = 0;
    for (int64_t i = 0; i < num_tiles; i++) {
        const int64_t height = (rows - row + num_tiles - i - 1) / (num_tiles - i);
        tile(row, height);
        row += height;
    }
}

}  // namespace RL_ISA
