#include "step.h"

#include <algorithm>
#include <errno.h>
#include <new>
#include <string.h>

#include "adapters.h"
#include "arena.h"
#include "attention_plan.h"
#include "experts.h"
#include "kernels.h"
#include "library.h"
#include "phase_clock.h"
#include "step_products.h"
#include "step_state.h"
#include "threads.h"
#include "wanted_rows.h"

namespace {

void normalise(const Step& step, Phase phase, const float* weight) {
    constexpr int64_t rows_per_piece = 8;
    const rl_model& model = *step.model;
    const int64_t num_tokens = step.batch->num_tokens;
    phase.run(ceil_div(num_tokens, rows_per_piece), [&](int64_t piece) {
        const int64_t end = piece * rows_per_piece + rows_per_piece;
        for (int64_t row = piece * rows_per_piece; row < end && row < num_tokens; row++) {
            step.kernels->rms_norm(step.batch->residual + row * model.width, weight, model.rms_norm_eps, model.width,
                                   (char*)step.normed + row * model.width * step.kernels->operand_bytes);
        }
    });
}

// Returns whether a half layer's output is scaled or normalised before it is added to the residual stream.
bool has_updates(const rl_model& model) {
    return model.residual_scale != 1.0f || model.layers[0].attention_output_norm != nullptr;
}

void rotate(const Step& step, Phase phase, const rl_layer& layer, void* pages) {
    // Neighbouring tokens of a prompt write to the same cache lines of a KV block. So one thread computes many
    // neighbouring tokens.
    const int64_t tokens_per_piece = step.batch->num_tokens >= 8 * kBlockSize ? 2 * kBlockSize : 4;
    const rl_model& model = *step.model;
    const rl_batch& batch = *step.batch;
    const int64_t half = model.rotary_dim / 2;
    const float* cosines = layer.window > 0 ? batch.window_cosines : batch.cosines;
    const float* sines = layer.window > 0 ? batch.window_sines : batch.sines;
    phase.run(ceil_div(batch.num_tokens, tokens_per_piece), [&](int64_t piece) {
        const int64_t end = (piece + 1) * tokens_per_piece;
        for (int64_t token = piece * tokens_per_piece; token < end && token < batch.num_tokens; token++) {
            const int64_t query_size = (int64_t)model.num_heads * model.head_dim * step.kernels->operand_bytes;
            step.kernels->rotate_and_write({
                step.qkv + token * all_outputs(layer.qkv),
                cosines + token * half,
                sines + token * half,
                layer.q_norm,
                layer.k_norm,
                model.rms_norm_eps,
                model.has_wide_norms != 0,
                model.num_heads,
                model.num_kv_heads,
                model.head_dim,
                model.rotary_dim,
                (char*)step.query + token * query_size,
                pages,
                batch.slot_mapping[token],
            });
        }
    });
}

AttentionTask attention_task(const Step& step, const AttentionTile& tile, const rl_layer& layer, void* pages) {
    const rl_model& model = *step.model;
    const int64_t offset =
        tile.first_token * model.num_heads * model.head_dim * (int64_t)step.kernels->operand_bytes;
    return {
        (char*)step.query + offset,
        tile.num_tokens,
        tile.first_position,
        layer.window,
        tile.block_table,
        ceil_div(tile.first_position + tile.num_tokens, kBlockSize),
        pages,
        tile.kv_head,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.score_scale,
        model.score_cap,
        layer.sinks,
        (char*)step.attended + offset,
        nullptr,
        nullptr,
        nullptr,
    };
}

// Sets the task's pointers to the results of `segment`, for a tile that is computed in segments.
void use_segment(AttentionTask& task, const AttentionPlan& plan, const AttentionTile& tile, int64_t segment) {
    const int64_t rows = tile.num_tokens * (task.num_heads / task.num_kv_heads);
    const int64_t row = tile.first_result + segment * rows;
    task.values = plan.values + row * task.head_dim;
    task.highest = plan.highest + row;
    task.total = plan.total + row;
}

// Computes the attention of a layer, in phases `phase` and `phase` + 1.
void attend(const Step& step, int half, int phase, const rl_layer& layer, void* pages) {
    const AttentionPlan& plan = *step.attention;
    Phase(step, half, phase).run(plan.num_pieces, [&](int64_t index) {
        const AttentionPiece& piece = plan.pieces[index];
        const AttentionTile& tile = plan.tiles[piece.tile];
        AttentionTask task = attention_task(step, tile, layer, pages);
        if (piece.end_segment < 0) {
            step.kernels->attend(task);
            return;
        }
        task.end_block = std::min(task.end_block, piece.end_segment * (kSegment / kBlockSize));
        for (int64_t segment = piece.first_segment; segment < piece.end_segment; segment++) {
            use_segment(task, plan, tile, segment);
            step.kernels->attend_segment(task, segment);
        }
    });
    if (plan.num_split == 0) {
        return;
    }
    Phase(step, half, phase + 1).run(plan.num_split, [&](int64_t index) {
        const AttentionTile& tile = plan.tiles[plan.split[index]];
        AttentionTask task = attention_task(step, tile, layer, pages);
        use_segment(task, plan, tile, 0);
        step.kernels->combine(task, tile.num_segments);
    });
}

bool is_last_layer(const Step& step, int half) { return half / 2 + 1 == step.model->num_layers; }

// Copies queries and residual stream of the wanted rows to the step that computes the rest of the last layer.
void choose_rows(const Step& step, Phase phase) {
    const int64_t width = step.model->width;
    const int64_t query_bytes =
        (int64_t)step.model->num_heads * step.model->head_dim * step.kernels->operand_bytes;
    phase.run(step.batch->num_wanted, [&](int64_t index) {
        const int64_t row = step.batch->wanted_rows[index];
        memcpy((char*)step.last->query + index * query_bytes, (const char*)step.query + row * query_bytes,
               (size_t)query_bytes);
        memcpy(step.last->batch->residual + index * width, step.batch->residual + row * width,
               (size_t)width * sizeof(float));
    });
}

void run_attention(const Step& step, int half, PhaseClock& clock) {
    const rl_layer& layer = step.model->layers[half / 2];
    void* pages = step.batch->pages[half / 2];
    normalise(step, Phase(step, half, 0), layer.attention_norm);
    clock.add_to(RL_PHASE_NORM);
    multiply(step, half, 1, Output::kStore, layer.qkv, updated_qkv(*step.model), step.normed, step.qkv);
    clock.add_to(RL_PHASE_QKV);
    rotate(step, Phase(step, half, 4), layer, pages);
    clock.add_to(RL_PHASE_ROTARY);
    const bool is_narrowed = step.last != nullptr && is_last_layer(step, half);
    if (is_narrowed) {
        choose_rows(step, Phase(step, half, 5));
    }
    const Step& rest = is_narrowed ? *step.last : step;
    attend(rest, half, 6, layer, pages);
    clock.add_to(RL_PHASE_ATTENTION);
    multiply_into_residual(rest, half, 8, layer.out, updated_out(*step.model), layer.attention_output_norm,
                           rest.attended);
    clock.add_to(RL_PHASE_OUT);
}

void run_mlp(const Step& whole, int half, PhaseClock& clock) {
    const Step& step = whole.last != nullptr && is_last_layer(whole, half) ? *whole.last : whole;
    const rl_layer& layer = step.model->layers[half / 2];
    normalise(step, Phase(step, half, 0), layer.mlp_norm);
    clock.add_to(RL_PHASE_NORM);
    if (layer.experts != nullptr) {
        run_experts(step, half, clock);
        return;
    }
    multiply(step, half, 1, Output::kGate, layer.gate_up, updated_gate_up(*step.model), step.normed, nullptr);
    clock.add_to(RL_PHASE_GATE_UP);
    multiply_into_residual(step, half, 4, layer.down, updated_down(*step.model), layer.mlp_output_norm, step.gated);
    clock.add_to(RL_PHASE_DOWN);
}

void run_halves(void* context, int thread) {
    const Step& step = *static_cast<const Step*>(context);
    PhaseClock clock(thread == 0 ? phase_seconds : nullptr);
    for (int half = step.first_half; half < step.end_half; half++) {
        if (half % 2 == 0) {
            run_attention(step, half, clock);
        } else {
            run_mlp(step, half, clock);
        }
        if (thread == 0) {
            *step.progress = *step.progress + 1;
        }
    }
}

bool has_quantised_layer(const rl_model& model) {
    return std::any_of(model.layers, model.layers + model.num_layers, [](const rl_layer& layer) {
        return is_quantised(layer.qkv) || is_quantised(layer.out) || is_quantised(layer.gate_up) ||
               is_quantised(layer.down);
    });
}

// Returns a step with buffers for the rows of `batch`.
Step make_step(const rl_model& model, const rl_batch& batch, const AttentionPlan& attention, Arena& arena) {
    const Kernels& kernels = chosen_kernels(model.dtype);
    const int64_t tokens = batch.num_tokens;
    const int64_t query_size = (int64_t)model.num_heads * model.head_dim;
    const int64_t qkv_size = query_size + 2 * (int64_t)model.num_kv_heads * model.head_dim;
    const int64_t widest = std::max({(int64_t)model.width, query_size, (int64_t)model.intermediate});
    const int64_t quantised_bytes = has_quantised_layer(model) ? kernels.quantised_row_bytes(widest) : 0;
    Step step = {};
    step.kernels = &kernels;
    step.pool = &thread_pool();
    step.model = &model;
    step.batch = &batch;
    step.attention = &attention;
    step.normed = arena.take<char>(tokens * model.width * kernels.operand_bytes);
    step.qkv = arena.take<float>(tokens * qkv_size);
    step.query = arena.take<char>(tokens * query_size * kernels.operand_bytes);
    step.attended = arena.take<char>(tokens * query_size * kernels.operand_bytes);
    step.gated = arena.take<char>(tokens * model.intermediate * kernels.operand_bytes);
    step.update = has_updates(model) ? arena.take<float>(tokens * model.width) : nullptr;
    step.quantised = arena.take<char>(tokens * quantised_bytes);
    step.experts = ExpertBuffers::make(model, tokens, kernels, arena);
    if (batch.adapters != nullptr) {
        step.gate_up = arena.take<float>(tokens * 2 * model.intermediate);
        step.adapters = new (arena.take<AdapterRows>(1)) AdapterRows(batch, kernels, element_bytes(model), arena);
    }
    return step;
}

// Sets the fields that a step and the step of its wanted rows have in common.
void set_range(Step& step, int first_half, int end_half, PhaseCounters* counters) {
    step.first_half = first_half;
    step.end_half = end_half;
    step.counters = counters;
}

PhaseCounters* make_counters(int64_t count, Arena& arena) {
    PhaseCounters* counters = arena.take<PhaseCounters>(count);
    for (int64_t i = 0; i < count; i++) {
        new (&counters[i]) PhaseCounters;
    }
    return counters;
}

}  // namespace

int run_step(const rl_model& model, const rl_batch& batch, int first_half, int end_half, float* partial,
             volatile int64_t* progress) {
    ThreadPool& pool = thread_pool();
    Arena& arena = step_arena();
    const bool is_last = first_half <= 2 * model.num_layers - 2 && end_half == 2 * model.num_layers;
    const bool is_narrowed =
        is_last && partial == nullptr && batch.wanted_rows != nullptr && batch.num_wanted < batch.num_tokens;
    try {
        arena.clear();
        PhaseCounters* counters = make_counters((int64_t)(end_half - first_half) * kMaxPhases, arena);
        const AttentionPlan attention = plan_attention(model, batch, pool.size(), arena);
        Step step = make_step(model, batch, attention, arena);
        set_range(step, first_half, end_half, counters);
        step.partial = partial;
        step.progress = progress;
        if (!is_narrowed) {
            pool.run(run_halves, &step);
            return 0;
        }
        const rl_batch wanted = batch_of_wanted_rows(model, batch, arena);
        const AttentionPlan last_attention = plan_attention(model, wanted, pool.size(), arena);
        Step last = make_step(model, wanted, last_attention, arena);
        set_range(last, first_half, end_half, counters);
        step.last = &last;
        pool.run(run_halves, &step);
        return_wanted_rows(model, wanted, batch);
    } catch (const std::bad_alloc&) {
        return ENOMEM;
    }
    return 0;
}
