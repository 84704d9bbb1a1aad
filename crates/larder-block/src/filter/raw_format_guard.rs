//! Keeps a raw disk whose format was guessed from becoming another format's image.
//!
//! The image's format was not specified as raw: the image only does not begin like any other format. Its guest may
//! write any data, and so could turn the first sector into the header of another format. The next program that opens
//! the image would then trust the header, and follow a backing file's name that the guest chose to any file of the
//! host. Such a write fails. QEMU does the same with raw images that it probes (`block/raw-format.c`).

use std::cell::Cell;
use std::rc::Rc;

use crate::buffer::WriteBuf;
use crate::device::{BlockDevice, Io, WriteFlags, check_request};
use crate::error::{Failure, IoError, IoResult, Operation};
use crate::filter::Filter;
use crate::units::{ByteOffset, ByteRange};

/// The number of bytes that are checked. A request covers all of them or none.
const SECTOR: usize = 512;

/// A raw device whose first sector never gets the header of another format. The lower device must not begin with such
/// a header. All promises are the lower device's.
pub struct RawFormatGuard {
    lower: Rc<dyn BlockDevice>,
    probe_format: FormatProbe,
    /// The warning was logged.
    has_warned: Cell<bool>,
}

/// A function that returns the format, other than raw, whose images begin with the given bytes.
pub type FormatProbe = fn(&[u8]) -> Option<&'static str>;

impl RawFormatGuard {
    /// Creates a layer that keeps `lower` from beginning like an image of any format that `probe_format` knows.
    ///
    /// # Panics
    /// If `lower` has blocks smaller than a sector: a header could be put together from several writes.
    pub fn new(lower: Rc<dyn BlockDevice>, probe_format: FormatProbe) -> Self {
        assert!(lower.geometry().block_size as usize >= SECTOR);
        Self { lower, probe_format, has_warned: Cell::new(false) }
    }

    fn write_first_sector<'a>(&'a self, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = ByteOffset::ZERO.range(buffer.byte_len());
        if let Err(error) = check_request(self.lower.name(), &self.lower.geometry(), Operation::Write, range) {
            return Io::ready(Err(error));
        }
        // The checked copy is written, because a guest can change its memory in between.
        let mut sector = [0; SECTOR];
        buffer.copy_to_slice(&mut sector);
        if let Err(error) = self.check_first_sector(range, &sector) {
            return Io::ready(Err(error));
        }
        Io::task(async move {
            self.lower.write(ByteOffset::ZERO, WriteBuf::new(&sector), flags).await?;
            match buffer.skip(SECTOR) {
                rest if rest.is_empty() => Ok(()),
                rest => self.lower.write(ByteOffset::new(SECTOR as u64), rest, flags).await,
            }
        })
    }

    /// Refuses a write to `range` that would change the first sector to `sector`, if that is a header.
    fn check_first_sector(&self, range: ByteRange, sector: &[u8]) -> IoResult {
        let Some(format) = (self.probe_format)(sector) else {
            return Ok(());
        };
        self.warn_once(format);
        let failure = Failure::Os(libc::EPERM);
        Err(IoError::new(self.lower.name(), Operation::Write, range, failure))
    }

    fn warn_once(&self, format: &str) {
        if !self.has_warned.replace(true) {
            tracing::warn!(
                "{}: a write that would give the disk the header of a {format} image was refused, because its format was not \
                 specified; if the disk is to contain such an image, specify its format: raw",
                self.lower.name()
            );
        }
    }
}

impl Filter for RawFormatGuard {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn may_reject_content(&self, range: ByteRange) -> bool {
        (range.start == ByteOffset::ZERO && !range.is_empty()) || self.lower.may_reject_content(range)
    }

    fn check_content(&self, start: ByteOffset, buffer: WriteBuf<'_>) -> IoResult {
        if start == ByteOffset::ZERO && buffer.len() >= SECTOR {
            let mut sector = [0; SECTOR];
            buffer.copy_to_slice(&mut sector);
            self.check_first_sector(start.range(buffer.byte_len()), &sector)?;
        }
        self.lower.check_content(start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        // Requests cover whole blocks: one that begins later does not include the first sector, or fails.
        if start == ByteOffset::ZERO && !buffer.is_empty() {
            return self.write_first_sector(buffer, flags);
        }
        self.lower.write(start, buffer, flags)
    }
}
