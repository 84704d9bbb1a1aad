//! Counts the bytes read from and written to a device.

use std::cell::Cell;
use std::rc::Rc;

use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, Io, WriteFlags};
use crate::filter::Filter;
use crate::units::{ByteLen, ByteOffset};

/// The bytes requested so far.
#[derive(Default, Debug)]
pub struct ByteMeter {
    read: Cell<u64>,
    written: Cell<u64>,
}

impl ByteMeter {
    /// Returns the bytes requested by reads.
    pub fn read(&self) -> ByteLen {
        ByteLen::new(self.read.get())
    }

    /// Returns the bytes passed by writes, without those of write-zeroes.
    pub fn written(&self) -> ByteLen {
        ByteLen::new(self.written.get())
    }
}

struct MeteredDevice {
    lower: Rc<dyn BlockDevice>,
    meter: Rc<ByteMeter>,
}

/// Returns a layer over `lower`, and its counters from now on.
pub fn metered(lower: Rc<dyn BlockDevice>) -> (Rc<dyn BlockDevice>, Rc<ByteMeter>) {
    let meter = Rc::<ByteMeter>::default();
    let device = MeteredDevice { lower, meter: Rc::clone(&meter) };
    (Rc::new(device), meter)
}

impl Filter for MeteredDevice {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let read = &self.meter.read;
        read.set(read.get() + buffer.byte_len().get());
        self.lower.read(start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let written = &self.meter.written;
        written.set(written.get() + buffer.byte_len().get());
        self.lower.write(start, buffer, flags)
    }
}
