/* Functions of vectors of floats, included once per instruction set by vectors.h. Polynomials of our own rather than
 * libm's, whose last bits differ from one machine to the next. NaN gives NaN.
 */

/* e^x for x <= 0, within 1.5 ulp; 0 below -87. Cody-Waite reduction, Cephes' polynomial. */
INLINE vf NAME(exp_negative)(vf x)
{
    const vf shift = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    const vf shifted = vfma(x, vset(1.44269504088896341f), shift);
    const vf whole = shifted - shift;
    vf r = vfma(whole, vset(-0.693359375f), x);
    r = vfma(whole, vset(2.12194440e-4f), r);
    vf y = vset(1.9875691500e-4f);
    y = vfma(y, r, vset(1.3981999507e-3f));
    y = vfma(y, r, vset(8.3334519073e-3f));
    y = vfma(y, r, vset(4.1665795894e-2f));
    y = vfma(y, r, vset(1.6666665459e-1f));
    y = vfma(y, r, vset(5.0000001201e-1f));
    y = vfma(y, r * r, r) + vset(1.0f);
    const vi power = VSHIFT(shifted, 23); /* of 2: the low bits of `shifted` are its number */
    return PICK(x < vset(-87.0f), vset(0.0f), (vf)VADD(y, power));
}

INLINE vf NAME(magnitude)(vf x) { return (vf)((vi)x & vseti(0x7fffffff)); }

/* 1 / (1 + e^-x) */
INLINE vf NAME(sigmoid)(vf x)
{
    const vf one = vset(1.0f), e = NAME(exp_negative)(vset(0.0f) - NAME(magnitude)(x));
    return PICK(x < vset(0.0f), e, one) / (one + e);
}

/* log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x|. The logarithm is 2 atanh(s), s = e / (2 + e) up to 1/3, by its series. */
INLINE vf NAME(softplus)(vf x)
{
    const vf e = NAME(exp_negative)(vset(0.0f) - NAME(magnitude)(x)), s = e / (vset(2.0f) + e), z = s * s;
    vf y = vset(1.0f / 17);
    y = vfma(y, z, vset(1.0f / 15));
    y = vfma(y, z, vset(1.0f / 13));
    y = vfma(y, z, vset(1.0f / 11));
    y = vfma(y, z, vset(1.0f / 9));
    y = vfma(y, z, vset(1.0f / 7));
    y = vfma(y, z, vset(1.0f / 5));
    y = vfma(y, z, vset(1.0f / 3));
    const vf half = vfma(y * z, s, s);
    return PICK(x < vset(0.0f), vset(0.0f), x) + (half + half);
}

/* Within 2 ulp: Cephes' polynomial below 0.625, else 1 - 2 e / (1 + e) with e = exp(-2 |x|). */
INLINE vf NAME(tanh)(vf x)
{
    const vf size = NAME(magnitude)(x), e = NAME(exp_negative)(size * vset(-2.0f));
    const vf large = vset(1.0f) - (e + e) / (vset(1.0f) + e);
    const vf z = x * x;
    vf y = vset(-5.70498872745e-3f);
    y = vfma(y, z, vset(2.06390887954e-2f));
    y = vfma(y, z, vset(-5.37397155531e-2f));
    y = vfma(y, z, vset(1.33314422036e-1f));
    y = vfma(y, z, vset(-3.33332819422e-1f));
    const vf small = vfma(y * z, size, size);
    return (vf)((vi)PICK(size < vset(0.625f), small, large) | ((vi)x ^ (vi)size));
}

/* x times the normal distribution's integral up to x, within 4 ulp also where that is tiny. The integral from a = |x| on
 * is exp(-a^2 / 2) times a polynomial in (a - 3) / (a + 3), fitted to a relative error of 7e-9 for a < 13.3. */
INLINE vf NAME(gelu_erf)(vf x)
{
    const vf a = NAME(magnitude)(x), t = (a - vset(3.0f)) / (a + vset(3.0f));
    vf y = vset(5.415102350525558e-05f);
    y = vfma(y, t, vset(0.00011603762686718255f));
    y = vfma(y, t, vset(-0.00033991143573075533f));
    y = vfma(y, t, vset(-0.0009841830469667912f));
    y = vfma(y, t, vset(0.002904702676460147f));
    y = vfma(y, t, vset(0.006132183130830526f));
    y = vfma(y, t, vset(-0.046213313937187195f));
    y = vfma(y, t, vset(0.12322501838207245f));
    y = vfma(y, t, vset(-0.20640261471271515f));
    y = vfma(y, t, vset(0.12151394784450531f));
    const vf square = a * a, rest = vfma(a, a, vset(0.0f) - square); /* a^2 in two parts, for exp is sensitive */
    const vf e = NAME(exp_negative)(square * vset(-0.5f)), beyond = y * vfma(e * rest, vset(-0.5f), e);
    const vf outside = PICK(a > vset(13.0f), vset(0.0f), beyond);
    return x * PICK(x < vset(0.0f), outside, vset(1.0f) - outside);
}

/* x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */
INLINE vf NAME(gelu_tanh)(vf x)
{
    const vf slope = vfma(x * x, vset(0.07135481282f), vset(1.59576912161f)); /* 2 sqrt(2 / pi) (1 + 0.044715 x^2) */
    return x * NAME(sigmoid)(x * slope);
}

/* xIELU (arXiv:2411.13010), n = {a, b, beta, eps}: a x^2 + beta x above 0, else b (e^min(x, eps) - 1 - x) + beta x. Within
 * 4 ulp of the larger term: near 0, e^m - 1 - m is m^2 times its series, which does not cancel. */
INLINE vf NAME(xielu)(const float *n, vf x)
{
    const vf m = PICK(x > vset(n[3]), vset(n[3]), x);
    vf y = vset(1.0f / 39916800);
    y = vfma(y, m, vset(1.0f / 3628800));
    y = vfma(y, m, vset(1.0f / 362880));
    y = vfma(y, m, vset(1.0f / 40320));
    y = vfma(y, m, vset(1.0f / 5040));
    y = vfma(y, m, vset(1.0f / 720));
    y = vfma(y, m, vset(1.0f / 120));
    y = vfma(y, m, vset(1.0f / 24));
    y = vfma(y, m, vset(1.0f / 6));
    y = vfma(y, m, vset(0.5f));
    const vf near = m * m * y, far = NAME(exp_negative)(m) - vset(1.0f) - m;
    const vf below = (PICK(m > vset(-1.0f), near, far) + (m - x)) * vset(n[1]);
    return PICK(x > vset(0.0f), x * x * vset(n[0]), below) + x * vset(n[2]);
}

/* cap * tanh(x / cap); cap 0: x */
INLINE vf NAME(capped)(float cap, vf x)
{
    if (cap == 0)
        return x;
    return vset(cap) * NAME(tanh)(x / vset(cap));
}
