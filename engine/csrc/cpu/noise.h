// Gumbel noise that depends on seed, position and token id alone, as worker/noise.py defines it.
//
// SplitMix64: mix(z) hashes 64 bits. The bits of token id i are mix(key + (i + 1) * kGolden). With
// u = (floor(bits / 2^12) + 1/2) / 2^52, which is in (0, 1), the noise is -log(-log(u)).

#pragma once

#include <stdint.h>

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9;
constexpr uint64_t kMix2 = 0x94D049BB133111EB;

// Returns the key from which the noise of the token at `position` of a sequence is computed.
uint64_t noise_key(uint64_t seed, int64_t position);

// Returns the noise of one token id, computed in float64 and rounded to float32. It is between -3.6 and 36.8.
float gumbel_noise(uint64_t key, int64_t token_id);
