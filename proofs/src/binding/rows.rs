//! Checks of database rows.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyString, PyTuple};

use super::{bytes, run};
use crate::rows::{Row, MAX_KEY};

#[pyfunction]
pub fn row_check<'py>(
    py: Python<'py>,
    key: &[u8],
    row: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyBytes>> {
    // Takes about a microsecond. Releasing the GIL would take longer, and reacquiring it up to milliseconds.
    Ok(bytes(py, encode(row)?.check(check_key(key)?)))
}

#[pyfunction]
pub fn row_checks<'py>(
    py: Python<'py>,
    key: &[u8],
    rows: Vec<Bound<'py, PyTuple>>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let key = check_key(key)?;
    let rows = rows.iter().map(encode).collect::<PyResult<Vec<_>>>()?;
    let checks = run(py, || {
        Ok(rows.iter().map(|row| row.check(key)).collect::<Vec<_>>())
    })?;
    Ok(checks.iter().map(|check| bytes(py, check)).collect())
}

fn check_key(key: &[u8]) -> PyResult<&[u8]> {
    if key.len() > MAX_KEY {
        return Err(PyValueError::new_err("key is too long"));
    }
    Ok(key)
}

/// Encodes the columns of a row. Other types are rejected, because the store never writes them.
fn encode(row: &Bound<'_, PyTuple>) -> PyResult<Row> {
    let mut encoded = Row::default();
    for column in row.iter_borrowed() {
        if column.is_none() {
            encoded.null();
        } else if column.is_exact_instance_of::<PyInt>() {
            encoded.integer(column.extract()?);
        } else if column.is_exact_instance_of::<PyBytes>() {
            encoded.blob(column.cast::<PyBytes>()?.as_bytes());
        } else if column.is_exact_instance_of::<PyString>() {
            let value = column.cast::<PyString>()?;
            match value.to_str() {
                Ok(text) => encoded.text(text.as_bytes()),
                // The text contains a lone surrogate.
                Err(_) => {
                    let utf8 = value.call_method1("encode", ("utf-8", "surrogatepass"))?;
                    encoded.text(utf8.cast::<PyBytes>()?.as_bytes());
                }
            }
        } else {
            let kind = column.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "unsupported column type: {kind}"
            )));
        }
    }
    Ok(encoded)
}
