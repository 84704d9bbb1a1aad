//! Mappings of a process (`/proc/PID/maps`, proc(5)).

use std::fs;
use std::io;
use std::ops::Range;

use rustix::process::Pid;

use super::MappingLocation;

/// A mapping, or several that are adjacent both in the process and in their file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Mapping {
    /// Address range.
    pub(super) range: Range<u64>,
    /// Address range of the first of the mappings, which is its name in map_files.
    pub(super) first_range: Range<u64>,
    /// Permissions, as in `rw-p`.
    pub(super) permissions: [u8; 4],
    /// Offset in the file, in bytes.
    pub(super) offset: u64,
    /// Device number of the file, as in fstat(2).
    pub(super) device: u64,
    /// Inode number, or zero without a file.
    pub(super) inode: u64,
    /// Path as the kernel writes it: any bytes, with `\012` for a newline.
    pub(super) path: Vec<u8>,
}

impl Mapping {
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.splitn(6, |byte| *byte == b' ');
        let mut word = || words.next();
        let text = |bytes| std::str::from_utf8(bytes).ok();
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = text(word()?)?.split_once('-')?;
        let permissions = word()?.try_into().ok()?;
        let offset = hex(text(word()?)?)?;
        let (major, minor) = text(word()?)?.split_once(':')?;
        let device = |text| u32::from_str_radix(text, 16).ok();
        let device = rustix::fs::makedev(device(major)?, device(minor)?);
        let inode = text(word()?)?.parse().ok()?;
        let range = hex(start)?..hex(end)?;
        if range.is_empty() || offset.checked_add(range.end - range.start).is_none() {
            return None;
        }
        Some(Self {
            first_range: range.clone(),
            range,
            permissions,
            offset,
            device,
            inode,
            // Blanks are padding; a path begins with another character.
            path: word().unwrap_or_default().trim_ascii_start().to_vec(),
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    pub(super) fn location(&self) -> MappingLocation {
        MappingLocation {
            address: self.range.start,
            offset: self.offset,
            bytes: self.bytes(),
            device: self.device,
            inode: self.inode,
        }
    }

    pub(super) fn is_writable(&self) -> bool {
        self.permissions.starts_with(b"rw")
    }

    pub(super) fn is_shared(&self) -> bool {
        self.permissions[3] == b's'
    }

    /// Returns true if this mapping has any bytes of the file at `location`.
    pub(super) fn overlaps(&self, location: &MappingLocation) -> bool {
        (self.device, self.inode) == (location.device, location.inode)
            && self.offset < location.offset + location.bytes
            && location.offset < self.offset + self.bytes()
    }

    /// Returns true if the mapping may be private memory of a guest: not a heap, a stack, or code generated at run
    /// time (TCG).
    pub(super) fn may_be_private_memory(&self) -> bool {
        self.permissions == *b"rw-p" && self.path != b"[heap]" && self.path != b"[stack]"
    }

    /// Returns the name of the file for messages; for a memfd, its name without a prefix.
    pub(super) fn name(&self) -> String {
        let path = self.path.strip_suffix(b" (deleted)").unwrap_or(&self.path);
        super::printable(path.strip_prefix(b"/memfd:").unwrap_or(path))
    }

    /// Returns true if the file is a memfd whose name begins with `prefix`.
    pub(super) fn is_memfd(&self, prefix: &str) -> bool {
        let name = self.path.strip_prefix(b"/memfd:");
        name.is_some_and(|name| name.starts_with(prefix.as_bytes()))
    }

    /// Extends this mapping by `next` if it is adjacent. The kernel splits a mapping when a part of it gets another
    /// flag (madvise(2)), which does not matter here.
    fn join(&mut self, next: &Self) -> bool {
        let is_adjacent = self.range.end == next.range.start
            && (self.permissions, self.device, self.inode) == (next.permissions, next.device, next.inode)
            && self.path == next.path
            && self.inode != 0
            && self.offset + self.bytes() == next.offset;
        if is_adjacent {
            self.range.end = next.range.end;
        }
        is_adjacent
    }
}

/// Parses `maps`, and returns the mappings in rising order. Skips invalid lines.
pub(super) fn parse(maps: &[u8]) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for mapping in maps.split(|byte| *byte == b'\n').filter_map(Mapping::parse) {
        if !found.last_mut().is_some_and(|last| last.join(&mapping)) {
            found.push(mapping);
        }
    }
    found
}

/// Reads all mappings of `pid`.
///
/// # Errors
/// Errors of open(2) and read(2): `EACCES` without permission, `ENOENT` or `ESRCH` if the process has ended.
pub(super) fn read(pid: Pid) -> io::Result<Vec<Mapping>> {
    Ok(parse(&fs::read(format!("/proc/{pid}/maps"))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(mapping: &Mapping) -> Vec<u8> {
        let (major, minor) = (rustix::fs::major(mapping.device), rustix::fs::minor(mapping.device));
        let mut line = format!(
            "{:08x}-{:08x} {} {:08x} {major:02x}:{minor:02x} {} ",
            mapping.range.start,
            mapping.range.end,
            std::str::from_utf8(&mapping.permissions).unwrap(),
            mapping.offset,
            mapping.inode
        )
        .into_bytes();
        if !mapping.path.is_empty() {
            line.resize(line.len().max(73), b' ');
            line.extend(&mapping.path);
        }
        line
    }

    prop_compose! {
        fn mappings()(
            start in 1u64..1 << 34, pages in 1u64..1 << 34, offset in 0u64..1 << 40, major in 0u32..4096,
            minor in 0u32..1 << 20, inode: u64, write: bool, shared: bool,
            path in proptest::collection::vec(any::<u8>().prop_filter("a newline", |byte| *byte != b'\n'), 0..80),
        ) -> Mapping {
            let range = start << 12..(start + pages) << 12;
            let mut name = path;
            if !name.is_empty() {
                name.insert(0, b'/');
            }
            Mapping {
                first_range: range.clone(),
                range,
                permissions: [b'r', if write { b'w' } else { b'-' }, b'-', if shared { b's' } else { b'p' }],
                offset: offset << 12,
                device: rustix::fs::makedev(major, minor),
                inode,
                path: name,
            }
        }
    }

    proptest! {
        #[test]
        fn maps_line_round_trips(mapping in mappings()) {
            prop_assert_eq!(Mapping::parse(&line(&mapping)), Some(mapping));
        }

        #[test]
        fn parser_accepts_arbitrary_bytes(bytes: Vec<u8>, mut mapping in mappings(), at: prop::sample::Index) {
            parse(&bytes);
            mapping.path = bytes.clone();
            let mut text = line(&mapping);
            let at = at.index(text.len());
            text.splice(at..at, bytes);
            for mapping in parse(&text) {
                mapping.name();
                mapping.location();
                prop_assert!(mapping.bytes() > 0);
            }
        }

        #[test]
        fn split_mapping_is_joined(mapping in mappings(), at in 1u64..1 << 34) {
            prop_assume!(mapping.inode != 0 && at << 12 < mapping.bytes());
            let (mut left, mut right) = (mapping.clone(), mapping.clone());
            left.range.end = left.range.start + (at << 12);
            right.range.start = left.range.end;
            right.offset += at << 12;
            let found = parse(&[line(&left), line(&right)].join(&b'\n'));
            prop_assert_eq!(found.len(), 1);
            prop_assert_eq!(found[0].location(), mapping.location());
            prop_assert_eq!(&found[0].first_range, &left.range);
        }
    }

    #[test]
    fn mapping_name_omits_kernel_additions() {
        let name = |path: &str| parse(format!("1000-2000 rw-s 0 00:01 7 {path}").as_bytes())[0].name();
        assert_eq!(name("   /memfd:memory-backend-memfd (deleted)"), "memory-backend-memfd");
        assert_eq!(name("/dev/shm/a b\\012c (deleted)"), "/dev/shm/a b\\012c");
        assert_eq!(name("/dev/shm/\u{1b}[2J"), "/dev/shm/\u{fffd}[2J");
    }
}
