#include "library.h"

#include <cpuid.h>
#include <errno.h>
#include <string.h>

#include "grouped_layout.h"
#include "rayloom_cpu.h"
#include "sampler.h"
#include "step.h"

#define RL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct InstructionSet {
    const char* name;
    bool (*is_supported)();
    const Kernels* float32;
    const Kernels* bfloat16;
    const SamplerPasses* sampler;
};

// Returns whether the CPU has instructions that convert float16. The function reads CPUID, because not every compiler's
// __builtin_cpu_supports knows the name "f16c".
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// The instruction sets, best first.
const InstructionSet kInstructionSets[] = {
    {"avx512", has_avx512, &kAvx512Float32, &kAvx512BFloat16, &kAvx512Sampler},
    {"avx2", has_avx2, &kAvx2Float32, &kAvx2BFloat16, &kAvx2Sampler},
};

const InstructionSet* chosen = nullptr;

// Calls piece(index) once for each index below `num_pieces`. The threads share the calls.
template <class Piece>
void run_pieces(int64_t num_pieces, Piece piece) {
    struct Context {
        Piece* piece;
        int64_t num_pieces;
        std::atomic<int64_t> next;
    } context = {&piece, num_pieces, {0}};
    thread_pool().run(
        [](void* pointer, int) {
            Context& shared = *static_cast<Context*>(pointer);
            for (int64_t index; (index = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.num_pieces;) {
                (*shared.piece)(index);
            }
        },
        &context);
}

// Calls work(row) for all rows. If there are many rows, the threads share the calls.
template <class Work>
void for_rows(int64_t num_rows, Work work) {
    constexpr int64_t rows_per_piece = 32;
    const auto piece = [&](int64_t index) {
        const int64_t end = (index + 1) * rows_per_piece;
        for (int64_t row = index * rows_per_piece; row < end && row < num_rows; row++) {
            work(row);
        }
    };
    if (num_rows <= rows_per_piece) {
        piece(0);
    } else {
        run_pieces(ceil_div(num_rows, rows_per_piece), piece);
    }
}

// Returns the quantised rows of x.
const void* quantise_rows(const Kernels& kernels, const rl_linear& linear, const void* x, int64_t rows, Arena& arena) {
    const int64_t size = kernels.quantised_row_bytes(linear.num_inputs);
    char* quantised = arena.take<char>(rows * size);
    for_rows(rows, [&](int64_t row) {
        const char* from = (const char*)x + row * linear.num_inputs * kernels.operand_bytes;
        kernels.quantise_row(from, linear.num_inputs, quantised + row * size);
    });
    return quantised;
}

// Calls work(row, buffers) for all rows of logits. The threads share the calls. Returns 0, or 1 if there is no memory.
template <class Work>
int run_rows(int64_t num_rows, int64_t vocab_size, Work work) {
    const int64_t num_workers = num_rows < thread_pool().size() ? num_rows : thread_pool().size();
    const int64_t bytes = RowBuffers::bytes(vocab_size);
    Arena& arena = step_arena();
    char* memory;
    try {
        arena.clear();
        memory = arena.take<char>(num_workers * bytes);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    std::atomic<int64_t> next{0};
    run_pieces(num_workers, [&](int64_t worker) {
        const RowBuffers buffers = RowBuffers::at(memory + worker * bytes, vocab_size);
        for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < num_rows;) {
            work(row, buffers);
        }
    });
    return 0;
}

}  // namespace

double* phase_seconds = nullptr;

const Kernels& chosen_kernels(int dtype) {
    return dtype == RL_BFLOAT16 ? *chosen->bfloat16 : *chosen->float32;
}

ThreadPool& thread_pool() {
    static ThreadPool pool;
    return pool;
}

Arena& step_arena() {
    static Arena arena;
    return arena;
}

bool is_quantised(const rl_linear& linear) { return linear.scales != nullptr || linear.groups.bits != 0; }

int64_t all_outputs(const rl_linear& linear) {
    return linear.num_outputs + (linear.more == nullptr ? 0 : all_outputs(*linear.more));
}

const LinearKernels& linear_kernels(const Kernels& kernels, const rl_linear& linear) {
    switch (linear.groups.bits) {
        case 4:
            return linear.groups.numbers == RL_FLOATS ? kernels.grouped4_floats : kernels.grouped4;
        case 6:
            return kernels.grouped6;
        case 8:
            return kernels.grouped8;
    }
    return linear.scales != nullptr ? kernels.int8 : kernels.dense;
}

LinearTask linear_task(const rl_linear& linear, const void* x, int64_t num_rows, float* out) {
    return {
        x,
        num_rows,
        linear.weight,
        nullptr,
        linear.scales,
        linear.bias,
        linear.num_inputs,
        linear.num_outputs,
        out,
        all_outputs(linear),
        nullptr,
        {RL_SILU, 0.0f, 0.0f},
        linear.groups,
        nullptr,
        nullptr,
    };
}

int64_t blocks_per_piece(int64_t num_blocks, int num_threads) {
    if (num_threads == 1) {
        return num_blocks;
    }
    const int64_t pieces_per_thread = num_blocks < 128 ? 3 : 8;
    const int64_t size = ceil_div(num_blocks, pieces_per_thread * num_threads);
    return (size + 1) / 2 * 2;
}

RL_EXPORT int rl_start_threads(int32_t num_threads, int32_t pin) {
    return thread_pool().resize(num_threads, pin != 0);
}

RL_EXPORT const char* rl_instruction_sets() {
    static char names[64];
    names[0] = 0;
    for (const InstructionSet& set : kInstructionSets) {
        if (set.is_supported()) {
            if (names[0] != 0) {
                strcat(names, " ");
            }
            strcat(names, set.name);
        }
    }
    return names;
}

RL_EXPORT int rl_choose(const char* instruction_set) {
    for (const InstructionSet& set : kInstructionSets) {
        if (strcmp(set.name, instruction_set) == 0 && set.is_supported()) {
            chosen = &set;
            return 0;
        }
    }
    return 1;
}

RL_EXPORT int32_t rl_operand_bytes(int32_t dtype) { return chosen_kernels(dtype).operand_bytes; }

RL_EXPORT int64_t rl_packed_elements(int64_t num_outputs, int64_t num_inputs) {
    return ceil_div(num_outputs, 16) * 16 * num_inputs;
}

RL_EXPORT void rl_pack_weight(int32_t dtype, const void* weight, void* packed, int64_t num_outputs,
                              int64_t num_inputs) {
    chosen_kernels(dtype).pack_weight(weight, packed, num_outputs, num_inputs);
}

RL_EXPORT void rl_pack_int8_weight(int32_t dtype, const void* weight, void* packed, float* scales,
                                   int64_t num_outputs, int64_t num_inputs) {
    const Kernels& kernels = chosen_kernels(dtype);
    run_pieces(ceil_div(num_outputs, 16), [&](int64_t block) {
        kernels.pack_int8_block(weight, packed, scales, num_outputs, num_inputs, block);
    });
}

RL_EXPORT int64_t rl_grouped_bytes(const rl_groups* groups, int64_t num_outputs, int64_t num_inputs) {
    return ceil_div(num_outputs, 16) * grouped_layout(*groups, num_inputs).block_bytes();
}

RL_EXPORT void rl_pack_grouped_weight(const rl_groups* groups, const void* weights, const void* scales,
                                      const void* offsets, void* packed, int64_t num_outputs, int64_t num_inputs) {
    const GroupedLayout layout = grouped_layout(*groups, num_inputs);
    run_pieces(ceil_div(num_outputs, 16), [&](int64_t block) {
        pack_grouped_block(layout, (const uint8_t*)weights, (const uint16_t*)scales, (const uint16_t*)offsets, packed,
                           num_outputs, block);
    });
}

RL_EXPORT void rl_embed(int32_t dtype, const rl_linear* matrix, const int64_t* ids, int32_t num_ids, float* out) {
    const Kernels& kernels = chosen_kernels(dtype);
    const int64_t width = matrix->num_inputs;
    for_rows(num_ids, [&](int64_t i) {
        if (ids[i] < 0) {
            memset(out + i * width, 0, (size_t)width * sizeof(float));
        } else if (matrix->groups.bits != 0) {
            embed_grouped(*matrix, ids[i], out + i * width);
        } else if (matrix->scales != nullptr) {
            kernels.embed_int8(matrix->weight, matrix->scales, width, ids[i], out + i * width);
        } else {
            kernels.embed(matrix->weight, width, ids[i], out + i * width);
        }
    });
}

RL_EXPORT int rl_multiply(int32_t dtype, const rl_linear* linear, const void* x, int32_t rows, float* out) {
    const Kernels& kernels = chosen_kernels(dtype);
    LinearTask task = linear_task(*linear, x, rows, out);
    if (is_quantised(*linear)) {
        try {
            step_arena().clear();
            task.x = quantise_rows(kernels, *linear, x, rows, step_arena());
        } catch (const std::bad_alloc&) {
            return ENOMEM;
        }
    }
    const int64_t num_blocks = ceil_div(linear->num_outputs, 16);
    const int64_t size = blocks_per_piece(num_blocks, thread_pool().size());
    run_pieces(ceil_div(num_blocks, size), [&](int64_t piece) {
        const int64_t end = (piece + 1) * size;
        linear_kernels(kernels, *linear).linear(task, piece * size, end < num_blocks ? end : num_blocks);
    });
    return 0;
}

RL_EXPORT void rl_normalise(int32_t dtype, const float* residual, const float* weight, float eps, int32_t rows,
                            int32_t width, void* x) {
    const Kernels& kernels = chosen_kernels(dtype);
    for_rows(rows, [&](int64_t row) {
        kernels.rms_norm(residual + row * width, weight, eps, width, (char*)x + row * width * kernels.operand_bytes);
    });
}

RL_EXPORT int rl_forward(const rl_model* model, const rl_batch* batch, int32_t first_half, int32_t end_half,
                         float* partial, volatile int64_t* progress) {
    return run_step(*model, *batch, first_half, end_half, partial, progress);
}

RL_EXPORT int64_t rl_buffer_bytes() { return step_arena().needed(); }

RL_EXPORT void rl_profile(double* seconds) { phase_seconds = seconds; }

RL_EXPORT void rl_add(float* residual, const float* update, const float* weight, float eps, float scale, int32_t rows,
                      int32_t width) {
    const Kernels& kernels = chosen_kernels(RL_FLOAT32);
    for_rows(rows, [&](int64_t row) {
        kernels.add_row(update + row * width, weight, eps, scale, width, residual + row * width);
    });
}

RL_EXPORT int rl_sample(const float* logits, const rl_sampling* sampling, int32_t rows, int32_t vocab_size,
                        int64_t* token_ids) {
    return run_rows(rows, vocab_size, [&](int64_t row, const RowBuffers& buffers) {
        token_ids[row] = sample_row(*chosen->sampler, logits + row * vocab_size, vocab_size, sampling[row], buffers);
    });
}

RL_EXPORT int rl_describe(const float* logits, int32_t rows, int32_t vocab_size, const rl_logprobs* out) {
    return run_rows(rows, vocab_size, [&](int64_t row, const RowBuffers& buffers) {
        describe_row(*chosen->sampler, logits + row * vocab_size, vocab_size, *out, row, buffers);
    });
}
