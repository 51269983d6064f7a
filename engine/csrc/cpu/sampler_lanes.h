// The vectors of sampling besides F16: masks, float64 lanes, and the hash of sixteen token ids.

#pragma once

#include "noise.h"
#include "vectors.h"

namespace RL_ISA {

#if defined(__AVX512F__)

// A truth value for each lane of an F16.
struct M16 {
    __mmask16 m;
};

RL_INLINE M16 operator&(M16 a, M16 b) { return {(__mmask16)(a.m & b.m)}; }
RL_INLINE M16 operator|(M16 a, M16 b) { return {(__mmask16)(a.m | b.m)}; }
// Returns the mask as an integer: bit i is lane i.
RL_INLINE uint32_t bits(M16 a) { return a.m; }
RL_INLINE M16 first_lanes(int count) { return {(__mmask16)((1u << count) - 1)}; }
// Returns the mask of the lanes whose bit is set.
RL_INLINE M16 lanes_at(uint32_t bits) { return {(__mmask16)bits}; }
RL_INLINE M16 is_above(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
RL_INLINE M16 is_equal(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
RL_INLINE M16 is_nan(F16 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
// a where `mask`, else b
RL_INLINE F16 choose(M16 mask, F16 a, F16 b) { return {_mm512_mask_blend_ps(mask.m, b.v, a.v)}; }

// Eight float64 lanes.
struct D8 {
    __m512d v;
};

RL_INLINE D8 splat64(double x) { return {_mm512_set1_pd(x)}; }
RL_INLINE D8 widen(__m256 half) { return {_mm512_cvtps_pd(half)}; }
RL_INLINE D8 operator+(D8 a, D8 b) { return {_mm512_add_pd(a.v, b.v)}; }
RL_INLINE D8 operator-(D8 a, D8 b) { return {_mm512_sub_pd(a.v, b.v)}; }
RL_INLINE D8 operator*(D8 a, D8 b) { return {_mm512_mul_pd(a.v, b.v)}; }
RL_INLINE D8 fma(D8 a, D8 b, D8 c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
RL_INLINE D8 max(D8 a, D8 b) { return {_mm512_max_pd(a.v, b.v)}; }
RL_INLINE D8 round(D8 a) { return {_mm512_roundscale_pd(a.v, 0)}; }
// a * 2^n, n integral and in [-1022, 1023]
RL_INLINE D8 scale_by_power(D8 a, D8 n) { return {_mm512_scalef_pd(a.v, n.v)}; }
RL_INLINE void store64(double* p, D8 a) { _mm512_storeu_pd(p, a.v); }

// The upper 24 bits of 2^64 - 1 - mix(key + (id + 1) * kGolden), for sixteen ids from `first` on.
RL_INLINE F16 inverted_hash(uint64_t key, int64_t first) {
    const __m512i steps = _mm512_mullo_epi64(_mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8), _mm512_set1_epi64(kGolden));
    const __m512i mix1 = _mm512_set1_epi64(kMix1);
    const __m512i mix2 = _mm512_set1_epi64(kMix2);
    __m256i upper[2];
    for (int half = 0; half < 2; half++) {
        const uint64_t base = key + (uint64_t)(first + 8 * half) * kGolden;
        __m512i z = _mm512_add_epi64(_mm512_set1_epi64((int64_t)base), steps);
        z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), mix1);
        z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), mix2);
        // The hash's last step, z ^ (z >> 31), is left out, because it does not change the upper 24 bits.
        z = _mm512_srli_epi64(_mm512_xor_si512(z, _mm512_set1_epi64(-1)), 40);
        upper[half] = _mm512_cvtepi64_epi32(z);
    }
    return {_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(upper[0]), upper[1], 1))};
}

#else

struct M16 {
    __m256 a, b;
};

RL_INLINE M16 operator&(M16 x, M16 y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
RL_INLINE M16 operator|(M16 x, M16 y) { return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)}; }
RL_INLINE uint32_t bits(M16 x) {
    return (uint32_t)_mm256_movemask_ps(x.a) | (uint32_t)_mm256_movemask_ps(x.b) << 8;
}
RL_INLINE M16 first_lanes(int count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane))};
}
RL_INLINE M16 lanes_at(uint32_t bits) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i low = _mm256_and_si256(_mm256_set1_epi32((int)bits), each);
    const __m256i high = _mm256_and_si256(_mm256_set1_epi32((int)(bits >> 8)), each);
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(low, each)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(high, each))};
}
RL_INLINE M16 is_above(F16 x, F16 y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)};
}
RL_INLINE M16 is_equal(F16 x, F16 y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
RL_INLINE M16 is_nan(F16 x) {
    return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)};
}
RL_INLINE F16 choose(M16 mask, F16 x, F16 y) {
    return {_mm256_blendv_ps(y.a, x.a, mask.a), _mm256_blendv_ps(y.b, x.b, mask.b)};
}

struct D8 {
    __m256d a, b;
};

RL_INLINE D8 splat64(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
RL_INLINE D8 widen(__m256 half) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(half)), _mm256_cvtps_pd(_mm256_extractf128_ps(half, 1))};
}
RL_INLINE D8 operator+(D8 x, D8 y) { return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)}; }
RL_INLINE D8 operator-(D8 x, D8 y) { return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)}; }
RL_INLINE D8 operator*(D8 x, D8 y) { return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b)}; }
RL_INLINE D8 fma(D8 x, D8 y, D8 z) { return {_mm256_fmadd_pd(x.a, y.a, z.a), _mm256_fmadd_pd(x.b, y.b, z.b)}; }
RL_INLINE D8 max(D8 x, D8 y) { return {_mm256_max_pd(x.a, y.a), _mm256_max_pd(x.b, y.b)}; }
RL_INLINE D8 round(D8 x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_pd(x.a, nearest), _mm256_round_pd(x.b, nearest)};
}
RL_INLINE __m256d power_of_two(__m256d n) {
    const __m256i exponent = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n)), _mm256_set1_epi64x(1023));
    return _mm256_castsi256_pd(_mm256_slli_epi64(exponent, 52));
}
RL_INLINE D8 scale_by_power(D8 x, D8 n) {
    return {_mm256_mul_pd(x.a, power_of_two(n.a)), _mm256_mul_pd(x.b, power_of_two(n.b))};
}
RL_INLINE void store64(double* p, D8 x) {
    _mm256_storeu_pd(p, x.a);
    _mm256_storeu_pd(p + 4, x.b);
}

// Returns the low 64 bits of each lane's product.
RL_INLINE __m256i multiply64(__m256i x, __m256i y) {
    const __m256i swapped = _mm256_shuffle_epi32(y, 0xb1);
    const __m256i cross = _mm256_mullo_epi32(x, swapped);
    const __m256i upper = _mm256_add_epi32(_mm256_slli_epi64(cross, 32), cross);
    const __m256i mask = _mm256_set1_epi64x((int64_t)0xffffffff00000000);
    return _mm256_add_epi64(_mm256_mul_epu32(x, y), _mm256_and_si256(upper, mask));
}

// Returns lanes 0 to 3 of inverted_hash (below) as int64. `base`: key + first * kGolden.
RL_INLINE __m256i inverted_hash4(uint64_t base) {
    const __m256i steps = _mm256_setr_epi64x((int64_t)kGolden, (int64_t)(2 * kGolden), (int64_t)(3 * kGolden),
                                             (int64_t)(4 * kGolden));
    __m256i z = _mm256_add_epi64(_mm256_set1_epi64x((int64_t)base), steps);
    z = multiply64(_mm256_xor_si256(z, _mm256_srli_epi64(z, 30)), _mm256_set1_epi64x((int64_t)kMix1));
    z = multiply64(_mm256_xor_si256(z, _mm256_srli_epi64(z, 27)), _mm256_set1_epi64x((int64_t)kMix2));
    return _mm256_srli_epi64(_mm256_xor_si256(z, _mm256_set1_epi64x(-1)), 40);
}

RL_INLINE F16 inverted_hash(uint64_t key, int64_t first) {
    __m256 upper[2];
    for (int half = 0; half < 2; half++) {
        const uint64_t base = key + (uint64_t)(first + 8 * half) * kGolden;
        const __m256 low = _mm256_castsi256_ps(inverted_hash4(base));
        const __m256 high = _mm256_castsi256_ps(inverted_hash4(base + 4 * kGolden));
        const __m256i pairs = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
        upper[half] = _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(pairs, 0xd8));
    }
    return {upper[0], upper[1]};
}

#endif

RL_INLINE double sum(D8 x) {
    double lanes[8];
    store64(lanes, x);
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

// exp(x) for x <= 0 with a relative error below 1e-15 (Cody-Waite reduction, Taylor series of degree 12). For x < -700
// the result is exp(-700), about 1e-304.
RL_INLINE D8 exp(D8 x) {
    const D8 clamped = max(x, splat64(-700.0));
    const D8 n = round(clamped * splat64(1.4426950408889634));
    D8 r = fma(n, splat64(-0x1.62e42fee00000p-1), clamped);
    r = fma(n, splat64(-0x1.a39ef35793c76p-33), r);
    D8 p = splat64(1.0 / 479001600.0);
    const double factorials[] = {39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0};
    for (double factorial : factorials) {
        p = fma(p, r, splat64(1.0 / factorial));
    }
    return scale_by_power(fma(fma(p, r, splat64(1.0)), r, splat64(1.0)), n);
}

}  // namespace RL_ISA
