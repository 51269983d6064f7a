// The router of a mixture of experts: it selects the experts of a token, and computes their weights.

#pragma once

#include "vectors.h"

namespace RL_ISA {

// e^(x - highest) of up to 16 elements, and zeros behind them.
RL_INLINE F16 exponentials(const float* x, int64_t left, F16 highest) {
    if (left >= 16) {
        return exp(load(x) - highest);
    }
    alignas(64) float values[16] = {0};
    store_first(values, exp(load_first(x, (int)left) - highest), (int)left);
    return load(values);
}

// experts [num_selected] = the indices of the highest elements of logits [count], in descending order of logits. If
// logits are equal, the lower index comes first. weights [num_selected] = the probabilities of these experts in a
// softmax over all logits; with `normalises`, these probabilities divided by their sum. If a logit is a NaN or
// +infinity, all weights are NaN. The NaN must reach the logits of the model, where it is detected.
static void route(const float* logits, int64_t count, int64_t num_selected, bool normalises, int32_t* experts,
                  float* weights) {
    int64_t num_found = 0;
    for (int64_t expert = 0; expert < count; expert++) {
        const float logit = logits[expert];
        if (num_found == num_selected && !(logit > weights[num_found - 1])) {
            continue;
        }
        int64_t place = num_found < num_selected ? num_found++ : num_found - 1;
        for (; place > 0 && logit > weights[place - 1]; place--) {
            weights[place] = weights[place - 1];
            experts[place] = experts[place - 1];
        }
        weights[place] = logit;
        experts[place] = (int32_t)expert;
    }
    const F16 highest = splat(weights[0]);
    F16 sums = zero();
    for (int64_t i = 0; i < count; i += 16) {
        sums = sums + exponentials(logits + i, count - i, highest);
    }
    const float total = sum(sums);
    float total_of_selected = total - total;  // 0, or NaN if `total` is a NaN or infinite
    for (int64_t i = 0; i < num_selected; i += 16) {
        const int64_t left = num_selected - i < 16 ? num_selected - i : 16;
        store_first(weights + i, exponentials(weights + i, left, highest), (int)left);
        for (int64_t j = i; j < i + left; j++) {
            total_of_selected += weights[j];
        }
    }
    const float divisor = normalises ? total_of_selected : total;
    for (int64_t i = 0; i < num_selected; i++) {
        weights[i] /= divisor;
    }
}

static void sigmoid(float* x) {
    alignas(64) float values[16];
    store(values, splat(1.0f) / (splat(1.0f) + exp(zero() - splat(*x))));
    *x = values[0];
}

}  // namespace RL_ISA
