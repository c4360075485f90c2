//! The circuit of chains before v1.3.0: K = 11, on the Zcash crates.

use circuits_k11 as circuits;
use ff::PrimeField;
use halo2_proofs as halo2;
use pasta_curves::pallas;

crate::circuit::generation!(
    Info {
        name: "k11",
        k: share_reveal::K,
        proof_bytes: 4_000,
        fingerprint: "ed1719daf7904fd82fe69353525529b44ea4962929b03e2672e7aedcbd69d98b",
        source: "voting-circuits 0.8.0",
    },
    warm: share_reveal::warm_share_reveal_keys
);
