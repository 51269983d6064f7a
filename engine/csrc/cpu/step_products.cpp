#include "step_products.h"

#include <algorithm>

#include "library.h"

namespace {

// With fewer rows than this, the speed of memory limits a product, so it prefetches no weights of adapters.
constexpr int64_t kLeastFetchingRows = 8;
// A product takes this many blocks of weights, of 16 outputs each, at a time. It multiplies them by one half of the
// rows, then by the other half. The number is so small that the weights are still in the cache for the second half.
constexpr int64_t kFetchedBlocks = 2;

// A matrix has at most this many forms: those of q, k and v.
constexpr int kMostForms = 3;

using LinearKernel = void (*)(const LinearTask&, int64_t, int64_t);

LinearKernel linear_kernel(const LinearKernels& kernels, Output output) {
    switch (output) {
        case Output::kStore:
            return kernels.linear;
        case Output::kAdd:
            return kernels.add_linear;
        case Output::kGate:
            return kernels.gate_linear;
    }
    return nullptr;
}

// The product with those outputs of a matrix that have one form. Its pieces are `num_pieces`, from `first_piece` on.
struct FormProduct {
    LinearTask task;
    LinearKernel kernel;
    int64_t num_blocks;
    int64_t first_piece;
    int64_t num_pieces;
};

int64_t num_blocks_of(Output output, int64_t num_outputs) {
    return ceil_div(output == Output::kGate ? num_outputs / 2 : num_outputs, 16);
}

// Sets `products` to the products of a matrix, one for each form, in pieces of `size` blocks. Returns the number of all
// pieces.
int64_t form_products(const Step& step, Output output, const rl_linear& linear, int64_t size, const void* x,
                      float* out, FormProduct (&products)[kMostForms]) {
    FormProduct* product = products;
    int64_t num_pieces = 0;
    int64_t first_output = 0;
    for (const rl_linear* form = &linear; form != nullptr; form = form->more) {
        product->task = linear_task(*form, x, step.batch->num_tokens, first_output == 0 ? out : out + first_output);
        product->task.out_stride = all_outputs(linear);
        product->task.gated = step.gated;
        product->task.activation = step.model->activation;
        product->kernel = linear_kernel(linear_kernels(*step.kernels, *form), output);
        product->num_blocks = num_blocks_of(output, form->num_outputs);
        product->first_piece = num_pieces;
        product->num_pieces = ceil_div(product->num_blocks, size);
        num_pieces += product->num_pieces;
        first_output += form->num_outputs;
        product++;
    }
    return num_pieces;
}

// Quantises the rows of x into step.quantised.
void quantise(const Step& step, Phase phase, const rl_linear& linear, const void* x) {
    const Kernels& kernels = *step.kernels;
    const int64_t size = kernels.quantised_row_bytes(linear.num_inputs);
    phase.run(step.batch->num_tokens, [&](int64_t row) {
        const char* from = (const char*)x + row * linear.num_inputs * kernels.operand_bytes;
        kernels.quantise_row(from, linear.num_inputs, (char*)step.quantised + row * size);
    });
}

// Adds the updates of adapters to a product. With `is_gate`, it then computes the activation of gate and up, for all rows.
void add_updates(const Step& step, int half, Phase phase, bool is_gate, const UpdatedMatrix& updated, float* out) {
    const AdapterRows& adapters = *step.adapters;
    if (adapters.num_chunks() == 0) {
        return;  // this is the last layer, and the caller needs the results of no row
    }
    const int layer = half / 2;
    const int64_t stride = updated.num_outputs();
    const int64_t num_blocks = (is_gate ? stride / 2 : stride) / 16;
    // The columns of a chunk are cut into just enough ranges for all threads, because a long range is read faster.
    const int64_t wanted = ceil_div(num_blocks, blocks_per_piece(num_blocks, step.pool->size()));
    const int64_t num_ranges = ceil_div(wanted, adapters.num_chunks());
    const int64_t size = ceil_div(num_blocks, num_ranges);
    phase.run(adapters.num_chunks() * num_ranges, [&](int64_t piece) {
        const int64_t chunk = piece / num_ranges;
        const int64_t first = piece % num_ranges * size;
        const int64_t end = std::min(first + size, num_blocks);
        if (first >= end) {
            return;
        }
        adapters.add(updated, layer, chunk, first, end, out, stride);
        if (!is_gate) {
            return;
        }
        adapters.add(updated, layer, chunk, num_blocks + first, num_blocks + end, out, stride);
        const int64_t width = step.model->intermediate;
        const int64_t first_row = adapters.chunk(chunk).first_row;
        for (int64_t row = first_row; row < first_row + adapters.chunk(chunk).num_rows; row++) {
            char* gated = (char*)step.gated + row * width * step.kernels->operand_bytes;
            step.kernels->gate(out + row * stride, width, first, end, step.model->activation, gated);
        }
    });
}

// Multiplies blocks [first, end) of 16 outputs, kFetchedBlocks at a time, and prefetches the weights of adapters. The
// product of the first half of the rows prefetches the next blocks. The product of the second half reads its weights
// from the cache, and prefetches the weights of adapters.
void multiply_and_fetch(const Step& step, int layer, LinearKernel kernel, const UpdatedMatrix& updated,
                        const LinearTask& task, int64_t first, int64_t end) {
    const int64_t block_bytes = 16 * task.num_inputs * element_bytes(*step.model);
    const int64_t num_shares = ceil_div(updated.num_outputs() / 16, kFetchedBlocks);
    LinearTask upper = task;
    upper.num_rows = task.num_rows / 2;
    LinearTask lower = task;
    lower.num_rows = task.num_rows - upper.num_rows;
    lower.x = (const char*)task.x + upper.num_rows * task.num_inputs * step.kernels->operand_bytes;
    lower.out = task.out + upper.num_rows * task.out_stride;
    for (int64_t block = first; block < end; block += kFetchedBlocks) {
        const char* fetched = step.adapters->to_fetch(updated, layer, task.num_inputs, block / kFetchedBlocks,
                                                      num_shares, kFetchedBlocks * block_bytes);
        const int64_t next = std::min(block + kFetchedBlocks, end);
        if (fetched == nullptr) {
            kernel(task, block, next);
            continue;
        }
        kernel(upper, block, next);
        // The offset of the block is subtracted here, because a kernel adds it to `next_weight` before it prefetches.
        lower.next_weight = fetched - block * block_bytes;
        kernel(lower, block, next);
    }
}

}  // namespace

void add_update(const Step& step, Phase phase, const float* output_norm) {
    constexpr int64_t rows_per_piece = 8;
    const rl_model& model = *step.model;
    const int64_t num_tokens = step.batch->num_tokens;
    phase.run(ceil_div(num_tokens, rows_per_piece), [&](int64_t piece) {
        const int64_t end = std::min((piece + 1) * rows_per_piece, num_tokens);
        for (int64_t row = piece * rows_per_piece; row < end; row++) {
            step.kernels->add_row(step.update + row * model.width, output_norm, model.rms_norm_eps,
                                  model.residual_scale, model.width, step.batch->residual + row * model.width);
        }
    });
}

void multiply(const Step& step, int half, int phase, Output output, const rl_linear& linear,
              const UpdatedMatrix& updated, const void* x, float* out) {
    const void* operand = x;
    const AdapterRows* adapters = step.adapters;
    const bool is_gate = output == Output::kGate;
    if (is_gate && adapters != nullptr) {
        output = Output::kStore;
        out = step.gate_up;
    }
    if (is_quantised(linear)) {
        quantise(step, Phase(step, half, phase), linear, x);
        x = step.quantised;
    }
    FormProduct products[kMostForms];
    const int64_t size = blocks_per_piece(num_blocks_of(output, all_outputs(linear)), step.pool->size());
    const int64_t num_pieces = form_products(step, output, linear, size, x, out, products);
    const int64_t num_reductions = adapters == nullptr ? 0 : adapters->num_pieces(updated);
    Phase(step, half, phase + 1).run(num_pieces + num_reductions, [&](int64_t piece) {
        if (piece >= num_pieces) {
            adapters->reduce(updated, half / 2, operand, linear.num_inputs, piece - num_pieces);
            return;
        }
        const FormProduct* product = products;
        while (piece >= product->first_piece + product->num_pieces) {
            product++;
        }
        const int64_t first = (piece - product->first_piece) * size;
        const int64_t end = std::min(first + size, product->num_blocks);
        if (adapters == nullptr || is_quantised(linear) || product->task.num_rows < kLeastFetchingRows) {
            product->kernel(product->task, first, end);
        } else {
            multiply_and_fetch(step, half / 2, product->kernel, updated, product->task, first, end);
        }
    });
    if (adapters != nullptr) {
        add_updates(step, half, Phase(step, half, phase + 2), is_gate, updated, out);
    }
}

void multiply_into_residual(const Step& step, int half, int phase, const rl_linear& linear,
                            const UpdatedMatrix& updated, const float* output_norm, const void* x) {
    if (step.partial != nullptr && half + 1 == step.end_half) {
        multiply(step, half, phase, Output::kStore, linear, updated, x, step.partial);
    } else if (step.update != nullptr) {
        multiply(step, half, phase, Output::kStore, linear, updated, x, step.update);
        add_update(step, Phase(step, half, phase + 3), output_norm);
    } else {
        multiply(step, half, phase, Output::kAdd, linear, updated, x, step.batch->residual);
    }
}
