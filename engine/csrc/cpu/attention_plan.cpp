#include "attention_plan.h"

#include <algorithm>

#include "library.h"

namespace {

// Rows of a tile: enough that the keys and values are read seldom, few enough that the scores stay in the L1 cache.
constexpr int64_t kPreferredRows = 24;
// If there are fewer tiles for each thread than this, tiles are cut into runs of segments.
constexpr int64_t kTilesPerThread = 8;
// The length of the next run is the number of segments that are in no run yet, divided by this constant and by the
// number of threads. So runs get shorter. The first runs are long, because a run prefetches each segment while it
// computes the previous segment. The last runs are single segments, so that all threads end nearly together.
constexpr int64_t kRunsOfShare = 2;
// Tiles are not cut if the results of their segments would take more memory than this. Without the limit, a chunk with
// a context of 131,072 positions would take 3 GB on 64 threads. models/step_memory.py computes the same limits.
constexpr int64_t kMostResultBytes = int64_t(256) << 20;

int64_t tile_tokens(const rl_model& model) {
    const int64_t group = model.num_heads / model.num_kv_heads;
    return group >= kPreferredRows ? 1 : kPreferredRows / group;
}

// Calls piece(tile, first segment, end segment) for all pieces, in the order in which threads take them. The end
// segment of a tile that is not cut is -1.
template <class Piece>
void for_pieces(const AttentionTile* tiles, int64_t num_tiles, int64_t num_segments, int64_t num_threads, bool is_cut,
                Piece piece) {
    int64_t left = num_segments;
    // The last tiles of a prompt have the longest context. They come first, so that no thread ends with a long tile.
    for (int64_t tile = num_tiles - 1; tile >= 0; tile--) {
        const int64_t end = tiles[tile].num_segments;
        if (!is_cut || end == 1) {
            piece(tile, 0, -1);
            left -= end;
            continue;
        }
        for (int64_t first = 0; first < end;) {
            const int64_t run = std::max<int64_t>(1, left / (kRunsOfShare * num_threads));
            const int64_t next = std::min(first + run, end);
            piece(tile, first, next);
            left -= next - first;
            first = next;
        }
    }
}

}  // namespace

AttentionPlan plan_attention(const rl_model& model, const rl_batch& batch, int num_threads, Arena& arena) {
    const int64_t most_tokens = tile_tokens(model);
    const int64_t group = model.num_heads / model.num_kv_heads;
    int64_t num_tiles = 0;
    int64_t most_results = 0;  // number of results if all tiles are cut
    for (int64_t s = 0; s < batch.num_sequences; s++) {
        const int64_t tiles = ceil_div(batch.query_lens[s], most_tokens) * model.num_kv_heads;
        const int64_t segments = ceil_div(batch.context_lens[s], kSegment);
        num_tiles += tiles;
        most_results += batch.query_lens[s] * model.num_heads * segments;
    }
    AttentionPlan plan = {};
    plan.tiles = arena.take<AttentionTile>(num_tiles);
    const bool is_small = most_results * model.head_dim * (int64_t)sizeof(float) <= kMostResultBytes;
    const bool is_cut = num_tiles < kTilesPerThread * num_threads && num_threads > 1 && is_small;
    int64_t num_segments = 0;  // segments of all tiles
    int64_t num_results = 0;
    int64_t token = 0;
    int64_t index = 0;
    for (int64_t s = 0; s < batch.num_sequences; s++) {
        const int64_t start = batch.context_lens[s] - batch.query_lens[s];
        // Neighbouring tiles read the same keys and values, so these stay in the thread's second-level cache.
        for (int64_t head = 0; head < model.num_kv_heads; head++) {
            for (int64_t first = 0; first < batch.query_lens[s]; first += most_tokens) {
                const int64_t left = batch.query_lens[s] - first;
                const int64_t num_tokens = left < most_tokens ? left : most_tokens;
                AttentionTile& tile = plan.tiles[index++];
                tile = {token + first, num_tokens, start + first, head, batch.block_tables + s * batch.table_width,
                        ceil_div(start + first + num_tokens, kSegment), num_results};
                num_segments += tile.num_segments;
                if (is_cut && tile.num_segments > 1) {
                    plan.num_split++;
                    num_results += tile.num_segments * num_tokens * group;
                }
            }
        }
        token += batch.query_lens[s];
    }
    for_pieces(plan.tiles, num_tiles, num_segments, num_threads, is_cut,
               [&](int64_t, int64_t, int64_t) { plan.num_pieces++; });
    plan.pieces = arena.take<AttentionPiece>(plan.num_pieces);
    plan.split = arena.take<int64_t>(plan.num_split);
    plan.values = arena.take<float>(num_results * model.head_dim);
    plan.highest = arena.take<float>(num_results);
    plan.total = arena.take<float>(num_results);
    int64_t num_filled = 0;
    int64_t split = 0;
    for_pieces(plan.tiles, num_tiles, num_segments, num_threads, is_cut,
               [&](int64_t tile, int64_t first, int64_t end) {
                   plan.pieces[num_filled++] = {tile, first, end};
                   if (end >= 0 && first == 0) {
                       plan.split[split++] = tile;
                   }
               });
    return plan;
}
