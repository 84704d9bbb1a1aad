//! Search for a known structure in bytes that are not parsed.
//!
//! Device state, the bitmaps of disks and the data of other subsystems have no length; only what follows shows where
//! they end. A section ends with a footer, `7e` and its number, and then comes another section.

use super::wire::section;

/// Name, instance and version at the beginning of RAM's first section, after its number.
const RAM_START: u128 =
    u128::from_be_bytes([0, 0, 0, 0, 3, b'r', b'a', b'm', 0, 0, 0, 0, 0, 0, 0, super::wire::RAM_VERSION as u8]);

/// Structure found by a search. It ends with the last byte taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ScanMatch {
    /// Beginning of RAM's first section, with its number; its records follow.
    RamStart(u32),
    /// RAM's records.
    RamRecords {
        /// True if they are in its last section.
        last: bool,
    },
    /// Footer of the section, and the first byte of what may be the next section.
    Section(u8),
}

/// Search state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scan {
    /// Last 16 bytes, the latest in the lowest bits.
    window: u128,
    /// Section whose end is searched for, if known.
    section: Option<u32>,
    /// RAM's section, if it has begun.
    ram: Option<u32>,
}

impl Scan {
    /// Starts a search for the end of `section`, and for RAM's first section (or the next one, once `ram` is known).
    pub(super) fn new(section: Option<u32>, ram: Option<u32>) -> Self {
        Self { window: u128::MAX, section, ram }
    }

    /// Returns the section whose end is searched for.
    pub(super) fn section(&self) -> Option<u32> {
        self.section
    }

    /// Takes bytes until something is found, or all.
    pub(super) fn find(&mut self, data: &[u8], taken: &mut usize) -> Option<ScanMatch> {
        while let Some(&byte) = data.get(*taken) {
            *taken += 1;
            self.window = self.window << 8 | u128::from(byte);
            let found = self.match_at(byte);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    #[inline]
    fn match_at(&self, byte: u8) -> Option<ScanMatch> {
        let footer = u128::from(section::FOOTER);
        match self.ram {
            None => {
                if self.window << 32 == RAM_START << 32 {
                    return Some(ScanMatch::RamStart((self.window >> 96) as u32));
                }
            }
            Some(ram) => {
                let kind = (self.window >> 32) as u8;
                if self.window as u32 == ram
                    && matches!(kind, section::PART | section::END)
                    && self.window >> 72 & 0xff == footer
                {
                    return Some(ScanMatch::RamRecords { last: kind == section::END });
                }
            }
        }
        let begins = matches!(byte, section::EOF..=section::FULL | section::COMMAND);
        let ended = u128::from(self.section?) | footer << 32;
        (begins && self.window >> 8 & 0xff_ffff_ffff == ended).then_some(ScanMatch::Section(byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(scan: Scan, data: &[u8]) -> Option<(usize, ScanMatch)> {
        let mut at_once = (scan, 0);
        let found = at_once.0.find(data, &mut at_once.1).map(|found| (at_once.1, found));
        // The search byte by byte gives the same result.
        let mut parts = (scan, 0);
        let by_byte = data.chunks(1).find_map(|byte| {
            parts.1 += 1;
            parts.0.find(byte, &mut 0).map(|found| (parts.1, found))
        });
        assert_eq!(found, by_byte);
        found
    }

    #[test]
    fn scan_finds_section_end() {
        let data = b"abc\x7e\0\0\0\x07\xff\x7e\0\0\0\x07\x04\0\0\0";
        assert_eq!(find(Scan::new(Some(7), None), data), Some((15, ScanMatch::Section(4))));
        assert_eq!(find(Scan::new(Some(8), None), data), None);
    }

    #[test]
    fn scan_finds_ram_section() {
        let data = b"abc\x7e\0\0\0\x07\x03\0\0\0\x02";
        let found = Some((13, ScanMatch::RamRecords { last: true }));
        assert_eq!(find(Scan::new(None, Some(2)), data), found);
        assert_eq!(find(Scan::new(Some(9), Some(2)), data), found);
        assert_eq!(find(Scan::new(None, None), data), None);
    }

    #[test]
    fn scan_finds_first_ram_section() {
        let data = b"\x05abc\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04rest";
        assert_eq!(find(Scan::new(None, None), data), Some((21, ScanMatch::RamStart(2))));
    }
}
