// One forward of a Llama-shaped decoder, or of a draft head's layer, on a CPU, in one call. `vectors.h` has the
// instructions of the processor: AVX512-BF16, AVX-512 or AVX2.
//
// A step of a few rows takes as long as it takes to read the weights. Each phase below reads its weights once for all
// rows, and the threads meet at a barrier after each phase.
//
// Every output of a product sums its inputs in one fixed order, whatever the number of rows. Attention sums over chunks of
// the slots that a row may attend, in the order of the text, whatever the number of threads. Hence a row has the same bits
// alone, beside other rows, and as a node of a draft tree.

#include <omp.h>

#include <limits>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int CHUNK = 128;  // slots that are attended together
constexpr int64_t MOST_QUERIES = 32;  // that read a key together, unless the heads of one row are more
constexpr int SOON = 512;  // bytes between the weights that are multiplied and the weights that enter the first cache

// Panels of a tile, and the most rows of a tile of P panels. A tile multiplies `together` panels before the next ones, so
// that the sums fill the registers. Attention multiplies `QUERIES` queries with 16 keys, and their weights with two
// values. Loops over sums are unrolled: otherwise compilers put the sums into memory.
#if defined(__AVX512F__)
constexpr int PANELS = 4, MOST[] = {0, 6, 6, 0, 6}, MOST_GROUPED[] = {0, 6, 6, 0, 6};
constexpr int together(bool grouped, int rows, int panels) {
  if (!grouped) return panels;
  return VNNI ? rows > 5 ? std::min(2, panels) : panels : rows > 1 ? 1 : panels;
}
constexpr int QUERIES = 8;
#else
constexpr int PANELS = 2, MOST[] = {0, 5, 5}, MOST_GROUPED[] = {0, 6, 6};
constexpr int together(bool, int rows, int panels) { return rows > 1 ? 1 : panels; }
constexpr int QUERIES = 3;
#endif

// How W is stored. INT8 has one scale for each output. GROUPS_OF_4 and GROUPS_OF_8 have unsigned codes of 4 bits or signed
// ones of 8, as in GGUF files: w = scale · code + low, with one scale and one low for `group` inputs of an output.
enum Kind : int64_t { BF16, INT8, GROUPS_OF_4, GROUPS_OF_8 };

// W [outputs, inputs] in panels of 16 outputs.
struct Weights {
  const void* panels;
  const float *scale, *bias;  // of each output, or null; a scale where the kind is INT8
  int64_t kind, group;  // all kinds but BF16 compute in groups of 16 or 32 inputs
};

struct Layer {
  Weights qkv, o, gate_up, down;
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // or null: the first where `Call.entered` is given
  const float *o_norm, *down_norm;  // of the outputs of o and down, or null
  int64_t table;   // of `Call.tables`
  int64_t window;  // positions that a row attends, its own included; 0: all. The rows of a draft must lie within it.
};

struct Model {
  int64_t hidden, inner, heads, kv_heads, dim, layers;
  int64_t inputs;  // of the first layer's qkv
  float eps, scale;
  const Layer* layer;
  const float* final_norm;  // or null: `Call.y` is not written
  int64_t gelu;             // GELU's tanh approximation instead of SiLU
};

struct Call {
  int64_t batch, rows, span, threads;
  const int64_t *positions, *slots;  // [batch, rows]
  const bf16* (*tables)[2];          // cos and sin [positions, dim]; sin has the sign of the rotated half
  bf16* store;                       // keys, then values, of a slot
  int64_t layer_stride, sequence_stride, slot_stride;
  const bf16* mask;  // 0 where a row may attend a slot; null: all slots up to its own
  int64_t mask_sequence, mask_row;
  const bf16* entered;  // [batch * rows, inputs], what the first layer projects; null: the normed x
  float* x;             // [batch * rows, hidden], the residual stream; changed
  bf16* y;              // [batch * rows, hidden], the normed states
  bf16** taps;  // [layers + 1], where to copy the stream after so many layers, or null
};

struct Range {
  int64_t first, last;
};

Range share(int64_t count, int64_t thread, int64_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

// Receives the sums of a row for `count` panels from `panel` on. A reference, so that a product is compiled once and not
// for each of its users.
class Put {
  const void* function;
  void (*call)(const void*, int64_t, int64_t, const Vec*, int);

 public:
  template <class F>
  Put(const F& f)
      : function(&f), call([](const void* f, int64_t row, int64_t panel, const Vec* sums, int count) {
          (*static_cast<const F*>(f))(row, panel, sums, count);
        }) {}
  void operator()(int64_t row, int64_t panel, const Vec* sums, int count) const {
    call(function, row, panel, sums, count);
  }
};

// Rows that a product reads: as `Input`, or in groups of inputs, x ≈ scale · code, with the sum of each group.
struct Rows {
  const Input* values;         // [rows, inputs]
  const int8_t* codes;         // [groups, rows, group]
  const float *scales, *sums;  // [groups, rows]
  const int32_t* code_sums;    // [groups, rows]
  int64_t inputs, group, rows;
};

// sum[r][p] += the products of `inputs` inputs, with weights `at` bytes after `panels`. The panels `ahead` are fetched into
// the cache meanwhile: processors fetch on along a panel, but do not know where the next ones begin.
template <class W, int R, int P>
inline void multiply(const char* const* panels, const char* const* ahead, int64_t at, const typename W::Value* x,
                     int64_t stride, int64_t inputs, typename W::Sum (&sum)[R][P]) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < inputs; k += W::INPUTS, at += W::BYTES) {
    for (int p = 0; p < P; p++) {
      _mm_prefetch(panels[p] + at + SOON, _MM_HINT_T0);
      _mm_prefetch(ahead[p] + at, _MM_HINT_T1);
    }
    typename W::Read read[P];
    for (int p = 0; p < P; p++) read[p] = W::read(panels[p] + at);
#pragma GCC unroll 8
    for (int i = 0; i < W::INPUTS; i += W::STEP) {
      decltype(W::spread(x)) w[P];
      for (int p = 0; p < P; p++) w[p] = W::next(read[p]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const auto spread = W::spread(x + r * stride + k + i);
        for (int p = 0; p < P; p++) sum[r][p] = W::add(w[p], spread, sum[r][p]);
      }
    }
  }
}

// total[r][t] = the products of R rows from `row` on and T panels.
template <class W, int R, int T>
inline void totals_of(const char* const* panels, const char* const* ahead, const Rows& x, int64_t row,
                      Vec (&total)[R][T]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int t = 0; t < T; t++) total[r][t] = broadcast(0.f);
  if constexpr (!W::GROUPED) {
    multiply<W>(panels, ahead, 0, x.values + row * x.inputs, x.inputs, x.inputs, total);
  } else {
    int64_t offset = 0;
    for (int64_t at = row; at < x.inputs / x.group * x.rows; at += x.rows, offset += W::group_bytes(x.group)) {
      // Sums of codes are exact integers; the scales and the low of a group follow.
      Ints sum[R][T];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sum[r][t] = W::start(x.code_sums[at + r]);
      const int8_t* codes = x.codes + at * x.group;
      if (x.group == 32)
        multiply<W>(panels, ahead, offset + W::HEADER, codes, 32, 32, sum);
      else
        multiply<W>(panels, ahead, offset + W::HEADER, codes, 16, 16, sum);
#pragma GCC unroll 4
      for (int t = 0; t < T; t++) {
        const char* header = panels[t] + offset;
        Vec scale, low;
        if (W::HEADER) scale = load_fp16(header), low = load_fp16(header + W::HEADER / 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Vec factor = broadcast(x.scales[at + r]);
          if (W::HEADER) total[r][t] = fma(low, broadcast(x.sums[at + r]), total[r][t]);
          total[r][t] = fma(W::HEADER ? scale * factor : factor, W::total(sum[r][t]), total[r][t]);
        }
      }
    }
  }
}

// R rows from `row` on, for P panels from `panel` on.
template <class W, int R, int P>
void tile(const char* const* panels, const char* const* ahead, const Rows& x, int64_t row, int64_t panel,
          const Put& put) {
  constexpr int T = together(W::GROUPED, R, P);
  Vec all[R][P];
  for (int p = 0; p < P; p += T) {
    Vec total[R][T];
    totals_of<W>(panels + p, ahead + p, x, row, total);
    for (int r = 0; r < R; r++)
      for (int t = 0; t < T; t++) all[r][p + t] = total[r][t];
  }
  for (int r = 0; r < R; r++) put(row + r, panel, all[r], P);
}

// Calls f with a constant that equals `count`, which is 1 to N.
template <int N, class F>
void with_count(int64_t count, const F& f) {
  if constexpr (N > 0) {
    if (count == N)
      f(std::integral_constant<int, N>());
    else
      with_count<N - 1>(count, f);
  }
}

// Panels of W in the order in which a product computes them: as they are stored, or, if `half` is given, a panel of the
// first `half` and one of the rest in turns.
struct Order {
  const char* first;
  int64_t bytes, half;

  const char* operator()(int64_t panel) const {
    return first + (half ? panel / 2 + panel % 2 * half : panel) * bytes;
  }
};

// All rows for P panels from `panel` on.
//
// The panels are read from memory once and stay in the cache for the later tiles of rows. Each tile fetches a part of the
// panels at `next`, so that reading and computing overlap.
template <class W, int P>
void tiles(const Order& w, const Rows& x, int64_t rows, int64_t panel, int64_t next, const Put& put) {
  const char* panels[P];
  for (int p = 0; p < P; p++) panels[p] = w(panel + p);
  constexpr int most = (W::GROUPED ? MOST_GROUPED : MOST)[P];
  const int64_t count = (rows + most - 1) / most;
  for (int64_t i = 0; i < count; i++) {
    const Range part = share(rows, i, count), fetched = share(P, i, count);
    const char* ahead[P];
    for (int p = 0; p < P; p++) ahead[p] = fetched.first <= p && p < fetched.last ? w(next + p) : panels[p];
    with_count<most>(part.last - part.first, [&](auto constant) {
      tile<W, decltype(constant)::value, P>(panels, ahead, x, part.first, panel, put);
    });
  }
}

template <class W, int P>
void panels_by(const Order& w, const Rows& x, int64_t rows, int64_t& panel, int64_t last, const Put& put) {
  for (; panel + P <= last; panel += P)
    tiles<W, P>(w, x, rows, panel, panel + 2 * P <= last ? panel + P : panel, put);
}

// Rows as products read them. Each thread has its own.
const Input* as_input(const bf16* x, [[maybe_unused]] int64_t size) {
#if defined(__AVX512BF16__)
  return x;
#else
  static thread_local std::vector<float> wide;
  wide.resize(std::max<int64_t>(size + LANES, wide.size()));
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(wide.data() + i, widen(x + i));
  for (; i < size; i++) {
    const uint32_t bits = uint32_t(x[i]) << 16;
    std::memcpy(&wide[i], &bits, 4);
  }
  return wide.data();
#endif
}

// The inputs of a product with weights in groups, as codes. All threads share it: each writes a part, and reads all after a
// barrier.
class Codes {
  std::vector<int8_t> codes;
  std::vector<float> scales, sums;
  std::vector<int32_t> code_sums;

 public:
  void resize(int64_t rows, int64_t inputs) {
    codes.resize(std::max<size_t>(rows * inputs, codes.size()));
    const size_t groups = rows * inputs / LANES;  // the smallest groups have 16 inputs
    scales.resize(std::max(groups, scales.size()));
    sums.resize(std::max(groups, sums.size()));
    code_sums.resize(std::max(groups, code_sums.size()));
  }

  // Writes some rows and inputs of x [rows, inputs]; the inputs are whole groups. The largest value of a group has the
  // largest code. Each sum adds the rounded values: the low of a weight must multiply the same values as its code. A value
  // that is not finite makes its group's scale NaN.
  void write(const Weights& w, const bf16* x, int64_t rows, int64_t inputs, Range some_rows, Range some_inputs) {
    if (w.kind == BF16) return;
    constexpr float largest = std::numeric_limits<int8_t>::max();
    for (int64_t row = some_rows.first; row < some_rows.last; row++)
      for (int64_t first = some_inputs.first; first < some_inputs.last; first += w.group) {
        const bf16* values = x + row * inputs + first;
        const int64_t at = first / w.group * rows + row;
        Vec highest = broadcast(0.f), sum = broadcast(0.f);
        for (int64_t i = 0; i < w.group; i += LANES) {
          const Vec value = widen(values + i);
          highest = most(highest, most(value, broadcast(0.f) - value));
        }
        const float top = reduce_max(highest);
        const Vec factor = broadcast(top > 1e-30f ? largest / top : 0.f);  // never infinite
        for (int64_t i = 0; i < w.group; i += LANES) {
          const Vec code = nearest(widen(values + i) * factor);
          sum = sum + code;
          to_codes(codes.data() + at * w.group + i, code);
        }
        const float total = reduce_add(sum);
        scales[at] = top / largest + 0.f * total, sums[at] = scales[at] * total;
        code_sums[at] = total == total ? int32_t(total) : 0;
      }
  }

  Rows rows(const Weights& w, const bf16* x, int64_t rows, int64_t inputs) const {
    if (w.kind == BF16) return {as_input(x, rows * inputs), nullptr, nullptr, nullptr, nullptr, inputs, 0, rows};
    return {nullptr, codes.data(), scales.data(), sums.data(), code_sums.data(), inputs, w.group, rows};
  }
};

template <class W>
void product_of(const Weights& w, const Rows& x, Range range, int64_t half, const Put& put) {
  const Order order{(const char*)w.panels, W::panel_bytes(x.inputs, w.group), half};
  int64_t panel = range.first;
  if constexpr (PANELS > 2) panels_by<W, PANELS>(order, x, x.rows, panel, range.last, put);
  panels_by<W, 2>(order, x, x.rows, panel, range.last, put);
  panels_by<W, 1>(order, x, x.rows, panel, range.last, put);
}

// x Wᵀ for a range of panels in the order of `Order`.
void product(const Weights& w, const Rows& x, Range range, const Put& put, int64_t half = 0) {
  switch (w.kind) {
    case BF16: return product_of<Bf16Weights>(w, x, range, half, put);
    case INT8: return product_of<Int8Weights>(w, x, range, half, put);
    case GROUPS_OF_4: return product_of<GroupsOf4>(w, x, range, half, put);
    case GROUPS_OF_8: return product_of<GroupsOf8>(w, x, range, half, put);
  }
}

Vec scaled(Vec sum, const Weights& w, int64_t panel) {
  if (w.scale) sum = sum * load(w.scale + panel * LANES);
  return w.bias ? sum + load(w.bias + panel * LANES) : sum;
}

// x / sqrt(mean(x²) + eps) · weight, for `size` values that `values` gives, 16 at a time to `put`.
template <class Values, class Out>
void norm(Values values, const float* weight, int64_t size, float eps, Out put) {
  Vec squares = broadcast(0.f);
  for (int64_t i = 0; i < size; i += LANES) squares = fma(values(i), values(i), squares);
  const float mean = reduce_add(squares) / float(size);
  const Vec factor = broadcast(1.f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < size; i += LANES) put(i, values(i) * factor * load(weight + i));
}

void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const Vec a = widen(x + i), b = widen(x + half + i);
    narrow(x + i, fma(a, widen(cos + i), b * widen(sin + i)));
    narrow(x + half + i, fma(b, widen(cos + half + i), a * widen(sin + half + i)));
  }
}

// Slots that a row attends, in the order of the text.
struct Slots {
  const int32_t* first;
  int64_t count;

  Slots chunk(int64_t at) const { return {first + at, std::max<int64_t>(0, std::min<int64_t>(CHUNK, count - at))}; }
};

// What a query has attended: the weighted sum of the values [dim], in the order of `value_pairs`, the largest score, and
// the sum of the weights, which are relative to it.
struct Attended {
  int64_t dim;
  float *values, *top, *total;

  static int64_t size(int64_t dim) { return dim + LANES; }
  Attended(float* memory, int64_t dim) : dim(dim), values(memory), top(memory + dim), total(memory + dim + 1) {}

  void clear() {
    *top = -__builtin_inff(), *total = 0;
    std::fill(values, values + dim, 0.f);
  }
  // Adds what the query has attended in later slots.
  void add(const Attended& next) {
    const float most = *next.top <= *top ? *top : *next.top;  // NaN stays
    float own[LANES], others[LANES];
    const Vec a = exponential(broadcast(*top - most)), b = exponential(broadcast(*next.top - most));
    store(own, a), store(others, b);
    *top = most, *total = *total * own[0] + *next.total * others[0];
    for (int64_t i = 0; i < dim; i += LANES) store(values + i, fma(load(next.values + i), b, load(values + i) * a));
  }
  void write(bf16* out) const {  // 0 if the query has no slots, such as that of an ended text
    const Vec inverse = broadcast(*top == -__builtin_inff() ? 0.f : 1.f / *total);
    for (int64_t i = 0; i < dim; i += 2 * LANES)
      store_pairs(out + i, load(values + i) * inverse, load(values + i + LANES) * inverse);
  }
};

// Attention of some rows of a text to chunks of their slots, for the query heads of one key head. Each thread has its own.
class Attention {
  int64_t dim, heads, rows;
  const bf16 *keys, *values;
  int64_t stride;  // of a slot
  std::vector<const Input*> queries;
  std::vector<float> wide;      // the queries as products read them
  std::vector<uint32_t> block;  // [dim / 2, LANES] pairs of 16 keys
  std::vector<float> scores;    // [queries, CHUNK]
  std::vector<Input> weights;   // [queries, CHUNK], the exponentials of the scores
  std::vector<float> later;     // [queries] `Attended` of a chunk after the first
  float* sums;                  // [queries] `Attended` of this chunk

  Attended of(int64_t n) { return {sums + n * Attended::size(dim), dim}; }

  // Scores of queries [first, last) and the slots [at, at + 16), or as many as there are.
  void score(int64_t first, int64_t last, Slots slots, int64_t at, float scale) {
    const bf16* key[LANES];
    for (int lane = 0; lane < LANES; lane++) {
      key[lane] = keys + slots.first[std::min(at + lane, slots.count - 1)] * stride;
      const char* later = (const char*)(keys + slots.first[std::min(at + LANES + lane, slots.count - 1)] * stride);
      const char* value = (const char*)(key[lane] + (values - keys));
      for (int64_t i = 0; i < dim * 2; i += 64) _mm_prefetch(later + i, _MM_HINT_T0), _mm_prefetch(value + i, _MM_HINT_T1);
    }
    for (int64_t i = 0; i < dim; i += 2 * LANES) transpose(key, i, block.data() + i / 2 * LANES);
    for (int64_t n = first; n < last; n += QUERIES)
      with_count<QUERIES>(std::min<int64_t>(QUERIES, last - n), [&](auto constant) {
        constexpr int count = decltype(constant)::value;
        Vec sum[count];
#pragma GCC unroll 8
        for (int q = 0; q < count; q++) sum[q] = broadcast(0.f);
        for (int64_t i = 0; i < dim; i += 2) {
          const Pair pair = pairs((const bf16*)(block.data() + i / 2 * LANES));
#pragma GCC unroll 8
          for (int q = 0; q < count; q++) sum[q] = dot(pair, two_for_all(queries[n + q] + i), sum[q]);
        }
        for (int q = 0; q < count; q++) store(scores.data() + (n + q) * CHUNK + at, sum[q] * broadcast(scale));
      });
  }

  // The weights of query n and `count` slots.
  void weigh(int64_t n, int64_t count) {
    float* row = scores.data() + n * CHUNK;
    const int64_t width = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < width; j++) row[j] = -__builtin_inff();
    Vec highest = broadcast(-__builtin_inff()), total = broadcast(0.f);
    for (int64_t j = 0; j < width; j += LANES) highest = most(highest, load(row + j));
    const float top = reduce_max(highest);
    for (int64_t j = 0; j < width; j += LANES) {
      const Vec e = exponential(load(row + j) - broadcast(top));
      to_input(weights.data() + n * CHUNK + j, e);
      total = total + e;
    }
    *of(n).top = top, *of(n).total = reduce_add(total);
  }

  // Adds the values of slots [from, to) for queries [first, last), two slots at a time.
  void add_values(int64_t first, int64_t last, Slots slots, int64_t from, int64_t to) {
    for (int64_t n = first; n < last; n += QUERIES)
      with_count<QUERIES>(std::min<int64_t>(QUERIES, last - n), [&](auto constant) {
        constexpr int count = decltype(constant)::value;
        for (int64_t i = 0; i < dim; i += 2 * LANES) {
          float* out = of(n).values + i;
          const int64_t next = Attended::size(dim);
          Vec sum[count][2];
#pragma GCC unroll 8
          for (int q = 0; q < count; q++) sum[q][0] = load(out + q * next), sum[q][1] = load(out + q * next + LANES);
          for (int64_t j = from; j < to; j += 2) {  // the weight of a slot past the last one is 0
            const bf16* one = values + slots.first[j] * stride + i;
            const bf16* two = values + slots.first[std::min(j + 1, to - 1)] * stride + i;
            Pair v[2];
            value_pairs(one, two, v);
#pragma GCC unroll 8
            for (int q = 0; q < count; q++) {
              const Pair p = two_for_all(weights.data() + (n + q) * CHUNK + j);
              sum[q][0] = dot(v[0], p, sum[q][0]), sum[q][1] = dot(v[1], p, sum[q][1]);
            }
          }
#pragma GCC unroll 8
          for (int q = 0; q < count; q++) store(out + q * next, sum[q][0]), store(out + q * next + LANES, sum[q][1]);
        }
      });
  }

 public:
  // Rows of `head_count` queries each, [rows, row_stride], and the keys and values of their text.
  void begin(int64_t head_dim, int64_t head_count, int64_t row_count, const bf16* q, int64_t row_stride,
             const bf16* all_keys, const bf16* all_values, int64_t slot_stride) {
    dim = head_dim, heads = head_count, rows = row_count;
    keys = all_keys, values = all_values, stride = slot_stride;
    const int64_t count = rows * heads;
    queries.resize(count), block.resize(dim / 2 * LANES), scores.resize(count * CHUNK), weights.resize(count * CHUNK);
    later.resize(count * Attended::size(dim));
#if !defined(__AVX512BF16__)
    wide.resize(count * dim);
#endif
    for (int64_t n = 0; n < count; n++) {
      const bf16* from = q + n / heads * row_stride + n % heads * dim;
#if defined(__AVX512BF16__)
      queries[n] = from;
#else
      float* to = wide.data() + n * dim;
      for (int64_t i = 0; i < dim; i += LANES) store(to + i, widen(from + i));
      queries[n] = to;
#endif
    }
  }

  // Attends a chunk of each row's slots and writes it to `out`, `Attended` [rows, heads], or adds it if it is not the first.
  // Rows read the slots together that they have in common at the beginning of the chunk.
  void attend(const Slots* chunks, float scale, bool first_chunk, float* out) {
    sums = first_chunk ? out : later.data();
    int64_t shared = chunks[0].count;
    for (int64_t r = 1; r < rows; r++) {
      const int64_t both = std::min(shared, chunks[r].count);
      shared = std::mismatch(chunks[0].first, chunks[0].first + both, chunks[r].first).first - chunks[0].first;
    }
    if (rows > 1) shared -= shared % LANES;
    for (int64_t at = 0; at < shared; at += LANES) score(0, rows * heads, chunks[0], at, scale);
    for (int64_t n = 0; n < rows * heads; n++) of(n).clear();
    for (int64_t r = 0; r < rows; r++) {
      const int64_t first = r * heads, last = first + heads, count = chunks[r].count;
      for (int64_t at = shared; at < count; at += LANES) score(first, last, chunks[r], at, scale);
      for (int64_t n = first; n < last && count; n++) weigh(n, count);
    }
    add_values(0, rows * heads, chunks[0], 0, shared);
    for (int64_t r = 0; r < rows; r++)
      if (shared < chunks[r].count) add_values(r * heads, (r + 1) * heads, chunks[r], shared, chunks[r].count);
    for (int64_t n = 0; n < rows * heads && !first_chunk; n++)
      if (chunks[n / heads].count) Attended(out + n * Attended::size(dim), dim).add(of(n));
  }
};

// The slots that each row may attend, in order.
struct Lists {
  std::vector<int32_t> slots;
  std::vector<int64_t> counts;

  void fill(const Call& call) {
    slots.resize(call.batch * call.rows * call.span);
    counts.resize(call.batch * call.rows);
    for (int64_t n = 0; n < call.batch * call.rows; n++) {
      const int64_t b = n / call.rows, t = n % call.rows;
      int32_t* list = slots.data() + n * call.span;
      int64_t count = 0;
      if (call.mask == nullptr) {
        for (; count <= call.slots[n]; count++) list[count] = int32_t(count);
      } else {
        const bf16* mask = call.mask + b * call.mask_sequence + t * call.mask_row;
        for (int64_t j = 0; j < call.span; j++)
          if ((mask[j] & 0x7fff) == 0) list[count++] = int32_t(j);
      }
      counts[n] = count;
    }
  }

  // The slots that row n attends in a layer with this window; 0: all.
  Slots of(const Call& call, int64_t n, int64_t window) const {
    const int32_t *list = slots.data() + n * call.span, *end = list + counts[n];
    if (window) list = std::upper_bound(list, end, call.positions[n] - window);
    return {list, end - list};
  }
};

struct Scratch {
  std::vector<bf16> qkv, attended, inner;
  std::vector<float> delta, sums;
  Codes codes, inner_codes;  // of the inputs of qkv, o and gate_up, and of those of down
  Lists lists;
};

// The `count` largest of a row's log probabilities, largest first, of equal ones the first; NaN counts as −inf.
void largest(const float* logits, int64_t size, int64_t count, float* gains, int64_t* index) {
  const Vec lowest = broadcast(-__builtin_inff());
  const auto at = [&](int64_t i) {  // `most` returns the second where one is NaN
    if (size - i >= LANES) return most(load(logits + i), lowest);
    float part[LANES];
    std::fill(std::copy(logits + i, logits + size, part), part + LANES, -__builtin_inff());
    return most(load(part), lowest);
  };
  std::fill(gains, gains + count, -__builtin_inff());
  std::fill(index, index + count, 0);
  float last = -__builtin_inff();
  int64_t found = 0;
  for (int64_t i = 0; i < size; i += LANES) {
    const Vec x = at(i);
    uint32_t better = above(x, broadcast(last));
    if (better == 0 && found >= count) continue;
    if (found < count) better = size - i >= LANES ? 0xffff : (1u << (size - i)) - 1;
    float values[LANES];
    store(values, x);
    for (; better; better &= better - 1) {
      const int64_t lane = __builtin_ctz(better);
      const float value = values[lane];
      int64_t place = std::min(found, count);
      while (place > 0 && gains[place - 1] < value) place--;
      if (place >= count) continue;
      for (int64_t j = std::min(found, count - 1); j > place; j--) gains[j] = gains[j - 1], index[j] = index[j - 1];
      gains[place] = value, index[place] = i + lane, found++;
    }
    if (found >= count) last = gains[count - 1];
  }
  const float top = gains[0];
  Vec total = broadcast(0.f);
  for (int64_t i = 0; i < size; i += LANES)
    total = total + exponential(at(i) - broadcast(top));
  const float lse = top + __builtin_logf(reduce_add(total));
  for (int64_t j = 0; j < count; j++) gains[j] -= lse;
}

// Logits [at, at + LANES) of a row. Lanes beyond its end are −inf.
Vec logits_at(const bf16* row, int64_t at, int64_t size) {
  if (size - at >= LANES) return widen(row + at);
  bf16 part[LANES];
  std::fill(std::copy(row + at, row + size, part), part + LANES, bf16(0xff80));
  return widen(part);
}

// The largest logit of a row, without NaN.
float largest_of(const bf16* row, int64_t size) {
  constexpr int MANY = 4;  // comparisons that do not wait for each other
  Vec best[MANY];
  for (Vec& one : best) one = broadcast(-__builtin_inff());
  int64_t at = 0;
  for (; at + MANY * LANES <= size; at += MANY * LANES)
    for (int k = 0; k < MANY; k++) best[k] = most(widen(row + at + k * LANES), best[k]);  // `best` where one is NaN
  for (; at < size; at += LANES) best[0] = most(logits_at(row, at, size), best[0]);
  return reduce_max(most(most(best[0], best[1]), most(best[2], best[3])));
}

// The first place of a row's largest logit.
int64_t argmax(const bf16* row, int64_t size) {
  const float best = largest_of(row, size);
  const Vec below = broadcast(__builtin_nextafterf(best, -__builtin_inff()));
  for (int64_t at = 0; at < size; at += LANES)
    if (const uint32_t found = above(logits_at(row, at, size), below)) return at + __builtin_ctz(found);
  return 0;  // all are −inf or NaN
}

// The first place at which the cumulative weight exceeds `threshold`, at most the last place with weight. Subtracts the
// sum before it from `threshold`.
int64_t inverse_cdf(const float* weight, int64_t size, double& threshold) {
  double sum = 0, before = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < size; i++) {
    if (weight[i] > 0) last = i, before = sum;
    sum += weight[i];
    if (sum > threshold) break;
  }
  threshold -= before;
  return last;
}

// SIDE inputs of an output lie side by side.
template <int SIDE, class T>
void pack(const T* w, int64_t outputs, int64_t inputs, T* out) {
#pragma omp parallel for
  for (int64_t panel = 0; panel < (outputs + LANES - 1) / LANES; panel++)
    for (int64_t k = 0; k < inputs; k += SIDE)
      for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t i = 0; i < SIDE; i++) {
          const int64_t o = panel * LANES + lane;
          out[((panel * inputs + k) * LANES) + SIDE * lane + i] = o < outputs ? w[o * inputs + k + i] : T(0);
        }
}

}  // namespace

extern "C" {

// W [outputs, inputs] in panels. `out` has room for the outputs rounded up to a multiple of 16.
void specctl_pack(const bf16* w, int64_t outputs, int64_t inputs, bf16* out) { pack<2>(w, outputs, inputs, out); }

void specctl_pack_int8(const int8_t* w, int64_t outputs, int64_t inputs, int8_t* out) {
  pack<4>(w, outputs, inputs, out);
}

// Codes [outputs, inputs] with their scales and lows [outputs, inputs / group] in panels. `out` is zero at first.
void specctl_pack_groups(const int8_t* codes, const float* scale, const float* low, int64_t outputs, int64_t inputs,
                         int64_t group, int64_t bits, char* out) {
  const int64_t header = GroupsOf8::HEADER, bytes = header + group * LANES * bits / 8, groups = inputs / group;
#pragma omp parallel for
  for (int64_t panel = 0; panel < (outputs + LANES - 1) / LANES; panel++)
    for (int64_t o = panel * LANES; o < std::min(outputs, (panel + 1) * LANES); o++)
      for (int64_t g = 0; g < groups; g++) {
        const int64_t lane = o % LANES;
        char* at = out + (panel * groups + g) * bytes;
        const uint16_t halves[] = {_cvtss_sh(scale[o * groups + g], 0), _cvtss_sh(low[o * groups + g], 0)};
        std::memcpy(at + 2 * lane, halves, 2), std::memcpy(at + header / 2 + 2 * lane, halves + 1, 2);
        const int8_t* from = codes + o * inputs + g * group;
        at += header;
        for (int64_t k = 0; k < group; k++)
          if (bits == 8)
            at[k / 4 * 4 * LANES + lane * 4 + k % 4] = from[k];
          else
            at[k / 8 * 4 * LANES + lane * 4 + k % 4] |= char(from[k] << k % 8 / 4 * 4);
      }
}

// y [rows, outputs] = x [rows, inputs] Wᵀ + bias.
void specctl_product(const Weights& w, const bf16* x, int64_t rows, int64_t outputs, int64_t inputs, bf16* y,
                     int64_t threads) {
  static thread_local Codes own;
  Codes& codes = own;  // of the calling thread, for all threads
  codes.resize(rows, inputs);
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
    codes.write(w, x, rows, inputs, share(rows, thread, team), {0, inputs});
#pragma omp barrier
    const Range range = share((outputs + LANES - 1) / LANES, thread, team);
    product(w, codes.rows(w, x, rows, inputs), range, [&](int64_t row, int64_t panel, const Vec* sums, int panels) {
      for (int p = 0; p < panels; p++) {
        alignas(32) bf16 all[LANES];
        narrow(all, scaled(sums[p], w, panel + p));
        const int64_t first = (panel + p) * LANES;
        std::memcpy(y + row * outputs + first, all, sizeof(bf16) * std::min<int64_t>(LANES, outputs - first));
      }
    });
  }
}

// The same product in fp32, `logits`, and of each row the `count` largest log probabilities and their places.
void specctl_candidates(const Weights& w, const bf16* x, int64_t rows, int64_t outputs, int64_t inputs, float* logits,
                        int64_t count, float* gains, int64_t* index, int64_t threads) {
  static thread_local Codes own;
  Codes& codes = own;
  codes.resize(rows, inputs);
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
    codes.write(w, x, rows, inputs, share(rows, thread, team), {0, inputs});
#pragma omp barrier
    product(w, codes.rows(w, x, rows, inputs), share((outputs + LANES - 1) / LANES, thread, team),
            [&](int64_t row, int64_t panel, const Vec* sums, int panels) {
              for (int p = 0; p < panels; p++) {
                float values[LANES];
                store(values, scaled(sums[p], w, panel + p));
                const int64_t first = (panel + p) * LANES;
                std::copy(values, values + std::min<int64_t>(LANES, outputs - first), logits + row * outputs + first);
              }
            });
#pragma omp barrier
    const Range mine = share(rows, thread, team);
    for (int64_t n = mine.first; n < mine.last; n++)
      largest(logits + n * outputs, outputs, count, gains + n * count, index + n * count);
  }
}

// The first place of the largest of each row of logits [rows, size].
void specctl_argmax(const bf16* logits, int64_t rows, int64_t size, int64_t* index) {
  for (int64_t n = 0; n < rows; n++) index[n] = argmax(logits + n * size, size);
}

// Of each row of logits [rows, size], 1 if it is a distribution: no NaN, and a finite maximum. Otherwise 0.
void specctl_finite(const bf16* logits, int64_t rows, int64_t size, uint8_t* out) {
  for (int64_t n = 0; n < rows; n++) {
    const bf16* row = logits + n * size;
    bool nan = false;
    for (int64_t i = 0; i < size; i++) nan |= (row[i] & 0x7fff) > 0x7f80;
    out[n] = !nan && __builtin_isfinite(largest_of(row, size));
  }
}

// Samples from softmax(logits · inv_temp) at the uniform u: first a block of the vocabulary, then a token in it. −1 if the
// largest logit is not finite. NaN has no weight.
int64_t specctl_sample(const bf16* row, int64_t size, float inv_temp, double u) {
  constexpr int64_t BLOCK = 256;
  static thread_local std::vector<float> sums;
  sums.resize((size + BLOCK - 1) / BLOCK);
  const float best = largest_of(row, size);
  if (!__builtin_isfinite(best)) return -1;
  const auto weight = [&](int64_t at) {
    return exponential((logits_at(row, at, size) - broadcast(best)) * broadcast(inv_temp));
  };
  double total = 0;
  for (size_t block = 0; block < sums.size(); block++) {
    Vec sum = broadcast(0.f);
    for (int64_t at = block * BLOCK, end = std::min<int64_t>(at + BLOCK, size); at < end; at += LANES)
      sum = sum + weight(at);
    total += sums[block] = reduce_add(sum);
  }
  double threshold = u * total;
  const int64_t first = BLOCK * inverse_cdf(sums.data(), sums.size(), threshold);
  float weights[BLOCK] = {};
  for (int64_t at = first, end = std::min<int64_t>(first + BLOCK, size); at < end; at += LANES)
    store(weights + at - first, weight(at));
  return first + inverse_cdf(weights, BLOCK, threshold);
}

// All layers of `m` on the rows of `c`.
void specctl_forward(const Model& m, const Call& c) {
  static thread_local Scratch scratch;
  const int64_t rows = c.batch * c.rows, group = m.heads / m.kv_heads, all = m.heads + 2 * m.kv_heads;
  const int64_t width = all * m.dim;
  scratch.lists.fill(c);
  scratch.qkv.resize(rows * width);
  scratch.attended.resize(rows * m.heads * m.dim);
  scratch.inner.resize(rows * m.inner);
  scratch.codes.resize(rows, std::max({m.inputs, m.hidden, m.heads * m.dim}));
  scratch.inner_codes.resize(rows, m.inner);
  const Lists& lists = scratch.lists;
  const int64_t chunks = (c.span + CHUNK - 1) / CHUNK, size = Attended::size(m.dim);
  const int64_t most_queries = std::max(MOST_QUERIES, group);
  const bool apart = rows * m.kv_heads < 4 * c.threads && chunks > 1;  // threads share the chunks of a row, too
  scratch.sums.resize((apart ? rows * m.heads * chunks : c.threads * most_queries) * size);
  float* all_sums = scratch.sums.data();
  bf16 *qkv = scratch.qkv.data(), *attended = scratch.attended.data(), *inner = scratch.inner.data(), *y = c.y;
  if (m.layer[0].o_norm) scratch.delta.resize(rows * m.hidden);
  float *x = c.x, *delta = scratch.delta.data();
  Codes &codes = scratch.codes, &inner_codes = scratch.inner_codes;
  // Adds a product to the stream. If it has a norm, `add_normed` does so.
  const auto added = [&](const Weights& w, const float* own_norm) {
    return [=, &w](int64_t row, int64_t panel, const Vec* sums, int count) {
      float* at = (own_norm ? delta : x) + row * m.hidden + panel * LANES;
      for (int p = 0; p < count; p++, at += LANES) {
        const Vec sum = scaled(sums[p], w, panel + p);
        store(at, own_norm ? sum : load(at) + sum);
      }
    };
  };
#pragma omp parallel num_threads(c.threads)
  {
    // Shares are by thread number; a team that is smaller than asked for still does all of them.
    const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
    const auto mine = [&](int64_t count) { return share(count, thread, team); };
    // The norm of the stream, as the input of `next` if that is given.
    const auto normed = [&](const float* weight, const Weights* next) {
      const Range range = mine(rows);
      for (int64_t n = range.first; n < range.last; n++) {
        const float* row = x + n * m.hidden;
        bf16* out = y + n * m.hidden;
        norm([&](int64_t i) { return load(row + i); }, weight, m.hidden, m.eps,
             [&](int64_t i, Vec value) { narrow(out + i, value); });
      }
      if (next) codes.write(*next, y, rows, m.hidden, range, {0, m.hidden});
    };
    const auto add_normed = [&](const float* weight) {
      const Range range = weight ? mine(rows) : Range{0, 0};
      for (int64_t n = range.first; n < range.last; n++) {
        float *row = x + n * m.hidden, *more = delta + n * m.hidden;
        norm([&](int64_t i) { return load(more + i); }, weight, m.hidden, m.eps,
             [&](int64_t i, Vec value) { store(row + i, load(row + i) + value); });
      }
    };
    const auto tapped = [&](int64_t layers) {
      const Range range = mine(rows);
      if (bf16* out = c.taps[layers])
        for (int64_t i = range.first * m.hidden; i < range.last * m.hidden; i += LANES) narrow(out + i, load(x + i));
    };
    const auto begin = [&](int64_t l, int64_t n, int64_t count, int64_t kv) -> Attention& {
      static thread_local Attention attention;
      const bf16* keys = c.store + l * c.layer_stride + n / c.rows * c.sequence_stride + kv * m.dim;
      attention.begin(m.dim, group, count, qkv + n * width + kv * group * m.dim, width, keys, keys + m.kv_heads * m.dim,
                      c.slot_stride);
      return attention;
    };
    const auto slots_of = [&](int64_t l, int64_t n, int64_t chunk) {
      return lists.of(c, n, m.layer[l].window).chunk(chunk * CHUNK);
    };
    const auto finish = [&](int64_t l, int64_t n, int64_t head, float* sums) {
      Attended(sums, m.dim).write(attended + (n * m.heads + head) * m.dim);
      codes.write(m.layer[l].o, attended, rows, m.heads * m.dim, {n, n + 1}, {head * m.dim, (head + 1) * m.dim});
    };
    // A thread attends successive rows of a text together.
    const auto attend_rows = [&](int64_t l) {
      const Range items = mine(rows * m.kv_heads);  // by text, key head and row
      float* sums = all_sums + thread * most_queries * size;
      for (int64_t i = items.first, count; i < items.last; i += count) {
        const int64_t row = i % c.rows, kv = i / c.rows % m.kv_heads, n = i / c.rows / m.kv_heads * c.rows + row;
        count = std::min({items.last - i, c.rows - row, most_queries / group});
        Attention& attention = begin(l, n, count, kv);
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
          Slots slots[MOST_QUERIES];
          for (int64_t r = 0; r < count; r++) slots[r] = slots_of(l, n + r, chunk);
          attention.attend(slots, m.scale, chunk == 0, sums);
        }
        for (int64_t k = 0; k < count * group; k++) finish(l, n + k / group, kv * group + k % group, sums + k * size);
      }
    };
    // A thread attends one chunk of a row after the other.
    const auto attend_chunks = [&](int64_t l) {
      const Range items = mine(rows * m.kv_heads * chunks);  // by row, key head and chunk
      for (int64_t i = items.first; i < items.last; i++) {
        const int64_t n = i / chunks / m.kv_heads;
        const Slots slots = slots_of(l, n, i % chunks);
        begin(l, n, 1, i / chunks % m.kv_heads).attend(&slots, m.scale, true, all_sums + i * group * size);
      }
#pragma omp barrier
      const Range heads = mine(rows * m.heads);
      for (int64_t i = heads.first; i < heads.last; i++) {
        float* sums = all_sums + (i / group * chunks * group + i % group) * size;
        for (int64_t k = 1; k < chunks; k++) Attended(sums, m.dim).add({sums + k * group * size, m.dim});
        finish(l, i / m.heads, i % m.heads, sums);
      }
    };
    tapped(0);
    if (c.entered)
      codes.write(m.layer[0].qkv, c.entered, rows, m.inputs, mine(rows), {0, m.inputs});
    else
      normed(m.layer[0].input_norm, &m.layer[0].qkv);
#pragma omp barrier
    for (int64_t l = 0; l < m.layers; l++) {
      const Layer& layer = m.layer[l];
      const bool first = l == 0 && c.entered;
      const bf16* in = first ? c.entered : y;
      product(layer.qkv, codes.rows(layer.qkv, in, rows, first ? m.inputs : m.hidden), mine(width / LANES),
              [&](int64_t row, int64_t panel, const Vec* sums, int count) {
                bf16* at = qkv + row * width + panel * LANES;
                for (int p = 0; p < count; p++) narrow(at + p * LANES, scaled(sums[p], layer.qkv, panel + p));
              });
#pragma omp barrier
      const Range heads = mine(rows * all);
      for (int64_t i = heads.first; i < heads.last; i++) {
        const int64_t n = i / all, head = i % all;
        bf16* at = qkv + i * m.dim;
        if (head < m.heads + m.kv_heads) {
          if (const float* weight = head < m.heads ? layer.q_norm : layer.k_norm)
            norm([&](int64_t k) { return widen(at + k); }, weight, m.dim, m.eps,
                 [&](int64_t k, Vec value) { narrow(at + k, value); });
          const auto& table = c.tables[layer.table];
          rotate(at, table[0] + c.positions[n] * m.dim, table[1] + c.positions[n] * m.dim, m.dim);
        }
        if (head >= m.heads) {
          bf16* slot = c.store + l * c.layer_stride + n / c.rows * c.sequence_stride + c.slots[n] * c.slot_stride;
          std::memcpy(slot + (head - m.heads) * m.dim, at, m.dim * sizeof(bf16));
        }
      }
#pragma omp barrier
      apart ? attend_chunks(l) : attend_rows(l);
#pragma omp barrier
      product(layer.o, codes.rows(layer.o, attended, rows, m.heads * m.dim), mine(m.hidden / LANES),
              added(layer.o, layer.o_norm));
#pragma omp barrier
      add_normed(layer.o_norm);
      normed(layer.post_norm, &layer.gate_up);
#pragma omp barrier
      const int64_t ups = m.inner / LANES;  // the panels of `up` follow those of `gate`
      const int64_t whole = layer.down.kind == BF16 ? 1 : layer.down.group / LANES;  // panels of a group of down's inputs
      const Range groups = mine(ups / whole), gates = {groups.first * whole, groups.last * whole};
      product(
          layer.gate_up, codes.rows(layer.gate_up, y, rows, m.hidden), {2 * gates.first, 2 * gates.last},
          [&](int64_t row, int64_t panel, const Vec* sums, int count) {
            for (int p = 0; p < count; p += 2) {
              const int64_t at = (panel + p) / 2;
              const Vec gate = scaled(sums[p], layer.gate_up, at), up = scaled(sums[p + 1], layer.gate_up, at + ups);
              // GELU's approximation x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2 is SiLU with another exponent.
              const Vec power = m.gelu ? gate * fma(gate * gate, broadcast(0.0713548163f), broadcast(1.59576912f)) : gate;
              const Vec active = gate / (broadcast(1.f) + exponential(broadcast(0.f) - power));
              narrow(inner + row * m.inner + at * LANES, active * up);
            }
          },
          ups);
      inner_codes.write(layer.down, inner, rows, m.inner, {0, rows}, {gates.first * LANES, gates.last * LANES});
#pragma omp barrier
      product(layer.down, inner_codes.rows(layer.down, inner, rows, m.inner), mine(m.hidden / LANES),
              added(layer.down, layer.down_norm));
#pragma omp barrier
      add_normed(layer.down_norm);
      if (l + 1 < m.layers) {
        tapped(l + 1);
        normed(m.layer[l + 1].input_norm, &m.layer[l + 1].qkv);
      } else if (m.final_norm) {
        normed(m.final_norm, nullptr);
      }
#pragma omp barrier
    }
    const Range range = mine(rows);
    if (bf16* last = c.taps[m.layers])  // of transformers the last hidden state is the normed one
      std::memcpy(last + range.first * m.hidden, y + range.first * m.hidden,
                  (range.last - range.first) * m.hidden * sizeof(bf16));
  }
}

}  // extern "C"
