#include "step_products.h"

#include <algorithm>

#include "library.h"

namespace {

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

// Quantises the rows of x into step.quantised.
void quantise(const Step& step, Phase phase, const rl_linear& linear, const void* x) {
    const Kernels& kernels = *step.kernels;
    const int64_t size = kernels.quantised_row_bytes(linear.num_inputs);
    phase.run(step.batch->num_tokens, [&](int64_t row) {
        const char* from = (const char*)x + row * linear.num_inputs * kernels.operand_bytes;
        kernels.quantise_row(from, linear.num_inputs, (char*)step.quantised + row * size);
    });
}

// Adds the updates of adapters to a product. The product of the gate is then gated, too.
void add_updates(const Step& step, int half, Phase phase, bool is_gate, const UpdatedMatrix& updated, float* out) {
    const int layer = half / 2;
    const int64_t stride = is_gate ? 2 * (int64_t)step.model->intermediate : num_outputs(updated);
    const int64_t num_blocks = (is_gate ? stride / 2 : stride) / 16;
    const int64_t size = blocks_per_piece(num_blocks, step.pool->size());
    phase.run(ceil_div(num_blocks, size), [&](int64_t piece) {
        const int64_t first = piece * size;
        const int64_t end = std::min(first + size, num_blocks);
        step.adapters->add(updated, layer, first, end, out, stride);
        if (!is_gate) {
            return;
        }
        step.adapters->add(updated, layer, num_blocks + first, num_blocks + end, out, stride);
        for (int64_t row = 0; row < step.batch->num_tokens; row++) {
            char* gated = (char*)step.gated + row * step.model->intermediate * step.kernels->operand_bytes;
            step.kernels->gate(out + row * stride, step.model->intermediate, first, end,
                               step.model->activation, gated);
        }
    });
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
    const AdapterRuns* adapters = step.adapters;
    const bool is_gate = output == Output::kGate;
    if (is_gate && adapters != nullptr) {
        output = Output::kStore;
        out = step.gate_up;
    }
    if (is_quantised(linear)) {
        quantise(step, Phase(step, half, phase), linear, x);
        x = step.quantised;
    }
    LinearTask task = linear_task(linear, x, step.batch->num_tokens, out);
    task.gated = step.gated;
    task.activation = step.model->activation;
    const LinearKernel kernel = linear_kernel(linear_kernels(*step.kernels, linear), output);
    const int64_t num_blocks = ceil_div(output == Output::kGate ? linear.num_outputs / 2 : linear.num_outputs, 16);
    const int64_t size = blocks_per_piece(num_blocks, step.pool->size());
    const int64_t num_pieces = ceil_div(num_blocks, size);
    const int64_t num_reductions = adapters == nullptr ? 0 : adapters->num_pieces(updated);
    Phase(step, half, phase + 1).run(num_pieces + num_reductions, [&](int64_t piece) {
        if (piece >= num_pieces) {
            adapters->reduce(updated, half / 2, operand, linear.num_inputs, piece - num_pieces);
            return;
        }
        const int64_t end = (piece + 1) * size;
        kernel(task, piece * size, end < num_blocks ? end : num_blocks);
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
