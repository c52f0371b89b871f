//! Gathers the records of a queue's entries, and finds the entries with wanted tag codes.
//!
//! The twins are in `martlet.store.read.gather`.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFrozenSet, PyList, PySlice};

use crate::bytes::with_bytes;
use crate::guard::guarded;
use crate::layout::{BLANK_SIZE, ENTRY_BYTES, HEAD_BYTES, MAGIC_V1, WIDE_HOSTS};
use crate::scan::record_crc_holds;

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
                let copied = with_bytes(&data, |page| Ok(found.copy(page, into)))?;
                copied.ok_or_else(|| pyo3::exceptions::PyIndexError::new_err("the page has changed"))
            })?)?,
        }
        Ok((found.count, found.size))
    })
}

/// The fields by which an intact record identifies itself.
struct Identity<'a> {
    topic: &'a [u8],
    queue_id: i32,
    offset: i64,
    position: i64,
}

/// Whether *record* is intact, and of that queue and offset; false if its layout is another than V1 with IPv4 hosts.
fn is_intact(record: &[u8], identity: &Identity) -> Option<bool> {
    let number = |at: usize| Some(i32::from_be_bytes(record.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(i64::from_be_bytes(record.get(at..at + 8)?.try_into().ok()?));
    let is_right = usize::try_from(number(0)?) == Ok(record.len())
        && number(4)? as u32 == MAGIC_V1
        && number(12)? == identity.queue_id
        && long(20)? == identity.offset
        && long(28)? == identity.position
        && number(36)? & WIDE_HOSTS == 0;
    if !is_right {
        return Some(false);
    }
    let topic_at = HEAD_BYTES.checked_add(usize::try_from(number(84)?).ok()?)?;
    let topic_end = topic_at.checked_add(1 + usize::from(*record.get(topic_at)?))?;
    let &[high, low] = record.get(topic_end..topic_end + 2)? else { return None };
    let (topic, properties) = (record.get(topic_at + 1..topic_end)?, record.get(topic_end + 2..)?);
    let body = record.get(HEAD_BYTES..topic_at)?;
    Some(
        topic == identity.topic
            && properties.len() == usize::from(high & 0x7F) << 8 | usize::from(low)
            && high < 0x80
            && properties.last() != Some(&0)
            && (body.is_empty() || crc32fast::hash(body) & 0x7FFF_FFFF == number(8)? as u32)
            && record_crc_holds(record),
    )
}

/// As `count_intact`, for the bytes of a page from *base* on.
#[allow(clippy::too_many_arguments)]
fn intact_count(
    entries: &[u8],
    bytes_max: i64,
    base: i64,
    page: &[u8],
    numbers: &[i64],
    topic: &[u8],
    queue_id: i32,
    offset: i64,
) -> usize {
    let mut bytes_left = bytes_max;
    let is_next = |(entry, number): (&[u8], &i64)| {
        let Entry { position, size } = Entry::read(entry)?;
        bytes_left = bytes_left.checked_sub(i64::from(size))?;
        let start = usize::try_from(position.checked_sub(base)?).ok()?;
        let record = page.get(start..start.checked_add(usize::try_from(size).ok()?)?)?;
        let identity = Identity { topic, queue_id, offset: offset.checked_add(*number)?, position };
        let is_usual = bytes_left >= 0 && size > 0 && size != BLANK_SIZE && is_intact(record, &identity)?;
        is_usual.then_some(())
    };
    entries.chunks_exact(ENTRY_BYTES).zip(numbers).map_while(is_next).count()
}

#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn count_intact<'py>(
    entries: &Bound<'py, PyBytes>,
    first: usize,
    end: usize,
    bytes_max: i64,
    page: &Bound<'py, PyAny>,
    queue: &Bound<'py, PyAny>,
    offset: i64,
    indexes: &Bound<'py, PyAny>,
) -> PyResult<usize> {
    guarded("count_intact", || {
        let (py, entries) = (page.py(), entries.as_bytes());
        let (base, data) = (page.getattr(intern!(py, "base"))?.extract()?, page.getattr(intern!(py, "data"))?);
        let topic = queue.getattr(intern!(py, "topic_bytes"))?.cast_into::<PyBytes>()?;
        let queue_id = queue.getattr(intern!(py, "queue_id"))?.extract()?;
        let stop = end.min(entries.len() / ENTRY_BYTES).min(indexes.len()?);
        let numbers: Vec<i64> =
            (first..stop).map(|index| indexes.get_item(index)?.extract()).collect::<PyResult<_>>()?;
        let wanted = entries.get(first.saturating_mul(ENTRY_BYTES)..stop * ENTRY_BYTES).unwrap_or_default();
        with_bytes(&data, |page| {
            Ok(intact_count(wanted, bytes_max, base, page, &numbers, topic.as_bytes(), queue_id, offset))
        })
    })
}
