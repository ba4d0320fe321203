// Attention of a batch of query tokens over a slot KV cache, with grouped queries and tree masks.
//
// The keys a query sees are numbered in cache order, skipping those its mask hides, and every sum runs over
// these numbers. So a tree node gets bit for bit what it would get had its path been decoded token by token.
#include <type_traits>
#include <vector>

#include "ops.h"

namespace {

constexpr int64_t ROWS_PER_TASK = 16;  // (query, head) pairs that share a transposed tile of keys
constexpr int64_t PARALLEL_FROM = 1 << 17;  // multiply-adds below which starting threads costs more than it saves
constexpr int CHUNK = 4;               // vectors of head_dim accumulated at once

struct Task {
    int64_t segment, token, first, queries, kv_head;  // queries [first, first + queries) of the segment
};

struct Scratch {
    std::vector<float> scores, tile, inverse;
    std::vector<const float*> query;
    std::vector<int64_t> tail;
};

// The keys one query sees: rows [0, before) of its slot, then `tail`.
struct Visible {
    int64_t before;
    const std::vector<int64_t>& tail;
    int64_t size() const { return before + int64_t(tail.size()); }
    int64_t operator[](int64_t i) const { return i < before ? i : tail[size_t(i - before)]; }
};

// Probabilities in place of n scores, padded with zeros to whole vectors; returns 1 / their sum.
float softmax(float* s, int64_t n, float scale) {
    float lane[LANES];
    // The last vector may reach past n: rows are padded to whole vectors.
    for (int64_t i = n; i % LANES; ++i) s[i] = s[0];
    vf most = load<vf>(s);
    for (int64_t i = LANES; i < n; i += LANES) {
        const vf v = load<vf>(s + i);
        most = v > most ? v : most;
    }
    store(lane, most);
    float largest = lane[0];
    for (int i = 1; i < LANES; ++i) largest = lane[i] > largest ? lane[i] : largest;
    for (int64_t i = 0; i < n; i += LANES) store(s + i, exp_lanes((load<vf>(s + i) - largest) * scale));
    for (int64_t i = n; i % LANES; ++i) s[i] = 0.0f;
    vf total{};
    for (int64_t i = 0; i < n; i += LANES) total += load<vf>(s + i);
    store(lane, total);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return 1.0f / lane[0];
}

// run(integral_constant R, first) over `count` rows, in parts of at most MOST rows and near-equal size.
template <int MOST, typename Run> void for_rows(int64_t count, Run run) {
    for (int64_t parts = (count + MOST - 1) / MOST, first = 0; parts > 0; --parts) {
        const int64_t size = (count - first + parts - 1) / parts;
        switch (size) {
#define MQ_CASE(R) \
    case R: \
        if constexpr (R <= MOST) run(std::integral_constant<int, R>{}, first); \
        break;
            MQ_CASE(1) MQ_CASE(2) MQ_CASE(3) MQ_CASE(4) MQ_CASE(5) MQ_CASE(6) MQ_CASE(7) MQ_CASE(8)
#undef MQ_CASE
        }
        first += size;
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Eight floats of a cache row, and scores key by key: a transposed tile pays only where registers are wide.
__m256 load8(const void* p, int64_t i, int32_t dtype) {
    if (dtype == F32) return _mm256_loadu_ps((const float*)p + i);
    const __m128i h = _mm_loadu_si128((const __m128i*)((const uint16_t*)p + i));
    return dtype == F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

float sum8(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <int R>
void score_keys(
    const AttentionJob& j, int64_t base, const Visible& visible, const float* query, float* out, int64_t stride) {
    const int64_t dim = j.head_dim, whole = dim / 8 * 8, n = visible.size();
    for (int64_t i = 0; i < n; ++i) {
        const int64_t at = base + visible[i] * dim;
        __m256 sum[R];
        for (int r = 0; r < R; ++r) sum[r] = _mm256_setzero_ps();
        for (int64_t d = 0; d < whole; d += 8) {
            const __m256 key = load8(j.k_cache, at + d, j.cache_dtype);
            for (int r = 0; r < R; ++r) sum[r] = _mm256_fmadd_ps(_mm256_loadu_ps(query + r * dim + d), key, sum[r]);
        }
        for (int r = 0; r < R; ++r) {
            float score = sum8(sum[r]);
            for (int64_t d = whole; d < dim; ++d) score += query[r * dim + d] * load_one(j.k_cache, at + d, j.cache_dtype);
            out[r * stride + i] = score;
        }
    }
}

// out[r] = inverse[r] * sum over visible keys of p[r][key] * v[key], keys in order; 16 columns at a time.
template <int R>
void mix(
    const AttentionJob& j, int64_t base, const Visible& visible, const float* p, int64_t stride, const float* inverse,
    float* out) {
    const int64_t dim = j.head_dim, whole = dim / 16 * 16, n = visible.size();
    for (int64_t d = 0; d < whole; d += 16) {
        __m256 sum[R][2];
        for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at = base + visible[i] * dim + d;
            const __m256 low = load8(j.v_cache, at, j.cache_dtype), high = load8(j.v_cache, at + 8, j.cache_dtype);
            for (int r = 0; r < R; ++r) {
                const __m256 weight = _mm256_broadcast_ss(p + r * stride + i);
                sum[r][0] = _mm256_fmadd_ps(weight, low, sum[r][0]);
                sum[r][1] = _mm256_fmadd_ps(weight, high, sum[r][1]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < 2; ++c)
                _mm256_storeu_ps(out + r * dim + d + 8 * c, _mm256_mul_ps(sum[r][c], _mm256_set1_ps(inverse[r])));
    }
    for (int64_t d = whole; d < dim; ++d)
        for (int r = 0; r < R; ++r) {
            float sum = 0.0f;
            for (int64_t i = 0; i < n; ++i)
                sum += p[r * stride + i] * load_one(j.v_cache, base + visible[i] * dim + d, j.cache_dtype);
            out[r * dim + d] = sum * inverse[r];
        }
}

#else
#define MQ_TILES

vf load_part(const void* p, int64_t i, int32_t dtype, int64_t left) {
    if (left >= LANES) return load_as(p, i, dtype);
    vf v{};
    for (int64_t l = 0; l < left; ++l) v[l] = load_one(p, i + l, dtype);
    return v;
}

#if defined(__AVX512F__)
// Lanes of two rows, `step` apart, that change places in one step of a transposition.
struct Exchange {
    int32_t low[LANES], high[LANES];
};
constexpr Exchange exchange(int step) {
    Exchange e{};
    for (int l = 0; l < LANES; ++l) {
        e.low[l] = l & step ? LANES + (l ^ step) : l;
        e.high[l] = l & step ? LANES + l : l ^ step;
    }
    return e;
}

template <int STEP> inline void transpose_step(vf* rows) {
    static constexpr Exchange e = exchange(STEP);
    const __m512i low = _mm512_loadu_si512(e.low), high = _mm512_loadu_si512(e.high);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
        if (i & STEP) continue;
        const __m512 a = (__m512)rows[i], b = (__m512)rows[i + STEP];
        rows[i] = (vf)_mm512_permutex2var_ps(a, low, b);
        rows[i + STEP] = (vf)_mm512_permutex2var_ps(a, high, b);
    }
}
#endif

// 16 keys [16][head_dim] -> tile [head_dim][16]; missing keys become zeros.
void load_tile(const AttentionJob& j, const void* keys, int64_t at, int64_t count, float* tile) {
    const int64_t dim = j.head_dim;
    int64_t d = 0;
#if defined(__AVX512F__)
    for (; d + LANES <= dim; d += LANES) {
        vf rows[LANES];
        if (j.cache_dtype == F32 && count == LANES) {
#pragma GCC unroll 16
            for (int k = 0; k < LANES; ++k) rows[k] = load<vf>((const float*)keys + at + k * dim + d);
        } else {
            for (int k = 0; k < LANES; ++k) rows[k] = k < count ? load_as(keys, at + k * dim + d, j.cache_dtype) : vf{};
        }
        transpose_step<1>(rows);
        transpose_step<2>(rows);
        transpose_step<4>(rows);
        transpose_step<8>(rows);
#pragma GCC unroll 16
        for (int k = 0; k < LANES; ++k) store(tile + (d + k) * LANES, rows[k]);
    }
#endif
    for (; d < dim; ++d)
        for (int64_t k = 0; k < LANES; ++k)
            tile[d * LANES + k] = k < count ? load_one(keys, at + k * dim + d, j.cache_dtype) : 0.0f;
}

// Scores of 16 keys for R query rows: sums over even and over odd features, then their sum, whatever R is.
template <int R> void score_rows(const float* const* query, const float* tile, int64_t dim, vf* out) {
    vf even[R], odd[R];
    for (int r = 0; r < R; ++r) even[r] = odd[r] = vf{};
    int64_t d = 0;
    for (; d + 2 <= dim; d += 2) {
        const vf first = load<vf>(tile + d * LANES), second = load<vf>(tile + (d + 1) * LANES);
        for (int r = 0; r < R; ++r) {
            even[r] = fma(splat(query[r][d]), first, even[r]);
            odd[r] = fma(splat(query[r][d + 1]), second, odd[r]);
        }
    }
    if (d < dim)
        for (int r = 0; r < R; ++r) even[r] = fma(splat(query[r][d]), load<vf>(tile + d * LANES), even[r]);
    for (int r = 0; r < R; ++r) out[r] = even[r] + odd[r];
}

// out[r][0..C*16) = inverse[r] * sum over visible keys of p[r][key] * v[key], keys in order.
template <int R, int C>
void mix_rows(
    const AttentionJob& j, int64_t base, int64_t d, const Visible& visible, const float* p, int64_t stride,
    const float* inverse, float* out) {
    vf sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = vf{};
    const auto add = [&](int64_t i, int64_t key) {
        const int64_t at = base + key * j.head_dim + d;
        vf v[C];
        for (int c = 0; c < C; ++c)
            v[c] = C == CHUNK ? load_as(j.v_cache, at + c * LANES, j.cache_dtype)
                              : load_part(j.v_cache, at + c * LANES, j.cache_dtype, j.head_dim - d - c * LANES);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sum[r][c] = fma(splat(p[r * stride + i]), v[c], sum[r][c]);
    };
    for (int64_t i = 0; i < visible.before; ++i) add(i, i);
    for (int64_t i = visible.before; i < visible.size(); ++i) add(i, visible[i]);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            const vf result = sum[r][c] * splat(inverse[r]);
            const int64_t left = j.head_dim - d - c * LANES;
            std::memcpy(out + r * j.head_dim + d + c * LANES, &result, size_t(left < LANES ? left : LANES) * 4);
        }
}

template <int R>
void mix(
    const AttentionJob& j, int64_t base, const Visible& visible, const float* p, int64_t stride, const float* inverse,
    float* out) {
    int64_t d = 0;
    for (; d + CHUNK * LANES <= j.head_dim; d += CHUNK * LANES)
        mix_rows<R, CHUNK>(j, base, d, visible, p, stride, inverse, out);
    for (; d < j.head_dim; d += LANES) mix_rows<R, 1>(j, base, d, visible, p, stride, inverse, out);
}

// Scores of all the task's rows, 16 keys at a time, each row's visible ones in cache order.
void score_task(const AttentionJob& j, const Task& task, int64_t base, int64_t end, int64_t stride, Scratch& s) {
    const SegmentStruct& segment = j.segments[task.segment];
    const int64_t group = j.heads / j.kv_heads, rows = task.queries * group, dim = j.head_dim;
    const uint8_t* mask = segment.tree_mask;
    s.tile.resize(size_t(dim * LANES));
    s.query.resize(size_t(rows));
    for (int64_t r = 0; r < rows; ++r)
        s.query[size_t(r)] = j.query + ((task.token + task.first + r / group) * j.heads + task.kv_head * group + r % group) * dim;
    for (int64_t k = 0; k < end; k += LANES) {
        const int64_t count = end - k < LANES ? end - k : LANES;
        load_tile(j, j.k_cache, base + k * dim, count, s.tile.data());
        for_rows<8>(rows, [&](auto size, int64_t first) {
            constexpr int R = decltype(size)::value;
            vf found[R];
            score_rows<R>(&s.query[size_t(first)], s.tile.data(), dim, found);
            for (int i = 0; i < R; ++i) {
                const int64_t row = first + i;
                float* to = s.scores.data() + row * stride;
                if (!mask || k + count <= segment.start) {
                    store(to + k, found[i]);
                    continue;
                }
                const uint8_t* allowed = mask + (task.first + row / group) * segment.count;
                int64_t at = k;
                for (int64_t hidden = 0; hidden < k - segment.start; ++hidden) at -= !allowed[hidden];
                for (int64_t l = 0; l < count; ++l)
                    if (k + l < segment.start || allowed[k + l - segment.start]) to[at++] = found[i][l];
            }
        });
    }
}

#endif

void run_task(const AttentionJob& j, const Task& task, Scratch& s) {
    const SegmentStruct& segment = j.segments[task.segment];
    const int64_t group = j.heads / j.kv_heads, rows = task.queries * group, dim = j.head_dim;
    const int64_t base = (segment.slot * j.kv_heads + task.kv_head) * j.max_len * dim;
    const uint8_t* mask = segment.tree_mask;
    // Without a mask no query of the task looks past its last one.
    const int64_t end = segment.start + (mask ? segment.count : task.first + task.queries);
    const int64_t stride = (end / LANES + 2) * LANES;
    s.scores.resize(size_t(rows * stride));
#if defined(MQ_TILES)
    score_task(j, task, base, end, stride, s);
#endif
    s.inverse.resize(size_t(group));
    for (int64_t q = 0; q < task.queries; ++q) {
        const int64_t i = task.first + q;
        s.tail.clear();
        for (int64_t k = 0; k < segment.count; ++k)
            if (mask ? mask[i * segment.count + k] : k <= i) s.tail.push_back(segment.start + k);
        const Visible visible{segment.start, s.tail};
        float* p = s.scores.data() + q * group * stride;
#if !defined(MQ_TILES)
        const float* rows_of = j.query + ((task.token + i) * j.heads + task.kv_head * group) * dim;
        for_rows<4>(group, [&](auto size, int64_t h) {
            score_keys<decltype(size)::value>(j, base, visible, rows_of + h * dim, p + h * stride, stride);
        });
#endif
        for (int64_t h = 0; h < group; ++h) s.inverse[size_t(h)] = softmax(p + h * stride, visible.size(), j.scale);
        float* out = j.out + ((task.token + i) * j.heads + task.kv_head * group) * dim;
        for_rows<4>(group, [&](auto size, int64_t h) {
            mix<decltype(size)::value>(j, base, visible, p + h * stride, stride, &s.inverse[size_t(h)], out + h * dim);
        });
    }
}

}  // namespace

MQ_API void mq_attention(const AttentionJob* job) {
    const int64_t group = job->heads / job->kv_heads;
    const int64_t per_task = group >= ROWS_PER_TASK ? 1 : ROWS_PER_TASK / group;
    std::vector<Task> tasks;
    int64_t token = 0;
    for (int64_t s = 0; s < job->num_segments; ++s) {
        const int64_t count = job->segments[s].count;
        for (int64_t first = 0; first < count; first += per_task)
            for (int64_t h = 0; h < job->kv_heads; ++h)
                tasks.push_back({s, token, first, count - first < per_task ? count - first : per_task, h});
        token += count;
    }
    int64_t work = 0;  // multiply-adds of a query row over the keys, all rows
    for (const Task& t : tasks) work += t.queries * group * job->head_dim * (job->segments[t.segment].start + t.first);
    // Late tasks of a long prefill see the most keys: dynamic, so that no thread ends up with all of them.
#pragma omp parallel num_threads(job->threads) if (tasks.size() > 1 && work > PARALLEL_FROM)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < int64_t(tasks.size()); ++t) run_task(*job, tasks[size_t(t)], scratch);
    }
}
