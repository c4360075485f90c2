//! Validation of posted shares, many in one call.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use super::{bytes, run};
use crate::payload::{read_all, Payload, Value};

/// Whether a body is a valid share, and the fields of `proofs.ReadShare` or `proofs.InvalidShare`.
type Outcome<'py> = (bool, Bound<'py, PyTuple>);

#[pyfunction]
pub fn read_shares<'py>(
    py: Python<'py>,
    bodies: Vec<Bound<'py, PyBytes>>,
) -> PyResult<Vec<Outcome<'py>>> {
    let borrowed: Vec<&[u8]> = bodies.iter().map(|body| body.as_bytes()).collect();
    let results = run(py, || Ok(read_all(&borrowed)))?;
    results
        .into_iter()
        .map(|result| match result {
            Ok(share) => Ok((true, row(py, &share)?)),
            Err(invalid) => {
                let reason = invalid.reason;
                let fields = (invalid.field, reason.as_str(), reason.actual());
                Ok((false, fields.into_pyobject(py)?))
            }
        })
        .collect()
}

/// The fields of `proofs.ReadShare`.
fn row<'py>(py: Python<'py>, share: &Payload) -> PyResult<Bound<'py, PyTuple>> {
    let posted = share.posted().map(|value| match value {
        Value::Integer(value) => value.into_pyobject(py).map(Bound::into_any),
        Value::Bytes(value) => Ok(bytes(py, value).into_any()),
    });
    let posted = PyTuple::new(py, posted.into_iter().collect::<Result<Vec<_>, _>>()?)?;
    let vote_commitment = bytes(py, share.vote_commitment);
    (posted, vote_commitment, bytes(py, share.nullifier)).into_pyobject(py)
}
