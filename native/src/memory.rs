//! Memory for reads of files.
//!
//! The twin is `martlet.store.disk.files.uncleared`.

use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::guard::guarded;

#[pyfunction]
pub fn uncleared(py: Python<'_>, size: usize) -> PyResult<Bound<'_, PyByteArray>> {
    guarded("uncleared", || {
        let memory = PyByteArray::new(py, b"");
        memory.resize(size)?;
        Ok(memory)
    })
}
