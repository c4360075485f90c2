//! Scans of database pages.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::run;

#[pyfunction]
pub fn page_gap(page: &[u8], number: u32) -> Option<(usize, usize)> {
    crate::pages::gap(page, number).map(|gap| (gap.start, gap.end))
}

#[pyfunction]
pub fn pages_in_log(
    py: Python<'_>,
    path: PathBuf,
    first: u64,
    stop: u64,
    page_size: u32,
) -> PyResult<(Vec<u32>, Vec<u32>)> {
    let pages = run(py, || {
        Ok(crate::pages::in_log(&path, first..stop, page_size as usize))
    })?;
    let (stale, clean): (Vec<_>, Vec<_>) = pages?.into_iter().partition(|&(_, stale)| stale);
    let numbers = |pages: Vec<(u32, bool)>| pages.into_iter().map(|(number, _)| number).collect();
    Ok((numbers(stale), numbers(clean)))
}
