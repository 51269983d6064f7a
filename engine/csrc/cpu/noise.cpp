#include "noise.h"

#include <math.h>

namespace {

uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * kMix1;
    value = (value ^ (value >> 27)) * kMix2;
    return value ^ (value >> 31);
}

}  // namespace

uint64_t noise_key(uint64_t seed, int64_t position) {
    return mix(mix(seed + kGolden) + (uint64_t)(position + 1) * kGolden);
}

float gumbel_noise(uint64_t key, int64_t token_id) {
    const uint64_t bits = mix(key + (uint64_t)(token_id + 1) * kGolden);
    const double uniform = ((double)(bits >> 12) + 0.5) * 0x1p-52;
    return (float)-log(-log(uniform));
}
