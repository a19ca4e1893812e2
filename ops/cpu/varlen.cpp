// Causal attention of whole sequences for training, forward and backward; see ops/varlen_cpu.py for the contract.
//
// Products are of fp32 blocks of a few dozen rows and columns, widened from what the tensors hold, by one micro-kernel.
// The query heads of a KV head are rows beside each other: row r of a sequence is head r % group of token r / group.
// Keys come in tiles of 64. In the forward they begin at multiples of 64 from where a sequence's prefix does, and are
// gone through as attention.cpp does, so that a token has the bits that it has in generation; in the backward they are of
// one sequence, so that those of a prefix are laid out once for all that continue it.

#include <algorithm>
#include <numeric>
#include <vector>

#include "vector.h"

namespace {

constexpr int64_t TILE = 64;         // keys
constexpr int PARTS = TILE / LANES;
constexpr int ROWS = 6;              // rows of a micro-kernel; 6 x 4 sums fill the registers
constexpr int VECTORS = 4;
constexpr int FORWARD_ROWS = 384;    // of an item: as many as are worth laying out a tile of keys for
constexpr int BACKWARD_ROWS = 96;    // their operands and those of a tile of keys fit the second-level cache
constexpr int64_t PART_COST = 1 << 17; // pairs of a row and a key after which another part of a tree begins
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Call {
    const void *query, *key, *value;
    void *output;
    float *lse;                                // (tokens, q_heads)
    const void *grad_output;
    void *grad_query, *grad_key, *grad_value;  // contiguous, as the output is
    const int32_t *cu_seqlens, *prefixes;      // prefixes may be null
    int64_t num_sequences, q_heads, kv_heads, head_dim;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head; // strides in elements; head_dim's is 1
    int64_t grad_row, grad_head;               // of grad_output
    float scale, softcap;                      // softcap 0: none
    int64_t window;                            // keys a query sees; 0: all

    int64_t group() const { return q_heads / kv_heads; }
    int64_t width() const { return (head_dim + LANES - 1) / LANES * LANES; } // head_dim in whole vectors
    int64_t begin(int64_t s) const { return cu_seqlens[s]; }
    int64_t length(int64_t s) const { return cu_seqlens[s + 1] - cu_seqlens[s]; }
    int64_t prefix(int64_t s) const { return prefixes ? prefixes[s] : -1; }
    int64_t before(int64_t s) const { return prefix(s) < 0 ? 0 : length(prefix(s)); } // tokens before its own
    int64_t first_key(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

struct alignas(64) Line {
    float lanes[LANES];
};

// Floats that begin a cache line; memory grows and is kept.
struct Floats {
    std::vector<Line> lines;

    float *take(int64_t count) {
        if ((int64_t)lines.size() * LANES < count) lines.resize((count + LANES - 1) / LANES);
        return lines.data()->lanes;
    }
};

// c[m][n] = (c[m][n] +) sum over k of a[m * am + k * ak] * b[k * bk + n], for R rows and V vectors of columns.
template <int R, int V>
void block(const float *a, int64_t am, int64_t ak, const float *b, int64_t bk, int64_t depth, float *c, int64_t cm,
           bool add) {
    vec sums[R][V] = {};
    if (add)
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sums[r][v] = load(c + r * cm + v * LANES);
    for (int64_t k = 0; k < depth; k++, a += ak, b += bk) {
        vec right[V];
        for (int v = 0; v < V; v++) right[v] = load(b + v * LANES);
        for (int r = 0; r < R; r++) {
            vec left = splat(a[r * am]);
            for (int v = 0; v < V; v++) sums[r][v] += left * right[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(c + r * cm + v * LANES, sums[r][v]);
}

template <int R> constexpr auto *widths(int v) {
    return v == 1 ? block<R, 1> : v == 2 ? block<R, 2> : v == 3 ? block<R, 3> : block<R, VECTORS>;
}

// The same for up to ROWS rows and any number of vectors.
void multiply(const float *a, int64_t am, int64_t ak, const float *b, int64_t bk, int64_t depth, float *c, int64_t cm,
              bool add, int rows, int vectors) {
    const int blocks = (vectors + VECTORS - 1) / VECTORS, most = (vectors + blocks - 1) / blocks;
    for (int v = 0; v < vectors; v += most) {
        const int count = std::min(most, vectors - v);
        auto *kernel = rows == 1   ? widths<1>(count)
                       : rows == 2 ? widths<2>(count)
                       : rows == 3 ? widths<3>(count)
                       : rows == 4 ? widths<4>(count)
                       : rows == 5 ? widths<5>(count)
                                   : widths<ROWS>(count);
        kernel(a, am, ak, b + v * LANES, bk, depth, c + v * LANES, cm, add);
    }
}

template <class T> INLINE vec load_at(const T *row, int64_t d, int64_t head_dim) {
    return load_up_to(row + d, (int)std::min<int64_t>(LANES, head_dim - d));
}

template <class T> INLINE void store_at(T *row, int64_t d, int64_t head_dim, vec v) {
    store_up_to(row + d, v, (int)std::min<int64_t>(LANES, head_dim - d));
}

template <int STEP> INLINE void exchange(vec *rows) {
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const ivec odd = (lane & STEP) != 0; // -1 where it is
    const ivec upper = lane + (odd & (LANES - STEP)), lower = lane + STEP + (odd & (LANES - STEP));
    for (int r = 0; r < LANES; r++)
        if (!(r & STEP)) {
            vec one = rows[r], two = rows[r + STEP];
            rows[r] = __builtin_shuffle(one, two, upper);
            rows[r + STEP] = __builtin_shuffle(one, two, lower);
        }
}

INLINE void transpose(vec *rows) {
    exchange<8>(rows);
    exchange<4>(rows);
    exchange<2>(rows);
    exchange<1>(rows);
}

// One head of some tokens, `row` elements apart: of `count` of a sequence, then of those of another one behind it.
template <class T> struct Heads {
    const T *first;
    int64_t count;
    const T *then;
    int64_t row;

    const T *operator[](int64_t i) const { return i < count ? first + i * row : then + (i - count) * row; }
};

// `count` tokens' heads as (TILE, width), and as (width, TILE) with zeros behind the last token.
template <class T>
void lay_out(const Heads<T> &from, int64_t count, int64_t head_dim, float *straight, float *turned) {
    const int64_t width = (head_dim + LANES - 1) / LANES * LANES;
    for (int64_t first = 0; first < TILE; first += LANES)
        for (int64_t d = 0; d < width; d += LANES) {
            vec square[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const int64_t token = first + i;
                square[i] = token < count ? load_at(from[token], d, head_dim) : (vec){};
                if (straight) store(straight + token * width + d, square[i]);
            }
            if (!turned) continue;
            transpose(square);
            for (int64_t i = 0; i < LANES; i++) store(turned + (d + i) * TILE + first, square[i]);
        }
}

// Of part `v` of a tile, the keys from `low` to `high` - 1.
INLINE ivec visible(int v, int64_t low, int64_t high) {
    vec lane = lanes() + (float)(v * LANES);
    return (lane >= (float)low) & (lane < (float)high);
}

// Up to BACKWARD_ROWS or FORWARD_ROWS rows of a sequence, of the heads of one KV head.
struct Stretch {
    int64_t sequence, head, first, count;

    // Calls with each row's index in the stretch, its token on the flat axis and its query head.
    template <class F> void each(const Call &c, F f) const {
        const int64_t group = c.group(), begin = c.begin(sequence);
        for (int64_t r = 0; r < count; r++) {
            const int64_t row = first + r;
            f(r, begin + row / group, head * group + row % group);
        }
    }
    int64_t position(const Call &c, int64_t r) const { return c.before(sequence) + (first + r) / c.group(); }
};

// The part of a tile that some of `count` rows from `row` on see: keys low to high - 1, in parts v0 to v1 - 1.
struct Sight {
    int64_t low, high;
    int v0, v1;

    Sight(const Call &c, const Stretch &rows, int64_t row, int64_t count, int64_t start, int64_t keys)
        : low(std::max<int64_t>(0, c.first_key(rows.position(c, row)) - start)),
          high(std::min(keys, rows.position(c, row + count - 1) + 1 - start)), v0((int)(low / LANES)),
          v1((int)((high + LANES - 1) / LANES)) {}
    bool empty() const { return low >= high; }
};

// ---- forward

struct ForwardScratch {
    Floats query, sums, top, total, key, value;
};

// Turns a row's scores into weights against the largest score so far; returns what earlier sums must shrink by.
float weigh(float *scores, const Sight &sight, int64_t low, int64_t high, float softcap, float &top, float &total) {
    vec parts[PARTS], peak = splat(NEVER);
    for (int v = sight.v0; v < sight.v1; v++) {
        vec x = load(scores + v * LANES);
        if (softcap > 0) x = soft_cap(x, softcap);
        parts[v] = visible(v, low, high) ? x : splat(NEVER);
        peak = maximum(peak, parts[v]);
    }
    const float next = std::max(top, largest(peak));
    if (next == NEVER) { // nothing is visible yet: as if the tile had not been looked at
        for (int v = sight.v0; v < sight.v1; v++) store(scores + v * LANES, (vec){});
        return 0;
    }
    vec sums = {};
    for (int v = sight.v0; v < sight.v1; v++) {
        vec weight = exp_nonpositive(parts[v] - next);
        store(scores + v * LANES, weight);
        sums += weight;
    }
    const float shrink = top == NEVER ? 0.f : exp_nonpositive(splat(top - next))[0];
    total = total * shrink + sum(sums);
    top = next;
    return shrink;
}

void attend(const Call &c, const Stretch &rows, ForwardScratch &scratch, const float *key, const float *value,
            int64_t start, int64_t keys) {
    const int64_t width = c.width();
    float *sums = scratch.sums.take(0), *top = scratch.top.take(0), *total = scratch.total.take(0);
    for (int64_t row = 0; row < rows.count; row += ROWS) {
        const int size = (int)std::min<int64_t>(ROWS, rows.count - row);
        const Sight sight(c, rows, row, size, start, keys);
        if (sight.empty()) continue;
        alignas(64) float scores[ROWS * TILE];
        multiply(scratch.query.take(0) + row * width, width, 1, key + sight.v0 * LANES, TILE, c.head_dim,
                 scores + sight.v0 * LANES, TILE, false, size, sight.v1 - sight.v0);
        for (int r = 0; r < size; r++) {
            const int64_t position = rows.position(c, row + r);
            const float shrink = weigh(scores + r * TILE, sight, c.first_key(position) - start,
                                       std::min(keys, position + 1 - start), c.softcap, top[row + r], total[row + r]);
            float *sum = sums + (row + r) * width;
            if (shrink != 1)
                for (int64_t d = 0; d < width; d += LANES) store(sum + d, load(sum + d) * shrink);
        }
        multiply(scores + sight.low, TILE, 1, value + sight.low * width, width, sight.high - sight.low,
                 sums + row * width, width, true, size, (int)(width / LANES));
    }
}

template <class T> void forward(const Call &c, const Stretch &rows, ForwardScratch &scratch) {
    const int64_t width = c.width(), head_dim = c.head_dim;
    float *query = scratch.query.take(rows.count * width), *sums = scratch.sums.take(rows.count * width);
    float *top = scratch.top.take(rows.count), *total = scratch.total.take(rows.count);
    float *key = scratch.key.take(TILE * width), *value = scratch.value.take(TILE * width);
    std::fill(sums, sums + rows.count * width, 0.f);
    std::fill(top, top + rows.count, NEVER);
    std::fill(total, total + rows.count, 0.f);
    rows.each(c, [&](int64_t r, int64_t token, int64_t head) {
        const T *from = (const T *)c.query + token * c.query_row + head * c.query_head;
        for (int64_t d = 0; d < width; d += LANES) store(query + r * width + d, load_at(from, d, head_dim) * c.scale);
    });
    const int64_t s = rows.sequence, before = c.before(s), prefix = before ? c.begin(c.prefix(s)) : 0;
    for (int64_t start = 0; start < before + c.length(s); start += TILE) {
        const int64_t keys = std::min(TILE, before + c.length(s) - start);
        if (Sight(c, rows, 0, rows.count, start, keys).empty()) continue;
        // Of the tile the tokens that are the prefix's, and where the others begin.
        const int64_t shared = std::clamp<int64_t>(before - start, 0, keys);
        const int64_t first = prefix + start, then = c.begin(s) + start + shared - before;
        auto heads = [&](const void *tensor, int64_t row, int64_t head) {
            const T *from = (const T *)tensor + rows.head * head;
            return Heads<T>{from + first * row, shared, from + then * row, row};
        };
        lay_out(heads(c.key, c.key_row, c.key_head), keys, head_dim, nullptr, key);
        lay_out(heads(c.value, c.value_row, c.value_head), keys, head_dim, value, nullptr);
        attend(c, rows, scratch, key, value, start, keys);
    }
    rows.each(c, [&](int64_t r, int64_t token, int64_t head) {
        const float inverse = 1.0f / total[r];
        T *to = (T *)c.output + (token * c.q_heads + head) * head_dim;
        for (int64_t d = 0; d < width; d += LANES)
            store_at(to, d, head_dim, load(sums + r * width + d) * inverse);
        c.lse[token * c.q_heads + head] = top[r] + std::log(total[r]);
    });
}

// ---- backward

// A sequence's keys and values of one head, laid out tile by tile, and the sums of their gradients.
struct Keys {
    int64_t sequence, head, length, tile; // floats of a tile
    Floats floats;
    float *key, *turned_key, *turned_value, *grad_key, *grad_value;

    template <class T> void reset(const Call &c, int64_t s, int64_t kv_head) {
        sequence = s, head = kv_head, length = c.length(s), tile = TILE * c.width();
        const int64_t tiles = (length + TILE - 1) / TILE, size = tiles * tile;
        key = floats.take(5 * size);
        turned_key = key + size, turned_value = key + 2 * size, grad_key = key + 3 * size, grad_value = key + 4 * size;
        std::fill(grad_key, grad_key + 2 * size, 0.f);
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t token = c.begin(s) + i * TILE, count = std::min<int64_t>(TILE, length - i * TILE);
            const T *k = (const T *)c.key + token * c.key_row + head * c.key_head;
            const T *v = (const T *)c.value + token * c.value_row + head * c.value_head;
            lay_out(Heads<T>{k, count, k, c.key_row}, count, c.head_dim, key + i * tile, turned_key + i * tile);
            lay_out(Heads<T>{v, count, v, c.value_row}, count, c.head_dim, nullptr, turned_value + i * tile);
        }
    }
    int64_t gradients() const { return 2 * ((length + TILE - 1) / TILE) * tile; } // floats from grad_key on
};

template <class T>
void write_gradients(const Call &c, int64_t sequence, int64_t head, const float *grad_key, const float *grad_value) {
    const int64_t width = c.width();
    for (int64_t i = 0; i < c.length(sequence); i++) {
        const int64_t to = ((c.begin(sequence) + i) * c.kv_heads + head) * c.head_dim;
        for (int64_t d = 0; d < width; d += LANES) {
            store_at((T *)c.grad_key + to, d, c.head_dim, load(grad_key + i * width + d));
            store_at((T *)c.grad_value + to, d, c.head_dim, load(grad_value + i * width + d));
        }
    }
}

// Of a stretch: scaled queries, output gradients, their products with the outputs, and the sums of query gradients.
struct BackwardScratch {
    Floats query, grad_output, grad_query, weights, grad_scores;
    float lse[BACKWARD_ROWS], delta[BACKWARD_ROWS];
    Keys prefix, own;
};

// A row's scores become weights, and the gradients by its weights those by its scores; zeros where it sees nothing.
INLINE void differentiate(float *scores, float *grads, const Sight &sight, int64_t low, int64_t high, float lse,
                          float delta, float softcap) {
    for (int v = 0; v < PARTS; v++) {
        vec weight = {}, grad = {};
        if (v >= sight.v0 && v < sight.v1) {
            vec x = load(scores + v * LANES), slope = splat(1.f);
            if (softcap > 0) {
                x = soft_cap(x, softcap);
                slope -= (x / softcap) * (x / softcap);
            }
            const ivec seen = visible(v, low, high);
            weight = seen ? exp_nonpositive(x - lse) : (vec){};
            grad = seen ? weight * (load(grads + v * LANES) - delta) * slope : (vec){};
        }
        store(scores + v * LANES, weight);
        store(grads + v * LANES, grad);
    }
}

// Adds what a stretch and tile `number` of some keys give to each other's gradients; the tile begins at `start`.
void accumulate(const Call &c, const Stretch &rows, BackwardScratch &scratch, const Keys &keys, int64_t number,
                int64_t start) {
    const int64_t width = c.width(), offset = number * keys.tile;
    const int64_t count = std::min<int64_t>(TILE, keys.length - number * TILE);
    const int vectors = (int)(width / LANES);
    float *query = scratch.query.take(0), *grad_output = scratch.grad_output.take(0);
    float *weights = scratch.weights.take(0), *grad_scores = scratch.grad_scores.take(0);
    for (int64_t row = 0; row < rows.count; row += ROWS) {
        const int size = (int)std::min<int64_t>(ROWS, rows.count - row);
        const Sight sight(c, rows, row, size, start, count);
        if (sight.empty()) continue; // nor does the other half below read these rows
        const int64_t from = sight.v0 * LANES;
        float *p = weights + row * TILE, *ds = grad_scores + row * TILE;
        multiply(query + row * width, width, 1, keys.turned_key + offset + from, TILE, c.head_dim, p + from, TILE,
                 false, size, sight.v1 - sight.v0);
        multiply(grad_output + row * width, width, 1, keys.turned_value + offset + from, TILE, c.head_dim, ds + from,
                 TILE, false, size, sight.v1 - sight.v0);
        for (int r = 0; r < size; r++) {
            const int64_t position = rows.position(c, row + r);
            differentiate(p + r * TILE, ds + r * TILE, sight, c.first_key(position) - start,
                          std::min(count, position + 1 - start), scratch.lse[row + r], scratch.delta[row + r],
                          c.softcap);
        }
        multiply(ds + sight.low, TILE, 1, keys.key + offset + sight.low * width, width, sight.high - sight.low,
                 scratch.grad_query.take(0) + row * width, width, true, size, vectors);
    }
    // Rows that see one of `size` keys from k on: those of the first one's own token to the last that sees the last.
    const int64_t group = c.group(), origin = (start - c.before(rows.sequence)) * group - rows.first;
    for (int64_t k = 0; k < count; k += ROWS) {
        const int size = (int)std::min<int64_t>(ROWS, count - k);
        const int64_t first = std::max<int64_t>(0, origin + k * group);
        const int64_t stop = c.window ? std::min(rows.count, origin + (k + size - 1 + c.window) * group) : rows.count;
        if (first >= stop) continue;
        const int64_t to = offset + k * width;
        multiply(weights + first * TILE + k, 1, TILE, grad_output + first * width, width, stop - first,
                 keys.grad_value + to, width, true, size, vectors);
        multiply(grad_scores + first * TILE + k, 1, TILE, query + first * width, width, stop - first,
                 keys.grad_key + to, width, true, size, vectors);
    }
}

template <class T>
void backward_rows(const Call &c, const Stretch &rows, const Keys *prefix, const Keys &own, BackwardScratch &scratch) {
    const int64_t width = c.width(), head_dim = c.head_dim, size = BACKWARD_ROWS * width;
    float *query = scratch.query.take(size), *grad_output = scratch.grad_output.take(size);
    float *grad_query = scratch.grad_query.take(size);
    scratch.weights.take(BACKWARD_ROWS * TILE), scratch.grad_scores.take(BACKWARD_ROWS * TILE);
    std::fill(grad_query, grad_query + rows.count * width, 0.f);
    rows.each(c, [&](int64_t r, int64_t token, int64_t head) {
        const T *q = (const T *)c.query + token * c.query_row + head * c.query_head;
        const T *g = (const T *)c.grad_output + token * c.grad_row + head * c.grad_head;
        const T *o = (const T *)c.output + (token * c.q_heads + head) * head_dim;
        vec delta = {};
        for (int64_t d = 0; d < width; d += LANES) {
            const vec grad = load_at(g, d, head_dim);
            store(query + r * width + d, load_at(q, d, head_dim) * c.scale);
            store(grad_output + r * width + d, grad);
            delta += grad * load_at(o, d, head_dim);
        }
        scratch.delta[r] = sum(delta);
        scratch.lse[r] = c.lse[token * c.q_heads + head];
    });
    const int64_t before = c.before(rows.sequence);
    for (const Keys *keys : {prefix, &own})
        for (int64_t first = 0; keys && first < keys->length; first += TILE) {
            const int64_t start = (keys == &own ? before : 0) + first;
            const int64_t count = std::min<int64_t>(TILE, keys->length - first);
            if (!Sight(c, rows, 0, rows.count, start, count).empty())
                accumulate(c, rows, scratch, *keys, first / TILE, start);
        }
    rows.each(c, [&](int64_t r, int64_t token, int64_t head) {
        T *to = (T *)c.grad_query + (token * c.q_heads + head) * head_dim;
        for (int64_t d = 0; d < width; d += LANES)
            store_at(to, d, head_dim, load(grad_query + r * width + d) * c.scale);
    });
}

template <class T>
void backward_sequence(const Call &c, const Keys *prefix, const Keys &own, BackwardScratch &scratch) {
    const int64_t rows = own.length * c.group();
    for (int64_t first = 0; first < rows; first += BACKWARD_ROWS)
        backward_rows<T>(c, {own.sequence, own.head, first, std::min<int64_t>(BACKWARD_ROWS, rows - first)}, prefix,
                         own, scratch);
}

// A sequence that has no prefix, with some of those that continue it. A tree of one part writes the root's gradients
// itself; the parts of a larger one leave their sums, to be added up in order, whichever threads they ran on.
struct Part {
    int64_t root, cost;
    bool with_root;                 // it has the root's own queries
    std::vector<int64_t> continued;
    std::vector<float> *sums;       // kv_heads times Keys::gradients; null for a tree of one part
};

struct Tree {
    int64_t root;
    std::vector<std::vector<float>> sums; // of its parts, where there are several
};

int64_t pairs(const Call &c, int64_t s) {
    const int64_t length = c.length(s), all = length * (length + 1) / 2 + length * c.before(s);
    return (c.window ? std::min(all, length * c.window) : all) * c.group();
}

void plan(const Call &c, std::vector<Part> &parts, std::vector<Tree> &trees) {
    std::vector<std::vector<int64_t>> continued(c.num_sequences);
    for (int64_t s = 0; s < c.num_sequences; s++)
        if (c.prefix(s) >= 0 && c.length(s)) continued[c.prefix(s)].push_back(s);
    for (int64_t s = 0; s < c.num_sequences; s++) {
        if (c.prefix(s) >= 0 || (!c.length(s) && continued[s].empty())) continue;
        const size_t first = parts.size();
        parts.push_back({s, pairs(c, s), true, {}, nullptr});
        for (int64_t other : continued[s]) {
            if (parts.back().cost >= PART_COST) parts.push_back({s, 0, false, {}, nullptr});
            parts.back().continued.push_back(other);
            parts.back().cost += pairs(c, other);
        }
        if (parts.size() - first == 1) continue;
        trees.push_back({s, std::vector<std::vector<float>>(parts.size() - first)});
        for (size_t i = first; i < parts.size(); i++) parts[i].sums = &trees.back().sums[i - first];
    }
    const int64_t tiles = c.width() * TILE * 2;
    for (Part &part : parts)
        if (part.sums) part.sums->resize(c.kv_heads * ((c.length(part.root) + TILE - 1) / TILE) * tiles);
    std::stable_sort(parts.begin(), parts.end(), [](const Part &a, const Part &b) { return a.cost > b.cost; });
}

template <class T> void backward_part(const Call &c, const Part &part, int64_t head, BackwardScratch &scratch) {
    Keys &prefix = scratch.prefix, &own = scratch.own;
    prefix.reset<T>(c, part.root, head);
    if (part.with_root) backward_sequence<T>(c, nullptr, prefix, scratch);
    for (int64_t s : part.continued) {
        own.reset<T>(c, s, head);
        backward_sequence<T>(c, &prefix, own, scratch);
        write_gradients<T>(c, s, head, own.grad_key, own.grad_value);
    }
    if (part.sums)
        memcpy(part.sums->data() + head * prefix.gradients(), prefix.grad_key, prefix.gradients() * sizeof(float));
    else
        write_gradients<T>(c, part.root, head, prefix.grad_key, prefix.grad_value);
}

template <class T> void add_parts(const Call &c, Tree &tree, int64_t head) {
    const int64_t size = tree.sums[0].size() / c.kv_heads;
    float *total = tree.sums[0].data() + head * size;
    for (size_t i = 1; i < tree.sums.size(); i++) {
        const float *part = tree.sums[i].data() + head * size;
        for (int64_t j = 0; j < size; j++) total[j] += part[j];
    }
    write_gradients<T>(c, tree.root, head, total, total + size / 2);
}

template <class T> void run_forward(const Call &c, int num_threads) {
    std::vector<Stretch> items;
    std::vector<int64_t> costs, order;
    for (int64_t s = 0; s < c.num_sequences; s++)
        for (int64_t head = 0; head < c.kv_heads; head++) {
            const int64_t rows = c.length(s) * c.group();
            for (int64_t first = 0; first < rows; first += FORWARD_ROWS) {
                items.push_back({s, head, first, std::min<int64_t>(FORWARD_ROWS, rows - first)});
                const int64_t last = items.back().position(c, items.back().count - 1) + 1;
                costs.push_back(items.back().count * (c.window ? std::min(last, c.window) : last));
            }
        }
    order.resize(items.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && order.size() > 1)
    {
        static thread_local ForwardScratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < order.size(); i++) forward<T>(c, items[order[i]], scratch);
    }
}

template <class T> void run_backward(const Call &c, int num_threads) {
    std::vector<Part> parts;
    std::vector<Tree> trees;
    trees.reserve(c.num_sequences); // parts point into them
    plan(c, parts, trees);
    const int64_t work = (int64_t)parts.size() * c.kv_heads, sums = (int64_t)trees.size() * c.kv_heads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work > 1)
    {
        static thread_local BackwardScratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < work; i++) backward_part<T>(c, parts[i / c.kv_heads], i % c.kv_heads, scratch);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < sums; i++) add_parts<T>(c, trees[i / c.kv_heads], i % c.kv_heads);
    }
}

} // namespace

extern "C" {

void varlen_forward(const Call *call, int is_bf16, int num_threads) {
    is_bf16 ? run_forward<bf16>(*call, num_threads) : run_forward<float>(*call, num_threads);
}

void varlen_backward(const Call *call, int is_bf16, int num_threads) {
    is_bf16 ? run_backward<bf16>(*call, num_threads) : run_backward<float>(*call, num_threads);
}
}
