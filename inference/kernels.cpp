// Linear layers and attention of a few tokens, where what counts is how fast weights and caches come from memory.
//
// Each row is computed by the same steps in the same order, however many rows there are and whatever lies in slots that
// it does not see: what a token is given does not depend on the tokens that are checked beside it.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Unroll.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using at::BFloat16;
using at::Tensor;
using Floats = at::vec::Vectorized<float>;
using Halves = at::vec::Vectorized<BFloat16>;

constexpr int64_t COLUMNS = Halves::size();              // computed together: two registers of float32
constexpr int64_t ROWS = Floats::size() == 16 ? 12 : 5;  // share a pass over weights: as many as registers can sum
constexpr int64_t AHEAD = 4096;                          // bytes: weights are fetched so far before they are needed
constexpr int64_t SHARED = 64;                           // slots whose values all rows read before the next ones

// How many rows each pass takes, at most: as equal as can be.
int64_t rows_of_a_pass(int64_t rows) {
  const int64_t passes = std::max<int64_t>((rows + ROWS - 1) / ROWS, 1);
  return (rows + passes - 1) / passes;
}

// Calls `use` with the number of rows as a constant.
template <int R = ROWS, typename Use>
void with_rows(int64_t rows, const Use& use) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, use);
  use(std::integral_constant<int, R>{});
}

// The even and the odd columns, for two instructions make floats of them: a float's upper half is a bfloat16.
std::tuple<Floats, Floats> in_pairs(const BFloat16* columns) {
  using Pairs = at::vec::Vectorized<int32_t>;
  const Pairs pairs = Pairs::loadu(columns);
  return {at::vec::cast<float>(pairs << Pairs(16)), at::vec::cast<float>(pairs & Pairs(~0xFFFF))};
}

// The first `count` columns; the others are zero.
std::tuple<Floats, Floats> in_pairs(const BFloat16* columns, int64_t count) {
  BFloat16 there[COLUMNS];
  Halves::loadu(columns, count).store(there);
  return in_pairs(there);
}

void store(BFloat16* to, Floats even, Floats odd, int64_t count = COLUMNS) {
  const auto [left, right] = at::vec::interleave2(even, odd);
  at::vec::convert_from_float<BFloat16>(left, right).store(to, count);
}

// Of rows [R, inputs] and weights [inputs, COLUMNS], whose rows lie `step` apart: `use` gets each row's sums of even
// and of odd columns, which go on from those of `before`, if it is given.
template <int R, typename Use>
void products(const float* rows, int64_t row_step, int64_t inputs, const BFloat16* weight, int64_t step,
              const Use& use, const float* before = nullptr, int64_t before_step = 0) {
  Floats even[R], odd[R];  // in registers, where every loop over them is unrolled
  const c10::ForcedUnroll<R> each;
  each([&](auto r) {
    even[r] = before ? Floats::loadu(before + r * before_step) : Floats(0);
    odd[r] = before ? Floats::loadu(before + r * before_step + Floats::size()) : Floats(0);
  });
  for (int64_t i = 0; i < inputs; i++, weight += step) {
    __builtin_prefetch((const char*)weight + AHEAD);
    const auto [first, second] = in_pairs(weight);
    each([&, &first = first, &second = second](auto r) {
      const Floats input(rows[r * row_step + i]);
      even[r] = at::vec::fmadd(input, first, even[r]);
      odd[r] = at::vec::fmadd(input, second, odd[r]);
    });
  }
  each([&](auto r) { use(r, even[r], odd[r]); });
}

// [outputs, inputs] as [blocks, inputs, COLUMNS]: read from end to end, one block of outputs after another.
Tensor pack(const Tensor& weight) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1), blocks = (outputs + COLUMNS - 1) / COLUMNS;
  Tensor padded = at::zeros({blocks * COLUMNS, inputs}, weight.options());
  padded.narrow(0, 0, outputs).copy_(weight);
  return padded.view({blocks, COLUMNS, inputs}).transpose(1, 2).contiguous();
}

Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  const Tensor rows = input.contiguous();
  const int64_t inputs = input.size(-1), count = input.numel() / inputs, together = rows_of_a_pass(count);
  std::vector<float> wide(rows.numel());
  at::vec::convert(rows.const_data_ptr<BFloat16>(), wide.data(), rows.numel());
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = outputs;
  Tensor out = at::empty(shape, input.options());
  const BFloat16* w = packed.const_data_ptr<BFloat16>();
  const BFloat16* b = bias ? bias->const_data_ptr<BFloat16>() : nullptr;
  BFloat16* y = out.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin * COLUMNS; column < end * COLUMNS; column += COLUMNS) {
      const int64_t there = std::min(COLUMNS, outputs - column);
      Floats even(0), odd(0);
      if (b) std::tie(even, odd) = in_pairs(b + column, there);
      for (int64_t row = 0; row < count; row += together)
        with_rows(std::min(together, count - row), [&](auto R) {
          BFloat16* to = y + row * outputs + column;
          products<R>(wide.data() + row * inputs, inputs, inputs, w + column * inputs, COLUMNS,
                      [&](int r, Floats a, Floats c) { store(to + r * outputs, a + even, c + odd, there); });
        });
    }
  });
  return out;
}

// Rows of numbers that lie `step` apart.
struct Rows {
  const BFloat16* at;
  int64_t step;

  const BFloat16* operator[](int64_t row) const { return at + row * step; }
};

// Attention of `count` rows of queries [count, size] that share keys and values [slots, size]; mask [count, slots].
// What is shared comes from memory once: all rows have used some slots before the next ones are looked at.
void attend(const BFloat16* query, Rows key, Rows value, Rows mask, double scale, int64_t count, int64_t slots,
            int64_t size, BFloat16* out) {
  const int64_t room = (slots + COLUMNS - 1) / COLUMNS * COLUMNS, together = rows_of_a_pass(count);
  std::vector<float> wide(count * size), scores(count * room), totals(count), sums(count * size);
  std::vector<BFloat16> turned(size * COLUMNS);
  at::vec::convert(query, wide.data(), count * size);
  const auto passes = [&](const auto& use) {
    for (int64_t row = 0; row < count; row += together)
      with_rows(std::min(together, count - row), [&](auto R) { use(R, row); });
  };
  for (int64_t slot = 0; slot < slots; slot += COLUMNS) {
    const int64_t there = std::min(COLUMNS, slots - slot);
    for (int64_t from = 0; from < size; from += COLUMNS) {
      for (int64_t ahead = slot + COLUMNS; ahead < slot + 2 * COLUMNS; ahead++) __builtin_prefetch(key[ahead] + from);
      at::vec::transpose_mxn<BFloat16>(key[slot] + from, key.step, turned.data() + from * COLUMNS, COLUMNS, there,
                                       COLUMNS);
    }
    passes([&](auto R, int64_t row) {
      products<R>(wide.data() + row * size, size, size, turned.data(), COLUMNS, [&](int r, Floats even, Floats odd) {
        const auto [first, second] = in_pairs(mask[row + r] + slot, there);
        const auto [left, right] = at::vec::interleave2(at::vec::fmadd(even, Floats(scale), first),
                                                        at::vec::fmadd(odd, Floats(scale), second));
        float* to = scores.data() + (row + r) * room + slot;
        left.store(to);
        right.store(to + Floats::size());
      });
    });
  }
  const auto larger = [](Floats& x, Floats& y) { return at::vec::maximum(x, y); };
  for (int64_t row = 0; row < count; row++) {
    float* its = scores.data() + row * room;
    const Floats most(at::vec::reduce_all<float>(larger, its, slots));
    at::vec::map<float>([&](Floats x) { return (x - most).exp_u20(); }, its, its, slots);
  }
  // Slot by slot, for one that is not seen adds zero: the others add up alike wherever they lie.
  passes([&](auto R, int64_t row) {
    float its[R] = {};
    const float* score = scores.data() + row * room;
    for (int64_t slot = 0; slot < slots; slot++, score++)
      c10::ForcedUnroll<R>()([&](auto r) { its[r] += score[r * room]; });
    std::copy(its, its + R, totals.data() + row);
  });
  for (int64_t slot = 0; slot < slots; slot += SHARED)
    passes([&](auto R, int64_t row) {
      for (int64_t from = 0; from < size; from += COLUMNS) {
        float* to = sums.data() + row * size + from;
        const auto keep = [&](int r, Floats even, Floats odd) {
          even.store(to + r * size);
          odd.store(to + r * size + Floats::size());
        };
        products<R>(scores.data() + row * room + slot, room, std::min(SHARED, slots - slot), value[slot] + from,
                    value.step, keep, to, size);
      }
    });
  for (int64_t row = 0; row < count; row++)
    for (int64_t from = 0; from < size; from += COLUMNS) {
      const float* its = sums.data() + row * size + from;
      const Floats even = Floats::loadu(its), odd = Floats::loadu(its + Floats::size()), total(totals[row]);
      store(out + row * size + from, even / total, odd / total);
    }
}

// softmax(query . key * scale + mask) . value: query [batch, groups, rows, size], key and value [batch, groups, slots,
// size], mask [batch or 1, groups or 1, rows, slots]. Every thread takes an equal share of all rows.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, double scale) {
  const int64_t batch = query.size(0), groups = query.size(1), rows = query.size(2), size = query.size(3);
  const int64_t slots = key.size(2);
  TORCH_CHECK(size % COLUMNS == 0 && key.stride(3) == 1 && value.stride(3) == 1, "heads are rows of whole registers");
  const Tensor queries = query.contiguous(), masks = mask.expand({batch, groups, rows, slots});
  TORCH_CHECK(masks.stride(3) == 1 || slots == 1, "a mask is contiguous along its slots");
  Tensor out = at::empty(query.sizes(), query.options());
  const BFloat16* q = queries.const_data_ptr<BFloat16>();
  BFloat16* y = out.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, batch * groups * rows, 1, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t b = begin / rows / groups, g = begin / rows % groups, row = begin % rows;
      const int64_t count = std::min(rows - row, end - begin);
      const auto from = [&](const Tensor& t, int64_t row) {
        return Rows{t.const_data_ptr<BFloat16>() + b * t.stride(0) + g * t.stride(1) + row * t.stride(2), t.stride(2)};
      };
      attend(q + begin * size, from(key, 0), from(value, 0), from(masks, row), scale, count, slots, size,
             y + begin * size);
      begin += count;
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(headstart, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def("linear(Tensor input, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  library.def("attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(headstart, CPU, library) {
  library.impl("pack", &pack);
  library.impl("linear", &linear);
  library.impl("attention", &attention);
}
