// Integer weights times activations in fixed point: per row and segment, x = scale * sum of digit_p * 256^p
// with signed byte digits. One digit is int8 activations; two (16 bits) and three (22 bits) are the exact
// path. Sums of products are exact in int32 within a segment, then scaled and added in fp32, in segment
// order: a row's result does not depend on the other rows, the tile it is in or the thread that computes it.
#pragma once
#include "micro.h"

// Digits of one row into tile order: digits[step][2][rows * planes][4]; sums[segment][rows * planes].
template <int P>
static void quantize_row(
    const Weight& w, const float* x, float* padded, int64_t r, int64_t rows, int8_t* digits, int32_t* sums,
    float* scales) {
    constexpr float limit = P == 1 ? 127.0f : P == 2 ? 32639.0f : 4161407.0f;
    const int64_t stride = rows * P;
    for (int64_t s = 0; s < w.num_segments; ++s) {
        const int64_t begin = int64_t(w.segments[s]) * 8, end = int64_t(w.segments[s + 1]) * 8;
        const float* v = x + begin;
        if (w.feature) {
            for (int64_t i = begin; i < end; ++i) padded[i] = w.feature[i] < 0 ? 0.0f : x[w.feature[i]];
            v = padded + begin;
        }
        uint32_t largest = 0;  // of |x| as bits: NaN and Inf order above every number
        for (int64_t i = 0; i < end - begin; ++i) {
            const uint32_t bits = as_bits(v[i]) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        const float extreme = as_float(largest);
        // Below 2^-100 the inverse would overflow; such values vanish in any fp32 sum that matters.
        const float inverse = extreme > 0x1p-100f && largest < 0x7f800000u ? limit / extreme : 0.0f;
        scales[s] = largest >= 0x7f800000u ? as_float(0x7fc00000u) : inverse == 0.0f ? 0.0f : extreme / limit;
        int32_t sum[P] = {};
        for (int64_t i = 0; i < end - begin; i += 4) {
            int8_t* out = digits + ((begin + i) / 4 * stride + r * P) * 4;
            for (int j = 0; j < 4; ++j) {
                // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the mantissa.
                int32_t q = int32_t(as_bits(v[i + j] * inverse + 12582912.0f)) - 0x4b400000;
                for (int p = 0; p < P; ++p) {
                    const int32_t digit = p == P - 1 ? q : int8_t(q);
                    q = (q - digit) >> 8;
                    out[p * 4 + j] = int8_t(digit);
                    sum[p] += digit;
                }
            }
        }
        for (int p = 0; p < P; ++p) sums[s * stride + r * P + p] = sum[p];
    }
}

// One segment, one panel, ROWS rows: acc[ROWS][32] += w_scale * x_scale * (digits . (codes - offset - zero)).
template <int BITS, int P, int ROWS>
static void micro_int(
    const uint8_t* __restrict codes, int64_t steps, const int8_t* __restrict digits,
    const int32_t* __restrict sums, const vf* __restrict w_scale, const vi* __restrict offset,
    const float* __restrict x_scale, int64_t x_scale_stride, float* __restrict acc) {
    vi sum[ROWS * P][2];
    segment_sums<BITS, P, ROWS>(codes, steps, digits, sums, offset, sum);
#pragma GCC unroll 12
    for (int m = 0; m < ROWS; ++m) {
        const vf scale = splat(x_scale[m * x_scale_stride]);
        for (int c = 0; c < 2; ++c) {
            vf total{};
            for (int p = P - 1; p >= 0; --p) {
                const vi s = sum[m * P + p][c];
                total = p == P - 1 ? to_float(s) : fma(total, splat(256.0f), to_float(s));
            }
            float* a = acc + m * PANEL + c * LANES;
            store(a, fma(total * scale, w_scale[c], load<vf>(a)));
        }
    }
}

typedef void (*MicroInt)(
    const uint8_t*, int64_t, const int8_t*, const int32_t*, const vf*, const vi*, const float*, int64_t, float*);

template <int BITS, int P, int ROWS> struct IntTable {
    static MicroInt find(int64_t rows) {
        if (rows == ROWS) return micro_int<BITS, P, ROWS>;
        return IntTable<BITS, P, ROWS - 1>::find(rows);
    }
};
template <int BITS, int P> struct IntTable<BITS, P, 0> {
    static MicroInt find(int64_t) { return nullptr; }
};

static inline int64_t max_tile_rows(int32_t planes) {
    const int64_t rows = MAX_ROWS / planes;
    return rows < 1 ? 1 : rows;
}

static MicroInt find_micro_int(int32_t kind, int32_t planes, int64_t rows) {
    constexpr int ONE = MAX_ROWS, TWO = MAX_ROWS / 2, THREE = MAX_ROWS / 3 < 1 ? 1 : MAX_ROWS / 3;
    if (kind == INT4)
        return planes == 1   ? IntTable<4, 1, ONE>::find(rows)
               : planes == 2 ? IntTable<4, 2, TWO>::find(rows)
                             : IntTable<4, 3, THREE>::find(rows);
    return planes == 1   ? IntTable<8, 1, ONE>::find(rows)
           : planes == 2 ? IntTable<8, 2, TWO>::find(rows)
                         : IntTable<8, 3, THREE>::find(rows);
}
