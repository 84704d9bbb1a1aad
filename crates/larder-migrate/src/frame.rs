//! Sections of a frame, and the operations that turn them into the bytes of a channel.
//!
//! The first section is a list of operations. Each is a byte, a count, and operands:
//!
//! ```text
//! 1 LITERAL  n bytes from the second section
//! 2 SAME     n pages, each filled with the 8 bytes that follow the count
//! 3 PLAIN    n pages from the third section
//! 4 STORED   n pages from the third section, each also copied into its slot
//! 5 DELTA    n pages, each its slot's page changed by the next delta of the fourth section, and copied back
//! 6 ZEROS    n records of 9 bytes that stand for zero pages in QEMU's main channel: the 8 bytes that follow the
//!            count, as a big-endian number to which each record adds 4096, and a byte 0
//! +0x80      before each of the pages come the 8 header bytes of a page in QEMU's main channel: those before the
//!            last page of this frame, as a big-endian number, plus 4096
//! ```
//!
//! Counts are LEB128. Slots are too, each as the zigzag difference to the previous slot (initially 0).
//!
//! Invariants: [`OperationsReader`] checks every piece against the sizes in [`FrameSizes`], so that executing the
//! pieces cannot overrun; [`OperationsReader`] reads every frame that [`OperationsWriter`] makes.

use larder_codec::PAGE;
use thiserror::Error;

use crate::wire::FRAME_PAGES_MAX;

/// Piece of a channel: pages, or bytes that belong to none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Bytes that belong to no page.
    Literal {
        /// Number of bytes.
        len: u32,
    },
    /// Consecutive zero-page records of QEMU.
    Zeros {
        /// First 8 bytes of the first record.
        header: [u8; 8],
        /// Number of records.
        count: u32,
    },
    /// One page.
    Page {
        /// Source of the page's bytes.
        source: PageOrigin,
        /// The 8 bytes before the page are computed from those before the last page.
        follows: bool,
    },
}

/// Source of a page's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOrigin {
    /// Uniform page of this word, in the byte order of the page.
    Same([u8; 8]),
    /// Next page of the third section.
    Plain,
    /// Next page of the third section, which is also copied into this slot.
    Stored(u32),
    /// This slot's page changed by the next delta; the slot then holds the result.
    Delta(u32),
}

impl PageOrigin {
    const fn number(self) -> u8 {
        match self {
            Self::Same(_) => 2,
            Self::Plain => 3,
            Self::Stored(_) => 4,
            Self::Delta(_) => 5,
        }
    }
}

const LITERAL: u8 = 1;
const ZEROS: u8 = 6;
/// Bytes of a zero-page record.
pub const ZERO_RECORD: usize = 9;
const FOLLOWS: u8 = 0x80;

/// Writer of operations, which merges like pages into one operation.
#[derive(Default)]
pub struct OperationsWriter {
    bytes: Vec<u8>,
    run: Option<Run>,
    previous_slot: u32,
}

struct Run {
    code: u8,
    word: [u8; 8],
    count: u32,
    slots: [u32; FRAME_PAGES_MAX],
}

impl OperationsWriter {
    /// Discards the operations and keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.run = None;
        self.previous_slot = 0;
    }

    /// Appends a piece.
    pub fn push(&mut self, piece: Piece) {
        match piece {
            Piece::Literal { len } => {
                self.end_run();
                self.bytes.push(LITERAL);
                put_varint(&mut self.bytes, len);
            }
            Piece::Zeros { header, count } => {
                self.end_run();
                self.bytes.push(ZEROS);
                put_varint(&mut self.bytes, count);
                self.bytes.extend_from_slice(&header);
            }
            Piece::Page { source, follows } => self.push_page(source, follows),
        }
    }

    /// Returns all operations, encoded.
    pub fn finish(&mut self) -> &[u8] {
        self.end_run();
        &self.bytes
    }

    fn push_page(&mut self, source: PageOrigin, follows: bool) {
        let code = source.number() | if follows { FOLLOWS } else { 0 };
        let word = if let PageOrigin::Same(word) = source { word } else { [0; 8] };
        let joins = self
            .run
            .as_ref()
            .is_some_and(|run| run.code == code && run.word == word && (run.count as usize) < FRAME_PAGES_MAX);
        if !joins {
            self.end_run();
            self.run = Some(Run { code, word, count: 0, slots: [0; FRAME_PAGES_MAX] });
        }
        let run = self.run.as_mut().expect("started above");
        if let PageOrigin::Stored(slot) | PageOrigin::Delta(slot) = source {
            run.slots[run.count as usize] = slot;
        }
        run.count += 1;
    }

    fn end_run(&mut self) {
        let Some(run) = self.run.take() else { return };
        self.bytes.push(run.code);
        put_varint(&mut self.bytes, run.count);
        match run.code & !FOLLOWS {
            2 => self.bytes.extend_from_slice(&run.word),
            4 | 5 => {
                for &slot in &run.slots[..run.count as usize] {
                    let difference = i64::from(slot) - i64::from(self.previous_slot);
                    put_varint_64(&mut self.bytes, ((difference << 1) ^ (difference >> 63)) as u64);
                    self.previous_slot = slot;
                }
            }
            _ => {}
        }
    }
}

fn put_varint(out: &mut Vec<u8>, value: u32) {
    put_varint_64(out, value.into());
}

fn put_varint_64(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Error of operations that are damaged or do not fit their frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the operations of a frame, at byte {at}: {why}")]
pub struct OperationsError {
    at: usize,
    why: &'static str,
}

/// Sizes of a frame, which its operations must use up exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameSizes {
    /// Bytes of the channel.
    pub raw: usize,
    /// Bytes of literals.
    pub literals: usize,
    /// Number of slots of the session.
    pub slots: u32,
}

/// Reader of operations, piece by piece, which checks that they use up the frame's sizes.
pub struct OperationsReader<'a> {
    bytes: &'a [u8],
    at: usize,
    remaining: FrameSizes,
    pages: usize,
    previous_slot: u32,
    /// Rest of the current operation.
    code: u8,
    word: [u8; 8],
    count: u32,
    /// Set once 8 bytes have been seen that the bytes before a page can follow from.
    has_header: bool,
}

impl<'a> OperationsReader<'a> {
    /// Creates a reader of the operations of a frame of these sizes.
    #[must_use]
    pub const fn new(bytes: &'a [u8], sizes: FrameSizes) -> Self {
        Self {
            bytes,
            at: 0,
            remaining: sizes,
            pages: 0,
            previous_slot: 0,
            code: 0,
            word: [0; 8],
            count: 0,
            has_header: false,
        }
    }

    /// Returns the next piece, or `None` at the end, when all sizes are used up.
    ///
    /// # Errors
    /// The operations are damaged, or do not fit the sizes.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, OperationsError> {
        if self.count == 0 {
            if self.at == self.bytes.len() {
                return if self.remaining.raw == 0 && self.remaining.literals == 0 {
                    Ok(None)
                } else {
                    Err(self.error("the operations end before the frame"))
                };
            }
            if let Some(piece) = self.begin_operation()? {
                return Ok(Some(piece));
            }
        }
        self.count -= 1;
        self.page().map(Some)
    }

    /// Begins an operation; returns its piece if it is one of bytes that belong to no page.
    fn begin_operation(&mut self) -> Result<Option<Piece>, OperationsError> {
        self.code = self.byte()?;
        let count = self.varint()?;
        if count == 0 || count > u64::from(u32::MAX) {
            return Err(self.error("a count is 0 or too large"));
        }
        if self.code == LITERAL {
            let len = count as usize;
            if len > self.remaining.raw || len > self.remaining.literals {
                return Err(self.error("a literal is longer than the remaining bytes"));
            }
            self.remaining.raw -= len;
            self.remaining.literals -= len;
            self.has_header |= len >= 8;
            return Ok(Some(Piece::Literal { len: len as u32 }));
        }
        if self.code == ZEROS {
            let len = (count as usize).saturating_mul(ZERO_RECORD);
            if len > self.remaining.raw {
                return Err(self.error("more zero-page records than fit in the remaining bytes"));
            }
            self.remaining.raw -= len;
            return Ok(Some(Piece::Zeros { header: self.word()?, count: count as u32 }));
        }
        if !(2..=5).contains(&(self.code & !FOLLOWS)) {
            return Err(self.error("unknown operation"));
        }
        if self.code & !FOLLOWS == 2 {
            self.word = self.word()?;
        }
        self.count = count as u32;
        Ok(None)
    }

    fn page(&mut self) -> Result<Piece, OperationsError> {
        let follows = self.code & FOLLOWS != 0;
        let len = PAGE + if follows { 8 } else { 0 };
        if len > self.remaining.raw || self.pages == FRAME_PAGES_MAX {
            return Err(self.error("more pages than the frame has"));
        }
        if follows && !self.has_header {
            return Err(self.error("there are no earlier bytes to compute the page's header from"));
        }
        self.remaining.raw -= len;
        self.pages += 1;
        let source = match self.code & !FOLLOWS {
            2 => PageOrigin::Same(self.word),
            3 => PageOrigin::Plain,
            4 => PageOrigin::Stored(self.slot()?),
            _ => PageOrigin::Delta(self.slot()?),
        };
        Ok(Piece::Page { source, follows })
    }

    fn slot(&mut self) -> Result<u32, OperationsError> {
        let coded = self.varint()?;
        let difference = (coded >> 1) as i64 ^ -((coded & 1) as i64);
        let slot = i64::from(self.previous_slot)
            .checked_add(difference)
            .and_then(|slot| u32::try_from(slot).ok())
            .filter(|&slot| slot < self.remaining.slots)
            .ok_or(self.error("no such slot"))?;
        self.previous_slot = slot;
        Ok(slot)
    }

    fn word(&mut self) -> Result<[u8; 8], OperationsError> {
        let word = self.bytes[self.at..].first_chunk().ok_or(self.error("cut off"))?;
        self.at += 8;
        Ok(*word)
    }

    fn byte(&mut self) -> Result<u8, OperationsError> {
        let byte = *self.bytes.get(self.at).ok_or(self.error("cut off"))?;
        self.at += 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, OperationsError> {
        let mut value = 0;
        for shift in (0..35).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.error("a number is too long"))
    }

    const fn error(&self, why: &'static str) -> OperationsError {
        OperationsError { at: self.at, why }
    }
}

/// Returns the 8 bytes before a page, computed from those before the last page.
#[must_use]
pub const fn header_after(before: [u8; 8]) -> [u8; 8] {
    u64::from_be_bytes(before).wrapping_add(PAGE as u64).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SLOTS: u32 = u32::MAX;

    fn any_source() -> impl Strategy<Value = PageOrigin> {
        prop_oneof![
            prop_oneof![Just([0; 8]), any::<[u8; 8]>()].prop_map(PageOrigin::Same),
            Just(PageOrigin::Plain),
            (0..SLOTS).prop_map(PageOrigin::Stored),
            (0..200_u32).prop_map(PageOrigin::Stored),
            (0..SLOTS).prop_map(PageOrigin::Delta),
        ]
    }

    fn any_piece() -> impl Strategy<Value = Piece> {
        prop_oneof![
            (1..3000_u32).prop_map(|len| Piece::Literal { len }),
            (any::<[u8; 8]>(), 1..3000_u32).prop_map(|(header, count)| Piece::Zeros { header, count }),
            (any_source(), any::<bool>()).prop_map(|(source, follows)| Piece::Page { source, follows }),
        ]
    }

    fn sizes_of(pieces: &[Piece]) -> FrameSizes {
        let mut sizes = FrameSizes { raw: 0, literals: 0, slots: SLOTS };
        for piece in pieces {
            match *piece {
                Piece::Literal { len } => {
                    sizes.raw += len as usize;
                    sizes.literals += len as usize;
                }
                Piece::Zeros { count, .. } => sizes.raw += count as usize * ZERO_RECORD,
                Piece::Page { follows, .. } => sizes.raw += PAGE + if follows { 8 } else { 0 },
            }
        }
        sizes
    }

    fn read(bytes: &[u8], sizes: FrameSizes) -> Result<Vec<Piece>, OperationsError> {
        let mut operations = OperationsReader::new(bytes, sizes);
        let mut pieces = Vec::new();
        while let Some(piece) = operations.next_piece()? {
            pieces.push(piece);
        }
        Ok(pieces)
    }

    proptest! {
        /// Written operations are read back as the same pieces, and only with the exact sizes of their frame.
        #[test]
        fn written_operations_are_read_back(mut pieces in prop::collection::vec(any_piece(), 1..FRAME_PAGES_MAX)) {
            pieces.insert(0, Piece::Literal { len: 8 });
            let mut writer = OperationsWriter::default();
            for &piece in &pieces {
                writer.push(piece);
            }
            let bytes = writer.finish().to_vec();
            prop_assert_eq!(read(&bytes, sizes_of(&pieces)), Ok(pieces.clone()));
            writer.clear();
            prop_assert!(writer.finish().is_empty());
            // A frame with one byte more or less of anything is invalid.
            let mut other = sizes_of(&pieces);
            other.raw += 1;
            prop_assert!(read(&bytes, other).is_err());
            other.raw -= 2;
            prop_assert!(read(&bytes, other).is_err());
            let mut other = sizes_of(&pieces);
            other.literals += 1;
            prop_assert!(read(&bytes, other).is_err());
        }

        /// Operations made of random bytes never yield more than the frame's sizes allow.
        #[test]
        fn operations_never_exceed_their_frame(bytes in prop::collection::vec(any::<u8>(), 0..200), raw in 0..100_000_usize, literals in 0..5000_usize, slots in 0..100_u32) {
            let Ok(pieces) = read(&bytes, FrameSizes { raw, literals, slots }) else { return Ok(()) };
            let used = sizes_of(&pieces);
            prop_assert_eq!((used.raw, used.literals), (raw, literals));
            for piece in pieces {
                if let Piece::Page { source: PageOrigin::Stored(slot) | PageOrigin::Delta(slot), .. } = piece {
                    prop_assert!(slot < slots);
                }
            }
        }
    }

    #[test]
    fn runs_of_like_pages_encode_compactly() {
        let mut writer = OperationsWriter::default();
        writer.push(Piece::Literal { len: 8 });
        for at in 0..FRAME_PAGES_MAX {
            let source = PageOrigin::Same([7; 8]);
            writer.push(Piece::Page { source, follows: at != 0 });
        }
        assert!(writer.finish().len() < 24);
        writer.clear();
        for at in 0..FRAME_PAGES_MAX as u32 {
            let source = PageOrigin::Stored(100_000 + at);
            writer.push(Piece::Page { source, follows: false });
        }
        assert!(writer.finish().len() < 70);
    }
}
