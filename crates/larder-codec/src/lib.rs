//! Compresses pages of memory, and knows which codec pays.
//!
//! ```text
//! page -> uniform_word: one word says all?          -> the word
//!      -> Choice::pick: which codec pays now?        -> none: the page as it is
//!      -> Encoder::encode: does it fit the limit?    -> no: the page as it is
//!      -> what is stored: Codec's number and the bytes
//! Choice::record hears of each encoding.
//! ```
//!
//! A codec has a file of its own, with its encoder and its decoder; [`Encoder`] and [`Decoder`] hold the state of all of
//! them, and [`Choice`] knows of codecs only what they cost.
//!
//! Invariants:
//! - What was encoded decodes to the same page, in this version and every later one: [`Codec`]'s numbers and the formats
//!   behind them never change.
//! - No bytes make a decoder panic, or read or write elsewhere; a page decoded is written wholly from what was stored, so
//!   that nothing of an earlier page shows through.
//! - A page is 4 KiB, and each stands for itself.
//! - Nothing is allocated for a page that encodes, or decodes without an error, but for what zstd takes at its first one.
//!
//! What is not here: a checksum. Damaged bytes may decode to a wrong page without an error; who stores them must know
//! that they are the same.

mod choice;
mod codec;
mod decoder;
mod encoder;
mod lz4;
mod uniform;
mod zstd;

pub use choice::{Choice, Goal};
pub use codec::{Codec, UnknownCodec};
pub use decoder::{DecodeError, Decoder};
pub use encoder::Encoder;
pub use uniform::uniform_word;

/// Bytes of a page.
pub const PAGE: usize = 4096;
