// The C interface of Rayloom's CPU library: a decoder's forward pass, and the choice of the next tokens.
//
// All pointers are borrowed: the caller keeps the memory alive. No function raises; the functions that can fail return
// 0 for success. One process uses one library with one thread pool, and calls it from one thread at a time.
//
// Legend: T tokens of the step, S sequences, D model width, H query heads, K key/value heads, d head size, I width of
// the MLP, V rows of the head, N rows of a weight matrix.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Type of the weights and of the KV cache.
enum { RL_FLOAT32 = 0, RL_BFLOAT16 = 1 };

// The output of a gated MLP before its last product:
//
//   RL_SILU            up * silu(gate), silu(x) = x / (1 + exp(-x))
//   RL_GELU_TANH       up * gelu(gate), gelu(x) = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
//   RL_CLAMPED_SILU    (u + 1) * g / (1 + exp(-slope * g)), g = min(gate, limit), u = up clamped to [-limit, limit]
enum { RL_SILU = 0, RL_GELU_TANH = 1, RL_CLAMPED_SILU = 2 };

typedef struct {
    int32_t kind;  // RL_SILU, RL_GELU_TANH or RL_CLAMPED_SILU
    float slope;   // this and `limit`: only of RL_CLAMPED_SILU
    float limit;
} rl_activation;

// The numbers that the bits of a grouped weight stand for: an unsigned integer, or a float of 4 bits (e2m1).
enum { RL_INTEGERS = 0, RL_FLOATS = 1 };

// The form of grouped weights: in each row of W, every `size` neighbouring inputs share a scale (formula: grouped.h).
typedef struct {
    int32_t bits;         // 4, 6 or 8; 0: the matrix is not grouped
    int32_t size;         // 32, 64 or 128; 16 with 6 bits, which have no offsets
    int32_t zero;         // the integer that stands for the weight 0, before an offset is added; 32 with 6 bits
    int32_t has_offsets;  // 0 or 1
    int32_t numbers;      // RL_INTEGERS, or with 4 bits RL_FLOATS, whose `zero` is 12 (grouped_layout.h)
} rl_groups;

// y = x W^T + bias. If W is grouped, it is packed by rl_pack_grouped_weight. Otherwise it is packed by
// rl_pack_int8_weight if there are scales, and by rl_pack_weight if there are none.
typedef struct rl_linear {
    const void* weight;
    const float* scales;  // [num_outputs] scales of int8 weights, or factors of grouped weights; NULL: there are none
    const float* bias;  // [num_outputs], or NULL
    int32_t num_outputs;  // a multiple of 16 if `more` is not NULL
    int32_t num_inputs;
    rl_groups groups;
    const struct rl_linear* more;  // the outputs behind these, grouped in another form, or NULL; only in qkv of a layer
} rl_linear;

// A mixture of experts: for each token, a router selects the gated MLPs with the highest probabilities of a softmax.
// All matrices of `gate_up` have the same size, and all matrices of `down` have the same size. Only the shared expert,
// the last in both lists, may have other sizes.
typedef struct {
    rl_linear router;          // rows: one for each expert, then one for the shared expert's gate; not quantised
    const rl_linear* gate_up;  // [num_experts + num_shared]
    const rl_linear* down;     // [num_experts + num_shared]
    int32_t num_experts;
    int32_t num_per_token;  // experts of a token, without the shared one
    int32_t num_shared;     // 0, or 1: an expert of all tokens, whose weight is sigmoid(the router's last output)
    int32_t normalises;     // 1: the weights of a token's experts are divided by their sum
} rl_experts;

typedef struct {
    const float* attention_norm;         // [D], or NULL: the attention reads the residual stream as it is
    const float* attention_output_norm;  // [D], or NULL; norm of the attention's output before the residual addition
    const float* mlp_norm;               // [D], or NULL
    const float* mlp_output_norm;        // [D], or NULL
    const float* q_norm;                 // [d], or [H * d] with has_wide_norms, or NULL: no norm
    const float* k_norm;                 // [d], or [K * d] with has_wide_norms, or NULL
    const float* sinks;                  // [H] one more score of each query head, without a value, or NULL
    rl_linear qkv;                // rows: H * d of q, then K * d of k, then K * d of v
    rl_linear out;
    rl_linear gate_up;  // rows: I of gate, then I of up; unused with experts
    rl_linear down;
    const rl_experts* experts;  // NULL: one MLP for all tokens
    int32_t window;  // positions that a token sees, itself included; 0: all
} rl_layer;

// A low-rank update of outputs of a matrix: y += scale * B (A x), with B [num_outputs][rank] packed by rl_pack_weight.
// rank: a multiple of 16, at most 256; 0: no update. num_outputs: a multiple of 16.
typedef struct {
    const void* b;
    float scale;
    int32_t rank;
} rl_update;

// The updates of a matrix that stacks up to 3 matrices of the checkpoint, such as q, k and v: one update for each of
// these parts. Each part multiplies the same x by its own A. The A of all parts are stacked into one matrix
// [sum of the ranks][num_inputs], packed by rl_pack_weight. Pack the B of the parts right behind this matrix, because
// steps prefetch A and B as one stream. `a` NULL: no update.
typedef struct {
    const void* a;
    rl_update parts[3];
} rl_matrix_update;

// The updates of an adapter in one layer.
typedef struct {
    rl_matrix_update qkv;
    rl_matrix_update out;
    rl_matrix_update gate_up;
    rl_matrix_update down;
} rl_adapter_layer;

typedef struct {
    int32_t dtype;
    int32_t num_layers;
    int32_t width;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t rotary_dim;  // R: the number of elements that are rotated at the start of each head; even
    int32_t intermediate;
    rl_activation activation;
    int32_t has_wide_norms;  // 1: q_norm and k_norm normalise all heads together; 0: each head alone
    float rms_norm_eps;
    float residual_scale;  // factor of the outputs of attention and MLP before they are added to the residual stream
    float score_scale;     // factor of the products of queries and keys, > 0
    float score_cap;       // a score s becomes score_cap * tanh(s / score_cap); 0: it stays s
    const rl_layer* layers;
} rl_model;

// The tokens of a step: first all tokens of sequence 0, then those of sequence 1, and so on.
typedef struct {
    int32_t num_tokens;
    int32_t num_sequences;
    const int64_t* query_lens;      // [S] tokens computed in this step, each >= 1
    const int64_t* context_lens;    // [S] tokens in the cache after this step
    const int64_t* block_tables;    // [S][table_width]
    int32_t table_width;
    const int64_t* slot_mapping;    // [T] block id * 16 + offset in the block
    const float* cosines;           // [T][R / 2]
    const float* sines;             // [T][R / 2]
    const float* window_cosines;    // [T][R / 2] for layers with a window
    const float* window_sines;      // [T][R / 2]
    void* const* pages;             // [num_layers] the KV cache of each layer, in the layout of kv_layout.h
    float* residual;                // [T][D] the residual stream, which is updated in place
    const int64_t* wanted_rows;     // [num_wanted] ascending indices of the tokens that the caller needs; NULL: all
    int32_t num_wanted;
    const rl_adapter_layer* const* adapters;  // the layers [num_layers] of each adapter; NULL: there is no adapter
    const int32_t* adapter_of_token;          // [T] index into `adapters`, or -1; ignored if `adapters` is NULL
} rl_batch;

// Starts the thread pool with `num_threads` threads, the caller's included, or changes their number. With `pin`, the
// i-th thread is bound to the i-th CPU that this process may use. The caller's thread is never bound.
int rl_start_threads(int32_t num_threads, int32_t pin);

// Names of instruction sets that this CPU can run, best first, separated by spaces.
const char* rl_instruction_sets(void);

// Chooses the instruction set for all later calls. Returns 1 if this set is unknown or the CPU lacks it.
int rl_choose(const char* instruction_set);

// Bytes of one element of `x` in rl_multiply and rl_normalise: 2 if products read bfloat16, else 4 (float32).
int32_t rl_operand_bytes(int32_t dtype);

// Elements of a packed weight matrix, the padding of N to a multiple of 16 included.
int64_t rl_packed_elements(int64_t num_outputs, int64_t num_inputs);

// Packs W [num_outputs][num_inputs] for products; num_inputs must be even.
void rl_pack_weight(int32_t dtype, const void* weight, void* packed, int64_t num_outputs, int64_t num_inputs);

// Quantises each row of W to int8 with one scale, and packs W; num_inputs must be a multiple of 32. `packed` has
// rl_packed_elements bytes. `dtype`: the type of W.
void rl_pack_int8_weight(int32_t dtype, const void* weight, void* packed, float* scales, int64_t num_outputs,
                         int64_t num_inputs);

// Bytes of a packed grouped matrix, the padding of N to a multiple of 16 included.
int64_t rl_grouped_bytes(const rl_groups* groups, int64_t num_outputs, int64_t num_inputs);

// Packs a grouped matrix. `weights` [num_outputs][num_inputs]: integers of a byte each, below 2^bits. `scales` and
// `offsets` [num_outputs][num_inputs / size]: float16; `offsets` is NULL if has_offsets is 0. num_inputs must be a
// multiple of `size`.
void rl_pack_grouped_weight(const rl_groups* groups, const void* weights, const void* scales, const void* offsets,
                            void* packed, int64_t num_outputs, int64_t num_inputs);

// out [num_ids][num_inputs] = the rows `ids` of a packed matrix; zeros for a negative id.
void rl_embed(int32_t dtype, const rl_linear* matrix, const int64_t* ids, int32_t num_ids, float* out);

// out [rows][num_outputs] = x [rows][num_inputs] W^T + bias.
int rl_multiply(int32_t dtype, const rl_linear* linear, const void* x, int32_t rows, float* out);

// x [rows][width] = RMSNorm(residual), or the residual itself if `weight` is NULL, in the operand type of products.
void rl_normalise(int32_t dtype, const float* residual, const float* weight, float eps, int32_t rows, int32_t width,
                  void* x);

// Runs half layers [first_half, end_half) of the model. Half layer 2 i is the attention of layer i, 2 i + 1 its MLP.
// After a call that computes the whole last layer, the residual stream of rows that are not wanted is undefined.
// `partial` NULL: this process computes the whole output of each half layer. Otherwise `partial` [T][D] receives the
// output of the last half layer. This output is not added to the residual stream, because the caller first adds the
// outputs of the other ranks to it. `progress` grows by one with every half layer.
int rl_forward(const rl_model* model, const rl_batch* batch, int32_t first_half, int32_t end_half, float* partial,
               volatile int64_t* progress);

// Bytes of the buffers that the last rl_forward used. The memory is kept for the next call.
int64_t rl_buffer_bytes(void);

// Phases of a step that rl_profile measures, in the order in which a layer runs them. The phase of a product includes
// quantising x.
enum {
    RL_PHASE_NORM,  // the norms of the inputs of attention and MLP
    RL_PHASE_QKV,
    RL_PHASE_ROTARY,  // norms and rotation of queries and keys, write into the KV cache
    RL_PHASE_ATTENTION,
    RL_PHASE_OUT,
    RL_PHASE_GATE_UP,
    RL_PHASE_DOWN,
    RL_NUM_PHASES,
};

// After this call, every rl_forward adds the seconds of each phase to seconds [RL_NUM_PHASES]. The seconds are those of
// the thread that calls rl_forward, and include its waits for other threads. `seconds` NULL: nothing is measured.
void rl_profile(double* seconds);

// residual [rows][width] += scale * update [rows][width], or scale * RMSNorm(update) if `weight` is not NULL.
void rl_add(float* residual, const float* update, const float* weight, float eps, float scale, int32_t rows,
            int32_t width);

// How the next token of a sequence is chosen. Temperature is applied after bias and penalties, top_p after top_k and
// min_p.
typedef struct {
    uint64_t seed;
    const int64_t* token_ids;  // [num_tokens] the prompt, then the generated tokens; read if there is a penalty
    int64_t num_prompt_tokens;
    int64_t num_tokens;         // also the position of the chosen token
    const int32_t* allowed;     // [ceil(V / 32)] bit i of word w: token 32 w + i can be chosen; NULL: all tokens can
    const int64_t* banned_ids;  // [num_banned] tokens that cannot be chosen
    const int64_t* bias_ids;    // [num_biases]
    const float* biases;        // [num_biases]
    int64_t num_banned;
    int64_t num_biases;
    int64_t top_k;             // 0: off
    double top_p;              // 1: off
    double min_p;              // 0: off
    float temperature;         // 0: greedy
    float repetition_penalty;  // 1: off
    float presence_penalty;    // 0: off
    float frequency_penalty;   // 0: off
} rl_sampling;

// For N rows of logits: the log-probability and the rank (from 1) of each row's token in `token_ids`, and the
// log-probabilities of the row's most likely tokens.
typedef struct {
    const int64_t* token_ids;  // [N]
    const int64_t* num_top;    // [N] number of most likely tokens for each row, at most top_stride and V
    int64_t top_stride;
    float* logprobs;      // [N]
    int64_t* ranks;       // [N]
    int64_t* top_ids;     // [N][top_stride]
    float* top_logprobs;  // [N][top_stride]
} rl_logprobs;

// token_ids [rows] = the next token of each row of logits [rows][V], or -1 if the row has a NaN or its highest logit is
// infinite. Returns 0, or 1 if there is no memory.
int rl_sample(const float* logits, const rl_sampling* sampling, int32_t rows, int32_t vocab_size, int64_t* token_ids);

// Writes the log-probabilities of logits [rows][V]. Writes nothing for a row for which rl_sample returns -1. Returns 0,
// or 1 if there is no memory.
int rl_describe(const float* logits, int32_t rows, int32_t vocab_size, const rl_logprobs* out);

#ifdef __cplusplus
}
#endif
