// The passes of sampling over a row of x = logits / temperature [P]; sampler.h says what each pass returns.

#pragma once

#include <math.h>

#include "sampler.h"
#include "sampler_lanes.h"

namespace RL_ISA {

// Returns which of the tokens `base` to `base` + 15 belong to the prefix. `x`: their values.
RL_INLINE M16 lanes_of(F16 x, Prefix prefix, int64_t base) {
    const M16 above = is_above(x, splat(prefix.value));
    const int64_t before_end = prefix.end - base;
    if (before_end <= 0) {
        return above;
    }
    const M16 equal = is_equal(x, splat(prefix.value));
    return above | (equal & first_lanes(before_end < 16 ? (int)before_end : 16));
}

// Copies the last values of a row, fewer than kBlock, and pads them with -infinity.
RL_INLINE void pad_block(const float* values, int64_t count, float* block) {
    for (int64_t i = 0; i < kBlock; i++) {
        block[i] = i < count ? values[i] : -INFINITY;
    }
}

RL_INLINE float highest_of_block(const float* values) {
    return maximum(max(max(load(values), load(values + 16)), max(load(values + 32), load(values + 48))));
}

static bool find_highest(const float* values, int64_t vocab_size, float* highest) {
    float last[kBlock];
    uint32_t has_nan = 0;
    for (int64_t base = 0; base < vocab_size; base += kBlock) {
        const float* block = values + base;
        if (vocab_size - base < kBlock) {
            pad_block(block, vocab_size - base, last);
            block = last;
        }
        for (int64_t i = 0; i < kBlock; i += 16) {
            has_nan |= bits(is_nan(load(block + i)));
        }
        highest[base / kBlock] = highest_of_block(block);
    }
    return has_nan == 0;
}

static bool divide(const float* values, int64_t vocab_size, float divisor, float* x, float* highest) {
    float last[kBlock];
    uint32_t has_nan = 0;
    for (int64_t base = 0; base < vocab_size; base += kBlock) {
        const float* block = values + base;
        if (vocab_size - base < kBlock) {
            pad_block(block, vocab_size - base, last);
            block = last;
        }
        for (int64_t i = 0; i < kBlock; i += 16) {
            const F16 quotient = load(block + i) / splat(divisor);
            has_nan |= bits(is_nan(quotient));
            store(x + base + i, quotient);
        }
        highest[base / kBlock] = highest_of_block(x + base);
    }
    return has_nan == 0;
}

static void mask(const float* values, int64_t vocab_size, const int32_t* allowed, float* x) {
    const F16 never = splat(-INFINITY);
    int64_t base = 0;
    for (; base + 16 <= vocab_size; base += 16) {
        const uint32_t lanes = (uint32_t)allowed[base / 32] >> (base % 32) & 0xffffu;
        store(x + base, lanes == 0 ? never : choose(lanes_at(lanes), load(values + base), never));
    }
    for (; base < vocab_size; base++) {
        x[base] = ((uint32_t)allowed[base / 32] >> (base % 32) & 1u) != 0 ? values[base] : -INFINITY;
    }
}

// S is the best score so far, and u the uniform number from a token's hash (noise.h). A token has a score above S only
// if -log(u) < exp(x - S). Because 1 - u < -log(u), such a token also passes the test 1 - u < exp(x - S). With 24 bits
// of the hash and exp in float32, this test rules out nearly all tokens. The exact noise is computed only for the
// others. `limit` is S minus 2^-22 (|S| + 40). The term 2^-22 (|S| + 40) is more than the rounding errors of x + noise,
// of the noise (below 40) and of `limit` together. The factor 1 + 1e-5 covers the error of exp and the rounding of
// x - limit. Where exp is not 0, x - limit is above -87.
static Candidate draw(const float* x, int64_t padded_size, Prefix prefix, uint64_t key, Candidate first, bool by_id) {
    const F16 to_hash = splat(0x1p24f * (1.0f + 1e-5f));
    Candidate best = first;
    best.score = best.x + gumbel_noise(key, best.id);
    F16 limit = splat(best.score - 0x1p-22f * (fabsf(best.score) + 40.0f));
    for (int64_t base = 0; base < padded_size; base += 16) {
        const F16 values = load(x + base);
        const M16 lanes = lanes_of(values, prefix, base);
        if (bits(lanes) == 0) {
            continue;
        }
        const F16 bound = exp(values - limit) * to_hash;
        uint32_t left = bits(lanes) & ~bits(is_above(inverted_hash(key, base), bound));
        for (; left != 0; left &= left - 1) {
            const int64_t id = base + __builtin_ctz(left);
            const float score = x[id] + gumbel_noise(key, id);
            const bool is_earlier = (!by_id && x[id] != best.x) ? x[id] > best.x : id < best.id;
            if (score > best.score || (score == best.score && is_earlier)) {
                best = {x[id], id, score};
                limit = splat(score - 0x1p-22f * (fabsf(score) + 40.0f));
            }
        }
    }
    return best;
}

static double mass(const float* x, int64_t padded_size, Prefix prefix, float highest) {
    const D8 offset = splat64(highest);
    D8 low = splat64(0.0);
    D8 high = splat64(0.0);
    for (int64_t base = 0; base < padded_size; base += 16) {
        F16 values = load(x + base);
        const M16 lanes = lanes_of(values, prefix, base);
        if (bits(lanes) == 0) {
            continue;
        }
        values = choose(lanes, values, splat(-INFINITY));
        low = low + exp(widen(low_half(values)) - offset);
        high = high + exp(widen(high_half(values)) - offset);
    }
    return sum(low + high);
}

static int64_t collect(const float* x, int64_t padded_size, Prefix prefix, float* values, int32_t* ids) {
    int64_t count = 0;
    for (int64_t base = 0; base < padded_size; base += 16) {
        for (uint32_t left = bits(lanes_of(load(x + base), prefix, base)); left != 0; left &= left - 1) {
            const int64_t id = base + __builtin_ctz(left);
            values[count] = x[id];
            ids[count++] = (int32_t)id;
        }
    }
    return count;
}

static int64_t count(const float* x, int64_t padded_size, Prefix prefix) {
    int64_t total = 0;
    for (int64_t base = 0; base < padded_size; base += 16) {
        total += __builtin_popcount(bits(lanes_of(load(x + base), prefix, base)));
    }
    return total;
}

}  // namespace RL_ISA
