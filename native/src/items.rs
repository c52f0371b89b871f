//! Messages of usual sends, as the store takes them, and the answers to the sends.
//!
//! The twins are `martlet_remoting.shared.templates.usual_items` and `martlet_remoting.wire.sends.sent_answers`.

use memchr::memmem;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::guard::guarded;
use crate::keys::{find_property, hash_code};
use crate::layout::{PROPERTIES_BYTES_MAX, TAGS};

const ONEWAY: i64 = 2;

/// The tag code of properties; None if their tags are not UTF-8.
pub fn tag_code(properties: &[u8]) -> Option<i64> {
    Some(i64::from(hash_code(0, find_property(properties, TAGS))? as i32))
}

/// A topic, and the queue that was used last.
struct Topic<'py> {
    topic: &'py Bound<'py, PyAny>,
    name: Bound<'py, PyString>,
    open_queues: i64,
    queues: Bound<'py, PyDict>,
    last: Option<(i64, Bound<'py, PyAny>, i64)>,
}

impl<'py> Topic<'py> {
    fn new(topic: &'py Bound<'py, PyAny>) -> PyResult<Self> {
        let py = topic.py();
        Ok(Self {
            topic,
            name: topic.getattr(intern!(py, "name"))?.cast_into()?,
            open_queues: topic.getattr(intern!(py, "open_queues"))?.extract()?,
            queues: topic.getattr(intern!(py, "queues"))?.cast_into()?,
            last: None,
        })
    }

    /// Return queue *queue_id* and its overhead.
    fn queue(&mut self, queue_id: i64) -> PyResult<(Bound<'py, PyAny>, i64)> {
        if let Some((known, queue, overhead)) = &self.last {
            if *known == queue_id {
                return Ok((queue.clone(), *overhead));
            }
        }
        let py = self.topic.py();
        let queue = match self.queues.get_item(queue_id)? {
            Some(queue) => queue,
            None => self.topic.call_method1(intern!(py, "queue"), (queue_id,))?,
        };
        let overhead: i64 = queue.getattr(intern!(py, "overhead"))?.extract()?;
        self.last = Some((queue_id, queue.clone(), overhead));
        Ok((queue, overhead))
    }
}

#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub fn usual_items<'py>(
    sends: &Bound<'py, PyList>,
    run: &Bound<'py, PyList>,
    room: i64,
    staged_flags: i64,
    words: &Bound<'py, PyTuple>,
    topic: &'py Bound<'py, PyAny>,
    host: &Bound<'py, PyAny>,
    stamp: &[u8],
    body_bytes_max: usize,
    code_of: &Bound<'py, PyAny>,
) -> PyResult<i64> {
    guarded("usual_items", || {
        let (py, mut room, mut topic) = (sends.py(), room, Topic::new(topic)?);
        let words: Vec<Bound<'py, PyBytes>> = words.iter().map(|word| word.cast_into()).collect::<Result<_, _>>()?;
        let zero = 0i64.into_pyobject(py)?.into_any();
        let mut stored = Vec::new();
        for index in run.len()..sends.len() {
            let send = sends.get_item(index)?.cast_into::<PyTuple>()?;
            let name = send.get_item(0)?;
            if !(name.is(&topic.name) || name.eq(&topic.name)?) {
                break;
            }
            let queue_id: i64 = send.get_item(1)?.extract()?;
            let sys_flag = send.get_item(5)?;
            let command_flag: i64 = send.get_item(9)?.extract()?;
            let (body, properties) =
                (send.get_item(2)?.cast_into::<PyBytes>()?, send.get_item(3)?.cast_into::<PyBytes>()?);
            let properties = properties.as_bytes();
            if room < 0
                || !(0..topic.open_queues).contains(&queue_id)
                || sys_flag.extract::<i64>()? & staged_flags != 0
                || command_flag & !ONEWAY != 0
                || body.as_bytes().len() > body_bytes_max
                || properties.len() + stamp.len() + 1 > PROPERTIES_BYTES_MAX
                || words.iter().any(|word| memmem::find(properties, word.as_bytes()).is_some())
            {
                break;
            }
            stored.clear();
            stored.extend_from_slice(properties);
            if properties.last() != Some(&2) {
                stored.push(2);
            }
            stored.extend_from_slice(stamp);
            let properties = PyBytes::new(py, &stored).into_any();
            let code = match tag_code(&stored) {
                Some(code) => code.into_pyobject(py)?.into_any(),
                None => code_of.call1((&properties,))?,
            };
            let (queue, overhead) = topic.queue(queue_id)?;
            room -= overhead + (body.as_bytes().len() + stored.len()) as i64;
            let (flag, born_ms) = (send.get_item(4)?, send.get_item(6)?);
            let body = body.into_any();
            run.append(PyTuple::new(
                py,
                [&queue, &body, &properties, &code, &flag, &sys_flag, &born_ms, host, &zero, &zero],
            )?)?;
        }
        Ok(room)
    })
}

/// A template with places for values, which are filled in their order.
pub struct Template<'a> {
    parts: Vec<(&'a [u8], bool)>,
}

impl<'a> Template<'a> {
    /// Cut *text* at its places; a doubled percent sign stands for itself.
    pub fn new(text: &'a [u8]) -> Self {
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some(at) = memchr::memchr(b'%', rest) {
            let place = &rest[at..];
            let length = match place {
                [b'%', b'%', ..] => {
                    parts.push((&rest[..=at], false));
                    rest = &rest[at + 2..];
                    continue;
                }
                [b'%', b'0', b'1', b'6', b'X', ..] => 5,
                _ => 2,
            };
            parts.push((&rest[..at], true));
            rest = rest.get(at + length..).unwrap_or_default();
        }
        parts.push((rest, false));
        Self { parts }
    }

    /// Add the template to *into*, with *values* in its places.
    pub fn fill(&self, values: &[&[u8]], into: &mut Vec<u8>) {
        let mut values = values.iter();
        for (text, is_before_place) in &self.parts {
            into.extend_from_slice(text);
            if *is_before_place {
                into.extend_from_slice(values.next().copied().unwrap_or_default());
            }
        }
    }
}

/// As `%016X` writes it.
fn hexadecimal(value: i64) -> String {
    if value < 0 {
        format!("-{:015X}", value.unsigned_abs())
    } else {
        format!("{value:016X}")
    }
}

#[pyfunction]
pub fn sent_answers<'py>(
    template: &[u8],
    sends: &Bound<'py, PyList>,
    positions: &Bound<'py, PyList>,
    offsets: &Bound<'py, PyList>,
) -> PyResult<Bound<'py, PyList>> {
    guarded("sent_answers", || {
        let (py, template, answers) = (sends.py(), Template::new(template), PyList::empty(sends.py()));
        let mut frame = Vec::new();
        for ((send, position), offset) in sends.iter().zip(positions.iter()).zip(offsets.iter()) {
            let send = send.cast_into::<PyTuple>()?;
            frame.clear();
            if send.get_item(9)?.extract::<i64>()? == 0 {
                let unique = send.get_item(7)?.cast_into::<PyBytes>()?;
                let (queue_id, opaque): (i64, i64) = (send.get_item(1)?.extract()?, send.get_item(8)?.extract()?);
                let (position, offset): (i64, i64) = (position.extract()?, offset.extract()?);
                let numbers = [queue_id.to_string(), hexadecimal(position), offset.to_string(), opaque.to_string()];
                let [queue_id, position, offset, opaque] = numbers.each_ref().map(|number| number.as_bytes());
                frame.extend_from_slice(&[0; 8]);
                template.fill(&[queue_id, unique.as_bytes(), position, offset, opaque], &mut frame);
                let header_bytes = frame.len() as u32 - 8;
                frame[..4].copy_from_slice(&(header_bytes + 4).to_be_bytes());
                frame[4..8].copy_from_slice(&header_bytes.to_be_bytes());
            }
            answers.append(PyBytes::new(py, &frame))?;
        }
        Ok(answers)
    })
}
