// Step: one step's forward pass through some half layers, run by all threads of the pool together.

#pragma once

#include <stdint.h>

#include "rayloom_cpu.h"

// Returns 0, or ENOMEM if there is no memory for the buffers of the step.
int run_step(const rl_model& model, const rl_batch& batch, int first_half, int end_half, float* partial,
             volatile int64_t* progress);
