// Log-probabilities of a row, in float32 as in torch's log_softmax: (x - highest) - log(sum of exp(x - highest)).

#include <algorithm>
#include <math.h>

#include "sampler.h"

void describe_row(const SamplerPasses& passes, const float* logits, int64_t vocab_size, const rl_logprobs& out,
                  int64_t index, const RowBuffers& buffers) {
    const int64_t padded_size = kBlock * num_blocks_of(vocab_size);
    const float* x = buffers.x;
    const bool is_ordered = passes.divide(logits, vocab_size, 1.0f, buffers.x, buffers.highest);
    const float highest = is_ordered ? most_likely(x, vocab_size, buffers.highest).x : NAN;
    if (!isfinite(highest)) {
        return;
    }
    const float log_sum = (float)log(passes.mass(x, padded_size, {-INFINITY, vocab_size}, highest));
    const auto logprob_of = [&](int64_t id) { return (x[id] - highest) - log_sum; };

    const int64_t chosen = out.token_ids[index];
    out.logprobs[index] = logprob_of(chosen);
    out.ranks[index] = 1 + passes.count(x, padded_size, {x[chosen], 0});

    const int64_t num_top = out.num_top[index];
    if (num_top == 0) {
        return;
    }
    const Prefix prefix = first_tokens(passes, vocab_size, num_top, buffers);
    passes.collect(x, padded_size, prefix, buffers.values, buffers.ids);
    std::sort(buffers.ids, buffers.ids + num_top,
              [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    for (int64_t i = 0; i < num_top; i++) {
        out.top_ids[index * out.top_stride + i] = buffers.ids[i];
        out.top_logprobs[index * out.top_stride + i] = logprob_of(buffers.ids[i]);
    }
}
