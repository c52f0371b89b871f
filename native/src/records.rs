//! The inner loops of delivery: names of records, and what a run of them needs to know.
//!
//! The twins are `martlet.records.layout.find_names`, `martlet.delivery.runs.survey` and
//! `martlet.delivery.handed.cut_frames`.

use memchr::memmem;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use crate::guard::guarded;
use crate::layout::{i32_at, i64_at, HEAD_BYTES, MAGIC_V1, RECORD_BYTES_MIN, TAGS, WIDE_HOSTS};

const LONG_BYTES: i64 = 1024;

/// A record in *data*: its log position, its end, and its tags, which are empty if it has none.
struct Named<'a> {
    position: i64,
    end: usize,
    tags: &'a [u8],
}

/// The usual record at *start*; None if it is not usual.
fn named(data: &[u8], start: usize) -> Option<Named<'_>> {
    if start + RECORD_BYTES_MIN > data.len() {
        return None;
    }
    let body_bytes = usize::try_from(i32_at(data, start + 84)?).ok()?;
    if i32_at(data, start + 4)? as u32 != MAGIC_V1 || i32_at(data, start + 36)? & WIDE_HOSTS != 0 {
        return None;
    }
    let end = start.checked_add(usize::try_from(i32_at(data, start)?).ok()?)?;
    let at = start + HEAD_BYTES + body_bytes + 1;
    if at + 2 > end || end > data.len() {
        return None;
    }
    let first = at + usize::from(data[at - 1]) + 2;
    let properties = data.get(first..end).unwrap_or(b"");
    let tags = match memmem::rfind(properties, TAGS) {
        None => b"",
        Some(tags_at) if tags_at == 0 || properties[tags_at - 1] == 2 => {
            let value = &properties[tags_at + TAGS.len()..];
            &value[..memchr::memchr(2, value).unwrap_or(value.len())]
        }
        Some(_) => return None,
    };
    Some(Named { position: i64_at(data, start + 28)?, end, tags })
}

#[pyfunction]
pub fn find_names<'py>(
    data: &Bound<'py, PyBytes>,
    start: usize,
    more: &Bound<'py, PyAny>,
    found: &Bound<'py, PyList>,
) -> PyResult<usize> {
    guarded("find_names", || {
        let (py, bytes) = (data.py(), data.as_bytes());
        let (mut raw, mut name): (&[u8], _) = (b"", PyString::new(py, ""));
        let mut start = start;
        let mut start_object = start.into_pyobject(py)?.into_any();
        while let Some(record) = named(bytes, start) {
            if record.tags != raw {
                let Ok(text) = std::str::from_utf8(record.tags) else { break };
                (raw, name) = (record.tags, PyString::new(py, text));
            }
            let position = record.position.into_pyobject(py)?.into_any();
            let end = record.end.into_pyobject(py)?.into_any();
            found.append(PyTuple::new(py, [&position, data.as_any(), &start_object, &end, name.as_any(), more])?)?;
            (start, start_object) = (record.end, end);
        }
        Ok(start)
    })
}

#[pyfunction]
pub fn survey<'py>(records: &Bound<'py, PyList>) -> PyResult<(i32, i64, i64, bool)> {
    guarded("survey", || {
        let (mut flags, mut total, mut most, mut is_together) = (0, 0, 0, true);
        let first = records.get_item(0)?.cast_into::<PyTuple>()?;
        let (first_data, mut expected): (_, usize) = (first.get_item(1)?, first.get_item(2)?.extract()?);
        for record in records.iter() {
            let record = record.cast_into::<PyTuple>()?;
            let data_object = record.get_item(1)?;
            let data = data_object.cast::<PyBytes>()?.as_bytes();
            let start: usize = record.get_item(2)?.extract()?;
            let head = data.get(start..).unwrap_or(b"");
            let (Some(size), Some(sys_flag), Some(body_bytes)) = (i32_at(head, 0), i32_at(head, 36), i32_at(head, 84))
            else {
                return Err(pyo3::exceptions::PyValueError::new_err("a record is shorter than its head"));
            };
            let head_bytes = i64::from(size) - i64::from(body_bytes);
            let head_bytes = if head_bytes < 0 { LONG_BYTES + 1 } else { head_bytes };
            flags |= sys_flag;
            total += head_bytes;
            most = most.max(head_bytes);
            is_together = is_together && start == expected && data_object.is(&first_data);
            expected = record.get_item(3)?.extract()?;
        }
        Ok((flags, total, most, is_together))
    })
}

fn number_in(list: &Bound<'_, PyList>, index: usize) -> PyResult<i64> {
    list.get_item(index)?.extract()
}

/// The first index from *first* on of a number in *sorted* that is not below *wanted*; it is probably near.
fn find_from(sorted: &Bound<'_, PyList>, first: usize, wanted: i64) -> PyResult<usize> {
    let (mut low, mut step) = (first, 1);
    while low + step <= sorted.len() && number_in(sorted, low + step - 1)? < wanted {
        low += step;
        step *= 2;
    }
    let mut high = sorted.len().min(low + step);
    while low < high {
        let middle = low + (high - low) / 2;
        if number_in(sorted, middle)? < wanted {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    Ok(low)
}

#[pyfunction]
pub fn cut_frames<'py>(
    data: &Bound<'py, PyBytes>,
    positions: &Bound<'py, PyList>,
    bounds: &Bound<'py, PyList>,
    wanted: &Bound<'py, PyList>,
    ends: &Bound<'py, PyList>,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    guarded("cut_frames", || {
        let bytes = data.as_bytes();
        let before = match ends.len() {
            0 => 0,
            count => number_in(ends, count - 1)?,
        };
        let (mut frames, mut added) = (Vec::new(), Vec::with_capacity(wanted.len()));
        let mut index = 0;
        for position in wanted.iter() {
            let position: i64 = position.extract()?;
            index = find_from(positions, index, position)?;
            if number_in(positions, index)? != position {
                return Ok(None);
            }
            let (begin, end) = (bounds.get_item(index)?.extract()?, bounds.get_item(index + 1)?.extract()?);
            frames.extend_from_slice(bytes.get(begin..end).unwrap_or(b""));
            added.push(before + frames.len() as i64);
        }
        for end in added {
            ends.append(end)?;
        }
        Ok(Some(PyBytes::new(data.py(), &frames)))
    })
}
