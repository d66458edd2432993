// Transformer building blocks on a CPU, in float32: operations that torch does not have as a single kernel, and
// products with weights that are reused many times.
//
// Plain C++ with the vector extensions of GCC and Clang, compiled on the machine it runs on (kernels.py). Every
// function is single-threaded, allocates nothing, and reads and writes only what its comment names.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16, REGISTERS = 32;  // floats per vector register, and the number of registers
#elif defined(__AVX__)
constexpr int WIDTH = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, REGISTERS = 32;
#else
constexpr int WIDTH = 4, REGISTERS = 16;
#endif
constexpr int BUSY = 8;  // independent accumulators needed to hide the latency of additions
static_assert(ALIGN % WIDTH == 0, "capacities are multiples of ALIGN, and positions are read WIDTH at a time");
typedef float Vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline Vec load(const float *from) { return *(const Vec *)from; }
inline void store(float *to, Vec value) { *(Vec *)to = value; }
inline Vec all(float value) { return value - Vec{}; }  // not 0 + value, which would compile to an addition

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

// e^x accurate to one or two ulp: 2^n through the exponent bits, the remainder by a polynomial (Cephes' expf).
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

// Softmax numerators: e^(score - maximum) for the first `length`, zero from there to `end`; returns 1 / their sum.
inline float soften(float *scores, int64_t length, int64_t end, float *logsum) {
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
  const float whole = sum(total);
  if (logsum) *logsum = top + std::log(whole);
  return 1.0f / whole;
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

template <int Q>
inline void score(const float *const *query, const float *across, int64_t capacity, int64_t dim, int64_t end,
                  float *const *scores) {
  constexpr int T = std::max(1, std::min((BUSY + Q - 1) / Q, (REGISTERS - 1) / (Q + 1)));
  int64_t t = score_from<Q, T>(0, query, across, capacity, dim, end, scores);
  t = score_from<Q, std::min(T, 2)>(t, query, across, capacity, dim, end, scores);
  score_from<Q, 1>(t, query, across, capacity, dim, end, scores);
}

template <int Q>
inline void blend(const float *const *weights, const float *shares, const float *along, int64_t dim, int64_t length,
                  float *const *out) {
  constexpr int D = Q <= 3 ? 4 : Q * 2 + 2 <= REGISTERS ? 2 : 1;
  constexpr int U = (BUSY + Q * D - 1) / (Q * D), U1 = std::min((BUSY + Q - 1) / Q, 4);
  int64_t d = 0;
  for (; d + D * WIDTH <= dim; d += D * WIDTH) blend_from<Q, D, U>(d, weights, shares, along, dim, length, out);
  for (; d + WIDTH <= dim; d += WIDTH) blend_from<Q, 1, U1>(d, weights, shares, along, dim, length, out);
  for (; d < dim; d++)
    for (int q = 0; q < Q; q++) {
      float total = 0;
      for (int64_t t = 0; t < length; t++) total += weights[q][t] * along[t * dim + d];
      out[q][d] = total * shares[q];
    }
}

// Q queries of one head, in order of position: the last one sees the most. `logsums`: log-sum-exp of each query's
// scores, or null.
template <int Q>
void attend_to(const float *const *query, const int64_t *visible, const float *keys, const float *values,
               int64_t capacity, int64_t dim, float *scratch, float *const *out, float *const *logsums) {
  float *scores[Q];
  float shares[Q];
  const int64_t longest = visible[Q - 1], end = (longest + WIDTH - 1) / WIDTH * WIDTH;
  for (int q = 0; q < Q; q++) scores[q] = scratch + q * capacity;
  score<Q>(query, keys, capacity, dim, end, scores);
  for (int q = 0; q < Q; q++) shares[q] = soften(scores[q], visible[q], end, logsums ? logsums[q] : nullptr);
  blend<Q>(scores, shares, values, dim, longest, out);
}

// --- attention over packed sequences, with gradient: keys and values of one head are first laid out as above

// Copy `count` rows of `stride` floats, the first `dim` of each times `scale`: as rows of `along`, and as columns of
// `across`; either may be null.
inline void lay_out(const float *from, int64_t count, int64_t stride, int64_t dim, float scale, float *along,
                    float *across, int64_t capacity) {
  if (along)
    for (int64_t t = 0; t < count; t++)
      for (int64_t d = 0; d < dim; d++) along[t * dim + d] = from[t * stride + d] * scale;
  if (across) {
    int64_t t = 0;
    for (; t + WIDTH <= count; t += WIDTH)
      for (int64_t d = 0; d < dim; d++) {
        Vec column;
        for (int i = 0; i < WIDTH; i++) column[i] = from[(t + i) * stride + d];
        store(across + d * capacity + t, column * scale);
      }
    for (; t < count; t++)
      for (int64_t d = 0; d < dim; d++) across[d * capacity + t] = from[t * stride + d] * scale;
  }
}

// into[t] += the sum of weights[q][t] * rows[q], for every t below `length`.
template <int Q>
inline void spread(const float *const *weights, const float *const *rows, int64_t dim, int64_t length, float *into) {
  int64_t d = 0;
  for (; d + WIDTH <= dim; d += WIDTH) {
    Vec row[Q];
    for (int q = 0; q < Q; q++) row[q] = load(rows[q] + d);
    for (int64_t t = 0; t < length; t++) {
      Vec total = load(into + t * dim + d);
      for (int q = 0; q < Q; q++) total += weights[q][t] * row[q];
      store(into + t * dim + d, total);
    }
  }
  for (; d < dim; d++)
    for (int64_t t = 0; t < length; t++)
      for (int q = 0; q < Q; q++) into[t * dim + d] += weights[q][t] * rows[q][d];
}

// Inputs of the backward pass of `attend_to`; keys are already multiplied by the scale of the scores.
struct Back {
  const float *keys_across, *keys_along, *values_across;
  float *keys_gradient, *values_gradient;  // (position, dimension), accumulated into
  float *scratch;                          // 2 * TILE * capacity
  int64_t capacity, dim;
};

template <int Q>
void attend_back(const Back &b, const float *const *query, const int64_t *visible, const float *const *out,
                 const float *const *logsums, const float *const *gradient, float *const *query_gradient) {
  float *weights[Q], *moved[Q];
  float ones[Q];
  const int64_t longest = visible[Q - 1], end = (longest + WIDTH - 1) / WIDTH * WIDTH;
  for (int q = 0; q < Q; q++) {
    weights[q] = b.scratch + q * b.capacity;
    moved[q] = b.scratch + (TILE + q) * b.capacity;
    ones[q] = 1.0f;
  }
  score<Q>(query, b.keys_across, b.capacity, b.dim, end, weights);
  score<Q>(gradient, b.values_across, b.capacity, b.dim, end, moved);
  for (int q = 0; q < Q; q++) {
    float same = 0;
    for (int64_t d = 0; d < b.dim; d++) same += gradient[q][d] * out[q][d];
    for (int64_t t = 0; t < end; t += WIDTH) {
      Vec weight = exp_of(load(weights[q] + t) - *logsums[q]);
      store(weights[q] + t, weight);
      store(moved[q] + t, weight * (load(moved[q] + t) - same));
    }
    for (int64_t t = visible[q]; t < longest; t++) weights[q][t] = moved[q][t] = 0.0f;
  }
  blend<Q>(moved, ones, b.keys_along, b.dim, longest, query_gradient);
  spread<Q>(moved, query, b.dim, longest, b.keys_gradient);
  spread<Q>(weights, gradient, b.dim, longest, b.values_gradient);
}

// --- products: weights are laid out once, in panels of PANEL outputs, the last one padded with zeros
//
// Every output is one sum over the inputs in order, however many rows there are: the result of a row does not depend on
// the other rows, to the last bit.

constexpr int PANEL = 2 * WIDTH;
constexpr int ROWS = (REGISTERS - 3) / 2;  // rows whose sums fit in registers with a pair of weights and one input
constexpr int64_t NEAR = 1 << 16;          // floats of the rows that should stay in the core's own cache

// M rows times P panels. `soon` is prefetched meanwhile, `step` floats per input. `room` is the number of outputs left.
template <int M, int P>
inline void multiply_tile(const float *x, int64_t inputs, const float *panels, const float *soon, int64_t step,
                          bool add, float *out, int64_t outputs, int64_t room) {
  Vec sums[P][M][2] = {};
  for (int64_t k = 0; k < inputs; k++) {
    __builtin_prefetch(soon, 0, 2);
    soon += step;
    for (int p = 0; p < P; p++) {
      const float *weights = panels + (p * inputs + k) * PANEL;
      const Vec left = load(weights), right = load(weights + WIDTH);
      for (int m = 0; m < M; m++) {
        const float each = x[m * inputs + k];
        sums[p][m][0] += each * left;
        sums[p][m][1] += each * right;
      }
    }
  }
  for (int p = 0; p < P; p++)
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) {
        const int64_t at = p * PANEL + half * WIDTH;
        float *to = out + m * outputs + at;
        const Vec value = sums[p][m][half];
        if (at + WIDTH <= room)
          store(to, add ? load(to) + value : value);
        else
          for (int i = 0; at + i < room; i++) to[i] = add ? to[i] + value[i] : value[i];
      }
}

// Call f with `number`, which is in 1 … MOST, as a compile-time constant: one instance for each.
template <int MOST, typename F>
inline void as_constant(int64_t number, F f) {
  if constexpr (MOST > 1)
    if (number < MOST) return as_constant<MOST - 1>(number, f);
  f(std::integral_constant<int, MOST>());
}

}  // namespace

extern "C" {

// weights: (outputs, inputs); panels: `inputs` times `outputs` rounded up to a multiple of 2 * ALIGN.
void lay_panels(const float *weights, int64_t outputs, int64_t inputs, float *panels) {
  for (int64_t n = 0; n < outputs; n += PANEL)
    for (int64_t k = 0; k < inputs; k++)
      for (int64_t i = n; i < n + PANEL; i++) *panels++ = i < outputs ? weights[i * inputs + k] : 0.0f;
}

// out: (rows, outputs), accumulated into if `add`. x: (rows, inputs).
void multiply(const float *x, int64_t rows, int64_t inputs, const float *panels, int64_t outputs, int64_t add,
              float *out) {
  const int64_t most = std::max<int64_t>(4 * ROWS, NEAR / inputs);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first), tiles = (count + ROWS - 1) / ROWS;
    const int64_t step = (PANEL + tiles - 1) / tiles;
    for (int64_t n = 0; n < outputs;) {
      const int64_t panels_left = (outputs - n + PANEL - 1) / PANEL;
      const float *here = panels + n * inputs;
      int64_t done = 0;
      for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
        const int64_t end = count * (tile + 1) / tiles;
        as_constant<ROWS>(end - row, [&](auto M) {
          // With few rows, process several panels at once for enough independent sums.
          constexpr int P = (BUSY + 2 * M - 1) / (2 * M);
          auto multiply_panels = [&](auto number) {
            done = number;
            const float *next = here + (panels_left > done ? done : 0) * PANEL * inputs;
            multiply_tile<M, number>(x + (first + row) * inputs, inputs, here, next + tile * step * inputs, step, add,
                                     out + (first + row) * outputs + n, outputs, outputs - n);
          };
          if (P > 1 && tiles == 1 && panels_left >= P)
            multiply_panels(std::integral_constant<int, P>());
          else
            multiply_panels(std::integral_constant<int, 1>());
        });
        row = end;
      }
      n += done * PANEL;
    }
  }
}

// New tokens of one session: rows from `row` on of the step, positions from `start` on of its block.
struct Piece {
  int64_t row, count, offset, capacity, start;
};

// The shape of all heads; `group` query heads share one key-value head.
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
        as_constant<TILE>(tile, [&](auto Q) {
          attend_to<Q>(query, visible, k, v, p->capacity, dim, scratch, target, nullptr);
        });
      }
    }
}

// From (rows, heads + 2 kv heads, dim): queries times `scale` to `queries`, keys and values to their places in the
// arena. bias: added first, or null. norm: (heads + kv heads, dim) as in the decoder's norms, or null; floor: n * eps.
// turns: (positions, dim / 2) complex rotations of pairs of dimensions.
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

// Copy positions `start` to `stop` of one block (offset and capacity), in all layers, to another block. keys, values:
// the arena, with `layer` floats per layer.
void copy_block(const Heads *heads, int64_t layers, int64_t layer, int64_t source, int64_t source_capacity,
                int64_t target, int64_t target_capacity, int64_t start, int64_t stop, float *keys, float *values) {
  const int64_t dim = heads->dim, count = stop - start;
  for (int64_t l = 0; l < layers; l++, keys += layer, values += layer)
    for (int64_t head = 0; head < heads->kv_heads; head++) {
      const int64_t from = (source * heads->kv_heads + head * source_capacity) * dim;
      const int64_t to = (target * heads->kv_heads + head * target_capacity) * dim;
      for (int64_t d = 0; d < dim; d++)
        std::copy_n(keys + from + d * source_capacity + start, count, keys + to + d * target_capacity + start);
      std::copy_n(values + from + start * dim, count * dim, values + to + start * dim);
    }
}

// out, x: (rows, width). x / sqrt(sum of squares + floor) * weight.
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

// Sample a token per row of logits: the one whose interval of the cumulative distribution contains the row's draw in
// [0, 1), and its log-probability. Tokens of probability 0 are never sampled.
void sample(const float *logits, const double *draws, int64_t rows, int64_t width, int64_t *tokens, float *logprobs) {
  for (int64_t r = 0; r < rows; r++) {
    const float *x = logits + r * width;
    auto block = [&](int64_t i) {
      if (i + WIDTH <= width) return load(x + i);
      Vec rest = all(-INFINITY);
      for (int k = 0; i + k < width; k++) rest[k] = x[i + k];
      return rest;
    };
    Vec most = block(0);
    for (int64_t i = WIDTH; i < width; i += WIDTH) {
      const Vec here = block(i);
      most = here > most ? here : most;
    }
    const float top = largest(most);
    auto weights = [&](int64_t i) {
      const Vec below = block(i) - top;
      return below < -87.0f ? Vec{} : exp_of(below);
    };
    double whole = 0;
    for (int64_t i = 0; i < width; i += WIDTH) whole += sum(weights(i));
    const double target = std::fmin(draws[r] * whole, std::nextafter(whole, 0.0));  // rounding could reach the total
    double end = 0;
    int64_t chosen = 0;
    for (int64_t i = 0; i < width && end <= target; i += WIDTH) {
      const Vec here = weights(i);
      const double after = end + sum(here);
      if (after <= target && i + WIDTH < width) {
        end = after;  // the draw lies beyond this block
        continue;
      }
      for (int k = 0; k < WIDTH && end <= target; k++)
        if (here[k] > 0) {
          end += here[k];
          chosen = i + k;
        }
    }
    tokens[r] = chosen;
    logprobs[r] = x[chosen] - top - (float)std::log(whole);
  }
}

// --- training: (rows, heads, dim) for queries and outputs, (rows, kv heads, dim) for keys and values

// A branch of the previous sequence: `size` tokens, the next rows, that continue its first `before` tokens. They see
// those and, causally, each other.
struct Branch {
  int64_t before, size;
};

// Some queries of a branch: their indices, and how many positions each sees.
struct Tile {
  int count;
  int64_t at[TILE], visible[TILE];

  // The next wanted queries of head `head`, from the r-th on.
  Tile(const Heads &heads, int64_t head, const Branch &branch, int64_t row, const uint8_t *wanted, int64_t &r) {
    for (count = 0; r < branch.size * heads.group && count < TILE; r++) {
      const int64_t token = r / heads.group;
      if (wanted && !wanted[row + token]) continue;
      at[count] = ((row + token) * heads.kv_heads + head) * heads.group + r % heads.group;
      visible[count++] = branch.before + token + 1;
    }
  }
};

// capacity: of the longest sequence, a multiple of WIDTH. logsums: (rows, heads). scratch: (2 * dim + TILE) * capacity.
// wanted: flags of rows to compute, or null for all; nothing is written for the others.
void packed_attend(const Heads *heads, const Branch *branches, int64_t number, int64_t capacity, const float *queries,
                   const float *keys, const float *values, float scale, const uint8_t *wanted, float *scratch,
                   float *out, float *logsums) {
  const int64_t dim = heads->dim, kv_heads = heads->kv_heads, stride = kv_heads * dim;
  float *across = scratch, *along = across + capacity * dim, *scores = along + capacity * dim;
  for (int64_t head = 0; head < kv_heads; head++) {
    int64_t row = 0;
    for (const Branch *b = branches; b < branches + number; row += b->size, b++) {
      const int64_t from = row * stride + head * dim;
      lay_out(keys + from, b->size, stride, dim, scale, nullptr, across + b->before, capacity);
      lay_out(values + from, b->size, stride, dim, 1.0f, along + b->before * dim, nullptr, 0);
      for (int64_t r = 0; r < b->size * heads->group;) {
        const float *query[TILE];
        float *target[TILE], *logsum[TILE];
        const Tile tile(*heads, head, *b, row, wanted, r);
        if (!tile.count) break;
        for (int q = 0; q < tile.count; q++) {
          query[q] = queries + tile.at[q] * dim;
          target[q] = out + tile.at[q] * dim;
          logsum[q] = logsums + tile.at[q];
        }
        as_constant<TILE>(tile.count, [&](auto Q) {
          attend_to<Q>(query, tile.visible, across, along, capacity, dim, scores, target, logsum);
        });
      }
    }
  }
}

// Gradient of `packed_attend`. rows: `capacity` indices. scratch: (5 * dim + 2 * TILE) * capacity.
void packed_attend_back(const Heads *heads, const Branch *branches, int64_t number, int64_t capacity,
                        const float *queries, const float *keys, const float *values, float scale,
                        const uint8_t *wanted, int64_t *rows, float *scratch, const float *out, const float *logsums,
                        const float *gradient, float *queries_gradient, float *keys_gradient,
                        float *values_gradient) {
  const int64_t dim = heads->dim, kv_heads = heads->kv_heads, stride = kv_heads * dim;
  const int64_t panel = capacity * dim;
  float *keys_across = scratch, *keys_along = scratch + panel, *values_across = scratch + 2 * panel;
  float *of_keys = scratch + 3 * panel, *of_values = scratch + 4 * panel;
  const Back back = {keys_across, keys_along, values_across, of_keys, of_values, scratch + 5 * panel, capacity, dim};
  for (int64_t head = 0; head < kv_heads; head++) {
    // Write the accumulated gradients of positions from `first` on to their rows: no later branch sees these positions.
    int64_t length = 0;
    auto leave = [&](int64_t first) {
      for (int64_t t = first; t < length; t++)
        for (int64_t d = 0; d < dim; d++) {
          const int64_t at = rows[t] * stride + head * dim + d;
          keys_gradient[at] = of_keys[t * dim + d] * scale;
          values_gradient[at] = of_values[t * dim + d];
        }
    };
    int64_t row = 0;
    for (const Branch *b = branches; b < branches + number; row += b->size, b++) {
      leave(b->before);
      length = b->before + b->size;
      const int64_t from = row * stride + head * dim;
      lay_out(keys + from, b->size, stride, dim, scale, keys_along + b->before * dim, keys_across + b->before, capacity);
      lay_out(values + from, b->size, stride, dim, 1.0f, nullptr, values_across + b->before, capacity);
      for (int64_t t = b->before; t < length; t++) rows[t] = row + t - b->before;
      for (int64_t i = b->before * dim; i < length * dim; i++) of_keys[i] = of_values[i] = 0.0f;
      for (int64_t r = 0; r < b->size * heads->group;) {
        const float *query[TILE], *target[TILE], *logsum[TILE], *moved[TILE];
        float *query_moved[TILE];
        const Tile tile(*heads, head, *b, row, wanted, r);
        if (!tile.count) break;
        for (int q = 0; q < tile.count; q++) {
          query[q] = queries + tile.at[q] * dim;
          target[q] = out + tile.at[q] * dim;
          logsum[q] = logsums + tile.at[q];
          moved[q] = gradient + tile.at[q] * dim;
          query_moved[q] = queries_gradient + tile.at[q] * dim;
        }
        as_constant<TILE>(tile.count, [&](auto Q) {
          attend_back<Q>(back, query, tile.visible, target, logsum, moved, query_moved);
        });
      }
    }
    leave(0);
  }
}

// out, x: (rows, width); shares: the factor each row was multiplied by.
void rms_norm_shares(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *out,
                     float *shares) {
  for (int64_t r = 0; r < rows; r++) {
    const float *from = x + r * width;
    const float share = shares[r] = 1.0f / std::sqrt(squares(from, width) / width + eps);
    for (int64_t i = 0; i < width; i++) out[r * width + i] = from[i] * share * weight[i];
  }
}

// Gradient of `rms_norm_shares`; weight_gradient is accumulated into.
void rms_norm_back(const float *x, const float *weight, const float *shares, const float *gradient, int64_t rows,
                   int64_t width, float *x_gradient, float *weight_gradient) {
  for (int64_t r = 0; r < rows; r++) {
    const float *from = x + r * width, *moved = gradient + r * width;
    const float share = shares[r];
    Vec wide = {};
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) wide += load(moved + i) * load(weight + i) * load(from + i);
    float same = sum(wide);
    for (; i < width; i++) same += moved[i] * weight[i] * from[i];
    same *= share * share / width;
    float *to = x_gradient + r * width;
    for (i = 0; i < width; i++) {
      weight_gradient[i] += moved[i] * from[i] * share;
      to[i] = (moved[i] * weight[i] - from[i] * same) * share;
    }
  }
}

// Rotary embedding. out, x: (rows, heads, dim); cosines, sines: (rows, dim). Rotates the two halves of each head
// against each other: forward with direction 1, backward with -1.
void turn(const float *x, const float *cosines, const float *sines, float direction, int64_t rows, int64_t heads,
          int64_t dim, float *out) {
  const int64_t half = dim / 2;
  for (int64_t r = 0; r < rows; r++) {
    const float *c = cosines + r * dim, *s = sines + r * dim;
    for (int64_t h = 0; h < heads; h++) {
      const float *from = x + (r * heads + h) * dim;
      float *to = out + (r * heads + h) * dim;
      for (int64_t d = 0; d < half; d++) {
        to[d] = from[d] * c[d] - direction * from[d + half] * s[d];
        to[d + half] = from[d + half] * c[d + half] + direction * from[d] * s[d + half];
      }
    }
  }
}

// silu(gate) * up, and its gradient.
void gated_pair(const float *gate, const float *up, int64_t size, float *out) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    Vec x = load(gate + i);
    store(out + i, x / (1.0f + exp_of(-x)) * load(up + i));
  }
  for (; i < size; i++) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

void gated_pair_back(const float *gate, const float *up, const float *gradient, int64_t size, float *gate_gradient,
                     float *up_gradient) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    Vec x = load(gate + i), moved = load(gradient + i);
    Vec open = 1.0f / (1.0f + exp_of(-x));
    store(up_gradient + i, moved * x * open);
    store(gate_gradient + i, moved * load(up + i) * open * (1.0f + x * (1.0f - open)));
  }
  for (; i < size; i++) {
    const float open = 1.0f / (1.0f + std::exp(-gate[i]));
    up_gradient[i] = gradient[i] * gate[i] * open;
    gate_gradient[i] = gradient[i] * up[i] * open * (1.0f + gate[i] * (1.0f - open));
  }
}

}  // extern "C"
