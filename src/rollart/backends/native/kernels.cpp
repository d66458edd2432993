// What torch has no single operation for on a CPU, in float32: the parts of a transformer between its matrix products.
//
// Plain C++ with the vectors of GCC and Clang, compiled on the machine that it runs on (kernels.py). Every function is
// single-threaded, allocates nothing, and reads and writes only what its comment names.

#include <cmath>
#include <cstdint>

namespace {

constexpr int WIDTH = 16;
constexpr int TILE = 8;     // queries that are attended with at once
constexpr int GRAIN = 32;   // positions are read in multiples of this, which all blocks of KV memory are
typedef float Vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline Vec load(const float *from) { return *(const Vec *)from; }
inline void store(float *to, Vec value) { *(Vec *)to = value; }
inline Vec all(float value) { return Vec{} + value; }

inline float sum(Vec value) {
  float total = 0;
  for (int i = 0; i < WIDTH; i++) total += value[i];
  return total;
}

inline float largest(Vec value) {
  float most = value[0];
  for (int i = 1; i < WIDTH; i++) most = value[i] > most ? value[i] : most;
  return most;
}

inline float squares(const float *x, int64_t size) {
  Vec wide = {};
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) wide += load(x + i) * load(x + i);
  float total = sum(wide);
  for (; i < size; i++) total += x[i] * x[i];
  return total;
}

// e^x to the last bit or two: 2^n by its exponent, the rest of x by a polynomial (Cephes' expf).
inline Vec exp_of(Vec x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  Vec turns = x * 1.44269504f;
  Ints whole = __builtin_convertvector(turns + (turns < 0.0f ? all(-0.5f) : all(0.5f)), Ints);
  Vec n = __builtin_convertvector(whole, Vec);
  Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (Vec)((whole + 127) << 23);
}

// --- attention: keys are (dimension, position), values are (position, dimension)

template <int Q, int T>
inline int64_t score_from(int64_t t, const float *const *query, const float *keys, int64_t capacity, int64_t dim,
                          int64_t end, float *const *scores) {
  for (; t + T * WIDTH <= end; t += T * WIDTH) {
    Vec sums[Q][T] = {};
    for (int64_t d = 0; d < dim; d++)
      for (int i = 0; i < T; i++) {
        Vec key = load(keys + d * capacity + t + i * WIDTH);
        for (int q = 0; q < Q; q++) sums[q][i] += query[q][d] * key;
      }
    for (int q = 0; q < Q; q++)
      for (int i = 0; i < T; i++) store(scores[q] + t + i * WIDTH, sums[q][i]);
  }
  return t;
}

// e^(score - the largest) of the first `length`, zeros from there to `end`; gives 1 / their sum.
inline float soften(float *scores, int64_t length, int64_t end) {
  for (int64_t t = length; t < end; t++) scores[t] = -INFINITY;
  Vec most = load(scores);
  for (int64_t t = WIDTH; t < end; t += WIDTH) {
    Vec here = load(scores + t);
    most = here > most ? here : most;
  }
  float top = largest(most);
  Vec total = {};
  for (int64_t t = 0; t < end; t += WIDTH) {
    Vec here = load(scores + t);
    Vec weight = here == -INFINITY ? Vec{} : exp_of(here - top);
    store(scores + t, weight);
    total += weight;
  }
  return 1.0f / sum(total);
}

template <int Q, int D, int U>
inline void blend_from(int64_t d, const float *const *weights, const float *shares, const float *values, int64_t dim,
                       int64_t length, float *const *out) {
  Vec sums[U][Q][D] = {};
  int64_t t = 0;
  for (; t + U <= length; t += U)
    for (int u = 0; u < U; u++)
      for (int i = 0; i < D; i++) {
        Vec value = load(values + (t + u) * dim + d + i * WIDTH);
        for (int q = 0; q < Q; q++) sums[u][q][i] += weights[q][t + u] * value;
      }
  for (; t < length; t++)
    for (int i = 0; i < D; i++) {
      Vec value = load(values + t * dim + d + i * WIDTH);
      for (int q = 0; q < Q; q++) sums[0][q][i] += weights[q][t] * value;
    }
  for (int q = 0; q < Q; q++)
    for (int i = 0; i < D; i++) {
      Vec whole = sums[0][q][i];
      for (int u = 1; u < U; u++) whole += sums[u][q][i];
      store(out[q] + d + i * WIDTH, whole * shares[q]);
    }
}

// Q queries of one head, in the order of their positions: the last sees the most.
template <int Q>
void attend_to(const float *const *query, const int64_t *visible, const float *keys, const float *values,
               int64_t capacity, int64_t dim, float *scratch, float *const *out) {
  constexpr int T = Q == 1 ? 4 : 2;                // enough sums at once to keep the adders busy
  constexpr int U = Q == 1 ? 4 : Q <= 3 ? 2 : 1;
  float *scores[Q];
  float shares[Q];
  int64_t longest = visible[Q - 1];
  int64_t end = (longest + GRAIN - 1) / GRAIN * GRAIN;
  for (int q = 0; q < Q; q++) scores[q] = scratch + q * capacity;
  int64_t t = score_from<Q, T>(0, query, keys, capacity, dim, end, scores);
  score_from<Q, 2>(t, query, keys, capacity, dim, end, scores);
  for (int q = 0; q < Q; q++) shares[q] = soften(scores[q], visible[q], end);
  int64_t d = 0;
  for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH) blend_from<Q, 2, U>(d, scores, shares, values, dim, longest, out);
  for (; d + WIDTH <= dim; d += WIDTH) blend_from<Q, 1, U>(d, scores, shares, values, dim, longest, out);
  for (; d < dim; d++)
    for (int q = 0; q < Q; q++) {
      float total = 0;
      for (int64_t t = 0; t < longest; t++) total += scores[q][t] * values[t * dim + d];
      out[q][d] = total * shares[q];
    }
}

}  // namespace

extern "C" {

// New tokens of one session: rows `row` and so on of the step, positions `start` and so on of its block.
struct Piece {
  int64_t row, count, offset, capacity, start;
};

// The shape of all heads; `group` query heads share a key-value head.
struct Heads {
  int64_t kv_heads, group, dim;
};

// out, queries: (rows, heads, dim). keys, values: one layer of the arena. scratch: TILE times the largest capacity.
void attend(const Heads *heads, const Piece *pieces, int64_t number, const float *queries, const float *keys,
            const float *values, float *scratch, float *out) {
  const int64_t dim = heads->dim, group = heads->group;
  for (const Piece *p = pieces; p < pieces + number; p++)
    for (int64_t head = 0; head < heads->kv_heads; head++) {
      const int64_t block = (p->offset * heads->kv_heads + head * p->capacity) * dim;
      const float *k = keys + block, *v = values + block;
      const int64_t rows = p->count * group;
      for (int64_t r = 0; r < rows;) {
        const float *query[TILE];
        float *target[TILE];
        int64_t visible[TILE];
        const int64_t left = rows - r;
        const int tile = left < TILE ? left : TILE;
        for (int q = 0; q < tile; q++, r++) {
          const int64_t token = r / group;
          const int64_t at = (((p->row + token) * heads->kv_heads + head) * group + r % group) * dim;
          query[q] = queries + at;
          target[q] = out + at;
          visible[q] = p->start + token + 1;
        }
        switch (tile) {
          case 1: attend_to<1>(query, visible, k, v, p->capacity, dim, scratch, target); break;
          case 2: attend_to<2>(query, visible, k, v, p->capacity, dim, scratch, target); break;
          case 3: attend_to<3>(query, visible, k, v, p->capacity, dim, scratch, target); break;
          case 4: attend_to<4>(query, visible, k, v, p->capacity, dim, scratch, target); break;
          case 5: attend_to<5>(query, visible, k, v, p->capacity, dim, scratch, target); break;
          case 6: attend_to<6>(query, visible, k, v, p->capacity, dim, scratch, target); break;
          case 7: attend_to<7>(query, visible, k, v, p->capacity, dim, scratch, target); break;
          case 8: attend_to<8>(query, visible, k, v, p->capacity, dim, scratch, target); break;
        }
      }
    }
}

// From (rows, heads + 2 kv heads, dim): queries times `scale` to `queries`, keys and values to their places in the
// arena. bias: added first, or null. norm: (heads + kv heads, dim) as in the decoder's norms, or null; floor: n * eps.
// turns: (positions, dim / 2) complex numbers that pairs of dimensions are multiplied with.
void place(const Heads *heads, const Piece *pieces, int64_t number, const float *qkv, const float *bias,
           const float *norm, float floor, const float *turns, float scale, float *queries, float *keys,
           float *values) {
  const int64_t dim = heads->dim, kv_heads = heads->kv_heads, query_heads = kv_heads * heads->group;
  const int64_t turned_heads = query_heads + kv_heads, all_heads = turned_heads + kv_heads;
  for (const Piece *p = pieces; p < pieces + number; p++)
    for (int64_t i = 0; i < p->count; i++) {
      const float *row = qkv + (p->row + i) * all_heads * dim;
      const int64_t position = p->start + i;
      const float *turn = turns + position * dim;
      for (int64_t h = 0; h < all_heads; h++) {
        const bool is_query = h < query_heads, is_value = h >= turned_heads;
        const float *from = row + h * dim;
        float head[MAX_HEAD_DIM];
        for (int64_t d = 0; d < dim; d++) head[d] = from[d];
        if (bias)
          for (int64_t d = 0; d < dim; d++) head[d] += bias[h * dim + d];
        const int64_t block = (p->offset * kv_heads + (h - query_heads) % kv_heads * p->capacity) * dim;
        if (is_value) {
          for (int64_t d = 0; d < dim; d++) values[block + position * dim + d] = head[d];
          continue;
        }
        float share = is_query ? scale : 1.0f;
        if (norm) {
          share /= std::sqrt(squares(head, dim) + floor);
          for (int64_t d = 0; d < dim; d++) head[d] *= norm[h * dim + d];
        }
        float turned[MAX_HEAD_DIM];
        for (int64_t d = 0; d < dim; d += 2) {
          turned[d] = (head[d] * turn[d] - head[d + 1] * turn[d + 1]) * share;
          turned[d + 1] = (head[d] * turn[d + 1] + head[d + 1] * turn[d]) * share;
        }
        if (is_query)
          for (int64_t d = 0; d < dim; d++) queries[((p->row + i) * query_heads + h) * dim + d] = turned[d];
        else
          for (int64_t d = 0; d < dim; d++) keys[block + d * p->capacity + position] = turned[d];
      }
    }
}

// out, x: (rows, width). x / sqrt(its squares + floor) * weight.
void rms_norm(const float *x, const float *weight, float floor, int64_t rows, int64_t width, float *out) {
  for (int64_t r = 0; r < rows; r++) {
    const float *from = x + r * width;
    const float share = 1.0f / std::sqrt(squares(from, width) + floor);
    for (int64_t i = 0; i < width; i++) out[r * width + i] = from[i] * share * weight[i];
  }
}

// gate_up: (rows, 2 * width); out: (rows, width). silu of the first half times the second.
void gated(const float *gate_up, int64_t rows, int64_t width, float *out) {
  for (int64_t r = 0; r < rows; r++) {
    const float *gate = gate_up + 2 * r * width, *up = gate + width;
    float *to = out + r * width;
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) {
      Vec x = load(gate + i);
      store(to + i, x / (1.0f + exp_of(-x)) * load(up + i));
    }
    for (; i < width; i++) to[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  }
}

}  // extern "C"
