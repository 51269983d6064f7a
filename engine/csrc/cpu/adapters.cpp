#include "adapters.h"

#include <algorithm>

namespace {

// Returns the end of the run of neighbouring rows that begins at row `first` and has the adapter of this row.
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
    return {&rl_adapter_layer::qkv, 3, {0, query, query + key, query + 2 * key}};
}

UpdatedMatrix updated_out(const rl_model& model) { return {&rl_adapter_layer::out, 1, {0, model.width}}; }

UpdatedMatrix updated_gate_up(const rl_model& model) {
    return {&rl_adapter_layer::gate_up, 2, {0, model.intermediate, 2 * (int64_t)model.intermediate}};
}

UpdatedMatrix updated_down(const rl_model& model) { return {&rl_adapter_layer::down, 1, {0, model.width}}; }

AdapterRows::AdapterRows(const rl_batch& batch, const Kernels& kernels, int64_t element_bytes, Arena& arena)
    : kernels_(kernels), element_bytes_(element_bytes) {
    const int64_t num_tokens = batch.num_tokens;
    adapters_ = arena.take<const rl_adapter_layer*>(num_tokens);
    chunks_ = arena.take<Chunk>(num_tokens);
    reduced_ = arena.take<char>(num_tokens * 3 * kMostRank * kernels.operand_bytes);
    for (int64_t first = 0, end; first < num_tokens; first = end) {
        end = end_of_run(batch, first);
        const int32_t adapter = batch.adapter_of_token[first];
        const rl_adapter_layer* layers = adapter < 0 ? nullptr : batch.adapters[adapter];
        if (layers != nullptr) {
            adapters_[num_adapters_++] = layers;
        }
        for (int64_t row = first; row < end; row += kChunkRows) {
            chunks_[num_chunks_++] = {layers, nullptr, row, std::min(kChunkRows, end - row)};
        }
    }
    for (int64_t index = num_chunks_ - 2; index >= 0; index--) {
        const Chunk& next = chunks_[index + 1];
        const bool is_other = next.layers != nullptr && next.layers != chunks_[index].layers;
        chunks_[index].next_layers = is_other ? next.layers : next.next_layers;
    }
}

char* AdapterRows::reduced(const Chunk& chunk, int64_t part) const {
    return reduced_ + (chunk.first_row * 3 + chunk.num_rows * part) * kMostRank * kernels_.operand_bytes;
}

void AdapterRows::reduce(const UpdatedMatrix& matrix, int layer, const void* x, int64_t num_inputs,
                         int64_t piece) const {
    const Chunk& chunk = chunks_[piece / matrix.num_parts];
    if (chunk.layers == nullptr) {
        return;
    }
    const rl_matrix_update& update = chunk.layers[layer].*matrix.update;
    const int64_t first_reduced = piece % matrix.num_parts * kPieceBlocks * 16;  // in rows of A, like num_reduced below
    int64_t num_reduced = -first_reduced;
    for (int64_t part = 0; part < matrix.num_parts; part++) {
        num_reduced += update.parts[part].rank;
    }
    num_reduced = std::min(num_reduced, kPieceBlocks * 16);
    if (num_reduced <= 0) {
        return;
    }
    alignas(64) float sums[kChunkRows * kPieceBlocks * 16];
    LinearTask task = {};
    task.x = (const char*)x + chunk.first_row * num_inputs * kernels_.operand_bytes;
    task.num_rows = chunk.num_rows;
    task.weight = update.a;
    task.next_weight = chunk.next_layers == nullptr ? nullptr : (chunk.next_layers[layer].*matrix.update).a;
    task.num_inputs = num_inputs;
    task.num_outputs = first_reduced + num_reduced;
    task.out = sums - first_reduced;
    task.out_stride = num_reduced;
    kernels_.dense.linear(task, first_reduced / 16, (first_reduced + num_reduced) / 16);
    int64_t first_of_part = -first_reduced;
    for (int64_t part = 0; part < matrix.num_parts; part++) {
        const rl_update& each = update.parts[part];
        const int64_t from = std::max(first_of_part, (int64_t)0);
        const int64_t end = std::min(first_of_part + each.rank, num_reduced);
        for (int64_t row = 0; row < chunk.num_rows && from < end; row++) {
            const int64_t offset = row * each.rank + from - first_of_part;
            kernels_.scale(sums + row * num_reduced + from, each.scale, end - from,
                           reduced(chunk, part) + offset * kernels_.operand_bytes);
        }
        first_of_part += each.rank;
    }
}

const char* AdapterRows::to_fetch(const UpdatedMatrix& matrix, int layer, int64_t num_inputs, int64_t share,
                                 int64_t num_shares, int64_t share_bytes) const {
    if (num_adapters_ == 0) {
        return nullptr;
    }
    const int64_t adapter = share * num_adapters_ / num_shares;
    const int64_t first_share = (adapter * num_shares + num_adapters_ - 1) / num_adapters_;
    const rl_matrix_update& update = adapters_[adapter][layer].*matrix.update;
    int64_t num_elements = 0;
    for (int64_t part = 0; part < matrix.num_parts; part++) {
        const int64_t num_outputs = matrix.first_output[part + 1] - matrix.first_output[part];
        num_elements += update.parts[part].rank * (num_inputs + num_outputs);
    }
    const int64_t offset = (share - first_share) * share_bytes;
    return offset < num_elements * element_bytes_ ? (const char*)update.a + offset : nullptr;
}

void AdapterRows::add(const UpdatedMatrix& matrix, int layer, int64_t index, int64_t first, int64_t end, float* y,
                      int64_t y_stride) const {
    const Chunk& chunk = chunks_[index];
    if (chunk.layers == nullptr) {
        return;
    }
    const rl_matrix_update& update = chunk.layers[layer].*matrix.update;
    for (int64_t part = 0; part < matrix.num_parts; part++) {
        const rl_update& each = update.parts[part];
        const int64_t first_output = matrix.first_output[part];
        const int64_t num_outputs = matrix.first_output[part + 1] - first_output;
        const int64_t from = std::max(first - first_output / 16, (int64_t)0);
        const int64_t to = std::min(end - first_output / 16, num_outputs / 16);
        if (each.rank == 0 || from >= to) {
            continue;
        }
        LinearTask task = {};
        task.x = reduced(chunk, part);
        task.num_rows = chunk.num_rows;
        task.weight = each.b;
        task.next_weight =
            chunk.next_layers == nullptr ? nullptr : (chunk.next_layers[layer].*matrix.update).parts[part].b;
        task.num_inputs = each.rank;
        task.num_outputs = num_outputs;
        task.out = y + chunk.first_row * y_stride + first_output;
        task.out_stride = y_stride;
        kernels_.dense.add_linear(task, from, to);
    }
}
