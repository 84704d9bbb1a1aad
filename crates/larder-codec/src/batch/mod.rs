//! Batches of up to 64 pages, which a migration compresses as one unit: in 256 KiB a codec finds more redundancy than
//! in 4 KiB, and it starts only once.
//!
//! ```text
//! pages, in one run or several -> Encoder::encode: does it fit the limit? -> no: the pages unencoded
//!                              -> on the wire: Method's number, the count of pages, the bytes
//! bytes -> Decoder::decode -> as many pages
//! ```
//!
//! Unencoded pages ("none") are not a method: a caller sends them if it has picked no method, or if nothing was
//! saved. Pages of one word ([`crate::uniform_word`]) and pages of which an earlier version was sent
//! ([`crate::delta`]) are encoded in fewer bytes before a batch is made of the others.
//!
//! Effect of the batch size, measured by `examples/batches`; ratio, and CPU seconds for a GiB to encode and to
//! decode:
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
//! 16 pages achieve most of it. 64 give zstd and deflate up to 10 % more, LZ4 from 2 % more to 8 % less (from 64 KiB
//! on its table has half as many entries), for about the same CPU time, within a tenth, and a quarter of the calls.
//!
//! Invariants:
//! - Encoded data decodes to the same pages, in this version and every later one, on a machine with other libraries
//!   and other instructions: [`Method`]'s numbers and their formats never change.
//! - No input makes a decoder panic, or read or write out of bounds. The output is written completely from the input,
//!   so that no earlier contents of the buffer are exposed.
//! - Batches are independent, and the encoding of one does not depend on earlier ones.
//! - Batches allocate nothing once each used method has encoded one of 64 pages. An exception is zstd, which frees
//!   memory, and allocates it again later, if a long series of batches needs less than a third of it.
//!
//! Not included: a checksum; see [`crate`].

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

/// Largest number of pages of a batch.
pub const BATCH_PAGES: usize = 64;
/// Length of the largest batch, in bytes.
pub const BATCH_BYTES: usize = BATCH_PAGES * PAGE;
