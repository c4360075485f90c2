//! Poseidon (P128Pow5T3, constant length), with the published crate's constants.
//!
//! The published crate copies its tables for every hash, raises to the fifth power bit by bit, and multiplies by the
//! full matrix in all 56 partial rounds. Here each partial round has a sparse matrix and one constant (appendix B of
//! the Poseidon paper, <https://eprint.iacr.org/2019/458>), which halves the time of a hash. This matters for trees
//! with hundreds of thousands of leaves and for the 8 permutations per share.

use std::sync::OnceLock;

use ff::{Field, PrimeField};
use halo2_poseidon::{Mds, P128Pow5T3, Spec};

use crate::fields::Base;

const WIDTH: usize = 3;
const RATE: usize = 2;
/// Full rounds before and after the partial ones.
const HALF_FULL_ROUNDS: usize = 4;

type State = [Base; WIDTH];
/// A matrix on the two words that have no S-box in a partial round.
type Inner = [[Base; 2]; 2];

/// A partial round whose matrix is `[[corner, row], [column, identity]]`.
struct PartialRound {
    constant: Base,
    corner: Base,
    row: [Base; 2],
    column: [Base; 2],
}

struct Tables {
    before: Vec<State>,
    partial: Vec<PartialRound>,
    /// Remaining constants and matrix at the end of the partial rounds: added, then multiplied.
    remainder: State,
    inner: Inner,
    after: Vec<State>,
    mds: Mds<Base, WIDTH>,
}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let (constants, mds, _) = <P128Pow5T3 as Spec<Base, WIDTH, RATE>>::constants();
        let partial_until = constants.len() - HALF_FULL_ROUNDS;
        let (partial, remainder, inner) =
            sparse_rounds(&constants[HALF_FULL_ROUNDS..partial_until], &mds);
        Tables {
            before: constants[..HALF_FULL_ROUNDS].to_vec(),
            partial,
            remainder,
            inner,
            after: constants[partial_until..].to_vec(),
            mds,
        }
    })
}

/// The partial rounds with sparse matrices.
///
/// Each matrix is the product of a sparse matrix and one that does not affect the first word. The latter commutes with
/// the next round's S-box, which applies to the first word only, and becomes part of the next round's matrix. So do the
/// constants of the other two words.
fn sparse_rounds(constants: &[State], mds: &Mds<Base, WIDTH>) -> (Vec<PartialRound>, State, Inner) {
    let mut inner = [[Base::ONE, Base::ZERO], [Base::ZERO, Base::ONE]];
    let mut pending = [Base::ZERO; 3];
    let mut rounds = Vec::with_capacity(constants.len());
    for [first, second, third] in constants {
        let [second, third] = apply(&inverse(&inner), [*second, *third]);
        let others = [pending[1] + second, pending[2] + third];
        // The matrix of this round times the remainder of the previous one: columns 1 and 2 go through `inner`.
        let row_of = |row: &State| {
            [
                row[1] * inner[0][0] + row[2] * inner[1][0],
                row[1] * inner[0][1] + row[2] * inner[1][1],
            ]
        };
        let row = row_of(&mds[0]);
        let next = [row_of(&mds[1]), row_of(&mds[2])];
        rounds.push(PartialRound {
            constant: pending[0] + first,
            corner: mds[0][0],
            row,
            column: apply(&inverse(&next), [mds[1][0], mds[2][0]]),
        });
        pending = [
            row[0] * others[0] + row[1] * others[1],
            others[0],
            others[1],
        ];
        inner = next;
    }
    (rounds, pending, inner)
}

fn apply(matrix: &Inner, [a, b]: [Base; 2]) -> [Base; 2] {
    [
        matrix[0][0] * a + matrix[0][1] * b,
        matrix[1][0] * a + matrix[1][1] * b,
    ]
}

/// All matrices here are submatrices of an MDS matrix or products of these, and therefore invertible.
fn inverse(matrix: &Inner) -> Inner {
    let [[a, b], [c, d]] = *matrix;
    let scale = (a * d - b * c).invert().unwrap_or(Base::ZERO);
    [[d * scale, -b * scale], [-c * scale, a * scale]]
}

/// The hash of any number of elements; their number is part of the input.
pub fn poseidon(message: &[Base]) -> Base {
    Prefix::new(message.len()).absorb(message).state[0]
}

/// Hash state after the first elements, for reuse with messages that have a common prefix.
#[derive(Clone, Copy)]
pub struct Prefix {
    state: State,
}

impl Prefix {
    /// Starts the hash of `length` elements with the first two of them.
    pub fn with_pair(length: usize, pair: [Base; RATE]) -> Self {
        Self::new(length).absorb(&pair)
    }

    /// Completes the hash with all other elements.
    pub fn finish(self, rest: &[Base]) -> Base {
        self.absorb(rest).state[0]
    }

    fn new(length: usize) -> Self {
        let length = Base::from_u128((length as u128) << 64);
        Self {
            state: [Base::ZERO, Base::ZERO, length],
        }
    }

    fn absorb(mut self, elements: &[Base]) -> Self {
        let tables = tables();
        for chunk in elements.chunks(RATE) {
            for (word, element) in self.state.iter_mut().zip(chunk) {
                *word += element;
            }
            permute(&mut self.state, tables);
        }
        self
    }
}

fn permute(state: &mut State, tables: &Tables) {
    for constants in &tables.before {
        full_round(state, constants, &tables.mds);
    }
    let [mut first, mut second, mut third] = *state;
    for round in &tables.partial {
        first = fifth_power(first + round.constant);
        let next = round.corner * first + round.row[0] * second + round.row[1] * third;
        second += round.column[0] * first;
        third += round.column[1] * first;
        first = next;
    }
    let [a, b, c] = tables.remainder;
    let [second, third] = apply(&tables.inner, [second + b, third + c]);
    *state = [first + a, second, third];
    for constants in &tables.after {
        full_round(state, constants, &tables.mds);
    }
}

fn full_round(state: &mut State, constants: &State, mds: &Mds<Base, WIDTH>) {
    for (word, constant) in state.iter_mut().zip(constants) {
        *word = fifth_power(*word + constant);
    }
    let [a, b, c] = *state;
    *state = mds.map(|row| row[0] * a + row[1] * b + row[2] * c);
}

fn fifth_power(x: Base) -> Base {
    x.square().square() * x
}

#[cfg(test)]
mod tests {
    use super::*;
    use halo2_poseidon::{ConstantLength, Hash};
    use rand::{rngs::StdRng, SeedableRng};

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
