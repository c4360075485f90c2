//! Poseidon (P128Pow5T3, constant length), with the published crate's constants.
//!
//! The published crate copies its tables for every hash, raises to the fifth power bit by bit, and multiplies by the
//! full matrix in all 56 partial rounds. Here a partial round is one fifth power and four products with constants, see
//! [`partial_rounds`], which takes less than half of the time. This matters for trees with hundreds of thousands of
//! leaves and for the permutations of each share.
//!
//! The permutation is written once for one element and for several in parallel ([`Word`]).

use std::ops::Add;
use std::sync::OnceLock;

use ff::{Field, PrimeField};
use halo2_poseidon::{Mds, P128Pow5T3, Spec};

use crate::fields::Base;

const WIDTH: usize = 3;
const RATE: usize = 2;
/// Full rounds before and after the partial ones.
const HALF_FULL_ROUNDS: usize = 4;

type State<W> = [W; WIDTH];
/// A vector or matrix on the two words that have no S-box in a partial round.
type Pair = [Base; 2];
type Inner = [Pair; 2];

/// A field element, or several that are hashed in parallel.
pub trait Word: Copy + Add<Output = Self> + 'static {
    /// An element that all parallel hashes have in common.
    type Constant: Copy + 'static;

    /// Converts a constant.
    fn constant(value: Base) -> Self::Constant;

    /// The word in which every element is this constant.
    fn repeat(constant: &Self::Constant) -> Self;

    /// The fifth power.
    fn fifth_power(&self) -> Self;

    /// The sum of the products of words and factors, and of the row's constant.
    fn dot<const N: usize>(words: [&Self; N], row: &Row<Self::Constant, N>) -> Self;

    /// The tables of these constants.
    fn tables() -> &'static Tables<Self::Constant>;

    /// The permutation.
    fn permute(state: &mut [Self; WIDTH]) {
        permute(state);
    }
}

impl Word for Base {
    type Constant = Base;

    fn constant(value: Base) -> Base {
        value
    }

    fn repeat(constant: &Base) -> Base {
        *constant
    }

    #[inline(always)]
    fn fifth_power(&self) -> Base {
        self.square().square() * self
    }

    #[inline(always)]
    fn dot<const N: usize>(words: [&Base; N], row: &Row<Base, N>) -> Base {
        let mut sum = row.constant;
        for (word, factor) in words.into_iter().zip(&row.factors) {
            sum += word * factor;
        }
        sum
    }

    fn tables() -> &'static Tables<Base> {
        static TABLES: OnceLock<Tables<Base>> = OnceLock::new();
        TABLES.get_or_init(Tables::new)
    }
}

/// One row of an affine map.
#[derive(Clone, Copy)]
pub struct Row<C, const N: usize> {
    /// Factors of the words.
    pub factors: [C; N],
    /// Added to the products.
    pub constant: C,
}

impl<const N: usize> Row<Base, N> {
    fn convert<W: Word>(self) -> Row<W::Constant, N> {
        Row {
            factors: self.factors.map(W::constant),
            constant: W::constant(self.constant),
        }
    }
}

/// The constants of the permutation, in the order of their use.
pub struct Tables<C> {
    /// Added at the beginning.
    first: State<C>,
    /// Affine maps after the S-boxes of the full rounds; the last one returns what [`partial_rounds`] begins with.
    before: [State<Row<C, 3>>; HALF_FULL_ROUNDS],
    partial: Vec<Row<C, 4>>,
    /// The state after the partial rounds, see [`partial_rounds`].
    middle: State<Row<C, 4>>,
    after: [State<Row<C, 3>>; HALF_FULL_ROUNDS],
}

impl Tables<Base> {
    fn new() -> Self {
        let (constants, mds, _) = <P128Pow5T3 as Spec<Base, WIDTH, RATE>>::constants();
        let partial_until = constants.len() - HALF_FULL_ROUNDS;
        let mut partial = partial_rounds(&constants[HALF_FULL_ROUNDS..partial_until], &mds);
        // each map also adds the constants of the next round
        let full_round = |next: usize| -> State<Row<Base, 3>> {
            std::array::from_fn(|i| Row {
                factors: mds[i],
                constant: constants.get(next).map_or(Base::ZERO, |row| row[i]),
            })
        };
        let mut before = std::array::from_fn(|round| full_round(round + 1));
        before[HALF_FULL_ROUNDS - 1] = partial.start.map(|row| Row {
            factors: std::array::from_fn(|i| (0..WIDTH).map(|j| row.factors[j] * mds[j][i]).sum()),
            ..row
        });
        for (row, constant) in partial.end.iter_mut().zip(constants[partial_until]) {
            row.constant += constant;
        }
        Tables {
            first: constants[0],
            before,
            partial: partial.rows,
            middle: partial.end,
            after: std::array::from_fn(|round| full_round(partial_until + round + 1)),
        }
    }

    /// The same tables for other words.
    pub fn convert<W: Word>(&self) -> Tables<W::Constant> {
        Tables {
            first: self.first.map(W::constant),
            before: self.before.map(|rows| rows.map(Row::convert::<W>)),
            partial: self.partial.iter().map(|row| row.convert::<W>()).collect(),
            middle: self.middle.map(Row::convert::<W>),
            after: self.after.map(|rows| rows.map(Row::convert::<W>)),
        }
    }
}

/// The affine maps of [`partial_rounds`].
struct PartialRounds {
    /// From the state to `X[0]`, `z[0]` and `z[-1]`.
    start: State<Row<Base, 3>>,
    /// From `f[n-1]`, `f[n-2]`, `z[n-1]` and `z[n-2]` to `z[n]`, for each `n` from 1 on.
    rows: Vec<Row<Base, 4>>,
    /// From the last `f[n-1]`, `X[n]`, `z[n]` and `z[n-1]` to the state.
    end: State<Row<Base, 4>>,
}

/// The partial rounds as a recurrence of two sequences.
///
/// Only the first word `x` has an S-box. Let `u` be the other two words, `c` and `k` the constants of round `n`, and
/// `[[m, r], [b, A]]` the matrix. Round `n` computes, with `X = x + c`, `U = u + k` and `f = X^5`,
///
/// ```text
/// x' = m f + r U        u' = b f + A U
/// ```
///
/// Let `z[n] = r U[n] + c[n + 1]`, so that `X[n + 1] = m f[n] + z[n]`. By the theorem of Cayley and Hamilton,
/// `A² = t A - d` with trace `t` and determinant `d`, so `z` is a recurrence in which `u` does not occur. With
/// `q = r A⁻¹ = (t r - r A) / d`:
///
/// ```text
/// z[n] = (r b) f[n-1] - d (q b) f[n-2] + t z[n-1] - d z[n-2]
///        + r k[n] - d q k[n-1] + c[n+1] - t c[n] + d c[n-1]
/// ```
///
/// It begins with `f[-1] = 0` and `z[-1] = q u[0] + c[0]`. At the end `u` is the solution of `r u = z[n]` and
/// `q u = z[n-1] + (q b) f[n-1]`, with zero for the constants after the last round.
///
/// Scaling saves the product with `m`: `X[n]` is multiplied by `s[n]`, `f[n]` therefore by `s[n]^5`, and `z[n]` by
/// `s[n+1] = s[n]^5 / m`.
fn partial_rounds(constants: &[State<Base>], mds: &Mds<Base, WIDTH>) -> PartialRounds {
    let [[m, r0, r1], [b0, a00, a01], [b1, a10, a11]] = *mds;
    let (r, b) = ([r0, r1], [b0, b1]);
    let (t, d) = (a00 + a11, a00 * a11 - a01 * a10);
    let q = [
        (a11 * r0 - a10 * r1) * invert(d),
        (a00 * r1 - a01 * r0) * invert(d),
    ];
    let (zero, one) = (Base::ZERO, Base::ONE);
    let rounds = constants.len();
    let c = |n: usize| constants.get(n).map_or(zero, |row| row[0]);
    let k = |n: usize| constants.get(n).map_or([zero; 2], |row| [row[1], row[2]]);
    let mut s = vec![one];
    for n in 0..=rounds {
        s.push(s[n].square().square() * s[n] * invert(m));
    }
    let start = [
        ([one, zero, zero], c(0)),
        ([zero, s[1] * r0, s[1] * r1], s[1] * (inner(r, k(0)) + c(1))),
        ([zero, q[0], q[1]], c(0)),
    ];
    let rows = (1..=rounds).map(|n| {
        let constant = inner(r, k(n)) - d * inner(q, k(n - 1)) + c(n + 1) - t * c(n) + d * c(n - 1);
        let (scale, before) = (s[n + 1] * invert(s[n]), s[n + 1] * invert(s[n - 1]));
        Row {
            factors: [
                scale * inner(r, b) * invert(m),
                -before * d * inner(q, b) * invert(m),
                scale * t,
                -before * d,
            ],
            constant: s[n + 1] * constant,
        }
    });
    let last = invert(s[rounds]);
    let [[v00, v01], [v10, v11]] = inverse(&[r, q]);
    let others = |v0: Base, v1: Base| {
        let power = v1 * inner(q, b) * invert(m) * last;
        [power, zero, v0 * invert(s[rounds + 1]), v1 * last]
    };
    let end = [[zero, last, zero, zero], others(v00, v01), others(v10, v11)];
    PartialRounds {
        start: start.map(|(factors, constant)| Row { factors, constant }),
        rows: rows.collect(),
        end: end.map(|factors| Row {
            factors,
            constant: zero,
        }),
    }
}

fn inner(a: Pair, b: Pair) -> Base {
    a[0] * b[0] + a[1] * b[1]
}

/// Nothing that is inverted here is zero: otherwise the hashes would differ from the published ones.
fn invert(value: Base) -> Base {
    value.invert().unwrap_or(Base::ZERO)
}

fn inverse(matrix: &Inner) -> Inner {
    let [[a, b], [c, d]] = *matrix;
    let scale = invert(a * d - b * c);
    [[d * scale, -b * scale], [-c * scale, a * scale]]
}

/// The hash of any number of elements; their number is part of the input.
pub fn poseidon<W: Word>(message: &[W]) -> W {
    Prefix::new(message.len()).absorb(message).state[0]
}

/// Hash state after the first elements, for reuse with messages that have a common prefix.
#[derive(Clone, Copy)]
pub struct Prefix<W = Base> {
    /// The three words of the state.
    pub state: [W; WIDTH],
}

impl<W: Word> Prefix<W> {
    /// Starts the hash of `length` elements with the first two of them.
    pub fn with_pair(length: usize, pair: [W; RATE]) -> Self {
        Self::new(length).absorb(&pair)
    }

    /// Completes the hash with all other elements.
    pub fn finish(self, rest: &[W]) -> W {
        self.absorb(rest).state[0]
    }

    fn new(length: usize) -> Self {
        let length = Base::from_u128((length as u128) << 64);
        let state = [Base::ZERO, Base::ZERO, length];
        Self {
            state: state.map(|word| W::repeat(&W::constant(word))),
        }
    }

    fn absorb(mut self, elements: &[W]) -> Self {
        for chunk in elements.chunks(RATE) {
            for (word, element) in self.state.iter_mut().zip(chunk) {
                *word = *word + *element;
            }
            W::permute(&mut self.state);
        }
        self
    }
}

/// The permutation. Inlined, so that it is compiled for the instructions that its caller may use.
#[inline(always)]
pub fn permute<W: Word>(state: &mut State<W>) {
    let tables = W::tables();
    for (word, constant) in state.iter_mut().zip(&tables.first) {
        *word = *word + W::repeat(constant);
    }
    for rows in &tables.before {
        full_round(state, rows);
    }
    let [mut x, mut z, mut previous_z] = *state;
    let mut previous_power = W::repeat(&W::constant(Base::ZERO));
    for row in &tables.partial {
        let power = x.fifth_power();
        x = power + z;
        let next = W::dot([&power, &previous_power, &z, &previous_z], row);
        (previous_power, previous_z, z) = (power, z, next);
    }
    let words = [&previous_power, &x, &z, &previous_z];
    let [first, second, third] = &tables.middle;
    *state = [
        W::dot(words, first),
        W::dot(words, second),
        W::dot(words, third),
    ];
    for rows in &tables.after {
        full_round(state, rows);
    }
}

#[inline(always)]
fn full_round<W: Word>(state: &mut State<W>, [first, second, third]: &State<Row<W::Constant, 3>>) {
    let [a, b, c] = &*state;
    let powers = [a.fifth_power(), b.fifth_power(), c.fifth_power()];
    let words = [&powers[0], &powers[1], &powers[2]];
    *state = [
        W::dot(words, first),
        W::dot(words, second),
        W::dot(words, third),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo2_poseidon::{ConstantLength, Hash};
    use rand::{rngs::StdRng, Rng, SeedableRng};

    fn published<const N: usize>(message: &[Base]) -> Base {
        let message: [Base; N] = message.try_into().unwrap();
        Hash::<_, P128Pow5T3, ConstantLength<N>, WIDTH, RATE>::init().hash(message)
    }

    #[test]
    fn equals_the_published_hash() {
        let mut rng = StdRng::seed_from_u64(5);
        for _ in 0..20 {
            let m: Vec<Base> = (0..16).map(|_| Base::random(&mut rng)).collect();
            assert_eq!(poseidon(&m[..1]), published::<1>(&m[..1]));
            assert_eq!(poseidon(&m[..2]), published::<2>(&m[..2]));
            assert_eq!(poseidon(&m[..3]), published::<3>(&m[..3]));
            assert_eq!(poseidon(&m[..4]), published::<4>(&m[..4]));
            assert_eq!(poseidon(&m[..5]), published::<5>(&m[..5]));
            assert_eq!(poseidon(&m), published::<16>(&m));
        }
    }

    /// Random messages, and words at the limits of the field.
    #[test]
    fn parallel_hashes_equal_the_published_hash() {
        let mut rng = StdRng::seed_from_u64(7);
        let limits = [
            Base::ZERO,
            Base::ONE,
            -Base::ONE,
            Base::from_u128(5 << 64),
            -Base::from_u128(5 << 64),
        ];
        let mut word = |random: bool| match rng.gen_range(0..limits.len()) {
            index if !random => limits[index],
            _ => Base::random(&mut rng),
        };
        for number in 0..1_300 {
            let messages: [[Base; 5]; 8] =
                std::array::from_fn(|_| std::array::from_fn(|i| word(number % 4 > 0 || i % 2 > 0)));
            let expected = messages.map(|message| published::<5>(&message));
            assert_eq!(messages.map(|message| poseidon(&message)), expected);
            #[cfg(target_arch = "x86_64")]
            if crate::lanes::available() {
                use crate::lanes::Lanes;
                let words: [Lanes; 5] = std::array::from_fn(|i| {
                    Lanes::from_elements(messages.map(|message| message[i]))
                });
                assert_eq!(poseidon(&words).to_elements(), expected);
            }
        }
    }

    #[test]
    fn a_hash_from_a_prefix_equals_the_direct_hash() {
        let mut rng = StdRng::seed_from_u64(6);
        let m: Vec<Base> = (0..5).map(|_| Base::random(&mut rng)).collect();
        for length in 3..=5 {
            let prefix = Prefix::with_pair(length, [m[0], m[1]]);
            assert_eq!(prefix.finish(&m[2..length]), poseidon(&m[..length]));
        }
    }
}
