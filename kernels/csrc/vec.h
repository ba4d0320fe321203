// 16-lane vectors by the compiler's vector extensions: one source for every ISA, split where registers are
// narrower. Built with -ffp-contract=off, so a fused multiply-add happens only where fma() asks for it and a
// result never depends on how the compiler blocked the loop round it.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int8_t vb __attribute__((vector_size(16)));

#define MQ_API extern "C" __attribute__((visibility("default")))

enum Dtype : int32_t { F32 = 0, F16 = 1, BF16 = 2 };

constexpr int LANES = 16;
constexpr int PANEL = 32;  // output features a packed weight keeps together

template <typename V> static inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <typename V> static inline void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }
static inline vf splat(float s) { return s - vf{}; }
static inline vi splat_i(int32_t s) { return s - vi{}; }
static inline vi to_int(vf v) { return __builtin_convertvector(v, vi); }
static inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }

static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    vf r;
    for (int h = 0; h < 2; ++h) {
        const __m256 x = _mm256_fmadd_ps(
            _mm256_loadu_ps((const float*)&a + 8 * h), _mm256_loadu_ps((const float*)&b + 8 * h),
            _mm256_loadu_ps((const float*)&c + 8 * h));
        std::memcpy((float*)&r + 8 * h, &x, sizeof x);
    }
    return r;
#else
    return a * b + c;
#endif
}

static inline float as_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
static inline uint32_t as_bits(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}

static inline float from_bf16(uint16_t h) { return as_float(uint32_t(h) << 16); }
static inline uint16_t to_bf16(float f) {
    const uint32_t u = as_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

static inline float from_f16(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return as_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // Scaling by 2^112 turns fp16's exponent bias into fp32's, subnormals included.
    return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}
static inline uint16_t to_f16(float f) {
#if defined(__AVX2__)
    return uint16_t(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint32_t u = as_bits(f), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (magnitude < 0x38800000u) return uint16_t(sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u));
    return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13));
#endif
}

static inline vf load_bf16(const uint16_t* p) {
    return (vf)(__builtin_convertvector(load<vh>(p), vu) << 16);
}
static inline vf load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    vf v;
#if defined(__AVX2__)
    for (int h = 0; h < 2; ++h) {
        const __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + h));
        std::memcpy((float*)&v + 8 * h, &part, sizeof part);
    }
#else
    for (int i = 0; i < LANES; ++i) v[i] = from_f16(p[i]);
#endif
    return v;
#endif
}
static inline vf load_as(const void* p, int64_t i, int32_t dtype) {
    if (dtype == F32) return load<vf>((const float*)p + i);
    return dtype == F16 ? load_f16((const uint16_t*)p + i) : load_bf16((const uint16_t*)p + i);
}
static inline float load_one(const void* p, int64_t i, int32_t dtype) {
    if (dtype == F32) return ((const float*)p)[i];
    const uint16_t h = ((const uint16_t*)p)[i];
    return dtype == F16 ? from_f16(h) : from_bf16(h);
}
static inline void store_one(void* p, int64_t i, int32_t dtype, float f) {
    if (dtype == F32) ((float*)p)[i] = f;
    else ((uint16_t*)p)[i] = dtype == F16 ? to_f16(f) : to_bf16(f);
}

// e^x by 2^n * p(f), |f| <= ln2/2: Cephes' expf polynomial (Moshier), about 1 ulp. Clamped to fp32's range.
static inline float exp_one(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const float f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    return p * as_float(uint32_t(int32_t(n) + 127) << 23);
}
static inline float silu_one(float x) { return x / (1.0f + exp_one(-x)); }

// The same, lane by lane: the same operations in the same order, so the same bits.
static inline vf exp_lanes(vf x) {
    x = x > 88.0f ? splat(88.0f) : x;
    x = x < -87.0f ? splat(-87.0f) : x;
    const vf n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    const vf f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    return p * (vf)((to_int(n) + 127) << 23);
}
static inline vf silu_lanes(vf x) { return x / (1.0f + exp_lanes(-x)); }
