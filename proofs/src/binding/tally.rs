//! Sums and tally checks.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{bytes, run, Number, Pair};
use crate::fields::below;
use crate::tally::{self, Partial};

/// Index, point and DLEQ proof of a partial decryption.
type PartialFields<'py> = (Number, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

fn borrow<'a>(values: &'a [Bound<'_, PyBytes>]) -> Vec<&'a [u8]> {
    values.iter().map(|value| value.as_bytes()).collect()
}

#[pyfunction]
pub fn elgamal_sum<'py>(
    py: Python<'py>,
    start: &[u8],
    ciphertexts: Vec<Bound<'py, PyBytes>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let ciphertexts = borrow(&ciphertexts);
    Ok(bytes(py, run(py, || tally::sum(start, &ciphertexts))?))
}

#[pyfunction]
pub fn sum_points<'py>(
    py: Python<'py>,
    points: Vec<Bound<'py, PyBytes>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let points = borrow(&points);
    Ok(bytes(py, run(py, || tally::sum_points(&points))?))
}

#[pyfunction]
pub fn multiply_generator<'py>(py: Python<'py>, scalar: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    Ok(bytes(py, run(py, || tally::multiply_generator(scalar))?))
}

#[pyfunction]
pub fn decrypt_partially<'py>(
    py: Python<'py>,
    share: &[u8],
    ciphertext: &[u8],
) -> PyResult<Pair<'py>> {
    let (point, proof) = run(py, || tally::decrypt_partially(share, ciphertext))?;
    Ok((bytes(py, point), bytes(py, proof)))
}

#[pyfunction]
pub fn check_tally(
    py: Python<'_>,
    ciphertext: &[u8],
    commitments: Vec<Bound<'_, PyBytes>>,
    threshold: Number,
    partials: Vec<PartialFields<'_>>,
    total: Number,
) -> PyResult<(Vec<Option<String>>, &'static str)> {
    let commitments = borrow(&commitments);
    let partials: Vec<_> = partials
        .iter()
        .map(|(index, point, proof)| Partial {
            index: index.0,
            point: point.as_bytes(),
            proof: proof.as_bytes(),
        })
        .collect();
    let (reasons, total) = run(py, || {
        let threshold = below("threshold", threshold.0, u64::MAX)?;
        let total = below("total", total.0, u64::MAX)?;
        tally::check(ciphertext, &commitments, threshold, &partials, total)
    })?;
    Ok((reasons, total.as_str()))
}

#[pyfunction]
pub fn verify_decryption(
    py: Python<'_>,
    public: &[u8],
    ciphertext: &[u8],
    total: Number,
    proof: &[u8],
) -> PyResult<bool> {
    run(py, || {
        tally::verify_decryption(
            public,
            ciphertext,
            below("total", total.0, u64::MAX)?,
            proof,
        )
    })
}
