// The rows of a step whose results the caller needs. For other rows, the last layer computes only keys and values.

#pragma once

#include "arena.h"
#include "rayloom_cpu.h"

// Returns a batch of the wanted rows alone. Each row is a sequence of one token. The batch has a residual stream of
// its own, which is not filled yet. It needs no rotary tables and no slots: the keys and values of these rows are
// already in the cache, written for the whole batch.
rl_batch batch_of_wanted_rows(const rl_model& model, const rl_batch& batch, Arena& arena);

// Copies the residual stream of the wanted rows back into the residual stream of the whole step.
void return_wanted_rows(const rl_model& model, const rl_batch& wanted, const rl_batch& batch);
