//! A filter of one's own, which refuses changes to a range of the device below, used over a disk in memory.
//!
//! A filter implements [`Filter`] and overrides the requests that it changes; all others go to the layer below. Every
//! filter is a [`BlockDevice`], so another layer or an export can use it like any device. Run it with:
//!
//! ```sh
//! cargo run -p larder-block --example write_protect
//! ```
//!
//! It prints:
//!
//! ```text
//! write of 1024 bytes at 0x0: done
//! memory: write of 1024 bytes at 0x1000 failed: Operation not permitted (os error 1)
//! write of 1024 bytes at 0x2000: done
//! memory: discard of 65536 bytes at 0x0 failed: Operation not permitted (os error 1)
//! 2048 bytes written, 2 requests refused
//! ```

use std::cell::Cell;
use std::error::Error;
use std::rc::Rc;

use larder_block::backend::memory::MemoryDevice;
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, Filter, Io, IoError, IoResult, Loop, Operation, ReadBuf,
    WriteBuf, WriteFlags, ZeroFlags, check_request,
};

/// A device that refuses changes to a range. All promises are the lower device's.
struct WriteProtect {
    lower: Rc<dyn BlockDevice>,
    protected: ByteRange,
    refused: Cell<u32>,
}

impl WriteProtect {
    fn check_change(&self, operation: Operation, range: ByteRange) -> IoResult {
        // A client may send any range: it is checked before anything is computed from it.
        check_request(self.lower.name(), &self.lower.geometry(), operation, range)?;
        if !range.overlaps(self.protected) {
            return Ok(());
        }
        self.refused.set(self.refused.get() + 1);
        let failure = Failure::Os(libc::EPERM);
        Err(IoError::new(self.lower.name(), operation, range, failure))
    }

    /// Starts a change of `range`, or refuses it. The lower device's request is passed through, without a task.
    fn change<'a>(&'a self, operation: Operation, range: ByteRange, start: impl FnOnce() -> Io<'a>) -> Io<'a> {
        match self.check_change(operation, range) {
            Ok(()) => start(),
            Err(error) => Io::ready(Err(error)),
        }
    }
}

impl Filter for WriteProtect {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        self.change(Operation::Write, range, || self.lower.write(start, buffer, flags))
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.change(Operation::Discard, range, || self.lower.discard(range))
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.change(Operation::WriteZeroes, range, || self.lower.write_zeroes(range, flags))
    }

    // A write-back cache calls these two before it acknowledges a write that this layer has not received yet.

    fn may_reject_content(&self, range: ByteRange) -> bool {
        range.overlaps(self.protected) || self.lower.may_reject_content(range)
    }

    fn check_content(&self, start: ByteOffset, buffer: WriteBuf<'_>) -> IoResult {
        self.check_change(Operation::Write, start.range(buffer.byte_len()))?;
        self.lower.check_content(start, buffer)
    }
}

/// Sends requests to `device`, and returns a line for each, and the number of bytes that were written.
async fn send_requests(device: &dyn BlockDevice) -> IoResult<(Vec<String>, usize)> {
    let line = |request: String, result: IoResult| match result {
        Ok(()) => format!("{request}: done"),
        Err(error) => error.to_string(),
    };
    let (mut lines, data) = (Vec::new(), [b'A'; 1024]);
    for range in [0, 4096, 8192].map(|start| ByteRange::new(start, 1024)) {
        let write = device.write(range.start, WriteBuf::new(&data), WriteFlags::NONE);
        lines.push(line(format!("write of {range}"), write.await));
    }
    let whole = ByteOffset::ZERO.range(device.geometry().size);
    lines.push(line(format!("discard of {whole}"), device.discard(whole).await));
    let mut bytes = vec![0; whole.len.as_usize()];
    device.read(whole.start, ReadBuf::new(&mut bytes)).await?;
    Ok((lines, bytes.iter().filter(|byte| **byte == b'A').count()))
}

fn run() -> Result<Vec<String>, Box<dyn Error>> {
    let on = Loop::new(POLL_MAX_DEFAULT)?;
    let filter = WriteProtect {
        lower: Rc::new(MemoryDevice::new(ByteLen::kib(64), 512)),
        protected: ByteRange::new(4096, 4096),
        refused: Cell::new(0),
    };
    let (mut lines, written) = on.block_on(send_requests(&filter))?;
    let refused = filter.refused.get();
    lines.push(format!("{written} bytes written, {refused} requests refused"));
    Ok(lines)
}

fn main() -> Result<(), Box<dyn Error>> {
    run()?.iter().for_each(|line| println!("{line}"));
    Ok(())
}

#[test]
fn example_prints_its_documented_lines() {
    let documented: Vec<&str> = include_str!("write_protect.rs")
        .lines()
        .skip_while(|line| *line != "//! ```text")
        .skip(1)
        .map_while(|line| line.strip_prefix("//! "))
        .take_while(|line| *line != "```")
        .collect();
    assert_eq!(run().expect("io_uring is available"), documented);
}
