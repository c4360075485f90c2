//! Eight elements of the Pallas base field in parallel, with the 52-bit multiplication of AVX-512 IFMA.
//!
//! Processors have it since Ice Lake (2019) and Zen 4 (2022). Without it, [`available`] is false and nothing here may be
//! called. All results are those of `pasta_curves`, as the tests require.
//!
//! A value `v` is stored as any integer that is congruent to `v * 2^260` (Montgomery form) and less than 8 times the
//! modulus `p`, in five limbs of 52 bits. Products are reduced as in algorithm 14.32 of the Handbook of Applied
//! Cryptography, with limbs of 52 bits: a sum `S < 2^260 * c * p` becomes less than `(c + 1) p`. As `p` is little more
//! than `2^254`, and thus `64 p` than `2^260`, this bounds the results, with factors and constants below `p`:
//!
//! - the fifth power: `64 / 64 + 1 = 2`, `4 / 64 + 1 < 1.1`, `8.8 / 64 + 1 < 1.2` times `p`;
//! - [`Word::dot`] of at most 4 words: `4 * 8 / 64 + 1 + 1 = 2.5` times `p`.
//!
//! A sum of two or three of these results and constants is therefore below `8 p` too.
#![allow(unsafe_code)] // the instructions, which the compiler may not assume, and conversions from and to vectors

use std::arch::x86_64::*;
use std::ops::Add;
use std::sync::OnceLock;

use ff::{Field, PrimeField};

use crate::fields::{Base, Encoded, Point};
use crate::poseidon::{permute, Row, Tables, Word};

/// Elements of a [`Lanes`].
pub const LANES: usize = 8;

const LIMBS: usize = 5;
const LIMB_BITS: usize = 52;
const LIMB_MASK: u64 = (1 << LIMB_BITS) - 1;

type Limbs = [u64; LIMBS];
type Vectors = [__m512i; LIMBS];
/// A sum of products, without carries between its limbs.
type Sum = [__m512i; 2 * LIMBS];

const MODULUS: Limbs = modulus();
/// `-1 / MODULUS`, modulo `2^52`.
const INVERSE: u64 = {
    let mut inverse = 1u64; // each step doubles the number of correct bits
    let mut bits = 1;
    while bits < LIMB_BITS {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(MODULUS[0].wrapping_mul(inverse)));
        bits *= 2;
    }
    inverse.wrapping_neg() & LIMB_MASK
};
const ONE: Limbs = [1, 0, 0, 0, 0];

/// The modulus, from the hex digits of `pasta_curves`: 13 for each limb.
const fn modulus() -> Limbs {
    let digits = Base::MODULUS.as_bytes();
    let mut limbs = [0; LIMBS];
    let mut at = 0;
    while at < digits.len() - "0x".len() {
        let value = match digits[digits.len() - 1 - at] {
            digit @ b'0'..=b'9' => digit - b'0',
            digit => digit - b'a' + 10,
        };
        limbs[4 * at / LIMB_BITS] |= (value as u64) << (4 * at % LIMB_BITS);
        at += 1;
    }
    limbs
}

/// Whether the processor has the instructions.
#[inline]
pub fn available() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512ifma")
}

/// Calls a function that needs the instructions.
macro_rules! with_instructions {
    ($call:expr) => {{
        assert!(available());
        // SAFETY: the processor has the instructions.
        unsafe { $call }
    }};
}

/// Eight field elements: the limbs of all elements, least significant first.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Lanes([[u64; LANES]; LIMBS]);

impl Lanes {
    /// Converts elements.
    pub fn from_elements(elements: [Base; LANES]) -> Self {
        Self::from_integers(elements.map(|element| element.to_repr()))
    }

    /// Converts integers of 256 bits.
    pub fn from_integers(integers: [Encoded; LANES]) -> Self {
        Self::transposed(integers.map(|bytes| limbs(&bytes))).scaled(&montgomery(radix()))
    }

    /// Canonical encodings of the elements.
    pub fn to_encodings(self) -> [Encoded; LANES] {
        let reduced = self.scaled(&ONE); // at most the modulus
        std::array::from_fn(|lane| {
            let limbs = reduced.0.map(|limb| limb[lane]);
            encoded(if limbs == MODULUS { [0; LIMBS] } else { limbs })
        })
    }

    /// Converts to elements.
    pub fn to_elements(self) -> [Base; LANES] {
        self.to_encodings()
            .map(|bytes| Option::from(Base::from_repr(bytes)).unwrap_or(Base::ZERO))
    }

    /// Decompresses points, and returns which of them are valid and not the identity.
    pub fn points(encodings: [Encoded; LANES]) -> (Point<Lanes>, [bool; LANES]) {
        let signs = encodings.map(|bytes| bytes[31] >> 7);
        let encoded_x = encodings.map(|mut bytes| {
            bytes[31] &= 0x7f;
            bytes
        });
        let x = Self::from_integers(encoded_x);
        let constant = Self::repeat(&montgomery(Base::from(5))); // y² = x³ + 5
        let square = x * x * x + constant;
        let root = with_instructions!(square_root(&square));
        let valid = (root * root).to_encodings();
        let expected = square.to_encodings();
        let parities = root.to_encodings().map(|bytes| bytes[0] & 1);
        let (plus, minus) = (montgomery(Base::ONE), montgomery(-Base::ONE));
        let signs = std::array::from_fn(|i| if parities[i] == signs[i] { plus } else { minus });
        let y = root * Self::transposed(signs);
        (
            Point { x, y },
            std::array::from_fn(|i| {
                valid[i] == expected[i] && bool::from(Base::from_repr(encoded_x[i]).is_some())
            }),
        )
    }

    fn transposed(limbs: [Limbs; LANES]) -> Self {
        Lanes(std::array::from_fn(|limb| limbs.map(|limbs| limbs[limb])))
    }

    fn scaled(&self, factor: &Limbs) -> Self {
        *self * Self::repeat(factor)
    }

    fn vectors(&self) -> &Vectors {
        // SAFETY: both types have the same size and alignment, and no invalid values.
        unsafe { &*(&raw const self.0).cast() }
    }

    fn from_vectors(vectors: Vectors) -> Self {
        // SAFETY: both types have the same size, and no invalid values.
        unsafe { std::mem::transmute(vectors) }
    }
}

impl Add for Lanes {
    type Output = Lanes;

    #[inline(always)]
    fn add(self, other: Lanes) -> Lanes {
        with_instructions!(add(&self, &other))
    }
}

impl std::ops::Mul for Lanes {
    type Output = Lanes;

    #[inline(always)]
    fn mul(self, other: Lanes) -> Lanes {
        with_instructions!(multiply(&self, &other))
    }
}

impl Word for Lanes {
    type Constant = Limbs;

    fn constant(value: Base) -> Limbs {
        montgomery(value)
    }

    #[inline(always)]
    fn repeat(constant: &Limbs) -> Lanes {
        Lanes(constant.map(|limb| [limb; LANES]))
    }

    #[inline(always)]
    fn fifth_power(&self) -> Lanes {
        with_instructions!(fifth_power(self))
    }

    #[inline(always)]
    fn dot<const N: usize>(words: [&Lanes; N], row: &Row<Limbs, N>) -> Lanes {
        const { assert!(N <= 4) };
        with_instructions!(dot(words, row))
    }

    fn tables() -> &'static Tables<Limbs> {
        static TABLES: OnceLock<Tables<Limbs>> = OnceLock::new();
        TABLES.get_or_init(|| Base::tables().convert::<Lanes>())
    }

    fn permute(state: &mut [Lanes; 3]) {
        #[target_feature(enable = "avx512ifma")]
        fn permute_lanes(state: &mut [Lanes; 3]) {
            permute(state);
        }
        with_instructions!(permute_lanes(state))
    }
}

/// Limbs of an element in Montgomery form.
fn montgomery(value: Base) -> Limbs {
    limbs(&(value * radix()).to_repr())
}

/// The factor of the Montgomery form.
fn radix() -> Base {
    static RADIX: OnceLock<Base> = OnceLock::new();
    *RADIX.get_or_init(|| Base::from(2).pow([(LIMBS * LIMB_BITS) as u64]))
}

/// Limbs of an integer.
fn limbs(bytes: &Encoded) -> Limbs {
    std::array::from_fn(|limb| {
        let bit = limb * LIMB_BITS;
        let mut window = [0; 8];
        let available = &bytes[bit / 8..];
        let length = available.len().min(8);
        window[..length].copy_from_slice(&available[..length]);
        u64::from_le_bytes(window) >> (bit % 8) & LIMB_MASK
    })
}

/// Bytes of an integer of 256 bits.
fn encoded([a, b, c, d, e]: Limbs) -> Encoded {
    let words = [
        a | b << 52,
        b >> 12 | c << 40,
        c >> 24 | d << 28,
        d >> 36 | e << 16,
    ];
    let mut bytes = [0; 32];
    for (slot, word) in bytes.chunks_exact_mut(8).zip(words) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

#[inline]
#[target_feature(enable = "avx512ifma")]
fn repeat(limb: u64) -> __m512i {
    _mm512_set1_epi64(limb.cast_signed())
}

/// Adds the product of `a` and `b`.
#[inline]
#[target_feature(enable = "avx512ifma")]
fn accumulate(mut sum: Sum, a: &Vectors, b: &Vectors) -> Sum {
    for i in 0..LIMBS {
        for j in 0..LIMBS {
            sum[i + j] = _mm512_madd52lo_epu64(sum[i + j], a[i], b[j]);
            sum[i + j + 1] = _mm512_madd52hi_epu64(sum[i + j + 1], a[i], b[j]);
        }
    }
    sum
}

/// Divides by `2^260`, modulo the modulus.
#[inline]
#[target_feature(enable = "avx512ifma")]
fn reduce(mut sum: Sum) -> Vectors {
    for i in 0..LIMBS {
        // makes this limb a multiple of 2^52
        let multiple = _mm512_madd52lo_epu64(_mm512_setzero_si512(), sum[i], repeat(INVERSE));
        for (j, &limb) in MODULUS.iter().enumerate() {
            if limb != 0 {
                let limb = repeat(limb);
                sum[i + j] = _mm512_madd52lo_epu64(sum[i + j], multiple, limb);
                sum[i + j + 1] = _mm512_madd52hi_epu64(sum[i + j + 1], multiple, limb);
            }
        }
        sum[i + 1] = _mm512_add_epi64(sum[i + 1], _mm512_srli_epi64::<52>(sum[i]));
    }
    let [.., a, b, c, d, e] = sum;
    carry([a, b, c, d, e])
}

/// Carries between limbs.
#[inline]
#[target_feature(enable = "avx512ifma")]
fn carry(mut limbs: Vectors) -> Vectors {
    for i in 0..LIMBS - 1 {
        limbs[i + 1] = _mm512_add_epi64(limbs[i + 1], _mm512_srli_epi64::<52>(limbs[i]));
        limbs[i] = _mm512_and_si512(limbs[i], repeat(LIMB_MASK));
    }
    limbs
}

#[inline]
#[target_feature(enable = "avx512ifma")]
fn product(a: &Vectors, b: &Vectors) -> Vectors {
    reduce(accumulate([_mm512_setzero_si512(); 2 * LIMBS], a, b))
}

/// The square: products of different limbs are computed once and doubled.
#[inline]
#[target_feature(enable = "avx512ifma")]
fn square(a: &Vectors) -> Vectors {
    let mut sum = [_mm512_setzero_si512(); 2 * LIMBS];
    for i in 0..LIMBS {
        for j in 0..i {
            sum[i + j] = _mm512_madd52lo_epu64(sum[i + j], a[i], a[j]);
            sum[i + j + 1] = _mm512_madd52hi_epu64(sum[i + j + 1], a[i], a[j]);
        }
    }
    for limb in &mut sum {
        *limb = _mm512_add_epi64(*limb, *limb);
    }
    for i in 0..LIMBS {
        sum[2 * i] = _mm512_madd52lo_epu64(sum[2 * i], a[i], a[i]);
        sum[2 * i + 1] = _mm512_madd52hi_epu64(sum[2 * i + 1], a[i], a[i]);
    }
    reduce(sum)
}

#[target_feature(enable = "avx512ifma")]
fn multiply(a: &Lanes, b: &Lanes) -> Lanes {
    Lanes::from_vectors(product(a.vectors(), b.vectors()))
}

#[inline]
#[target_feature(enable = "avx512ifma")]
fn add(a: &Lanes, b: &Lanes) -> Lanes {
    let (a, b) = (a.vectors(), b.vectors());
    let mut limbs = *a;
    for (limb, other) in limbs.iter_mut().zip(b) {
        *limb = _mm512_add_epi64(*limb, *other);
    }
    Lanes::from_vectors(carry(limbs))
}

#[target_feature(enable = "avx512ifma")]
fn fifth_power(word: &Lanes) -> Lanes {
    let word = word.vectors();
    Lanes::from_vectors(product(&square(&square(word)), word))
}

#[target_feature(enable = "avx512ifma")]
fn dot<const N: usize>(words: [&Lanes; N], row: &Row<Limbs, N>) -> Lanes {
    let mut sum = [_mm512_setzero_si512(); 2 * LIMBS];
    for (high, &limb) in sum[LIMBS..].iter_mut().zip(&row.constant) {
        *high = repeat(limb);
    }
    for (word, factor) in words.into_iter().zip(&row.factors) {
        let factor = Lanes::repeat(factor);
        sum = accumulate(sum, word.vectors(), factor.vectors());
    }
    Lanes::from_vectors(reduce(sum))
}

#[target_feature(enable = "avx512ifma")]
fn squares(word: &Lanes, count: usize) -> Lanes {
    let mut vectors = *word.vectors();
    for _ in 0..count {
        vectors = square(&vectors);
    }
    Lanes::from_vectors(vectors)
}

/// Constants of [`square_root`]. Let `p - 1 = 2^32 T`.
struct Roots {
    /// `(T - 1) / 2` in digits of 4 bits, most significant first.
    exponent: Vec<u8>,
    /// `powers[i][digit]` is `g^(-digit * 256^i)` for the root of unity `g`, whose order is `2^32`.
    powers: [Vec<Limbs>; 4],
    /// The lowest limb of `g^(digit * 256^3)` and the digit, sorted.
    digits: Vec<(u64, usize)>,
}

fn roots() -> &'static Roots {
    static ROOTS: OnceLock<Roots> = OnceLock::new();
    ROOTS.get_or_init(|| {
        let bytes = (-Base::ONE).to_repr();
        let bit = |index: usize| {
            bytes
                .get(index / 8)
                .map_or(0, |byte| byte >> (index % 8) & 1)
        };
        let digit = |at: usize| (0..4).map(|i| bit(33 + at + i) << i).sum();
        let exponent: Vec<u8> = (0..256 - 33).step_by(4).rev().map(digit).collect();
        let power = |base: Base, exponent: u64| base.pow([exponent]);
        let inverse = Base::ROOT_OF_UNITY.invert().unwrap_or(Base::ZERO);
        let powers = std::array::from_fn(|i| {
            let base = power(inverse, 1 << (8 * i));
            (0..256)
                .map(|digit| montgomery(power(base, digit)))
                .collect()
        });
        let small = power(Base::ROOT_OF_UNITY, 1 << 24);
        let mut digits: Vec<_> = (0..256)
            .map(|digit| (limbs(&power(small, digit as u64).to_repr())[0], digit))
            .collect();
        digits.sort_unstable();
        Roots {
            exponent,
            powers,
            digits,
        }
    })
}

/// The square roots, and any other elements for those that have none.
///
/// P. Sarkar, Computing square roots faster than the Tonelli-Shanks/Bernstein algorithm,
/// <https://eprint.iacr.org/2020/1407>: `a^T` is a power `g^e`, whose exponent is computed in four digits of 8 bits from
/// the lowest on, and the root is `a^((T + 1) / 2) g^(-e / 2)`.
#[target_feature(enable = "avx512ifma")]
fn square_root(a: &Lanes) -> Lanes {
    let roots = roots();
    let mut powers = [Lanes::repeat(&montgomery(Base::ONE)); 16];
    for i in 1..16 {
        powers[i] = multiply(&powers[i - 1], a);
    }
    let mut power = powers[0];
    for &digit in &roots.exponent {
        power = squares(&power, 4);
        if digit != 0 {
            power = multiply(&power, &powers[usize::from(digit)]);
        }
    }
    let pick = |table: &[Limbs], digits: &[usize; LANES]| {
        Lanes::transposed(digits.map(|digit| table[digit]))
    };
    let mut root = multiply(a, &power);
    let mut order = [multiply(&root, &power); 4]; // g^(256^i e)
    for i in 1..4 {
        order[i] = squares(&order[i - 1], 8);
    }
    let mut digits = [[0; LANES]; 4];
    for i in 0..4 {
        let mut last = order[3 - i];
        for (known, table) in digits[..i].iter().zip(&roots.powers[3 - i..]) {
            last = multiply(&last, &pick(table, known));
        }
        let keys = last.scaled(&ONE).0[0];
        digits[i] = keys.map(|key| {
            let found = roots.digits.binary_search_by_key(&key, |(limb, _)| *limb);
            found.map_or(0, |index| roots.digits[index].1)
        });
    }
    // divides by two
    for i in 0..4 {
        let halves = std::array::from_fn(|lane| {
            let above = digits.get(i + 1).map_or(0, |digits| digits[lane]);
            (digits[i][lane] >> 1) | (above & 1) << 7
        });
        root = multiply(&root, &pick(&roots.powers[i], &halves));
    }
    root
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::point;
    use group::{prime::PrimeCurveAffine, GroupEncoding};
    use pasta_curves::pallas;
    use rand::{rngs::StdRng, Rng, SeedableRng};

    /// Integers at the limits of encodings and limbs, and random ones up to this number.
    fn integers(count: usize, rng: &mut StdRng) -> Vec<Encoded> {
        let modulus = encoded(MODULUS);
        let near_modulus = [0u8, 2].map(|low| {
            let mut bytes = modulus;
            bytes[0] = low;
            bytes
        });
        let limits = [[0; 32], (-Base::ONE).to_repr(), modulus, [0xff; 32]];
        let low = (1u8..=64).map(|low| {
            let mut bytes = [0; 32];
            bytes[0] = low;
            bytes
        });
        let powers = (0..256).map(|bit| {
            let mut bytes = [0; 32];
            bytes[bit / 8] = 1 << (bit % 8);
            bytes
        });
        let ones = (0..32).map(|length| {
            let mut bytes = [0; 32];
            bytes[..length].fill(0xff);
            bytes
        });
        let mut all: Vec<_> = limits
            .into_iter()
            .chain(near_modulus)
            .chain(low)
            .chain(powers)
            .chain(ones)
            .collect();
        all.resize_with(count, || rng.gen());
        all
    }

    /// The element that is congruent to an integer.
    fn element(integer: Encoded) -> Base {
        let byte = Base::from(256);
        integer.iter().rev().fold(Base::ZERO, |sum, &next| {
            sum * byte + Base::from(u64::from(next))
        })
    }

    #[test]
    fn arithmetic_equals_that_of_the_published_crate() {
        if !available() {
            return;
        }
        let mut rng = StdRng::seed_from_u64(11);
        let all = integers(20_000, &mut rng);
        for chunk in all.chunks_exact(LANES) {
            let encoded: [Encoded; LANES] = chunk.try_into().unwrap();
            let others = std::array::from_fn(|_| all[rng.gen_range(0..all.len())]);
            let (a, b) = (encoded.map(element), others.map(element));
            let lanes = (Lanes::from_integers(encoded), Lanes::from_integers(others));
            assert_eq!(lanes.0.to_elements(), a);
            assert_eq!(
                Lanes::from_elements(a).to_encodings(),
                a.map(|a| a.to_repr())
            );
            let check = |lanes: Lanes, operation: fn(Base, Base) -> Base| {
                assert_eq!(
                    lanes.to_elements(),
                    std::array::from_fn(|i| operation(a[i], b[i]))
                );
            };
            let sum = lanes.0 + lanes.1;
            check(sum, |a, b| a + b);
            check(sum * sum, |a, b| (a + b).square());
            check(lanes.0 * lanes.1, |a, b| a * b);
            check((sum + sum).fifth_power(), |a, b| (a + b).double().pow([5]));
            let constants = [0, 1, 2, 3, 4].map(|i| element(all[rng.gen_range(0..all.len() - i)]));
            let [f0, f1, f2, f3, constant] = constants;
            let words = [&lanes.0, &lanes.1, &sum, &(sum + sum)];
            let row = Row {
                factors: [f0, f1, f2, f3].map(montgomery),
                constant: montgomery(constant),
            };
            let expected: [Base; LANES] = std::array::from_fn(|i| {
                let sum = a[i] + b[i];
                a[i] * f0 + b[i] * f1 + sum * f2 + sum.double() * f3 + constant
            });
            assert_eq!(Lanes::dot(words, &row).to_elements(), expected);
        }
    }

    /// The largest words, of 8 times the modulus, whose limbs and sums are the largest.
    #[test]
    fn the_largest_words_do_not_overflow() {
        if !available() {
            return;
        }
        let mut limbs = [LIMB_MASK; LIMBS];
        limbs[LIMBS - 1] = 8 * MODULUS[LIMBS - 1] - 1;
        let word = Lanes::transposed([limbs; LANES]);
        // the integer, without its Montgomery factor
        let value = limbs.iter().rev().fold(Base::ZERO, |sum, &limb| {
            sum * Base::from(1 << LIMB_BITS) + Base::from(limb)
        }) * Base::from(2).pow([260]).invert().unwrap();
        let largest = -Base::ONE * Base::from(2).pow([260]).invert().unwrap();
        assert_eq!(montgomery(largest)[0], MODULUS[0] - 1);
        assert_eq!(word.to_elements(), [value; LANES]);
        assert_eq!((word * word).to_elements(), [value.square(); LANES]);
        assert_eq!(word.fifth_power().to_elements(), [value.pow([5]); LANES]);
        let row = Row {
            factors: [montgomery(largest); 4],
            constant: montgomery(largest),
        };
        let expected = value * largest * Base::from(4) + largest;
        assert_eq!(
            Lanes::dot([&word; 4], &row).to_elements(),
            [expected; LANES]
        );
        let fifth = word.fifth_power();
        let row_result = Lanes::dot([&word; 4], &row);
        for result in [fifth, row_result, word * word] {
            for limb in result.0.as_flattened() {
                assert!(*limb <= LIMB_MASK);
            }
            assert!(result.0[LIMBS - 1]
                .iter()
                .all(|limb| *limb <= 5 * MODULUS[LIMBS - 1] / 2));
        }
    }

    #[test]
    fn points_are_those_of_the_published_crate() {
        if !available() {
            return;
        }
        let mut rng = StdRng::seed_from_u64(12);
        let mut all = integers(19_999, &mut rng);
        all.push(pallas::Affine::generator().to_bytes());
        all.push(pallas::Affine::identity().to_bytes());
        let negated: Vec<_> = all
            .iter()
            .map(|bytes| {
                let mut bytes = *bytes;
                bytes[31] ^= 0x80;
                bytes
            })
            .collect();
        all.extend(negated);
        all.truncate(all.len() / LANES * LANES);
        let mut valid_points = 0;
        for chunk in all.chunks_exact(LANES) {
            let (points, valid) = Lanes::points(chunk.try_into().unwrap());
            let (x, y) = (points.x.to_elements(), points.y.to_elements());
            for lane in 0..LANES {
                let expected = point("c1", &chunk[lane]);
                assert_eq!(valid[lane], expected.is_ok(), "{:?}", chunk[lane]);
                if let Ok(expected) = expected {
                    assert_eq!((x[lane], y[lane]), (expected.x, expected.y));
                    valid_points += 1;
                }
            }
        }
        assert!(valid_points > 8_000, "{valid_points}");
    }
}
