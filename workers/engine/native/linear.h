#ifndef SLIPSTREAM_LINEAR_H
#define SLIPSTREAM_LINEAR_H

#include "vector.h"

INLINE float widen_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE uint16_t to_bfloat16(float f) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* See linear.c. */
void linear_bfloat16(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed,
                     const float *bias, int64_t outputs, uint16_t *out, int32_t threads);

#endif
