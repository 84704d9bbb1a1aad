//! Serial number of a disk, as the request VIRTIO_BLK_T_GET_ID returns it (virtio 1.2, section 5.2.6).

use std::fmt;

use super::blk::SERIAL_BYTES;

/// Serial number: up to 20 bytes, then zeros.
///
/// Management software gives disks longer ones, UUIDs for example. QEMU's virtio-blk shows a guest their first 20
/// bytes, and so does Larder: the guest finds its disk by the same name with either.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Serial([u8; SERIAL_BYTES]);

impl Serial {
    /// Returns the serial number that a guest sees for `text`: its first 20 bytes, or those before a zero byte.
    pub fn of(text: &str) -> Self {
        let mut serial = [0; SERIAL_BYTES];
        let bytes = text.bytes().take_while(|byte| *byte != 0);
        for (shown, byte) in serial.iter_mut().zip(bytes) {
            *shown = byte;
        }
        Self(serial)
    }

    /// Returns the bytes of the answer to GET_ID.
    pub fn bytes(&self) -> &[u8; SERIAL_BYTES] {
        &self.0
    }

    fn text(&self) -> &[u8] {
        let len = self.0.iter().position(|byte| *byte == 0).unwrap_or(SERIAL_BYTES);
        &self.0[..len]
    }

    /// Returns a message for people if a guest sees less than `text`.
    pub fn truncation_warning(text: &str) -> Option<String> {
        let serial = Self::of(text);
        (serial.text() != text.as_bytes()).then(|| {
            format!(
                "serial number '{}' has {} bytes; the guest sees the first {}, as with QEMU: '{}'",
                text.escape_debug(),
                text.len(),
                serial.text().len(),
                serial.to_string().escape_debug()
            )
        })
    }
}

/// Formats the serial number as text; a character that was cut in two prints as U+FFFD.
impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(self.text()))
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Serial({:?})", self.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest sees the same serial as of a disk that QEMU serves itself.
    #[test]
    fn long_serial_is_cut_to_20_bytes() {
        for (given, shown) in [
            ("", ""),
            ("S1", "S1"),
            ("12345678901234567890", "12345678901234567890"),
            ("f9160a20-70c7-38f4-a980-29f0c16f0155", "f9160a20-70c7-38f4-a"),
            ("a\0b", "a"),
            ("1234567890123456789\u{e4}", "1234567890123456789\u{fffd}"),
        ] {
            let serial = Serial::of(given);
            assert_eq!(serial.to_string(), shown);
            assert_eq!(Serial::truncation_warning(given).is_some(), given != shown, "{given}");
            assert_eq!(serial.bytes().len(), 20);
        }
        let warning = Serial::truncation_warning("f9160a20-70c7-38f4-a980-29f0c16f0155").expect("a warning");
        assert!(warning.contains("has 36 bytes") && warning.ends_with("'f9160a20-70c7-38f4-a'"), "{warning}");
    }
}
