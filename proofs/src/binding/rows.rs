//! Rows of a database.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyString, PyTuple};

use super::{bytes, run};
use crate::rows::{Row, LONGEST_KEY};

#[pyfunction]
pub fn row_check<'py>(
    py: Python<'py>,
    key: &[u8],
    row: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyBytes>> {
    // a microsecond: letting go of the GIL would take longer, and taking it again up to milliseconds
    Ok(bytes(py, gathered(row)?.check(usable(key)?)))
}

#[pyfunction]
pub fn row_checks<'py>(
    py: Python<'py>,
    key: &[u8],
    rows: Vec<Bound<'py, PyTuple>>,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let key = usable(key)?;
    let rows = rows.iter().map(gathered).collect::<PyResult<Vec<_>>>()?;
    let checks = run(py, || {
        Ok(rows.iter().map(|row| row.check(key)).collect::<Vec<_>>())
    })?;
    Ok(checks.iter().map(|check| bytes(py, check)).collect())
}

fn usable(key: &[u8]) -> PyResult<&[u8]> {
    if key.len() > LONGEST_KEY {
        return Err(PyValueError::new_err("the key is too long"));
    }
    Ok(key)
}

/// The columns of a row, of these types and no other: one that is never written is no part of a sound row.
fn gathered(row: &Bound<'_, PyTuple>) -> PyResult<Row> {
    let mut gathered = Row::default();
    for column in row.iter_borrowed() {
        if column.is_none() {
            gathered.nothing();
        } else if column.is_exact_instance_of::<PyInt>() {
            gathered.number(column.extract()?);
        } else if column.is_exact_instance_of::<PyBytes>() {
            gathered.blob(column.cast::<PyBytes>()?.as_bytes());
        } else if column.is_exact_instance_of::<PyString>() {
            let value = column.cast::<PyString>()?;
            match value.to_str() {
                Ok(text) => gathered.text(text.as_bytes()),
                // it has half of a surrogate pair in it
                Err(_) => {
                    let encoded = value.call_method1("encode", ("utf-8", "surrogatepass"))?;
                    gathered.text(encoded.cast::<PyBytes>()?.as_bytes());
                }
            }
        } else {
            let kind = column.get_type().name()?;
            return Err(PyTypeError::new_err(format!("a {kind} in a row")));
        }
    }
    Ok(gathered)
}
