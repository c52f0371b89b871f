//! Gives a queue the entries that a call has added to it.

use pyo3::exceptions::PyIndexError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// Add *entries* to the end of *queue*, one of *queues*, whose next offset and last record's end are then these.
pub fn add_entries(
    queue: &Bound<'_, PyAny>,
    queues: &Bound<'_, PyAny>,
    entries: &[u8],
    next_offset: i64,
    last_end: i64,
) -> PyResult<()> {
    let py = queue.py();
    let tail = queue.getattr(intern!(py, "tail"))?.cast_into::<PyByteArray>()?;
    let before = tail.len();
    tail.resize(before + entries.len())?;
    // SAFETY: no Python code runs while the slice is borrowed, and the lock of the interpreter is held.
    let added = unsafe { tail.as_bytes_mut() }.get_mut(before..);
    added.ok_or_else(|| PyIndexError::new_err("the tail has changed"))?.copy_from_slice(entries);
    queue.setattr(intern!(py, "next_offset"), next_offset)?;
    queue.setattr(intern!(py, "last_end"), last_end)?;
    if !queue.getattr(intern!(py, "dirty"))?.is_truthy()? {
        queues.call_method1(intern!(py, "touch"), (queue,))?;
    }
    Ok(())
}
