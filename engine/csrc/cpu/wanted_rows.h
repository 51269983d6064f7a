// The rows of a step that its caller wants. In the last layer, only keys and values are computed for the other rows.

#pragma once

#include "arena.h"
#include "rayloom_cpu.h"

// Returns a batch of the wanted rows alone. Each row is a sequence of one token. The batch has a residual stream of
// its own, which is not filled yet. It has neither rotary tables nor slots: its keys and values are in the cache
// already.
rl_batch batch_of_wanted_rows(const rl_model& model, const rl_batch& batch, Arena& arena);

// Copies the residual stream of the wanted rows back into that of the whole step.
void return_wanted_rows(const rl_model& model, const rl_batch& wanted, const rl_batch& batch);
