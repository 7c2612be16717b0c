// One forward of a Llama-shaped decoder on a CPU with AVX512-BF16, in one call.
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
constexpr int MOST = 12;    // rows of a tile: with two panels their sums fill the registers
constexpr float FLOOR = -87.f;  // exp of less is 0 here

struct Layer {
  const bf16 *qkv, *o, *gate_up, *down;  // packed by `specctl_pack`
  const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // or null
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two or null
};

struct Model {
  int64_t hidden, inner, heads, kv_heads, dim, layers;
  float eps, scale;
  const Layer* layer;
  const float* final_norm;
};

struct Call {
  int64_t batch, rows, span, threads;
  const int64_t *positions, *slots;  // [batch, rows]
  const bf16 *cos, *sin;             // [positions, dim]; sin has the sign of the rotated half
  bf16* store;                       // keys, then values, of a slot
  int64_t layer_stride, sequence_stride, slot_stride;
  const bf16* mask;  // 0 where a row may attend a slot; null: all slots up to its own
  int64_t mask_sequence, mask_row;
  float* x;     // [batch * rows, hidden], the residual stream; changed
  bf16* y;      // [batch * rows, hidden], the normed states
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

struct Range {
  int64_t first, last;
};

Range share(int64_t count, int64_t thread, int64_t threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

// Sums of R rows for P panels. A panel is [inputs / 2][16 outputs][2]: a register has two inputs of 16 outputs.
template <int R, int P>
inline void sums(const bf16* const* panels, const bf16* x, int64_t inputs, __m512 (&sum)[R][P]) {
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) sum[r][p] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2) {
    __m512bh w[P];
    for (int p = 0; p < P; p++) w[p] = (__m512bh)_mm512_loadu_si512(panels[p] + k * LANES);
    for (int r = 0; r < R; r++) {
      int32_t two;
      std::memcpy(&two, x + r * inputs + k, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(two);
      for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], w[p], both);
    }
  }
}

// `R` rows from `row` on, for P panels from `panel` on. `places` tells where a panel of W lies, `put` takes its sums.
template <int R, int P, class Places, class Put>
void tile(const bf16* w, const bf16* x, int64_t inputs, int64_t row, int64_t panel, Places places, Put put) {
  const bf16* panels[P];
  for (int p = 0; p < P; p++) panels[p] = w + places(panel, p) * inputs * LANES;
  __m512 sum[R][P];
  sums<R, P>(panels, x + row * inputs, inputs, sum);
  for (int r = 0; r < R; r++) put(row + r, panel, sum[r]);
}

template <int P, class Places, class Put>
void tiles(const bf16* w, const bf16* x, int64_t rows, int64_t inputs, int64_t panel, Places places, Put put) {
  constexpr int most = P <= 2 ? MOST : MOST / 2;
  const int64_t count = (rows + most - 1) / most;
  for (int64_t i = 0; i < count; i++) {
    const Range part = share(rows, i, count);
#define SPECCTL_ROWS(R)                                                                                  \
  case R:                                                                                                \
    if constexpr (R <= most) tile<R, P>(w, x, inputs, part.first, panel, places, put);                   \
    break;
    switch (part.last - part.first) {
      SPECCTL_ROWS(1) SPECCTL_ROWS(2) SPECCTL_ROWS(3) SPECCTL_ROWS(4) SPECCTL_ROWS(5) SPECCTL_ROWS(6)
      SPECCTL_ROWS(7) SPECCTL_ROWS(8) SPECCTL_ROWS(9) SPECCTL_ROWS(10) SPECCTL_ROWS(11) SPECCTL_ROWS(12)
    }
#undef SPECCTL_ROWS
  }
}

// x Wᵀ for a range of panels; `put(row, panel, sum)` gets 16 outputs.
template <class Put>
void product(const bf16* w, const bf16* x, int64_t rows, int64_t inputs, Range range, Put put) {
  const auto next = [](int64_t panel, int p) { return panel + p; };
  int64_t panel = range.first;
  if (rows <= MOST / 2)
    for (; panel + 4 <= range.last; panel += 4)
      tiles<4>(w, x, rows, inputs, panel, next, [&](int64_t row, int64_t at, __m512* sum) {
        for (int p = 0; p < 4; p++) put(row, at + p, sum[p]);
      });
  for (; panel + 2 <= range.last; panel += 2)
    tiles<2>(w, x, rows, inputs, panel, next, [&](int64_t row, int64_t at, __m512* sum) {
      for (int p = 0; p < 2; p++) put(row, at + p, sum[p]);
    });
  for (; panel < range.last; panel++)
    tiles<1>(w, x, rows, inputs, panel, next, [&](int64_t row, int64_t at, __m512* sum) { put(row, at, sum[0]); });
}

__m512 biased(__m512 sum, const float* bias, int64_t panel) {
  return bias ? _mm512_add_ps(sum, _mm512_loadu_ps(bias + panel * LANES)) : sum;
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

// Attention of Q queries that share a key head, over `count` slots in the order of `list`.
template <int Q>
void attend(const bf16* q, const bf16* keys, const bf16* values, int64_t stride, const int32_t* list, int64_t count,
            int64_t dim, float scale, float* scores, bf16* out) {
  const int64_t width = (count + LANES - 1) / LANES * LANES;
  if (count == 0) {  // a row of a text that has ended
    std::memset(out, 0, Q * dim * sizeof(bf16));
    return;
  }
  for (int64_t j = 0; j < count; j++) {
    const bf16* key = keys + list[j] * stride;
    __m512 sum[Q];
    for (int g = 0; g < Q; g++) sum[g] = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += 2 * LANES) {
      const __m512bh k = (__m512bh)_mm512_loadu_si512(key + i);
      for (int g = 0; g < Q; g++)
        sum[g] = _mm512_dpbf16_ps(sum[g], (__m512bh)_mm512_loadu_si512(q + g * dim + i), k);
    }
    for (int g = 0; g < Q; g++) scores[g * width + j] = _mm512_reduce_add_ps(sum[g]) * scale;
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

}  // namespace

extern "C" {

// W [outputs, inputs] in panels. `out` has room for the outputs rounded up to a multiple of 16.
void specctl_pack(const bf16* w, int64_t outputs, int64_t inputs, bf16* out) {
#pragma omp parallel for
  for (int64_t panel = 0; panel < (outputs + LANES - 1) / LANES; panel++)
    for (int64_t k = 0; k < inputs; k += 2)
      for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t i = 0; i < 2; i++) {
          const int64_t o = panel * LANES + lane;
          out[((panel * inputs + k) * LANES) + 2 * lane + i] = o < outputs ? w[o * inputs + k + i] : 0;
        }
}

// y [rows, outputs] = x [rows, inputs] Wᵀ + bias.
void specctl_product(const bf16* w, const float* bias, const bf16* x, int64_t rows, int64_t outputs, int64_t inputs,
                     bf16* y, int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t thread = 0; thread < threads; thread++) {
      const Range range = share((outputs + LANES - 1) / LANES, thread, threads);
      product(w, x, rows, inputs, range, [&](int64_t row, int64_t panel, __m512 sum) {
        alignas(32) bf16 all[LANES];
        narrow(all, biased(sum, bias, panel));
        const int64_t first = panel * LANES;
        std::memcpy(y + row * outputs + first, all, sizeof(bf16) * std::min<int64_t>(LANES, outputs - first));
      });
    }
  }
}

void specctl_forward(const Model* model, const Call* call) {
  static thread_local Scratch scratch;
  const Model& m = *model;
  const Call& c = *call;
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
  const auto added = [&](const float* bias) {
    return [=](int64_t row, int64_t panel, __m512 sum) {
      float* at = x + row * m.hidden + panel * LANES;
      _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), biased(sum, bias, panel)));
    };
  };
#pragma omp parallel num_threads(c.threads)
  {
    // Shares are by thread number; a team that is smaller than asked for still does all of them.
    int64_t team = 1, thread = 0;
#ifdef _OPENMP
    team = omp_get_num_threads(), thread = omp_get_thread_num();
#endif
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
    normed(m.layer[0].input_norm);
#pragma omp barrier
    for (int64_t l = 0; l < m.layers; l++) {
      const Layer& layer = m.layer[l];
      product(layer.qkv, y, rows, m.hidden, mine(width / LANES), [&](int64_t row, int64_t panel, __m512 sum) {
        narrow(qkv + row * width + panel * LANES, biased(sum, layer.qkv_bias, panel));
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
        const int64_t n = i / m.kv_heads, kv = i % m.kv_heads;
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
      product(layer.o, attended, rows, m.heads * m.dim, mine(m.hidden / LANES), added(layer.o_bias));
#pragma omp barrier
      normed(layer.post_norm);
#pragma omp barrier
      const Range gates = mine(m.inner / LANES);
      const auto both = [&](int64_t panel, int p) { return panel + p * (m.inner / LANES); };
      for (int64_t panel = gates.first; panel < gates.last; panel++)
        tiles<2>(layer.gate_up, y, rows, m.hidden, panel, both, [&](int64_t row, int64_t at, __m512* sum) {
          const __m512 gate = biased(sum[0], layer.gate_up_bias, at);
          const __m512 up = biased(sum[1], layer.gate_up_bias, at + m.inner / LANES);
          const __m512 one = _mm512_set1_ps(1.f);
          const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
          narrow(inner + row * m.inner + at * LANES, _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(one, e)), up));
        });
#pragma omp barrier
      product(layer.down, inner, rows, m.inner, mine(m.hidden / LANES), added(layer.down_bias));
#pragma omp barrier
      if (l + 1 < m.layers) tapped(l + 1);
      normed(l + 1 < m.layers ? m.layer[l + 1].input_norm : m.final_norm);
#pragma omp barrier
    }
    const Range range = mine(rows);
    if (bf16* last = c.taps[m.layers])  // of transformers the last hidden state is the normed one
      std::memcpy(last + range.first * m.hidden, y + range.first * m.hidden,
                  (range.last - range.first) * m.hidden * sizeof(bf16));
  }
}

}  // extern "C"
