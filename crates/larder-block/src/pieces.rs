//! Long requests, cut where they enter: what a layer needs for a request is bounded by its length, and a guest or a client may
//! send one of gigabytes.

use smallvec::SmallVec;

use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, Io, WriteFlags, check_request, join};
use crate::error::{IoResult, Operation};
use crate::event_loop::yield_now;
use crate::units::ByteOffset;

/// The longest read or write that a layer below those who serve a disk is given, in bytes.
pub const PIECE_LEN: usize = 2 << 20;

/// Pieces of one request that are under way at the same time.
pub const PIECES_AT_ONCE: usize = 16;

/// [`BlockDevice::read`] of any length.
pub fn read<'a>(device: &'a dyn BlockDevice, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
    if buffer.len() <= PIECE_LEN {
        return device.read(start, buffer);
    }
    let range = start.range(buffer.byte_len());
    if let Err(error) = check_request(device.name(), &device.geometry(), Operation::Read, range) {
        return Io::ready(Err(error));
    }
    Io::task(in_pieces(start, buffer.len(), move |at, from, len| {
        device.read(at, buffer.slice(from, len))
    }))
}

/// [`BlockDevice::write`] of any length. One that fails leaves each sector old or new, as a short one does; one that is not all
/// on the device writes nothing.
pub fn write<'a>(device: &'a dyn BlockDevice, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
    if buffer.len() <= PIECE_LEN {
        return device.write(start, buffer, flags);
    }
    let range = start.range(buffer.byte_len());
    if let Err(error) = check_request(device.name(), &device.geometry(), Operation::Write, range) {
        return Io::ready(Err(error));
    }
    Io::task(in_pieces(start, buffer.len(), move |at, from, len| {
        device.write(at, buffer.slice(from, len), flags)
    }))
}

/// `request` is given a piece's place on the device, and its place and length in the buffer. Pieces end at multiples of their
/// length on the device.
async fn in_pieces<'a>(
    start: ByteOffset,
    len: usize,
    request: impl Fn(ByteOffset, usize, usize) -> Io<'a> + 'a,
) -> IoResult {
    let mut from = 0;
    while from < len {
        let mut ios: SmallVec<[Io<'a>; PIECES_AT_ONCE]> = SmallVec::new();
        while from < len && ios.len() < PIECES_AT_ONCE {
            let at = start.get() + from as u64;
            let room = PIECE_LEN - (at % PIECE_LEN as u64) as usize;
            let piece = room.min(len - from);
            ios.push(request(ByteOffset::new(at), from, piece));
            from += piece;
        }
        join(ios).await?;
        // A device that answers in the call would keep all others waiting.
        yield_now().await;
    }
    Ok(())
}
