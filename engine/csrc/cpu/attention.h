// Causal attention over the paged KV cache, for prompts and for single tokens alike.
//
//   out[t] = softmax(scale * q[t] . K[visible]) V[visible]
//
// A token at position p sees the positions (p - window, p], or [0, p] without a window.
//
// The context is cut into segments of kSegment positions, counted from the start of the sequence. A row is a query
// token and a query head. Each row and segment has three results: the highest score m, the sum l of
// exp(scale (score - m)), and the sum o of exp(scale (score - m)) V. A score is q . K; with a soft cap, it is capped.
// row_sums.h combines the segments in order, and adds the sink of the query head behind the last segment.
//
// A tile is some query tokens of one sequence, with all query heads of one key/value head, so that keys and values are
// read once for all of these rows. A row's arithmetic does not depend on the size of the tile, or on the cut of the
// context for several threads. The row's sums run over the positions of a segment in order, and a hidden position adds
// exactly 0.

#pragma once

#include <math.h>

#include "kv_layout.h"
#include "operands.h"
#include "product_tiles.h"
#include "row_sums.h"

namespace RL_ISA {

constexpr int64_t kSegmentBlocks = kSegment / kBlockSize;

// The buffers of one thread for one tile. Rows are ordered by token, then by query head.
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

// Returns the positions of a segment that the token at `position` sees.
RL_INLINE Positions visible(const AttentionTask& task, int64_t segment, int64_t position) {
    int64_t first = segment * kSegment;
    int64_t end = first + kSegment;
    if (task.window != 0 && position + 1 - task.window > first) {
        first = position + 1 - task.window;
    }
    return {first, position + 1 < end ? position + 1 : end};
}

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

// scores[row][block * 16 ..] = q[row] . K for all rows and `num_columns` blocks from `block` on. The tile of the first
// rows prefetches the values of these blocks, which lie behind the keys.
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
    tile.factor = 1.0f;
    tile.addend = kZeros;
    tile.addend_stride = 0;
    tile.out_stride = kSegment;
    for_row_tiles(num_rows(task), most_rows, [&](int64_t row, int64_t height) {
        tile.x = scratch.query + row * task.head_dim;
        tile.ahead = row == 0 ? kBlockSize * task.head_dim : 0;
        tile.out = scratch.scores + row * kSegment + block * kBlockSize;
        compute_tile(tile, height, num_columns);
    });
}

// The distance, in elements, from the values of a block to the keys of another block: the block at the same place in
// the next segment. It is 0 if the task ends before that block.
template <class Operand>
RL_INLINE int64_t next_keys(const AttentionTask& task, int64_t block, const typename Operand::W* values) {
    const int64_t next = block + kSegmentBlocks;
    if (next >= task.end_block) {
        return 0;
    }
    KvBlock<Operand> pages(task.pages, task.block_table[next], task.num_kv_heads, task.head_dim);
    return pages.keys(task.kv_head) - values;
}

// values[row][column * 16 ..] = weights[row] . V over blocks [begin, end) of a segment, for R rows and C columns. With
// Fetches, each load of values also prefetches a cache line of the next segment's keys. The prefetches are spread over
// the loads, because a core drops prefetches while its queue of cache misses is full.
template <class Operand, int R, int C, bool Fetches>
static void value_tile(const AttentionTask& task, const typename Operand::X* weights, int64_t first_block,
                       int64_t begin, int64_t end, int64_t column, float* values) {
    F16 sums[R][C];
    clear(sums);
    for (int64_t block = begin; block < end; block++) {
        KvBlock<Operand> pages(task.pages, task.block_table[first_block + block], task.num_kv_heads, task.head_dim);
        const typename Operand::W* first = pages.values(task.kv_head);
        const typename Operand::W* v[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            v[c] = first + (column + c) * 16 * kBlockSize;
        }
        const int64_t ahead = Fetches ? next_keys<Operand>(task, first_block + block, first) : 0;
        add_products<Operand, R, C, Fetches>(weights + block * kBlockSize, kSegment, v, kBlockSize / Operand::depth, sums,
                                             ahead);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            store(values + r * task.head_dim + (column + c) * 16, sums[r][c]);
        }
    }
}

template <class Operand, int C, int MaxRows, bool Fetches>
RL_INLINE void value_rows(const AttentionTask& task, const typename Operand::X* weights, int64_t height,
                          int64_t first_block, int64_t begin, int64_t end, int64_t column, float* values) {
    if (height == MaxRows) {
        value_tile<Operand, MaxRows, C, Fetches>(task, weights, first_block, begin, end, column, values);
    } else if constexpr (MaxRows > 1) {
        value_rows<Operand, C, MaxRows - 1, Fetches>(task, weights, height, first_block, begin, end, column, values);
    }
}

template <class Operand, int C, int MaxRows>
static void value_columns(const AttentionTask& task, AttentionScratch<Operand>& scratch, int64_t first_block,
                          int64_t begin, int64_t end, int64_t column) {
    float* values = scratch.segment_values;
    // With few rows, the speed of memory limits the computation, so the next segment's keys are prefetched.
    if (num_rows(task) <= kWideRows && first_block + kSegmentBlocks < task.end_block) {
        value_rows<Operand, C, kWideRows, true>(task, scratch.weights, num_rows(task), first_block, begin, end, column,
                                                values);
        return;
    }
    for_row_tiles(num_rows(task), MaxRows, [&](int64_t row, int64_t height) __attribute__((always_inline)) {
        value_rows<Operand, C, MaxRows, false>(task, scratch.weights + row * kSegment, height, first_block, begin, end,
                                               column, values + row * task.head_dim);
    });
}

// exp(scale (score - m)) of 16 scores.
template <class Operand>
struct Softmax {
    static constexpr bool is_bf16 = sizeof(typename Operand::W) == 2;

    F16 factor, shift;

    RL_INLINE_MEMBER Softmax(float scale, float m)
        : factor(splat(is_bf16 ? scale * kLog2E : scale)),
          shift(m == -INFINITY ? zero() : zero() - splat(m) * factor) {}

    RL_INLINE_MEMBER F16 weight(F16 score) const {
        const F16 x = fma(score, factor, shift);
        return is_bf16 ? power_for_bf16(x) : exp(x);
    }
};

// Sets the scores of a row to -infinity at those positions of blocks [begin, end) that the row's token does not see.
template <class Operand>
RL_INLINE void hide_positions(const AttentionTask& task, float* scores, int64_t row, int64_t segment, int64_t begin,
                              int64_t end) {
    const Positions seen = visible(task, segment, task.first_position + row / group_size(task));
    const int64_t first = seen.first - segment * kSegment;
    const int64_t last = seen.end - segment * kSegment;
    for (int64_t i = begin * kBlockSize; i < first && i < end * kBlockSize; i++) {
        scores[i] = -INFINITY;
    }
    for (int64_t i = last > begin * kBlockSize ? last : begin * kBlockSize; i < end * kBlockSize; i++) {
        scores[i] = -INFINITY;
    }
}

// Replaces each score s in blocks [begin, end) of a row by (cap / scale) * tanh(scale * s / cap). tanh(y) is computed
// as 1 - 2 / (exp(2 y) + 1) in float32, which differs from the exact value by at most 1e-7.
RL_INLINE void cap_scores(const AttentionTask& task, float* scores, int64_t begin, int64_t end) {
    const F16 factor = splat(2.0f * task.scale / task.cap);
    const F16 most = splat(task.cap / task.scale);
    const F16 one = splat(1.0f);
    for (int64_t i = begin * kBlockSize; i < end * kBlockSize; i += kBlockSize) {
        const F16 tanh = one - splat(2.0f) / (exp(load(scores + i) * factor) + one);
        store(scores + i, most * tanh);
    }
}

// weights[row] = exp(scale (scores[row] - m)) in blocks [begin, end) of the segment, but 0 at positions that the row's
// token does not see. Sets the row's m and l. l is summed lane by lane over the blocks, then over the lanes.
template <class Operand>
static void soften_row(const AttentionTask& task, AttentionScratch<Operand>& scratch, int64_t row, int64_t segment,
                       int64_t begin, int64_t end) {
    float* scores = scratch.scores + row * kSegment;
    typename Operand::X* weights = scratch.weights + row * kSegment;
    if (task.cap != 0.0f) {
        cap_scores(task, scores, begin, end);
    }
    hide_positions<Operand>(task, scores, row, segment, begin, end);
    F16 highest = splat(-INFINITY);
    for (int64_t block = begin; block < end; block++) {
        highest = max(highest, load(scores + block * kBlockSize));
    }
    const float m = maximum(highest);
    const Softmax<Operand> softmax(task.scale, m);
    F16 total = zero();
    for (int64_t block = begin; block < end; block++) {
        const F16 weight = softmax.weight(load(scores + block * kBlockSize));
        Operand::store_x(weights + block * kBlockSize, weight);
        total = total + weight;
    }
    scratch.segment_highest[row] = m;
    scratch.segment_total[row] = sum(total);
}

// Computes m, l and o of all rows of the tile for one segment. Returns false if no row sees a position of the segment.
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

template <class Operand>
RL_INLINE AttentionScratch<Operand>& thread_scratch() {
    static thread_local AttentionScratch<Operand> scratch;
    return scratch;
}

// Sets m, l and o of all rows to their values before the first segment. Returns pointers to m, l and o in `scratch`.
template <class Operand>
RL_INLINE RowSums no_sums(const AttentionTask& task, AttentionScratch<Operand>& scratch) {
    for (int64_t row = 0; row < num_rows(task); row++) {
        scratch.highest[row] = -INFINITY;
        scratch.total[row] = 0.0f;
    }
    memset(scratch.values, 0, (size_t)(num_rows(task) * task.head_dim) * sizeof(float));
    return {scratch.highest, scratch.total, scratch.values};
}

template <class Operand>
static void attend(const AttentionTask& task) {
    AttentionScratch<Operand>& scratch = thread_scratch<Operand>();
    gather_queries<Operand>(task, scratch.query);
    const RowSums sums = no_sums(task, scratch);
    const int64_t num_segments = (task.first_position + task.num_tokens + kSegment - 1) / kSegment;
    for (int64_t segment = 0; segment < num_segments; segment++) {
        if (attend_to_segment(task, scratch, segment)) {
            combine_rows(task, {scratch.segment_highest, scratch.segment_total, scratch.segment_values}, sums);
        }
    }
    write_rows<Operand>(task, sums);
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
    const RowSums sums = no_sums(task, thread_scratch<Operand>());
    for (int64_t segment = 0; segment < num_segments; segment++) {
        const int64_t at = segment * rows;
        combine_rows(task, {task.highest + at, task.total + at, task.values + at * task.head_dim}, sums);
    }
    write_rows<Operand>(task, sums);
}

}  // namespace RL_ISA
