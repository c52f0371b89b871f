//! The routes of records by their names, and the records of each route.
//!
//! The twins are `martlet.delivery.routing.route_cache.known_routes` and
//! `martlet.delivery.routing.division.group_by_route`.

use std::collections::HashMap;

use pyo3::exceptions::PyIndexError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::guard::guarded;

#[pyfunction]
pub fn known_routes<'py>(
    records: &Bound<'py, PyList>,
    begin: usize,
    end: usize,
    cached: &Bound<'py, PyDict>,
    changes: u64,
) -> PyResult<Bound<'py, PyList>> {
    guarded("known_routes", || {
        let (py, routes) = (records.py(), PyList::empty(records.py()));
        let mut last: Option<(Bound<'py, PyAny>, Bound<'py, PyAny>)> = None;
        for index in begin..end.min(records.len()) {
            let name = records.get_item(index)?.cast_into::<PyTuple>()?.get_item(4)?;
            let route = match &last {
                Some((previous, route)) if previous.is(&name) => route.clone(),
                _ => {
                    let Some(known) = cached.get_item(&name)? else { break };
                    if known.getattr(intern!(py, "checked"))?.extract::<u64>()? != changes {
                        break;
                    }
                    let route = known.getattr(intern!(py, "route"))?;
                    last = Some((name, route.clone()));
                    route
                }
            };
            routes.append(route)?;
        }
        Ok(routes)
    })
}

/// A route, and its records.
type Part<'py> = (Bound<'py, PyAny>, Bound<'py, PyList>);

#[pyfunction]
pub fn group_by_route<'py>(
    records: &Bound<'py, PyList>,
    begin: usize,
    routes: &Bound<'py, PyList>,
) -> PyResult<(Vec<Part<'py>>, bool)> {
    guarded("group_by_route", || {
        let first = routes.iter().next().ok_or_else(|| PyIndexError::new_err("there are no routes"))?;
        if routes.iter().all(|route| route.is(&first)) {
            return Ok((vec![(first, records.get_slice(begin, begin + routes.len()))], false));
        }
        let (mut parts, mut numbers) = (Vec::<Part<'py>>::new(), HashMap::new());
        let (mut previous, mut alternates) = (usize::MAX, false);
        for (index, route) in routes.iter().enumerate() {
            let number = *numbers.entry(route.as_ptr() as usize).or_insert(parts.len());
            if number == parts.len() {
                parts.push((route, PyList::empty(records.py())));
            } else if number != previous {
                alternates = true;
            }
            previous = number;
            parts[number].1.append(records.get_item(begin + index)?)?;
        }
        Ok((parts, alternates))
    })
}
