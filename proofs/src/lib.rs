//! Share-reveal proofs, hashes, commitment tree, ElGamal and tally checks of shielded voting, and the store's row
//! checks and page scans.
//!
//! The Python package `proofs` is the only user and documents each function.

#[cfg(target_arch = "x86_64")]
mod batch;
pub mod circuit;
pub mod elgamal;
pub mod errors;
pub mod fields;
pub mod guard;
pub mod hashes;
pub mod json;
pub mod k10;
pub mod k11;
#[cfg(target_arch = "x86_64")]
mod lanes;
pub mod pages;
pub mod payload;
pub mod poseidon;
pub mod rows;
mod steps;
pub mod tally;
pub mod tree;

// Excluded from the crate's tests, so that they do not link against libpython.
#[cfg(not(test))]
mod binding;
