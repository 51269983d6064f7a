#include "sampler.h"

#include <algorithm>
#include <functional>
#include <math.h>
#include <string.h>

#include "noise.h"

namespace {

// This file is compiled without fused multiply-add, because its results must equal the results of worker/sampler.py,
// where each operation is rounded.

bool is_adjusted(const rl_sampling& row) {
    return row.allowed != nullptr || row.num_banned != 0 || row.num_biases != 0 || row.repetition_penalty != 1.0f ||
           row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f;
}

// Applies the penalty of https://arxiv.org/abs/1909.05858, section 4.1, once to each different token.
void penalise_repetition(const rl_sampling& row, float* logits, int32_t* counts) {
    const float penalty = row.repetition_penalty;
    for (int64_t i = 0; i < row.num_tokens; i++) {
        counts[row.token_ids[i]] = 0;
    }
    for (int64_t i = 0; i < row.num_tokens; i++) {
        const int64_t id = row.token_ids[i];
        if (counts[id]++ == 0) {
            logits[id] = logits[id] > 0.0f ? logits[id] / penalty : logits[id] * penalty;
        }
    }
}

void penalise_generated(const rl_sampling& row, float* logits, int32_t* counts) {
    const int64_t* generated = row.token_ids + row.num_prompt_tokens;
    const int64_t num_generated = row.num_tokens - row.num_prompt_tokens;
    for (int64_t i = 0; i < num_generated; i++) {
        counts[generated[i]] = 0;
    }
    for (int64_t i = 0; i < num_generated; i++) {
        counts[generated[i]]++;
    }
    for (int64_t i = 0; i < num_generated; i++) {
        int32_t& count = counts[generated[i]];
        if (count != 0) {
            logits[generated[i]] -= row.presence_penalty + row.frequency_penalty * (float)count;
            count = 0;
        }
    }
}

// Applies bans, logit_bias and penalties.
void adjust(const rl_sampling& row, int64_t vocab_size, float* logits, int32_t* counts) {
    for (int64_t i = 0; i < row.num_banned; i++) {
        if (row.banned_ids[i] < vocab_size) {
            logits[row.banned_ids[i]] = -INFINITY;
        }
    }
    for (int64_t i = 0; i < row.num_biases; i++) {
        logits[row.bias_ids[i]] += row.biases[i];
    }
    if (row.repetition_penalty != 1.0f) {
        penalise_repetition(row, logits, counts);
    }
    if (row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f) {
        penalise_generated(row, logits, counts);
    }
}

// Returns the tokens that top_k and min_p keep. min_p keeps the tokens with p >= min_p * p_max. For x = logit /
// temperature, this means x >= x_max + log(min_p).
Prefix kept_tokens(const SamplerPasses& passes, int64_t vocab_size, const rl_sampling& row, Candidate top,
                   const RowBuffers& buffers) {
    Prefix kept = {-INFINITY, vocab_size};
    if (row.top_k > 0 && row.top_k < vocab_size) {
        kept = first_tokens(passes, vocab_size, row.top_k, buffers);
    }
    if (row.min_p > 0.0) {
        const float limit = top.x + (float)log(row.min_p);
        if (limit > kept.value) {
            kept = {limit, vocab_size};
        }
    }
    return kept;
}

// top_p needs no sorting. The first draw is the token with the best score of all tokens that top_k and min_p keep. If
// the tokens before the drawn token, in the order of Prefix, have less than top_p of the mass, top_p keeps the drawn
// token, which is the answer. Otherwise top_p drops the drawn token and all tokens after it. The next draw is then the
// token with the best score among those before the drawn token, and is tested in the same way. The tokens that top_p
// drops have about 1 - top_p of the mass, so the first draw is the answer with a probability of about top_p.
int64_t draw_within(const SamplerPasses& passes, const float* x, int64_t vocab_size, const rl_sampling& row,
                    Prefix kept, Candidate top) {
    const int64_t padded_size = kBlock * num_blocks_of(vocab_size);
    const uint64_t key = noise_key(row.seed, row.num_tokens);
    const bool is_whole = kept.value == -INFINITY && row.top_p >= 1.0;
    Candidate best = passes.draw(x, padded_size, kept, key, top, is_whole);
    if (row.top_p >= 1.0 || best.id == top.id) {
        return best.id;
    }
    const double limit = row.top_p * passes.mass(x, padded_size, kept, top.x);
    if (limit <= 1.0) {  // 1.0: the mass of the most likely token
        return top.id;
    }
    while (best.id != top.id) {
        const Prefix before = {best.x, best.id};
        if (passes.mass(x, padded_size, before, top.x) < limit) {
            break;
        }
        best = passes.draw(x, padded_size, before, key, top, false);
    }
    return best.id;
}

}  // namespace

int64_t RowBuffers::bytes(int64_t vocab_size) {
    return 4 * kBlock * 4 * num_blocks_of(vocab_size) + (num_blocks_of(vocab_size) + 15) / 16 * 64;
}

RowBuffers RowBuffers::at(char* memory, int64_t vocab_size) {
    const int64_t padded_size = kBlock * num_blocks_of(vocab_size);
    float* x = reinterpret_cast<float*>(memory);
    int32_t* ids = reinterpret_cast<int32_t*>(x + 2 * padded_size);
    return {x, x + 4 * padded_size, x + padded_size, ids, ids + padded_size};
}

Candidate most_likely(const float* x, int64_t vocab_size, const float* highest) {
    const int64_t block = std::max_element(highest, highest + num_blocks_of(vocab_size)) - highest;
    int64_t id = block * kBlock;
    while (x[id] != highest[block]) {
        id++;
    }
    return {x[id], id, 0.0f};
}

Prefix first_tokens(const SamplerPasses& passes, int64_t vocab_size, int64_t k, const RowBuffers& buffers) {
    const int64_t num_blocks = num_blocks_of(vocab_size);
    Prefix search = {-INFINITY, vocab_size};
    if (k <= num_blocks) {
        // Each of the k blocks with the highest maxima has a token whose x is at least the k-th highest maximum. So
        // none of the first k tokens has a lower x.
        std::copy(buffers.highest, buffers.highest + num_blocks, buffers.values);
        std::nth_element(buffers.values, buffers.values + (k - 1), buffers.values + num_blocks, std::greater<float>());
        search.value = buffers.values[k - 1];
    }
    const int64_t count = passes.collect(buffers.x, num_blocks * kBlock, search, buffers.values, buffers.ids);
    float* last = buffers.values + (k - 1);
    std::nth_element(buffers.values, last, buffers.values + count, std::greater<float>());
    const float value = *last;
    int64_t num_equal = k - std::count_if(buffers.values, last, [value](float x) { return x > value; });
    int64_t end = 0;
    for (int64_t i = 0; num_equal > 0; i++) {
        if (buffers.x[buffers.ids[i]] == value) {
            end = buffers.ids[i] + 1;
            num_equal--;
        }
    }
    return {value, end};
}

int64_t sample_row(const SamplerPasses& passes, const float* logits, int64_t vocab_size, const rl_sampling& row,
                   const RowBuffers& buffers) {
    if (!passes.find_highest(logits, vocab_size, buffers.highest)) {
        return -1;
    }
    Candidate top = most_likely(logits, vocab_size, buffers.highest);
    if (!isfinite(top.x)) {
        return -1;
    }
    const bool is_greedy = row.temperature == 0.0f;
    if (is_adjusted(row)) {
        if (row.allowed != nullptr) {
            passes.mask(logits, vocab_size, row.allowed, buffers.x);
        } else {
            memcpy(buffers.x, logits, (size_t)vocab_size * sizeof(float));
        }
        adjust(row, vocab_size, buffers.x, buffers.counts);
        logits = buffers.x;
    } else if (is_greedy) {
        return top.id;
    }
    passes.divide(logits, vocab_size, is_greedy ? 1.0f : row.temperature, buffers.x, buffers.highest);
    top = most_likely(buffers.x, vocab_size, buffers.highest);
    if (is_greedy || !isfinite(top.x)) {
        return top.id;
    }
    const Prefix kept = kept_tokens(passes, vocab_size, row, top, buffers);
    return draw_within(passes, buffers.x, vocab_size, row, kept, top);
}
