//! Poseidon (P128Pow5T3, constant length), with the published crate's constants.
//!
//! The published crate copies its tables for every hash and raises to the fifth power bit by bit, which costs a
//! quarter of the time; a tree of 100,000s of leaves and 16 permutations a share make that worth 40 lines.

use std::sync::OnceLock;

use ff::{Field, PrimeField};
use halo2_poseidon::{Mds, P128Pow5T3, Spec};

use crate::fields::Base;

const WIDTH: usize = 3;
const RATE: usize = 2;
/// Full rounds before and after the partial ones.
const HALF_FULL_ROUNDS: usize = 4;

type State = [Base; WIDTH];

struct Tables {
    round_constants: Vec<State>,
    mds: Mds<Base, WIDTH>,
}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let (round_constants, mds, _) = <P128Pow5T3 as Spec<Base, WIDTH, RATE>>::constants();
        Tables {
            round_constants,
            mds,
        }
    })
}

/// The hash of any number of elements; their number is part of what is hashed.
pub fn poseidon(message: &[Base]) -> Base {
    let tables = tables();
    let length = Base::from_u128((message.len() as u128) << 64);
    let mut state = [Base::ZERO, Base::ZERO, length];
    for chunk in message.chunks(RATE) {
        for (word, element) in state.iter_mut().zip(chunk) {
            *word += element;
        }
        permute(&mut state, tables);
    }
    state[0]
}

fn permute(state: &mut State, tables: &Tables) {
    let partial_until = tables.round_constants.len() - HALF_FULL_ROUNDS;
    for (round, constants) in tables.round_constants.iter().enumerate() {
        for (word, constant) in state.iter_mut().zip(constants) {
            *word += constant;
        }
        state[0] = fifth_power(state[0]);
        if round < HALF_FULL_ROUNDS || round >= partial_until {
            state[1] = fifth_power(state[1]);
            state[2] = fifth_power(state[2]);
        }
        let [a, b, c] = *state;
        *state = tables.mds.map(|row| row[0] * a + row[1] * b + row[2] * c);
    }
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
}
