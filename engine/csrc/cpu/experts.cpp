#include "experts.h"

#include <algorithm>
#include <new>
#include <string.h>

#include "kernels.h"
#include "library.h"
#include "phase_clock.h"
#include "step_products.h"
#include "step_state.h"

namespace {

int64_t num_matrices(const rl_experts& experts) { return experts.num_experts + experts.num_shared; }

int64_t pairs_per_token(const rl_experts& experts) { return experts.num_per_token + experts.num_shared; }

int64_t width_of(const rl_experts& experts, int64_t expert) { return experts.gate_up[expert].num_outputs / 2; }

int64_t shared_width(const rl_experts& experts) {
    return experts.num_shared == 0 ? 0 : width_of(experts, experts.num_experts);
}

bool has_quantised(const rl_experts& experts) {
    const int64_t count = num_matrices(experts);
    return std::any_of(experts.gate_up, experts.gate_up + count, is_quantised) ||
           std::any_of(experts.down, experts.down + count, is_quantised);
}

// The layer's experts, and the step's buffers for them.
class Experts {
public:
    Experts(const Step& step, const rl_experts& experts)
        : step_(step),
          experts_(experts),
          buffers_(*step.experts),
          num_tokens_(step.batch->num_tokens),
          num_routed_pairs_(num_tokens_ * experts.num_per_token),
          num_pairs_(num_tokens_ * pairs_per_token(experts)) {}

    void select(Phase phase) const {
        for_pieces(phase, num_tokens_, 8, [&](int64_t token) {
            float* logits = buffers_.logits + token * num_matrices(experts_);
            const int64_t first = token * experts_.num_per_token;
            step_.kernels->route(logits, experts_.num_experts, experts_.num_per_token, experts_.normalises != 0,
                                 buffers_.selected + first, buffers_.weights + first);
            if (experts_.num_shared != 0) {
                step_.kernels->sigmoid(logits + experts_.num_experts);
            }
        });
    }

    // Sorts the pairs by expert, then by token.
    void sort(Phase phase) const {
        phase.run(1, [&](int64_t) {
            const int64_t count = num_matrices(experts_);
            int32_t* starts = buffers_.starts;
            memset(starts, 0, (size_t)(count + 1) * sizeof(int32_t));
            for (int64_t i = 0; i < num_routed_pairs_; i++) {
                starts[buffers_.selected[i] + 1]++;
            }
            if (experts_.num_shared != 0) {
                starts[count] = (int32_t)num_tokens_;
            }
            for (int64_t expert = 0; expert < count; expert++) {
                starts[expert + 1] += starts[expert];
            }
            // After these loops, starts[i] is the end of expert i's pairs, which is the start of expert i + 1's pairs.
            for (int64_t i = 0; i < num_routed_pairs_; i++) {
                const int32_t expert = buffers_.selected[i];
                place(starts[expert]++, i / experts_.num_per_token, expert, buffers_.weights[i]);
            }
            for (int64_t token = 0; experts_.num_shared != 0 && token < num_tokens_; token++) {
                const int64_t expert = experts_.num_experts;
                place(starts[expert]++, token, expert, buffers_.logits[token * count + expert]);
            }
            memmove(starts + 1, starts, (size_t)count * sizeof(int32_t));
            starts[0] = 0;
            *buffers_.num_active = 0;
            for (int64_t expert = 0; expert < count; expert++) {
                if (starts[expert + 1] > starts[expert]) {
                    buffers_.active[(*buffers_.num_active)++] = (int32_t)expert;
                }
            }
        });
    }

    // Copies the normalised row of each pair's token to the pair's row. Quantises the copy if the matrix is quantised.
    void gather(Phase phase) const {
        const int64_t width = step_.model->width;
        for_pieces(phase, num_pairs_, 16, [&](int64_t pair) {
            const int64_t expert = buffers_.experts[pair];
            const char* from = (const char*)step_.normed + buffers_.tokens[pair] * row_bytes(width, false);
            const bool is_small = is_quantised(experts_.gate_up[expert]);
            char* to = rows_of(expert) + (pair - buffers_.starts[expert]) * row_bytes(width, is_small);
            if (is_small) {
                step_.kernels->quantise_row(from, width, to);
            } else {
                memcpy(to, from, (size_t)row_bytes(width, false));
            }
        });
    }

    void multiply_gate_up(Phase phase) const {
        const int64_t most_active = std::min<int64_t>(experts_.num_experts, num_routed_pairs_) + experts_.num_shared;
        const int64_t routed_blocks = width_of(experts_, 0) / 16;
        const int64_t shared_blocks = shared_width(experts_) / 16;
        const int64_t most_blocks = std::max(routed_blocks, shared_blocks);
        const int64_t total = (most_active - experts_.num_shared) * routed_blocks + shared_blocks;
        const int64_t size = std::min(blocks_per_piece(total, step_.pool->size()), most_blocks);
        const int64_t pieces_of_expert = ceil_div(most_blocks, size);
        phase.run(most_active * pieces_of_expert, [&](int64_t piece) {
            const int64_t index = piece / pieces_of_expert;
            if (index >= *buffers_.num_active) {
                return;
            }
            const int64_t expert = buffers_.active[index];
            const rl_linear& matrix = experts_.gate_up[expert];
            const int64_t first = piece % pieces_of_expert * size;
            const int64_t end = std::min(first + size, width_of(experts_, expert) / 16);
            if (first >= end) {
                return;
            }
            LinearTask task = linear_task(matrix, rows_of(expert), num_rows(expert), nullptr);
            task.gated = gated_of(expert);
            task.activation = step_.model->activation;
            linear_kernels(*step_.kernels, matrix).gate_linear(task, first, end);
        });
    }

    void quantise_gated(Phase phase) const {
        for_pieces(phase, num_pairs_, 16, [&](int64_t pair) {
            const int64_t expert = buffers_.experts[pair];
            if (!is_quantised(experts_.down[expert])) {
                return;
            }
            const int64_t width = width_of(experts_, expert);
            const int64_t row = pair - buffers_.starts[expert];
            step_.kernels->quantise_row(gated_of(expert) + row * row_bytes(width, false), width,
                                        quantised_of(expert) + row * row_bytes(width, true));
        });
    }

    // Computes each token's weighted sum of its experts' outputs, in the order of the experts. With `is_stored`, stores
    // the sums in out [T][D], else adds them to `out`.
    void multiply_down(Phase phase, float* out, bool is_stored) const {
        const int64_t width = step_.model->width;
        const int64_t num_blocks = width / 16;
        const int64_t size = blocks_per_piece(num_blocks, step_.pool->size());
        phase.run(ceil_div(num_blocks, size), [&](int64_t piece) {
            const int64_t first = piece * size;
            const int64_t end = std::min(first + size, num_blocks);
            for (int64_t token = 0; is_stored && token < num_tokens_; token++) {
                memset(out + token * width + first * 16, 0, (size_t)(end - first) * 16 * sizeof(float));
            }
            for (int64_t index = 0; index < *buffers_.num_active; index++) {
                const int64_t expert = buffers_.active[index];
                const rl_linear& matrix = experts_.down[expert];
                const void* x = is_quantised(matrix) ? quantised_of(expert) : gated_of(expert);
                LinearTask task = linear_task(matrix, x, num_rows(expert), out);
                task.out_rows = buffers_.tokens + buffers_.starts[expert];
                task.factors = buffers_.factors + buffers_.starts[expert];
                linear_kernels(*step_.kernels, matrix).scatter_linear(task, first, end);
            }
        });
    }

private:
    template <class Work>
    static void for_pieces(Phase phase, int64_t count, int64_t size, Work work) {
        phase.run(ceil_div(count, size), [&](int64_t piece) {
            const int64_t end = std::min((piece + 1) * size, count);
            for (int64_t i = piece * size; i < end; i++) {
                work(i);
            }
        });
    }

    void place(int64_t pair, int64_t token, int64_t expert, float factor) const {
        buffers_.tokens[pair] = (int32_t)token;
        buffers_.experts[pair] = (int32_t)expert;
        buffers_.factors[pair] = factor;
    }

    int64_t num_rows(int64_t expert) const { return buffers_.starts[expert + 1] - buffers_.starts[expert]; }

    int64_t row_bytes(int64_t width, bool is_small) const {
        return is_small ? step_.kernels->quantised_row_bytes(width) : width * step_.kernels->operand_bytes;
    }

    char* rows_of(int64_t expert) const {
        const int64_t width = step_.model->width;
        return buffers_.rows + buffers_.starts[expert] * std::max(row_bytes(width, false), row_bytes(width, true));
    }

    // Returns the first row of an expert in a buffer of P rows, each as wide as the MLP of its expert.
    char* at_width(char* buffer, int64_t expert, bool is_small) const {
        const int64_t routed = std::min<int64_t>(buffers_.starts[expert], num_routed_pairs_);
        return buffer + routed * row_bytes(width_of(experts_, 0), is_small);
    }

    char* gated_of(int64_t expert) const { return at_width(buffers_.gated, expert, false); }

    char* quantised_of(int64_t expert) const { return at_width(buffers_.quantised_rows, expert, true); }

    const Step& step_;
    const rl_experts& experts_;
    const ExpertBuffers& buffers_;
    const int64_t num_tokens_;
    const int64_t num_routed_pairs_;
    const int64_t num_pairs_;
};

}  // namespace

const ExpertBuffers* ExpertBuffers::make(const rl_model& model, int64_t num_tokens, const Kernels& kernels,
                                         Arena& arena) {
    const rl_layer* end = model.layers + model.num_layers;
    const rl_layer* first = std::find_if(model.layers, end, [](const rl_layer& layer) { return layer.experts != nullptr; });
    if (first == end) {
        return nullptr;
    }
    const rl_experts& experts = *first->experts;
    const bool is_any_quantised = std::any_of(first, end, [](const rl_layer& layer) {
        return layer.experts != nullptr && has_quantised(*layer.experts);
    });
    const int64_t count = num_matrices(experts);
    const int64_t selected = num_tokens * experts.num_per_token;
    const int64_t pairs = num_tokens * pairs_per_token(experts);
    const int64_t widths[] = {width_of(experts, 0), shared_width(experts)};
    const int64_t row = std::max((int64_t)model.width * kernels.operand_bytes, kernels.quantised_row_bytes(model.width));
    const int64_t small = selected * kernels.quantised_row_bytes(widths[0]) +
                          (pairs - selected) * kernels.quantised_row_bytes(widths[1]);
    ExpertBuffers* made = new (arena.take<ExpertBuffers>(1)) ExpertBuffers;
    made->logits = arena.take<float>(num_tokens * count + selected + pairs);
    made->weights = made->logits + num_tokens * count;
    made->factors = made->weights + selected;
    made->selected = arena.take<int32_t>(selected + 2 * pairs + 2 * count + 2);
    made->tokens = made->selected + selected;
    made->experts = made->tokens + pairs;
    made->starts = made->experts + pairs;
    made->active = made->starts + count + 1;
    made->num_active = made->active + count;
    made->rows = arena.take<char>(pairs * row);
    made->gated = arena.take<char>((selected * widths[0] + (pairs - selected) * widths[1]) * kernels.operand_bytes);
    made->quantised_rows = arena.take<char>(is_any_quantised ? small : 0);
    return made;
}

void run_experts(const Step& step, int half, PhaseClock& clock) {
    if (step.batch->num_tokens == 0) {  // this is the last layer, and the caller needs the results of no row
        return;
    }
    const rl_layer& layer = step.model->layers[half / 2];
    const Experts experts(step, *layer.experts);
    // A product has the phases 0 to 2. This product needs only phase 1: the router is not quantised, and models with
    // experts have no adapters.
    multiply(step, half, 0, Output::kStore, layer.experts->router, UpdatedMatrix{}, step.normed, step.experts->logits);
    experts.select(Phase(step, half, 2));
    experts.sort(Phase(step, half, 3));
    experts.gather(Phase(step, half, 4));
    experts.multiply_gate_up(Phase(step, half, 5));
    clock.add_to(RL_PHASE_GATE_UP);
    if (has_quantised(*layer.experts)) {
        experts.quantise_gated(Phase(step, half, 6));
    }
    if (step.partial != nullptr && half + 1 == step.end_half) {
        experts.multiply_down(Phase(step, half, 7), step.partial, true);
    } else if (step.update != nullptr) {
        experts.multiply_down(Phase(step, half, 7), step.update, true);
        add_update(step, Phase(step, half, 8), layer.mlp_output_norm);
    } else {
        experts.multiply_down(Phase(step, half, 7), step.batch->residual, false);
    }
    clock.add_to(RL_PHASE_DOWN);
}
