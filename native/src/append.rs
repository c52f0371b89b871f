//! The inner loop of appends: usual messages into the end of the log and into their queues.
//!
//! The twins are in `martlet.store.append.usual`, which says what a usual message is.

use memchr::memmem;
use pyo3::buffer::PyBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyTuple};

use crate::guard::guarded;
use crate::layout::{
    HEAD_BYTES, MAGIC_V1, MULTI, PREPARED, PROPERTIES_BYTES_MAX, RECORD_CRC_BYTES, RECORD_CRC_NAME, RECORD_CRC_ROOM,
    STORE_BITS,
};
use crate::queues::add_entries;

/// The end of the log in memory, as it was when the call began.
struct Page<'py> {
    data: Bound<'py, PyByteArray>,
    base: i64,
    room: i64,
}

/// What is the same for all messages of a call.
struct Terms<'a> {
    host: &'a [u8],
    now: i64,
    body_bytes_max: usize,
    is_odd: bool,
    record_crcs: bool,
}

/// A queue, and what has been appended to it in this call.
struct OpenQueue<'py> {
    queue: Bound<'py, PyAny>,
    topic_part: Bound<'py, PyBytes>,
    overhead: usize,
    queue_id: i32,
    is_plain: bool,
    next_offset: i64,
    put_bytes: i64,
    last_end: i64,
    entries: Vec<u8>,
}

impl<'py> OpenQueue<'py> {
    fn new(queue: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = queue.py();
        Ok(Self {
            queue: queue.clone(),
            topic_part: queue.getattr(intern!(py, "topic_part"))?.cast_into()?,
            overhead: queue.getattr(intern!(py, "overhead"))?.extract()?,
            queue_id: queue.getattr(intern!(py, "queue_id"))?.extract()?,
            is_plain: queue.getattr(intern!(py, "plain"))?.extract()?,
            next_offset: queue.getattr(intern!(py, "next_offset"))?.extract()?,
            put_bytes: 0,
            last_end: 0,
            entries: Vec::new(),
        })
    }

    fn add(&mut self, position: i64, size: usize, code: i64) {
        self.entries.extend_from_slice(&position.to_be_bytes());
        self.entries.extend_from_slice(&(size as i32).to_be_bytes());
        self.entries.extend_from_slice(&code.to_be_bytes());
        self.next_offset += 1;
        self.put_bytes += size as i64;
        self.last_end = position + size as i64;
    }

    /// Give the queue what was appended to it.
    fn close(&self, queues: &Bound<'py, PyAny>) -> PyResult<()> {
        if self.entries.is_empty() {
            return Ok(());
        }
        let (py, queue) = (self.queue.py(), &self.queue);
        let put_bytes: i64 = queue.getattr(intern!(py, "put_bytes"))?.extract()?;
        queue.setattr(intern!(py, "put_bytes"), put_bytes + self.put_bytes)?;
        add_entries(queue, queues, &self.entries, self.next_offset, self.last_end)
    }
}

/// A message, without what comes from its queue.
struct Message<'a> {
    body: &'a [u8],
    properties: &'a [u8],
    has_room: bool,
    code: i64,
    flag: i32,
    sys_flag: i32,
    born_ms: i64,
    born_host: &'a [u8],
    reconsume_times: i32,
    prepared_position: i64,
}

impl Message<'_> {
    /// The bytes that the record has after the properties of the message: a separator and room for the record's CRC.
    fn added_bytes(&self, terms: &Terms) -> usize {
        if !terms.record_crcs || self.has_room {
            return 0;
        }
        let is_separated = self.properties.last().is_none_or(|&last| last == 2);
        RECORD_CRC_BYTES + usize::from(!is_separated)
    }

    fn is_usual(&self, terms: &Terms) -> bool {
        self.born_host.len() == 8
            && terms.host.len() == 8
            && self.sys_flag & PREPARED == 0
            && self.body.len() <= terms.body_bytes_max
            && self.properties.len() + self.added_bytes(terms) <= PROPERTIES_BYTES_MAX
            && !(terms.is_odd && (self.properties.contains(&0) || memmem::find(self.properties, MULTI).is_some()))
    }

    /// Encode the record into *record*, whose length is its size, and return its properties.
    fn encode(&self, record: &mut [u8], queue: &OpenQueue, position: i64, terms: &Terms) {
        let mut at = 0;
        let mut put = |part: &[u8]| {
            record[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        let (body, properties) = (self.body, self.properties);
        let added = self.added_bytes(terms);
        let size = HEAD_BYTES + body.len() + queue.topic_part.as_bytes().len() + 2 + properties.len() + added;
        put(&(size as i32).to_be_bytes());
        put(&MAGIC_V1.to_be_bytes());
        put(&(crc32fast::hash(body) & 0x7FFF_FFFF).to_be_bytes());
        put(&queue.queue_id.to_be_bytes());
        put(&self.flag.to_be_bytes());
        put(&queue.next_offset.to_be_bytes());
        put(&position.to_be_bytes());
        put(&self.sys_flag.to_be_bytes());
        put(&self.born_ms.to_be_bytes());
        put(self.born_host);
        put(&terms.now.to_be_bytes());
        put(terms.host);
        put(&self.reconsume_times.to_be_bytes());
        put(&self.prepared_position.to_be_bytes());
        put(&(body.len() as i32).to_be_bytes());
        put(body);
        put(queue.topic_part.as_bytes());
        put(&((properties.len() + added) as u16).to_be_bytes());
        put(properties);
        if added > RECORD_CRC_BYTES {
            put(b"\x02");
        }
        if terms.record_crcs {
            let crc_at = size - RECORD_CRC_BYTES;
            let crc = crc32fast::hash(&record[..crc_at]) & 0x7FFF_FFFF;
            record[crc_at..].copy_from_slice(&record_crc(crc));
        }
    }
}

/// The property with the CRC of a record: its ten digits, lowest first.
pub fn record_crc(crc: u32) -> [u8; RECORD_CRC_BYTES] {
    let mut property = *RECORD_CRC_ROOM;
    let mut left = crc;
    for digit in &mut property[9..19] {
        *digit = b'0' + (left % 10) as u8;
        left /= 10;
    }
    property
}

/// Whether the properties end with the CRC of a record, possibly with one flipped bit in its name, or, with
/// *record_crcs*, contain one that is not just room at the end.
fn has_record_crc(properties: &[u8], record_crcs: bool) -> bool {
    let end = properties.len();
    if record_crcs {
        return memmem::find(properties, RECORD_CRC_NAME)
            .is_some_and(|at| at + RECORD_CRC_BYTES != end || !properties.ends_with(RECORD_CRC_ROOM));
    }
    let Some(last) = end.checked_sub(RECORD_CRC_BYTES).and_then(|at| properties.get(at..)) else { return false };
    if last[8] != RECORD_CRC_ROOM[8] && last[0] != RECORD_CRC_ROOM[0] {
        return false; // a single flipped bit leaves one of these two bytes intact
    }
    let expected = RECORD_CRC_ROOM.iter().zip(last).enumerate();
    let fixed = expected.filter(|(place, _)| !(9..19).contains(place)); // the others are digits
    fixed.map(|(_, (wanted, found))| (wanted ^ found).count_ones()).sum::<u32>() <= 1
}

/// Append usual items from index *done* on; return the index of the first that is not usual.
#[pyfunction]
pub fn put_usual<'py>(items: &Bound<'py, PyAny>, done: usize, terms: &Bound<'py, PyTuple>) -> PyResult<usize> {
    let py = items.py();
    let (tail, queues, result, marks) =
        (terms.get_item(0)?, terms.get_item(1)?, terms.get_item(3)?, terms.get_item(9)?);
    let (pending, host) = (terms.get_item(2)?.cast_into::<PyList>()?, terms.get_item(4)?.cast_into::<PyBytes>()?);
    let now: i64 = terms.get_item(5)?.extract()?;
    let mut run = Run {
        page: Page {
            data: tail.getattr(intern!(py, "data"))?.cast_into()?,
            base: tail.getattr(intern!(py, "page_base"))?.extract()?,
            room: tail.getattr(intern!(py, "room"))?.extract()?,
        },
        terms: Terms {
            host: host.as_bytes(),
            now,
            body_bytes_max: terms.get_item(6)?.extract()?,
            is_odd: terms.get_item(7)?.extract()?,
            record_crcs: terms.get_item(8)?.extract()?,
        },
        position: tail.getattr(intern!(py, "position"))?.extract()?,
        queues: Vec::new(),
        pending: &pending,
        positions: result.getattr(intern!(py, "positions"))?.cast_into()?,
        ends: result.getattr(intern!(py, "ends"))?.cast_into()?,
        offsets: result.getattr(intern!(py, "offsets"))?.cast_into()?,
        now: now.into_pyobject(py)?.into_any(),
    };
    let marks = if marks.is_truthy()? { Some(&marks) } else { None };
    let outcome = guarded("put_usual", || run.put_all(items, done, marks));
    for queue in &run.queues {
        queue.close(&queues)?;
    }
    tail.setattr(intern!(py, "position"), run.position)?;
    outcome
}

/// Return the size of the records of items; -1 if one may be unusual or is too large.
#[pyfunction]
pub fn measure_usual<'py>(items: &Bound<'py, PyAny>, body_bytes_max: usize) -> PyResult<i64> {
    guarded("measure_usual", || {
        let (py, mut size) = (items.py(), 0);
        let mut known: Option<(Bound<'py, PyAny>, usize)> = None;
        for index in 0..items.len()? {
            let item = items.get_item(index)?.cast_into::<PyTuple>()?;
            let (body, properties) = (item.get_item(1)?, item.get_item(2)?.cast_into::<PyBytes>()?);
            let (body_bytes, properties) = (body.len()?, properties.as_bytes());
            if body_bytes > body_bytes_max
                || properties.len() > PROPERTIES_BYTES_MAX
                || item.get_item(7)?.len()? != 8
                || has_record_crc(properties, false)
                || properties.contains(&0)
                || memmem::find(properties, MULTI).is_some()
            {
                return Ok(-1);
            }
            let queue = item.get_item(0)?;
            let overhead = match &known {
                Some((queue_before, overhead)) if queue_before.is(&queue) => *overhead,
                _ => queue.getattr(intern!(py, "overhead"))?.extract()?,
            };
            size += overhead + body_bytes + properties.len();
            known = Some((queue, overhead));
        }
        Ok(size as i64)
    })
}

struct Run<'a, 'py> {
    page: Page<'py>,
    terms: Terms<'a>,
    position: i64,
    queues: Vec<OpenQueue<'py>>,
    pending: &'a Bound<'py, PyList>,
    positions: Bound<'py, PyList>,
    ends: Bound<'py, PyList>,
    offsets: Bound<'py, PyList>,
    now: Bound<'py, PyAny>,
}

impl<'py> Run<'_, 'py> {
    fn put_all(
        &mut self,
        items: &Bound<'py, PyAny>,
        done: usize,
        marks: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<usize> {
        let (count, mut current) = (items.len()?, 0);
        for index in done..count {
            let item = items.get_item(index)?.cast_into::<PyTuple>()?;
            let queue = item.get_item(0)?;
            current = self.open(&queue, current)?;
            let mark = match marks {
                Some(marks) => marks.get_item(index)?.extract()?,
                None => 0,
            };
            if !self.put(&item, &queue, current, mark)? {
                return Ok(index);
            }
        }
        Ok(count)
    }

    /// Return the place of *queue*, which is probably *current*.
    fn open(&mut self, queue: &Bound<'py, PyAny>, current: usize) -> PyResult<usize> {
        if self.queues.get(current).is_some_and(|open| open.queue.is(queue)) {
            return Ok(current);
        }
        if let Some(place) = self.queues.iter().position(|open| open.queue.is(queue)) {
            return Ok(place);
        }
        self.queues.push(OpenQueue::new(queue)?);
        Ok(self.queues.len() - 1)
    }

    /// Append one message; return false, and change nothing, if it is not usual.
    fn put(
        &mut self,
        item: &Bound<'py, PyTuple>,
        queue: &Bound<'py, PyAny>,
        place: usize,
        mark: i32,
    ) -> PyResult<bool> {
        let py = item.py();
        let (body_object, properties_object, born_host) = (item.get_item(1)?, item.get_item(2)?, item.get_item(7)?);
        let body_buffer;
        let body = match body_object.cast::<PyBytes>() {
            Ok(bytes) => bytes.as_bytes(),
            Err(_) => {
                body_buffer = PyBuffer::<u8>::get(&body_object)?;
                if !body_buffer.is_c_contiguous() {
                    return Ok(false);
                }
                // SAFETY: the buffer is contiguous and held until the end, and no Python code runs that could change it.
                unsafe { std::slice::from_raw_parts(body_buffer.buf_ptr().cast::<u8>(), body_buffer.len_bytes()) }
            }
        };
        let properties = properties_object.cast::<PyBytes>()?.as_bytes();
        let (Ok(flag), Ok(sys_flag), Ok(reconsume_times)) =
            (item.get_item(4)?.extract(), item.get_item(5)?.extract::<i32>(), item.get_item(8)?.extract())
        else {
            return Ok(false); // the twin raises the error
        };
        if has_record_crc(properties, self.terms.record_crcs) {
            return Ok(false);
        }
        let message = Message {
            body,
            properties,
            has_room: properties.ends_with(RECORD_CRC_ROOM),
            code: item.get_item(3)?.extract()?,
            flag,
            sys_flag: sys_flag & !STORE_BITS | mark,
            born_ms: item.get_item(6)?.extract()?,
            born_host: born_host.cast::<PyBytes>()?.as_bytes(),
            reconsume_times,
            prepared_position: item.get_item(9)?.extract()?,
        };
        let (terms, open) = (&self.terms, &mut self.queues[place]);
        let size = open.overhead + body.len() + properties.len() + message.added_bytes(terms);
        let (position, end, offset) = (self.position, self.position + size as i64, open.next_offset);
        if end > self.page.room || !open.is_plain || !message.is_usual(terms) {
            return Ok(false);
        }
        let at = (position - self.page.base) as usize;
        // SAFETY: no Python code runs while the slice is borrowed, and the lock of the interpreter is held.
        let Some(record) = unsafe { self.page.data.as_bytes_mut() }.get_mut(at..at + size) else {
            return Ok(false);
        };
        message.encode(record, open, position, terms);
        let stored = if terms.record_crcs {
            let properties_at = size - properties.len() - message.added_bytes(terms);
            PyBytes::new(py, &with_room(&record[properties_at..])).into_any()
        } else {
            properties_object.clone()
        };
        open.add(position, size, message.code);
        self.position = end;
        let (position, end) = (position.into_pyobject(py)?.into_any(), end.into_pyobject(py)?.into_any());
        self.pending.append(PyTuple::new(py, [queue, &position, &end, &self.now, &stored])?)?;
        self.positions.append(position)?;
        self.ends.append(end)?;
        self.offsets.append(offset)?;
        Ok(true)
    }
}

/// The properties of a record, with room instead of its CRC.
fn with_room(properties: &[u8]) -> Vec<u8> {
    let mut found = properties.to_vec();
    let at = found.len() - RECORD_CRC_BYTES;
    found[at..].copy_from_slice(RECORD_CRC_ROOM);
    found
}
