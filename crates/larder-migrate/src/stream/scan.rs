//! Looks for a place that is known again, in bytes that are not.
//!
//! Device state, the bitmaps of disks and what other subsystems send have no length: where they end is only known by what
//! follows. A section ends with a footer, `7e` and its number, and then comes another section.

use super::wire::section;

/// The name, instance and version with which RAM's first section begins, after its number.
const RAM_START: u128 = u128::from_be_bytes([
    0,
    0,
    0,
    0,
    3,
    b'r',
    b'a',
    b'm',
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    super::wire::RAM_VERSION as u8,
]);

/// What was found, up to and with the last byte taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// RAM's first section begins: its number, and then its records.
    RamStart(u32),
    /// RAM's records.
    RamRecords {
        /// In its last section.
        last: bool,
    },
    /// The footer that was looked for, and the first byte of what may be a section.
    Section(u8),
}

/// A search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scan {
    /// The last 16 bytes, the latest lowest.
    window: u128,
    /// The section whose end is looked for, if that is known.
    section: Option<u32>,
    /// RAM's section, if it has begun.
    ram: Option<u32>,
}

impl Scan {
    /// Looks for the end of `section`, and for the beginning of RAM (of a section of it, once the first is known).
    pub(super) fn new(section: Option<u32>, ram: Option<u32>) -> Self {
        Self {
            window: u128::MAX,
            section,
            ram,
        }
    }

    /// The section whose end is looked for.
    pub(super) fn section(&self) -> Option<u32> {
        self.section
    }

    /// Takes bytes until something is found, or all.
    pub(super) fn find(&mut self, data: &[u8], taken: &mut usize) -> Option<Found> {
        while let Some(&byte) = data.get(*taken) {
            *taken += 1;
            self.window = self.window << 8 | u128::from(byte);
            let found = self.found(byte);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    #[inline]
    fn found(&self, byte: u8) -> Option<Found> {
        let footer = u128::from(section::FOOTER);
        match self.ram {
            None => {
                if self.window << 32 == RAM_START << 32 {
                    return Some(Found::RamStart((self.window >> 96) as u32));
                }
            }
            Some(ram) => {
                let kind = (self.window >> 32) as u8;
                if self.window as u32 == ram
                    && matches!(kind, section::PART | section::END)
                    && self.window >> 72 & 0xff == footer
                {
                    return Some(Found::RamRecords {
                        last: kind == section::END,
                    });
                }
            }
        }
        let begins = matches!(byte, section::EOF..=section::FULL | section::COMMAND);
        let ended = u128::from(self.section?) | footer << 32;
        (begins && self.window >> 8 & 0xff_ffff_ffff == ended).then_some(Found::Section(byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(scan: Scan, data: &[u8]) -> Option<(usize, Found)> {
        let mut whole = (scan, 0);
        let found = whole.0.find(data, &mut whole.1).map(|found| (whole.1, found));
        // Byte by byte it is the same.
        let mut parts = (scan, 0);
        let by_byte = data.chunks(1).find_map(|byte| {
            parts.1 += 1;
            parts.0.find(byte, &mut 0).map(|found| (parts.1, found))
        });
        assert_eq!(found, by_byte);
        found
    }

    #[test]
    fn the_end_of_a_section_is_found() {
        let data = b"abc\x7e\0\0\0\x07\xff\x7e\0\0\0\x07\x04\0\0\0";
        assert_eq!(find(Scan::new(Some(7), None), data), Some((15, Found::Section(4))));
        assert_eq!(find(Scan::new(Some(8), None), data), None);
    }

    #[test]
    fn a_section_of_ram_is_found_whatever_was_before() {
        let data = b"abc\x7e\0\0\0\x07\x03\0\0\0\x02";
        let found = Some((13, Found::RamRecords { last: true }));
        assert_eq!(find(Scan::new(None, Some(2)), data), found);
        assert_eq!(find(Scan::new(Some(9), Some(2)), data), found);
        assert_eq!(find(Scan::new(None, None), data), None);
    }

    #[test]
    fn the_beginning_of_ram_is_found() {
        let data = b"\x05abc\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04rest";
        assert_eq!(find(Scan::new(None, None), data), Some((21, Found::RamStart(2))));
    }
}
