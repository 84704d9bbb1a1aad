//! Compression of memory pages, and the choice of the codec that pays off.
//!
//! Single pages, for memory that is read back one page at a time:
//!
//! ```text
//! page -> uniform_word: does it repeat one word?        -> the word
//!      -> Choice::pick: which codec pays off now?       -> none: the page unencoded
//!      -> Encoder::encode: does it fit the limit?       -> no: the page unencoded
//!      -> stored: Codec's number and the bytes
//! Choice::record receives the result of each encoding.
//! ```
//!
//! Each codec has a file of its own, with its encoder and its decoder. [`Encoder`] and [`Decoder`] hold the state of
//! all of them, and [`CodecSelector`] knows only the costs of the codecs.
//!
//! Batches of pages, for a migration:
//!
//! ```text
//! page  -> uniform_word                                       -> the word
//!       -> delta::encode, against the version last sent       -> the changed words
//! pages -> select::Class::of, Selector::pick: which method?   -> none: the pages unencoded
//!       -> batch::Encoder::encode, or accelerator::Dispatcher -> sent: Method's number and the bytes
//! Selector::record receives the result of each encoding, Selector::sent of each write.
//! ```
//!
//! [`measure`] reports the time and the remaining bytes of each method on given memory.
//!
//! Invariants:
//! - Encoded data decodes to the same pages, in this version and every later one: the numbers of [`Codec`] and
//!   [`batch::Method`] and their formats never change.
//! - No input makes a decoder panic, or read or write out of bounds. The output is written completely from the input,
//!   so that no data of an earlier page is exposed.
//! - A page is 4 KiB, and each page or batch is independent.
//! - Encoding, and decoding without an error, allocate nothing, except for memory that a codec takes at its first
//!   page or batch.
//!
//! Not included: a checksum. Damaged data may decode to a wrong page without an error, so the caller that stores or
//! sends it must ensure its integrity.
//!
//! Instructions that not every CPU has (AVX2) and libraries that not every system has (igzip, those of devices) are
//! detected at run time. Data that was encoded with them is decoded without them.

pub mod accelerator;
pub mod batch;
mod codec;
mod codec_selector;
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

pub use codec::{Codec, UnknownCodec};
pub use codec_selector::{CodecGoal, CodecSelector};
pub use decoder::{DecodeError, Decoder};
pub use encoder::Encoder;
pub use uniform::uniform_word;

/// Size of a page, in bytes.
pub const PAGE: usize = 4096;
