#include "wanted_rows.h"

#include <string.h>

rl_batch batch_of_wanted_rows(const rl_model& model, const rl_batch& batch, Arena& arena) {
    const int64_t num_rows = batch.num_wanted;
    int64_t* query_lens = arena.take<int64_t>(num_rows);
    int64_t* context_lens = arena.take<int64_t>(num_rows);
    int64_t* block_tables = arena.take<int64_t>(num_rows * batch.table_width);
    int32_t* adapters = batch.adapters == nullptr ? nullptr : arena.take<int32_t>(num_rows);
    int64_t sequence = 0;
    int64_t end = batch.query_lens[0];  // row after the last token of the sequence
    for (int64_t index = 0; index < num_rows; index++) {
        const int64_t row = batch.wanted_rows[index];
        while (row >= end) {
            end += batch.query_lens[++sequence];
        }
        if (adapters != nullptr) {
            adapters[index] = batch.adapter_of_token[row];
        }
        query_lens[index] = 1;
        context_lens[index] = batch.context_lens[sequence] - (end - row - 1);
        memcpy(block_tables + index * batch.table_width, batch.block_tables + sequence * batch.table_width,
               (size_t)batch.table_width * sizeof(int64_t));
    }
    rl_batch wanted = {};
    wanted.num_tokens = (int32_t)num_rows;
    wanted.num_sequences = (int32_t)num_rows;
    wanted.query_lens = query_lens;
    wanted.context_lens = context_lens;
    wanted.block_tables = block_tables;
    wanted.table_width = batch.table_width;
    wanted.pages = batch.pages;
    wanted.adapters = batch.adapters;
    wanted.adapter_of_token = adapters;
    wanted.residual = arena.take<float>(num_rows * model.width);
    return wanted;
}

void return_wanted_rows(const rl_model& model, const rl_batch& wanted, const rl_batch& batch) {
    for (int64_t index = 0; index < wanted.num_tokens; index++) {
        memcpy(batch.residual + batch.wanted_rows[index] * model.width, wanted.residual + index * model.width,
               (size_t)model.width * sizeof(float));
    }
}
