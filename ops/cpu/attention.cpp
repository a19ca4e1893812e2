// Causal attention of new tokens over the KV blocks of their sequences; see ops/attention.py for the contract.
//
// Keys of a block lie dimension by dimension, (head_dim, block_size), so that one vector is one dimension of sixteen keys
// and a product with a query needs no sum across lanes. Values lie token by token. Tiles of 64 keys begin at multiples
// of 64 in their sequence, and what a query row adds up depends on its own tiles alone: a token has the same bits
// whatever is attended beside it, decoding or in a chunk, its prompt's blocks shared or not.

#include <algorithm>
#include <vector>

#include "vector.h"

namespace {

constexpr int TILE = 64;           // keys
constexpr int PARTS = TILE / LANES;
constexpr int ROWS = 6;            // query rows that share what is loaded of a tile; 6 x 4 sums fill the registers
constexpr int ITEM_ROWS = 48;      // query rows of an item: a tile is read from the first-level cache for all of them
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Call {
    const void *query, *key, *value;
    void *output;
    const int32_t *cu_seqlens, *context_lens, *block_tables;
    int64_t num_sequences, table_width;
    int64_t q_heads, kv_heads, head_dim, block_size;
    int64_t query_row, query_head;           // strides in elements; head_dim's is 1
    int64_t key_block, key_head;             // those of (head_dim, block_size) are block_size and 1
    int64_t value_block, value_head, value_token;
    float scale, softcap;                    // softcap 0: none
    int64_t window;                          // keys a query sees; 0: all
};

// Query tokens that read the same keys: a stretch of one sequence's chunk, or decoding sequences that share a prefix.
struct Item {
    int64_t sequence, num_sequences;
    int64_t first_token, num_tokens;         // of the flat axis
    int64_t shared_tiles;                    // leading tiles that all of several sequences have in common
};

int64_t first_key(const Call &c, int64_t position) {
    return c.window && position >= c.window ? position - c.window + 1 : 0;
}

// Leading tiles whose blocks two decoding sequences have in common, besides what either has yet to fill.
int64_t common_tiles(const Call &c, int64_t one, int64_t two) {
    const int32_t *a = c.block_tables + one * c.table_width, *b = c.block_tables + two * c.table_width;
    int64_t full = std::min(c.context_lens[one], c.context_lens[two]) / c.block_size, same = 0;
    while (same < full && a[same] == b[same]) same++;
    return same * c.block_size / TILE;
}

std::vector<Item> plan(const Call &c) {
    std::vector<Item> items;
    const int64_t tokens = std::max<int64_t>(1, ITEM_ROWS / (c.q_heads / c.kv_heads));
    for (int64_t s = 0; s < c.num_sequences; s++) {
        int64_t begin = c.cu_seqlens[s], end = c.cu_seqlens[s + 1];
        if (end - begin == 1 && !items.empty()) {
            Item &last = items.back();
            bool decodes = last.num_tokens == last.num_sequences;
            int64_t common = decodes && last.num_sequences < tokens ? common_tiles(c, last.sequence, s) : 0;
            if (common && (last.num_sequences == 1 || common == last.shared_tiles)) {
                last.shared_tiles = common;
                last.num_sequences++, last.num_tokens++;
                continue;
            }
        }
        for (int64_t t = begin; t < end; t += tokens) items.push_back({s, 1, t, std::min(tokens, end - t), 0});
    }
    return items;
}

// What a thread needs for the rows of one item: heads of a token are neighbours.
struct Rows {
    std::vector<float> query, sums, top, total;
    std::vector<int64_t> position;
    int64_t width = 0; // head_dim in whole vectors

    void reset(int64_t rows, int64_t head_dim) {
        width = (head_dim + LANES - 1) / LANES * LANES;
        query.assign(rows * head_dim, 0.f);
        sums.assign(rows * width, 0.f);
        top.assign(rows, NEVER);
        total.assign(rows, 0.f);
        position.resize(rows);
    }
};

// Where the keys and values of a tile lie, sixteen tokens at a time.
template <class T> struct Tile {
    const T *keys[PARTS], *values[PARTS];

    Tile(const Call &c, int64_t sequence, int64_t head, int64_t number) {
        const int64_t last = (c.context_lens[sequence] - 1) / c.block_size; // its tokens stand in for those behind it
        for (int j = 0; j < PARTS; j++) {
            const int64_t token = number * TILE + j * LANES, offset = token % c.block_size;
            const int64_t block =
                c.block_tables[sequence * c.table_width + std::min(token / c.block_size, last)];
            keys[j] = (const T *)c.key + block * c.key_block + head * c.key_head + offset;
            values[j] = (const T *)c.value + block * c.value_block + head * c.value_head + offset * c.value_token;
        }
    }
};

constexpr int LINE = 64; // bytes of a cache line

// Blocks lie anywhere, so no hardware foresees the next tile: each part of this one calls the same part of the next.
template <class T, int R>
void score(const Call &c, const float *query, const Tile<T> &tile, const Tile<T> &next, float *scores) {
    vec sums[R][PARTS] = {};
    for (int64_t d = 0; d < c.head_dim; d++) {
        vec key[PARTS];
        for (int j = 0; j < PARTS; j++) {
            key[j] = load(tile.keys[j] + d * c.block_size);
            __builtin_prefetch(next.keys[j] + d * c.block_size);
        }
        for (int r = 0; r < R; r++) {
            vec q = splat(query[r * c.head_dim + d]);
            for (int j = 0; j < PARTS; j++) sums[r][j] += q * key[j];
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < PARTS; j++) store(scores + r * TILE + j * LANES, sums[r][j]);
}

// Turns a row's scores into weights against the largest score so far; returns what earlier sums must shrink by.
float weigh(float *scores, int64_t low, int64_t high, float softcap, float &top, float &total) {
    vec parts[PARTS], peak = splat(NEVER);
    for (int j = 0; j < PARTS; j++) {
        vec x = load(scores + j * LANES), lane = lanes() + (float)(j * LANES);
        if (softcap > 0) x = soft_cap(x, softcap);
        parts[j] = (lane >= (float)low) & (lane < (float)high) ? x : splat(NEVER);
        peak = maximum(peak, parts[j]);
    }
    const float next = std::max(top, largest(peak));
    if (next == NEVER) { // nothing is visible yet: as if the tile had not been looked at
        for (int j = 0; j < PARTS; j++) store(scores + j * LANES, (vec){});
        return 0;
    }
    vec sums = {};
    for (int j = 0; j < PARTS; j++) {
        vec weight = exp_nonpositive(parts[j] - next);
        store(scores + j * LANES, weight);
        sums += weight;
    }
    float shrink = top == NEVER ? 0.f : exp_nonpositive(splat(top - next))[0];
    total = total * shrink + sum(sums);
    top = next;
    return shrink;
}

// Adds V vectors of each row's values from dimension `d` on; the only vector of a head that is no whole one: `count`.
template <class T, int R, int V>
void add_values(const Call &c, const float *weights, const float *shrink, const Tile<T> &tile, const Tile<T> &next,
                int64_t d, int64_t num_keys, float *sums, int64_t width, int count = LANES) {
    vec total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = load(sums + r * width + d + v * LANES) * shrink[r];
    for (int64_t k = 0; k < num_keys; k++) {
        const int64_t offset = (k % LANES) * c.value_token + d;
        const T *row = tile.values[k / LANES] + offset;
        for (int b = 0; b < V * LANES * (int)sizeof(T); b += LINE)
            __builtin_prefetch((const char *)(next.values[k / LANES] + offset) + b);
        vec value[V];
        for (int v = 0; v < V; v++) value[v] = count == LANES ? load(row + v * LANES) : load_some(row, count);
        for (int r = 0; r < R; r++) {
            vec w = splat(weights[r * TILE + k]);
            for (int v = 0; v < V; v++) total[r][v] += w * value[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + r * width + d + v * LANES, total[r][v]);
}

template <class T, int R>
void attend_rows(const Call &c, Rows &rows, int64_t row, const Tile<T> &tile, const Tile<T> &next, int64_t start) {
    float scores[R * TILE], shrink[R];
    int64_t num_keys = 0;
    for (int r = 0; r < R; r++) num_keys = std::max(num_keys, rows.position[row + r] + 1 - start);
    num_keys = std::min<int64_t>(num_keys, TILE);
    score<T, R>(c, &rows.query[row * c.head_dim], tile, next, scores);
    for (int r = 0; r < R; r++) {
        int64_t position = rows.position[row + r];
        shrink[r] = weigh(scores + r * TILE, first_key(c, position) - start, position + 1 - start, c.softcap,
                          rows.top[row + r], rows.total[row + r]);
    }
    float *sums = &rows.sums[row * rows.width];
    int64_t d = 0;
    for (; d + 4 * LANES <= c.head_dim; d += 4 * LANES)
        add_values<T, R, 4>(c, scores, shrink, tile, next, d, num_keys, sums, rows.width);
    for (; d + LANES <= c.head_dim; d += LANES)
        add_values<T, R, 1>(c, scores, shrink, tile, next, d, num_keys, sums, rows.width);
    if (d < c.head_dim)
        add_values<T, R, 1>(c, scores, shrink, tile, next, d, num_keys, sums, rows.width, (int)(c.head_dim - d));
}

// Of an item, `count` rows from `row` on, over tiles `first` to `stop - 1` of a sequence.
template <class T>
void attend(const Call &c, Rows &rows, int64_t row, int64_t count, int64_t sequence, int64_t head, int64_t first,
            int64_t stop) {
    Tile<T> tile(c, sequence, head, first);
    for (int64_t number = first; number < stop; number++) {
        const Tile<T> next(c, sequence, head, number + 1);
        const int64_t start = number * TILE;
        for (int64_t r = row; r < row + count; r += ROWS) {
            const int size = (int)std::min<int64_t>(ROWS, row + count - r);
            int64_t low = start + TILE, high = -1;
            for (int64_t i = r; i < r + size; i++) {
                low = std::min(low, first_key(c, rows.position[i]));
                high = std::max(high, rows.position[i]);
            }
            if (low == start + TILE || high < start) continue; // none of them sees a key of it
            switch (size) {
            case 1: attend_rows<T, 1>(c, rows, r, tile, next, start); break;
            case 2: attend_rows<T, 2>(c, rows, r, tile, next, start); break;
            case 3: attend_rows<T, 3>(c, rows, r, tile, next, start); break;
            case 4: attend_rows<T, 4>(c, rows, r, tile, next, start); break;
            case 5: attend_rows<T, 5>(c, rows, r, tile, next, start); break;
            default: attend_rows<T, ROWS>(c, rows, r, tile, next, start);
            }
        }
        tile = next;
    }
}

template <class T> void run_item(const Call &c, const Item &item, int64_t head, Rows &rows) {
    const int64_t group = c.q_heads / c.kv_heads;
    rows.reset(item.num_tokens * group, c.head_dim);
    int64_t earliest = std::numeric_limits<int64_t>::max(), latest = 0;
    for (int64_t t = 0; t < item.num_tokens; t++) {
        int64_t s = item.num_sequences > 1 ? item.sequence + t : item.sequence, token = item.first_token + t;
        int64_t position = c.context_lens[s] - (c.cu_seqlens[s + 1] - token);
        earliest = std::min(earliest, first_key(c, position)), latest = std::max(latest, position);
        for (int64_t g = 0; g < group; g++) {
            int64_t row = t * group + g;
            const T *q = (const T *)c.query + token * c.query_row + (head * group + g) * c.query_head;
            for (int64_t d = 0; d < c.head_dim; d++) rows.query[row * c.head_dim + d] = widen(q[d]) * c.scale;
            rows.position[row] = position;
        }
    }
    const int64_t first = earliest / TILE;
    if (item.num_sequences == 1) {
        attend<T>(c, rows, 0, item.num_tokens * group, item.sequence, head, first, latest / TILE + 1);
    } else {
        attend<T>(c, rows, 0, item.num_tokens * group, item.sequence, head, first, item.shared_tiles);
        for (int64_t t = 0; t < item.num_tokens; t++)
            attend<T>(c, rows, t * group, group, item.sequence + t, head, std::max(first, item.shared_tiles),
                      rows.position[t * group] / TILE + 1);
    }
    for (int64_t t = 0; t < item.num_tokens; t++)
        for (int64_t g = 0; g < group; g++) {
            int64_t row = t * group + g, d = 0;
            float inverse = 1.0f / rows.total[row];
            const float *sums = &rows.sums[row * rows.width];
            T *out = (T *)c.output + ((item.first_token + t) * c.q_heads + head * group + g) * c.head_dim;
            for (; d + LANES <= c.head_dim; d += LANES) store(out + d, load(sums + d) * inverse);
            if (d < c.head_dim) store_some(out + d, load(sums + d) * inverse, (int)(c.head_dim - d));
        }
}

template <class T> void run(const Call &c, int num_threads) {
    const std::vector<Item> items = plan(c);
    const int64_t work = (int64_t)items.size() * c.kv_heads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work > 1)
    {
        static thread_local Rows rows;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < work; i++) run_item<T>(c, items[i / c.kv_heads], i % c.kv_heads, rows);
    }
}

template <class T>
void write(const T *key, const T *value, T *key_cache, T *value_cache, const int64_t *blocks, const int64_t *offsets,
           int64_t num_tokens, const Call &c, int64_t key_row, int64_t key_head, int64_t value_row,
           int64_t value_head) {
    for (int64_t n = 0; n < num_tokens; n++) {
        if (blocks[n] < 0) continue; // it fills up a recorded step, and stands for no sequence
        for (int64_t h = 0; h < c.kv_heads; h++) {
            const T *k = key + n * key_row + h * key_head, *v = value + n * value_row + h * value_head;
            T *kc = key_cache + blocks[n] * c.key_block + h * c.key_head + offsets[n];
            T *vc = value_cache + blocks[n] * c.value_block + h * c.value_head + offsets[n] * c.value_token;
            for (int64_t d = 0; d < c.head_dim; d++) kc[d * c.block_size] = k[d];
            memcpy(vc, v, c.head_dim * sizeof(T));
        }
    }
}

} // namespace

extern "C" {

void paged_attention(const Call *call, int is_bf16, int num_threads) {
    is_bf16 ? run<bf16>(*call, num_threads) : run<float>(*call, num_threads);
}

// Strides of the new keys and values are in elements, over tokens and heads.
void write_kv(const Call *call, int is_bf16, const void *key, const void *value, const int64_t *blocks,
              const int64_t *offsets, int64_t num_tokens, int64_t key_row, int64_t key_head, int64_t value_row,
              int64_t value_head) {
    if (is_bf16)
        write((const bf16 *)key, (const bf16 *)value, (bf16 *)call->key, (bf16 *)call->value, blocks, offsets,
              num_tokens, *call, key_row, key_head, value_row, value_head);
    else
        write((const float *)key, (const float *)value, (float *)call->key, (float *)call->value, blocks, offsets,
              num_tokens, *call, key_row, key_head, value_row, value_head);
}
}
