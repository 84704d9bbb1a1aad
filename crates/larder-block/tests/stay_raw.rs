//! Tests of the filter over raw disks whose format was guessed.

use std::rc::Rc;

use larder_block::backend::memory::MemoryDevice;
use larder_block::filter::raw_format_guard::RawFormatGuard;
use larder_block::{BlockDevice, ByteLen, ByteOffset, Failure, Loop, ReadBuf, WriteBuf, WriteFlags};

fn begins_like(head: &[u8]) -> Option<&'static str> {
    head.starts_with(b"QFI\xfb").then_some("qcow2")
}

fn with_device(test: impl AsyncFnOnce(&RawFormatGuard)) {
    let on = Loop::simulated().expect("a loop");
    let lower = Rc::new(MemoryDevice::new(ByteLen::new(64 << 10), 512));
    let device = RawFormatGuard::new(lower, begins_like);
    on.block_on(test(&device));
}

async fn write(device: &RawFormatGuard, at: u64, bytes: &[u8]) -> Result<(), Failure> {
    let written = device.write(ByteOffset::new(at), WriteBuf::new(bytes), WriteFlags::NONE);
    written.await.map_err(|error| error.failure())
}

async fn read(device: &RawFormatGuard, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes));
    read.await.expect("is read");
    bytes
}

/// Returns `len` bytes that begin with another format's header.
fn image(len: usize) -> Vec<u8> {
    let mut bytes = vec![7; len];
    bytes[..4].copy_from_slice(b"QFI\xfb");
    bytes
}

/// A write that would make the disk begin like another format fails without effect.
#[test]
fn foreign_header_write_fails_without_effect() {
    with_device(async |device| {
        for len in [512, 8192] {
            assert_eq!(write(device, 0, &image(len)).await, Err(Failure::Os(libc::EPERM)));
            assert_eq!(read(device, 8192).await, [0; 8192]);
        }
    });
}

#[test]
fn all_other_writes_are_passed_on() {
    with_device(async |device| {
        let mut bytes: Vec<u8> = (0..8192).map(|index| (index / 512 + 1) as u8).collect();
        assert_eq!(write(device, 0, &bytes).await, Ok(()));
        assert_eq!(read(device, 8192).await, bytes);
        assert_eq!(write(device, 512, &image(1024)).await, Ok(()), "it is no header there");
        bytes[512..1536].copy_from_slice(&image(1024));
        assert_eq!(write(device, 0, &[9; 512]).await, Ok(()));
        bytes[..512].fill(9);
        assert_eq!(read(device, 8192).await, bytes);
        assert_eq!(write(device, 0, &[]).await, Ok(()));
        assert_eq!(write(device, 0, &image(100)).await, Err(Failure::Misaligned));
        assert_eq!(write(device, 2, &image(510)).await, Err(Failure::Misaligned));
        assert_eq!(write(device, 0, &[1; 65 << 10]).await, Err(Failure::OutOfRange));
        assert_eq!(read(device, 8192).await, bytes);
    });
}
