//! The block device contract, units and buffers, the io_uring loop, and the basic backends: file and block device,
//! NBD client, memory, and the simulated device.
//!
//! Start with [`device`] for the promises of a block device, then [`event_loop`] for the loop that runs it.

pub mod backend;
pub mod boot;
pub mod buffer;
pub mod buffer_pool;
pub mod device;
pub mod error;
pub mod event_loop;
pub mod filter;
pub mod histogram;
pub mod lock_wait;
pub mod memory;
pub mod nbd;
pub mod opener;
pub mod printable;
pub mod range_lock;
pub mod semaphore;
pub mod signal;
pub mod small_file;
pub mod tls;
pub mod units;

pub use buffer::{AlignedBuf, IoVec, ReadBuf, WriteBuf};
pub use device::{
    BlockDevice, BoxFuture, Extent, ExtentKind, Geometry, Io, RequestWatch, SizeChanges, WriteFlags, ZeroFlags,
    check_request, join,
};
pub use error::{Failure, IoError, IoResult, Operation};
pub use event_loop::{Loop, LoopTime};
pub use filter::Filter;
pub use printable::{printable, printable_lines};
pub use units::{ByteLen, ByteOffset, ByteRange, SizeError};
