// Sixteen fp32 values: one register with AVX-512, two with AVX2. All instructions that differ between processors are
// here. Sums of bf16 products are in fp32 everywhere.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;
constexpr int LANES = 16;       // fp32 values in a `Vec`, and outputs in a panel
constexpr float FLOOR = -87.f;  // exp of less is 0 here

#if defined(__AVX512F__)

using Vec = __m512;

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* x) { return _mm512_loadu_ps(x); }
inline void store(float* out, Vec x) { _mm512_storeu_ps(out, x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec least(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec most(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where one is NaN
inline uint32_t above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, 0); }
inline Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
// x, but 0 where `at` is below FLOOR or NaN.
inline Vec zero_below_floor(Vec x, Vec at) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(at, broadcast(FLOOR), _CMP_GE_OQ), x);
}
inline Vec widen(const bf16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

// out[k][lane] = pair k of the 16 pairs of bf16 values from `at` on of 16 rows.
inline void transpose(const bf16* const* rows, int64_t at, uint32_t* out) {
  __m512i x[LANES], y[LANES];
  for (int i = 0; i < LANES; i++) x[i] = _mm512_loadu_si512(rows[i] + at);
  for (int i = 0; i < LANES; i += 2)
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  for (int i = 0; i < LANES; i += 4)
    for (int k = 0; k < 2; k++)
      x[i + 2 * k] = _mm512_unpacklo_epi64(y[i + k], y[i + 2 + k]),
                x[i + 2 * k + 1] = _mm512_unpackhi_epi64(y[i + k], y[i + 2 + k]);
  // x[4 i + k] has pair 4 q + k of rows 4 i to 4 i + 3 in its quarter q.
  for (int k = 0; k < 4; k++) {
    const __m512i a = _mm512_shuffle_i32x4(x[k], x[4 + k], 0x44), b = _mm512_shuffle_i32x4(x[k], x[4 + k], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(x[8 + k], x[12 + k], 0x44), d = _mm512_shuffle_i32x4(x[8 + k], x[12 + k], 0xee);
    _mm512_storeu_si512(out + k * LANES, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(out + (4 + k) * LANES, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_storeu_si512(out + (8 + k) * LANES, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(out + (12 + k) * LANES, _mm512_shuffle_i32x4(b, d, 0xdd));
  }
}

#else

struct Vec {
  __m256 low, high;
};

inline Vec operator+(Vec a, Vec b) { return {a.low + b.low, a.high + b.high}; }
inline Vec operator-(Vec a, Vec b) { return {a.low - b.low, a.high - b.high}; }
inline Vec operator*(Vec a, Vec b) { return {a.low * b.low, a.high * b.high}; }
inline Vec operator/(Vec a, Vec b) { return {a.low / b.low, a.high / b.high}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline void store(float* out, Vec x) { _mm256_storeu_ps(out, x.low), _mm256_storeu_ps(out + 8, x.high); }
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec least(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Vec most(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline uint32_t above(Vec a, Vec b) {
  const auto half = [](__m256 a, __m256 b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); };
  return half(a.low, b.low) | half(a.high, b.high) << 8;
}
inline Vec nearest(Vec x) {
  return {_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec times_power_of_two(Vec x, Vec n) {  // for -126 <= n <= 127
  const auto power = [](__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  };
  return x * Vec{power(n.low), power(n.high)};
}
inline float reduce_add(Vec x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float reduce_max(Vec x) {
  float values[LANES];
  store(values, x);
  return *std::max_element(values, values + LANES);
}
// x, but 0 where `at` is below FLOOR or NaN.
inline Vec zero_below_floor(Vec x, Vec at) {
  const auto half = [](__m256 x, __m256 at) {
    return _mm256_and_ps(_mm256_cmp_ps(at, _mm256_set1_ps(FLOOR), _CMP_GE_OQ), x);
  };
  return {half(x.low, at.low), half(x.high, at.high)};
}
inline __m256 widen_half(const bf16* x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16));
}
inline Vec widen(const bf16* x) { return {widen_half(x), widen_half(x + 8)}; }

// out[k][lane] = pair k of the 16 pairs of bf16 values from `at` on of 16 rows.
inline void transpose(const bf16* const* rows, int64_t at, uint32_t* out) {
  for (int first = 0; first < LANES; first += 8)
    for (int pair = 0; pair < LANES; pair += 8) {
      __m256i x[8], y[8];
      for (int i = 0; i < 8; i++) x[i] = _mm256_loadu_si256((const __m256i*)(rows[first + i] + at + 2 * pair));
      for (int i = 0; i < 8; i += 2)
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
      for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++)
          x[i + 2 * k] = _mm256_unpacklo_epi64(y[i + k], y[i + 2 + k]),
                    x[i + 2 * k + 1] = _mm256_unpackhi_epi64(y[i + k], y[i + 2 + k]);
      for (int k = 0; k < 4; k++) {
        const auto to = [&](int row) { return (__m256i*)(out + (pair + row) * LANES + first); };
        _mm256_storeu_si256(to(k), _mm256_permute2x128_si256(x[k], x[4 + k], 0x20));
        _mm256_storeu_si256(to(4 + k), _mm256_permute2x128_si256(x[k], x[4 + k], 0x31));
      }
    }
}

#endif

// Two inputs of 16 outputs, and their products. `Input` is the type of the rows that a product reads: with bf16
// instructions they stay bf16, otherwise each product widens them once.
#if defined(__AVX512BF16__)

using Pair = __m512bh;
using Input = bf16;

inline void narrow(bf16* out, Vec x) { _mm256_storeu_si256((__m256i*)out, (__m256i)_mm512_cvtneps_pbh(x)); }
inline Pair pairs(const bf16* w) { return (__m512bh)_mm512_loadu_si512(w); }
inline Pair two_for_all(const bf16* x) {
  int32_t two;
  std::memcpy(&two, x, 4);
  return (__m512bh)_mm512_set1_epi32(two);
}
inline Vec dot(Pair a, Pair b, Vec sum) { return _mm512_dpbf16_ps(sum, a, b); }
inline void to_input(Input* out, Vec x) { narrow(out, x); }
// Pairs of 32 bf16 values of two rows, in an order that `store_pairs` reverses.
inline void value_pairs(const bf16* one, const bf16* two, Pair (&out)[2]) {
  const __m512i a = _mm512_loadu_si512(one), b = _mm512_loadu_si512(two);
  out[0] = (Pair)_mm512_unpacklo_epi16(a, b), out[1] = (Pair)_mm512_unpackhi_epi16(a, b);
}
inline void store_pairs(bf16* out, Vec low, Vec high) {
  const __m512i a = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  narrow(out, _mm512_permutex2var_ps(low, a, high));
  narrow(out + LANES, _mm512_permutex2var_ps(low, _mm512_add_epi32(a, _mm512_set1_epi32(8)), high));
}

#else

struct Pair {
  Vec even, odd;
};
using Input = float;

inline Pair two_for_all(const float* x) { return {broadcast(x[0]), broadcast(x[1])}; }
inline Vec dot(Pair a, Pair b, Vec sum) { return fma(a.odd, b.odd, fma(a.even, b.even, sum)); }
inline void to_input(Input* out, Vec x) { store(out, x); }
inline void value_pairs(const bf16* one, const bf16* two, Pair (&out)[2]) {
  out[0] = {widen(one), widen(two)}, out[1] = {widen(one + LANES), widen(two + LANES)};
}

#if defined(__AVX512F__)

inline void narrow(bf16* out, Vec x) {
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, half)), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0))));
}
inline Pair pairs(const bf16* w) {
  const __m512i both = _mm512_loadu_si512(w);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))))};
}

#else

inline __m256i narrow_half(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1), half = _mm256_set1_epi32(0x7fff);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, half)), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
inline void narrow(bf16* out, Vec x) {
  const __m256i mixed = _mm256_packus_epi32(narrow_half(x.low), narrow_half(x.high));
  _mm256_storeu_si256((__m256i*)out, _mm256_permute4x64_epi64(mixed, 0xd8));
}
struct Halves {
  __m256 even, odd;
};
inline Halves halves(const bf16* w) {
  const __m256i both = _mm256_loadu_si256((const __m256i*)w);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))))};
}
inline Pair pairs(const bf16* w) {
  const Halves low = halves(w), high = halves(w + LANES);
  return {{low.even, high.even}, {low.odd, high.odd}};
}

#endif
#endif

#if !defined(__AVX512BF16__)
inline void store_pairs(bf16* out, Vec first, Vec second) { narrow(out, first), narrow(out + LANES, second); }
#endif

// Sixteen int32 sums; as factors, four bytes in each of the 16 places. `dot_bytes` multiplies bytes without a sign and
// bytes with one. `dot_signed` multiplies bytes with signs, from `signed_factor` and a row; with VNNI, its sums begin at
// `BIAS` times the sum of the row's bytes.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif
constexpr int32_t BIAS = VNNI ? -128 : 0;

#if defined(__AVX512F__)

using Ints = __m512i;

inline Ints for_all(int32_t x) { return _mm512_set1_epi32(x); }
inline Vec to_float(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Vec load_fp16(const char* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
inline Ints load_ints(const char* at) { return _mm512_loadu_si512(at); }
inline Ints low_nibbles(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
inline void to_codes(int8_t* out, Vec x) { _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }

#if defined(__AVX512VNNI__)

inline Ints dot_bytes(Ints a, Ints b, Ints sum) { return _mm512_dpbusd_epi32(sum, a, b); }
inline Ints finish(Ints sum) { return sum; }
inline Ints signed_factor(Ints x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }  // x + 128
inline Ints dot_signed(Ints a, Ints b, Ints sum) { return dot_bytes(a, b, sum); }

#else

// Sums have 16 bits until `finish`: enough for the 32 inputs of a group if the first factor has four bits
// (8 · 2 · 15 · 127 < 2¹⁵).
inline Ints dot_bytes(Ints a, Ints b, Ints sum) { return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b)); }
inline Ints finish(Ints sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
inline Ints signed_factor(Ints x) { return x; }
inline Ints dot_signed(Ints a, Ints b, Ints sum) {
  const Ints turned = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
  return _mm512_add_epi32(sum, finish(_mm512_maddubs_epi16(_mm512_abs_epi8(a), turned)));
}

#endif

#else

struct Ints {
  __m256i low, high;
};

inline Ints for_all(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Vec to_float(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Vec load_fp16(const char* at) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at + 1))};
}
inline Ints load_ints(const char* at) {
  return {_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)at + 1)};
}
inline Ints low_nibbles(Ints x) {
  return {_mm256_and_si256(x.low, _mm256_set1_epi8(15)), _mm256_and_si256(x.high, _mm256_set1_epi8(15))};
}
inline Ints high_nibbles(Ints x) { return low_nibbles({_mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)}); }
inline void to_codes(int8_t* out, Vec x) {
  const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
  const __m256i codes = _mm256_permute4x64_epi64(mixed, 0xd8);
  _mm_storeu_si128((__m128i*)out, _mm_packs_epi16(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)));
}

#if defined(__AVXVNNI__)

inline Ints dot_bytes(Ints a, Ints b, Ints sum) {
  return {_mm256_dpbusd_avx_epi32(sum.low, a.low, b.low), _mm256_dpbusd_avx_epi32(sum.high, a.high, b.high)};
}
inline Ints finish(Ints sum) { return sum; }
inline Ints signed_factor(Ints x) {
  const __m256i half = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(x.low, half), _mm256_xor_si256(x.high, half)};
}
inline Ints dot_signed(Ints a, Ints b, Ints sum) { return dot_bytes(a, b, sum); }

#else

// As with AVX-512. In assembler: g++ would compute all products of a tile before it adds any, and run out of registers.
inline __m256i dot_bytes_half(__m256i a, __m256i b, __m256i sum) {
  __m256i product;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
  return sum;
}
inline Ints dot_bytes(Ints a, Ints b, Ints sum) {
  return {dot_bytes_half(a.low, b.low, sum.low), dot_bytes_half(a.high, b.high, sum.high)};
}
inline Ints finish(Ints sum) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sum.low, one), _mm256_madd_epi16(sum.high, one)};
}
inline Ints signed_factor(Ints x) { return x; }
inline __m256i dot_signed_half(__m256i a, __m256i b, __m256i sum) {
  __m256i product;
  asm("vpsignb %2, %3, %1\n\tvpmaddubsw %1, %4, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sum), "=&x"(product)
      : "x"(a), "x"(b), "x"(_mm256_abs_epi8(a)), "x"(_mm256_set1_epi16(1)));
  return sum;
}
inline Ints dot_signed(Ints a, Ints b, Ints sum) {
  return {dot_signed_half(a.low, b.low, sum.low), dot_signed_half(a.high, b.high, sum.high)};
}

#endif

#endif

// Weights of a panel as products read them: `read` loads INPUTS inputs of 16 outputs, BYTES in all. `next` gives STEP inputs
// after the other, and `spread` gives the same inputs of a row to all outputs.

struct Bf16Weights {
  static constexpr bool GROUPED = false;
  static constexpr int INPUTS = 2, STEP = 2, BYTES = 4 * LANES;
  using Value = Input;
  using Read = Pair;
  using Sum = Vec;
  static int64_t panel_bytes(int64_t inputs, int64_t) { return inputs * 2 * LANES; }
  static Read read(const char* at) { return pairs((const bf16*)at); }
  static Pair next(Read& read) { return read; }
  static Pair spread(const Input* x) { return two_for_all(x); }
  static Sum add(Pair w, Pair x, Sum sum) { return dot(w, x, sum); }
};

// Codes in groups of inputs, beside rows of codes with one byte, as in llama.cpp. A group of GGUF's weights begins with 16
// scales and 16 lows in fp16.
template <int BITS, int HEADER_BYTES>
struct Grouped {
  static constexpr bool GROUPED = true;
  static constexpr int HEADER = HEADER_BYTES, STEP = 4, BYTES = 4 * LANES, INPUTS = 4 * 8 / BITS;
  using Value = int8_t;
  using Sum = Ints;
  static int64_t group_bytes(int64_t group) { return HEADER + group * LANES * BITS / 8; }
  static int64_t panel_bytes(int64_t inputs, int64_t group) { return inputs / group * group_bytes(group); }
  static Ints spread(const int8_t* x) {
    int32_t all;
    std::memcpy(&all, x, 4);
    return for_all(all);
  }
};

// Codes with a sign, four inputs of an output side by side.
template <int HEADER_BYTES>
struct EightBits : Grouped<8, HEADER_BYTES> {
  using Read = Ints;
  static Read read(const char* at) { return signed_factor(load_ints(at)); }
  static Ints next(Read& read) { return read; }
  static Ints start(int32_t row_sum) { return for_all(BIAS * row_sum); }
  static Ints add(Ints w, Ints x, Ints sum) { return dot_signed(w, x, sum); }
  static Vec total(Ints sum) { return to_float(sum); }
};

using Int8Weights = EightBits<0>;
using GroupsOf8 = EightBits<4 * LANES>;

// Eight inputs of 16 outputs: four bytes per output, the first four inputs in their low nibbles.
struct GroupsOf4 : Grouped<4, 4 * LANES> {
  struct Read {
    Ints now, later;
  };
  static Read read(const char* at) {
    const Ints both = load_ints(at);
    return {low_nibbles(both), high_nibbles(both)};
  }
  static Ints next(Read& read) {
    const Ints codes = read.now;
    read.now = read.later;
    return codes;
  }
  static Ints start(int32_t) { return for_all(0); }
  static Ints add(Ints w, Ints x, Ints sum) { return dot_bytes(w, x, sum); }
  static Vec total(Ints sum) { return to_float(finish(sum)); }
};

// exp(x) for x <= 88, relative error 2e-7 (the polynomial of Cephes' expf); 0 below FLOOR.
inline Vec exponential(Vec x) {
  const Vec in = least(most(x, broadcast(FLOOR)), broadcast(88.f)), n = nearest(in * broadcast(1.44269504f));
  const Vec r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), in));
  Vec p = broadcast(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, broadcast(c));
  p = fma(r * r, p, r) + broadcast(1.f);
  return zero_below_floor(times_power_of_two(p, n), x);
}

}  // namespace
