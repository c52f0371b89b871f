//! A reader of JSON as programs write it: without blanks, and without escapes but those of single bytes.
//!
//! Everything else ends the reading with `None`, and the caller leaves the text to a complete decoder. What is read here
//! has the value that such a decoder would find.

/// A position in a text that is UTF-8.
pub struct Json<'a> {
    text: &'a [u8],
    at: usize,
}

/// A string between its quotes, and whether it has escapes.
#[derive(Clone, Copy)]
pub struct Text<'a> {
    pub raw: &'a [u8],
    pub is_escaped: bool,
}

impl<'a> Text<'a> {
    /// The string itself if it has no escapes.
    pub fn plain(&self) -> Option<&'a [u8]> {
        (!self.is_escaped).then_some(self.raw)
    }

    /// Add the string to *into*, with its escapes replaced.
    pub fn unescape(&self, into: &mut Vec<u8>) -> Option<()> {
        let mut rest = self.raw;
        if !self.is_escaped {
            into.extend_from_slice(rest);
            return Some(());
        }
        while let Some(at) = memchr::memchr(b'\\', rest) {
            into.extend_from_slice(&rest[..at]);
            let (byte, length) = match *rest.get(at + 1)? {
                b'u' => (ascii_escape(rest.get(at + 2..at + 6)?)?, 6),
                b'n' => (b'\n', 2),
                b't' => (b'\t', 2),
                b'r' => (b'\r', 2),
                byte @ (b'"' | b'\\' | b'/') => (byte, 2),
                _ => return None,
            };
            into.push(byte);
            rest = &rest[at + length..];
        }
        into.extend_from_slice(rest);
        Some(())
    }
}

/// The byte of `\u00xx`, if it is ASCII.
fn ascii_escape(digits: &[u8]) -> Option<u8> {
    let [b'0', b'0', high @ b'0'..=b'7', low] = *digits else { return None };
    let low = (low as char).to_digit(16)? as u8;
    Some((high - b'0') << 4 | low)
}

impl<'a> Json<'a> {
    /// Return a reader of *text*; None if it is not UTF-8 or has control characters.
    pub fn new(text: &'a [u8]) -> Option<Self> {
        let is_readable = text.iter().all(|&byte| byte >= 0x20) && std::str::from_utf8(text).is_ok();
        is_readable.then_some(Self { text, at: 0 })
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    /// Read *wanted*.
    pub fn expect(&mut self, wanted: &[u8]) -> Option<()> {
        self.text[self.at..].starts_with(wanted).then(|| self.at += wanted.len())
    }

    pub fn is_at_end(&self) -> bool {
        self.at == self.text.len()
    }

    /// Read the name of the next field of an object with its colon; empty at the end of the object.
    pub fn next_field(&mut self, is_first: bool) -> Option<&'a [u8]> {
        if self.peek()? == b'}' {
            self.at += 1;
            return Some(b"");
        }
        if !is_first {
            self.expect(b",")?;
        }
        let name = self.text()?.plain()?;
        self.expect(b":")?;
        (!name.is_empty()).then_some(name)
    }

    pub fn text(&mut self) -> Option<Text<'a>> {
        self.expect(b"\"")?;
        let start = self.at;
        let mut is_escaped = false;
        let mut at = start;
        loop {
            // Most strings are too short for a search.
            match *self.text.get(at)? {
                b'"' => break,
                b'\\' => {
                    is_escaped = true;
                    at += 2;
                }
                _ => at += 1,
            }
        }
        let raw = self.text.get(start..at)?;
        self.at = at + 1;
        Some(Text { raw, is_escaped })
    }

    /// Read a string without moving behind it.
    pub fn peek_text(&mut self) -> Option<Text<'a>> {
        let before = self.at;
        let text = self.text();
        self.at = before;
        text
    }

    /// Read a number of up to 18 digits, in quotes or not.
    pub fn number(&mut self) -> Option<i64> {
        let is_quoted = self.peek()? == b'"';
        self.at += usize::from(is_quoted);
        let number = self.digits()?;
        if is_quoted {
            self.expect(b"\"")?;
        } else if matches!(self.peek()?, b'.' | b'e' | b'E') {
            return None;
        }
        Some(number)
    }

    fn digits(&mut self) -> Option<i64> {
        let is_negative = self.peek()? == b'-';
        self.at += usize::from(is_negative);
        let start = self.at;
        let mut value = 0i64;
        while let Some(digit @ b'0'..=b'9') = self.peek() {
            value = value.wrapping_mul(10).wrapping_add(i64::from(digit - b'0'));
            self.at += 1;
        }
        let digits = self.at - start;
        let is_canonical = (1..=18).contains(&digits) && (digits == 1 || self.text[start] != b'0');
        if !is_canonical || (is_negative && value == 0) {
            return None;
        }
        Some(if is_negative { -value } else { value })
    }

    /// Return the value of *text* as `number` reads it; None if *text* is something else.
    pub fn number_of(text: &'a [u8]) -> Option<i64> {
        let mut json = Json { text, at: 0 };
        let number = json.digits()?;
        json.is_at_end().then_some(number)
    }

    pub fn small_number(&mut self) -> Option<i32> {
        self.number()?.try_into().ok()
    }

    /// Read a truth value, in quotes or not.
    pub fn truth(&mut self) -> Option<bool> {
        for (word, value) in [(&b"\"false\""[..], false), (b"\"true\"", true), (b"false", false), (b"true", true)] {
            if self.expect(word).is_some() {
                return Some(value);
            }
        }
        None
    }
}
