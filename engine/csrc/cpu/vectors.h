// F16: sixteen float32 lanes, as one AVX-512 register or two AVX2 registers.
//
// This header is compiled once for each instruction set, in a namespace of its own (RL_ISA). So the linker never merges
// functions of different instruction sets. Sums over lanes have one fixed order.

#pragma once

// gcc 12 warns of uninitialised operands where immintrin.h is used. These operands are inside immintrin.h itself.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#include <stdint.h>
#include <string.h>

#define RL_INLINE_MEMBER inline __attribute__((always_inline))
#define RL_INLINE static RL_INLINE_MEMBER

namespace RL_ISA {

RL_INLINE float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

#if defined(__AVX512F__)

struct F16 {
    __m512 v;
};

RL_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
RL_INLINE F16 splat(float x) { return {_mm512_set1_ps(x)}; }
RL_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
RL_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
RL_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
RL_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
RL_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
RL_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
RL_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// max and min return the larger and the smaller of each pair of lanes, or the lane of b if one of the two is a NaN.
RL_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
RL_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
RL_INLINE F16 round(F16 a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// a * 2^n, n integral
RL_INLINE F16 scale_by_power(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// x - floor(x); 0 for an infinite x
RL_INLINE F16 fraction(F16 x) { return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// a * 2^floor(x) for x <= 1; 0 for x = -infinity
RL_INLINE F16 scale_by_floor(F16 a, F16 x) { return {_mm512_scalef_ps(a.v, x.v)}; }
// x where y > limit or y is a NaN, else 0
RL_INLINE F16 where_above(F16 y, float limit, F16 x) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y.v, _mm512_set1_ps(limit), _CMP_NLE_UQ), x.v)};
}
// Loads the first `count` lanes (1 to 16); the other lanes are 0.
RL_INLINE F16 load_first(const float* p, int count) {
    return {_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p)};
}
RL_INLINE void store_first(float* p, F16 a, int count) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), a.v);
}
RL_INLINE F16 load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
#if defined(__AVX512BF16__)
RL_INLINE void store_bf16(uint16_t* p, F16 a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
#endif
// Stores integral values in [-128, 127]. A NaN becomes an arbitrary value.
RL_INLINE void store_int8(int8_t* p, F16 a) {
    _mm_storeu_si128((__m128i*)p, _mm512_maskz_cvtepi32_epi8(0xffff, _mm512_cvtps_epi32(a.v)));
}
RL_INLINE __m256 low_half(F16 a) { return _mm512_castps512_ps256(a.v); }
RL_INLINE __m256 high_half(F16 a) { return _mm512_maskz_extractf32x8_ps(0xff, a.v, 1); }

#else

struct F16 {
    __m256 a, b;
};

RL_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
RL_INLINE F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
RL_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
RL_INLINE void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
RL_INLINE F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
RL_INLINE F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
RL_INLINE F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
RL_INLINE F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
RL_INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
RL_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
RL_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
RL_INLINE F16 round(F16 x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
RL_INLINE __m256 power_of_two(__m256 n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
// a * 2^n, n integral and in [-126, 127]
RL_INLINE F16 scale_by_power(F16 x, F16 n) {
    return {_mm256_mul_ps(x.a, power_of_two(n.a)), _mm256_mul_ps(x.b, power_of_two(n.b))};
}
// x where y > limit or y is a NaN, else 0
RL_INLINE F16 where_above(F16 y, float limit, F16 x) {
    __m256 bound = _mm256_set1_ps(limit);
    return {_mm256_and_ps(_mm256_cmp_ps(y.a, bound, _CMP_NLE_UQ), x.a),
            _mm256_and_ps(_mm256_cmp_ps(y.b, bound, _CMP_NLE_UQ), x.b)};
}
RL_INLINE __m256 floor(__m256 x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
// x - floor(x); a NaN for an infinite x
RL_INLINE F16 fraction(F16 x) { return {_mm256_sub_ps(x.a, floor(x.a)), _mm256_sub_ps(x.b, floor(x.b))}; }
// a * 2^floor(x) for x <= 1; 0 for x <= -126. A NaN stays a NaN.
RL_INLINE F16 scale_by_floor(F16 a, F16 x) {
    const F16 bounded = max(splat(-126.0f), x);
    const F16 scaled = scale_by_power(a, {floor(bounded.a), floor(bounded.b)});
    return where_above(x, -126.0f, scaled);
}
RL_INLINE F16 load_first(const float* p, int count) {
    if (count == 16) {
        return load(p);
    }
    float padded[16] = {0};
    memcpy(padded, p, (size_t)count * 4);
    return load(padded);
}
RL_INLINE void store_first(float* p, F16 x, int count) {
    if (count == 16) {
        store(p, x);
        return;
    }
    float padded[16];
    store(padded, x);
    memcpy(p, padded, (size_t)count * 4);
}
RL_INLINE __m256 widen_bf16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
RL_INLINE F16 load_bf16(const uint16_t* p) {
    return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
// Rounds to the nearest bfloat16, ties to even. A NaN stays a NaN.
RL_INLINE __m256i round_to_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), is_nan);
    return _mm256_srli_epi32(rounded, 16);
}
RL_INLINE void store_bf16(uint16_t* p, F16 x) {
    __m256i both = _mm256_packus_epi32(round_to_bf16(x.a), round_to_bf16(x.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
// Stores integral values in [-128, 127]. A NaN becomes an arbitrary value.
RL_INLINE void store_int8(int8_t* p, F16 x) {
    const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    const __m256i ordered = _mm256_permute4x64_epi64(pairs, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
RL_INLINE __m256 low_half(F16 x) { return x.a; }
RL_INLINE __m256 high_half(F16 x) { return x.b; }

#endif

RL_INLINE float sum(F16 x) {
    __m256 half = _mm256_add_ps(low_half(x), high_half(x));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
RL_INLINE float first_lane(F16 x) { return _mm256_cvtss_f32(low_half(x)); }
// Returns the largest lane. If a lane is a NaN, the result is an arbitrary lane, or a NaN.
RL_INLINE float maximum(F16 x) {
    __m256 half = _mm256_max_ps(low_half(x), high_half(x));
    __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}

constexpr float kLog2E = 1.44269504088896341f;

// exp(x) with a relative error below 2e-7 (Cody-Waite reduction, degree 6). The result is exactly 0 for x <= -87. For
// x > 88 it is exp(88), so that exp(x) stays finite. A NaN stays a NaN: it must reach the logits, where it is detected.
RL_INLINE F16 exp(F16 x) {
    constexpr float smallest = -87.0f;
    F16 clamped = min(splat(88.0f), max(splat(smallest), x));
    F16 n = round(clamped * splat(kLog2E));
    F16 r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    F16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    F16 y = fma(p, r * r, r + splat(1.0f));
    return where_above(x, smallest, scale_by_power(y, n));
}

// 2^x for x <= 1 with a relative error below 8e-5, in half as many operations as exp: 2^floor(x) times a polynomial of
// degree 3 (least relative error on [0, 1]). This precision is enough where the result is rounded to bfloat16 or
// multiplied by bfloat16 numbers. The result is exactly 0 for x = -infinity. A NaN stays a NaN.
RL_INLINE F16 power_for_bf16(F16 x) {
    const F16 f = fraction(x);
    F16 p = fma(splat(7.8024520e-02f), f, splat(2.2606716e-01f));
    p = fma(p, f, splat(6.9583354e-01f));
    p = fma(p, f, splat(9.9992522e-01f));
    return scale_by_floor(p, x);
}

}  // namespace RL_ISA
