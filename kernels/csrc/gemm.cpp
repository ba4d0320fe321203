// Runs GEMM jobs: activations are packed once per distinct x, then threads take panels of all jobs.
#include <cstdlib>
#include <utility>
#include <vector>

#include "gemm_dense.h"
#include "gemm_int.h"

namespace {

constexpr int64_t BLOCK_ROWS = 48;  // rows whose fp32 sums and digits stay in L1 beside a weight segment

// Multiply-adds (a pass over the weight counts as 4 rows) below which starting threads costs more than it saves.
constexpr int64_t PARALLEL_FROM = 1 << 19;

// Bytes of weight a thread streams before it asks for more: jumping elsewhere loses what was prefetched.
constexpr int64_t TURN_BYTES = 1 << 17;

// Panels a thread takes at a time: enough to stream, few enough that no thread waits long for the last.
int64_t panels_a_turn(int64_t panels, int64_t bytes, int64_t threads) {
    const int64_t wanted = TURN_BYTES * panels / (bytes + 1), most = panels / (2 * threads);
    const int64_t turn = wanted < most ? wanted : most;
    return turn < 1 ? 1 : turn;
}

class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    void* reserve(int64_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = ceil_div(bytes, 4096) * 4096;
            data_ = std::aligned_alloc(64, size_t(size_));
            if (!data_) std::abort();
        }
        return data_;
    }

  private:
    void* data_ = nullptr;
    int64_t size_ = 0;
};

struct Activations {
    const Job* job;
    std::vector<Tile> tiles;
    char* packed;    // digits, or floats for a dense weight
    int32_t* sums;
    float* scales;   // [rows][num_segments]
};

// Whether activations stay pairs of bf16: both sides are bf16, and the CPU multiplies such pairs.
bool in_pairs(const Job& job) {
    return HAS_PAIRS && job.weight->kind == DENSE && job.weight->dtype == BF16 && job.x_dtype == BF16;
}

bool same_activations(const Job& a, const Job& b) {
    return a.x == b.x && a.rows == b.rows && a.x_stride == b.x_stride && a.x_dtype == b.x_dtype &&
           a.planes == b.planes && a.weight->layout == b.weight->layout &&
           a.weight->in_features == b.weight->in_features &&
           (a.weight->kind == DENSE) == (b.weight->kind == DENSE) && in_pairs(a) == in_pairs(b);
}

int64_t padded_features(const Weight& w) {
    return w.kind == DENSE ? ceil_div(w.in_features, 2) * 2 : int64_t(w.segments[w.num_segments]) * 8;
}

// Of a dense weight; only bf16 is padded to an even number.
int64_t stored_features(const Weight& w) { return w.dtype == BF16 ? padded_features(w) : w.in_features; }

int64_t panel_bytes(const Weight& w) {
    if (w.kind == DENSE) return stored_features(w) * PANEL * (w.dtype == F32 ? 4 : 2);
    return w.segments[w.num_segments] * int64_t(w.kind == INT4 ? 128 : 256);
}

// Splits rows into tiles of near-equal size, so that no tile is left with a single row.
void make_tiles(Activations& a) {
    const Weight& w = *a.job->weight;
    const int64_t planes = w.kind == DENSE ? 1 : a.job->planes;
    const int64_t rows = a.job->rows, features = padded_features(w);
    const int64_t item = w.kind != DENSE ? planes : in_pairs(*a.job) ? 2 : 4;
    const int64_t count = ceil_div(rows, max_tile_rows(int32_t(planes)));
    int64_t row = 0;
    for (int64_t t = 0; t < count; ++t) {
        const int64_t size = ceil_div(rows - row, count - t);
        a.tiles.push_back({row, size, row * features * item, row * planes * w.num_segments});
        row += size;
    }
}

void pack_row(const Activations& a, const Tile& tile, int64_t row, float* scratch) {
    const Job& job = *a.job;
    const Weight& w = *job.weight;
    const int64_t features = padded_features(w);
    float* x = scratch;
    const int64_t start = (tile.row + row) * job.x_stride;
    int64_t i = 0;
    for (; i + LANES <= w.in_features; i += LANES) store(x + i, load_as(job.x, start + i, job.x_dtype));
    for (; i < w.in_features; ++i) x[i] = load_one(job.x, start + i, job.x_dtype);
    for (; i < features; ++i) x[i] = 0.0f;
    if (in_pairs(job)) {
        // Both halves' low bits are zero: the values came from bf16.
        uint32_t* out = (uint32_t*)(a.packed + tile.x) + row;
        for (i = 0; i < features; i += 2) out[i / 2 * tile.rows] = as_bits(x[i]) >> 16 | as_bits(x[i + 1]);
        return;
    }
    if (w.kind == DENSE) {
        float* out = (float*)(a.packed + tile.x) + row;
        for (i = 0; i < features; ++i) out[i * tile.rows] = x[i];
        return;
    }
    float* padded = scratch + (features > w.in_features ? features : w.in_features);
    int8_t* digits = (int8_t*)a.packed + tile.x;
    int32_t* sums = a.sums + tile.sums;
    float* scales = a.scales + (tile.row + row) * w.num_segments;
    const auto quantize = job.planes == 1 ? quantize_row<1> : job.planes == 2 ? quantize_row<2> : quantize_row<3>;
    quantize(w, x, padded, row, tile.rows, digits, sums, scales);
}

void panel_dense(const Job& job, const Activations& a, int64_t panel, float* acc) {
    const Weight& w = *job.weight;
    const int64_t stored = stored_features(w);
    const uint8_t* codes = w.codes + panel * panel_bytes(w);
    const bool pairs = in_pairs(job);
    for (const Tile& tile : a.tiles) {
        const MicroDense micro = pairs ? find_micro_pairs(tile.rows) : find_micro_dense(w.dtype, tile.rows);
        micro(codes, stored, (const float*)(a.packed + tile.x), acc);
        for (int64_t r = 0; r < tile.rows; ++r) finish_row(job, tile.row + r, panel * PANEL, acc + r * PANEL);
    }
}

void panel_int(const Job& job, const Activations& a, int64_t panel, float* acc) {
    const Weight& w = *job.weight;
    const int64_t step_bytes = w.kind == INT4 ? 128 : 256, planes = job.planes;
    const uint8_t* codes = w.codes + panel * panel_bytes(w);
    const int64_t side = panel * w.scale_rows * PANEL;
    for (size_t first = 0, last; first < a.tiles.size(); first = last) {
        const int64_t base = a.tiles[first].row;
        for (last = first; last < a.tiles.size() && a.tiles[last].row + a.tiles[last].rows - base <= BLOCK_ROWS;)
            ++last;
        const int64_t rows = a.tiles[last - 1].row + a.tiles[last - 1].rows - base;
        std::memset(acc, 0, size_t(rows * PANEL) * sizeof(float));
        for (int64_t s = 0; s < w.num_segments; ++s) {
            const int64_t at = side + w.scale_row[s] * PANEL;
            vf scale[2];
            vi offset[2];
            for (int c = 0; c < 2; ++c) {
                scale[c] = load_as(w.scales, at + c * LANES, w.dtype);
                offset[c] = splat_i(w.kind == INT4 ? 8 : 128);
                if (w.zeros) offset[c] += __builtin_convertvector(load<vb>(w.zeros + at + c * LANES), vi);
            }
            const int64_t begin = w.segments[s], steps = w.segments[s + 1] - begin;
            for (size_t t = first; t < last; ++t) {
                const Tile& tile = a.tiles[t];
                const int64_t stride = tile.rows * planes;
                find_micro_int(w.kind, job.planes, tile.rows)(
                    codes + begin * step_bytes, steps, (const int8_t*)a.packed + tile.x + begin * 8 * stride,
                    a.sums + tile.sums + s * stride, scale, offset, a.scales + tile.row * w.num_segments + s,
                    w.num_segments, acc + (tile.row - base) * PANEL);
            }
        }
        for (int64_t r = 0; r < rows; ++r) finish_row(job, base + r, panel * PANEL, acc + r * PANEL);
    }
}

}  // namespace

void finish_row(const Job& job, int64_t row, int64_t first_column, const float* acc) {
    float v[PANEL];
    const int64_t left = job.weight->out_features - first_column;
    const int64_t columns = left < PANEL ? left : PANEL;
    std::memcpy(v, acc, sizeof v);
    if (job.bias)
        for (int64_t i = 0; i < columns; ++i) v[i] += job.bias[first_column + i];
    if (job.silu)
        for (int i = 0; i < PANEL; i += LANES) store(v + i, silu_lanes(load<vf>(v + i)));
    if (job.residual)
        for (int64_t i = 0; i < columns; ++i)
            v[i] += load_one(job.residual, row * job.residual_stride + first_column + i, job.out_dtype);
    const int64_t at = row * job.out_stride + first_column;
    if (job.out_dtype == F32 && columns == PANEL) std::memcpy((float*)job.out + at, v, sizeof v);
    else
        for (int64_t i = 0; i < columns; ++i) store_one(job.out, at + i, job.out_dtype, v[i]);
}

MQ_API void mq_gemm(const Job* jobs, int64_t count, int32_t threads) {
    static thread_local Buffer packed_buffer;
    std::vector<Activations> inputs;
    std::vector<int> input_of(size_t(count), 0);
    std::vector<int64_t> first_panel(size_t(count) + 1, 0);
    for (int64_t j = 0; j < count; ++j) {
        first_panel[size_t(j) + 1] = first_panel[size_t(j)] + ceil_div(jobs[j].weight->out_features, PANEL);
        if (inputs.empty() || !same_activations(*inputs.back().job, jobs[j])) {
            inputs.push_back({&jobs[j], {}, nullptr, nullptr, nullptr});
            make_tiles(inputs.back());
        }
        input_of[size_t(j)] = int(inputs.size()) - 1;
    }
    int64_t bytes = 0, largest = 0, total_rows = 0;
    auto take = [&bytes](int64_t size) { return std::exchange(bytes, bytes + ceil_div(size, 64) * 64); };
    std::vector<int64_t> offsets;
    for (const Activations& a : inputs) {
        const Weight& w = *a.job->weight;
        const int64_t features = padded_features(w), rows = a.job->rows, segments = w.num_segments;
        offsets.push_back(take(rows * features * (w.kind == DENSE ? 4 : a.job->planes)));
        offsets.push_back(take(rows * a.job->planes * segments * 4));
        offsets.push_back(take(rows * segments * 4));
        const int64_t width = features > w.in_features ? features : w.in_features;
        largest = width > largest ? width : largest;
        total_rows += rows;
    }
    char* memory = (char*)packed_buffer.reserve(bytes);
    for (size_t i = 0; i < inputs.size(); ++i) {
        inputs[i].packed = memory + offsets[3 * i];
        inputs[i].sums = (int32_t*)(memory + offsets[3 * i + 1]);
        inputs[i].scales = (float*)(memory + offsets[3 * i + 2]);
    }
    const int64_t panels = first_panel.back();
    int64_t work = 0, weight_bytes = 0;
    for (int64_t j = 0; j < count; ++j) {
        weight_bytes += (first_panel[size_t(j) + 1] - first_panel[size_t(j)]) * panel_bytes(*jobs[j].weight);
        work += (jobs[j].rows + 4) * jobs[j].weight->in_features * jobs[j].weight->out_features;
    }
    const int64_t turn = panels_a_turn(panels, weight_bytes, threads);
    const int64_t scratch_floats = largest * 2 + BLOCK_ROWS * PANEL;
    auto pack_tile_row = [&](int64_t index, float* scratch) {
        for (const Activations& a : inputs) {
            if (index < a.job->rows) {
                size_t t = 0;
                while (index >= a.tiles[t].row + a.tiles[t].rows) ++t;
                return pack_row(a, a.tiles[t], index - a.tiles[t].row, scratch);
            }
            index -= a.job->rows;
        }
    };
    static thread_local Buffer own_scratch;
    const bool few = total_rows <= 2;  // packing them is shorter than a barrier
    if (few)
        for (int64_t i = 0; i < total_rows; ++i) pack_tile_row(i, (float*)own_scratch.reserve(scratch_floats * 4));
#pragma omp parallel num_threads(threads) if (panels > 1 && work > PARALLEL_FROM)
    {
        float* scratch = (float*)own_scratch.reserve(scratch_floats * 4);
        if (!few) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < total_rows; ++i) pack_tile_row(i, scratch);
        }
        float* acc = scratch + largest * 2;
#pragma omp for schedule(dynamic, turn) nowait
        for (int64_t i = 0; i < panels; ++i) {
            size_t j = 0;
            while (i >= first_panel[j + 1]) ++j;
            const auto run = jobs[j].weight->kind == DENSE ? panel_dense : panel_int;
            run(jobs[j], inputs[size_t(input_of[j])], i - first_panel[j], acc);
        }
    }
}

// A single job with its fields as arguments: filling a structure from Python costs more than the call.
MQ_API void mq_gemm_one(
    const Weight* weight, const void* x, const float* bias, const void* residual, void* out, int64_t rows,
    int64_t x_stride, int64_t residual_stride, int64_t out_stride, int32_t x_dtype, int32_t out_dtype, int32_t planes,
    int32_t silu, int32_t threads) {
    const Job job{weight, x,        bias,            residual,   out,     rows,
                  x_stride, residual_stride, out_stride, x_dtype, out_dtype, planes, silu};
    mq_gemm(&job, 1, threads);
}
