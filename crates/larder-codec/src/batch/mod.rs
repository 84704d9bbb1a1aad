//! Batches of up to 64 pages, which a migration compresses as one: a codec finds in 256 KiB what it does not see in 4, and
//! starts once.
//!
//! ```text
//! pages, in one run or several -> Encoder::encode: does it fit the limit? -> no: the pages as they are
//!                              -> on the wire: Method's number, the count of pages, the bytes
//! bytes -> Decoder::decode -> as many pages
//! ```
//!
//! "None", pages as they are, is no method: it is what a caller sends when it has picked none or when nothing was saved.
//! Pages of one word ([`crate::uniform_word`]) and pages of which an earlier version was sent ([`crate::delta`]) are told
//! in fewer bytes before a batch is made of the others.
//!
//! How much a batch is worth, by `examples/batches`; ratio, and CPU seconds for a GiB to encode and to decode:
//!
//! ```text
//! pages   text, zstd           programs, lz4        heap, deflate (igzip)
//!     1   2.44  3.37  1.46     1.65  1.42  0.33     2.48  5.64  2.46
//!     4   2.72  3.14  0.90     1.73  1.49  0.31     2.62  3.04  1.81
//!    16   2.95  2.75  0.67     1.79  1.56  0.27     2.68  2.28  1.55
//!    32   3.00  2.78  0.61     1.76  1.29  0.25     2.69  2.13  1.48
//!    64   3.11  2.92  0.62     1.77  1.30  0.24     2.70  2.05  1.45
//! ```
//!
//! 16 pages have most of it. 64 give zstd and deflate up to 10 % more, LZ4 from 2 % more to 8 % less (from 64 KiB on its
//! table has half as many places), for as much CPU, give or take a tenth, and a quarter of the calls.
//!
//! Invariants:
//! - What was encoded decodes to the same pages, in this version and every later one, on a machine with other libraries
//!   and other instructions: [`Method`]'s numbers and the formats behind them never change.
//! - No bytes make a decoder panic, or read or write elsewhere; what it makes is written wholly from those bytes, so that
//!   nothing that lay there before shows through.
//! - A batch stands for itself, and what is made of it does not depend on earlier ones.
//! - Nothing is allocated for a batch once each method in use has seen one of 64 pages; but zstd gives memory back, and
//!   takes it again later, when a long row of batches needs less than a third of it.
//!
//! What is not here: a checksum, see [`crate`].

mod decoder;
mod deflate;
mod encoder;
mod lz4;
mod method;
mod words;
mod zstd;

pub use decoder::{DecodeError, Decoder};
pub use encoder::Encoder;
pub use method::{Method, UnknownMethod};

use crate::PAGE;

/// Pages of a batch, at most.
pub const BATCH_PAGES: usize = 64;
/// Bytes of them.
pub const BATCH_BYTES: usize = BATCH_PAGES * PAGE;
