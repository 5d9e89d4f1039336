// Decoder layers and linear layers of a few tokens on a CPU, in float32 arithmetic over weights held in few bytes.
//
// A forward of a few tokens is a pass over all weights: its price is how fast they come from memory and become floats.
// A word of 32 bits holds one float32, two bfloat16, four 8-bit or eight 4-bit weights of one output; words of as many
// outputs as two vector registers hold lie side by side, so that unpacking is a shift and a mask for all of them.
//
// Each row is computed by the same steps in the same order, however many rows there are and whatever lies in cache slots
// that it does not see: what a token is given does not depend on the tokens that are verified beside it.
//
// Plain C++ with vectors of GCC and Clang and OpenMP, without torch: cpu_kernels.py compiles it in seconds and checks all
// shapes, types and sizes before it calls.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // floats in a register; rows that share a pass over weights
#else
constexpr int LANES = 8, ROWS = 5;
#endif
constexpr int COLUMNS = 2 * LANES;  // outputs that are computed together
constexpr int GROUP = 32;           // inputs that share a scale and an offset
constexpr int SHARED = 64;          // slots whose values all rows read before the next ones
constexpr int64_t TOGETHER = 256;   // rows whose sums, queries whose scores are kept at once
constexpr int AHEAD = 2048;         // bytes: weights are fetched so far before they are needed

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t Signed __attribute__((vector_size(LANES)));

struct bfloat16 {
  uint16_t bits;
};

template <typename Vector>
INLINE Vector load(const void* from) {
  Vector to;
  memcpy(&to, from, sizeof to);
  return to;
}

template <typename Vector>
INLINE void store(void* to, Vector from) {
  memcpy(to, &from, sizeof from);
}

template <typename To, typename From>
INLINE To bits_of(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  memcpy(&to, &from, sizeof to);
  return to;
}

INLINE Floats all(float value) { return value - Floats{}; }

INLINE float as_float(float value) { return value; }
INLINE float as_float(bfloat16 value) { return bits_of<float>(uint32_t(value.bits) << 16); }
INLINE Floats load_floats(const float* from) { return load<Floats>(from); }
INLINE Floats load_floats(const bfloat16* from) {
  return bits_of<Floats>(__builtin_convertvector(load<Shorts>(from), Words) << 16);
}

// float16: its exponent and mantissa lie 13 bits lower, and its exponents count from 112 more.
INLINE Floats load_halves(const uint16_t* from) {
  const Words half = __builtin_convertvector(load<Shorts>(from), Words);
  return bits_of<Floats>(bits_of<Words>(bits_of<Floats>((half & 0x7fff) << 13) * 0x1p112f) | (half & 0x8000) << 16);
}

// To the nearest value of the model's own format, ties to even: where the model rounds, so do these kernels.
template <typename Number>
INLINE Floats rounded(Floats value) {
  if constexpr (sizeof(Number) == 4) return value;
  const Words bits = bits_of<Words>(value);
  return bits_of<Floats>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

template <typename Number>
INLINE void store_rounded(Number* to, Floats value) {
  if constexpr (sizeof(Number) == 4)
    store(to, value);
  else
    store(to, __builtin_convertvector(bits_of<Words>(rounded<Number>(value)) >> 16, Shorts));
}

// exp by 2^n times a polynomial on half an octave (Cephes); relative error about 1e-7. Below -87 it is 0.
INLINE Floats exponential(Floats x) {
  const Floats clamped = x < -87.0f ? all(-87.0f) : x > 88.0f ? all(88.0f) : x;
  const Floats shifted = clamped * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const Floats n = shifted - 12582912.0f;
  const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats power = bits_of<Floats>((__builtin_convertvector(n, Ints) + 127) << 23);
  const Floats value = (p * r * r + r + 1.0f) * power;
  return x < -87.0f ? Floats{} : value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights, as cpu_kernels.py packs them: [blocks of COLUMNS outputs, words of inputs, COLUMNS]

enum Format : int64_t { AFFINE4, AFFINE8, BFLOAT16, FLOAT32 };

struct Weights {
  int64_t format, inputs, outputs;
  const uint32_t* words;
  const uint16_t* scales;  // [blocks, inputs / GROUP, scale and offset, COLUMNS], float16; affine formats only
  const float* bias;       // [outputs rounded up to COLUMNS], or null
};

// Each kind reads one block: `group` before a group of inputs, `weights` for input `j` of a word.
struct Float32 {
  static constexpr int IN_A_WORD = 1;
  const uint32_t* words;

  static Float32 of(const Weights& w, int64_t block) { return {w.words + block * w.inputs * COLUMNS}; }
  INLINE void group(int64_t) {}
  INLINE void take(int64_t word, Words (&taken)[2]) const {
    taken[0] = load<Words>(words + word * COLUMNS);
    taken[1] = load<Words>(words + word * COLUMNS + LANES);
    __builtin_prefetch(reinterpret_cast<const char*>(words + word * COLUMNS) + AHEAD);
  }
  INLINE Floats weights(Words taken, int, int) const { return bits_of<Floats>(taken); }
};

struct BFloat16 {
  static constexpr int IN_A_WORD = 2;
  const uint32_t* words;

  static BFloat16 of(const Weights& w, int64_t block) { return {w.words + block * w.inputs / 2 * COLUMNS}; }
  INLINE void group(int64_t) {}
  INLINE void take(int64_t word, Words (&taken)[2]) const { Float32{words}.take(word, taken); }
  INLINE Floats weights(Words taken, int j, int) const {
    return bits_of<Floats>(j == 0 ? taken << 16 : taken & 0xffff0000u);
  }
};

// weight = number * scale + offset. The number's bits, put into a float's mantissa behind the exponent of 2^BITS, are
// 2^BITS + number without a conversion; the offset takes 2^BITS * scale back. One rounding, as in number * scale + offset.
template <int BITS>
struct Affine {
  static constexpr int IN_A_WORD = 32 / BITS;
  const uint32_t* words;
  const uint16_t* scales;
  Floats scale[2], offset[2];

  static Affine of(const Weights& w, int64_t block) {
    return {w.words + block * w.inputs / IN_A_WORD * COLUMNS, w.scales + block * w.inputs / GROUP * 2 * COLUMNS, {}, {}};
  }
  INLINE void group(int64_t number) {
    const uint16_t* from = scales + number * 2 * COLUMNS;
    for (int half = 0; half < 2; half++) {
      scale[half] = load_halves(from + half * LANES);
      offset[half] = load_halves(from + COLUMNS + half * LANES);
      offset[half] -= scale[half] * float(1 << BITS);
    }
  }
  INLINE void take(int64_t word, Words (&taken)[2]) const { Float32{words}.take(word, taken); }
  INLINE Floats weights(Words taken, int j, int half) const {
    const int shift = 23 - BITS - (BITS == 8 ? 8 * j : 8 * (j % 4) + 4 * (j / 4));  // low halves of bytes first
    const Words moved = shift >= 0 ? taken << (shift & 31) : taken >> (-shift & 31);
    constexpr uint32_t mask = ((1u << BITS) - 1) << (23 - BITS), exponent = uint32_t(127 + BITS) << 23;
    return bits_of<Floats>((moved & mask) | exponent) * scale[half] + offset[half];
  }
};

// Sums over inputs of R rows times B blocks of weights, in the order of the inputs, to sums [R, B * COLUMNS], whose rows
// lie `sums_step` apart; they go on from what is there if `more`.
template <typename Kind, int R, int B>
__attribute__((noinline)) void products(const float* rows, int64_t step, int64_t inputs, const Kind* blocks, float* to,
                                        int64_t to_step, bool more) {
  Kind kinds[B];
  Floats sums[B][R][2];
  UNROLL for (int b = 0; b < B; b++) {
    kinds[b] = blocks[b];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int half = 0; half < 2; half++)
        sums[b][r][half] = more ? load<Floats>(to + r * to_step + b * COLUMNS + half * LANES) : Floats{};
  }
  for (int64_t from = 0; from < inputs; from += GROUP) {
    UNROLL for (int b = 0; b < B; b++) kinds[b].group(from / GROUP);
    const int64_t end = std::min<int64_t>(from + GROUP, inputs);
    for (int64_t i = from; i < end; i += Kind::IN_A_WORD) {
      Words taken[B][2];
      UNROLL for (int b = 0; b < B; b++) kinds[b].take(i / Kind::IN_A_WORD, taken[b]);
      UNROLL for (int j = 0; j < Kind::IN_A_WORD; j++) {
        Floats weights[B][2];
        UNROLL for (int b = 0; b < B; b++)
          UNROLL for (int half = 0; half < 2; half++) weights[b][half] = kinds[b].weights(taken[b][half], j, half);
        UNROLL for (int r = 0; r < R; r++) {
          const Floats input = all(rows[r * step + i + j]);
          UNROLL for (int b = 0; b < B; b++)
            UNROLL for (int half = 0; half < 2; half++) sums[b][r][half] += input * weights[b][half];
        }
      }
    }
  }
  UNROLL for (int b = 0; b < B; b++)
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int half = 0; half < 2; half++) store(to + r * to_step + b * COLUMNS + half * LANES, sums[b][r][half]);
}

// Products of any number of rows with one block; passes over the weights are as equal as can be.
template <typename Kind, int R = ROWS>
void pass(const float* rows, int64_t step, int64_t count, int64_t inputs, const Kind& kind, float* to, int64_t to_step,
          bool more) {
  if constexpr (R > 1)
    if (count < R) return pass<Kind, R - 1>(rows, step, count, inputs, kind, to, to_step, more);
  products<Kind, R, 1>(rows, step, inputs, &kind, to, to_step, more);
}

template <typename Kind>
void all_products(const float* rows, int64_t step, int64_t count, int64_t inputs, const Kind& kind, float* to,
                  int64_t to_step, bool more = false) {
  const int64_t passes = std::max<int64_t>((count + ROWS - 1) / ROWS, 1), together = (count + passes - 1) / passes;
  for (int64_t row = 0; row < count; row += together)
    pass(rows + row * step, step, std::min(together, count - row), inputs, kind, to + row * to_step, to_step, more);
}

// A buffer of this thread's own that is not allocated at every call, aligned as vectors are.
template <int NUMBER>
float* scratch(int64_t size) {
  static thread_local std::vector<Floats> kept;
  const size_t vectors = (size + LANES - 1) / LANES;
  if (kept.size() < vectors) kept.resize(vectors);
  return reinterpret_cast<float*>(kept.data());
}

// ---------------------------------------------------------------------------------------------------------------------
// Inputs as integers of 24 bits, for integer weights: what float32 has, at a quarter of its multiplications

// A group of a row: scale * (limbs[0] * 2^16 + limbs[1] * 2^8 + limbs[2]) is an input, rounded to 2^-24 of the largest.
struct Group {
  int8_t limbs[3][GROUP];
  int32_t sums[3];  // of each limb
  float scale, total;
};

void quantize(const float* row, int64_t inputs, Group* to) {
  for (int64_t from = 0; from < inputs; from += GROUP, to++) {
    Floats most{}, nothing{};
    for (int i = 0; i < GROUP; i += LANES) {
      const Floats x = load<Floats>(row + from + i), size = x < 0 ? -x : x;
      most = size > most ? size : most;
      nothing += x * 0.0f;  // or no number: integers have none, and what is broken must show
    }
    float largest = 0, broken = 0;
    for (int lane = 0; lane < LANES; lane++) {
      largest = std::max(largest, most[lane]);
      broken += nothing[lane];
    }
    const float whole = 127 << 16, factor = largest > 0 ? whole / largest : 0;
    Ints sums[3] = {};
    for (int i = 0; i < GROUP; i += LANES) {
      const Floats shifted = load<Floats>(row + from + i) * factor;
      const Ints half = shifted < 0 ? Ints{} - 1 : Ints{} + 1;  // to the nearest: a conversion cuts towards zero
      Ints left = __builtin_convertvector(shifted + 0.5f * __builtin_convertvector(half, Floats), Ints);
      for (int limb = 2; limb >= 0; limb--) {
        const Ints low = limb ? left << 24 >> 24 : left;
        left = (left - low) >> 8;
        sums[limb] += low;
        store(to->limbs[limb] + i, __builtin_convertvector(low, Signed));
      }
    }
    for (int limb = 0; limb < 3; limb++) {
      to->sums[limb] = 0;
      for (int lane = 0; lane < LANES; lane++) to->sums[limb] += sums[limb][lane];
    }
    to->scale = largest / whole + broken;
    to->total = to->scale * (65536.0f * to->sums[0] + (256.0f * to->sums[1] + to->sums[2]));
  }
}

// Sums of four unsigned weights of each output with a limb's four inputs, by instructions that multiply bytes and add
// four products to 32 bits. As many registers of outputs as `HALVES` share a pass: one sum would wait for itself.
#if defined(__AVX512VNNI__)
constexpr int HALVES = 2;
INLINE Ints dot(Words weights, Ints inputs, Ints sums) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
}
#elif defined(__AVXVNNI__)
constexpr int HALVES = 1;  // of 16 registers, eight hold its weights
INLINE Ints dot(Words weights, Ints inputs, Ints sums) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)inputs);
}
#else
constexpr int HALVES = 0;  // products with floats that are made of the weights are as fast
INLINE Ints dot(Words, Ints, Ints sums) { return sums; }
#endif
constexpr bool INTEGERS = HALVES > 0;

// One block's columns of some rows, by integers: sums of (number - middle) * input, so that little cancels.
template <int BITS>
__attribute__((noinline)) void integer_products(const Weights& w, const Group* rows, int64_t count, int64_t block,
                                                float* to) {
  constexpr int WORDS = GROUP * BITS / 32, MIDDLE = 1 << (BITS - 1), PASS = std::max(HALVES, 1);
  const int64_t groups = w.inputs / GROUP;
  const uint32_t* words = w.words + block * groups * WORDS * COLUMNS;
  const uint16_t* scales = w.scales + block * groups * 2 * COLUMNS;
  std::fill(to, to + count * COLUMNS, 0.0f);
  for (int64_t g = 0; g < groups; g++, words += WORDS * COLUMNS, scales += 2 * COLUMNS)
    UNROLL for (int first = 0; first < 2; first += PASS) {
      Words weights[PASS][GROUP / 4];
      Floats scale[PASS], offset[PASS];
      UNROLL for (int half = 0; half < PASS; half++) {
        const int column = (first + half) * LANES;
        scale[half] = load_halves(scales + column);
        offset[half] = load_halves(scales + COLUMNS + column) + scale[half] * float(MIDDLE);
        UNROLL for (int k = 0; k < WORDS; k++) {
          const Words word = load<Words>(words + k * COLUMNS + column);
          __builtin_prefetch(reinterpret_cast<const char*>(words + k * COLUMNS + column) + AHEAD);
          if constexpr (BITS == 4) {
            weights[half][2 * k] = word & 0x0f0f0f0f;
            weights[half][2 * k + 1] = (word >> 4) & 0x0f0f0f0f;
          } else {
            weights[half][k] = word;
          }
        }
      }
      for (int64_t row = 0; row < count; row++) {
        const Group& input = rows[row * groups + g];
        Ints sums[PASS][3] = {};
        UNROLL for (int k = 0; k < GROUP / 4; k++)
          UNROLL for (int limb = 0; limb < 3; limb++) {
            const Ints inputs = load<int32_t>(input.limbs[limb] + 4 * k) - Ints{};
            UNROLL for (int half = 0; half < PASS; half++)
              sums[half][limb] = dot(weights[half][k], inputs, sums[half][limb]);
          }
        const int32_t middle_high = MIDDLE * input.sums[0], middle_low = MIDDLE * (256 * input.sums[1] + input.sums[2]);
        UNROLL for (int half = 0; half < PASS; half++) {
          const Floats high = __builtin_convertvector(sums[half][0] - middle_high, Floats);
          const Floats low = __builtin_convertvector((sums[half][1] << 8) + sums[half][2] - middle_low, Floats);
          float* at = to + row * COLUMNS + (first + half) * LANES;
          const Floats product = (high * 65536.0f + low) * input.scale;
          store(at, load<Floats>(at) + product * scale[half] + offset[half] * input.total);
        }
      }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Linear layers

// What a linear layer reads: rows, and the same as integers where a layer has integer weights.
struct Inputs {
  const float* rows;
  const Group* groups;
};

// The columns of one block or, of one row, of two: the sums of one block would wait for themselves.
template <typename Kind>
void float_products(const Weights& w, const float* rows, int64_t count, int64_t block, int64_t blocks, float* to) {
  if (blocks == 2) {
    const Kind kinds[2] = {Kind::of(w, block), Kind::of(w, block + 1)};
    return products<Kind, 1, 2>(rows, w.inputs, w.inputs, kinds, to, 0, false);
  }
  Kind kind = Kind::of(w, block);
  if (count <= 2 * ROWS) return all_products(rows, w.inputs, count, w.inputs, kind, to, COLUMNS);
  float* unpacked = scratch<0>(w.inputs * COLUMNS);  // many rows: unpack once
  for (int64_t i = 0; i < w.inputs; i += Kind::IN_A_WORD) {
    if (i % GROUP == 0) kind.group(i / GROUP);
    Words taken[2];
    kind.take(i / Kind::IN_A_WORD, taken);
    UNROLL for (int j = 0; j < Kind::IN_A_WORD; j++)
      UNROLL for (int half = 0; half < 2; half++)
        store(unpacked + (i + j) * COLUMNS + half * LANES, kind.weights(taken[half], j, half));
  }
  all_products(rows, w.inputs, count, w.inputs, Float32{reinterpret_cast<uint32_t*>(unpacked)}, to, COLUMNS);
}

// Inputs times weights: `use(row, column, sums)` for each LANES columns, the bias added. The threads of the caller's
// parallel region share the blocks and do not wait for each other at the end.
template <typename Use>
INLINE void multiply(const Weights& w, const Inputs& inputs, int64_t count, const Use& use) {
  const int64_t blocks = (w.outputs + COLUMNS - 1) / COLUMNS, most = count == 1 ? 2 : 1;
#pragma omp for schedule(static) nowait
  for (int64_t block = 0; block < blocks; block += most)
    for (int64_t first = 0; first < count; first += TOGETHER) {
      const int64_t here = std::min(most, blocks - block), its = std::min(TOGETHER, count - first);
      float* sums = scratch<2>(std::max<int64_t>(its, 2) * COLUMNS);
      const float* rows = inputs.rows + first * w.inputs;
      const Group* groups = inputs.groups + first * (w.inputs / GROUP);
      switch (w.format) {
        case AFFINE4:
          if (!INTEGERS) float_products<Affine<4>>(w, rows, its, block, here, sums);
          for (int64_t i = 0; i < here && INTEGERS; i++)
            integer_products<4>(w, groups, its, block + i, sums + i * COLUMNS);
          break;
        case AFFINE8:
          if (!INTEGERS) float_products<Affine<8>>(w, rows, its, block, here, sums);
          for (int64_t i = 0; i < here && INTEGERS; i++)
            integer_products<8>(w, groups, its, block + i, sums + i * COLUMNS);
          break;
        case BFLOAT16: float_products<BFloat16>(w, rows, its, block, here, sums); break;
        case FLOAT32: float_products<Float32>(w, rows, its, block, here, sums); break;
      }
      for (int64_t row = 0; row < its; row++)
        for (int64_t i = 0; i < here * COLUMNS; i += LANES) {
          const int64_t column = block * COLUMNS + i;
          const Floats sum = load<Floats>(sums + row * COLUMNS + i);
          use(first + row, column, w.bias ? sum + load<Floats>(w.bias + column) : sum);
        }
    }
}

bool of_integers(const Weights& w) { return INTEGERS && w.format <= AFFINE8; }

// ---------------------------------------------------------------------------------------------------------------------
// Decoder layers: x += attention(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x)))

struct Layer {
  Weights query, key, value, out, gate, up, down;
  const float* input_norm;  // null: what the attention reads is the state itself (EAGLE-1)
  const float* embed_norm;  // of the first half of the attention's input (EAGLE-3); null: the state alone is read
  const float* post_norm;
  const float* query_norm;  // of each head; null for none
  const float* key_norm;
  void* keys;               // [batch, groups, capacity, size], of the model's own type
  void* values;
  const uint8_t* seen;      // [batch, nodes, slots]
  float* feature;           // where the state after this layer is wanted, or null
};

struct Call {
  int64_t hidden, heads, groups, size, inner;
  int64_t batch, nodes, slots, capacity, feature_step, threads;
  double eps, scale;
  int64_t norm_before_residual;
  int64_t finite;         // whether NaN and inf enter the cache as 0: a draft's entries may be seen by no other draft
  const int64_t* places;  // [batch, nodes]: the slots of the new entries
  const float* cosines;   // [batch, nodes, size]
  const float* sines;
  const float* embeds;    // [batch * nodes, hidden], where the first layer reads them
  float* state;           // [batch * nodes, hidden], in place
};

// RMSNorm of a row; the result is rounded before the weight multiplies it, as transformers' is.
template <typename Number>
INLINE void normalize(const float* from, const float* weight, int64_t width, double eps, float* to) {
  Floats squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES)
    UNROLL for (int k = 0; k < 4; k++) {
      const Floats x = load<Floats>(from + i + k * LANES);
      squares[k] += x * x;
    }
  for (; i < width; i += LANES) {
    const Floats x = load<Floats>(from + i);
    squares[0] += x * x;
  }
  const Floats sums = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  const Floats factor = all(1 / std::sqrt(sum / width + float(eps)));
  for (i = 0; i < width; i += LANES) {
    const Floats normed = rounded<Number>(load<Floats>(from + i) * factor);
    store(to + i, rounded<Number>(normed * load<Floats>(weight + i)));
  }
}

template <typename Number>
INLINE void rotate(float* head, const float* cosines, const float* sines, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const Floats a = load<Floats>(head + i), b = load<Floats>(head + half + i);
    const Floats left = rounded<Number>(a * load<Floats>(cosines + i));
    const Floats right = rounded<Number>(b * load<Floats>(cosines + half + i));
    store(head + i, rounded<Number>(left - rounded<Number>(b * load<Floats>(sines + i))));
    store(head + half + i, rounded<Number>(right + rounded<Number>(a * load<Floats>(sines + half + i))));
  }
}

// Attention of `count` queries [count, size] that share keys and values, the query of row i being node (first + i) %
// nodes; what is shared comes from memory once: all rows have used some slots before the next ones are looked at.
template <typename Number>
void attend(const Call& call, const float* queries, const Number* keys, const Number* values, const uint8_t* seen,
            int64_t first, int64_t count, float* out) {
  int64_t slots = 0;  // up to the last that anybody sees
  for (int64_t row = 0; row < count; row++)
    for (int64_t slot = call.slots; slot > slots; slot--)
      if (seen[(first + row) % call.nodes * call.slots + slot - 1]) slots = slot;
  const int64_t size = call.size, room = (slots + COLUMNS - 1) / COLUMNS * COLUMNS;
  float* turned = scratch<1>(COLUMNS * std::max<int64_t>(size, SHARED) + count * (room + 1) + room);
  float* scores = turned + COLUMNS * std::max<int64_t>(size, SHARED);
  float* totals = scores + count * room;
  uint8_t* shown = reinterpret_cast<uint8_t*>(totals + count);
  for (int64_t slot = 0; slot < slots; slot += COLUMNS) {
    const int64_t there = std::min<int64_t>(COLUMNS, slots - slot);
    for (int64_t column = 0; column < COLUMNS; column++) {
      const Number* key = keys + (slot + std::min(column, there - 1)) * size;
      for (int64_t i = 0; i < size; i++) turned[i * COLUMNS + column] = as_float(key[i]);
    }
    all_products(queries, size, count, size, Float32{reinterpret_cast<uint32_t*>(turned)}, scores + slot, room);
  }
  memset(shown, 0, room);
  for (int64_t row = 0; row < count; row++) {
    float* its = scores + row * room;
    memcpy(shown, seen + (first + row) % call.nodes * call.slots, slots);
    Floats most = all(-3e38f);
    for (int64_t slot = 0; slot < room; slot += LANES) {
      const Ints visible = __builtin_convertvector(load<Bytes>(shown + slot), Ints) != 0;
      const Floats score = visible ? load<Floats>(its + slot) * float(call.scale) : all(-3e38f);
      store(its + slot, score);
      most = score > most ? score : most;
    }
    float largest = most[0];
    for (int lane = 1; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    for (int64_t slot = 0; slot < room; slot += LANES)
      store(its + slot, exponential(load<Floats>(its + slot) - largest));
  }
  // Slot by slot, for one that is not seen adds zero: the others add up alike wherever they lie.
  for (int64_t row = 0; row < count; row++) {
    const float* its = scores + row * room;
    totals[row] = 0;
    for (int64_t slot = 0; slot < slots; slot++) totals[row] += its[slot];
  }
  for (int64_t slot = 0; slot < slots; slot += SHARED) {
    const int64_t there = std::min<int64_t>(SHARED, slots - slot);
    for (int64_t from = 0; from < size; from += COLUMNS) {
      for (int64_t i = 0; i < there; i++)
        for (int half = 0; half < 2; half++)
          store(turned + i * COLUMNS + half * LANES, load_floats(values + (slot + i) * size + from + half * LANES));
      all_products(scores + slot, room, count, there, Float32{reinterpret_cast<uint32_t*>(turned)}, out + from, size,
                   slot > 0);
    }
  }
  for (int64_t row = 0; row < count; row++)
    for (int64_t i = 0; i < size; i += LANES) {
      float* at = out + row * size + i;
      store(at, rounded<Number>(load<Floats>(at) / totals[row]));
    }
}

// Each loop is shared by the threads of one parallel region, and all wait where the next step reads what others wrote.
template <typename Number>
void decoder_layers(const Call& call, const Layer* layers, int64_t count) {
  const int64_t rows = call.batch * call.nodes, width = call.hidden, size = call.size;
  const int64_t queries = call.heads * size, shared = call.groups * size, together = call.heads / call.groups;
  const int64_t input = call.embeds ? 2 * width : width;
  const auto padded = [](int64_t outputs) { return (outputs + COLUMNS - 1) / COLUMNS * COLUMNS; };
  std::vector<float> normed(rows * 2 * width), query(rows * padded(queries)), turned(rows * queries),
      key(rows * padded(shared)), value(rows * padded(shared)), found(rows * queries), mixed(rows * queries),
      inner(rows * call.inner);
  bool integers = false;
  for (int64_t number = 0; number < count; number++) {
    const Layer& l = layers[number];
    for (const Weights* w : {&l.query, &l.key, &l.value, &l.out, &l.gate, &l.up, &l.down}) integers |= of_integers(*w);
  }
  std::vector<Group> groups(integers ? rows * std::max({2 * width, queries, call.inner}) / GROUP : 0);
  // A row of what the next linear layers read, as integers.
  const auto quantized = [&](const std::vector<float>& from, int64_t row, int64_t inputs) {
    if (integers) quantize(from.data() + row * inputs, inputs, groups.data() + row * (inputs / GROUP));
  };
  const auto all_quantized = [&](const std::vector<float>& from, int64_t inputs) {
    if (!integers) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) quantized(from, row, inputs);
  };
#pragma omp parallel num_threads(call.threads)
  for (int64_t number = 0; number < count; number++) {
    const Layer& layer = layers[number];
    const bool reads_embeds = number == 0 && call.embeds;
    const int64_t read = number == 0 ? input : width;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      float* state = call.state + row * width;
      float* to = normed.data() + row * read;
      if (reads_embeds) normalize<Number>(call.embeds + row * width, layer.embed_norm, width, call.eps, to);
      if (layer.input_norm)
        normalize<Number>(state, layer.input_norm, width, call.eps, to + (read - width));
      else
        std::copy(state, state + width, to + (read - width));
      if (reads_embeds && call.norm_before_residual) std::copy(to + width, to + 2 * width, state);
      quantized(normed, row, read);
    }
    const Inputs read_normed{normed.data(), groups.data()};
    const auto into = [](std::vector<float>& to, int64_t outputs) {
      return [&to, step = (outputs + COLUMNS - 1) / COLUMNS * COLUMNS](int64_t row, int64_t column, Floats sums) {
        store(to.data() + row * step + column, rounded<Number>(sums));
      };
    };
    multiply(layer.query, read_normed, rows, into(query, queries));
    multiply(layer.key, read_normed, rows, into(key, shared));
    multiply(layer.value, read_normed, rows, into(value, shared));
#pragma omp barrier
#pragma omp for schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; row++)
      for (int64_t head = 0; head < call.heads + call.groups; head++) {
        const bool is_query = head < call.heads;
        const int64_t g = is_query ? head / together : head - call.heads, b = row / call.nodes, n = row % call.nodes;
        float* its = is_query ? query.data() + row * padded(queries) + head * size
                              : key.data() + row * padded(shared) + g * size;
        const float* norm = is_query ? layer.query_norm : layer.key_norm;
        if (norm) normalize<Number>(its, norm, size, call.eps, its);
        rotate<Number>(its, call.cosines + row * size, call.sines + row * size, size);
        if (is_query) {
          const int64_t at = ((b * call.groups + g) * together + head % together) * call.nodes + n;
          std::copy(its, its + size, turned.data() + at * size);
          continue;
        }
        const int64_t at = ((b * call.groups + g) * call.capacity + call.places[row]) * size;
        const float* new_value = value.data() + row * padded(shared) + g * size;
        const auto kept = [&](const float* from) {
          const Floats entry = rounded<Number>(load<Floats>(from));
          return call.finite ? (entry * 0.0f == 0.0f ? entry : Floats{}) : entry;
        };
        for (int64_t i = 0; i < size; i += LANES) {
          store_rounded(static_cast<Number*>(layer.keys) + at + i, kept(its + i));
          store_rounded(static_cast<Number*>(layer.values) + at + i, kept(new_value + i));
        }
      }
    const int64_t of_group = together * call.nodes, pieces = std::max<int64_t>(1, call.threads);
#pragma omp for schedule(static)
    for (int64_t piece = 0; piece < pieces; piece++) {  // equal shares of all queries
      int64_t begin = call.heads * rows * piece / pieces, end = call.heads * rows * (piece + 1) / pieces;
      while (begin < end) {
        const int64_t group = begin / of_group, first = begin % of_group, b = group / call.groups;
        const int64_t its = std::min({of_group - first, end - begin, TOGETHER}), at = group * call.capacity * size;
        attend(call, turned.data() + begin * size, static_cast<const Number*>(layer.keys) + at,
               static_cast<const Number*>(layer.values) + at, layer.seen + b * call.nodes * call.slots, first, its,
               found.data() + begin * size);
        for (int64_t row = first; row < first + its; row++) {
          const int64_t head = group % call.groups * together + row / call.nodes, n = row % call.nodes;
          const float* from = found.data() + (group * of_group + row) * size;
          std::copy(from, from + size, mixed.data() + ((b * call.nodes + n) * call.heads + head) * size);
        }
        begin += its;
      }
    }
    const auto add = [&](int64_t row, int64_t column, Floats sums) {
      float* at = call.state + row * width + column;
      store(at, rounded<Number>(load<Floats>(at) + rounded<Number>(sums)));
    };
    all_quantized(mixed, queries);
    multiply(layer.out, {mixed.data(), groups.data()}, rows, add);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      normalize<Number>(call.state + row * width, layer.post_norm, width, call.eps, normed.data() + row * width);
      quantized(normed, row, width);
    }
    const int64_t step = call.inner;
    multiply(layer.gate, read_normed, rows, [&](int64_t row, int64_t column, Floats sums) {
      const Floats gate = rounded<Number>(sums);
      store(inner.data() + row * step + column, rounded<Number>(gate / (exponential(-gate) + 1.0f)));
    });
    multiply(layer.up, read_normed, rows, [&](int64_t row, int64_t column, Floats sums) {  // the same thread's columns
      float* at = inner.data() + row * step + column;
      store(at, rounded<Number>(load<Floats>(at) * rounded<Number>(sums)));
    });
#pragma omp barrier
    all_quantized(inner, call.inner);
    multiply(layer.down, {inner.data(), groups.data()}, rows, add);
#pragma omp barrier
    if (layer.feature) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; row++)
        std::copy(call.state + row * width, call.state + (row + 1) * width, layer.feature + row * call.feature_step);
    }
  }
}

}  // namespace

extern "C" {

int64_t headstart_columns() { return COLUMNS; }

// rows [count, inputs] times weights, to [count, outputs rounded up to COLUMNS].
void headstart_linear(const Weights* weights, const float* rows, int64_t count, float* to, int64_t rounds,
                      int64_t threads) {
  const int64_t step = (weights->outputs + COLUMNS - 1) / COLUMNS * COLUMNS;
  std::vector<Group> groups(of_integers(*weights) ? count * (weights->inputs / GROUP) : 0);
#pragma omp parallel num_threads(threads)
  {
    if (!groups.empty()) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < count; row++)
        quantize(rows + row * weights->inputs, weights->inputs, groups.data() + row * (weights->inputs / GROUP));
    }
    multiply(*weights, {rows, groups.data()}, count, [&](int64_t row, int64_t column, Floats sums) {
      store(to + row * step + column, rounds ? rounded<bfloat16>(sums) : sums);
    });
  }
}

// For each of `count` keys and `width` numbers from it on, SplitMix64's minus a uniform number in (0, 1), to [count, width].
void headstart_uniform(const int64_t* keys, int64_t count, int64_t width, float* to, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t row = 0; row < count; row++)
    for (int64_t i = 0; i < width; i++) {
      uint64_t z = uint64_t(keys[row]) + uint64_t(i) * 0x9E3779B97F4A7C15u;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
      to[row * width + i] = float((double((z ^ (z >> 31)) >> 11) + 0.5) * -0x1p-53);
    }
}

void headstart_norm(const float* rows, const float* weight, int64_t count, int64_t width, double eps, int64_t rounds,
                    float* to) {
  for (int64_t row = 0; row < count; row++) {
    if (rounds)
      normalize<bfloat16>(rows + row * width, weight, width, eps, to + row * width);
    else
      normalize<float>(rows + row * width, weight, width, eps, to + row * width);
  }
}

void headstart_decoder(const Call* call, const Layer* layers, int64_t count, int64_t rounds) {
  if (rounds)
    decoder_layers<bfloat16>(*call, layers, count);
  else
    decoder_layers<float>(*call, layers, count);
}

}  // extern "C"
