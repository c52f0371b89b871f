//! Searches raw bytes for texts, numbers and values of properties.
//!
//! The twins are in `martlet_filter_sql92.searches` and `martlet_filter_sql92.values`. They are regular expressions; what
//! is found here is what these match.

use std::collections::HashSet;

use memchr::memmem::Finder;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFrozenSet, PyList, PySet, PyTuple};

use crate::bytes::with_bytes;
use crate::guard::guarded;

const HITS_MAX: usize = 8192;
/// The repetitions of a digit or sign that the patterns of numbers allow.
const CHARACTERS_MAX: usize = 64;
/// More digits than any bound has.
const DIGITS_MAX: usize = 20;
/// So many values are compared one by one.
const FEW: usize = 8;
const PIECE_BYTES: usize = 128 << 10;
const MAGICS: [[u8; 4]; 3] = [[0xDA, 0xA3, 0x20, 0xA7], [0xDA, 0xA3, 0x20, 0xAB], [0xCB, 0xD4, 0x31, 0x94]];

/// The bytes that a search may look at: it sees nothing after them.
fn part(data: &[u8], begin: usize, end: usize) -> &[u8] {
    let end = end.min(data.len());
    data.get(begin.min(end)..end).unwrap_or_default()
}

#[pyfunction]
pub fn count_names(data: &Bound<'_, PyAny>, begin: usize, end: usize) -> PyResult<usize> {
    guarded("count_names", || with_bytes(data, |data| Ok(memchr::memchr_iter(1, part(data, begin, end)).count())))
}

/// Add *begin* to the first places in *data* where *start* is and `holds` for the bytes after it. The search goes on
/// after the bytes of *start*, or at its second byte if what follows does not hold.
fn find_starts(data: &[u8], begin: usize, start: &[u8], holds: impl Fn(&[u8]) -> bool) -> Vec<usize> {
    let (finder, mut found, mut at) = (Finder::new(start), Vec::new(), 0);
    while let Some(distance) = data.get(at..).and_then(|rest| finder.find(rest)) {
        let place = at + distance;
        let after = place + start.len();
        if data.get(after..).is_some_and(&holds) {
            found.push(begin + place);
            if found.len() == HITS_MAX {
                break;
            }
            at = after;
        } else {
            at = place + 1;
        }
    }
    found
}

fn ends(rest: &[u8]) -> bool {
    rest.first().is_none_or(|&byte| byte <= 2)
}

/// The field of *wanted*, which is bytes.
fn bytes_of<'py>(
    wanted: &Bound<'py, PyAny>,
    name: &Bound<'py, pyo3::types::PyString>,
) -> PyResult<Bound<'py, PyBytes>> {
    Ok(wanted.getattr(name)?.cast_into::<PyBytes>()?)
}

#[pyfunction]
pub fn find_texts<'py>(
    data: &Bound<'py, PyAny>,
    begin: usize,
    end: usize,
    wanted: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyList>> {
    guarded("find_texts", || {
        let py = data.py();
        let start = bytes_of(wanted, intern!(py, "start"))?;
        let texts = wanted.getattr(intern!(py, "texts"))?.cast_into::<PyTuple>()?;
        let texts: Vec<Bound<'py, PyBytes>> =
            texts.iter().map(|text| Ok(text.cast_into::<PyBytes>()?)).collect::<PyResult<_>>()?;
        let is_whole: bool = wanted.getattr(intern!(py, "is_whole"))?.extract()?;
        let ignores_case: bool = wanted.getattr(intern!(py, "ignores_case"))?.extract()?;
        let starts = |rest: &[u8], text: &[u8]| {
            rest.get(..text.len()).is_some_and(|head| head == text || (ignores_case && head.eq_ignore_ascii_case(text)))
                && (!is_whole || ends(&rest[text.len()..]))
        };
        let found = with_bytes(data, |data| {
            let data = part(data, begin, end);
            Ok(match texts.as_slice() {
                [text] if !ignores_case => {
                    let literal = [start.as_bytes(), text.as_bytes()].concat();
                    find_starts(data, begin, &literal, |rest| !is_whole || ends(rest))
                }
                _ => find_starts(data, begin, start.as_bytes(), |rest| {
                    texts.iter().any(|text| starts(rest, text.as_bytes()))
                }),
            })
        });
        PyList::new(py, found?)
    })
}

/// Whole numbers from *low* to *high*.
struct Range {
    low: Option<i64>,
    high: Option<i64>,
}

impl Range {
    fn has(&self, number: i128) -> bool {
        self.low.is_none_or(|low| i128::from(low) <= number) && self.high.is_none_or(|high| number <= i128::from(high))
    }

    /// Whether *text* begins with a number of the range, or with one that has a point or an exponent.
    fn matches(&self, text: &[u8]) -> bool {
        let signs = text.iter().take_while(|byte| matches!(byte, b'+' | b'-' | b'0'..=b'9')).count();
        if signs <= CHARACTERS_MAX && matches!(text.get(signs), Some(b'.' | b'e' | b'E')) {
            return true;
        }
        let (sign, digits) = match text {
            [b'-', digits @ ..] => (-1, digits),
            [b'+', digits @ ..] => (1, digits),
            _ => (1, text),
        };
        let zeros = digits.iter().take_while(|&&byte| byte == b'0').count();
        let digits = &digits[zeros..];
        let count = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if zeros > CHARACTERS_MAX || count > CHARACTERS_MAX + 1 || zeros + count == 0 {
            return false;
        }
        let digits = &digits[..count.min(DIGITS_MAX)];
        let number = digits.iter().fold(0, |number: i128, digit| number * 10 + i128::from(digit - b'0'));
        self.has(sign * number)
    }
}

#[pyfunction]
pub fn find_numbers<'py>(
    data: &Bound<'py, PyAny>,
    begin: usize,
    end: usize,
    wanted: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyList>> {
    guarded("find_numbers", || {
        let py = data.py();
        let start = bytes_of(wanted, intern!(py, "start"))?;
        let low = wanted.getattr(intern!(py, "low"))?.extract()?;
        let range = Range { low, high: wanted.getattr(intern!(py, "high"))?.extract()? };
        let found = with_bytes(data, |data| {
            Ok(find_starts(part(data, begin, end), begin, start.as_bytes(), |rest| range.matches(rest)))
        });
        PyList::new(py, found?)
    })
}

/// The value that *rest* begins with; it ends with a byte 0 or 1 if its end is unknown.
fn value_of(rest: &[u8]) -> &[u8] {
    let length = rest.iter().position(|&byte| byte <= 2).unwrap_or(rest.len());
    let is_continued = match rest.get(length) {
        Some(1) => true,
        Some(0) => !rest.get(length + 4..length + 8).is_some_and(|magic| MAGICS.iter().any(|each| each == magic)),
        _ => false,
    };
    &rest[..length + usize::from(is_continued)]
}

/// Add the values after *start* in *data*, and return their number; None if there are more than *values_max*.
fn collect_values<'a>(data: &'a [u8], start: &[u8], values_max: usize, found: &mut HashSet<&'a [u8]>) -> Option<usize> {
    let (finder, mut begin, mut count, mut last): (_, _, _, &[u8]) = (Finder::new(start), 0, 0, &[]);
    while begin < data.len() {
        let paused = data.get(begin + PIECE_BYTES..).and_then(|rest| memchr::memchr(2, rest));
        let stop = paused.map_or(data.len(), |distance| begin + PIECE_BYTES + distance);
        let piece = &data[begin..stop];
        for place in finder.find_iter(piece) {
            let value = value_of(&piece[place + start.len()..]);
            count += 1;
            if count > values_max {
                return None;
            }
            if value != last || found.is_empty() {
                found.insert(value);
                last = value;
            }
        }
        begin = stop;
    }
    Some(count)
}

#[pyfunction]
pub fn distinct_values<'py>(
    data: &Bound<'py, PyAny>,
    begin: usize,
    end: usize,
    start: &Bound<'py, PyBytes>,
    values_max: usize,
) -> PyResult<Option<(Bound<'py, PySet>, usize)>> {
    guarded("distinct_values", || {
        let collected = with_bytes(data, |data| {
            let mut found = HashSet::new();
            let count = collect_values(part(data, begin, end), start.as_bytes(), values_max, &mut found);
            Ok(count.map(|count| (found.into_iter().map(<[u8]>::to_vec).collect::<Vec<_>>(), count)))
        });
        let Some((values, count)) = collected? else { return Ok(None) };
        let values = values.iter().map(|value| PyBytes::new(data.py(), value));
        Ok(Some((PySet::new(data.py(), values)?, count)))
    })
}

#[pyfunction]
pub fn find_values<'py>(
    data: &Bound<'py, PyAny>,
    begin: usize,
    end: usize,
    start: &Bound<'py, PyBytes>,
    values: &Bound<'py, PyFrozenSet>,
) -> PyResult<Bound<'py, PyList>> {
    guarded("find_values", || {
        let values: Vec<Bound<'py, PyBytes>> =
            values.iter().map(|value| Ok(value.cast_into::<PyBytes>()?)).collect::<PyResult<_>>()?;
        let few: Vec<&[u8]> = values.iter().map(|value| value.as_bytes()).collect();
        let many: HashSet<&[u8]> = few.iter().copied().collect();
        let is_wanted = |value: &[u8]| if few.len() <= FEW { few.contains(&value) } else { many.contains(value) };
        let found = with_bytes(data, |data| {
            let (data, start, finder) = (part(data, begin, end), start.as_bytes(), Finder::new(start.as_bytes()));
            let places = finder.find_iter(data);
            let places = places.filter(|place| is_wanted(value_of(&data[place + start.len()..])));
            Ok(places.map(|place| begin + place).collect::<Vec<_>>())
        });
        PyList::new(data.py(), found?)
    })
}
