// Causal attention over the paged KV cache, for prompts and for single tokens alike.
//
//   out[t] = softmax(scale * q[t] . K[visible]) V[visible]
//
// A token at position p sees the positions (p - window, p], or [0, p] without a window.
//
// The context is cut into segments of kSegment positions, counted from the start of the sequence. For each segment a row
// (a query token and a query head) gets its highest score m, the sum l of exp(score - m), and the sum o of
// exp(score - m) V. Segments are combined in their order:
//
//   m' = max(m, m_s),   l' = l exp(m - m') + l_s exp(m_s - m'),   o' = o exp(m - m') + o_s exp(m_s - m')
//
// A tile is some query tokens of one sequence, with all query heads of one key/value head, so that keys and values are
// read once for all of them. Neither the tile nor the place of the cut between threads changes the arithmetic of a row:
// its sums run over the positions of a segment in order, and a hidden position adds exactly 0.

#pragma once

#include <math.h>

#include "kv_layout.h"
#include "operands.h"
#include "product_tiles.h"

namespace RL_ISA {

constexpr int64_t kSegmentBlocks = kSegment / kBlockSize;

// The work of one thread on one tile. Rows are ordered by token, then by query head.
template <class Operand>
struct AttentionScratch {
    alignas(64) float scores[kTileRows * kSegment];
    alignas(64) typename Operand::X weights[kTileRows * kSegment];
    alignas(64) typename Operand::X query[kTileRows * kMaxHeadDim];
    alignas(64) float segment_values[kTileRows * kMaxHeadDim];
    alignas(64) float values[kTileRows * kMaxHeadDim];
    float segment_highest[kTileRows];
    float segment_total[kTileRows];
    float highest[kTileRows];
    float total[kTileRows];
};

struct Positions {
    int64_t first, end;
};

// The positions of a segment that a token sees.
RL_INLINE Positions visible(const AttentionTask& task, int64_t segment, int64_t position) {
    int64_t first = segment * kSegment;
    int64_t end = first + kSegment;
    if (task.window != 0 && position + 1 - task.window > first) {
        first = position + 1 - task.window;
    }
    return {first, position + 1 < end ? position + 1 : end};
}

RL_INLINE int64_t group_size(const AttentionTask& task) { return task.num_heads / task.num_kv_heads; }
RL_INLINE int64_t num_rows(const AttentionTask& task) { return task.num_tokens * group_size(task); }

// Copies the tile's queries to [rows][d].
template <class Operand>
static void gather_queries(const AttentionTask& task, typename Operand::X* query) {
    const int64_t group = group_size(task);
    const int64_t size = group * task.head_dim;
    for (int64_t token = 0; token < task.num_tokens; token++) {
        const typename Operand::X* from =
            (const typename Operand::X*)task.query + (token * task.num_heads + task.kv_head * group) * task.head_dim;
        memcpy(query + token * size, from, (size_t)size * sizeof(typename Operand::X));
    }
}

// scores[row][block * 16 ..] = scale * q[row] . K for all rows and `num_columns` blocks from `block` on.
template <class Operand>
static void score_blocks(const AttentionTask& task, AttentionScratch<Operand>& scratch, int64_t first_block,
                         int64_t block, int64_t num_columns, int64_t most_rows) {
    ProductTile<Operand> tile;
    tile.x_stride = task.head_dim;
    for (int64_t c = 0; c < num_columns; c++) {
        KvBlock<Operand> pages(task.pages, task.block_table[first_block + block + c], task.num_kv_heads, task.head_dim);
        tile.w[c] = pages.keys(task.kv_head);
    }
    tile.num_steps = task.head_dim / Operand::depth;
    tile.ahead = 0;
    tile.factor = task.scale;
    tile.addend = kZeros;
    tile.addend_stride = 0;
    tile.out_stride = kSegment;
    for_row_tiles(num_rows(task), most_rows, [&](int64_t row, int64_t height) {
        tile.x = scratch.query + row * task.head_dim;
        tile.out = scratch.scores + row * kSegment + block * kBlockSize;
        compute_tile(tile, height, num_columns);
    });
}

// values[row][column * 16 ..] = weights[row] . V over blocks [begin, end) of a segment, for R rows and C columns.
template <class Operand, int R, int C>
static void value_tile(const AttentionTask& task, const typename Operand::X* weights, int64_t first_block,
                       int64_t begin, int64_t end, int64_t column, float* values) {
    F16 sums[R][C];
    clear(sums);
    for (int64_t block = begin; block < end; block++) {
        KvBlock<Operand> pages(task.pages, task.block_table[first_block + block], task.num_kv_heads, task.head_dim);
        const typename Operand::W* v[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            v[c] = pages.values(task.kv_head) + (column + c) * 16 * kBlockSize;
        }
        add_products<Operand, R, C>(weights + block * kBlockSize, kSegment, v, kBlockSize / Operand::depth, sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            store(values + r * task.head_dim + (column + c) * 16, sums[r][c]);
        }
    }
}

template <class Operand, int C, int MaxRows>
RL_INLINE void value_rows(const AttentionTask& task, const typename Operand::X* weights, int64_t height,
                          int64_t first_block, int64_t begin, int64_t end, int64_t column, float* values) {
    if (height == MaxRows) {
        value_tile<Operand, MaxRows, C>(task, weights, first_block, begin, end, column, values);
    } else if constexpr (MaxRows > 1) {
        value_rows<Operand, C, MaxRows - 1>(task, weights, height, first_block, begin, end, column, values);
    }
}

template <class Operand, int C, int MaxRows>
static void value_columns(const AttentionTask& task, AttentionScratch<Operand>& scratch, int64_t first_block,
                          int64_t begin, int64_t end, int64_t column) {
    for_row_tiles(num_rows(task), MaxRows, [&](int64_t row, int64_t height) __attribute__((always_inline)) {
        value_rows<Operand, C, MaxRows>(task, scratch.weights + row * kSegment, height, first_block, begin, end, column,
                                        scratch.segment_values + row * task.head_dim);
    });
}

// weights[row] = exp(scores[row] - m) in blocks [begin, end) of the segment, 0 where the row's token sees nothing.
// Sets the row's m and l. l is summed lane by lane over the blocks, then over the lanes.
template <class Operand>
static void soften_row(const AttentionTask& task, AttentionScratch<Operand>& scratch, int64_t row, int64_t segment,
                       int64_t begin, int64_t end) {
    float* scores = scratch.scores + row * kSegment;
    typename Operand::X* weights = scratch.weights + row * kSegment;
    Positions seen = visible(task, segment, task.first_position + row / group_size(task));
    const int64_t first = seen.first - segment * kSegment;
    const int64_t last = seen.end - segment * kSegment;
    for (int64_t i = begin * kBlockSize; i < first && i < end * kBlockSize; i++) {
        scores[i] = -INFINITY;
    }
    for (int64_t i = last > begin * kBlockSize ? last : begin * kBlockSize; i < end * kBlockSize; i++) {
        scores[i] = -INFINITY;
    }
    F16 highest = splat(-INFINITY);
    for (int64_t block = begin; block < end; block++) {
        highest = max(highest, load(scores + block * kBlockSize));
    }
    const float m = maximum(highest);
    F16 shift = splat(m == -INFINITY ? 0.0f : m);
    F16 total = zero();
    for (int64_t block = begin; block < end; block++) {
        const F16 below = load(scores + block * kBlockSize) - shift;
        const F16 weight = sizeof(typename Operand::W) == 2 ? exp_for_bf16(below) : exp(below);
        Operand::store_x(weights + block * kBlockSize, weight);
        total = total + weight;
    }
    scratch.segment_highest[row] = m;
    scratch.segment_total[row] = sum(total);
}

// Computes m, l and o of all rows of the tile for one segment. Returns false if no row sees any of it.
template <class Operand>
static bool attend_to_segment(const AttentionTask& task, AttentionScratch<Operand>& scratch, int64_t segment) {
    const int64_t last_position = task.first_position + task.num_tokens - 1;
    const int64_t first = visible(task, segment, task.first_position).first;
    const int64_t last = visible(task, segment, last_position).end;
    if (first >= last) {
        return false;
    }
    const int64_t first_block = segment * kSegmentBlocks;
    const int64_t begin = first / kBlockSize - first_block;
    const int64_t end = (last + kBlockSize - 1) / kBlockSize - first_block;
    const bool is_wide = num_rows(task) <= kWideRows;
    const int64_t most_columns = is_wide ? kWideColumns : kNarrowColumns;
    const int64_t most_rows = is_wide ? kWideRows : kNarrowRows;
    for (int64_t block = begin; block < end;) {
        const int64_t num_columns = tile_columns(end - block, most_columns);
        score_blocks(task, scratch, first_block, block, num_columns, most_rows);
        block += num_columns;
    }
    for (int64_t row = 0; row < num_rows(task); row++) {
        soften_row(task, scratch, row, segment, begin, end);
    }
    const int64_t num_columns = task.head_dim / 16;
    int64_t column = 0;
    for (; column + kValueColumns <= num_columns; column += kValueColumns) {
        value_columns<Operand, kValueColumns, kValueRows>(task, scratch, first_block, begin, end, column);
    }
    for (; column < num_columns; column++) {
        value_columns<Operand, 1, kNarrowRows>(task, scratch, first_block, begin, end, column);
    }
    return true;
}

// Adds a segment's m, l and o of one row to those of the earlier segments.
RL_INLINE void combine_row(int64_t head_dim, float segment_highest, float segment_total, const float* segment_values,
                           float* highest, float* total, float* values) {
    // The highest score does not tell: lanes lose a NaN to the hidden positions after it, so m may be -infinity although
    // the row sees positions. Their weights, and so the sum, are NaN then.
    if (segment_total == 0.0f) {
        return;  // the row sees nothing of this segment
    }
    const float m = *highest > segment_highest ? *highest : segment_highest;
    float factors[16] = {*highest - m, segment_highest - m};
    store(factors, exp(load(factors)));
    F16 old_factor = splat(factors[0]);
    F16 new_factor = splat(factors[1]);
    for (int64_t i = 0; i < head_dim; i += 16) {
        store(values + i, fma(load(values + i), old_factor, load(segment_values + i) * new_factor));
    }
    *total = *total * factors[0] + segment_total * factors[1];
    *highest = m;
}

// out[token][head] = o / l
template <class Operand>
static void write_row(const AttentionTask& task, int64_t row, float total, const float* values) {
    const int64_t group = group_size(task);
    const int64_t head = task.kv_head * group + row % group;
    typename Operand::X* out =
        (typename Operand::X*)task.out + (row / group * task.num_heads + head) * task.head_dim;
    F16 factor = splat(1.0f / total);
    for (int64_t i = 0; i < task.head_dim; i += 16) {
        Operand::store_x(out + i, load(values + i) * factor);
    }
}

template <class Operand>
RL_INLINE AttentionScratch<Operand>& thread_scratch() {
    static thread_local AttentionScratch<Operand> scratch;
    return scratch;
}

template <class Operand>
static void attend(const AttentionTask& task) {
    AttentionScratch<Operand>& scratch = thread_scratch<Operand>();
    gather_queries<Operand>(task, scratch.query);
    const int64_t rows = num_rows(task);
    const int64_t d = task.head_dim;
    for (int64_t row = 0; row < rows; row++) {
        scratch.highest[row] = -INFINITY;
        scratch.total[row] = 0.0f;
        memset(scratch.values + row * d, 0, (size_t)d * sizeof(float));
    }
    const int64_t num_segments = (task.first_position + task.num_tokens + kSegment - 1) / kSegment;
    for (int64_t segment = 0; segment < num_segments; segment++) {
        if (!attend_to_segment(task, scratch, segment)) {
            continue;
        }
        for (int64_t row = 0; row < rows; row++) {
            combine_row(d, scratch.segment_highest[row], scratch.segment_total[row], scratch.segment_values + row * d,
                        &scratch.highest[row], &scratch.total[row], scratch.values + row * d);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        write_row<Operand>(task, row, scratch.total[row], scratch.values + row * d);
    }
}

template <class Operand>
static void attend_segment(const AttentionTask& task, int64_t segment) {
    AttentionScratch<Operand>& scratch = thread_scratch<Operand>();
    gather_queries<Operand>(task, scratch.query);
    const int64_t rows = num_rows(task);
    const bool is_seen = attend_to_segment(task, scratch, segment);
    for (int64_t row = 0; row < rows; row++) {
        task.highest[row] = is_seen ? scratch.segment_highest[row] : -INFINITY;
        task.total[row] = is_seen ? scratch.segment_total[row] : 0.0f;
    }
    if (is_seen) {
        memcpy(task.values, scratch.segment_values, (size_t)(rows * task.head_dim) * sizeof(float));
    }
}

template <class Operand>
static void combine(const AttentionTask& task, int64_t num_segments) {
    const int64_t rows = num_rows(task);
    const int64_t d = task.head_dim;
    for (int64_t row = 0; row < rows; row++) {
        float highest = -INFINITY;
        float total = 0.0f;
        alignas(64) float values[kMaxHeadDim] = {0};
        for (int64_t segment = 0; segment < num_segments; segment++) {
            const int64_t at = segment * rows + row;
            combine_row(d, task.highest[at], task.total[at], task.values + at * d, &highest, &total, values);
        }
        write_row<Operand>(task, row, total, values);
    }
}

}  // namespace RL_ISA
