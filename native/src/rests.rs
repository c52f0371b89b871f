//! Encodes records as MESSAGE frames of STOMP.
//!
//! The twin is `martlet_stomp.mapping.rests.message_rests`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::guard::guarded;
use crate::items::Template;
use crate::layout::{i32_at, i64_at, COMPRESSED, HEAD_BYTES, MAGIC_V1, RECORD_BYTES_MIN, WIDE_HOSTS};

/// What a frame needs of a record.
struct Record<'a> {
    queue_id: i32,
    offset: i64,
    sys_flag: i32,
    born_ms: i64,
    body: &'a [u8],
    properties: &'a [u8],
    end: usize,
}

impl<'a> Record<'a> {
    /// The record at *start*; None if it is damaged.
    fn at(data: &'a [u8], start: usize) -> Option<Self> {
        let size = usize::try_from(i32_at(data, start)?).ok().filter(|&size| size >= RECORD_BYTES_MIN)?;
        let record = data.get(start..start.checked_add(size)?)?;
        let sys_flag = i32_at(record, 36)?;
        let body_at = HEAD_BYTES + 12 * (sys_flag & WIDE_HOSTS).count_ones() as usize;
        let body_end = body_at.checked_add(usize::try_from(i32_at(record, body_at - 4)?).ok()?)?;
        let topic_bytes = match (i32_at(record, 4)? as u32 == MAGIC_V1, record.get(body_end..)?) {
            (true, &[bytes, ..]) => 1 + usize::from(bytes),
            (false, &[high, low, ..]) => 2 + (usize::from(high) << 8 | usize::from(low)),
            _ => return None,
        };
        Some(Self {
            queue_id: i32_at(record, 12)?,
            offset: i64_at(record, 20)?,
            sys_flag,
            born_ms: i64_at(record, 40)?,
            body: record.get(body_at..body_end)?,
            properties: record.get(body_end + topic_bytes + 2..)?,
            end: start + size,
        })
    }
}

/// A number as text.
struct Decimal {
    digits: [u8; 20],
    start: usize,
}

impl Decimal {
    fn new(value: i64) -> Self {
        let (mut digits, mut start, mut left) = ([0; 20], 20, value.unsigned_abs());
        loop {
            start -= 1;
            digits[start] = b'0' + (left % 10) as u8;
            left /= 10;
            if left == 0 {
                break;
            }
        }
        if value < 0 {
            start -= 1;
            digits[start] = b'-';
        }
        Self { digits, start }
    }

    fn text(&self) -> &[u8] {
        &self.digits[self.start..]
    }
}

/// The encoded header lines of messages, and those of the message before.
struct KnownLines<'a, 'py> {
    table: Bound<'py, PyDict>,
    learn: Bound<'py, PyAny>,
    last: Option<(&'a [u8], Bound<'py, PyBytes>)>,
}

impl<'a, 'py> KnownLines<'a, 'py> {
    /// Return the lines of messages with *properties*; None if they differ.
    fn find(&mut self, properties: &'a [u8]) -> PyResult<Option<&[u8]>> {
        if self.last.as_ref().is_none_or(|(known, _)| *known != properties) {
            let key = PyBytes::new(self.table.py(), properties);
            let found = match self.table.get_item(&key)? {
                Some(lines) => lines,
                None => self.learn.call1((key,))?,
            };
            if found.is_none() {
                return Ok(None);
            }
            self.last = Some((properties, found.cast_into()?));
        }
        Ok(self.last.as_ref().map(|(_, lines)| lines.as_bytes()))
    }
}

#[pyfunction]
pub fn message_rests<'py>(data: &Bound<'py, PyBytes>, terms: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyList>> {
    guarded("message_rests", || {
        let (py, bytes, mut at) = (data.py(), data.as_bytes(), 0);
        let (template, alone) = (terms.get_item(0)?.cast_into::<PyBytes>()?, terms.get_item(4)?);
        let (template, with_id): (_, bool) = (Template::new(template.as_bytes()), terms.get_item(1)?.extract()?);
        let (table, learn) = (terms.get_item(2)?.cast_into()?, terms.get_item(3)?);
        let mut known = KnownLines { table, learn, last: None };
        let (frames, mut frame) = (PyList::empty(py), Vec::new());
        while at < bytes.len() {
            let Some(record) = Record::at(bytes, at) else {
                return Err(PyValueError::new_err("a record is damaged"));
            };
            let Record { queue_id, offset, sys_flag, born_ms, body, properties, end } = record;
            let lines = if sys_flag & COMPRESSED == 0 { known.find(properties)? } else { None };
            if let Some(lines) = lines {
                let numbers = [i64::from(queue_id), offset, body.len() as i64, born_ms].map(Decimal::new);
                let [queue_id, offset, body_bytes, born_ms] = numbers.each_ref().map(Decimal::text);
                frame.clear();
                if with_id {
                    let values = [queue_id, offset, queue_id, offset, body_bytes, born_ms, lines, body];
                    template.fill(&values, &mut frame);
                } else {
                    template.fill(&[queue_id, offset, body_bytes, born_ms, lines, body], &mut frame);
                }
                frames.append(PyBytes::new(py, &frame))?;
            } else {
                let (body, properties) = (PyBytes::new(py, body), PyBytes::new(py, properties));
                frames.append(alone.call1((queue_id, offset, sys_flag, born_ms, body, properties))?)?;
            }
            at = end;
        }
        Ok(frames)
    })
}
