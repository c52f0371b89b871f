//! The layout of records; `martlet.records.layout` explains it.

pub const HEAD_BYTES: usize = 88;
/// With empty body, topic and properties.
pub const RECORD_BYTES_MIN: usize = 91;
pub const MAGIC_V1: u32 = 0xDAA3_20A7;
pub const PROPERTIES_BYTES_MAX: usize = 32_767;
pub const PREPARED: i32 = 0x4;
pub const WIDE_HOSTS: i32 = 0x30;
/// The bit of sysFlag for a compressed body.
pub const COMPRESSED: i32 = 0x1;
/// Bits of sysFlag that clients cannot set: IPv6 hosts, and the place in an atomic group.
pub const STORE_BITS: i32 = 0x6000_0030;
pub const RECORD_CRC_BYTES: usize = 20;
pub const RECORD_CRC_NAME: &[u8] = b"__CRC32#";
pub const RECORD_CRC_ROOM: &[u8; RECORD_CRC_BYTES] = b"__CRC32#\x010000000000\x02";
/// Begins the names of the properties that name light queues.
pub const MULTI: &[u8] = b"INNER_MULTI_";
/// The names of the properties with keys, and what follows a name.
pub const UNIQUE_KEY: &[u8] = b"UNIQ_KEY\x01";
pub const KEYS: &[u8] = b"KEYS\x01";
pub const TAGS: &[u8] = b"TAGS\x01";
/// An entry of a queue: position, size and code; a blank one, of a lost message, has a size of its own.
pub const ENTRY_BYTES: usize = 20;
pub const BLANK_SIZE: i32 = i32::MAX;

/// The bytes of the field at *at*; None if the data ends before them.
pub fn field<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// The number at *at*; None if the data ends before it.
pub fn i32_at(data: &[u8], at: usize) -> Option<i32> {
    field(data, at).map(i32::from_be_bytes)
}

/// The number at *at*; None if the data ends before it.
pub fn i64_at(data: &[u8], at: usize) -> Option<i64> {
    field(data, at).map(i64::from_be_bytes)
}
