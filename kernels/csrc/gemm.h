// Packed weights and GEMM jobs, as Python's ctypes structures mirror them (kernels/cpu/library.py).
#pragma once
#include "vec.h"

enum Kind : int32_t { INT4 = 0, INT8 = 1, DENSE = 2 };

// A K x N weight in panels of 32 output features. Integer codes are unsigned (signed code + offset) and come
// in steps of 8 input features: int8 [panel][step][2][32][4], int4 [panel][step][32][4] with input features
// 0..3 of the step in the low nibbles and 4..7 in the high ones. Segments are runs of steps that share weight
// scales and activation scales; a segment's tail is padded to a whole step.
struct Weight {
    const uint8_t* codes;
    const void* scales;         // [panel][scale_rows][32], fp32 or fp16
    const int8_t* zeros;        // [panel][scale_rows][32] or null
    const int32_t* segments;    // [num_segments + 1] first step of each
    const int32_t* scale_row;   // [num_segments]
    const int32_t* feature;     // [steps * 8] input feature of each slot, -1 for padding; null if slot == feature
    int64_t in_features, out_features, num_segments, scale_rows, layout;  // layout: equal ids, equal segments
    int32_t kind, dtype;        // dtype of scales, or of a dense weight
};

// out = residual + act(x @ w + bias). planes: signed bytes an activation is split into (integer weights).
struct Job {
    const Weight* weight;
    const void* x;
    const float* bias;
    const void* residual;
    void* out;
    int64_t rows, x_stride, residual_stride, out_stride;
    int32_t x_dtype, out_dtype, planes, silu;
};

// Activations of one job, brought into the order the micro-kernels read: tiles of rows, interleaved.
struct Tile {
    int64_t row, rows;
    int64_t x, sums;  // offsets into the digits (or floats) and the digit sums
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void finish_row(const Job& job, int64_t row, int64_t first_column, const float* acc);
