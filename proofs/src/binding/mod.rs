//! PyO3 binding: decodes arguments, releases the GIL and converts errors to exceptions.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt};

use crate::errors::{Error, Result};
use crate::guard::{guard, install_hook};

mod elgamal;
mod hashing;
mod pages;
mod payload;
mod proving;
mod rows;
mod tally;
mod tree;

/// A pair of byte strings.
type Pair<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Proposal and decision are unsigned 32-bit numbers on the wire.
const WIRE_LIMIT: u64 = 1 << 32;

/// A Python int. `None` if it is negative or does not fit into 64 bits, which is out of range for every parameter.
#[derive(Clone, Copy)]
struct Number(Option<u64>);

impl<'a, 'py> FromPyObject<'a, 'py> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if !object.is_instance_of::<PyInt>() {
            return Err(PyTypeError::new_err("expected an int"));
        }
        Ok(Number(object.extract().ok()))
    }
}

/// Runs `work` without the GIL; converts its errors and panics to exceptions of `proofs.errors`.
fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    py.detach(|| guard(work))
        .map_err(|error| to_exception(py, error))
}

fn to_exception(py: Python<'_>, error: Error) -> PyErr {
    let exception = (|| {
        let classes = py.import("proofs.errors")?;
        match &error {
            Error::Encoding { field, reason } => {
                classes.call_method1("EncodingError", (field, reason.as_str()))
            }
            Error::ShareRule(rule) => classes.call_method1("ShareRuleError", (rule.as_str(),)),
            Error::Circuit(text) => classes.call_method1("CircuitError", (text,)),
            Error::Proving(text) => classes.call_method1("ProvingError", (text,)),
            Error::Tree(text) => classes.call_method1("TreeError", (text,)),
            Error::Decryption(text) => classes.call_method1("ProofsError", (text,)),
        }
    })();
    exception.map_or_else(|failure| failure, PyErr::from_value)
}

fn bytes<'py>(py: Python<'py>, value: impl AsRef<[u8]>) -> Bound<'py, PyBytes> {
    PyBytes::new(py, value.as_ref())
}

/// The native module `proofs._native`. Its public interface is the package `proofs`.
#[pymodule]
mod _native {
    use super::install_hook;
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::elgamal::{elgamal_add, elgamal_decrypt, elgamal_encrypt, elgamal_keygen};
    #[pymodule_export]
    use super::hashing::{
        check_encoding, check_point, poseidon, random_field, share_commitment, share_nullifier,
        shares_hash, vote_commitment,
    };
    #[pymodule_export]
    use super::pages::{page_gap, pages_in_log};
    #[pymodule_export]
    use super::payload::read_shares;
    #[pymodule_export]
    use super::proving::{circuits, fingerprint, prove, verify, verify_each, warm};
    #[pymodule_export]
    use super::rows::{row_check, row_checks};
    #[pymodule_export]
    use super::tally::{
        check_tally, decrypt_partially, elgamal_sum, multiply_generator, sum_points,
        verify_decryption,
    };
    #[pymodule_export]
    use super::tree::{empty_root, CommitmentTree};

    #[pymodule_export]
    const LOG_HEADER: usize = crate::pages::LOG_HEADER;
    #[pymodule_export]
    const SUBTREE_LEAVES: usize = crate::tree::SUBTREE_LEAVES;
    #[pymodule_export]
    const TREE_DEPTH: usize = crate::tree::DEPTH;

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        install_hook();
        Ok(())
    }
}
