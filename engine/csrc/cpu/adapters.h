// Low-rank updates (LoRA) of the products of a step: y += scale * B (A x), for the tokens that have an adapter.
//
// Neighbouring rows with the same adapter are a run. A thread reduces some rows of a run with A while others compute
// the product itself. In the next phase threads add B times the reduced rows to the product, each to some columns of all
// rows. Both use the kernels of products, so a row's result does not depend on the other rows.

#pragma once

#include "arena.h"
#include "kernels.h"
#include "rayloom_cpu.h"

constexpr int64_t kMostRank = 256;  // of an adapter

// Some outputs of a matrix, which an adapter updates with A and B of their own.
struct UpdatedOutputs {
    const rl_update rl_adapter_layer::* update;
    int64_t first_output;  // a multiple of 16, as num_outputs is
    int64_t num_outputs;
};

struct UpdatedMatrix {
    UpdatedOutputs outputs[3];
    int64_t count;
};

// The outputs of a layer's matrices: q, k, v; o; gate, up; down.
UpdatedMatrix updated_qkv(const rl_model& model);
UpdatedMatrix updated_out(const rl_model& model);
UpdatedMatrix updated_gate_up(const rl_model& model);
UpdatedMatrix updated_down(const rl_model& model);

// The outputs of the whole matrix.
inline int64_t num_outputs(const UpdatedMatrix& matrix) {
    const UpdatedOutputs& last = matrix.outputs[matrix.count - 1];
    return last.first_output + last.num_outputs;
}

// The adapters of a step's rows.
class AdapterRuns {
public:
    // Buffers are taken from the arena, and are valid until it is cleared.
    AdapterRuns(const rl_batch& batch, const Kernels& kernels, Arena& arena);

    // Pieces of `reduce` for one matrix.
    int64_t num_pieces(const UpdatedMatrix& matrix) const { return num_chunks_ * matrix.count; }

    // Computes scale * A x of some rows for some outputs of the matrix. x [T][num_inputs], the operand type.
    void reduce(const UpdatedMatrix& matrix, int layer, const void* x, int64_t num_inputs, int64_t piece) const;

    // Adds B times the reduced rows to blocks [first, end) of 16 outputs of y [T][y_stride].
    void add(const UpdatedMatrix& matrix, int layer, int64_t first, int64_t end, float* y, int64_t y_stride) const;

private:
    // Rows of a run that one piece reduces.
    struct Chunk {
        int64_t run;
        int64_t first_row;
        int64_t num_rows;
    };

    struct Run {
        const rl_adapter_layer* layers;
        int64_t first_row;
        int64_t num_rows;
    };

    static constexpr int64_t kChunkRows = 16;

    // The reduced rows [num_rows][rank] of a run for one entry of UpdatedMatrix.outputs.
    char* reduced(const Run& run, int64_t index) const;

    const Kernels& kernels_;
    Run* runs_;
    Chunk* chunks_;
    int64_t num_runs_ = 0;
    int64_t num_chunks_ = 0;
    char* reduced_;
};
