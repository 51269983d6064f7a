#include "adapters.h"

#include <algorithm>

namespace {

// One past the last of the rows from `first` on that have the adapter of the first.
int64_t end_of_run(const rl_batch& batch, int64_t first) {
    int64_t end = first + 1;
    while (end < batch.num_tokens && batch.adapter_of_token[end] == batch.adapter_of_token[first]) {
        end++;
    }
    return end;
}

int64_t query_size(const rl_model& model) { return (int64_t)model.num_heads * model.head_dim; }

}  // namespace

UpdatedMatrix updated_qkv(const rl_model& model) {
    const int64_t query = query_size(model);
    const int64_t key = (int64_t)model.num_kv_heads * model.head_dim;
    return {{{&rl_adapter_layer::q, 0, query},
             {&rl_adapter_layer::k, query, key},
             {&rl_adapter_layer::v, query + key, key}},
            3};
}

UpdatedMatrix updated_out(const rl_model& model) {
    return {{{&rl_adapter_layer::out, 0, model.width}, {}, {}}, 1};
}

UpdatedMatrix updated_gate_up(const rl_model& model) {
    return {{{&rl_adapter_layer::gate, 0, model.intermediate},
             {&rl_adapter_layer::up, model.intermediate, model.intermediate},
             {}},
            2};
}

UpdatedMatrix updated_down(const rl_model& model) {
    return {{{&rl_adapter_layer::down, 0, model.width}, {}, {}}, 1};
}

AdapterRuns::AdapterRuns(const rl_batch& batch, const Kernels& kernels, Arena& arena) : kernels_(kernels) {
    const int64_t num_tokens = batch.num_tokens;
    runs_ = arena.take<Run>(num_tokens);
    chunks_ = arena.take<Chunk>(num_tokens);
    reduced_ = arena.take<char>(num_tokens * 3 * kMostRank * kernels.operand_bytes);
    for (int64_t first = 0, end; first < num_tokens; first = end) {
        end = end_of_run(batch, first);
        if (batch.adapter_of_token[first] < 0) {
            continue;
        }
        for (int64_t row = first; row < end; row += kChunkRows) {
            chunks_[num_chunks_++] = {num_runs_, row, std::min(kChunkRows, end - row)};
        }
        runs_[num_runs_++] = {batch.adapters[batch.adapter_of_token[first]], first, end - first};
    }
}

char* AdapterRuns::reduced(const Run& run, int64_t index) const {
    return reduced_ + (run.first_row * 3 + run.num_rows * index) * kMostRank * kernels_.operand_bytes;
}

void AdapterRuns::reduce(const UpdatedMatrix& matrix, int layer, const void* x, int64_t num_inputs,
                         int64_t piece) const {
    const Chunk& chunk = chunks_[piece / matrix.count];
    const Run& run = runs_[chunk.run];
    const int64_t index = piece % matrix.count;
    const rl_update& update = run.layers[layer].*matrix.outputs[index].update;
    if (update.a == nullptr) {
        return;
    }
    alignas(64) float sums[kChunkRows * kMostRank];
    LinearTask task = {};
    task.x = (const char*)x + chunk.first_row * num_inputs * kernels_.operand_bytes;
    task.num_rows = chunk.num_rows;
    task.weight = update.a;
    task.num_inputs = num_inputs;
    task.num_outputs = update.rank;
    task.out = sums;
    task.out_stride = update.rank;
    kernels_.dense.linear(task, 0, update.rank / 16);
    const int64_t offset = (chunk.first_row - run.first_row) * update.rank * kernels_.operand_bytes;
    kernels_.scale(sums, update.scale, chunk.num_rows * update.rank, reduced(run, index) + offset);
}

void AdapterRuns::add(const UpdatedMatrix& matrix, int layer, int64_t first, int64_t end, float* y,
                      int64_t y_stride) const {
    for (int64_t number = 0; number < num_runs_; number++) {
        const Run& run = runs_[number];
        for (int64_t index = 0; index < matrix.count; index++) {
            const UpdatedOutputs& outputs = matrix.outputs[index];
            const rl_update& update = run.layers[layer].*outputs.update;
            const int64_t first_block = outputs.first_output / 16;
            const int64_t num_blocks = outputs.num_outputs / 16;
            const int64_t from = std::max(first - first_block, (int64_t)0);
            const int64_t to = std::min(end - first_block, num_blocks);
            if (update.a == nullptr || from >= to) {
                continue;
            }
            LinearTask task = {};
            task.x = reduced(run, index);
            task.num_rows = run.num_rows;
            task.weight = update.b;
            task.num_inputs = update.rank;
            task.num_outputs = outputs.num_outputs;
            task.out = y + run.first_row * y_stride + outputs.first_output;
            task.out_stride = y_stride;
            kernels_.dense.add_linear(task, from, to);
        }
    }
}
