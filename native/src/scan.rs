//! The inner loop of scans of the log: usual records into their queues, or their properties into a list.
//!
//! The twin is `martlet.store.recovery.usual.scan_usual`, which says what a usual record is.

use std::collections::HashMap;

use memchr::{memchr, memmem};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::append::record_crc;
use crate::guard::guarded;
use crate::items::tag_code;
use crate::layout::{
    field, i32_at, i64_at, HEAD_BYTES, MAGIC_V1, MULTI, RECORD_BYTES_MIN, RECORD_CRC_BYTES, RECORD_CRC_NAME,
};
use crate::queues::add_entries;

/// IPv6 hosts, and the kinds of transactions.
const UNUSUAL_FLAGS: i32 = 0x30 | 0xC;
const GROUP_MASK: i32 = 0x6000_0000;
const FIRST_FLAG: i32 = 0x2000_0000;
const STORE_MS_END: i64 = 1 << 47;
/// The largest number of records checked at once; the first time it is one, because its queue may not be usual.
const RECORDS_AT_ONCE: usize = 4096;
/// For fewer records, releasing the interpreter's lock takes longer than checking them.
const RECORDS_WITHOUT_LOCK: usize = 64;

/// What is the same for all records of a call.
struct Terms {
    base: i64,
    limit: i64,
    groups_from: i64,
    wants_keys: bool,
}

/// A record that is usual as far as its bytes tell.
struct Found<'a> {
    at: usize,
    end: usize,
    topic: &'a [u8],
    queue_id: i32,
    offset: i64,
    store_ms: i64,
    properties: &'a [u8],
    code: i64,
}

/// Whether *record* has no CRC of a whole record, or a correct one; as `record_crc_holds`.
pub fn record_crc_holds(record: &[u8]) -> bool {
    let Some(at) = record.len().checked_sub(RECORD_CRC_BYTES) else { return true };
    let property = &record[at..];
    // The name and the bytes around the digits, of which one bit may be flipped.
    let said = property[..9].iter().chain(&property[19..]);
    let mark = RECORD_CRC_NAME.iter().chain(b"\x01\x02");
    let flipped: u32 = said.zip(mark).map(|(said, mark)| (said ^ mark).count_ones()).sum();
    flipped > 1 || property == record_crc(crc32fast::hash(&record[..at]) & 0x7FFF_FFFF)
}

/// Return the record at *at* of *data*; None if it is not usual.
fn find<'a>(data: &'a [u8], at: usize, terms: &Terms) -> Option<Found<'a>> {
    let position = terms.base.checked_add(i64::try_from(at).ok()?)?;
    let size = usize::try_from(i32_at(data, at)?).ok()?;
    let record = data.get(at..at.checked_add(size)?)?;
    if size < RECORD_BYTES_MIN || position >= terms.limit || i32_at(record, 4)? as u32 != MAGIC_V1 {
        return None;
    }
    let (sys_flag, store_ms) = (i32_at(record, 36)?, i64_at(record, 56)?);
    if sys_flag & UNUSUAL_FLAGS != 0
        || i64_at(record, 28)? != position
        || (sys_flag & GROUP_MASK == FIRST_FLAG && position >= terms.groups_from)
        || !(0..STORE_MS_END).contains(&store_ms)
    {
        return None;
    }
    let topic_at = HEAD_BYTES.checked_add(usize::try_from(i32_at(record, 84)?).ok()?)?;
    let topic_end = topic_at.checked_add(1 + usize::from(*record.get(topic_at)?))?;
    let length = usize::from(u16::from_be_bytes(field(record, topic_end)?));
    let (topic, properties) = (record.get(topic_at + 1..topic_end)?, record.get(topic_end + 2..)?);
    let crc = crc32fast::hash(&record[HEAD_BYTES..topic_at]) & 0x7FFF_FFFF;
    if properties.len() != length
        || i32_at(record, 8)? as u32 != crc
        || !record_crc_holds(record)
        || memchr(0, properties).is_some()
    {
        return None;
    }
    let mut code = 0;
    if !terms.wants_keys {
        if memmem::find(properties, MULTI).is_some() {
            return None;
        }
        code = tag_code(properties)?;
    }
    Some(Found {
        at,
        end: at + size,
        topic,
        queue_id: i32_at(record, 12)?,
        offset: i64_at(record, 20)?,
        store_ms,
        properties,
        code,
    })
}

/// Add up to *count* records from *at* on to *found*.
fn find_some<'a>(data: &'a [u8], mut at: usize, count: usize, terms: &Terms, found: &mut Vec<Found<'a>>) {
    while found.len() < count {
        let Some(record) = find(data, at, terms) else { return };
        at = record.end;
        found.push(record);
    }
}

/// A queue, and what has been added to it in this call.
struct OpenQueue<'py> {
    queue: Bound<'py, PyAny>,
    next_offset: i64,
    last_end: i64,
    entries: Vec<u8>,
}

impl OpenQueue<'_> {
    /// Give the queue what was added to it.
    fn close(&self, queues: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.entries.is_empty() {
            return Ok(());
        }
        add_entries(&self.queue, queues, &self.entries, self.next_offset, self.last_end)
    }
}

/// The queues of a call.
struct Opened<'a, 'py> {
    known: &'a Bound<'py, PyDict>,
    places: HashMap<(&'a [u8], i32), usize>,
    queues: Vec<OpenQueue<'py>>,
}

impl<'a, 'py> Opened<'a, 'py> {
    /// Return the place of the queue of *record*; None if it is unknown or has a dispatcher.
    fn open(&mut self, record: &Found<'a>) -> PyResult<Option<usize>> {
        let key = (record.topic, record.queue_id);
        if let Some(&place) = self.places.get(&key) {
            return Ok(Some(place));
        }
        let py = self.known.py();
        let Some(of_topic) = self.known.get_item(PyBytes::new(py, record.topic))? else { return Ok(None) };
        let Some(queue) = of_topic.cast_into::<PyDict>()?.get_item(record.queue_id)? else { return Ok(None) };
        if queue.is_none() || !queue.getattr(intern!(py, "dispatcher"))?.is_none() {
            return Ok(None);
        }
        let Ok(next_offset) = queue.getattr(intern!(py, "next_offset"))?.extract() else { return Ok(None) };
        self.places.insert(key, self.queues.len());
        self.queues.push(OpenQueue { queue, next_offset, last_end: 0, entries: Vec::new() });
        Ok(Some(self.queues.len() - 1))
    }
}

struct Run<'a, 'py> {
    data: &'a [u8],
    terms: Terms,
    opened: Opened<'a, 'py>,
    keys: Option<&'a Bound<'py, PyList>>,
    at: usize,
    count: usize,
    newest_ms: i64,
}

impl<'py> Run<'_, 'py> {
    fn add_all(&mut self, py: Python<'py>) -> PyResult<()> {
        let (mut found, mut wanted) = (Vec::new(), 1);
        loop {
            let (data, at, terms) = (self.data, self.at, &self.terms);
            found.clear();
            if wanted < RECORDS_WITHOUT_LOCK {
                find_some(data, at, wanted, terms, &mut found);
            } else {
                py.detach(|| find_some(data, at, wanted, terms, &mut found));
            }
            for record in &found {
                if !self.add(py, record)? {
                    return Ok(());
                }
            }
            if found.len() < wanted {
                return Ok(());
            }
            wanted = (wanted * 2).min(RECORDS_AT_ONCE);
        }
    }
}

impl<'a, 'py> Run<'a, 'py> {
    /// Add *record*; return false, and change nothing, if it is not usual.
    fn add(&mut self, py: Python<'py>, record: &Found<'a>) -> PyResult<bool> {
        let Some(place) = self.opened.open(record)? else { return Ok(false) };
        let open = &mut self.opened.queues[place];
        let position = self.terms.base + record.at as i64;
        if let Some(keys) = self.keys {
            let properties = PyBytes::new(py, record.properties);
            keys.append((&open.queue, position, -1, record.store_ms, properties).into_pyobject(py)?)?;
        } else {
            let Some(next_offset) = record.offset.checked_add(1) else { return Ok(false) };
            if record.offset != open.next_offset {
                return Ok(false);
            }
            let size = record.end - record.at;
            open.entries.extend_from_slice(&position.to_be_bytes());
            open.entries.extend_from_slice(&(size as i32).to_be_bytes());
            open.entries.extend_from_slice(&record.code.to_be_bytes());
            open.next_offset = next_offset;
            open.last_end = position + size as i64;
        }
        self.at = record.end;
        self.count += 1;
        self.newest_ms = self.newest_ms.max(record.store_ms);
        Ok(true)
    }
}

#[pyfunction]
pub fn scan_usual<'py>(
    data: &Bound<'py, PyBytes>,
    at: usize,
    terms: &Bound<'py, PyTuple>,
) -> PyResult<(usize, usize, i64)> {
    let py = data.py();
    let (known, queues) = (terms.get_item(3)?.cast_into::<PyDict>()?, terms.get_item(4)?);
    let keys = terms.get_item(6)?;
    let keys = if keys.is_none() { None } else { Some(keys.cast_into::<PyList>()?) };
    let mut run = Run {
        data: data.as_bytes(),
        terms: Terms {
            base: terms.get_item(0)?.extract()?,
            limit: terms.get_item(1)?.extract()?,
            groups_from: terms.get_item(2)?.extract()?,
            wants_keys: keys.is_some(),
        },
        opened: Opened { known: &known, places: HashMap::new(), queues: Vec::new() },
        keys: keys.as_ref(),
        at,
        count: 0,
        newest_ms: 0,
    };
    let outcome = guarded("scan_usual", || run.add_all(py));
    for queue in &run.opened.queues {
        queue.close(&queues)?;
    }
    outcome?;
    Ok((run.at, run.count, run.newest_ms))
}
