//! The qcow2 format (QEMU `docs/interop/qcow2.txt`, versions 2 and 3) as a block device over block devices.
//!
//! [`Qcow2`] is the disk. A request looks its clusters up in the [`map`], which covers the whole disk, and goes
//! straight to the image file. Changes of the mapping are made in memory, and [`commit`] makes them durable when the
//! guest flushes. No look-up waits for another.

pub mod bitmap;
pub mod check;
pub mod entry;
pub mod header;
pub mod map;
pub mod shape;
pub mod snapshot;
pub mod tune;

mod commit;
mod compressed;
mod create;
mod device;
mod in_flight;
pub mod journal;
mod metadata_memory;
mod open;
mod read;
mod refcount;
mod replay;
mod slice_set;
mod space;
mod write;
mod zero;

pub use create::create;
pub use device::Qcow2;
pub use metadata_memory::MetadataMemory;
pub use open::{METADATA_MEMORY_DEFAULT, OpenError, OpenOptions, RelatedFiles, read_header};
