//! The native part of Martlet: inner loops of the broker, each beside the Python function that defines what it does.
//!
//! A function here works on the same objects as its Python twin, and stops before anything that is not usual, which the
//! twin then does. Nothing is kept between calls.

mod append;
mod batches;
mod bytes;
mod columns;
mod costly;
mod gather;
mod guard;
mod items;
mod json;
mod keys;
mod layout;
mod memory;
mod mqtt;
mod needles;
mod queues;
mod records;
mod rests;
mod routes;
mod scan;
mod searches;
mod sends;
mod stomp;
mod syncs;

use pyo3::prelude::*;

#[pymodule]
fn martlet_native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(append::put_usual, module)?)?;
    module.add_function(wrap_pyfunction!(sends::scan_sends, module)?)?;
    module.add_function(wrap_pyfunction!(sends::scan_signed_sends, module)?)?;
    module.add_function(wrap_pyfunction!(mqtt::scan_publishes, module)?)?;
    module.add_function(wrap_pyfunction!(stomp::scan_send_frames, module)?)?;
    module.add_function(wrap_pyfunction!(stomp::scan_ack_frames, module)?)?;
    module.add_function(wrap_pyfunction!(mqtt::number_frames, module)?)?;
    module.add_function(wrap_pyfunction!(rests::message_rests, module)?)?;
    module.add_function(wrap_pyfunction!(mqtt::run_items, module)?)?;
    module.add_function(wrap_pyfunction!(mqtt::usual_name, module)?)?;
    module.add_function(wrap_pyfunction!(costly::cheap_records, module)?)?;
    module.add_function(wrap_pyfunction!(costly::record_places, module)?)?;
    module.add_function(wrap_pyfunction!(keys::index_usual, module)?)?;
    module.add_function(wrap_pyfunction!(columns::record_starts, module)?)?;
    module.add_function(wrap_pyfunction!(columns::doubtful_records, module)?)?;
    module.add_function(wrap_pyfunction!(columns::gather_usual, module)?)?;
    module.add_function(wrap_pyfunction!(memory::uncleared, module)?)?;
    module.add_function(wrap_pyfunction!(scan::scan_usual, module)?)?;
    module.add_function(wrap_pyfunction!(items::usual_items, module)?)?;
    module.add_function(wrap_pyfunction!(items::sent_answers, module)?)?;
    module.add_function(wrap_pyfunction!(gather::gather_records, module)?)?;
    module.add_function(wrap_pyfunction!(gather::select_entries, module)?)?;
    module.add_function(wrap_pyfunction!(gather::count_intact, module)?)?;
    module.add_function(wrap_pyfunction!(needles::positions_before, module)?)?;
    module.add_function(wrap_pyfunction!(needles::match_places, module)?)?;
    module.add_function(wrap_pyfunction!(searches::count_names, module)?)?;
    module.add_function(wrap_pyfunction!(searches::find_texts, module)?)?;
    module.add_function(wrap_pyfunction!(searches::find_numbers, module)?)?;
    module.add_function(wrap_pyfunction!(searches::distinct_values, module)?)?;
    module.add_function(wrap_pyfunction!(searches::find_values, module)?)?;
    module.add_function(wrap_pyfunction!(records::find_names, module)?)?;
    module.add_function(wrap_pyfunction!(records::survey, module)?)?;
    module.add_function(wrap_pyfunction!(routes::known_routes, module)?)?;
    module.add_function(wrap_pyfunction!(routes::group_by_route, module)?)?;
    module.add_function(wrap_pyfunction!(batches::take_members, module)?)?;
    module.add_function(wrap_pyfunction!(batches::batch_items, module)?)?;
    module.add_function(wrap_pyfunction!(append::measure_usual, module)?)?;
    module.add_function(wrap_pyfunction!(records::cut_frames, module)?)?;
    module.add_function(wrap_pyfunction!(syncs::serve_syncs, module)?)?;
    Ok(())
}
