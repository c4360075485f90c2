//! Common code of the circuit generations: statement, witness, and the interface to the circuit crates.
//!
//! The crates of the generations share no types. Values are therefore passed as bytes, and the code that calls a crate
//! is a macro that [`crate::k11`] and [`crate::k10`] instantiate.

use ff::PrimeField;

use crate::errors::{Error, Result};
use crate::fields::{Encoded, Point};
use crate::guard::guard;
use crate::hashes::SHARES;
use crate::tree::DEPTH;
use crate::{k10, k11};

/// The constants of one circuit generation.
pub struct Info {
    /// Its name in configuration and logs.
    pub name: &'static str,
    /// log2 of its rows.
    pub k: u32,
    /// Length of every proof.
    pub proof_bytes: usize,
    /// BLAKE2b-256 of the debug text of the verifying key that the chain uses, in hex.
    pub fingerprint: &'static str,
    /// Name and version of the published crate.
    pub source: &'static str,
}

/// x and y of a point, encoded.
#[derive(Clone, Copy)]
pub struct Coordinates {
    /// x-coordinate.
    pub x: Encoded,
    /// y-coordinate.
    pub y: Encoded,
}

impl From<&Point> for Coordinates {
    fn from(point: &Point) -> Self {
        Coordinates {
            x: point.x.to_repr(),
            y: point.y.to_repr(),
        }
    }
}

/// The public inputs of a reveal. All elements are canonical.
pub struct Statement {
    /// The share's nullifier.
    pub nullifier: Encoded,
    /// First half of the ciphertext.
    pub c1: Coordinates,
    /// Second half of the ciphertext.
    pub c2: Coordinates,
    /// The proposal voted on.
    pub proposal_id: u64,
    /// The option voted for.
    pub vote_decision: u64,
    /// The tree's root at the anchor.
    pub root: Encoded,
    /// The voting round.
    pub round_id: Encoded,
}

/// The witness of a proof. All elements are canonical. No Debug, because it contains secrets.
pub struct Witness {
    /// Siblings from the leaf up.
    pub path: [Encoded; DEPTH],
    /// The leaf's position.
    pub position: u32,
    /// Commitments of all shares of the vote.
    pub share_comms: [Encoded; SHARES],
    /// Blind of the revealed share.
    pub primary_blind: Encoded,
    /// First half of the ciphertext.
    pub c1: Coordinates,
    /// Second half of the ciphertext.
    pub c2: Coordinates,
    /// Which share is revealed.
    pub share_index: u32,
    /// The proposal voted on.
    pub proposal_id: u64,
    /// The option voted for.
    pub vote_decision: u64,
    /// The voting round.
    pub round_id: Encoded,
}

/// A proof, and the public inputs derived from the witness.
pub struct Proved {
    /// The proof's bytes.
    pub proof: Vec<u8>,
    /// The share's nullifier.
    pub nullifier: Encoded,
    /// The root computed from the path.
    pub root: Encoded,
}

/// A proof and its statement.
pub struct Item<'a> {
    /// The proof's bytes.
    pub proof: &'a [u8],
    /// The public inputs.
    pub statement: Statement,
}

/// One circuit generation. Its keys are generated once per process, on first use.
pub trait Circuit: Sync {
    /// Its constants.
    fn info(&self) -> &'static Info;
    /// Generates the keys and returns their fingerprint without checking it.
    fn fingerprint(&self) -> Result<&'static str>;
    /// Generates the keys and the other precomputed tables. Fails if the fingerprint is wrong.
    fn warm(&self) -> Result<&'static str>;
    /// Creates a proof. The share commitment of the witness must have been checked.
    fn prove(&self, witness: &Witness) -> Result<Proved>;
    /// Returns whether the proof is valid for the statement.
    fn verify(&self, proof: &[u8], statement: &Statement) -> Result<bool>;
    /// Returns whether all proofs are valid. Much faster than one at a time, because one equation covers all.
    fn verify_all(&self, items: &[Item<'_>]) -> Result<bool>;

    /// Returns the fingerprint, or an error if it is not the protocol's.
    fn checked_fingerprint(&self) -> Result<&'static str> {
        let (actual, info) = (self.fingerprint()?, self.info());
        if actual == info.fingerprint {
            return Ok(actual);
        }
        Err(Error::Circuit(format!(
            "{} of {}: the verifying key's fingerprint is {actual}, expected {}",
            info.name, info.source, info.fingerprint
        )))
    }
}

/// All generations, oldest first.
pub const CIRCUITS: [&dyn Circuit; 2] = [&k11::Generation, &k10::Generation];

/// Looks up a generation by name.
pub fn find(name: &str) -> Result<&'static dyn Circuit> {
    CIRCUITS
        .into_iter()
        .find(|circuit| circuit.info().name == name)
        .ok_or_else(|| Error::Circuit("unknown circuit".into()))
}

/// Returns for each proof whether it is valid. Uses all cores.
pub fn verify_each(circuit: &dyn Circuit, items: &[Item<'_>]) -> Result<Vec<bool>> {
    circuit.checked_fingerprint()?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let share = items.len().div_ceil(cores).max(1);
    let parts = std::thread::scope(|scope| {
        let threads: Vec<_> = items
            .chunks(share)
            .map(|part| scope.spawn(move || guard(|| bisect(circuit, part))))
            .collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended
            .map(|result| {
                result.unwrap_or_else(|_| Err(Error::Proving("a verifier thread ended".into())))
            })
            .collect::<Result<Vec<_>>>()
    })?;
    Ok(parts.concat())
}

/// Verifies all at once, and the halves separately while at least one proof is invalid.
fn bisect(circuit: &dyn Circuit, items: &[Item<'_>]) -> Result<Vec<bool>> {
    if let [item] = items {
        return Ok(vec![circuit.verify(item.proof, &item.statement)?]);
    }
    if items.is_empty() || circuit.verify_all(items)? {
        return Ok(vec![true; items.len()]);
    }
    let (left, right) = items.split_at(items.len() / 2);
    Ok([bisect(circuit, left)?, bisect(circuit, right)?].concat())
}

/// Runs a function with as many threads as there are cores, also if the threads of a proof are limited
/// (`RAYON_NUM_THREADS`). Due shares wait for the keys after a start.
pub fn with_all_cores<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    match rayon::ThreadPoolBuilder::new().num_threads(cores).build() {
        Ok(pool) => pool.install(run),
        Err(_) => run(), // no more threads can be started: the function's own thread is enough
    }
}

/// BLAKE2b-256 in hex.
pub fn fingerprint_of(pinned_key: &str) -> String {
    let mut params = blake2b_simd::Params::new();
    params
        .hash_length(32)
        .hash(pinned_key.as_bytes())
        .to_hex()
        .to_string()
}

/// Implements [`Circuit`] for the crates that the calling module imports as `circuits`, `halo2`, `pallas`
/// and `PrimeField`.
macro_rules! generation {
    ($info:expr, warm: $warm:path) => {
        use std::sync::OnceLock;

        use halo2::plonk::{verify_proof, BatchVerifier, SingleVerifier};
        use halo2::transcript::{Blake2bRead, Challenge255};

        use circuits::share_reveal::{self, Instance};

        use $crate::circuit::{
            fingerprint_of, with_all_cores, Circuit, Info, Item, Proved, Statement, Witness,
        };
        use $crate::errors::{Error, Result};
        use $crate::fields::Encoded;

        /// This circuit generation.
        pub struct Generation;

        static INFO: Info = $info;

        fn base(bytes: &Encoded) -> Result<pallas::Base> {
            Option::from(pallas::Base::from_repr((*bytes).into()))
                .ok_or_else(|| Error::Proving("an element is not canonical".into()))
        }

        fn bases<const N: usize>(bytes: &[Encoded; N]) -> Result<[pallas::Base; N]> {
            let mut elements = [pallas::Base::zero(); N];
            for (element, bytes) in elements.iter_mut().zip(bytes) {
                *element = base(bytes)?;
            }
            Ok(elements)
        }

        fn public_inputs(statement: &Statement) -> Result<Instance> {
            Ok(Instance::from_parts(
                base(&statement.nullifier)?,
                base(&statement.c1.x)?,
                base(&statement.c2.x)?,
                pallas::Base::from(statement.proposal_id),
                pallas::Base::from(statement.vote_decision),
                base(&statement.root)?,
                base(&statement.round_id)?,
                base(&statement.c1.y)?,
                base(&statement.c2.y)?,
            ))
        }

        fn bundle(witness: &Witness) -> Result<share_reveal::ShareRevealBundle> {
            Ok(share_reveal::build_share_reveal(
                bases(&witness.path)?,
                witness.position,
                bases(&witness.share_comms)?,
                base(&witness.primary_blind)?,
                base(&witness.c1.x)?,
                base(&witness.c2.x)?,
                base(&witness.c1.y)?,
                base(&witness.c2.y)?,
                witness.share_index,
                pallas::Base::from(witness.proposal_id),
                pallas::Base::from(witness.vote_decision),
                base(&witness.round_id)?,
            ))
        }

        fn key_error(error: circuits::ProveError) -> Error {
            Error::Circuit(format!("{}: {error}", INFO.name))
        }

        impl Circuit for Generation {
            fn info(&self) -> &'static Info {
                &INFO
            }

            fn fingerprint(&self) -> Result<&'static str> {
                static FINGERPRINT: OnceLock<String> = OnceLock::new();
                let (_, _, key) = share_reveal::share_reveal_cached_keys().map_err(key_error)?;
                Ok(FINGERPRINT.get_or_init(|| fingerprint_of(&format!("{:?}", key.pinned()))))
            }

            fn warm(&self) -> Result<&'static str> {
                with_all_cores(|| {
                    let fingerprint = self.checked_fingerprint()?;
                    $warm().map_err(key_error)?;
                    Ok(fingerprint)
                })
            }

            fn prove(&self, witness: &Witness) -> Result<Proved> {
                self.checked_fingerprint()?;
                let bundle = bundle(witness)?;
                let proof =
                    share_reveal::create_share_reveal_proof(bundle.circuit, &bundle.instance)
                        .map_err(|error| Error::Proving(format!("{}: {error}", INFO.name)))?;
                Ok(Proved {
                    proof,
                    nullifier: bundle.instance.share_nullifier.to_repr().into(),
                    root: bundle.instance.vote_comm_tree_root.to_repr().into(),
                })
            }

            fn verify(&self, proof: &[u8], statement: &Statement) -> Result<bool> {
                self.checked_fingerprint()?;
                if proof.len() != INFO.proof_bytes {
                    return Ok(false);
                }
                let (params, _, key) =
                    share_reveal::share_reveal_cached_keys().map_err(key_error)?;
                let inputs = public_inputs(statement)?.to_halo2_instance();
                let mut unread = proof;
                let mut transcript = Blake2bRead::<_, _, Challenge255<_>>::init(&mut unread);
                let strategy = SingleVerifier::new(params);
                let verified =
                    verify_proof(params, key, strategy, &[&[&inputs]], &mut transcript).is_ok();
                Ok(verified && unread.is_empty())
            }

            fn verify_all(&self, items: &[Item<'_>]) -> Result<bool> {
                self.checked_fingerprint()?;
                let (params, _, key) =
                    share_reveal::share_reveal_cached_keys().map_err(key_error)?;
                let mut batch = BatchVerifier::new();
                for item in items {
                    // The verifier reads a fixed number of bytes, so this also excludes trailing ones.
                    if item.proof.len() != INFO.proof_bytes {
                        return Ok(false);
                    }
                    let inputs = public_inputs(&item.statement)?.to_halo2_instance();
                    batch.add_proof(vec![vec![inputs]], item.proof.to_vec());
                }
                Ok(batch.finalize(params, key))
            }
        }
    };
}
pub(crate) use generation;
