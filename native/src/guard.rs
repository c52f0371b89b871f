//! A panic, which is a bug of the kernel, becomes an error that costs one connection.

use std::any::Any;
use std::panic::{catch_unwind, AssertUnwindSafe};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// The bytes of a failed scan that its error shows.
const SHOWN_BYTES: usize = 64;

/// Run *work* of the function *name*; a panic becomes a RuntimeError. What *work* borrows must be valid after a panic.
pub fn guarded<T>(name: &str, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        Err(PyRuntimeError::new_err(format!("the native kernel failed in {name}: {}", text_of(&*panic))))
    })
}

/// As `guarded`, for a scanner: the error also has the first bytes that it was called with, those of *data* at *at*.
pub fn guarded_scan<T>(name: &str, data: &[u8], at: usize, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let end = at.saturating_add(SHOWN_BYTES).min(data.len());
        let shown = data.get(at..end).unwrap_or_default().escape_ascii();
        let text = format!("the native kernel failed in {name}: {}; it read \"{shown}\"", text_of(&*panic));
        Err(PyRuntimeError::new_err(text))
    })
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown reason")
}
