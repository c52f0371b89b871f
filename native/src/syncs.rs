//! Makes files durable in a thread that does not need the interpreter.
//!
//! The twin is in `martlet.store.disk.syncers`.

use std::fs::File;
use std::io::{ErrorKind, Read, Result, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};

use pyo3::prelude::*;

use crate::guard::guarded;

const REQUEST_BYTES: usize = 65_536;
/// Of an error without a number.
const EIO: i32 = 5;

/// The file of a descriptor that the caller keeps open, and closes itself.
fn borrowed(fd: RawFd) -> ManuallyDrop<File> {
    // SAFETY: `ManuallyDrop` never closes the descriptor, and nothing else here assumes that it is open: if the caller
    // were to close it too early, the system calls would fail.
    ManuallyDrop::new(unsafe { File::from_raw_fd(fd) })
}

fn sync(fd: RawFd) -> Result<()> {
    if fd < 0 {
        borrowed(!fd).sync_all()
    } else {
        borrowed(fd).sync_data()
    }
}

fn read_request(requests: &mut File, request: &mut [u8]) -> Result<usize> {
    loop {
        match requests.read(request) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn serve(requests: RawFd, results: RawFd) -> Result<()> {
    let (mut requests, mut results) = (borrowed(requests), borrowed(results));
    let mut request = [0; REQUEST_BYTES];
    loop {
        let size = read_request(&mut requests, &mut request)?;
        if size == 0 {
            return Ok(());
        }
        let (mut synced, mut code) = (0i32, 0i32);
        for fd in request[..size].chunks_exact(4) {
            if let Err(error) = sync(RawFd::from_ne_bytes([fd[0], fd[1], fd[2], fd[3]])) {
                code = error.raw_os_error().unwrap_or(EIO);
                break;
            }
            synced += 1;
        }
        let mut result = [0; 8];
        result[..4].copy_from_slice(&code.to_ne_bytes());
        result[4..].copy_from_slice(&synced.to_ne_bytes());
        results.write_all(&result)?;
    }
}

#[pyfunction]
pub fn serve_syncs(py: Python<'_>, requests: RawFd, results: RawFd) -> PyResult<()> {
    guarded("serve_syncs", || Ok(py.detach(|| serve(requests, results))?))
}
