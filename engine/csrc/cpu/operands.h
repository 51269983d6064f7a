// Operands of the products: how x and W are stored, and how one step of a dot product multiplies them.
//
// A weight block holds 16 rows of W as [K / depth][16][depth]. So one load gives the next `depth` elements of 16 rows.
// x is stored row by row. One step multiplies `depth` elements of a row of x by the same columns of 16 rows of W.
//
//   Float32            W float32, depth 1, x float32
//   BFloat16 (AVX-512) W bfloat16, depth 2, x bfloat16: the instruction VDPBF16PS
//   BFloat16 (AVX2)    W bfloat16, depth 2, x float32: W is widened, and the arithmetic is float32

#pragma once

#include "vectors.h"

namespace RL_ISA {

#if defined(__AVX512F__)
// AVX-512. Shapes of tiles, in rows x blocks of 16 columns: at most 24 of the 32 registers hold the sums of a tile.
constexpr int kWideRows = 3;
constexpr int kWideColumns = 8;
constexpr int kNarrowRows = 12;
constexpr int kNarrowColumns = 2;
constexpr int kPairRows = 12;  // most rows of a tile of 2 blocks
constexpr int kSingleRows = 16;  // most rows of a tile of 1 block
constexpr int kTallRows = 16;  // a product of at most this many rows reads the weights once, a block at a time
constexpr int kValueRows = 6;
constexpr int kValueColumns = 4;
constexpr int kInt8WideRows = 1;
constexpr int kInt8WideColumns = 8;
constexpr int kInt8NarrowColumns = 2;
constexpr int kInt8Rows = 6;
#else
// AVX2: the sums of 16 columns take two of the 16 registers, which hold 8 floats each.
constexpr int kWideRows = 1;
constexpr int kWideColumns = 4;
constexpr int kNarrowRows = 6;
constexpr int kNarrowColumns = 1;
constexpr int kPairRows = 3;
constexpr int kSingleRows = 6;
constexpr int kTallRows = 0;
constexpr int kValueRows = 3;
constexpr int kValueColumns = 2;
constexpr int kInt8WideRows = 1;
constexpr int kInt8WideColumns = 2;
constexpr int kInt8NarrowColumns = 1;
constexpr int kInt8Rows = 2;
#endif
// The distance, in elements, from the weights that a wide tile reads to the weights that it prefetches meanwhile.
constexpr int64_t kStreamAhead = 1024;

struct Float32 {
    using X = float;
    using W = float;
    using WStep = F16;
    using XStep = F16;
    static constexpr int depth = 1;

    static RL_INLINE_MEMBER WStep load_w(const W* w) { return load(w); }
    static RL_INLINE_MEMBER XStep load_x(const X* x) { return splat(*x); }
    static RL_INLINE_MEMBER F16 multiply_add(WStep w, XStep x, F16 sum) { return fma(w, x, sum); }
    static RL_INLINE_MEMBER void store_x(X* x, F16 values) { store(x, values); }
    static RL_INLINE_MEMBER void store_w(W* w, F16 values) { store(w, values); }
    // Stores 16 elements in 16 neighbouring groups of `depth` elements: one in each group, at index `part` (0 <= part <
    // depth). The other elements of the groups are kept.
    static RL_INLINE_MEMBER void store_part(W* to, const W* from, int) { store(to, load(from)); }
    static RL_INLINE_MEMBER float from_w(W value) { return value; }
    static RL_INLINE_MEMBER F16 load_values(const X* x) { return load(x); }
    static RL_INLINE_MEMBER F16 load_weights(const W* w) { return load(w); }
};

#if defined(__AVX512BF16__)

struct BFloat16 {
    using X = uint16_t;
    using W = uint16_t;
    using WStep = __m512bh;
    using XStep = __m512bh;
    static constexpr int depth = 2;

    static RL_INLINE_MEMBER WStep load_w(const W* w) { return (__m512bh)_mm512_loadu_si512(w); }
    static RL_INLINE_MEMBER XStep load_x(const X* x) {
        int32_t pair;
        memcpy(&pair, x, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static RL_INLINE_MEMBER F16 multiply_add(WStep w, XStep x, F16 sum) { return {_mm512_dpbf16_ps(sum.v, w, x)}; }
    static RL_INLINE_MEMBER void store_x(X* x, F16 values) { store_bf16(x, values); }
    static RL_INLINE_MEMBER void store_w(W* w, F16 values) { store_bf16(w, values); }
    static RL_INLINE_MEMBER void store_part(W* to, const W* from, int part) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
        if (part == 0) {
            _mm512_mask_storeu_epi16(to, 0x55555555, wide);
        } else {
            _mm512_mask_storeu_epi16(to, 0xaaaaaaaa, _mm512_slli_epi32(wide, 16));
        }
    }
    static RL_INLINE_MEMBER float from_w(W value) { return bf16_to_float(value); }
    static RL_INLINE_MEMBER F16 load_values(const X* x) { return load_bf16(x); }
    static RL_INLINE_MEMBER F16 load_weights(const W* w) { return load_bf16(w); }
};

#else

struct BFloat16 {
    using X = float;
    using W = uint16_t;
    struct WStep {
        F16 even, odd;
    };
    struct XStep {
        F16 even, odd;
    };
    static constexpr int depth = 2;

    static RL_INLINE_MEMBER WStep load_w(const W* w) {
        __m256i first = _mm256_loadu_si256((const __m256i*)w);
        __m256i second = _mm256_loadu_si256((const __m256i*)(w + 16));
        __m256i high = _mm256_set1_epi32((int)0xffff0000);
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(first, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(second, 16))},
                {_mm256_castsi256_ps(_mm256_and_si256(first, high)), _mm256_castsi256_ps(_mm256_and_si256(second, high))}};
    }
    static RL_INLINE_MEMBER XStep load_x(const X* x) { return {splat(x[0]), splat(x[1])}; }
    static RL_INLINE_MEMBER F16 multiply_add(WStep w, XStep x, F16 sum) {
        return fma(w.odd, x.odd, fma(w.even, x.even, sum));
    }
    static RL_INLINE_MEMBER void store_x(X* x, F16 values) { store(x, values); }
    static RL_INLINE_MEMBER void store_w(W* w, F16 values) { store_bf16(w, values); }
    static RL_INLINE_MEMBER void store_part(W* to, const W* from, int part) {
        for (int lane = 0; lane < 16; lane++) {
            to[lane * depth + part] = from[lane];
        }
    }
    static RL_INLINE_MEMBER float from_w(W value) { return bf16_to_float(value); }
    static RL_INLINE_MEMBER F16 load_values(const X* x) { return load(x); }
    static RL_INLINE_MEMBER F16 load_weights(const W* w) { return load_bf16(w); }
};

#endif

// sums[r][c] += x[r] . w[c] over `num_steps` steps, in the order of K. `x_stride`: elements from row to row of x. With
// Prefetch, each load of weights also prefetches the weights `ahead` elements behind it into the second-level cache.
//
// Every sum is one chain of additions in the order of K, whatever R and C are. Therefore a row's result does not depend
// on the number of rows that are computed together.
template <class Operand, int R, int C, bool Prefetch = false>
RL_INLINE void add_products(const typename Operand::X* x, int64_t x_stride, const typename Operand::W* const (&w)[C],
                            int64_t num_steps, F16 (&sums)[R][C], int64_t ahead = 0) {
    constexpr int depth = Operand::depth;
    for (int64_t step = 0; step < num_steps; step++) {
        typename Operand::WStep w_step[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const typename Operand::W* source = w[c] + step * 16 * depth;
            w_step[c] = Operand::load_w(source);
            if (Prefetch) {
                _mm_prefetch((const char*)(source + ahead), _MM_HINT_T1);
            }
        }
#pragma GCC unroll 24
        for (int r = 0; r < R; r++) {
            typename Operand::XStep x_step = Operand::load_x(x + r * x_stride + step * depth);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                sums[r][c] = Operand::multiply_add(w_step[c], x_step, sums[r][c]);
            }
        }
    }
}

template <int R, int C>
RL_INLINE void clear(F16 (&sums)[R][C]) {
#pragma GCC unroll 24
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            sums[r][c] = zero();
        }
    }
}

}  // namespace RL_ISA
