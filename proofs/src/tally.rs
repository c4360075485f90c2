//! Checks of a published tally: sums, partial decryptions with their DLEQ proofs, and totals. No discrete logarithm.
//!
//! Notation: G is the generator of [`crate::elgamal`], the key's commitments C_0 … C_{t-1} are points with C_0 the
//! public key, and validator i has the share f(i) with VK_i = f(i)·G = Σ i^k·C_k. Its partial decryption of a sum
//! (C1, C2) is D_i = f(i)·C1. Not constant-time: except for the dev chain's shares, all values are public.

use std::collections::HashSet;

use circuits_k11::spend_auth_g_affine;
use ff::{Field, FromUniformBytes, PrimeField};
use group::{Curve, Group, GroupEncoding};
use pasta_curves::pallas;
use rand::rngs::OsRng;

use crate::elgamal::{ciphertext, CIPHERTEXT};
use crate::errors::{Error, Reason, Result};
use crate::fields::{self, Encoded, Scalar, ELEMENT};

/// Tag of a DLEQ proof about the partial decryption of one validator.
const PARTIAL_TAG: &[u8] = b"svote-pd-dleq-v1";
/// Tag of a DLEQ proof about a decryption with the whole key.
const WHOLE_KEY_TAG: &[u8] = b"svote-dleq-v1";
/// Domain separation tag of [`hash_to_scalar`].
const HASH_DOMAIN: &[u8] = b"pallas_XMD:BLAKE2b_SSWU_RO_";
/// Block length of BLAKE2b in bytes.
const HASH_BLOCK: usize = 128;
/// Bytes of a DLEQ proof: challenge and response.
const DLEQ_PROOF: usize = 2 * ELEMENT;

/// A published partial decryption of one sum.
pub struct Partial<'a> {
    /// The validator's index in the key ceremony, from 1. `None` if it does not fit into 64 bits.
    pub index: Option<u64>,
    /// The point D_i, compressed.
    pub point: &'a [u8],
    /// The DLEQ proof, challenge and response.
    pub proof: &'a [u8],
}

/// What the valid partial decryptions say about a total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Total {
    /// The sum decrypts to it.
    Matches,
    /// The sum decrypts to another value.
    Differs,
    /// Fewer valid partial decryptions than the threshold.
    TooFew,
}

impl Total {
    /// Identifier in Python.
    pub fn as_str(self) -> &'static str {
        match self {
            Total::Matches => "matches",
            Total::Differs => "differs",
            Total::TooFew => "too_few",
        }
    }
}

/// Adds any number of ciphertexts to `start`.
pub fn sum(start: &[u8], ciphertexts: &[&[u8]]) -> Result<[u8; CIPHERTEXT]> {
    let (mut c1, mut c2) = ciphertext("start", start)?;
    for (i, bytes) in ciphertexts.iter().enumerate() {
        let (a, b) = ciphertext(&format!("ciphertexts[{i}]"), bytes)?;
        c1 += a;
        c2 += b;
    }
    let mut sum = [0; CIPHERTEXT];
    sum[..ELEMENT].copy_from_slice(&c1.to_bytes());
    sum[ELEMENT..].copy_from_slice(&c2.to_bytes());
    Ok(sum)
}

/// Adds any number of points; the identity is allowed.
pub fn sum_points(points: &[&[u8]]) -> Result<Encoded> {
    let mut sum = pallas::Point::identity();
    for (i, bytes) in points.iter().enumerate() {
        sum += fields::affine(format_args!("points[{i}]"), bytes)?;
    }
    Ok(sum.to_bytes())
}

/// `scalar·G`.
pub fn multiply_generator(scalar: &[u8]) -> Result<Encoded> {
    Ok((spend_auth_g_affine() * fields::scalar("scalar", scalar)?).to_bytes())
}

/// Decrypts a sum with one validator's share: D = share·C1, and its DLEQ proof.
pub fn decrypt_partially(share: &[u8], sum: &[u8]) -> Result<(Encoded, [u8; DLEQ_PROOF])> {
    let share = fields::scalar("share", share)?;
    let (c1, _) = ciphertext("sum", sum)?;
    let d = c1 * share;
    let nonce = Scalar::random(OsRng);
    Ok((d.to_bytes(), prove(PARTIAL_TAG, share, c1, nonce)))
}

/// Checks the partial decryptions of one sum and its total. The result has one entry for each partial: why it is
/// invalid, or `None`. Invalid ones do not count for the total.
pub fn check(
    sum: &[u8],
    commitments: &[&[u8]],
    threshold: u64,
    partials: &[Partial<'_>],
    total: u64,
) -> Result<(Vec<Option<String>>, Total)> {
    let (c1, c2) = ciphertext("sum", sum)?;
    let commitments = commitments
        .iter()
        .enumerate()
        .map(|(i, bytes)| {
            fields::affine(format_args!("commitments[{i}]"), bytes).map(pallas::Point::from)
        })
        .collect::<Result<Vec<_>>>()?;
    if threshold == 0 || commitments.len() as u64 != threshold {
        return Err(Error::encoding("threshold", Reason::Range));
    }
    let mut used = HashSet::new();
    let mut valid = Vec::new();
    let mut reasons = Vec::with_capacity(partials.len());
    for partial in partials {
        let outcome = check_partial(c1, &commitments, partial);
        reasons.push(match outcome {
            Ok((index, _)) if !used.insert(index) => Some("repeated index".into()),
            Ok(partial) => {
                valid.push(partial);
                None
            }
            Err(reason) => Some(reason),
        });
    }
    if (valid.len() as u64) < threshold {
        return Ok((reasons, Total::TooFew));
    }
    // All subsets give the same point: each valid proof ties its point to the polynomial of the commitments.
    let verdict = if c2 - combine(&valid) == spend_auth_g_affine() * Scalar::from(total) {
        Total::Matches
    } else {
        Total::Differs
    };
    Ok((reasons, verdict))
}

/// Returns whether a DLEQ proof shows that a sum decrypts to `total` under the whole key.
pub fn verify_decryption(public: &[u8], sum: &[u8], total: u64, proof: &[u8]) -> Result<bool> {
    let public = pallas::Point::from(fields::affine("public", public)?);
    let (c1, c2) = ciphertext("sum", sum)?;
    let d = c2 - spend_auth_g_affine() * Scalar::from(total);
    Ok(verify(WHOLE_KEY_TAG, public, c1, d, proof).is_ok())
}

/// Checks one partial decryption. Returns its index as a scalar and its point.
fn check_partial(
    c1: pallas::Point,
    commitments: &[pallas::Point],
    partial: &Partial<'_>,
) -> std::result::Result<(Index, pallas::Point), String> {
    let index = match partial.index {
        Some(index) if index > 0 && index <= u64::from(u32::MAX) => index,
        _ => return Err("index out of range".into()),
    };
    let text = |error: Error| error.to_string();
    let d = pallas::Point::from(fields::affine("partial_decrypt", partial.point).map_err(text)?);
    verify(
        PARTIAL_TAG,
        verification_key(commitments, index),
        c1,
        d,
        partial.proof,
    )?;
    Ok((Index(index), d))
}

/// A validator's index.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Index(u64);

/// VK_i = Σ i^k·C_k.
fn verification_key(commitments: &[pallas::Point], index: u64) -> pallas::Point {
    let x = Scalar::from(index);
    commitments
        .iter()
        .rev()
        .fold(pallas::Point::identity(), |sum, c| sum * x + c)
}

/// Σ λ_i·D_i with the Lagrange coefficients at 0 over all given indices, which are distinct.
fn combine(partials: &[(Index, pallas::Point)]) -> pallas::Point {
    let indices: Vec<Scalar> = partials.iter().map(|(i, _)| Scalar::from(i.0)).collect();
    partials
        .iter()
        .map(|(_, d)| d)
        .enumerate()
        .fold(pallas::Point::identity(), |sum, (at, d)| {
            sum + *d * coefficient(&indices, at)
        })
}

fn coefficient(indices: &[Scalar], at: usize) -> Scalar {
    let (mut numerator, mut denominator) = (Scalar::ONE, Scalar::ONE);
    for (m, other) in indices.iter().enumerate() {
        if m != at {
            numerator *= -other;
            denominator *= indices[at] - other;
        }
    }
    // Distinct indices below 2^32 never give zero.
    numerator * denominator.invert().unwrap_or(Scalar::ZERO)
}

/// Proof that log_G(secret·G) = log_C1(secret·C1).
fn prove(tag: &[u8], secret: Scalar, c1: pallas::Point, nonce: Scalar) -> [u8; DLEQ_PROOF] {
    let g = spend_auth_g_affine();
    let e = challenge(
        tag,
        [g * secret, c1, c1 * secret, g * nonce, c1 * nonce].map(|point| point.to_affine()),
    );
    let mut proof = [0; DLEQ_PROOF];
    proof[..ELEMENT].copy_from_slice(&e.to_repr());
    proof[ELEMENT..].copy_from_slice(&(nonce + e * secret).to_repr());
    proof
}

fn verify(
    tag: &[u8],
    public: pallas::Point,
    c1: pallas::Point,
    d: pallas::Point,
    proof: &[u8],
) -> std::result::Result<(), String> {
    if proof.len() != DLEQ_PROOF {
        return Err("dleq_proof: length".into());
    }
    if bool::from(public.is_identity()) || bool::from(c1.is_identity()) {
        return Err("the key or C1 is the identity".into());
    }
    let scalar = |bytes| fields::scalar("dleq_proof", bytes).map_err(|error| error.to_string());
    let (e, z) = (scalar(&proof[..ELEMENT])?, scalar(&proof[ELEMENT..])?);
    let r1 = spend_auth_g_affine() * z - public * e;
    let r2 = c1 * z - d * e;
    if challenge(tag, [public, c1, d, r1, r2].map(|point| point.to_affine())) == e {
        Ok(())
    } else {
        Err("dleq_proof: not valid".into())
    }
}

/// Hashes the transcript of a DLEQ proof: tag, G, then the points.
fn challenge(tag: &[u8], points: [pallas::Affine; 5]) -> Scalar {
    let mut params = blake2b_simd::Params::new();
    let mut state = params.hash_length(32).to_state();
    state.update(tag);
    state.update(&spend_auth_g_affine().to_bytes());
    for point in points {
        state.update(&point.to_bytes());
    }
    hash_to_scalar(state.finalize().as_bytes())
}

/// `expand_message_xmd` of RFC 9380 with BLAKE2b-512, read as a little-endian number modulo the group's order.
fn hash_to_scalar(message: &[u8]) -> Scalar {
    let domain = |state: &mut blake2b_simd::State| {
        state.update(HASH_DOMAIN);
        state.update(&[HASH_DOMAIN.len() as u8]);
    };
    let mut b0 = blake2b_simd::State::new();
    b0.update(&[0; HASH_BLOCK]);
    b0.update(message);
    b0.update(&[0, 64, 0]);
    domain(&mut b0);
    let mut b1 = blake2b_simd::State::new();
    b1.update(b0.finalize().as_bytes());
    b1.update(&[1]);
    domain(&mut b1);
    Scalar::from_uniform_bytes(b1.finalize().as_array())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Vec<u8> {
        hex::decode(text).unwrap()
    }

    #[test]
    fn hashes_to_the_scalars_of_the_vectors() {
        let vectors: [(&[u8], &str); 4] = [
            (
                b"",
                "4f4e407604cd80f2541791251e2f87951a88c5183cc6c3918e7f18acca826b2a",
            ),
            (
                b"abc",
                "84172ca34e656e5a2897d11b037a11715b2ff97895522b1577a9415d266d102a",
            ),
            (
                &[0; 32],
                "9d858971b8a527ddb1dff0ae331b453f7f7e56c698d738d2cf8f29402ebccb16",
            ),
            (
                &[0; 64],
                "ef610c915907533600391f2cd648f84498a7c87d49684b7e20db9d00a8375d26",
            ),
        ];
        for (message, expected) in vectors {
            assert_eq!(hash_to_scalar(message).to_repr().to_vec(), bytes(expected));
        }
    }

    #[test]
    fn lagrange_coefficients_are_those_of_the_vectors() {
        let indices = [1, 2, 4].map(Scalar::from);
        let expected = [
            "030000000bf96cd94938dcadfe32c26055555555555555555555555555555515",
            "ffffffff20eb468cdda89409fc98462200000000000000000000000000000040",
            "0100000016f2d9b29370b85bfd6584c1aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa2a",
        ];
        for (at, expected) in expected.iter().enumerate() {
            assert_eq!(
                coefficient(&indices, at).to_repr().to_vec(),
                bytes(expected)
            );
        }
    }

    #[test]
    fn a_proof_is_valid_for_its_tag_only() {
        let (secret, c1) = (Scalar::from(9), spend_auth_g_affine() * Scalar::from(4));
        let (public, d) = (spend_auth_g_affine() * secret, c1 * secret);
        for (tag, other) in [(PARTIAL_TAG, WHOLE_KEY_TAG), (WHOLE_KEY_TAG, PARTIAL_TAG)] {
            let proof = prove(tag, secret, c1, Scalar::from(5));
            assert_eq!(verify(tag, public, c1, d, &proof), Ok(()));
            assert!(verify(other, public, c1, d, &proof).is_err());
        }
        let identity = pallas::Point::identity();
        let proof = prove(PARTIAL_TAG, secret, identity, Scalar::from(5));
        assert!(verify(PARTIAL_TAG, public, identity, identity, &proof).is_err());
        let proof = prove(PARTIAL_TAG, Scalar::ZERO, c1, Scalar::from(5));
        assert!(verify(PARTIAL_TAG, identity, c1, identity, &proof).is_err());
    }
}
