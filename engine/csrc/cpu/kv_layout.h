// The layout of a block of the KV cache, which holds 16 positions.
//
// A block has, for each key/value head, first its keys, then its values, both packed as weight blocks (operands.h):
//
//   keys    [d / depth][16 positions][depth]: a product of a query with 16 keys gives 16 scores, one in each lane
//   values  [d / 16][16 / depth][16][depth]: a product of 16 probabilities with the values gives 16 elements of a head
//
// A block has 16 positions x 2 x K x d elements. A block of zeros is valid.

#pragma once

#include "kernels.h"
#include "operands.h"

namespace RL_ISA {

constexpr int64_t kMaxHeadDim = 256;

template <class Operand>
struct KvBlock {
    using W = typename Operand::W;
    static constexpr int depth = Operand::depth;

    W* base;
    int64_t head_dim;

    KvBlock(const void* pages, int64_t block_id, int64_t num_kv_heads, int64_t head_dim)
        : base((W*)pages + block_id * kBlockSize * 2 * num_kv_heads * head_dim), head_dim(head_dim) {}

    RL_INLINE_MEMBER W* keys(int64_t head) const { return base + head * 2 * kBlockSize * head_dim; }
    RL_INLINE_MEMBER W* values(int64_t head) const { return keys(head) + kBlockSize * head_dim; }

    RL_INLINE_MEMBER void write_key(int64_t head, int64_t position, const float* key) const {
        W packed[kMaxHeadDim];
        round_to_w(key, packed);
        W* to = keys(head) + position * depth;
        for (int64_t i = 0; i < head_dim; i += depth) {
            memcpy(to + i * kBlockSize, packed + i, depth * sizeof(W));
        }
    }

    RL_INLINE_MEMBER void write_value(int64_t head, int64_t position, const float* value) const {
        W packed[kMaxHeadDim];
        round_to_w(value, packed);
        W* to = values(head) + position / depth * 16 * depth;
        for (int64_t i = 0; i < head_dim; i += 16) {
            Operand::store_part(to + i * kBlockSize, packed + i, (int)(position % depth));
        }
    }

private:
    RL_INLINE_MEMBER void round_to_w(const float* from, W* to) const {
        for (int64_t i = 0; i < head_dim; i += 16) {
            Operand::store_w(to + i, load(from + i));
        }
    }
};

}  // namespace RL_ISA
