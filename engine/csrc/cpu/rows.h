// Operations on the row of one token: RMSNorm, and rotary embedding with the write into the KV cache.
//
// RMSNorm: x = weight * row / sqrt(mean(row^2) + eps). Rotary embedding in the half-split layout: of the first R
// elements of a head, the pair (i, i + R / 2) is rotated by the angle whose cosine and sine the tables hold.

#pragma once

#include <math.h>

#include "kv_layout.h"
#include "operands.h"

namespace RL_ISA {

// 1 / sqrt(mean(row^2) + eps)
RL_INLINE float inverse_rms(const float* row, int64_t width, float eps) {
    F16 squares = zero();
    for (int64_t i = 0; i < width; i += 16) {
        F16 values = load(row + i);
        squares = fma(values, values, squares);
    }
    return 1.0f / sqrtf(sum(squares) / (float)width + eps);
}

template <class Operand>
static void rms_norm(const float* row, const float* weight, float eps, int64_t width, void* x) {
    if (weight == nullptr) {
        for (int64_t i = 0; i < width; i += 16) {
            Operand::store_x((typename Operand::X*)x + i, load(row + i));
        }
        return;
    }
    F16 factor = splat(inverse_rms(row, width, eps));
    for (int64_t i = 0; i < width; i += 16) {
        Operand::store_x((typename Operand::X*)x + i, load(row + i) * factor * load(weight + i));
    }
}

static void add_row(const float* update, const float* weight, float eps, float scale, int64_t width, float* residual) {
    const F16 factor = splat(weight == nullptr ? scale : scale * inverse_rms(update, width, eps));
    for (int64_t i = 0; i < width; i += 16) {
        const F16 value = load(update + i) * factor;
        store(residual + i, load(residual + i) + (weight == nullptr ? value : value * load(weight + i)));
    }
}

// Up to 16 elements of a head, normalised if `norm` is not null.
RL_INLINE F16 normalised(const float* head, const float* norm, F16 factor, int64_t first, int count) {
    F16 values = load_first(head + first, count);
    return norm == nullptr ? values : values * factor * load_first(norm + first, count);
}

RL_INLINE F16 normalised_16(const float* head, const float* norm, F16 factor, int64_t first) {
    F16 values = load(head + first);
    return norm == nullptr ? values : values * factor * load(norm + first);
}

// Normalises (if `norm` is not null) and rotates one head into `out` [d]. `wide_factor`: see the function wide_factor.
RL_INLINE void rotate_head(const RotaryTask& task, const float* head, const float* norm, float wide_factor, float* out) {
    const int64_t half = task.rotary_dim / 2;
    const bool is_own = norm != nullptr && !task.has_wide_norms;
    const F16 factor = splat(is_own ? inverse_rms(head, task.head_dim, task.eps) : wide_factor);
    for (int64_t i = task.rotary_dim; i < task.head_dim; i += 16) {
        const int count = task.head_dim - i < 16 ? (int)(task.head_dim - i) : 16;
        store_first(out + i, normalised(head, norm, factor, i, count), count);
    }
    if (half % 16 == 0) {
        // This loop stores whole registers, because a later load of these bytes would have to wait for a masked store.
        for (int64_t i = 0; i < half; i += 16) {
            const F16 first = normalised_16(head, norm, factor, i);
            const F16 second = normalised_16(head, norm, factor, i + half);
            const F16 cosine = load(task.cosines + i);
            const F16 sine = load(task.sines + i);
            store(out + i, first * cosine - second * sine);
            store(out + i + half, second * cosine + first * sine);
        }
        return;
    }
    for (int64_t i = 0; i < half; i += 16) {
        const int count = half - i < 16 ? (int)(half - i) : 16;
        const F16 first = normalised(head, norm, factor, i, count);
        const F16 second = normalised(head, norm, factor, i + half, count);
        const F16 cosine = load_first(task.cosines + i, count);
        const F16 sine = load_first(task.sines + i, count);
        store_first(out + i, first * cosine - second * sine, count);
        store_first(out + i + half, second * cosine + first * sine, count);
    }
}

// Returns the factor of a norm over `num_heads` heads together. Returns 1 if each head is normalised alone, or if there
// is no norm.
RL_INLINE float wide_factor(const RotaryTask& task, const float* heads, int64_t num_heads) {
    const bool is_wide = task.has_wide_norms && task.q_norm != nullptr;
    return is_wide ? inverse_rms(heads, num_heads * task.head_dim, task.eps) : 1.0f;
}

template <class Operand>
static void rotate_and_write(const RotaryTask& task) {
    const int64_t d = task.head_dim;
    float rotated[kMaxHeadDim];
    const float* head = task.qkv;
    typename Operand::X* query = (typename Operand::X*)task.query;
    // A wide norm has d weights for each head; other norms have the same d weights for all heads.
    const int64_t norm_step = task.has_wide_norms && task.q_norm != nullptr ? d : 0;
    const float query_factor = wide_factor(task, head, task.num_heads);
    const float* norm = task.q_norm;
    for (int64_t h = 0; h < task.num_heads; h++, head += d, query += d, norm += norm_step) {
        rotate_head(task, head, norm, query_factor, rotated);
        for (int64_t i = 0; i < d; i += 16) {
            Operand::store_x(query + i, load(rotated + i));
        }
    }
    KvBlock<Operand> block(task.pages, task.slot / kBlockSize, task.num_kv_heads, d);
    const int64_t position = task.slot % kBlockSize;
    const float key_factor = wide_factor(task, head, task.num_kv_heads);
    norm = task.k_norm;
    for (int64_t h = 0; h < task.num_kv_heads; h++, head += d, norm += norm_step) {
        rotate_head(task, head, norm, key_factor, rotated);
        block.write_key(h, position, rotated);
        block.write_value(h, position, head + task.num_kv_heads * d);
    }
}

}  // namespace RL_ISA
