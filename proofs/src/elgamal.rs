//! Additively homomorphic ElGamal over Pallas, for the dev chain and its wallets. Not constant-time; the helper itself
//! never encrypts or decrypts.

use std::collections::HashMap;

use circuits_k11::spend_auth_g_affine;
use ff::{Field, FromUniformBytes, PrimeField};
use group::{Curve, Group, GroupEncoding};
use pasta_curves::pallas;
use rand::rngs::OsRng;

use crate::errors::{Error, Reason, Result};
use crate::fields::{self, Encoded, Scalar, ELEMENT};

/// Bytes of a ciphertext.
pub const CIPHERTEXT: usize = 2 * ELEMENT;
/// Maximum limit of a decryption. Its table has as many entries as the square root of the limit.
pub const MAX_LIMIT: u64 = 1 << 40;
/// Points that are converted to affine form in one batch, with one inversion.
const BATCH: usize = 512;

/// Generates a secret scalar, from a seed or the system's random generator, and its public key.
pub fn keygen(seed: Option<&[u8]>) -> (Encoded, Encoded) {
    let secret = match seed {
        Some(seed) => {
            let mut params = blake2b_simd::Params::new();
            let digest = params
                .hash_length(64)
                .personal(b"svote-elgamal-sk")
                .hash(seed);
            Scalar::from_uniform_bytes(digest.as_array())
        }
        None => Scalar::random(OsRng),
    };
    let public = spend_auth_g_affine() * secret;
    (secret.to_repr(), public.to_bytes())
}

/// `(r·G, value·G + r·public)`, with the given randomness or the system's.
pub fn encrypt(public: &[u8], value: u64, randomness: Option<&[u8]>) -> Result<(Encoded, Encoded)> {
    fields::point("public", public)?;
    let public = fields::affine("public", public)?;
    let r = match randomness {
        Some(bytes) => fields::scalar("randomness", bytes)?,
        None => Scalar::random(OsRng),
    };
    if bool::from(r.is_zero()) {
        return Err(Error::encoding("randomness", Reason::Range));
    }
    let g = spend_auth_g_affine();
    let c1 = g * r;
    let c2 = g * Scalar::from(value) + public * r;
    Ok((c1.to_bytes(), c2.to_bytes()))
}

/// Adds two ciphertexts; the result encrypts the sum of their values. All zeros is the empty sum.
pub fn add(a: &[u8], b: &[u8]) -> Result<[u8; CIPHERTEXT]> {
    let (a1, a2) = ciphertext("a", a)?;
    let (b1, b2) = ciphertext("b", b)?;
    let mut sum = [0; CIPHERTEXT];
    sum[..ELEMENT].copy_from_slice(&(a1 + b1).to_bytes());
    sum[ELEMENT..].copy_from_slice(&(a2 + b2).to_bytes());
    Ok(sum)
}

/// Decrypts a ciphertext: searches for its value in 0..=limit (baby-step giant-step).
pub fn decrypt(secret: &[u8], bytes: &[u8], limit: u64) -> Result<u64> {
    let secret = fields::scalar("secret", secret)?;
    let (c1, c2) = ciphertext("ciphertext", bytes)?;
    if limit > MAX_LIMIT {
        return Err(Error::encoding("limit", Reason::Range));
    }
    discrete_log(c2 - c1 * secret, limit)
        .ok_or_else(|| Error::Decryption(format!("the value is above {limit}")))
}

/// Decodes a ciphertext: both halves, the identity allowed.
pub fn ciphertext(field: &str, bytes: &[u8]) -> Result<(pallas::Point, pallas::Point)> {
    if bytes.len() != CIPHERTEXT {
        return Err(Error::encoding(field, Reason::Length));
    }
    let (c1, c2) = bytes.split_at(ELEMENT);
    let c1 = fields::affine(format_args!("{field}.c1"), c1)?;
    let c2 = fields::affine(format_args!("{field}.c2"), c2)?;
    Ok((c1.into(), c2.into()))
}

fn discrete_log(target: pallas::Point, limit: u64) -> Option<u64> {
    let g = pallas::Point::from(spend_auth_g_affine());
    let width = (limit + 1).isqrt() + 1;
    let mut baby = HashMap::with_capacity(width as usize);
    for (value, point) in (0..width).zip(Steps::new(pallas::Point::identity(), g)) {
        baby.insert(point, value);
    }
    let giant = -(g * Scalar::from(width));
    (0..=limit / width)
        .zip(Steps::new(target, giant))
        .find_map(|(step, point)| baby.get(&point).map(|value| step * width + value))
        .filter(|value| *value <= limit)
}

/// `start`, `start + step`, … in compressed form.
struct Steps {
    next: pallas::Point,
    step: pallas::Point,
    ready: std::vec::IntoIter<Encoded>,
}

impl Steps {
    fn new(start: pallas::Point, step: pallas::Point) -> Self {
        Steps {
            next: start,
            step,
            ready: Vec::new().into_iter(),
        }
    }

    fn refill(&mut self) {
        let mut points = Vec::with_capacity(BATCH);
        for _ in 0..BATCH {
            points.push(self.next);
            self.next += self.step;
        }
        let mut affine = vec![pallas::Affine::default(); BATCH];
        pallas::Point::batch_normalize(&points, &mut affine);
        let encoded: Vec<Encoded> = affine.iter().map(GroupEncoding::to_bytes).collect();
        self.ready = encoded.into_iter();
    }
}

impl Iterator for Steps {
    type Item = Encoded;

    fn next(&mut self) -> Option<Encoded> {
        if self.ready.len() == 0 {
            self.refill();
        }
        self.ready.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_logarithms_up_to_the_limit() {
        let g = pallas::Point::from(spend_auth_g_affine());
        for limit in [0u64, 1, 2, 3, 10, 624, 625, 626, 3_000] {
            for value in [0, 1, limit / 2, limit.saturating_sub(1), limit, limit + 1] {
                let expected = (value <= limit).then_some(value);
                assert_eq!(discrete_log(g * Scalar::from(value), limit), expected);
            }
        }
    }
}
