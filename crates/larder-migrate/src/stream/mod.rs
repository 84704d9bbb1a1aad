//! Where the pages of guest memory lie in QEMU's migration stream.
//!
//! ```text
//! a channel's bytes, as they arrive -> Parser::next -> Literal   headers, device state: carried as they are
//!                                                     Pages     the content of pages
//!                                                     Record    a header that the page's number says, and its page
//!                                                     Zeros     records that say no more than that pages are zero
//!                                                     NeedMore  the next page is not there wholly
//!                                      Parser::pass      what is there must go now: it is carried as it is
//! ```
//!
//! A channel has a parser; the parsers of a migration share [`Blocks`], which gives RAM blocks their numbers. The
//! formats, those of QEMU 7.2 to 10.2, are in `docs/migration-stream.md`.
//!
//! Invariants:
//! - What is told is a hint. The bytes of all steps, one after the other, are the channel's bytes, whatever they say; a
//!   [`Step::Record`] and [`Step::Zeros`] are told only of bytes that [`page_header`] and [`zero_record`] make again.
//! - Each byte is looked at once, by `next` or by `pass`, and counts the same for the parser's place in the stream. So
//!   a channel can be emptied at any byte, in the midst of a page too, without loss of what follows.
//! - Nothing that the bytes say makes a parser panic, allocate (but for a new block: [`Blocks::MAX`] at most), or ask for
//!   more than [`Parser::LOOKAHEAD`] bytes.
//!
//! It never fails: what it does not understand is literal, as is all that follows, up to a place that it knows again for
//! certain. [`Facts`] tell what it has come across.

mod blocks;
mod configuration;
mod facts;
mod held;
mod main_channel;
mod multifd;
mod parser;
mod records;
mod scan;
mod units;
mod wire;

pub use blocks::{Block, BlockId, Blocks};
pub use facts::{Channel, Facts, Machine, Phase};
pub use parser::{Parser, Step};
pub use units::PageIndex;
pub use wire::{PAGE_HEADER, ZERO_RECORD, page_header, zero_record};
