// Grouped weights in registers: how 4, 6 and 8 bits are loaded, unpacked and multiplied by quantised activations.
//
// The products with a group of 32 inputs of x are `num_sums` integer sums, because 6-bit weights have a scale for 16
// inputs. A sum takes `steps` steps. A step multiplies `step_inputs` inputs by 16 outputs, whose weights are
// `step_lines` cache lines. A tile of several rows has at most `tile_columns` columns. grouped_layout.h has the order
// of the bits.

#pragma once

#include "grouped_layout.h"
#include "int8.h"
#include "operands.h"

namespace RL_ISA {

// Weights of 4 bits. One step multiplies the weights of 8 inputs for each of 16 outputs.
struct Nibbles {
    static constexpr int bits = 4;
    static constexpr int num_sums = 1;
    static constexpr int steps = 4;
    static constexpr int step_inputs = 8;
    static constexpr int step_lines = 1;
    static constexpr int tile_columns = 2;

#if defined(__AVX512VNNI__)
    using Part = I16;
    struct WStep {
        __m512i low, high;
    };
    using XStep = WStep;

    static RL_INLINE_MEMBER Part first(int32_t start) { return splat_int(start); }
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) {
        const __m512i both = _mm512_loadu_si512(w);
        const __m512i mask = _mm512_set1_epi8(15);
        return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
    }
    static RL_INLINE_MEMBER XStep load_x(const int8_t* x) { return {load_int8_x(x).v, load_int8_x(x + 4).v}; }
    static RL_INLINE_MEMBER Part multiply_add(WStep w, XStep x, Part part) {
        return {_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(part.v, w.low, x.low), w.high, x.high)};
    }
    static RL_INLINE_MEMBER F16 total(Part part, int32_t) { return to_float(part); }
#else
    // Each int16 sum adds 8 pairs of products, at most 8 * 2 * 15 * 127 = 30480. This sum and the start value together
    // would not fit into int16, so `total` adds the start value in int32.
    struct Part {
        __m256i a, b;
    };
    struct WStep {
        __m256i low_a, high_a, low_b, high_b;
    };
    struct XStep {
        __m256i low, high;
    };

    static RL_INLINE_MEMBER Part first(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) {
        const __m256i a = _mm256_loadu_si256((const __m256i*)w);
        const __m256i b = _mm256_loadu_si256((const __m256i*)(w + 32));
        const __m256i mask = _mm256_set1_epi8(15);
        return {_mm256_and_si256(a, mask), _mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(b, mask),
                _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
    }
    static RL_INLINE_MEMBER XStep load_x(const int8_t* x) {
        int32_t low, high;
        memcpy(&low, x, 4);
        memcpy(&high, x + 4, 4);
        return {_mm256_set1_epi32(low), _mm256_set1_epi32(high)};
    }
    static RL_INLINE_MEMBER Part multiply_add(WStep w, XStep x, Part part) {
        const __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_a, x.low), _mm256_maddubs_epi16(w.high_a, x.high));
        const __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_b, x.low), _mm256_maddubs_epi16(w.high_b, x.high));
        return {_mm256_add_epi16(part.a, a), _mm256_add_epi16(part.b, b)};
    }
    static RL_INLINE_MEMBER F16 total(Part part, int32_t start) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256i first = _mm256_set1_epi32(start);
        return to_float(I16{_mm256_add_epi32(_mm256_madd_epi16(part.a, ones), first),
                            _mm256_add_epi32(_mm256_madd_epi16(part.b, ones), first)});
    }
#endif
};

// Floats of 4 bits, as integers from 0 to 24. A table in a register gives the integer of each 4 bits.
struct Floats : Nibbles {
#if defined(__AVX512VNNI__)
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) {
        const WStep bits = Nibbles::load_w(w);
        const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kFloatIntegers));
        return {_mm512_shuffle_epi8(table, bits.low), _mm512_shuffle_epi8(table, bits.high)};
    }
#else
    // The int16 sum of a step adds 2 pairs of products, at most 2 * 2 * 24 * 127 = 12192. The sums of all four steps
    // would not fit into int16, so each step adds its sum in int32.
    using Part = I16;

    static RL_INLINE_MEMBER Part first(int32_t start) { return splat_int(start); }
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) {
        const WStep bits = Nibbles::load_w(w);
        const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kFloatIntegers));
        return {_mm256_shuffle_epi8(table, bits.low_a), _mm256_shuffle_epi8(table, bits.high_a),
                _mm256_shuffle_epi8(table, bits.low_b), _mm256_shuffle_epi8(table, bits.high_b)};
    }
    static RL_INLINE_MEMBER Part multiply_add(WStep w, XStep x, Part part) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_a, x.low), _mm256_maddubs_epi16(w.high_a, x.high));
        const __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(w.low_b, x.low), _mm256_maddubs_epi16(w.high_b, x.high));
        return {_mm256_add_epi32(part.a, _mm256_madd_epi16(a, ones)), _mm256_add_epi32(part.b, _mm256_madd_epi16(b, ones))};
    }
    static RL_INLINE_MEMBER F16 total(Part part, int32_t) { return to_float(part); }
#endif
};

// Weights of 6 bits. One step multiplies the weights of 16 inputs for each of 16 outputs. The lower 6 bits of three
// vectors of bytes are the weights of 12 inputs. Their upper 2 bits together are the weights of the last 4 inputs.
struct Sixes {
    static constexpr int bits = 6;
    static constexpr int num_sums = 2;
    static constexpr int steps = 1;
    static constexpr int step_inputs = 16;
    static constexpr int step_lines = 3;
    static constexpr int tile_columns = 1;

    using Part = I16;

    static RL_INLINE_MEMBER Part first(int32_t start) { return splat_int(start); }
    static RL_INLINE_MEMBER F16 total(Part part, int32_t) { return to_float(part); }

#if defined(__AVX512VNNI__)
    struct WStep {
        __m512i parts[4];
    };
    using XStep = WStep;

    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) {
        constexpr int choose = 0xca;  // bits of the second operand where the first has ones, else those of the third
        const __m512i low = _mm512_set1_epi8(63);
        const __m512i a = _mm512_loadu_si512(w);
        const __m512i b = _mm512_loadu_si512(w + 64);
        const __m512i c = _mm512_loadu_si512(w + 128);
        const __m512i ab = _mm512_ternarylogic_epi32(_mm512_set1_epi8(48), _mm512_srli_epi16(a, 2),
                                                     _mm512_srli_epi16(b, 4), choose);
        const __m512i abc = _mm512_ternarylogic_epi32(_mm512_set1_epi8(60), ab, _mm512_srli_epi16(c, 6), choose);
        return {{_mm512_and_si512(a, low), _mm512_and_si512(b, low), _mm512_and_si512(c, low),
                 _mm512_and_si512(abc, low)}};
    }
    static RL_INLINE_MEMBER XStep load_x(const int8_t* x) {
        return {{load_int8_x(x).v, load_int8_x(x + 4).v, load_int8_x(x + 8).v, load_int8_x(x + 12).v}};
    }
    static RL_INLINE_MEMBER Part multiply_add(WStep w, XStep x, Part part) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            part.v = _mm512_dpbusd_epi32(part.v, w.parts[i], x.parts[i]);
        }
        return part;
    }
#else
    // The vectors of the two halves of 16 outputs.
    struct WStep {
        __m256i a[4], b[4];
    };
    struct XStep {
        __m256i parts[4];
    };

    static RL_INLINE_MEMBER void load_half_w(const uint8_t* w, __m256i (&parts)[4]) {
        const __m256i low = _mm256_set1_epi8(63);
        const __m256i a = _mm256_loadu_si256((const __m256i*)w);
        const __m256i b = _mm256_loadu_si256((const __m256i*)(w + 64));
        const __m256i c = _mm256_loadu_si256((const __m256i*)(w + 128));
        const __m256i a_bits = _mm256_and_si256(_mm256_srli_epi16(a, 2), _mm256_set1_epi8(48));
        const __m256i b_bits = _mm256_and_si256(_mm256_srli_epi16(b, 4), _mm256_set1_epi8(12));
        const __m256i c_bits = _mm256_and_si256(_mm256_srli_epi16(c, 6), _mm256_set1_epi8(3));
        parts[0] = _mm256_and_si256(a, low);
        parts[1] = _mm256_and_si256(b, low);
        parts[2] = _mm256_and_si256(c, low);
        parts[3] = _mm256_or_si256(_mm256_or_si256(a_bits, b_bits), c_bits);
    }
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) {
        WStep step;
        load_half_w(w, step.a);
        load_half_w(w + 32, step.b);
        return step;
    }
    static RL_INLINE_MEMBER XStep load_x(const int8_t* x) {
        int32_t fours[4];
        memcpy(fours, x, sizeof(fours));
        return {{_mm256_set1_epi32(fours[0]), _mm256_set1_epi32(fours[1]), _mm256_set1_epi32(fours[2]),
                 _mm256_set1_epi32(fours[3])}};
    }
    // An int16 sum adds 2 pairs of products, at most 2 * 2 * 63 * 127 = 32004.
    static RL_INLINE_MEMBER __m256i sum_half(const __m256i (&w)[4], const XStep& x) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256i first = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], x.parts[0]),
                                               _mm256_maddubs_epi16(w[1], x.parts[1]));
        const __m256i second = _mm256_add_epi16(_mm256_maddubs_epi16(w[2], x.parts[2]),
                                                _mm256_maddubs_epi16(w[3], x.parts[3]));
        return _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
    }
    static RL_INLINE_MEMBER Part multiply_add(const WStep& w, const XStep& x, Part part) {
        return {_mm256_add_epi32(part.a, sum_half(w.a, x)), _mm256_add_epi32(part.b, sum_half(w.b, x))};
    }
#endif
};

// Weights of 8 bits. One step multiplies the weights of 4 inputs for each of 16 outputs.
struct Bytes {
    static constexpr int bits = 8;
    static constexpr int num_sums = 1;
    static constexpr int steps = kGroupSteps;
    static constexpr int step_inputs = kInt8Depth;
    static constexpr int step_lines = 1;
    static constexpr int tile_columns = 2;

    using Part = I16;
    using WStep = Int8Step;
    using XStep = Int8Step;

    static RL_INLINE_MEMBER Part first(int32_t start) { return splat_int(start); }
    static RL_INLINE_MEMBER WStep load_w(const uint8_t* w) { return load_int8_w(w); }
    static RL_INLINE_MEMBER XStep load_x(const int8_t* x) { return load_int8_x(x); }
    static RL_INLINE_MEMBER Part multiply_add(WStep w, XStep x, Part part) { return multiply_add_int8(w, x, part); }
    static RL_INLINE_MEMBER F16 total(Part part, int32_t) { return to_float(part); }
};

}  // namespace RL_ISA
