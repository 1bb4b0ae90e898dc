/* Vectors of one instruction set, for the kernels of programs (kernel_set.h) and of attention: included once for each.
 *
 * The includer defines VECTORS, one of the sets below, NAME(x), the set's own name for x, and TARGET, the function attribute
 * that selects it. It gets
 *
 *     VW                        floats in a vector; divides 16
 *     vf vi vu                  vectors of VW floats, of VW int32, of VW uint32
 *     vset vseti                broadcast of a float, of an int32
 *     vfma                      a * b + c rounded once (twice with UNFUSED)
 *     vmax vmaxi                maximum of floats, which is b where one is NaN or both are 0, or of int32
 *     vhmax vhmaxi vhaddi       maximum over the lanes of floats; maximum and sum over those of int32
 *     vany                      whether any lane of a comparison is true
 *     vhmax_of_8(p)             the same of 8 vectors at p, in the first 8 lanes; AVX-512 alone
 *     vwiden8(p) vwiden16(p)    VW uint8 or uint16 as int32; not on NEON
 *     vhalf(p) vfloat8(p)       VW numbers of float16; e4m3fn codes over 256, normal numbers
 *     vstore_halves(p, x)       stores VW floats as float16; AVX2 and AVX-512 alone
 *     VSHIFT(x, bits)           vi x << bits: what leaves the lanes is lost, where C leaves signed numbers undefined
 *     VADD(a, b)                vi a + b modulo 2^32, for lanes that may overflow before they are discarded
 *     LOADF LOADI STOREF PICK UNROLL INLINE, and the functions of vector_math.h
 */
#include "vector_parts.h"

#undef VW
#undef vset
#undef vseti
#undef vfma
#undef vmax
#undef vmaxi
#undef vhmax
#undef vhmaxi
#undef vhaddi
#undef vany
#undef vhmax_of_8
#undef vwiden8
#undef vwiden16
#undef vhalf
#undef vfloat8
#undef vstore_halves
#undef vf
#undef vi
#undef vu
#undef INLINE
#undef UNROLL

#if VECTORS == AVX512
#define VW 16
#define vset(x) ((vf)_mm512_set1_ps(x))
#define vseti(x) ((vi)_mm512_set1_epi32(x))
#define vfma(a, b, c) ((vf)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define vmax(a, b) ((vf)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define vmaxi(a, b) ((vi)_mm512_max_epi32((__m512i)(a), (__m512i)(b)))
#define vhmax(a) _mm512_reduce_max_ps((__m512)(a))
#define vhmaxi(a) _mm512_reduce_max_epi32((__m512i)(a))
#define vhaddi(a) _mm512_reduce_add_epi32((__m512i)(a))
#define vany(a) (_mm512_test_epi32_mask((__m512i)(a), (__m512i)(a)) != 0)
#define vhmax_of_8(p) ((vf)maxima_of_8((const __m512 *)(p)))
#define vwiden8(p) ((vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define vwiden16(p) ((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))))
#define vhalf(p) ((vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#define vfloat8(p) ((vf)_mm512_cvtph_ps(halves_of_16_float8(p)))
#define vstore_halves(p, x) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT))
#elif VECTORS == AVX2
#define VW 8
#define vset(x) ((vf)_mm256_set1_ps(x))
#define vseti(x) ((vi)_mm256_set1_epi32(x))
#define vfma(a, b, c) ((vf)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define vmax(a, b) ((vf)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define vmaxi(a, b) ((vi)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define vhmax(a) maximum_of_8((__m256)(a))
#define vhmaxi(a) largest_of_8((__m256i)(a))
#define vhaddi(a) sum_of_8((__m256i)(a))
#define vany(a) (_mm256_movemask_epi8((__m256i)(a)) != 0)
#define vwiden8(p) ((vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define vwiden16(p) ((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define vhalf(p) ((vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define vfloat8(p) ((vf)_mm256_cvtph_ps(halves_of_8_float8(p)))
#define vstore_halves(p, x) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))
#elif VECTORS == NEON
#define VW 4
#define vset(x) ((vf)vdupq_n_f32(x))
#define vseti(x) ((vi)vdupq_n_s32(x))
#define vfma(a, b, c) ((vf)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define vmax(a, b) ((vf)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b)))
#define vmaxi(a, b) ((vi)vmaxq_s32((int32x4_t)(a), (int32x4_t)(b)))
#define vhmax(a) vmaxvq_f32((float32x4_t)(a))
#define vhmaxi(a) vmaxvq_s32((int32x4_t)(a))
#define vhaddi(a) vaddvq_s32((int32x4_t)(a))
#define vany(a) (vmaxvq_u32((uint32x4_t)(a)) != 0)
#define vhalf(p) ((vf)neon_half(p))
#define vfloat8(p) ((vf)neon_float8(p))
#else
#define VW 4
#define vset(x) ((vf){(x), (x), (x), (x)})
#define vseti(x) ((vi){(x), (x), (x), (x)})
#if VECTORS == UNFUSED
#define vfma(a, b, c) ((a) * (b) + (c))
#else
#define vfma(a, b, c) ((vf)plain_fma((plain_floats)(a), (plain_floats)(b), (plain_floats)(c)))
#endif
#define vmax(a, b) ((vf)plain_pick((plain_floats)(a) > (plain_floats)(b), (plain_ints)(a), (plain_ints)(b)))
#define vmaxi(a, b) ((vi)plain_pick((plain_ints)(a) > (plain_ints)(b), (plain_ints)(a), (plain_ints)(b)))
#define vhmax(a) plain_largest((plain_floats)(a))
#define vhmaxi(a) plain_largest_int((plain_ints)(a))
#define vhaddi(a) plain_sum((plain_ints)(a))
#define vany(a) (((a)[0] | (a)[1] | (a)[2] | (a)[3]) != 0)
#define vwiden8(p) ((vi){(p)[0], (p)[1], (p)[2], (p)[3]})
#define vwiden16(p) ((vi)plain_widen16(p))
#define vhalf(p) ((vf)plain_halves(p))
#define vfloat8(p) ((vf)plain_float8(p))
#endif

#if VECTORS == PLAIN
#define UNROLL /* too few registers to gain from it */
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

typedef float NAME(vf) __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef int32_t NAME(vi) __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint32_t NAME(vu) __attribute__((vector_size(VW * 4), aligned(4), may_alias));

#define vf NAME(vf)
#define vi NAME(vi)
#define vu NAME(vu)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define VSHIFT(x, bits) ((vi)((vu)(x) << (bits)))
#define VADD(a, b) ((vi)((vu)(a) + (vu)(b)))
#define LOADF(p) (*(const vf *)(p))
#define LOADI(p) (*(const vi *)(p))
#define STOREF(p, x) (*(vf *)(p) = (x))
#define PICK(mask, yes, no) ((vf)(((mask) & (vi)(yes)) | (~(mask) & (vi)(no))))

#include "vector_math.h"
