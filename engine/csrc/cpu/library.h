// The state of the library: the chosen instruction set, the thread pool and the buffers of a step.

#pragma once

#include "arena.h"
#include "kernels.h"
#include "threads.h"

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of an element of dense weights.
inline int64_t element_bytes(const rl_model& model) { return model.dtype == RL_BFLOAT16 ? 2 : 4; }

const Kernels& chosen_kernels(int dtype);
ThreadPool& thread_pool();
Arena& step_arena();

// The seconds of each phase, summed over all steps, or null: see rl_profile.
extern double* phase_seconds;

// Returns whether products with this matrix read rows that quantise_row has written.
bool is_quantised(const rl_linear& linear);
// Returns the number of outputs of the matrix, including those in other forms.
int64_t all_outputs(const rl_linear& linear);
// Returns the kernels for the form of this matrix: dense, int8 or grouped.
const LinearKernels& linear_kernels(const Kernels& kernels, const rl_linear& linear);

// Returns the task to multiply `num_rows` rows of x by the matrix and to store the outputs. If the matrix is quantised,
// x has rows that quantise_row has written. Otherwise x has the operand type. Outputs in other forms (`more`) are left
// out.
LinearTask linear_task(const rl_linear& linear, const void* x, int64_t num_rows, float* out);

// Returns the number of blocks of 16 outputs in a piece, which one thread computes. `num_blocks`: of the whole product.
int64_t blocks_per_piece(int64_t num_blocks, int num_threads);
