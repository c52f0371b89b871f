//! Scans consecutive SEND_MESSAGE_V2 requests in the received bytes of one connection.
//!
//! The twins are in `martlet_remoting.wire.sends`.

use memchr::memmem;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use sha1::{Digest, Sha1};

use crate::guard::guarded_scan;
use crate::json::{Json, Text};
use crate::layout::UNIQUE_KEY;

const PREFIX_BYTES: usize = 8;
const SEND_BEGINNING: &[u8] = b"{\"code\":310,";
const SEND_MESSAGE_V2: i16 = 310;
const JSON_HEADER: u8 = 0;
const BINARY_HEADER: u8 = 1;
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
    signed: Option<SignedFields<'a>>,
}

/// The fields of a signed send as texts: what the signature covers, in the order of the names, but the properties.
#[derive(Default)]
struct SignedFields<'a> {
    access_key: &'a [u8],
    signature: &'a [u8],
    values: [&'a [u8]; LETTERS],
}

const LETTERS: usize = 14; // the fields are named a to n
const PROPERTIES: usize = 8;

const PRODUCER_GROUP: u32 = 1;
const TOPIC: u32 = 2;
const QUEUE_ID: u32 = 4;
const REQUIRED: u32 = PRODUCER_GROUP | TOPIC | QUEUE_ID;
const FIELDS: u32 = 1 << 31;

impl<'a> Head<'a> {
    /// Read a header; None if it is not usual.
    fn read(header: &'a [u8], is_signed: bool) -> Option<Self> {
        let mut json = Json::new(header)?;
        let mut head = Self { signed: is_signed.then(SignedFields::default), ..Self::default() };
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
                match (name, self.signed.as_mut()) {
                    (b"", _) => return Some(()),
                    (b"AccessKey", Some(signed)) if signed.access_key.is_empty() => {
                        signed.access_key = json.text()?.plain()?;
                    }
                    (b"Signature", Some(signed)) if signed.signature.is_empty() => {
                        signed.signature = json.text()?.plain()?;
                    }
                    _ => return None, // such as a token, or a field that a new client sends
                }
                continue;
            };
            if let Some(signed) = self.signed.as_mut() {
                let text = json.peek_text()?;
                let place = usize::from(letter - b'a');
                signed.values[place] = if place == PROPERTIES { b"" } else { text.plain()? };
            }
            let bit = bit_of(letter);
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

/// The rest of a binary header.
struct Binary<'a> {
    rest: &'a [u8],
}

impl<'a> Binary<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes)?;
        self.rest = rest;
        Some(taken)
    }

    fn short(&mut self) -> Option<i16> {
        Some(i16::from_be_bytes(self.take(2)?.try_into().ok()?))
    }

    fn int(&mut self) -> Option<i32> {
        Some(i32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }

    /// Read a text of *bytes*.
    fn text(&mut self, bytes: Option<usize>) -> Option<&'a [u8]> {
        self.take(bytes?).filter(|text| std::str::from_utf8(text).is_ok())
    }
}

impl<'a> Head<'a> {
    /// Read a binary header; None if it is not usual.
    fn read_binary(header: &'a [u8]) -> Option<Self> {
        let (mut binary, mut head) = (Binary { rest: header }, Self::default());
        if binary.short()? != SEND_MESSAGE_V2 {
            return None;
        }
        binary.take(3)?; // language and version
        (head.opaque, head.frame_flag) = (binary.int()?, binary.int()?);
        let remark_bytes = usize::try_from(binary.int()?).ok().filter(|&bytes| bytes <= REMARK_MAX);
        binary.text(remark_bytes)?;
        if usize::try_from(binary.int()?).ok()? != binary.rest.len() {
            return None;
        }
        while !binary.rest.is_empty() {
            let name_bytes = binary.short()?;
            let name = binary.text(usize::try_from(name_bytes).ok())?;
            let value_bytes = binary.int()?;
            let value = binary.text(usize::try_from(value_bytes).ok())?;
            let [letter @ b'a'..=b'n'] = *name else { return None };
            if !value.is_empty() {
                head.set(letter, value)?;
            }
        }
        (head.seen & REQUIRED == REQUIRED).then_some(head)
    }

    /// Set the field *letter* of a binary header; None if it has a value already, or is not usual.
    fn set(&mut self, letter: u8, value: &'a [u8]) -> Option<()> {
        let bit = bit_of(letter);
        if self.seen & bit != 0 {
            return None;
        }
        self.seen |= bit;
        match letter {
            b'a' | b'c' | b'n' => {}
            b'b' => self.topic = value,
            b'd' | b'l' => {
                Json::number_of(value)?;
            }
            b'e' => self.queue_id = Json::number_of(value)?,
            b'f' => self.sys_flag = Json::number_of(value)?,
            b'g' => self.born_ms = Json::number_of(value)?,
            b'h' => self.flag = Json::number_of(value)?.try_into().ok()?,
            b'i' => self.properties = Some(Text { raw: value, is_escaped: false }),
            b'j' if value != b"0" => return None,
            b'k' if value != b"false" && value != b"true" => return None,
            b'm' if value != b"false" => return None, // a batch
            _ => {}
        }
        Some(())
    }
}

fn bit_of(letter: u8) -> u32 {
    match letter {
        b'a' => PRODUCER_GROUP,
        b'b' => TOPIC,
        b'e' => QUEUE_ID,
        _ => 1 << (letter - b'a' + 3),
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

/// Sends in the received bytes, and where the search for them goes on.
struct Scan<'py> {
    data: &'py [u8],
    at: usize,
    frame_bytes_max: usize,
    header_bytes_max: usize,
    topic: Option<(&'py [u8], Bound<'py, PyString>)>,
    properties: Vec<u8>,
}

impl<'py> Scan<'py> {
    /// Return the header, the body and the end of the next frame, and the header's encoding; None if it is incomplete or
    /// large.
    fn frame(&self) -> Option<(&'py [u8], &'py [u8], usize, u8)> {
        let prefix = self.data.get(self.at..self.at + PREFIX_BYTES)?;
        let length = u32::from_be_bytes([prefix[0], prefix[1], prefix[2], prefix[3]]) as usize;
        let header_bytes = u32::from_be_bytes([0, prefix[5], prefix[6], prefix[7]]) as usize;
        if length > self.frame_bytes_max || header_bytes > self.header_bytes_max || header_bytes + 4 >= length {
            return None;
        }
        let (header_at, end) = (self.at + PREFIX_BYTES, self.at + 4 + length);
        let body_at = header_at + header_bytes;
        Some((self.data.get(header_at..body_at)?, self.data.get(body_at..end)?, end, prefix[4]))
    }

    /// Return the next send, and move behind it; None if it is not usual, or not signed by *key* if that is given.
    fn next(&mut self, py: Python<'py>, key: Option<&Key>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some((header, body, end, encoding)) = self.frame() else { return Ok(None) };
        let head = match encoding {
            JSON_HEADER => Head::read(header, key.is_some()),
            BINARY_HEADER if key.is_none() => Head::read_binary(header),
            _ => None,
        };
        let Some(head) = head else { return Ok(None) };
        if head.flag < 0 || head.born_ms < 0 {
            return Ok(None);
        }
        self.properties.clear();
        if head.properties.and_then(|text| text.unescape(&mut self.properties)).is_none() {
            return Ok(None);
        }
        if let (Some(key), Some(signed)) = (key, &head.signed) {
            if !key.has_signed(signed, &self.properties, body) {
                return Ok(None);
            }
        }
        let Some(unique) = unique_key(&self.properties) else { return Ok(None) };
        let Some(name) = topic_name(py, &mut self.topic, head.topic) else { return Ok(None) };
        let send = PyTuple::new(
            py,
            [
                name.into_any(),
                head.queue_id.into_pyobject(py)?.into_any(),
                PyBytes::new(py, body).into_any(),
                PyBytes::new(py, &self.properties).into_any(),
                head.flag.into_pyobject(py)?.into_any(),
                head.sys_flag.into_pyobject(py)?.into_any(),
                head.born_ms.into_pyobject(py)?.into_any(),
                PyBytes::new(py, unique).into_any(),
                head.opaque.into_pyobject(py)?.into_any(),
                head.frame_flag.into_pyobject(py)?.into_any(),
                end.into_pyobject(py)?.into_any(),
            ],
        )?;
        self.at = end;
        Ok(Some(send))
    }
}

/// The name of a topic, which is often that of the send before.
fn topic_name<'py>(
    py: Python<'py>,
    known: &mut Option<(&'py [u8], Bound<'py, PyString>)>,
    topic: &'py [u8],
) -> Option<Bound<'py, PyString>> {
    if let Some((bytes, name)) = known {
        if *bytes == topic {
            return Some(name.clone());
        }
    }
    let name = PyString::new(py, std::str::from_utf8(topic).ok()?);
    *known = Some((topic, name.clone()));
    Some(name)
}

/// An access key with its secret, for HMAC-SHA1 (RFC 2104).
struct Key<'a> {
    name: &'a [u8],
    inner: Sha1,
    outer: Sha1,
}

impl<'a> Key<'a> {
    /// Return the key for *secret*, padded to a block of SHA-1.
    fn new(name: &'a [u8], secret: &[u8]) -> Self {
        let hash = |pad: u8| Sha1::new_with_prefix(secret.iter().map(|byte| byte ^ pad).collect::<Vec<u8>>());
        Self { name, inner: hash(0x36), outer: hash(0x5C) }
    }

    /// Whether the signature is that of the fields, the properties among them, and the body.
    fn has_signed(&self, signed: &SignedFields, properties: &[u8], body: &[u8]) -> bool {
        if signed.access_key != self.name {
            return false;
        }
        let mut inner = self.inner.clone();
        inner.update(signed.access_key);
        for (place, value) in signed.values.iter().enumerate() {
            inner.update(if place == PROPERTIES { properties } else { value });
        }
        inner.update(body);
        let mut outer = self.outer.clone();
        outer.update(inner.finalize());
        is_equal(&base64(&outer.finalize()), signed.signature)
    }
}

/// The base64 text of a digest of SHA-1.
fn base64(digest: &[u8]) -> Vec<u8> {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = Vec::with_capacity(28);
    for part in digest.chunks(3) {
        let bits = part.iter().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - part.len()));
        for place in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= part.len() { letter } else { b'=' });
        }
    }
    text
}

/// Whether two texts are equal; takes the same time for all texts of one length.
fn is_equal(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |other, (left, right)| other | (left ^ right)) == 0
}

fn scan<'py>(
    data: &'py Bound<'py, PyBytes>,
    limits: (usize, usize, usize, usize),
    key: Option<&Key>,
) -> PyResult<(Bound<'py, PyList>, usize)> {
    let (start, count_max, frame_bytes_max, header_bytes_max) = limits;
    let (py, sends) = (data.py(), PyList::empty(data.py()));
    let data = data.as_bytes();
    let mut scan = Scan { data, at: start, frame_bytes_max, header_bytes_max, topic: None, properties: Vec::new() };
    while sends.len() < count_max {
        let Some(send) = scan.next(py, key)? else { break };
        sends.append(send)?;
    }
    Ok((sends, scan.at))
}

#[pyfunction]
pub fn scan_sends<'py>(
    data: &'py Bound<'py, PyBytes>,
    start: usize,
    count_max: usize,
    frame_bytes_max: usize,
    header_bytes_max: usize,
) -> PyResult<(Bound<'py, PyList>, usize)> {
    guarded_scan("scan_sends", data.as_bytes(), start, || {
        scan(data, (start, count_max, frame_bytes_max, header_bytes_max), None)
    })
}

#[pyfunction]
pub fn scan_signed_sends<'py>(
    data: &'py Bound<'py, PyBytes>,
    start: usize,
    count_max: usize,
    frame_bytes_max: usize,
    header_bytes_max: usize,
    access_key: &str,
    signer: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyList>, usize)> {
    guarded_scan("scan_signed_sends", data.as_bytes(), start, || {
        let secret = signer.getattr(intern!(signer.py(), "padded_key"))?.cast_into::<PyBytes>()?;
        let key = Key::new(access_key.as_bytes(), secret.as_bytes());
        scan(data, (start, count_max, frame_bytes_max, header_bytes_max), Some(&key))
    })
}
