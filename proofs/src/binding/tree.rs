//! The commitment tree as a Python class.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use ff::PrimeField;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};

use super::{bytes, run, Number};
use crate::errors::{Error, Result};
use crate::fields::bases;
use crate::tree::{self, Tree};

/// A tree behind a lock. Waiting for the lock always releases the GIL.
#[pyclass(frozen, module = "proofs")]
pub struct CommitmentTree(RwLock<Tree>);

impl CommitmentTree {
    fn read(&self) -> Result<RwLockReadGuard<'_, Tree>> {
        self.0.read().map_err(|_| poisoned())
    }

    fn write(&self) -> Result<RwLockWriteGuard<'_, Tree>> {
        self.0.write().map_err(|_| poisoned())
    }
}

/// A panic during an append poisons the lock, because the tree may be incomplete.
fn poisoned() -> Error {
    Error::Tree("the tree is unusable after an internal error in an earlier call".into())
}

/// Converts a position or size. A number that does not fit into 64 bits becomes `u64::MAX`, which exceeds every tree.
fn count(number: Number) -> u64 {
    number.0.unwrap_or(u64::MAX)
}

#[pymethods]
impl CommitmentTree {
    #[new]
    fn new() -> Self {
        CommitmentTree(RwLock::default())
    }

    #[classmethod]
    fn restore(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        leaves: &[u8],
        subtrees: &[u8],
    ) -> PyResult<Self> {
        let tree = run(py, || Tree::restore(bases("leaf", leaves)?, subtrees))?;
        Ok(CommitmentTree(RwLock::new(tree)))
    }

    fn append(&self, py: Python<'_>, leaves: &[u8]) -> PyResult<()> {
        run(py, || self.write()?.append(&bases("leaf", leaves)?))
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        run(py, || Ok(self.read()?.len() as usize))
    }

    fn leaf<'py>(&self, py: Python<'py>, position: Number) -> PyResult<Bound<'py, PyBytes>> {
        Ok(bytes(py, run(py, || self.read()?.leaf(count(position)))?))
    }

    #[pyo3(signature = (size=None))]
    fn root<'py>(&self, py: Python<'py>, size: Option<Number>) -> PyResult<Bound<'py, PyBytes>> {
        let root = run(py, || {
            let tree = self.read()?;
            tree.root(size.map_or(tree.len(), count))
        })?;
        Ok(bytes(py, root))
    }

    #[pyo3(signature = (position, size=None))]
    fn path<'py>(
        &self,
        py: Python<'py>,
        position: Number,
        size: Option<Number>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let path = run(py, || {
            let tree = self.read()?;
            tree.path(count(position), size.map_or(tree.len(), count))
        })?;
        Ok(bytes(py, path.as_flattened()))
    }

    fn subtree<'py>(&self, py: Python<'py>, index: Number) -> PyResult<Bound<'py, PyBytes>> {
        Ok(bytes(py, run(py, || self.read()?.subtree(count(index)))?))
    }
}

/// The root of a tree without leaves.
#[pyfunction]
pub fn empty_root(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    Ok(bytes(
        py,
        run(py, || Ok(tree::empty(tree::DEPTH).to_repr()))?,
    ))
}
