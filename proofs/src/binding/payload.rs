//! Posted shares, many in one call.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use super::{bytes, run};
use crate::payload::{members, read, Payload};

#[pyfunction]
pub fn read_shares<'py>(
    py: Python<'py>,
    bodies: Vec<Bound<'py, PyBytes>>,
) -> PyResult<Vec<Option<Bound<'py, PyTuple>>>> {
    let plain: Vec<&[u8]> = bodies.iter().map(|body| body.as_bytes()).collect();
    let found = run(py, || {
        Ok(plain.iter().map(|body| read(body)).collect::<Vec<_>>())
    })?;
    found
        .into_iter()
        .map(|one| one.map(|share| row(py, &share)).transpose())
        .collect()
}

#[pyfunction]
pub fn json_members<'py>(
    py: Python<'py>,
    body: Bound<'py, PyBytes>,
    names: Vec<String>,
) -> PyResult<Bound<'py, PyAny>> {
    let plain = body.as_bytes();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    match run(py, || Ok(members(plain, &names)))? {
        Ok(reduced) => Ok(bytes(py, reduced).into_any()),
        Err(offset) => Ok(offset.into_pyobject(py)?.into_any()),
    }
}

/// The fields in the order of `proofs.ReadShare`.
fn row<'py>(py: Python<'py>, share: &Payload) -> PyResult<Bound<'py, PyTuple>> {
    let number = |value: u64| value.into_pyobject(py).map(Bound::into_any);
    let text = |value: &[u8]| bytes(py, value).into_any();
    PyTuple::new(
        py,
        [
            text(&share.round_id),
            number(share.share_index)?,
            number(share.proposal_id)?,
            number(share.vote_decision)?,
            number(share.tree_position)?,
            number(share.submit_at)?,
            text(&share.shares_hash),
            text(&share.share_comms),
            text(&share.primary_blind),
            text(&share.c1),
            text(&share.c2),
            text(&share.vote_commitment),
            text(&share.nullifier),
        ],
    )
}
