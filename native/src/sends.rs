//! Scans consecutive SEND_MESSAGE_V2 requests in the received bytes of one connection.
//!
//! The twin is `martlet_remoting.wire.sends.scan_sends`.

use memchr::memmem;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use crate::guard::guarded;
use crate::json::{Json, Text};
use crate::layout::UNIQUE_KEY;

const PREFIX_BYTES: usize = 8;
const SEND_BEGINNING: &[u8] = b"{\"code\":310,";
const REMARK_MAX: usize = 64 * 1024;

#[derive(Default)]
struct Head<'a> {
    topic: &'a [u8],
    queue_id: i64,
    sys_flag: i64,
    born_ms: i64,
    flag: i32,
    properties: Option<Text<'a>>,
    opaque: i32,
    frame_flag: i32,
    seen: u32,
}

const PRODUCER_GROUP: u32 = 1;
const TOPIC: u32 = 2;
const QUEUE_ID: u32 = 4;
const REQUIRED: u32 = PRODUCER_GROUP | TOPIC | QUEUE_ID;
const FIELDS: u32 = 1 << 31;

impl<'a> Head<'a> {
    /// Read a header; None if it is not usual.
    fn read(header: &'a [u8]) -> Option<Self> {
        let mut json = Json::new(header)?;
        let mut head = Self::default();
        json.expect(SEND_BEGINNING)?;
        let mut is_first = true;
        let mut seen_names = 0u32;
        loop {
            let name = json.next_field(is_first)?;
            is_first = false;
            let bit = match name {
                b"" => break,
                b"extFields" => {
                    head.read_fields(&mut json)?;
                    1
                }
                b"opaque" => {
                    head.opaque = json.small_number()?;
                    2
                }
                b"flag" => {
                    head.frame_flag = json.small_number()?;
                    4
                }
                b"version" => {
                    json.small_number()?;
                    8
                }
                b"language" => {
                    json.text()?.plain()?;
                    16
                }
                b"remark" => {
                    if json.expect(b"null").is_none() && json.text()?.plain()?.len() > REMARK_MAX {
                        return None;
                    }
                    32
                }
                b"serializeTypeCurrentRPC" => {
                    json.text()?.plain()?;
                    64
                }
                _ => return None,
            };
            if seen_names & bit != 0 {
                return None;
            }
            seen_names |= bit;
        }
        (json.is_at_end() && head.seen & (REQUIRED | FIELDS) == REQUIRED | FIELDS).then_some(head)
    }

    fn read_fields(&mut self, json: &mut Json<'a>) -> Option<()> {
        json.expect(b"{")?;
        self.seen |= FIELDS;
        let mut is_first = true;
        loop {
            let name = json.next_field(is_first)?;
            is_first = false;
            let [letter @ b'a'..=b'n'] = *name else {
                if name.is_empty() {
                    return Some(());
                }
                return None; // such as AccessKey, or a field that a new client sends
            };
            let bit = match letter {
                b'a' => PRODUCER_GROUP,
                b'b' => TOPIC,
                b'e' => QUEUE_ID,
                _ => 1 << (letter - b'a' + 3),
            };
            if self.seen & bit != 0 {
                return None;
            }
            self.seen |= bit;
            match letter {
                b'a' | b'c' | b'n' => {
                    json.text()?.plain()?;
                }
                b'b' => self.topic = json.text()?.plain()?,
                b'd' | b'l' => {
                    json.number()?;
                }
                b'e' => self.queue_id = json.number()?,
                b'f' => self.sys_flag = json.number()?,
                b'g' => self.born_ms = json.number()?,
                b'h' => self.flag = json.small_number()?,
                b'i' => self.properties = Some(json.text()?),
                b'j' => {
                    if json.number()? != 0 {
                        return None;
                    }
                }
                b'k' => {
                    json.truth()?;
                }
                _ => {
                    if json.truth()? {
                        return None; // a batch
                    }
                }
            }
        }
    }
}

/// The unique key in *properties*; None if it has none, or one with other characters than letters and digits.
fn unique_key(properties: &[u8]) -> Option<&[u8]> {
    let at = memmem::find(properties, UNIQUE_KEY)?;
    if at > 0 && properties[at - 1] != 2 {
        return None;
    }
    let rest = &properties[at + UNIQUE_KEY.len()..];
    let key = &rest[..memchr::memchr(2, rest).unwrap_or(rest.len())];
    (!key.is_empty() && key.iter().all(u8::is_ascii_alphanumeric)).then_some(key)
}

#[pyfunction]
pub fn scan_sends<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyBytes>,
    start: usize,
    count_max: usize,
    frame_bytes_max: usize,
    header_bytes_max: usize,
) -> PyResult<(Bound<'py, PyList>, usize)> {
    guarded("scan_sends", || {
        let bytes = data.as_bytes();
        let sends = PyList::empty(py);
        let (mut at, mut properties) = (start, Vec::new());
        let mut topic: Option<(&[u8], Bound<'py, PyString>)> = None;
        while sends.len() < count_max {
            let Some(prefix) = bytes.get(at..at + PREFIX_BYTES) else { break };
            let length = u32::from_be_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]) as usize;
            let header_bytes = u32::from_be_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
            if length > frame_bytes_max || header_bytes > header_bytes_max || header_bytes + 4 >= length {
                break;
            }
            let (header_at, end) = (at + PREFIX_BYTES, at + 4 + length);
            let (Some(header), Some(body)) =
                (bytes.get(header_at..header_at + header_bytes), bytes.get(header_at + header_bytes..end))
            else {
                break;
            };
            let Some(head) = Head::read(header) else { break };
            if head.flag < 0 || head.born_ms < 0 {
                break;
            }
            properties.clear();
            let Some(text) = head.properties else { break };
            if text.unescape(&mut properties).is_none() {
                break;
            }
            let Some(unique) = unique_key(&properties) else { break };
            let name = match &topic {
                Some((bytes, name)) if *bytes == head.topic => name.clone(),
                _ => {
                    let Ok(name) = std::str::from_utf8(head.topic) else { break };
                    let name = PyString::new(py, name);
                    topic = Some((head.topic, name.clone()));
                    name
                }
            };
            let send = PyTuple::new(
                py,
                [
                    name.into_any(),
                    head.queue_id.into_pyobject(py)?.into_any(),
                    PyBytes::new(py, body).into_any(),
                    PyBytes::new(py, &properties).into_any(),
                    head.flag.into_pyobject(py)?.into_any(),
                    head.sys_flag.into_pyobject(py)?.into_any(),
                    head.born_ms.into_pyobject(py)?.into_any(),
                    PyBytes::new(py, unique).into_any(),
                    head.opaque.into_pyobject(py)?.into_any(),
                    head.frame_flag.into_pyobject(py)?.into_any(),
                    end.into_pyobject(py)?.into_any(),
                ],
            )?;
            sends.append(send)?;
            at = end;
        }
        Ok((sends, at))
    })
}
