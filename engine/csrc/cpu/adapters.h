// Low-rank updates (LoRA) of the products of a step: y += scale * B (A x), for the tokens that have an adapter.
//
// A chunk is at most 16 neighbouring rows with the same adapter, or without an adapter. In the phase that computes the
// product, some threads reduce chunks: they multiply the rows of a chunk by A. In the next phase, each thread
// multiplies the reduced rows of a chunk by B, and adds the result to some columns of the product. Both phases use the
// kernels of products, so a row's result does not depend on the other rows.
//
// A step with many adapters reads A and B of each adapter from memory. While the step multiplies by the matrices of one
// adapter, it prefetches the matrices of the next adapter. If a product has many rows, arithmetic limits its speed, and
// some of the memory's bandwidth stays unused. So such a product also prefetches A and B of adapters.

#pragma once

#include "arena.h"
#include "kernels.h"
#include "rayloom_cpu.h"

constexpr int64_t kMostRank = 256;  // the highest rank of an adapter

// A matrix of a layer: one part, or several stacked parts such as q, k and v. An adapter has a B of its own for each
// part.
struct UpdatedMatrix {
    const rl_matrix_update rl_adapter_layer::* update;
    int64_t num_parts;
    int64_t first_output[4];  // the first output of each part, then the number of all outputs; multiples of 16

    int64_t num_outputs() const { return first_output[num_parts]; }
};

// The matrices of a layer that adapters can update.
UpdatedMatrix updated_qkv(const rl_model& model);
UpdatedMatrix updated_out(const rl_model& model);
UpdatedMatrix updated_gate_up(const rl_model& model);
UpdatedMatrix updated_down(const rl_model& model);

// The adapters of a step's rows.
class AdapterRows {
public:
    // Allocates buffers in the arena. They are valid until the arena is cleared.
    AdapterRows(const rl_batch& batch, const Kernels& kernels, int64_t element_bytes, Arena& arena);

    // At most kChunkRows neighbouring rows with the same adapter, or without an adapter.
    struct Chunk {
        const rl_adapter_layer* layers;       // null: the rows have no adapter
        const rl_adapter_layer* next_layers;  // `layers` of the next chunk with another adapter, or null
        int64_t first_row;
        int64_t num_rows;
    };

    int64_t num_chunks() const { return num_chunks_; }
    const Chunk& chunk(int64_t index) const { return chunks_[index]; }

    // The number of pieces of `reduce` for one matrix. A piece multiplies the rows of a chunk by at most kMostRank rows
    // of the adapter's A. The sum of the ranks of all parts is at most num_parts * kMostRank, so a chunk has num_parts
    // pieces. The last pieces may be empty:
    //
    //     rows of A   [ part 0: rank 112 | part 1: rank 112 | part 2: rank 112 ]
    //     pieces      [ 0 ................................ 256 | 256 ..... 336 ]
    int64_t num_pieces(const UpdatedMatrix& matrix) const { return num_chunks_ * matrix.num_parts; }

    // Computes scale * A x for the rows of x in a piece's chunk, with only the piece's rows of A. x [T][num_inputs] has
    // the operand type.
    void reduce(const UpdatedMatrix& matrix, int layer, const void* x, int64_t num_inputs, int64_t piece) const;

    // Returns the memory to prefetch while a share of the matrix is multiplied. The `num_shares` shares are divided
    // into ranges of about equal length, one for each adapter. A share prefetches the next `share_bytes` of A and of
    // the B behind A (rl_matrix_update). Returns null if earlier shares have reached the end of B, or if no row has an
    // adapter.
    const char* to_fetch(const UpdatedMatrix& matrix, int layer, int64_t num_inputs, int64_t share, int64_t num_shares,
                        int64_t share_bytes) const;

    // Adds B times the reduced rows of a chunk to blocks [first, end) of 16 outputs of y [T][y_stride].
    void add(const UpdatedMatrix& matrix, int layer, int64_t chunk, int64_t first, int64_t end, float* y,
             int64_t y_stride) const;

private:
    static constexpr int64_t kChunkRows = 16;
    static constexpr int64_t kPieceBlocks = kMostRank / 16;  // most blocks of A that a piece of `reduce` multiplies

    // The reduced rows [num_rows][rank] of a part of a matrix.
    char* reduced(const Chunk& chunk, int64_t part) const;

    const Kernels& kernels_;
    const int64_t element_bytes_;  // of A and B
    Chunk* chunks_;
    int64_t num_chunks_ = 0;
    const rl_adapter_layer** adapters_;  // one for each run of rows with an adapter, in the order of the rows
    int64_t num_adapters_ = 0;
    char* reduced_;
};
