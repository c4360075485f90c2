//! The circuit of chains since v1.3.0: K = 10, on its forks of the Zcash crates.

use circuits::ff::PrimeField;
use circuits_k10 as circuits;
use voting_crypto_deps::halo2_proofs as halo2;
use voting_crypto_deps::pasta_curves::pallas;

// Warming also builds the commitment tables that speed up its prover.
crate::circuit::generation!(
    Info {
        name: "k10",
        k: share_reveal::K,
        proof_bytes: 4_992,
        fingerprint: "e7165da431d5c6f8396d082aba6abfd0213c567071ca4435b38d092242cc4837",
        source: "voting-circuits 0.12.2",
    },
    warm: share_reveal::warm_share_reveal_keys
);
