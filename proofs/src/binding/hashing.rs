//! Encodings and hashes.

use ff::{Field, PrimeField};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use rand::rngs::OsRng;

use super::{bytes, run, Number, WIRE_LIMIT};
use crate::errors::{Error, Reason, Result};
use crate::fields::{base, base_array, below, point, Base};
use crate::hashes::{self, SHARES};

/// Maximum number of elements of a hash in the protocol.
const MAX_ELEMENTS: usize = 16;

#[pyfunction]
pub fn check_encoding(py: Python<'_>, field: &str, value: &[u8]) -> PyResult<()> {
    run(py, || base(field, value).map(drop))
}

#[pyfunction]
pub fn check_point(py: Python<'_>, field: &str, value: &[u8]) -> PyResult<()> {
    run(py, || point(field, value).map(drop))
}

#[pyfunction]
#[pyo3(signature = (*elements))]
pub fn poseidon<'py>(
    py: Python<'py>,
    elements: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyBytes>> {
    let elements: Vec<Vec<u8>> = elements
        .iter()
        .map(|element| Ok(element.cast::<PyBytes>()?.as_bytes().to_vec()))
        .collect::<PyResult<_>>()?;
    let hash = run(py, || {
        let decoded = elements
            .iter()
            .enumerate()
            .map(|(i, element)| base(format_args!("elements[{i}]"), element))
            .collect::<Result<Vec<Base>>>()?;
        if decoded.is_empty() || decoded.len() > MAX_ELEMENTS {
            return Err(Error::encoding("elements", Reason::Range));
        }
        Ok(crate::poseidon::poseidon(&decoded))
    })?;
    Ok(bytes(py, hash.to_repr()))
}

#[pyfunction]
pub fn share_commitment<'py>(
    py: Python<'py>,
    blind: &[u8],
    c1: &[u8],
    c2: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let hash = run(py, || {
        let blind = base("primary_blind", blind)?;
        let (c1, c2) = (point("enc_share.c1", c1)?, point("enc_share.c2", c2)?);
        Ok(hashes::share_commitment(blind, &c1, &c2))
    })?;
    Ok(bytes(py, hash.to_repr()))
}

#[pyfunction]
pub fn shares_hash<'py>(py: Python<'py>, share_comms: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let hash = run(py, || {
        Ok(hashes::shares_hash(&base_array(
            "share_comms",
            share_comms,
        )?))
    })?;
    Ok(bytes(py, hash.to_repr()))
}

#[pyfunction]
pub fn vote_commitment<'py>(
    py: Python<'py>,
    round_id: &[u8],
    shares_hash: &[u8],
    proposal_id: Number,
    vote_decision: Number,
) -> PyResult<Bound<'py, PyBytes>> {
    let hash = run(py, || {
        Ok(hashes::vote_commitment(
            base("vote_round_id", round_id)?,
            base("shares_hash", shares_hash)?,
            Base::from(below("proposal_id", proposal_id.0, WIRE_LIMIT)?),
            Base::from(below("vote_decision", vote_decision.0, WIRE_LIMIT)?),
        ))
    })?;
    Ok(bytes(py, hash.to_repr()))
}

#[pyfunction]
pub fn share_nullifier<'py>(
    py: Python<'py>,
    vote_commitment: &[u8],
    share_index: Number,
    blind: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let hash = run(py, || {
        let vote_commitment = base("vote_commitment", vote_commitment)?;
        let index = below("enc_share.share_index", share_index.0, SHARES as u64)?;
        let blind = base("primary_blind", blind)?;
        Ok(hashes::share_nullifier(vote_commitment, index, blind))
    })?;
    Ok(bytes(py, hash.to_repr()))
}

#[pyfunction]
pub fn random_field(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    Ok(bytes(py, run(py, || Ok(Base::random(OsRng).to_repr()))?))
}
