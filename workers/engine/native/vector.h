/* Sixteen floats at a time, in GCC's vector extension: the compiler maps it to what the processor has. */
#ifndef SLIPSTREAM_VECTOR_H
#define SLIPSTREAM_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2)));

/* CALL(n) with a constant n, from 1 to 6, so that loops over it unroll into registers. */
#define UP_TO_SIX(count, CALL)                                                                     \
    switch (count) {                                                                               \
        case 1: CALL(1); break;                                                                    \
        case 2: CALL(2); break;                                                                    \
        case 3: CALL(3); break;                                                                    \
        case 4: CALL(4); break;                                                                    \
        case 5: CALL(5); break;                                                                    \
        default: CALL(6); break;                                                                   \
    }

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

/* The same for sixteen numbers, none of them NaN. */
INLINE hvec to_bfloat16s(vec x) {
    uvec bits;
    memcpy(&bits, &x, sizeof bits);
    return __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, hvec);
}

INLINE vec splat(float x) { return (vec){0} + x; }

/* a where the mask is -1, b where it is 0. */
INLINE vec select_vec(ivec mask, vec a, vec b) {
    ivec x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    x = (x & mask) | (y & ~mask);
    memcpy(&a, &x, sizeof a);
    return a;
}

INLINE vec max_vec(vec a, vec b) { return select_vec(a > b, a, b); }

INLINE int any_lane(ivec mask) {
    uint64_t words[LANES / 2], all = 0;
    memcpy(words, &mask, sizeof words);
    for (int i = 0; i < LANES / 2; i++) all |= words[i];
    return all != 0;
}

INLINE float horizontal_sum(vec x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

INLINE float horizontal_max(vec x) {
    float max = x[0];
    for (int lane = 1; lane < LANES; lane++) max = x[lane] > max ? x[lane] : max;
    return max;
}

/* sum + w[even] * x[even] + w[odd] * x[odd], in each of sixteen lanes; both hold two bfloat16. */
INLINE vec add_pairs(vec sum, uvec weights, uint32_t pair) {
#ifdef __AVX512BF16__
    __m512 s;
    __m512i w;
    memcpy(&s, &sum, sizeof s);
    memcpy(&w, &weights, sizeof w);
    s = _mm512_dpbf16_ps(s, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int32_t)pair));
    memcpy(&sum, &s, sizeof s);
    return sum;
#else
    uint32_t low = pair << 16, high = pair & 0xffff0000u;
    float even, odd;
    memcpy(&even, &low, 4);
    memcpy(&odd, &high, 4);
    uvec shifted = weights << 16, masked = weights & 0xffff0000u;
    vec w0, w1;
    memcpy(&w0, &shifted, sizeof w0);
    memcpy(&w1, &masked, sizeof w1);
    sum = sum + w0 * even;
    return sum + w1 * odd;
#endif
}

/* exp for x <= 0, to about one unit in the last place; below -87 it is 0. */
INLINE vec exp_vec(vec x) {
    ivec tiny = x < splat(-87.0f);
    vec n = x * 1.44269504088896341f;
    n = (n + 12582912.0f) - 12582912.0f; /* round to nearest: 1.5 * 2^23 */
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec scale;
    memcpy(&scale, &power, sizeof scale);
    p = p * scale;
    ivec bits;
    memcpy(&bits, &p, sizeof bits);
    bits &= ~tiny;
    memcpy(&p, &bits, sizeof p);
    return p;
}

#endif
