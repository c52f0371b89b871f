//! Scans runs of STOMP frames in the received bytes of one connection.
//!
//! The twins are in `martlet_stomp.wire.scanner`.

use memchr::memmem;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple, PyType};

use crate::guard::guarded_scan;

const PACKETS: &str = "martlet_stomp.wire.packets";
const RUN_FRAMES_MAX: usize = 1024;
const RUN_LEARNED_MAX: usize = 128;
const ACKS_BYTES_MAX: usize = 16_384;
const LINE_CHARACTERS_MAX: usize = 200;
const V1_2: u32 = 2;
const RECEIPT: &[u8] = b"\nreceipt:";

static SEND_RUN: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static ACK_RUN: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Whether a receipt may have *byte* without an escape.
fn is_plain(byte: u8) -> bool {
    (33..127).contains(&byte) && byte != b':' && byte != b'\\'
}

/// The place of *needle* in *data* between *begin* and *end*, as `bytes.find`.
fn find(data: &[u8], needle: &[u8], begin: usize, end: usize) -> Option<usize> {
    memmem::find(data.get(begin..end.min(data.len()))?, needle).map(|at| begin + at)
}

/// The header lines of a SEND frame in the received bytes.
struct Lines<'a> {
    before: &'a [u8],
    /// The value of the receipt, and what follows it; None if there is no receipt.
    receipt: Option<(&'a [u8], &'a [u8])>,
    end: usize,
}

impl<'a> Lines<'a> {
    /// Return the header lines at *at*; None if there is no blank line within *window* bytes.
    fn at(data: &'a [u8], at: usize, window: usize) -> Option<Self> {
        let stop = find(data, b"\n\n", at, at.saturating_add(window))?;
        let end = stop + 2;
        let Some(cut) = find(data, RECEIPT, at, stop) else {
            return Some(Self { before: data.get(at..end)?, receipt: None, end });
        };
        let begin = cut + RECEIPT.len();
        let line_end = find(data, b"\n", begin, end)?;
        let receipt = Some((data.get(begin..line_end)?, data.get(line_end..end)?));
        Some(Self { before: data.get(at..begin)?, receipt, end })
    }

    /// Move to the header lines at *at*; return false, and change nothing, if more than the receipt differs.
    fn move_to(&mut self, data: &'a [u8], at: usize, window: usize) -> bool {
        if !data.get(at..).is_some_and(|rest| rest.starts_with(self.before)) {
            return false;
        }
        let begin = at + self.before.len();
        let Some((_, after)) = self.receipt else {
            self.end = begin;
            return true;
        };
        let Some(line_end) = find(data, b"\n", begin, begin.saturating_add(window)) else { return false };
        let (Some(value), Some(rest)) = (data.get(begin..line_end), data.get(line_end..)) else { return false };
        if !rest.starts_with(after) {
            return false;
        }
        (self.receipt, self.end) = (Some((value, after)), line_end + after.len());
        true
    }

    /// The key of these lines in the table of known ones: without the value of the receipt.
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let after = self.receipt.map_or(&b""[..], |(_, after)| after);
        PyBytes::new(py, &[self.before, after].concat())
    }
}

/// What the header lines of a frame say.
struct Head<'py> {
    headers: Bound<'py, PyAny>,
    body_bytes: i64,
    transaction: Bound<'py, PyAny>,
}

impl<'py> Head<'py> {
    fn new(found: &Bound<'py, PyAny>) -> PyResult<Self> {
        let found = found.cast::<PyTuple>()?;
        Ok(Self {
            headers: found.get_item(0)?,
            body_bytes: found.get_item(1)?.extract()?,
            transaction: found.get_item(2)?,
        })
    }

    /// Return the end of the body at *begin*; None if there is no NUL.
    fn body_end(&self, data: &[u8], begin: usize) -> Option<usize> {
        let end = match usize::try_from(self.body_bytes) {
            Ok(size) => begin.checked_add(size)?,
            Err(_) => begin + memchr::memchr(0, data.get(begin..)?)?,
        };
        (data.get(end) == Some(&0)).then_some(end)
    }
}

/// The known header lines of SEND frames, and how many were learned in this run.
struct KnownHeads<'a, 'py> {
    heads: &'a Bound<'py, PyAny>,
    table: Bound<'py, PyDict>,
    learned: usize,
}

impl<'py> KnownHeads<'_, 'py> {
    /// Return what *lines* say; None if the codec must decode them, or others have their turn first.
    fn find(&mut self, lines: &Lines) -> PyResult<Option<Head<'py>>> {
        let py = self.heads.py();
        let key = lines.key(py);
        let found = match self.table.get_item(&key)? {
            Some(found) => found,
            None if self.learned < RUN_LEARNED_MAX => {
                self.learned += 1 + key.as_bytes().len() / 256;
                self.heads.call_method1(intern!(py, "learn"), (key,))?
            }
            None => return Ok(None),
        };
        if found.is_none() {
            return Ok(None);
        }
        Head::new(&found).map(Some)
    }
}

#[pyfunction]
pub fn scan_send_frames<'py>(
    data: &Bound<'py, PyBytes>,
    at: usize,
    heads: &Bound<'py, PyAny>,
) -> PyResult<Option<(Bound<'py, PyAny>, usize)>> {
    guarded_scan("scan_send_frames", data.as_bytes(), at, || {
        let (py, bytes, mut at) = (data.py(), data.as_bytes(), at);
        let table = heads.getattr(intern!(py, "table"))?.cast_into::<PyDict>()?;
        let window: usize = heads.getattr(intern!(py, "window"))?.extract()?;
        let limits = heads.getattr(intern!(py, "limits"))?;
        let bytes_max: usize = limits.getattr(intern!(py, "frame_bytes_max"))?.extract()?;
        let mut heads = KnownHeads { heads, table, learned: 0 };
        let (headers, bodies) = (PyList::empty(py), PyList::empty(py));
        let (receipts, asking) = (PyList::empty(py), PyList::empty(py));
        let mut transaction = py.None().into_bound(py);
        let mut previous: Option<(Lines, Head)> = None;
        while bodies.len() < RUN_FRAMES_MAX {
            if !previous.as_mut().is_some_and(|(lines, _)| lines.move_to(bytes, at, window)) {
                let Some(lines) = Lines::at(bytes, at, window) else { break };
                let Some(head) = heads.find(&lines)? else { break };
                if !bodies.is_empty() && !head.transaction.eq(&transaction)? {
                    break;
                }
                transaction = head.transaction.clone();
                previous = Some((lines, head));
            }
            let Some((lines, head)) = &previous else { break };
            let Some(end) = head.body_end(bytes, lines.end) else { break };
            if end - at >= bytes_max {
                break;
            }
            if let Some((receipt, _)) = lines.receipt {
                if receipt.is_empty() || !receipt.iter().all(|&byte| is_plain(byte)) {
                    break;
                }
                asking.append(bodies.len())?;
                receipts.append(PyBytes::new(py, receipt))?;
            }
            headers.append(&head.headers)?;
            bodies.append(PyBytes::new(py, &bytes[lines.end..end]))?;
            at = end + 1;
            if bytes.get(at) == Some(&b'\n') {
                at += 1;
            }
        }
        if bodies.is_empty() {
            return Ok(None);
        }
        let run = SEND_RUN.import(py, PACKETS, "SendRun")?;
        Ok(Some((run.call1((headers, bodies, receipts, asking, transaction))?, at)))
    })
}

/// The place of a message, and the receipt, in an ACK frame.
struct Ack<'a> {
    subscription: i64,
    queue_id: i64,
    offset: i64,
    receipt: Option<&'a [u8]>,
    is_plain: bool,
}

/// Reads frames from the beginning of bytes.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, expected: &[u8]) -> Option<()> {
        self.0 = self.0.strip_prefix(expected)?;
        Some(())
    }

    /// Read a number of at most *digits_max* digits.
    fn number(&mut self, digits_max: usize) -> Option<i64> {
        let count = self.0.iter().take(digits_max).take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = self.0.split_at_checked(count).filter(|_| count > 0)?;
        self.0 = rest;
        Some(digits.iter().fold(0, |value, digit| value * 10 + i64::from(digit - b'0')))
    }

    /// Read a header line with *name*, whose value has characters that *is_allowed*; None if there is none.
    fn line(&mut self, name: &[u8], is_allowed: impl Fn(u8) -> bool) -> Option<&'a [u8]> {
        let rest = self.0.strip_prefix(name)?;
        let end = rest.iter().take(LINE_CHARACTERS_MAX + 1).take_while(|&&byte| is_allowed(byte)).count();
        let (value, rest) = rest.split_at_checked(end)?;
        self.0 = rest.strip_prefix(b"\n").filter(|_| end <= LINE_CHARACTERS_MAX)?;
        Some(value)
    }

    fn subscription_line(&mut self) -> bool {
        self.line(b"subscription:", |byte| (32..127).contains(&byte) && byte != b'\\').is_some()
    }

    /// Read an ACK frame; None if it is incomplete, or the codec must decode it.
    fn ack(&mut self, id: &[u8]) -> Option<Ack<'a>> {
        self.take(b"ACK\n")?;
        let mut has_subscription = self.subscription_line();
        self.take(id)?;
        let subscription = self.number(9)?;
        self.take(b"-")?;
        let queue_id = self.number(5)?;
        self.take(b"-")?;
        let offset = self.number(18)?;
        self.take(b"\n")?;
        has_subscription |= self.subscription_line();
        let receipt = self.line(b"receipt:", is_plain);
        if receipt.is_some_and(<[u8]>::is_empty) {
            return None;
        }
        has_subscription |= self.subscription_line();
        self.take(b"\n\0")?;
        let _ = self.take(b"\n");
        Some(Ack { subscription, queue_id, offset, receipt, is_plain: receipt.is_none() && !has_subscription })
    }
}

#[pyfunction]
pub fn scan_ack_frames<'py>(
    data: &Bound<'py, PyBytes>,
    at: usize,
    version: u32,
) -> PyResult<Option<(Bound<'py, PyAny>, usize)>> {
    guarded_scan("scan_ack_frames", data.as_bytes(), at, || {
        let (py, bytes) = (data.py(), data.as_bytes());
        let end = at.saturating_add(ACKS_BYTES_MAX).min(bytes.len());
        let Some(window) = bytes.get(at..end) else { return Ok(None) };
        let id: &[u8] = if version == V1_2 { b"id:" } else { b"message-id:" };
        let (subscriptions, queue_ids, offsets) = (PyList::empty(py), PyList::empty(py), PyList::empty(py));
        let (receipts, asking) = (PyList::empty(py), PyList::empty(py));
        let (mut is_plain, mut at) = (true, at);
        let mut cursor = Cursor(window);
        while let Some(ack) = cursor.ack(id) {
            let count = offsets.len();
            is_plain = if count == 0 { ack.is_plain } else { is_plain };
            if is_plain && (!ack.is_plain || count >= RUN_FRAMES_MAX) {
                break;
            }
            subscriptions.append(ack.subscription)?;
            queue_ids.append(ack.queue_id)?;
            offsets.append(ack.offset)?;
            if let Some(receipt) = ack.receipt {
                asking.append(count)?;
                receipts.append(PyBytes::new(py, receipt))?;
            }
            at = end - cursor.0.len();
        }
        if offsets.is_empty() {
            return Ok(None);
        }
        let run = ACK_RUN.import(py, PACKETS, "AckRun")?;
        let run = if is_plain {
            run.call1((subscriptions, queue_ids, offsets))?
        } else {
            run.call1((subscriptions, queue_ids, offsets, receipts, asking))?
        };
        Ok(Some((run, at)))
    })
}
