// Runs steps of a small decoder with random weights on the C library, for a count of their instructions.
//
//   steps LIBRARY INSTRUCTION_SET WORKLOAD COUNT
//
// WORKLOAD: "decode" computes one token of each of 8 sequences, after 300 earlier tokens. "prefill" computes a prompt
// of 96 tokens. Weights are bfloat16. With the suffix "-int8" they are int8, with "-q8" and "-q4" grouped as in GGUF's
// Q8_0 and Q4_K. One thread computes. COUNT: the number of equal steps.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "rayloom_cpu.h"

namespace {

constexpr int kLayers = 2, kWidth = 192, kHeads = 6, kKvHeads = 2, kHeadDim = 32, kIntermediate = 384;
constexpr int kBlock = 16;

struct Library {
    decltype(&rl_start_threads) start_threads;
    decltype(&rl_choose) choose;
    decltype(&rl_pack_weight) pack_weight;
    decltype(&rl_pack_int8_weight) pack_int8_weight;
    decltype(&rl_grouped_bytes) grouped_bytes;
    decltype(&rl_pack_grouped_weight) pack_grouped_weight;
    decltype(&rl_forward) forward;
};

template <class Function>
void find(void* handle, const char* name, Function& function) {
    function = (Function)dlsym(handle, name);
    if (function == nullptr) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
}

// Numbers of a fixed sequence, from -1 to 1.
float next_number() {
    static uint32_t state = 1;
    state = state * 1664525 + 1013904223;
    return (float)(state >> 8) / (1 << 23) - 1.0f;
}

uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)(bits >> 16);
}

enum class Form { kBFloat16, kInt8, kQ8, kQ4 };

rl_linear make_grouped(const Library& library, int num_outputs, int num_inputs, const rl_groups& groups) {
    std::vector<uint8_t> integers((size_t)num_outputs * num_inputs);
    for (uint8_t& integer : integers) {
        integer = (uint8_t)((next_number() + 1.0f) * 0.49f * (float)(1 << groups.bits));
    }
    const std::vector<uint16_t> scales(integers.size() / groups.size, 0x1400);  // 2^-10
    void* packed = aligned_alloc(64, (size_t)library.grouped_bytes(&groups, num_outputs, num_inputs));
    library.pack_grouped_weight(&groups, integers.data(), scales.data(), groups.has_offsets ? scales.data() : nullptr,
                                packed, num_outputs, num_inputs);
    return {packed, nullptr, nullptr, num_outputs, num_inputs, groups, nullptr};
}

// A packed matrix with random weights, which is never freed.
rl_linear make_linear(const Library& library, int num_outputs, int num_inputs, Form form) {
    if (form == Form::kQ8 || form == Form::kQ4) {
        const rl_groups groups = form == Form::kQ8 ? rl_groups{8, 32, 128, 0, RL_INTEGERS}
                                                   : rl_groups{4, 32, 0, 1, RL_INTEGERS};
        return make_grouped(library, num_outputs, num_inputs, groups);
    }
    std::vector<uint16_t> plain((size_t)num_outputs * num_inputs);
    for (uint16_t& weight : plain) {
        weight = to_bfloat16(next_number() * 0.1f);
    }
    void* packed = aligned_alloc(64, plain.size() * 2);
    if (form == Form::kBFloat16) {
        library.pack_weight(RL_BFLOAT16, plain.data(), packed, num_outputs, num_inputs);
        return {packed, nullptr, nullptr, num_outputs, num_inputs, {}, nullptr};
    }
    float* scales = (float*)malloc((size_t)num_outputs * sizeof(float));
    library.pack_int8_weight(RL_BFLOAT16, plain.data(), packed, scales, num_outputs, num_inputs);
    return {packed, scales, nullptr, num_outputs, num_inputs, {}, nullptr};
}

Form form_of(const char* workload) {
    const char* ending = strchr(workload, '-');
    if (ending == nullptr) {
        return Form::kBFloat16;
    }
    return strcmp(ending, "-int8") == 0 ? Form::kInt8 : strcmp(ending, "-q8") == 0 ? Form::kQ8 : Form::kQ4;
}

// Computes the last `num_tokens` of each of `num_sequences` contexts `count` times. Returns 0 for success.
int run(const Library& library, Form form, int num_sequences, int num_tokens, int context, int count) {
    const std::vector<float> norm(kWidth, 1.0f);
    std::vector<rl_layer> layers(kLayers);
    for (rl_layer& layer : layers) {
        layer = {};
        layer.attention_norm = layer.mlp_norm = norm.data();
        layer.qkv = make_linear(library, (kHeads + 2 * kKvHeads) * kHeadDim, kWidth, form);
        layer.out = make_linear(library, kWidth, kHeads * kHeadDim, form);
        layer.gate_up = make_linear(library, 2 * kIntermediate, kWidth, form);
        layer.down = make_linear(library, kWidth, kIntermediate, form);
    }
    rl_model model = {};
    model.dtype = RL_BFLOAT16;
    model.num_layers = kLayers;
    model.width = kWidth;
    model.num_heads = kHeads;
    model.num_kv_heads = kKvHeads;
    model.head_dim = model.rotary_dim = kHeadDim;
    model.intermediate = kIntermediate;
    model.activation.kind = RL_SILU;
    model.rms_norm_eps = 1e-5f;
    model.residual_scale = 1.0f;
    model.score_scale = 0.17677670f;  // 1 / sqrt(kHeadDim)
    model.layers = layers.data();
    const int blocks = (context + kBlock - 1) / kBlock;
    const int total = num_sequences * num_tokens;
    std::vector<int64_t> query_lens(num_sequences, num_tokens), context_lens(num_sequences, context), tables, slots;
    for (int i = 0; i < num_sequences * blocks; i++) {
        tables.push_back(i);
    }
    for (int sequence = 0; sequence < num_sequences; sequence++) {
        for (int position = context - num_tokens; position < context; position++) {
            slots.push_back(sequence * blocks * kBlock + position);
        }
    }
    const std::vector<float> cosines((size_t)total * kHeadDim / 2, 0.8f), sines((size_t)total * kHeadDim / 2, 0.6f);
    std::vector<std::vector<uint16_t>> pages(kLayers, std::vector<uint16_t>(
                                                          (size_t)num_sequences * blocks * kBlock * 2 * kKvHeads * kHeadDim));
    std::vector<void*> addresses;
    for (std::vector<uint16_t>& page : pages) {
        addresses.push_back(page.data());
    }
    std::vector<float> residual((size_t)total * kWidth);
    const rl_batch batch = {total, num_sequences, query_lens.data(), context_lens.data(), tables.data(), blocks,
                            slots.data(), cosines.data(), sines.data(), cosines.data(), sines.data(),
                            addresses.data(), residual.data(), nullptr, 0, nullptr, nullptr};
    volatile int64_t progress = 0;
    for (int step = 0; step < count; step++) {
        for (float& value : residual) {
            value = next_number();
        }
        if (library.forward(&model, &batch, 0, 2 * kLayers, nullptr, &progress) != 0) {
            return 1;
        }
    }
    return progress == (int64_t)count * 2 * kLayers ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: steps LIBRARY INSTRUCTION_SET WORKLOAD COUNT\n");
        return 2;
    }
    void* handle = dlopen(argv[1], RTLD_NOW);
    if (handle == nullptr) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    Library library;
    find(handle, "rl_start_threads", library.start_threads);
    find(handle, "rl_choose", library.choose);
    find(handle, "rl_pack_weight", library.pack_weight);
    find(handle, "rl_pack_int8_weight", library.pack_int8_weight);
    find(handle, "rl_grouped_bytes", library.grouped_bytes);
    find(handle, "rl_pack_grouped_weight", library.pack_grouped_weight);
    find(handle, "rl_forward", library.forward);
    if (library.choose(argv[2]) != 0 || library.start_threads(1, 0) != 0) {
        fprintf(stderr, "this CPU cannot run %s\n", argv[2]);
        return 1;
    }
    const Form form = form_of(argv[3]);
    const bool is_decode = strncmp(argv[3], "decode", 6) == 0;
    return is_decode ? run(library, form, 8, 1, 301, atoi(argv[4])) : run(library, form, 1, 96, 96, atoi(argv[4]));
}
