//! Gathers the records of a queue's entries, and finds the entries with wanted tag codes.
//!
//! The twins are in `martlet.store.read.gather`.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyFrozenSet, PyList, PySlice};

use crate::guard::guarded;
use crate::layout::{BLANK_SIZE, ENTRY_BYTES};

/// An entry of a queue.
struct Entry {
    position: i64,
    size: i32,
}

impl Entry {
    fn read(entry: &[u8]) -> Option<Self> {
        let position = i64::from_be_bytes(entry.get(..8)?.try_into().ok()?);
        let size = i32::from_be_bytes(entry.get(8..12)?.try_into().ok()?);
        Some(Self { position, size })
    }
}

fn code_of(entry: &[u8]) -> i64 {
    entry.get(12..20).and_then(|code| code.try_into().ok()).map_or(0, i64::from_be_bytes)
}

/// The wanted codes; few are compared one by one.
struct Codes {
    codes: Vec<i64>,
}

impl Codes {
    fn has(&self, code: i64) -> bool {
        match self.codes.as_slice() {
            [one] => *one == code,
            few if few.len() <= 8 => few.contains(&code),
            many => many.binary_search(&code).is_ok(),
        }
    }
}

#[pyfunction]
pub fn select_entries<'py>(
    data: &Bound<'py, PyBytes>,
    codes: &Bound<'py, PyFrozenSet>,
    count_max: usize,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyList>, usize)> {
    guarded("select_entries", || {
        let (py, entries) = (data.py(), data.as_bytes().chunks_exact(ENTRY_BYTES));
        let mut wanted = Codes { codes: codes.iter().map(|code| code.extract()).collect::<PyResult<_>>()? };
        wanted.codes.sort_unstable();
        let (total, mut checked) = (entries.len(), 0);
        let (mut indexes, mut selected) = (Vec::new(), Vec::new());
        for (index, entry) in entries.enumerate() {
            checked = index + 1;
            if wanted.has(code_of(entry)) {
                indexes.push(index);
                selected.extend_from_slice(entry);
                if indexes.len() >= count_max {
                    break;
                }
            }
        }
        let is_whole = indexes.len() == total && selected.len() == data.as_bytes().len();
        let selected = if is_whole { data.clone() } else { PyBytes::new(py, &selected) };
        Ok((selected, PyList::new(py, indexes)?, checked))
    })
}

/// The parts of a page that records fill, adjacent records as one.
struct Parts {
    parts: Vec<(usize, usize)>,
    count: usize,
    size: usize,
}

impl Parts {
    /// Find the records of *entries* in the page from *base* on with *page_bytes*.
    fn find(entries: &[u8], bytes_max: i64, base: i64, page_bytes: usize) -> Self {
        let mut found = Self { parts: Vec::new(), count: 0, size: 0 };
        let mut behind = 0;
        for entry in entries.chunks_exact(ENTRY_BYTES) {
            let Some(Entry { position, size }) = Entry::read(entry) else { break };
            if position >> 32 != base >> 32 || position < base || size <= 0 || size == BLANK_SIZE {
                break;
            }
            let (start, size) = ((position - base) as usize, size as usize);
            let end = start + size;
            if start < behind || end > page_bytes || (found.size + size) as i64 > bytes_max {
                break;
            }
            match found.parts.last_mut() {
                Some((_, last)) if *last == start => *last = end,
                _ => found.parts.push((start, end)),
            }
            behind = end;
            found.count += 1;
            found.size += size;
        }
        found
    }

    /// Copy the parts of *page* into *into*, which has their size.
    fn copy(&self, page: &[u8], into: &mut [u8]) -> Option<()> {
        let mut at = 0;
        for &(start, end) in &self.parts {
            let part = page.get(start..end)?;
            into.get_mut(at..at + part.len())?.copy_from_slice(part);
            at += part.len();
        }
        Some(())
    }
}

#[pyfunction]
pub fn gather_records<'py>(
    entries: &Bound<'py, PyBytes>,
    first: usize,
    end: usize,
    bytes_max: i64,
    page: &Bound<'py, PyAny>,
    pieces: &Bound<'py, PyList>,
) -> PyResult<(usize, usize)> {
    guarded("gather_records", || {
        let (py, entries) = (page.py(), entries.as_bytes());
        let (base, data) = (page.getattr(intern!(py, "base"))?.extract()?, page.getattr(intern!(py, "data"))?);
        let page_bytes = data.len()?;
        let stop = end.saturating_mul(ENTRY_BYTES).min(entries.len());
        let wanted = entries.get(first.saturating_mul(ENTRY_BYTES)..stop).unwrap_or_default();
        let found = Parts::find(wanted, bytes_max, base, page_bytes);
        match found.parts.as_slice() {
            [] => {}
            [(start, end)] => {
                let slice = PySlice::new(py, *start as isize, *end as isize, 1);
                pieces.append(page.getattr(intern!(py, "view"))?.get_item(slice)?)?;
            }
            _ => pieces.append(PyBytes::new_with(py, found.size, |into| {
                let copied = match data.cast::<PyBytes>() {
                    Ok(bytes) => found.copy(bytes.as_bytes(), into),
                    // SAFETY: no Python code runs while the slice is borrowed, and the lock of the interpreter is held.
                    Err(_) => found.copy(unsafe { data.cast::<PyByteArray>()?.as_bytes() }, into),
                };
                copied.ok_or_else(|| pyo3::exceptions::PyIndexError::new_err("the page has changed"))
            })?)?,
        }
        Ok((found.count, found.size))
    })
}
