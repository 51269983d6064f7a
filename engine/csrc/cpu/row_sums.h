// RowSums: the softmax of a tile's rows, while the segments of the context are added to it (attention.h).
//
// A row has the highest score m, the sum l of exp(scale (score - m)), and the sum o of exp(scale (score - m)) V.
// Segments are combined in order:
//
//   m' = max(m, m_s),   f = exp(scale (m - m')),   f_s = exp(scale (m_s - m'))
//   l' = l f + l_s f_s,   o' = o f + o_s f_s
//
// The output of a row is o / l. If the row's query head has a sink s, the softmax has one more score, which is s, is
// neither scaled nor capped, and has no value vector. It only adds to the divisor:
//
//   m' = max(scale m, s),   out = o exp(scale m - m') / (l exp(scale m - m') + exp(s - m'))
//
// The sink is added once, behind the last segment. So the result still does not depend on the cut of the context.

#pragma once

#include <math.h>

#include "kernels.h"
#include "vectors.h"

namespace RL_ISA {

// For each row: its highest score m, its sum l and its sum o (see above), over one segment or several.
struct RowSums {
    float* highest;  // [rows]
    float* total;    // [rows]
    float* values;   // [rows][d]
};

RL_INLINE int64_t group_size(const AttentionTask& task) { return task.num_heads / task.num_kv_heads; }
RL_INLINE int64_t num_rows(const AttentionTask& task) { return task.num_tokens * group_size(task); }

// Returns the query head of a row of the tile.
RL_INLINE int64_t query_head(const AttentionTask& task, int64_t row) {
    return task.kv_head * group_size(task) + row % group_size(task);
}

// Combines a segment's m, l and o of up to 16 rows with the m, l and o of the earlier segments.
RL_INLINE void combine_lanes(const AttentionTask& task, int count, RowSums segment, RowSums sums) {
    const F16 old_highest = load_first(sums.highest, count);
    const F16 new_highest = load_first(segment.highest, count);
    const F16 m = max(old_highest, new_highest);
    const F16 scale = splat(task.scale);
    alignas(64) float highest[16];
    alignas(64) float old_factors[16];
    alignas(64) float new_factors[16];
    store(highest, m);
    store(old_factors, exp((old_highest - m) * scale));
    store(new_factors, exp((new_highest - m) * scale));
    for (int row = 0; row < count; row++) {
        // The test reads the sum instead of m. If a lane has a NaN and a hidden position follows in this lane, max
        // drops the NaN. So m may be -infinity although the row sees positions. The sum is NaN in this case.
        if (segment.total[row] == 0.0f) {
            continue;  // the row sees no position of this segment
        }
        const F16 old_factor = splat(old_factors[row]);
        const F16 new_factor = splat(new_factors[row]);
        float* values = sums.values + row * task.head_dim;
        const float* segment_values = segment.values + row * task.head_dim;
        for (int64_t i = 0; i < task.head_dim; i += 16) {
            store(values + i, fma(load(values + i), old_factor, load(segment_values + i) * new_factor));
        }
        sums.total[row] = sums.total[row] * old_factors[row] + segment.total[row] * new_factors[row];
        sums.highest[row] = highest[row];
    }
}

static void combine_rows(const AttentionTask& task, RowSums segment, RowSums sums) {
    const int64_t rows = num_rows(task);
    for (int64_t row = 0; row < rows; row += 16) {
        const int64_t at = row * task.head_dim;
        combine_lanes(task, rows - row < 16 ? (int)(rows - row) : 16,
                      {segment.highest + row, segment.total + row, segment.values + at},
                      {sums.highest + row, sums.total + row, sums.values + at});
    }
}

// Returns the factor of o in the output of a row with a sink: `highest` is scale * m, and `total` is l. One of the two
// exponentials in the formula is 1. A NaN in `highest` or `total` stays a NaN. The function is not inlined, because its
// callers must round alike, and a compiler may fuse products and sums in one place but not in the other.
static __attribute__((noinline)) float factor_with_sink(float highest, float total, float sink) {
    const float weight = first_lane(exp(splat(-fabsf(highest - sink))));  // of the lower of the two
    return highest > sink ? 1.0f / (total + weight) : weight / (total * weight + 1.0f);
}

// out[token][head] = factor * o
template <class Operand>
static void write_row(const AttentionTask& task, int64_t row, float factor, const float* values) {
    typename Operand::X* out =
        (typename Operand::X*)task.out +
        (row / group_size(task) * task.num_heads + query_head(task, row)) * task.head_dim;
    const F16 factors = splat(factor);
    for (int64_t i = 0; i < task.head_dim; i += 16) {
        Operand::store_x(out + i, load(values + i) * factors);
    }
}

template <class Operand>
static void write_rows(const AttentionTask& task, RowSums sums) {
    for (int64_t row = 0; row < num_rows(task); row++) {
        const float total = sums.total[row];
        const float factor =
            task.sinks == nullptr
                ? 1.0f / total
                : factor_with_sink(sums.highest[row] * task.scale, total, task.sinks[query_head(task, row)]);
        write_row<Operand>(task, row, factor, sums.values + row * task.head_dim);
    }
}

}  // namespace RL_ISA
