//! Decoder of frames, to the bytes of a channel.

use larder_codec::batch::{self, Method};
use larder_codec::{PAGE, delta};
use thiserror::Error;

use crate::base::{Frontier, Slots, Stopped};
use crate::frame::{FrameSizes, OperationsError, OperationsReader, PageOrigin, Piece, header_after};
use crate::wire::{FRAME_PAGES_MAX, FrameHeader};

/// Reasons why a frame cannot be decoded. The session is then over: later frames may need the slots that this one
/// should have changed.
#[derive(Debug, Error)]
pub enum DecodeError {
    /// The first section, the operations, is invalid.
    #[error("frame {number}: {source}")]
    Operations {
        /// Number of the frame.
        number: u64,
        /// Error in the operations.
        source: OperationsError,
    },
    /// The method is unknown to this version.
    #[error("frame {number}: unknown method number {method}; use the same version of Larder on both hosts")]
    Method {
        /// Number of the frame.
        number: u64,
        /// Number of the method in the frame.
        method: u8,
    },
    /// The encoded pages cannot be decoded.
    #[error("frame {number}: {source}")]
    Pages {
        /// Number of the frame.
        number: u64,
        /// Error of the codec.
        source: larder_codec::batch::DecodeError,
    },
    /// A section is shorter or longer than the operations use.
    #[error("frame {number}: {section} do not fit its operations")]
    Section {
        /// Number of the frame.
        number: u64,
        /// Name of the section.
        section: &'static str,
    },
    /// The memory for old pages could not be mapped.
    #[error("there is no memory for old versions of pages: use a smaller --delta-memory")]
    NoMemory,
    /// The decoded bytes differ from the encoded ones.
    #[error("frame {number}: the decoded data has the checksum {found:#010x}, expected {expected:#010x}")]
    Checksum {
        /// Number of the frame.
        number: u64,
        /// Checksum of the decoded bytes.
        found: u32,
        /// Checksum in the frame.
        expected: u32,
    },
    /// The frame was decoded before, or is too far ahead of the others.
    #[error("frame {number} is out of order")]
    Order {
        /// Number of the frame.
        number: u64,
    },
    /// The session ends during decoding.
    #[error("the session has ended")]
    Stopped,
}

impl From<Stopped> for DecodeError {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

/// Old pages and the order in which frames change them, shared by all lanes of a session.
pub struct Bases {
    /// Old versions of pages.
    pub slots: Slots,
    /// Progress that determines when a frame may use the slots.
    pub frontier: Frontier,
}

/// Decoder of frames, one after the other; each lane has one.
pub struct FrameDecoder {
    codec: batch::Decoder,
    pages: Vec<u8>,
}

impl FrameDecoder {
    /// Creates a decoder.
    #[must_use]
    pub fn new() -> Self {
        Self { codec: batch::Decoder::new(), pages: vec![0; FRAME_PAGES_MAX * PAGE] }
    }

    /// Returns the set of methods that are decoded: bit n stands for the method with the number n.
    #[must_use]
    pub fn methods() -> u32 {
        Method::ALL.iter().fold(0, |bits, method| bits | 1 << method.number())
    }

    /// Decodes the body of a frame to its channel's bytes, which replace the content of `out`.
    ///
    /// # Errors
    /// The frame is damaged or invalid; the content of `out` is then undefined.
    pub fn decode(
        &mut self,
        header: &FrameHeader,
        body: &[u8],
        bases: &Bases,
        out: &mut Vec<u8>,
    ) -> Result<(), DecodeError> {
        let number = header.number;
        let (operations, rest) = body.split_at(header.operations_len as usize);
        let (literals, rest) = rest.split_at(header.literals_len as usize);
        let (encoded, deltas) = rest.split_at(header.pages_len as usize);
        let sizes = FrameSizes { raw: header.raw_len as usize, literals: literals.len(), slots: bases.slots.len() };
        let operations = || OperationsReader::new(operations, sizes);
        let pages = self.pages(header, operations(), encoded)?;

        bases.frontier.wait(header.after)?;
        out.clear();
        out.reserve(header.raw_len as usize);
        let mut interpreter =
            Interpreter { number, literals, pages, deltas, last_header: [0; 8], slots: &bases.slots, out };
        interpreter.run(operations())?;
        if !bases.frontier.mark_done(number) {
            return Err(DecodeError::Order { number });
        }
        let found = crc32c::crc32c(out);
        if found != header.raw_crc {
            return Err(DecodeError::Checksum { number, found, expected: header.raw_crc });
        }
        Ok(())
    }

    /// Returns the pages of the third section, decoded.
    fn pages<'a>(
        &'a mut self,
        header: &FrameHeader,
        mut operations: OperationsReader<'_>,
        encoded: &'a [u8],
    ) -> Result<&'a [u8], DecodeError> {
        let number = header.number;
        let mut count = 0;
        while let Some(piece) = operations.next_piece().map_err(|source| DecodeError::Operations { number, source })? {
            if let Piece::Page { source: PageOrigin::Plain | PageOrigin::Stored(_), .. } = piece {
                count += 1;
            }
        }
        let len = count * PAGE;
        if header.method == 0 || count == 0 {
            return if encoded.len() == len {
                Ok(encoded)
            } else {
                Err(DecodeError::Section { number, section: "its pages" })
            };
        }
        let method =
            Method::try_from(header.method).map_err(|_| DecodeError::Method { number, method: header.method })?;
        let pages = &mut self.pages[..len];
        self.codec.decode(method, encoded, pages).map_err(|source| DecodeError::Pages { number, source })?;
        Ok(pages)
    }
}

impl Default for FrameDecoder {
    fn default() -> Self {
        Self::new()
    }
}

/// Interpreter of one frame's operations.
struct Interpreter<'a> {
    number: u64,
    literals: &'a [u8],
    pages: &'a [u8],
    deltas: &'a [u8],
    /// Eight bytes before the last page.
    last_header: [u8; 8],
    slots: &'a Slots,
    out: &'a mut Vec<u8>,
}

impl<'a> Interpreter<'a> {
    fn run(&mut self, mut operations: OperationsReader<'_>) -> Result<(), DecodeError> {
        let number = self.number;
        while let Some(piece) = operations.next_piece().map_err(|source| DecodeError::Operations { number, source })? {
            match piece {
                Piece::Literal { len } => self.literal(len as usize),
                Piece::Zeros { mut header, count } => {
                    for _ in 0..count {
                        self.out.extend_from_slice(&header);
                        self.out.push(0);
                        header = header_after(header);
                    }
                }
                Piece::Page { source, follows } => {
                    if follows {
                        self.last_header = header_after(self.last_header);
                        self.out.extend_from_slice(&self.last_header);
                    }
                    self.page(source)?;
                }
            }
        }
        if self.pages.is_empty() && self.deltas.is_empty() {
            Ok(())
        } else {
            Err(DecodeError::Section { number, section: "its pages or its deltas" })
        }
    }

    /// Copies a literal. `Operations` has checked its length against the section's.
    fn literal(&mut self, len: usize) {
        let (literal, rest) = self.literals.split_at(len);
        self.literals = rest;
        self.out.extend_from_slice(literal);
        if let Some(last) = literal.last_chunk() {
            self.last_header = *last;
        }
    }

    fn page(&mut self, source: PageOrigin) -> Result<(), DecodeError> {
        match source {
            PageOrigin::Same(word) => {
                let len = self.out.len();
                self.out.resize(len + PAGE, 0);
                if word != [0; 8] {
                    for target in self.out[len..].chunks_exact_mut(8) {
                        target.copy_from_slice(&word);
                    }
                }
            }
            PageOrigin::Plain => {
                let page = self.next_page();
                self.out.extend_from_slice(page);
            }
            PageOrigin::Stored(slot) => {
                let page = self.next_page();
                self.slots.lock(slot).ok_or(DecodeError::NoMemory)?.page(slot).copy_from_slice(page);
                self.out.extend_from_slice(page);
            }
            PageOrigin::Delta(slot) => {
                let mut chunk = self.slots.lock(slot).ok_or(DecodeError::NoMemory)?;
                let page = chunk.page(slot);
                let used = delta::apply(page, self.deltas)
                    .map_err(|_| DecodeError::Section { number: self.number, section: "its deltas" })?;
                self.deltas = &self.deltas[used..];
                self.out.extend_from_slice(page);
            }
        }
        Ok(())
    }

    /// Returns the next page of the third section. The pages were counted before, so there are enough.
    fn next_page(&mut self) -> &'a [u8] {
        let (page, rest) = self.pages.split_at(PAGE);
        self.pages = rest;
        page
    }
}
