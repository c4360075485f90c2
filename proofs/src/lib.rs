//! Share-reveal proofs, hashes, commitment tree and ElGamal of shielded voting: bytes in, bytes out. And what the store
//! has done natively with the rows and pages of its database.
//!
//! The Python package `proofs` is the only user; its facade documents what each function means.

pub mod circuit;
pub mod elgamal;
pub mod errors;
pub mod fields;
pub mod guard;
pub mod hashes;
pub mod k10;
pub mod k11;
pub mod pages;
pub mod payload;
pub mod poseidon;
pub mod rows;
pub mod tree;

// Left out of the crate's own tests, which so need no libpython to link with.
#[cfg(not(test))]
mod binding;
