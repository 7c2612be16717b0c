// One forward of a Llama-shaped decoder, or of a draft head's layer, on a CPU with AVX512-BF16, in one call.
//
// A step of a few rows takes as long as it takes to read the weights. Each phase below reads its weights once for all
// rows, and the threads meet at a barrier after each phase.
//
// Every output of a product sums its inputs in one fixed order, whatever the number of rows. Attention sums over the
// slots that a row may attend, in the order of the text. Hence a row has the same bits alone, beside other rows, and as
// a node of a draft tree.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;
constexpr int LANES = 16;   // fp32 values in a register, and outputs in a panel
constexpr int SHARED = 4;   // query heads that read a key together
constexpr int MOST = 6;     // rows of a tile: with four panels their sums fill the registers
constexpr float FLOOR = -87.f;  // exp of less is 0 here

// W [outputs, inputs] packed by `specctl_pack` (bf16) or `specctl_pack_int8`.
struct Weights {
  const void* panels;
  const float *scale, *bias;  // of each output, or null; a scale where the panels are int8
};

struct Layer {
  Weights qkv, o, gate_up, down;
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // or null: the first where `Call.entered` is given
};

struct Model {
  int64_t hidden, inner, heads, kv_heads, dim, layers;
  int64_t inputs;  // of the first layer's qkv
  int64_t int8;    // all weights are int8, or none
  float eps, scale;
  const Layer* layer;
  const float* final_norm;  // or null: `Call.y` is not written
};

struct Call {
  int64_t batch, rows, span, threads;
  const int64_t *positions, *slots;  // [batch, rows]
  const bf16 *cos, *sin;             // [positions, dim]; sin has the sign of the rotated half
  bf16* store;                       // keys, then values, of a slot
  int64_t layer_stride, sequence_stride, slot_stride;
  const bf16* mask;  // 0 where a row may attend a slot; null: all slots up to its own
  int64_t mask_sequence, mask_row;
  const bf16* entered;  // [batch * rows, inputs], what the first layer projects; null: the normed x
  float* x;             // [batch * rows, hidden], the residual stream; changed
  bf16* y;              // [batch * rows, hidden], the normed states
  bf16** taps;  // [layers + 1], where to copy the stream after so many layers, or null
};

__m512 widen(const bf16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

void narrow(bf16* out, __m512 x) { _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(x)); }

// exp(x) for x <= 88, relative error 2e-7 (the polynomial of Cephes' expf); 0 below FLOOR.
__m512 exponential(__m512 x) {
  const __mmask16 large = _mm512_cmp_ps_mask(x, _mm512_set1_ps(FLOOR), _CMP_GE_OQ);
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(FLOOR)), _mm512_set1_ps(88.f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r), _mm512_set1_ps(1.f));
  return _mm512_maskz_mov_ps(large, _mm512_scalef_ps(p, n));
}

// Two inputs of 16 outputs.
__m512bh pairs(const bf16* w) { return (__m512bh)_mm512_loadu_si512(w); }

__m512bh pairs(const int8_t* w) {
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w + 1)));
  return _mm512_cvtne2ps_pbh(high, low);
}

struct Range {
  int64_t first, last;
};

Range share(int64_t count, int64_t thread, int64_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

// R rows from `row` on, for P panels; `put` takes the sums. A panel is [inputs / 2][16 outputs][2]: a register has two
// inputs of 16 outputs. The two panels `ahead` are fetched into the cache meanwhile.
template <int R, int P, class T, class Put>
void tile(const T* const* panels, const T* const* ahead, const bf16* x, int64_t inputs, int64_t row, Put put) {
  x += row * inputs;
  __m512 sum[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sum[r][p] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2) {
    for (int a = 0; a < 2; a++) _mm_prefetch((const char*)(ahead[a] + k * LANES), _MM_HINT_T1);
    __m512bh w[P];
    for (int p = 0; p < P; p++) w[p] = pairs(panels[p] + k * LANES);
    for (int r = 0; r < R; r++) {
      int32_t two;
      std::memcpy(&two, x + r * inputs + k, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
      for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], w[p], both);
    }
  }
  for (int r = 0; r < R; r++) put(row + r, sum[r]);
}

// All rows for P panels from `panel` on. `places` tells where a panel of W lies.
//
// The panels are read from memory once and stay in the cache for the later tiles of rows. These compute and read nothing,
// so each fetches a part of the panels at `next`: reading and computing overlap.
template <int P, class T, class Places, class Put>
void tiles(const T* w, const bf16* x, int64_t rows, int64_t inputs, int64_t panel, int64_t next, Places places,
           Put put) {
  const T* panels[P];
  for (int p = 0; p < P; p++) panels[p] = w + places(panel, p) * inputs * LANES;
  const int64_t count = (rows + MOST - 1) / MOST;
  for (int64_t i = 0; i < count; i++) {
    const Range part = share(rows, i, count), fetched = share(P, i, count);
    const T* ahead[2] = {panels[0], panels[0]};
    if (count > 1)
      for (int a = 0; a < 2 && fetched.first + a < fetched.last; a++)
        ahead[a] = w + places(next, int(fetched.first) + a) * inputs * LANES;
#define SPECCTL_ROWS(R)                                            \
  case R:                                                          \
    tile<R, P>(panels, ahead, x, inputs, part.first, put);         \
    break;
    switch (part.last - part.first) {
      SPECCTL_ROWS(1) SPECCTL_ROWS(2) SPECCTL_ROWS(3) SPECCTL_ROWS(4) SPECCTL_ROWS(5) SPECCTL_ROWS(6)
    }
#undef SPECCTL_ROWS
  }
}

// x Wᵀ for a range of panels; `put(row, panel, sum)` gets 16 outputs.
template <class T, class Put>
void product(const T* w, const bf16* x, int64_t rows, int64_t inputs, Range range, Put put) {
  const auto follow = [](int64_t panel, int p) { return panel + p; };
  int64_t panel = range.first;
  const auto some = [&](auto tiled, int count) {
    for (; panel + count <= range.last; panel += count)
      tiled(panel, panel + 2 * count <= range.last ? panel + count : panel,
            [&](int64_t row, __m512* sum) { for (int p = 0; p < count; p++) put(row, panel + p, sum[p]); });
  };
  some([&](int64_t at, int64_t next, auto put) { tiles<4>(w, x, rows, inputs, at, next, follow, put); }, 4);
  some([&](int64_t at, int64_t next, auto put) { tiles<2>(w, x, rows, inputs, at, next, follow, put); }, 2);
  some([&](int64_t at, int64_t next, auto put) { tiles<1>(w, x, rows, inputs, at, next, follow, put); }, 1);
}

__m512 scaled(__m512 sum, const Weights& w, int64_t panel) {
  if (w.scale) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(w.scale + panel * LANES));
  return w.bias ? _mm512_add_ps(sum, _mm512_loadu_ps(w.bias + panel * LANES)) : sum;
}

// x / sqrt(mean(x²) + eps) · weight, for `size` values that `load` gives.
template <class Load>
void norm(Load load, const float* weight, int64_t size, float eps, bf16* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += LANES) squares = _mm512_fmadd_ps(load(i), load(i), squares);
  const float mean = _mm512_reduce_add_ps(squares) / float(size);
  const __m512 factor = _mm512_set1_ps(1.f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < size; i += LANES)
    narrow(out + i, _mm512_mul_ps(_mm512_mul_ps(load(i), factor), _mm512_loadu_ps(weight + i)));
}

void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const __m512 a = widen(x + i), b = widen(x + half + i);
    narrow(x + i, _mm512_fmadd_ps(a, widen(cos + i), _mm512_mul_ps(b, widen(sin + i))));
    narrow(x + half + i, _mm512_fmadd_ps(b, widen(cos + half + i), _mm512_mul_ps(a, widen(sin + half + i))));
  }
}

// The totals of 16 registers, each in the same order of additions.
__m512 totals(const __m512 (&x)[LANES]) {
  __m512 four[4];  // of four registers each, side by side: a total in each quarter
  for (int i = 0; i < 4; i++) {
    const __m512 *a = x + 4 * i, low = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1])),
                 high = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const __m512d l = _mm512_castps_pd(low), h = _mm512_castps_pd(high);
    four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(l, h)), _mm512_castpd_ps(_mm512_unpackhi_pd(l, h)));
  }
  const auto quarters = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return quarters(quarters(four[0], four[1]), quarters(four[2], four[3]));
}

// Attention of Q queries that share a key head, over `count` slots in the order of `list`.
template <int Q>
void attend(const bf16* q, const bf16* keys, const bf16* values, int64_t stride, const int32_t* list, int64_t count,
            int64_t dim, float scale, float* scores, bf16* out) {
  const int64_t width = (count + LANES - 1) / LANES * LANES;
  if (count == 0) {  // a row of a text that has ended
    std::memset(out, 0, Q * dim * sizeof(bf16));
    return;
  }
  for (int64_t j = 0; j < count; j += LANES) {
    const bf16* key[LANES];
    for (int lane = 0; lane < LANES; lane++) key[lane] = keys + list[std::min(j + lane, count - 1)] * stride;
    for (int g = 0; g < Q; g++) {
      __m512 sum[LANES];
      for (int lane = 0; lane < LANES; lane++) sum[lane] = _mm512_setzero_ps();
      for (int64_t i = 0; i < dim; i += 2 * LANES) {
        const __m512bh part = pairs(q + g * dim + i);
        for (int lane = 0; lane < LANES; lane++)
          sum[lane] = _mm512_dpbf16_ps(sum[lane], part, pairs(key[lane] + i));
      }
      _mm512_storeu_ps(scores + g * width + j, _mm512_mul_ps(totals(sum), _mm512_set1_ps(scale)));
    }
  }
  float inverse[Q];
  for (int g = 0; g < Q; g++) {
    float* row = scores + g * width;
    for (int64_t j = count; j < width; j++) row[j] = -__builtin_inff();
    __m512 most = _mm512_loadu_ps(row);
    for (int64_t j = LANES; j < width; j += LANES) most = _mm512_max_ps(most, _mm512_loadu_ps(row + j));
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 total = _mm512_setzero_ps();
    for (int64_t j = 0; j < width; j += LANES) {
      const __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(row + j), top));
      _mm512_storeu_ps(row + j, e);
      total = _mm512_add_ps(total, e);
    }
    inverse[g] = 1.f / _mm512_reduce_add_ps(total);
  }
  for (int64_t i = 0; i < dim; i += 2 * LANES) {
    __m512 sum[Q][2];
    for (int g = 0; g < Q; g++) sum[g][0] = sum[g][1] = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j++) {
      const bf16* value = values + list[j] * stride + i;
      const __m512 v[2] = {widen(value), widen(value + LANES)};
      for (int g = 0; g < Q; g++) {
        const __m512 p = _mm512_set1_ps(scores[g * width + j]);
        for (int d = 0; d < 2; d++) sum[g][d] = _mm512_fmadd_ps(p, v[d], sum[g][d]);
      }
    }
    for (int g = 0; g < Q; g++)
      for (int d = 0; d < 2; d++)
        narrow(out + g * dim + i + d * LANES, _mm512_mul_ps(sum[g][d], _mm512_set1_ps(inverse[g])));
  }
}

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
};

struct Scratch {
  std::vector<bf16> qkv, attended, inner;
  std::vector<float> scores;
  Lists lists;
};

void copied(bf16* out, const float* x, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) narrow(out + i, _mm512_loadu_ps(x + i));
}


// The `count` largest of a row's log probabilities, largest first, of equal ones the first; NaN counts as −inf.
void largest(const float* logits, int64_t size, int64_t count, float* gains, int64_t* index) {
  const __m512 least = _mm512_set1_ps(-__builtin_inff());
  const auto at = [&](int64_t i) {  // max_ps returns the second where one is NaN
    const int64_t left = size - i;
    const __mmask16 there = left >= LANES ? 0xffff : (1u << left) - 1;
    return _mm512_max_ps(_mm512_mask_loadu_ps(least, there, logits + i), least);
  };
  std::fill(gains, gains + count, -__builtin_inff());
  std::fill(index, index + count, 0);
  float last = -__builtin_inff();
  int64_t found = 0;
  for (int64_t i = 0; i < size; i += LANES) {
    const __m512 x = at(i);
    __mmask16 better = _mm512_cmp_ps_mask(x, _mm512_set1_ps(last), _CMP_GT_OQ);
    if (better == 0 && found >= count) continue;
    if (found < count) better = size - i >= LANES ? 0xffff : (1u << (size - i)) - 1;
    alignas(64) float values[LANES];
    _mm512_store_ps(values, x);
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
  __m512 total = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += LANES)
    total = _mm512_add_ps(total, exponential(_mm512_sub_ps(at(i), _mm512_set1_ps(top))));
  const float lse = top + __builtin_logf(_mm512_reduce_add_ps(total));
  for (int64_t j = 0; j < count; j++) gains[j] -= lse;
}

template <class T>
void candidates(const Weights& w, const bf16* x, int64_t rows, int64_t outputs, int64_t inputs, float* logits,
                int64_t count, float* gains, int64_t* index, int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
    product((const T*)w.panels, x, rows, inputs, share((outputs + LANES - 1) / LANES, thread, team),
            [&](int64_t row, int64_t panel, __m512 sum) {
              const int64_t left = outputs - panel * LANES;
              _mm512_mask_storeu_ps(logits + row * outputs + panel * LANES,
                                    left >= LANES ? 0xffff : (1u << left) - 1, scaled(sum, w, panel));
            });
#pragma omp barrier
    const Range mine = share(rows, thread, team);
    for (int64_t n = mine.first; n < mine.last; n++)
      largest(logits + n * outputs, outputs, count, gains + n * count, index + n * count);
  }
}

template <class T>
void plain_product(const Weights& w, const bf16* x, int64_t rows, int64_t outputs, int64_t inputs, bf16* y,
                   int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
    const Range range = share((outputs + LANES - 1) / LANES, omp_get_thread_num(), omp_get_num_threads());
    product((const T*)w.panels, x, rows, inputs, range, [&](int64_t row, int64_t panel, __m512 sum) {
      alignas(32) bf16 all[LANES];
      narrow(all, scaled(sum, w, panel));
      const int64_t first = panel * LANES;
      std::memcpy(y + row * outputs + first, all, sizeof(bf16) * std::min<int64_t>(LANES, outputs - first));
    });
  }
}

template <class T>
void pack(const T* w, int64_t outputs, int64_t inputs, T* out) {
#pragma omp parallel for
  for (int64_t panel = 0; panel < (outputs + LANES - 1) / LANES; panel++)
    for (int64_t k = 0; k < inputs; k += 2)
      for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t i = 0; i < 2; i++) {
          const int64_t o = panel * LANES + lane;
          out[((panel * inputs + k) * LANES) + 2 * lane + i] = o < outputs ? w[o * inputs + k + i] : T(0);
        }
}

template <class T>
void forward(const Model& m, const Call& c) {
  static thread_local Scratch scratch;
  const int64_t rows = c.batch * c.rows, group = m.heads / m.kv_heads, all = m.heads + 2 * m.kv_heads;
  const int64_t width = all * m.dim, wide = (c.span + LANES - 1) / LANES * LANES;
  scratch.lists.fill(c);
  scratch.qkv.resize(rows * width);
  scratch.attended.resize(rows * m.heads * m.dim);
  scratch.inner.resize(rows * m.inner);
  scratch.scores.resize(c.threads * SHARED * wide);
  bf16 *qkv = scratch.qkv.data(), *attended = scratch.attended.data(), *inner = scratch.inner.data(), *y = c.y;
  float *x = c.x, *scores = scratch.scores.data();
  const Lists& lists = scratch.lists;
  const auto added = [&](const Weights& w) {
    return [=, &w](int64_t row, int64_t panel, __m512 sum) {
      float* at = x + row * m.hidden + panel * LANES;
      _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), scaled(sum, w, panel)));
    };
  };
#pragma omp parallel num_threads(c.threads)
  {
    // Shares are by thread number; a team that is smaller than asked for still does all of them.
    const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
    const auto mine = [&](int64_t count) { return share(count, thread, team); };
    const auto normed = [&](const float* weight) {
      const Range range = mine(rows);
      for (int64_t n = range.first; n < range.last; n++) {
        const float* row = x + n * m.hidden;
        norm([&](int64_t i) { return _mm512_loadu_ps(row + i); }, weight, m.hidden, m.eps, y + n * m.hidden);
      }
    };
    const auto tapped = [&](int64_t layers) {
      const Range range = mine(rows);
      if (c.taps[layers])
        copied(c.taps[layers] + range.first * m.hidden, x + range.first * m.hidden,
               (range.last - range.first) * m.hidden);
    };
    tapped(0);
    if (!c.entered) normed(m.layer[0].input_norm);
#pragma omp barrier
    for (int64_t l = 0; l < m.layers; l++) {
      const Layer& layer = m.layer[l];
      const bool first = l == 0 && c.entered;
      product((const T*)layer.qkv.panels, first ? c.entered : y, rows, first ? m.inputs : m.hidden,
              mine(width / LANES), [&](int64_t row, int64_t panel, __m512 sum) {
                narrow(qkv + row * width + panel * LANES, scaled(sum, layer.qkv, panel));
              });
#pragma omp barrier
      const Range heads = mine(rows * all);
      for (int64_t i = heads.first; i < heads.last; i++) {
        const int64_t n = i / all, head = i % all;
        bf16* at = qkv + i * m.dim;
        if (head < m.heads + m.kv_heads) {
          if (const float* weight = head < m.heads ? layer.q_norm : layer.k_norm)
            norm([&](int64_t k) { return widen(at + k); }, weight, m.dim, m.eps, at);
          rotate(at, c.cos + c.positions[n] * m.dim, c.sin + c.positions[n] * m.dim, m.dim);
        }
        if (head >= m.heads) {
          bf16* slot = c.store + l * c.layer_stride + n / c.rows * c.sequence_stride + c.slots[n] * c.slot_stride;
          std::memcpy(slot + (head - m.heads) * m.dim, at, m.dim * sizeof(bf16));
        }
      }
#pragma omp barrier
      const Range items = mine(rows * m.kv_heads);
      for (int64_t i = items.first; i < items.last; i++) {
        // The rows of a text one after the other, for one key head: its keys stay in the cache.
        const int64_t kv = i / c.rows % m.kv_heads, n = i / (c.rows * m.kv_heads) * c.rows + i % c.rows;
        const bf16* keys = c.store + l * c.layer_stride + n / c.rows * c.sequence_stride + kv * m.dim;
        const bf16* values = keys + m.kv_heads * m.dim;
        for (int64_t g = 0; g < group; g += SHARED) {
          const int64_t head = kv * group + g;
          const auto run = [&](auto attend) {
            attend(qkv + n * width + head * m.dim, keys, values, c.slot_stride, lists.slots.data() + n * c.span,
                   lists.counts[n], m.dim, m.scale, scores + thread * SHARED * wide,
                   attended + (n * m.heads + head) * m.dim);
          };
          switch (std::min<int64_t>(SHARED, group - g)) {
            case 1: run(attend<1>); break;
            case 2: run(attend<2>); break;
            case 3: run(attend<3>); break;
            case 4: run(attend<4>); break;
          }
        }
      }
#pragma omp barrier
      product((const T*)layer.o.panels, attended, rows, m.heads * m.dim, mine(m.hidden / LANES), added(layer.o));
#pragma omp barrier
      normed(layer.post_norm);
#pragma omp barrier
      const Range gates = mine(m.inner / LANES);
      const int64_t ups = m.inner / LANES;  // the panels of `up` follow those of `gate`
      const auto* gate_up = (const T*)layer.gate_up.panels;
      const auto gated = [&](int64_t row, int64_t at, __m512 gate, __m512 up) {
        gate = scaled(gate, layer.gate_up, at), up = scaled(up, layer.gate_up, at + ups);
        const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.f), e));
        narrow(inner + row * m.inner + at * LANES, _mm512_mul_ps(silu, up));
      };
      int64_t panel = gates.first;
      for (; panel + 2 <= gates.last; panel += 2)
        tiles<4>(
            gate_up, y, rows, m.hidden, panel, std::min(panel + 2, gates.last - 2),
            [&](int64_t at, int p) { return at + p / 2 + p % 2 * ups; },
            [&](int64_t row, __m512* sum) {
              gated(row, panel, sum[0], sum[1]), gated(row, panel + 1, sum[2], sum[3]);
            });
      for (; panel < gates.last; panel++)
        tiles<2>(
            gate_up, y, rows, m.hidden, panel, panel, [&](int64_t at, int p) { return at + p * ups; },
            [&](int64_t row, __m512* sum) { gated(row, panel, sum[0], sum[1]); });
#pragma omp barrier
      product((const T*)layer.down.panels, inner, rows, m.inner, mine(m.hidden / LANES), added(layer.down));
#pragma omp barrier
      if (l + 1 < m.layers) tapped(l + 1);
      const float* norm_weight = l + 1 < m.layers ? m.layer[l + 1].input_norm : m.final_norm;
      if (norm_weight) normed(norm_weight);
#pragma omp barrier
    }
    const Range range = mine(rows);
    if (bf16* last = c.taps[m.layers])  // of transformers the last hidden state is the normed one
      std::memcpy(last + range.first * m.hidden, y + range.first * m.hidden,
                  (range.last - range.first) * m.hidden * sizeof(bf16));
  }
}

}  // namespace

extern "C" {

// W [outputs, inputs] in panels. `out` has room for the outputs rounded up to a multiple of 16.
void specctl_pack(const bf16* w, int64_t outputs, int64_t inputs, bf16* out) { pack(w, outputs, inputs, out); }

void specctl_pack_int8(const int8_t* w, int64_t outputs, int64_t inputs, int8_t* out) {
  pack(w, outputs, inputs, out);
}

// y [rows, outputs] = x [rows, inputs] Wᵀ + bias.
void specctl_product(const Weights* w, const bf16* x, int64_t rows, int64_t outputs, int64_t inputs, bf16* y,
                     int64_t threads) {
  (w->scale ? plain_product<int8_t> : plain_product<bf16>)(*w, x, rows, outputs, inputs, y, threads);
}

// The same product in fp32, `logits`, and of each row the `count` largest log probabilities and their places.
void specctl_candidates(const Weights* w, const bf16* x, int64_t rows, int64_t outputs, int64_t inputs, float* logits,
                        int64_t count, float* gains, int64_t* index, int64_t threads) {
  (w->scale ? candidates<int8_t> : candidates<bf16>)(*w, x, rows, outputs, inputs, logits, count, gains, index,
                                                      threads);
}

void specctl_forward(const Model* model, const Call* call) {
  (model->int8 ? forward<int8_t> : forward<bf16>)(*model, *call);
}

}  // extern "C"
