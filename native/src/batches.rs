//! The messages of a batch, and the items that the store takes for them.
//!
//! The twins are `martlet_remoting.wire.batches.take_members` and `martlet_remoting.shared.templates.batch_items`.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::guard::guarded;
use crate::items::tag_code;
use crate::layout::PROPERTIES_BYTES_MAX;

const HEAD_BYTES: usize = 20;
const OVERHEAD: usize = 22;

/// A message of a batch.
struct Member<'a> {
    body: &'a [u8],
    properties: &'a [u8],
    flag: i32,
    size: usize,
}

impl<'a> Member<'a> {
    /// Read the message at the beginning of *rest*; None if its lengths contradict each other or the end.
    fn read(rest: &'a [u8]) -> Option<Self> {
        let number = |at: usize| Some(i32::from_be_bytes(rest.get(at..at + 4)?.try_into().ok()?));
        let (size, body_bytes) = (usize::try_from(number(0)?).ok()?, usize::try_from(number(16)?).ok()?);
        let (message, flag) = (rest.get(..size)?, number(12)?);
        let body_end = HEAD_BYTES + body_bytes;
        let &[high, low] = message.get(body_end..body_end + 2)? else { return None };
        let properties = &message[body_end + 2..];
        let said = usize::from(high) << 8 | usize::from(low);
        let is_whole = said == properties.len() && said <= PROPERTIES_BYTES_MAX && size >= OVERHEAD;
        is_whole.then(|| Self { body: &message[HEAD_BYTES..body_end], properties, flag, size })
    }
}

#[pyfunction]
pub fn take_members<'py>(
    data: &Bound<'py, PyBytes>,
    position: usize,
    count_max: usize,
    members: &Bound<'py, PyList>,
) -> PyResult<usize> {
    guarded("take_members", || {
        let (py, data, mut position) = (data.py(), data.as_bytes(), position);
        while members.len() < count_max {
            let Some(member) = data.get(position..).and_then(Member::read) else { break };
            members.append((PyBytes::new(py, member.body), PyBytes::new(py, member.properties), member.flag))?;
            position += member.size;
        }
        Ok(position)
    })
}

#[pyfunction]
pub fn batch_items<'py>(
    members: &Bound<'py, PyList>,
    queue: &Bound<'py, PyAny>,
    sys_flag: &Bound<'py, PyAny>,
    born_ms: &Bound<'py, PyAny>,
    host: &Bound<'py, PyAny>,
    reconsume_times: &Bound<'py, PyAny>,
    code_of: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyList>> {
    guarded("batch_items", || {
        let (py, items) = (members.py(), PyList::empty(members.py()));
        let zero = 0i64.into_pyobject(py)?.into_any();
        for member in members.iter() {
            let member = member.cast_into::<PyTuple>()?;
            let (body, properties, flag) = (member.get_item(0)?, member.get_item(1)?, member.get_item(2)?);
            let code = match tag_code(properties.cast::<PyBytes>()?.as_bytes()) {
                Some(code) => code.into_pyobject(py)?.into_any(),
                None => code_of.call1((&properties,))?,
            };
            let item = [queue, &body, &properties, &code, &flag, sys_flag, born_ms, host, reconsume_times, &zero];
            items.append(PyTuple::new(py, item)?)?;
        }
        Ok(items)
    })
}
