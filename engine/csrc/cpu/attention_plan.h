// AttentionPlan: how a step's attention is cut into pieces for threads. All layers of a step use the same plan.
//
// A tile is some query tokens of one sequence with one key/value head. A tile with a long context is cut further, into
// runs of segments of the context, if there are too few tiles for the threads. The results do not depend on the cut.

#pragma once

#include "arena.h"
#include "kernels.h"
#include "rayloom_cpu.h"

struct AttentionTile {
    int64_t first_token;     // row in T
    int64_t num_tokens;
    int64_t first_position;  // position of the first token
    int64_t kv_head;
    const int64_t* block_table;
    int64_t num_segments;
    int64_t first_result;  // the row of `values` where the results of the first segment begin, if the tile is cut
};

// Segments [first_segment, end_segment) of a tile that is cut, or a whole tile, whose end_segment is -1.
struct AttentionPiece {
    int64_t tile;
    int64_t first_segment;
    int64_t end_segment;
};

struct AttentionPlan {
    AttentionTile* tiles;
    AttentionPiece* pieces;
    int64_t num_pieces;
    int64_t* split;  // tiles that are cut into segments
    int64_t num_split;
    float* values;  // results of segments, for all tiles that are cut: [rows][d]
    float* highest;
    float* total;
};

AttentionPlan plan_attention(const rl_model& model, const rl_batch& batch, int num_threads, Arena& arena);
