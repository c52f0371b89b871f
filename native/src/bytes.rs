//! The bytes of Python objects.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

/// Call *work* with the bytes of *data*: bytes, a bytearray, or another contiguous buffer. *work* must run no Python
/// code.
pub fn with_bytes<T>(data: &Bound<'_, PyAny>, work: impl FnOnce(&[u8]) -> PyResult<T>) -> PyResult<T> {
    if let Ok(bytes) = data.cast::<PyBytes>() {
        return work(bytes.as_bytes());
    }
    if let Ok(bytes) = data.cast::<PyByteArray>() {
        // SAFETY: *work* runs no Python code that could change it, and the lock of the interpreter is held.
        return work(unsafe { bytes.as_bytes() });
    }
    let buffer = PyBuffer::<u8>::get(data)?;
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the data is not contiguous"));
    }
    // SAFETY: the buffer is contiguous and held until the end, and *work* runs no Python code that could change it.
    work(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) })
}
