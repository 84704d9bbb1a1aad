//! Compresses pages of memory, and knows which codec pays.
//!
//! Pages on their own, for memory that is read back one page at a time:
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
//! Batches of pages, for a migration:
//!
//! ```text
//! page  -> uniform_word                                       -> the word
//!       -> delta::encode, against the version last sent       -> the changed words
//! pages -> select::Class::of, Selector::pick: which method?   -> none: the pages as they are
//!       -> batch::Encoder::encode, or accelerator::Dispatcher -> what is sent: Method's number and the bytes
//! Selector::record hears of each encoding, Selector::sent of each write.
//! ```
//!
//! [`measure`] says what each way takes and leaves on given memory.
//!
//! Invariants:
//! - What was encoded decodes to the same pages, in this version and every later one: [`Codec`]'s and [`batch::Method`]'s
//!   numbers and the formats behind them never change.
//! - No bytes make a decoder panic, or read or write elsewhere; what is decoded is written wholly from what was stored, so
//!   that nothing of an earlier page shows through.
//! - A page is 4 KiB, and each, or each batch, stands for itself.
//! - Nothing is allocated for what encodes, or decodes without an error, but for what a codec takes at its first page or
//!   batch.
//!
//! What is not here: a checksum. Damaged bytes may decode to a wrong page without an error; who stores or sends them must
//! know that they are the same.
//!
//! Instructions that not every processor has (AVX2) and libraries that not every system has (igzip, devices') are found at
//! run time. What is made with them is read without them.

pub mod accelerator;
pub mod batch;
mod choice;
mod codec;
mod decoder;
pub mod delta;
mod encoder;
mod isal;
mod library;
mod lz4;
pub mod measure;
pub mod select;
mod uniform;
mod zstd;

pub use choice::{Choice, Goal};
pub use codec::{Codec, UnknownCodec};
pub use decoder::{DecodeError, Decoder};
pub use encoder::Encoder;
pub use uniform::uniform_word;

/// Bytes of a page.
pub const PAGE: usize = 4096;
