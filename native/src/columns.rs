//! Decodes stored records into Arrow columns, for the executors of Spark and for archives.
//!
//! The twins are in `martlet_columns`: `record_starts` and `doubtful_records` (`records.py`), `gather_usual`
//! (`vectors.py`).

use memchr::memchr;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict, PyList};

use crate::guard::guarded;
use crate::layout::{
    field, i32_at, i64_at, COMPRESSED, HEAD_BYTES, MAGIC_V1, RECORD_BYTES_MIN, RECORD_CRC_BYTES, RECORD_CRC_NAME,
    WIDE_HOSTS,
};

/// Names in a record with more properties are not compared with one another.
const PROPERTIES_MAX: usize = 64;
const BYTES_MAX: usize = i32::MAX as usize;

/// The bytes of an object that nobody changes while a function of this module runs.
fn bytes_of(buffer: &PyBuffer<u8>) -> PyResult<&[u8]> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the data is not contiguous"));
    }
    // SAFETY: the buffer is contiguous and held while the slice is; the caller's thread alone uses its bytes, and the
    // functions here run no code that writes to them.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) })
}

/// The numbers in an array of int64.
fn places_of(buffer: &PyBuffer<i64>) -> PyResult<&[i64]> {
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the places are not contiguous"));
    }
    // SAFETY: as above.
    Ok(unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<i64>(), buffer.item_count()) })
}

/// An array of NumPy with *numbers*.
fn array_of<'py>(py: Python<'py>, numbers: &[i64]) -> PyResult<Bound<'py, PyAny>> {
    let numpy = py.import(intern!(py, "numpy"))?;
    let mut bytes = Buffer::new(py, numbers.len() * 8)?;
    bytes.fill(|room| {
        for (place, number) in room.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_ne_bytes());
        }
    });
    numpy.call_method1(intern!(py, "frombuffer"), (bytes.0, numpy.getattr(intern!(py, "int64"))?))
}

/// Memory that Arrow reads without a copy.
struct Buffer<'py>(Bound<'py, PyByteArray>);

impl<'py> Buffer<'py> {
    fn new(py: Python<'py>, size: usize) -> PyResult<Self> {
        let bytes = PyByteArray::new(py, b"");
        bytes.resize(size)?;
        Ok(Self(bytes))
    }

    /// Let *write* fill it, which must not run Python code and must write to all of it.
    fn fill(&mut self, write: impl FnOnce(&mut [u8])) {
        // SAFETY: nobody else has the bytearray yet, and *write* runs no Python code.
        write(unsafe { self.0.as_bytes_mut() });
    }
}

#[pyfunction]
pub fn record_starts<'py>(data: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, usize)> {
    guarded("record_starts", || {
        let buffer = PyBuffer::<u8>::get(data)?;
        let bytes = bytes_of(&buffer)?;
        let (mut starts, mut at) = (Vec::new(), 0);
        while at + RECORD_BYTES_MIN <= bytes.len() {
            starts.push(at as i64);
            match i32_at(bytes, at).and_then(|size| usize::try_from(size).ok()) {
                Some(size) if size >= RECORD_BYTES_MIN => at += size,
                _ => break,
            }
        }
        Ok((array_of(data.py(), &starts)?, at))
    })
}

/// Whether *record* certainly matches its CRCs.
fn is_sound(record: &[u8]) -> Option<bool> {
    let end = record.len();
    let body_end = HEAD_BYTES.checked_add(usize::try_from(i32_at(record, 84)?).ok()?)?;
    let body = record.get(HEAD_BYTES..body_end)?;
    let at = end - RECORD_CRC_BYTES;
    let marks = [record[at] == RECORD_CRC_NAME[0], record[at + 1] == RECORD_CRC_NAME[1], record[at + 8] == 1];
    let has_marks = marks.iter().filter(|&&is_there| is_there).count() >= 2; // a flipped bit changes one of them
    let is_plain = i32_at(record, 36)? & WIDE_HOSTS == 0 && !has_marks && record[end - 1] != 0;
    Some(is_plain && (body.is_empty() || crc32fast::hash(body) & 0x7FFF_FFFF == i32_at(record, 8)? as u32))
}

#[pyfunction]
pub fn doubtful_records<'py>(
    data: &Bound<'py, PyAny>,
    starts: &Bound<'py, PyAny>,
    _heads: &Bound<'py, PyAny>,
) -> PyResult<Vec<i64>> {
    guarded("doubtful_records", || {
        let (buffer, places) = (PyBuffer::<u8>::get(data)?, PyBuffer::<i64>::get(starts)?);
        let bytes = bytes_of(&buffer)?;
        let sound = |&start: &i64| record_at(bytes, start).and_then(is_sound) == Some(true);
        Ok(places_of(&places)?.iter().filter(|start| !sound(start)).copied().collect())
    })
}

/// The record at *start*, whose size was checked.
fn record_at(data: &[u8], start: i64) -> Option<&[u8]> {
    let start = usize::try_from(start).ok()?;
    let size = usize::try_from(i32_at(data, start)?).ok()?;
    data.get(start..start.checked_add(size)?).filter(|record| record.len() >= RECORD_BYTES_MIN)
}

/// What the columns need of the properties.
#[derive(Clone, Copy, PartialEq)]
enum Wanted {
    Nothing,
    Some,
    All,
}

/// The parts of a usual record.
struct Parts<'a> {
    record: &'a [u8],
    body: &'a [u8],
    topic: &'a str,
    key: &'a str,
    tag: &'a str,
    unique_key: &'a str,
}

/// Names and values of a record's properties, or of all records', in one list.
type Properties<'a> = Vec<(&'a str, &'a str)>;

/// Return the parts of *record*, and add its properties to *all* if they are wanted; None if it is not usual.
fn parts_of<'a>(record: &'a [u8], has_bodies: bool, wanted: Wanted, all: &mut Properties<'a>) -> Option<Parts<'a>> {
    let sys_flag = i32_at(record, 36)?;
    if i32_at(record, 4)? as u32 != MAGIC_V1 || sys_flag & WIDE_HOSTS != 0 || (has_bodies && sys_flag & COMPRESSED != 0)
    {
        return None;
    }
    let body_end = HEAD_BYTES.checked_add(usize::try_from(i32_at(record, 84)?).ok()?)?;
    let topic_end = body_end.checked_add(1 + usize::from(*record.get(body_end)?))?;
    let length = usize::from(u16::from_be_bytes(field(record, topic_end)?));
    let text = record.get(topic_end + 2..)?;
    if text.len() != length {
        return None;
    }
    let topic = std::str::from_utf8(record.get(body_end + 1..topic_end)?).ok()?;
    let mut parts = Parts { record, body: record.get(HEAD_BYTES..body_end)?, topic, key: "", tag: "", unique_key: "" };
    if wanted != Wanted::Nothing {
        let before = all.len();
        if add_properties(text, wanted, &mut parts, all).is_none() {
            all.truncate(before);
            return None;
        }
    }
    Some(parts)
}

fn add_properties<'a>(text: &'a [u8], wanted: Wanted, parts: &mut Parts<'a>, all: &mut Properties<'a>) -> Option<()> {
    let (mut rest, first) = (text, all.len());
    while !rest.is_empty() {
        let end = memchr(2, rest).unwrap_or(rest.len());
        let fragment = &rest[..end];
        rest = rest.get(end + 1..).unwrap_or(b"");
        let Some(mark) = memchr(1, fragment) else { continue };
        let (name, value) = (&fragment[..mark], &fragment[mark + 1..]);
        if name.is_empty() || value.is_empty() {
            continue;
        }
        let place = match name {
            b"KEYS" => Some(&mut parts.key),
            b"TAGS" => Some(&mut parts.tag),
            b"UNIQ_KEY" => Some(&mut parts.unique_key),
            _ => None,
        };
        if place.is_none() && wanted != Wanted::All {
            continue;
        }
        let value = std::str::from_utf8(value).ok()?;
        if let Some(place) = place {
            *place = value;
        }
        if wanted == Wanted::All {
            let name = std::str::from_utf8(name).ok()?;
            let own = &all[first..];
            if own.len() >= PROPERTIES_MAX || own.iter().any(|(known, _)| *known == name) {
                return None;
            }
            all.push((name, value));
        }
    }
    Some(())
}

/// The memory of an Arrow array.
struct Array<'py> {
    count: usize,
    nulls: usize,
    buffers: Vec<Option<Buffer<'py>>>,
}

impl<'py> Array<'py> {
    fn finish(self, kind: &Bound<'py, PyAny>, pyarrow: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyAny>> {
        let py = kind.py();
        let wrap = pyarrow.getattr(intern!(py, "py_buffer"))?;
        let buffers = PyList::empty(py);
        for buffer in self.buffers {
            buffers.append(match buffer {
                Some(buffer) => wrap.call1((buffer.0,))?,
                None => py.None().into_bound(py),
            })?;
        }
        let class = pyarrow.getattr(intern!(py, "Array"))?;
        class.call_method1(intern!(py, "from_buffers"), (kind, self.count, buffers, self.nulls))
    }
}

enum Column<'py> {
    Plain(Array<'py>),
    /// The first of each row, the names, and the values.
    Maps(Array<'py>, Array<'py>, Array<'py>),
}

impl<'py> Column<'py> {
    fn finish(self, kind: &Bound<'py, PyAny>, pyarrow: &Bound<'py, PyModule>) -> PyResult<Bound<'py, PyAny>> {
        let py = kind.py();
        let (firsts, names, values) = match self {
            Column::Plain(array) => return array.finish(kind, pyarrow),
            Column::Maps(firsts, names, values) => (firsts, names, values),
        };
        let firsts = firsts.finish(&pyarrow.call_method0(intern!(py, "int32"))?, pyarrow)?;
        let names = names.finish(&kind.getattr(intern!(py, "key_type"))?, pyarrow)?;
        let values = values.finish(&kind.getattr(intern!(py, "item_type"))?, pyarrow)?;
        let options = PyDict::new(py);
        options.set_item(intern!(py, "type"), kind)?;
        let class = pyarrow.getattr(intern!(py, "MapArray"))?;
        class.call_method(intern!(py, "from_arrays"), (firsts, names, values), Some(&options))
    }
}

/// The usual records of a call, and what it takes to make columns of them.
struct Table<'a, 'py> {
    py: Python<'py>,
    rows: Vec<Parts<'a>>,
    /// The number of properties before each row, and after the last.
    firsts: Vec<i32>,
    properties: Properties<'a>,
    broker: &'a str,
    /// Times outside of these milliseconds are null.
    times: (i64, i64),
}

impl<'py> Table<'_, 'py> {
    /// An array of bytes or texts; an empty one is null if *may_be_null*.
    fn binary<'b>(&self, count: usize, may_be_null: bool, of: impl Fn(usize) -> &'b [u8]) -> PyResult<Array<'py>> {
        let (mut total, mut nulls) = (0usize, 0);
        let mut offsets = Buffer::new(self.py, (count + 1) * 4)?;
        offsets.fill(|room| {
            for (row, place) in room.chunks_exact_mut(4).enumerate() {
                place.copy_from_slice(&(total as i32).to_ne_bytes());
                if row < count {
                    let size = of(row).len();
                    total = total.saturating_add(size);
                    nulls += usize::from(size == 0);
                }
            }
        });
        if total > BYTES_MAX {
            return Err(PyValueError::new_err("a column is too long"));
        }
        let mut data = Buffer::new(self.py, total)?;
        data.fill(|mut room| {
            for row in 0..count {
                let part = of(row);
                let (place, rest) = std::mem::take(&mut room).split_at_mut(part.len());
                place.copy_from_slice(part);
                room = rest;
            }
        });
        nulls = if may_be_null { nulls } else { 0 };
        let valid = if nulls > 0 { Some(self.bits(count, |row| !of(row).is_empty())?) } else { None };
        Ok(Array { count, nulls, buffers: vec![valid, Some(offsets), Some(data)] })
    }

    fn bits(&self, count: usize, is_set: impl Fn(usize) -> bool) -> PyResult<Buffer<'py>> {
        let mut bits = Buffer::new(self.py, count.div_ceil(8))?;
        bits.fill(|room| {
            room.fill(0);
            for row in (0..count).filter(|&row| is_set(row)) {
                room[row / 8] |= 1 << (row % 8);
            }
        });
        Ok(bits)
    }

    fn integers<const N: usize>(&self, of: impl Fn(&[u8]) -> [u8; N]) -> PyResult<Array<'py>> {
        let mut values = Buffer::new(self.py, self.rows.len() * N)?;
        values.fill(|room| {
            for (place, row) in room.chunks_exact_mut(N).zip(&self.rows) {
                place.copy_from_slice(&of(row.record));
            }
        });
        Ok(Array { count: self.rows.len(), nulls: 0, buffers: vec![None, Some(values)] })
    }

    fn i32s(&self, at: usize) -> PyResult<Array<'py>> {
        self.integers(|record| i32_at(record, at).unwrap_or(0).to_ne_bytes())
    }

    /// The milliseconds at *at* of each record as microseconds.
    fn times(&self, at: usize) -> PyResult<Array<'py>> {
        let (count, (least, greatest)) = (self.rows.len(), self.times);
        let time = |record: &[u8]| i64_at(record, at).filter(|ms| (least..=greatest).contains(ms));
        let nulls = self.rows.iter().filter(|row| time(row.record).is_none()).count();
        let mut array = self.integers(|record| time(record).unwrap_or(0).wrapping_mul(1000).to_ne_bytes())?;
        if nulls > 0 {
            array.buffers[0] = Some(self.bits(count, |row| time(self.rows[row].record).is_some())?);
        }
        Ok(Array { nulls, ..array })
    }

    /// The unique key of each record; without one, the broker's address and the record's position.
    fn message_ids(&self) -> PyResult<Array<'py>> {
        let mut made: Vec<[u8; 32]> = Vec::new();
        let mut places = Vec::with_capacity(self.rows.len());
        for row in &self.rows {
            places.push(made.len());
            if row.unique_key.is_empty() {
                made.push(message_id(row.record));
            }
        }
        self.binary(self.rows.len(), false, |row| match self.rows[row].unique_key.as_bytes() {
            b"" => &made[places[row]],
            key => key,
        })
    }

    fn maps(&self) -> PyResult<Column<'py>> {
        let count = self.properties.len();
        let mut firsts = Buffer::new(self.py, self.firsts.len() * 4)?;
        firsts.fill(|room| {
            for (place, first) in room.chunks_exact_mut(4).zip(&self.firsts) {
                place.copy_from_slice(&first.to_ne_bytes());
            }
        });
        let firsts = Array { count: self.firsts.len(), nulls: 0, buffers: vec![None, Some(firsts)] };
        let names = self.binary(count, false, |at| self.properties[at].0.as_bytes())?;
        let values = self.binary(count, false, |at| self.properties[at].1.as_bytes())?;
        Ok(Column::Maps(firsts, names, values))
    }

    fn column(&self, name: &str) -> PyResult<Column<'py>> {
        let (rows, count) = (&self.rows, self.rows.len());
        let array = match name {
            "topic" => self.binary(count, false, |row| rows[row].topic.as_bytes()),
            "broker" => self.binary(count, false, |_| self.broker.as_bytes()),
            "queue" => self.i32s(12),
            "offset" => self.integers(|record| i64_at(record, 20).unwrap_or(0).to_ne_bytes()),
            "key" => self.binary(count, true, |row| rows[row].key.as_bytes()),
            "tag" => self.binary(count, true, |row| rows[row].tag.as_bytes()),
            "body" => self.binary(count, false, |row| rows[row].body),
            "properties" => return self.maps(),
            "msg_id" => self.message_ids(),
            "born_ts" => self.times(40),
            "store_ts" => self.times(56),
            "flag" => self.i32s(16),
            "reconsume_times" => self.i32s(72),
            _ => Err(PyValueError::new_err(format!("column {name:?} is unknown"))),
        };
        array.map(Column::Plain)
    }
}

fn message_id(record: &[u8]) -> [u8; 32] {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut text = [b'0'; 32];
    let bytes = record[64..72].iter().chain(&record[28..36]);
    for (place, byte) in text.chunks_exact_mut(2).zip(bytes) {
        place[0] = DIGITS[usize::from(byte >> 4)];
        place[1] = DIGITS[usize::from(byte & 15)];
    }
    text
}

#[pyfunction]
pub fn gather_usual<'py>(
    data: &Bound<'py, PyAny>,
    starts: &Bound<'py, PyAny>,
    _heads: &Bound<'py, PyAny>,
    names: Vec<String>,
    schema: &Bound<'py, PyAny>,
    broker: &str,
    times: (i64, i64),
) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyAny>)> {
    guarded("gather_usual", || {
        let py = data.py();
        let (buffer, places) = (PyBuffer::<u8>::get(data)?, PyBuffer::<i64>::get(starts)?);
        let (bytes, places) = (bytes_of(&buffer)?, places_of(&places)?);
        let has = |name: &str| names.iter().any(|each| each == name);
        let has_bodies = has("body");
        let wanted = match (has("properties"), has("key") || has("tag") || has("msg_id")) {
            (true, _) => Wanted::All,
            (false, true) => Wanted::Some,
            (false, false) => Wanted::Nothing,
        };
        let mut table = Table {
            py,
            rows: Vec::with_capacity(places.len()),
            firsts: vec![0],
            properties: Vec::new(),
            broker,
            times,
        };
        let mut odd = Vec::new();
        for &start in places {
            let record = record_at(bytes, start);
            match record.and_then(|record| parts_of(record, has_bodies, wanted, &mut table.properties)) {
                Some(parts) => {
                    table.rows.push(parts);
                    table.firsts.push(table.properties.len() as i32);
                }
                None => odd.push(start),
            }
        }
        let columns = names.iter().map(|name| table.column(name)).collect::<PyResult<Vec<_>>>()?;
        // From here on, code of Python runs, and no bytes of *data* are used.
        drop(table);
        let (pyarrow, arrays) = (py.import(intern!(py, "pyarrow"))?, PyList::empty(py));
        for (name, column) in names.iter().zip(columns) {
            let kind = schema.call_method1(intern!(py, "field"), (name,))?.getattr(intern!(py, "type"))?;
            arrays.append(column.finish(&kind, &pyarrow)?)?;
        }
        Ok((arrays, array_of(py, &odd)?))
    })
}
