//! ElGamal.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{bytes, run, Number, Pair};
use crate::elgamal;
use crate::fields::below;

#[pyfunction]
#[pyo3(signature = (seed=None))]
pub fn elgamal_keygen<'py>(py: Python<'py>, seed: Option<&[u8]>) -> PyResult<Pair<'py>> {
    let (secret, public) = run(py, || Ok(elgamal::keygen(seed)))?;
    Ok((bytes(py, secret), bytes(py, public)))
}

#[pyfunction]
#[pyo3(signature = (public, value, randomness=None))]
pub fn elgamal_encrypt<'py>(
    py: Python<'py>,
    public: &[u8],
    value: Number,
    randomness: Option<&[u8]>,
) -> PyResult<Pair<'py>> {
    let (c1, c2) = run(py, || {
        elgamal::encrypt(public, below("value", value.0, u64::MAX)?, randomness)
    })?;
    Ok((bytes(py, c1), bytes(py, c2)))
}

#[pyfunction]
pub fn elgamal_add<'py>(py: Python<'py>, a: &[u8], b: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    Ok(bytes(py, run(py, || elgamal::add(a, b))?))
}

#[pyfunction]
pub fn elgamal_decrypt(
    py: Python<'_>,
    secret: &[u8],
    ciphertext: &[u8],
    limit: Number,
) -> PyResult<u64> {
    run(py, || {
        let limit = below("limit", limit.0, elgamal::MAX_LIMIT + 1)?;
        elgamal::decrypt(secret, ciphertext, limit)
    })
}
