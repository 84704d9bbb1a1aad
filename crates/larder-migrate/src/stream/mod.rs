//! Parser of QEMU's migration stream, which finds the pages of guest memory in it.
//!
//! ```text
//! a channel's bytes, as they arrive -> Parser::next -> Literal   headers, device state: carried unchanged
//!                                                      Pages     contents of pages
//!                                                      Record    a header implied by the page's number, and its page
//!                                                      Zeros     records that only state that pages are zero
//!                                                      NeedMore  the next page is incomplete
//!                                      Parser::pass    the bytes cannot wait: they are carried unchanged
//! ```
//!
//! Each channel has a parser. The parsers of a migration share [`Blocks`], which numbers the RAM blocks. The formats,
//! those of QEMU 7.2 to 10.2, are in `docs/migration-stream.md`.
//!
//! Invariants:
//! - Steps are hints. The bytes of all steps, one after the other, are the channel's bytes, whatever the steps are. A
//!   [`ParseStep::Record`] or [`ParseStep::Zeros`] is reported only for bytes that [`page_header`] and [`zero_record`]
//!   reproduce.
//! - Each byte is parsed once, by `next` or by `pass`, and both advance the parser alike. So a channel can be emptied
//!   at any byte, even inside a page, without losing what follows.
//! - No input makes a parser panic, allocate (except for a new block: at most [`Blocks::MAX`]), or ask for more than
//!   [`Parser::LOOKAHEAD`] bytes.
//!
//! The parser never fails. Bytes that it does not understand are literal, and so are all that follow until it
//! recognises a structure with certainty. [`StreamFacts`] record what it has found.

mod blocks;
mod configuration;
mod facts;
mod main_channel;
mod multifd;
mod parser;
mod partial;
mod records;
mod scan;
mod units;
mod wire;

pub use blocks::{BlockId, Blocks, RamBlock};
pub use facts::{ChannelKind, MachineType, StreamFacts, StreamPhase};
pub use parser::{ParseStep, Parser};
pub use units::PageIndex;
pub use wire::{PAGE_HEADER, ZERO_RECORD, page_header, zero_record};
