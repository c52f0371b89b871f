//! Narrows the entries of a page to those whose records contain places that a search of its bytes has found.
//!
//! The twins are in `martlet.store.read.needle_match`.

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::guard::guarded;
use crate::layout::{i32_at, i64_at, ENTRY_BYTES};

/// The positions of entries, and the ends of their records.
struct Entries<'a> {
    data: &'a [u8],
}

impl Entries<'_> {
    fn count(&self) -> usize {
        self.data.len() / ENTRY_BYTES
    }

    fn position(&self, index: usize) -> Option<i128> {
        i64_at(self.data, index.checked_mul(ENTRY_BYTES)?).map(i128::from)
    }

    fn end(&self, index: usize) -> Option<i128> {
        let size = i32_at(self.data, index.checked_mul(ENTRY_BYTES)?.checked_add(8)?)?;
        Some(self.position(index)? + i128::from(size))
    }

    /// The first index from *begin* on, at most *end*, of a record at *wanted* or later.
    fn first_from(&self, wanted: i128, begin: usize, end: usize) -> Option<usize> {
        let (mut low, mut high) = (begin, end);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.position(middle)? < wanted {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Some(low)
    }

    /// The index after the entries from *begin* on, at least one, that are before *wanted*; and their positions.
    fn before(&self, begin: usize, wanted: i128) -> Option<(usize, Vec<i64>)> {
        let stop = self.first_from(wanted, begin, self.count())?.max(begin.checked_add(1)?);
        let positions = (begin..stop).map(|index| i64_at(self.data, index * ENTRY_BYTES)).collect::<Option<_>>()?;
        Some((stop, positions))
    }

    /// Add to *found* the entries from *begin* up to *last* that contain one of *places*; these are fewer than entries.
    fn match_few(&self, begin: usize, last: usize, places: &[i128], found: &mut Vec<usize>) -> Option<()> {
        let mut index = begin;
        for &place in places {
            while index < last && self.position(index + 1)? <= place {
                index += 1;
            }
            if found.last() != Some(&index) && place < self.end(index)? {
                found.push(index);
            }
        }
        Some(())
    }

    /// As `match_few`, for many *places*.
    fn match_many(&self, begin: usize, last: usize, places: &[i128], found: &mut Vec<usize>) -> Option<()> {
        let mut at = 0;
        for index in begin..last {
            let position = self.position(index)?;
            while places.get(at).is_some_and(|&place| place < position) {
                at += 1;
            }
            if places.get(at).is_some_and(|&place| place < self.end(index).unwrap_or(position)) {
                found.push(index);
            }
        }
        Some(())
    }
}

fn missing() -> PyErr {
    PyIndexError::new_err("there is no such entry")
}

#[pyfunction]
pub fn positions_before(data: &Bound<'_, PyBytes>, begin: usize, position: i64) -> PyResult<(usize, Option<Vec<i64>>)> {
    guarded("positions_before", || {
        let found = Entries { data: data.as_bytes() }.before(begin, i128::from(position));
        let (stop, positions) = found.ok_or_else(missing)?;
        Ok((stop, positions.is_sorted().then_some(positions)))
    })
}

/// The first index of *places* from *first* on whose place is not below *wanted*.
fn first_place(places: &Bound<'_, PyList>, first: usize, wanted: i128) -> PyResult<usize> {
    let (mut low, mut high) = (first, places.len());
    while low < high {
        let middle = low + (high - low) / 2;
        if i128::from(places.get_item(middle)?.extract::<i64>()?) < wanted {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    Ok(low)
}

#[pyfunction]
pub fn match_places<'py>(
    data: &Bound<'py, PyBytes>,
    begin: usize,
    positions: &Bound<'py, PyList>,
    base: i64,
    places: &Bound<'py, PyList>,
) -> PyResult<Bound<'py, PyList>> {
    guarded("match_places", || {
        let (entries, base, mut found) = (Entries { data: data.as_bytes() }, i128::from(base), Vec::new());
        let last = begin + positions.len().checked_sub(1).ok_or_else(missing)?;
        let low = entries.position(begin).ok_or_else(missing)? - base;
        let high = entries.position(last).ok_or_else(missing)? - base;
        let first = first_place(places, 0, low)?;
        let stop = first_place(places, first, high)?;
        let near: Vec<i128> = (first..stop)
            .map(|index| Ok(i128::from(places.get_item(index)?.extract::<i64>()?) + base))
            .collect::<PyResult<_>>()?;
        let matched = if near.len() <= last - begin {
            entries.match_few(begin, last, &near, &mut found)
        } else {
            entries.match_many(begin, last, &near, &mut found)
        };
        matched.ok_or_else(missing)?;
        found.push(last);
        PyList::new(data.py(), found)
    })
}
