//! The inner loop of the key index.
//!
//! The twin is `martlet.store.keys.usual.index_usual`.

use memchr::memmem;
use pyo3::buffer::PyBuffer;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyTuple};

use crate::guard::guarded;
use crate::layout::{KEYS, UNIQUE_KEY};

const SHORT_BYTES: usize = 1024;
const SECONDS_MAX: i64 = i32::MAX as i64;
const PAGE_SLOTS: usize = 1024;

/// Java's hash code of a text that follows one with the hash code *code*; None if the text is not UTF-8.
pub fn hash_code(code: u32, text: &[u8]) -> Option<u32> {
    let add = |code: u32, unit: u32| code.wrapping_mul(31).wrapping_add(unit);
    if text.is_ascii() {
        return Some(text.iter().fold(code, |code, &byte| add(code, byte.into())));
    }
    Some(std::str::from_utf8(text).ok()?.encode_utf16().fold(code, |code, unit| add(code, unit.into())))
}

/// The value of a property, as `find_property`: of the last one with this name.
pub fn find_property<'a>(properties: &'a [u8], needle: &[u8]) -> &'a [u8] {
    let mut end = properties.len();
    while let Some(at) = memmem::rfind(&properties[..end], needle) {
        if at == 0 || properties[at - 1] == 2 {
            let value = &properties[at + needle.len()..];
            return &value[..memchr::memchr(2, value).unwrap_or(value.len())];
        }
        end = at + needle.len() - 1;
    }
    b""
}

/// The value of the unique key, of the first one unless that is not a property of its own.
fn unique_key(properties: &[u8]) -> &[u8] {
    match memmem::find(properties, UNIQUE_KEY) {
        None => b"",
        Some(at) if at > 0 && properties[at - 1] != 2 => find_property(properties, UNIQUE_KEY),
        Some(at) => {
            let value = &properties[at + UNIQUE_KEY.len()..];
            &value[..memchr::memchr(2, value).unwrap_or(value.len())]
        }
    }
}

/// The newest file of the index, and what has been added to it in this call.
struct Active<'py> {
    item: Bound<'py, PyAny>,
    slots: PyBuffer<i32>,
    dirty_pages: Bound<'py, PyByteArray>,
    entries: Vec<u8>,
    begin_ms: i64,
    count: i64,
    used_slots: i64,
    end: Option<(i64, i64)>,
}

impl<'py> Active<'py> {
    fn new(active: &Bound<'py, PyAny>, item: Bound<'py, PyAny>) -> PyResult<Self> {
        let py = active.py();
        Ok(Self {
            slots: PyBuffer::get(&active.getattr(intern!(py, "slots"))?)?,
            dirty_pages: active.getattr(intern!(py, "dirty_pages"))?.cast_into()?,
            entries: Vec::new(),
            begin_ms: item.getattr(intern!(py, "begin_ms"))?.extract()?,
            count: item.getattr(intern!(py, "count"))?.extract()?,
            used_slots: item.getattr(intern!(py, "used_slots"))?.extract()?,
            end: None,
            item,
        })
    }

    fn insert(&mut self, code: u32, position: i64, store_ms: i64) {
        let slot_count = self.slots.item_count();
        let slot = code as usize % slot_count;
        // SAFETY: `slot` is within the buffer, which is contiguous and writable, and no Python code runs meanwhile.
        let place = unsafe { self.slots.buf_ptr().cast::<i32>().add(slot) };
        let previous = unsafe { place.read() };
        unsafe { place.write(self.count as i32) };
        let seconds = ((store_ms - self.begin_ms).div_euclid(1000)).clamp(0, SECONDS_MAX);
        self.entries.extend_from_slice(&(code as i32).to_be_bytes());
        self.entries.extend_from_slice(&position.to_be_bytes());
        self.entries.extend_from_slice(&(seconds as i32).to_be_bytes());
        self.entries.extend_from_slice(&previous.to_be_bytes());
        // SAFETY: as above.
        if let Some(page) = unsafe { self.dirty_pages.as_bytes_mut() }.get_mut(slot / PAGE_SLOTS) {
            *page = 1;
        }
        self.count += 1;
        self.used_slots += i64::from(previous == 0);
        self.end = Some((store_ms, position));
    }

    fn close(self, active: &Bound<'py, PyAny>) -> PyResult<()> {
        let Some((end_ms, end_position)) = self.end else { return Ok(()) };
        let (py, item) = (active.py(), &self.item);
        let entries = active.getattr(intern!(py, "entries"))?.cast_into::<PyByteArray>()?;
        let before = entries.len();
        entries.resize(before + self.entries.len())?;
        // SAFETY: as above.
        if let Some(added) = unsafe { entries.as_bytes_mut() }.get_mut(before..) {
            added.copy_from_slice(&self.entries);
        }
        item.setattr(intern!(py, "count"), self.count)?;
        item.setattr(intern!(py, "used_slots"), self.used_slots)?;
        item.setattr(intern!(py, "end_ms"), end_ms)?;
        item.setattr(intern!(py, "end_position"), end_position)
    }
}

/// The hash code of the topic of *queue* and a separator, which the queue keeps.
fn topic_hash(queue: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    let py = queue.py();
    let known: i64 = queue.getattr(intern!(py, "topic_hash"))?.extract()?;
    if known >= 0 {
        return Ok(Some(known as u32));
    }
    let topic = queue.getattr(intern!(py, "topic_bytes"))?.cast_into::<PyBytes>()?;
    let found = hash_code(0, topic.as_bytes()).and_then(|code| hash_code(code, b"#"));
    if let Some(code) = found {
        queue.setattr(intern!(py, "topic_hash"), code)?;
    }
    Ok(found)
}

/// The hashes of the keys in *properties*; None if a key is not UTF-8.
fn hash_keys(topic: u32, properties: &[u8], codes: &mut Vec<u32>) -> Option<()> {
    codes.clear();
    let words = find_property(properties, KEYS).split(|&byte| byte == b' ');
    for key in std::iter::once(unique_key(properties)).chain(words) {
        if !key.is_empty() {
            // The magnitude; -2^31 has none.
            let magnitude = (hash_code(topic, key)? as i32).unsigned_abs();
            codes.push(if magnitude == 1 << 31 { 0 } else { magnitude });
        }
    }
    Some(())
}

#[pyfunction]
pub fn index_usual<'py>(
    waiting: &Bound<'py, PyAny>,
    budget: i64,
    active: &Bound<'py, PyAny>,
    entries_max: i64,
    _hashes: &Bound<'py, PyAny>,
) -> PyResult<(usize, i64, i64)> {
    let py = active.py();
    let item = active.getattr(intern!(py, "item"))?;
    let mut open = if item.is_none() { None } else { Some(Active::new(active, item)?) };
    let outcome = guarded("index_usual", || index_all(waiting, budget, open.as_mut(), entries_max));
    if let Some(open) = open {
        open.close(active)?;
    }
    outcome
}

fn index_all<'py>(
    waiting: &Bound<'py, PyAny>,
    budget: i64,
    mut open: Option<&mut Active<'py>>,
    entries_max: i64,
) -> PyResult<(usize, i64, i64)> {
    let (mut count, mut left, mut newest_ms, mut codes) = (0, budget, 0, Vec::new());
    for message in waiting.try_iter()? {
        if left <= 0 {
            break;
        }
        let message = message?.cast_into::<PyTuple>()?;
        let store_ms: i64 = message.get_item(3)?.extract()?;
        let properties_object = message.get_item(4)?.cast_into::<PyBytes>()?;
        let properties = properties_object.as_bytes();
        let mut cost = 1;
        if memmem::find(properties, b"KEY").is_some() {
            let spaces = memchr::memchr_iter(b' ', properties).count() as i64;
            let Some(open) = open.as_deref_mut() else { break };
            if properties.len() > SHORT_BYTES || open.count + spaces + 2 > entries_max {
                break;
            }
            let Some(topic) = topic_hash(&message.get_item(0)?)? else { break };
            if hash_keys(topic, properties, &mut codes).is_none() {
                break;
            }
            let position: i64 = message.get_item(1)?.extract()?;
            for &code in &codes {
                open.insert(code, position, store_ms);
            }
            cost += spaces;
        }
        (count, left, newest_ms) = (count + 1, left - cost, newest_ms.max(store_ms));
    }
    Ok((count, left, newest_ms))
}
