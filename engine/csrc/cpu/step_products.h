// The products of a step with the matrices of a layer, cut into pieces for the threads.

#pragma once

#include "step_state.h"

enum class Output { kStore, kAdd, kGate };

// Multiplies the operand x by a matrix, and adds the updates of adapters, in phases `phase` to `phase` + 2.
void multiply(const Step& step, int half, int phase, Output output, const rl_linear& linear,
              const UpdatedMatrix& updated, const void* x, float* out);

// residual += residual_scale * update, or residual_scale * RMSNorm(update) if `output_norm` is not null.
void add_update(const Step& step, Phase phase, const float* output_norm);

// Adds the product to the residual stream, or stores it for a sum over ranks. Uses phases `phase` to `phase` + 3.
void multiply_into_residual(const Step& step, int half, int phase, const rl_linear& linear,
                            const UpdatedMatrix& updated, const float* output_norm, const void* x);
