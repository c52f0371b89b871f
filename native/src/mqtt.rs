//! Scans runs of MQTT packets in the received bytes of one connection.
//!
//! The twins are in `martlet_mqtt.wire.scanner`.

use pyo3::exceptions::{PyIndexError, PyKeyError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyList, PyTuple, PyType};

use crate::guard::{guarded, guarded_scan};

const V5: u32 = 5;
static PUBLISH_RUN: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The content of a packet: where it begins, and where the next packet does.
fn content(data: &[u8], at: usize) -> Option<(usize, usize)> {
    let (mut size, mut shift) = (0, 0);
    for (place, &byte) in data.iter().enumerate().skip(at + 1).take(4) {
        size |= usize::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            // The codec handles a length field with more bytes than necessary [MQTT-1.5.5-1].
            let is_shortest = byte > 0 || shift == 0;
            let (begin, end) = (place + 1, place + 1 + size);
            return (is_shortest && end <= data.len()).then_some((begin, end));
        }
        shift += 7;
    }
    None
}

#[pyfunction]
#[pyo3(signature = (data, at, version, names, bytes_max, packets_max=1024))]
pub fn scan_publishes<'py>(
    data: &Bound<'py, PyBytes>,
    at: usize,
    version: u32,
    names: &Bound<'py, PyAny>,
    bytes_max: usize,
    packets_max: usize,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    guarded_scan("scan_publishes", data.as_bytes(), at, || {
        let (py, bytes) = (data.py(), data.as_bytes());
        let Some(&first) = bytes.get(at) else { return Ok(None) };
        let (qos, has_properties) = (first >> 1 & 3, version == V5);
        let table = names.getattr(intern!(py, "table"))?.cast_into::<PyDict>()?;
        let (run_names, bodies, ids, ends) =
            (PyList::empty(py), PyList::empty(py), PyList::empty(py), PyList::empty(py));
        let (start, mut at) = (at, at);
        let mut known: Option<(&[u8], Bound<'py, PyAny>)> = None;
        while ends.len() < packets_max && bytes.get(at) == Some(&first) {
            let Some((mut begin, stop)) = content(bytes, at) else { break };
            let Some(&[high, low]) = bytes.get(begin..begin + 2) else { break };
            let name_end = begin + 2 + (usize::from(high) << 8 | usize::from(low));
            if name_end > stop || stop - at > bytes_max {
                break;
            }
            let text = &bytes[begin + 2..name_end];
            begin = name_end;
            let packet_id = bytes.get(begin..begin + 2);
            if qos > 0 {
                begin += 2;
                if packet_id == Some(&[0, 0]) {
                    break;
                }
            }
            if has_properties {
                if begin >= stop || bytes[begin] != 0 {
                    break;
                }
                begin += 1;
            }
            if begin > stop {
                break;
            }
            let name = match &known {
                Some((bytes, name)) if *bytes == text => name.clone(),
                _ => {
                    let key = PyBytes::new(py, text);
                    let found = match table.get_item(&key)? {
                        Some(name) => name,
                        None => names.call_method1(intern!(py, "learn"), (key,))?,
                    };
                    if found.is_none() {
                        break;
                    }
                    known = Some((text, found.clone()));
                    found
                }
            };
            run_names.append(name)?;
            bodies.append(PyBytes::new(py, &bytes[begin..stop]))?;
            if let (true, Some(packet_id)) = (qos > 0, packet_id) {
                ids.append(PyBytes::new(py, packet_id))?;
            }
            ends.append(stop)?;
            at = stop;
        }
        if ends.is_empty() {
            return Ok(None);
        }
        let run = PUBLISH_RUN.import(py, "martlet_mqtt.wire.scanner", "PublishRun")?;
        Ok(Some(run.call1((qos, run_names, bodies, ids, data, start, ends))?))
    })
}

/// Where the packet identifier of the PUBLISH at *start* is.
fn id_place(data: &[u8], start: usize) -> Option<usize> {
    let mut at = start.checked_add(2)?;
    while *data.get(at - 1)? > 127 {
        at += 1;
    }
    let &[high, low] = data.get(at..at + 2)? else { return None };
    Some(at + 2 + (usize::from(high) << 8 | usize::from(low)))
}

#[pyfunction]
#[pyo3(signature = (data, starts, ids, flags=0))]
pub fn number_frames(
    data: &Bound<'_, PyByteArray>,
    starts: &Bound<'_, PyAny>,
    ids: &Bound<'_, PyAny>,
    flags: u8,
) -> PyResult<()> {
    guarded("number_frames", || {
        let starts = starts.try_iter()?.map(|each| each?.extract()).collect::<PyResult<Vec<usize>>>()?;
        let ids = ids.try_iter()?.map(|each| each?.extract()).collect::<PyResult<Vec<u16>>>()?;
        if starts.len() != ids.len() {
            return Err(PyValueError::new_err(format!("{} frames have {} identifiers", starts.len(), ids.len())));
        }
        // SAFETY: no Python code runs while the slice is borrowed, and the lock of the interpreter is held.
        let bytes = unsafe { data.as_bytes_mut() };
        for (start, id) in starts.into_iter().zip(ids) {
            let place = id_place(bytes, start).and_then(|at| bytes.get_mut(at..at + 2));
            place
                .ok_or_else(|| PyIndexError::new_err("a frame ends before its identifier"))?
                .copy_from_slice(&id.to_be_bytes());
            bytes[start] |= flags;
        }
        Ok(())
    })
}

const LEVELS_MAX: usize = 200;

/// The text of *raw* if clients may publish to it.
fn usual_text(raw: &[u8], bytes_max: usize) -> Option<&str> {
    let text = std::str::from_utf8(raw).ok()?;
    let is_usual = !text.is_empty()
        && raw.len() <= bytes_max
        && !text.starts_with('$')
        && !text.contains(|each: char| each.is_control() || matches!(each, '+' | '#'))
        && memchr::memchr_iter(b'/', raw).count() < LEVELS_MAX;
    is_usual.then_some(text)
}

/// A name: text, tag code, place, and properties by QoS.
type Usual<'py> = (&'py str, i32, u32, Bound<'py, PyTuple>);

#[pyfunction]
pub fn usual_name<'py>(raw: &'py Bound<'py, PyBytes>, bytes_max: usize) -> PyResult<Option<Usual<'py>>> {
    guarded("usual_name", || {
        let (py, bytes) = (raw.py(), raw.as_bytes());
        let Some(text) = usual_text(bytes, bytes_max) else { return Ok(None) };
        let code = text.encode_utf16().fold(0i32, |code, unit| code.wrapping_mul(31).wrapping_add(i32::from(unit)));
        let properties = [&b"MQTT_QOS\x010\x02"[..], b"", b"MQTT_QOS\x012\x02"]
            .map(|qos| PyBytes::new(py, &[b"TAGS\x01", bytes, b"\x02", qos].concat()));
        Ok(Some((text, code, crc32fast::hash(bytes), PyTuple::new(py, properties)?)))
    })
}

/// What messages of a name have in common: queue, properties and tag code.
type Template<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

#[pyfunction]
pub fn run_items<'py>(
    names: &Bound<'py, PyList>,
    bodies: &Bound<'py, PyList>,
    queues: &Bound<'py, PyDict>,
    qos: usize,
    born_ms: &Bound<'py, PyAny>,
    host: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyList>> {
    guarded("run_items", || {
        let py = names.py();
        let zero = 0i32.into_pyobject(py)?.into_any();
        if names.len() != bodies.len() {
            return Err(PyValueError::new_err(format!("{} names have {} bodies", names.len(), bodies.len())));
        }
        let items = PyList::empty(py);
        let mut known: Option<(Bound<'py, PyAny>, Template<'py>)> = None;
        for (name, body) in names.iter().zip(bodies.iter()) {
            if !known.as_ref().is_some_and(|(previous, _)| previous.is(&name)) {
                let queue = queues.get_item(&name)?.ok_or_else(|| PyKeyError::new_err("a name has no queue"))?;
                let properties = name.getattr(intern!(py, "properties"))?.get_item(qos)?;
                let template = (queue, properties, name.getattr(intern!(py, "code"))?);
                known = Some((name, template));
            }
            let Some((_, (queue, properties, code))) = &known else { continue };
            let item = [queue, &body, properties, code, &zero, &zero, born_ms, host, &zero, &zero];
            items.append(PyTuple::new(py, item)?)?;
        }
        Ok(items)
    })
}
