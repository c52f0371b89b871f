//! Records of a read: which of them are cheap to encode, and where they are.
//!
//! The twins are `martlet.delivery.costly.cheap_records` and `martlet.delivery.fanout.record_places`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::bytes::with_bytes;
use crate::guard::guarded;
use crate::layout::{i32_at, i64_at, COMPRESSED, RECORD_BYTES_MIN};

const USUAL_BYTES: i64 = 256;

/// The size of the record at *start*; None if it is damaged.
fn size_at(records: &[u8], start: usize) -> Option<usize> {
    usize::try_from(i32_at(records, start)?).ok().filter(|&size| size >= RECORD_BYTES_MIN)
}

#[pyfunction]
pub fn cheap_records(records: &Bound<'_, PyAny>, start: usize) -> PyResult<(usize, usize)> {
    guarded("cheap_records", || {
        with_bytes(records, |records| {
            let (mut count, mut start) = (0, start);
            while let Some(size) = size_at(records, start) {
                let (Some(sys_flag), Some(body_bytes)) = (i32_at(records, start + 36), i32_at(records, start + 84))
                else {
                    break;
                };
                let head_bytes = size as i64 - i64::from(body_bytes);
                if sys_flag & COMPRESSED != 0 || !(0..=USUAL_BYTES).contains(&head_bytes) {
                    break;
                }
                (count, start) = (count + 1, start + size);
            }
            Ok((count, start))
        })
    })
}

#[pyfunction]
pub fn record_places<'py>(records: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
    guarded("record_places", || {
        let found = with_bytes(records, |records| {
            let (mut offsets, mut positions, mut start) = (Vec::new(), Vec::new(), 0);
            while start < records.len() {
                let (Some(size), Some(offset), Some(position)) =
                    (size_at(records, start), i64_at(records, start + 20), i64_at(records, start + 28))
                else {
                    return Err(PyValueError::new_err("a record is damaged"));
                };
                offsets.push(offset);
                positions.push(position);
                start += size;
            }
            Ok((offsets, positions))
        });
        let (offsets, positions) = found?;
        Ok((PyList::new(records.py(), offsets)?, PyList::new(records.py(), positions)?))
    })
}
