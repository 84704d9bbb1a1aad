//! Tests of the align filter over a device with large blocks that refuses unaligned requests.

use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{
    DeviceStop, FaultEffect, InjectedFault, LatencyDistribution, SeededRng, SimulatedDevice, SimulatedMedium,
    SimulatedOptions,
};
use larder_block::filter::align::{Align, AlignOptions};
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, ExtentKind, Failure, Loop, Operation, ReadBuf, WriteBuf,
    WriteFlags, ZeroFlags,
};

const SIZE: u64 = 256 << 10;

fn open(on: &Loop, seed: u64, latency: LatencyDistribution) -> (Rc<SimulatedDevice>, Rc<Align>) {
    let options =
        SimulatedOptions { seed, block_size: 4096, memory_alignment: 512, latency, ..SimulatedOptions::default() };
    let disk = SimulatedDevice::open(on, SimulatedMedium::new(ByteLen::new(SIZE), 512), options);
    let align = AlignOptions { bounce_len: ByteLen::kib(16), bounce_count: 2, ..AlignOptions::default() };
    let lower = Rc::clone(&disk);
    (disk, Rc::new(Align::new(lower, align)))
}

/// Requests of any sectors, at any memory address, have the same effect as on a disk without alignment.
#[test]
fn unaligned_requests_match_plain_disk() {
    let on = Loop::simulated().expect("a loop");
    let (_, device) = open(&on, 1, LatencyDistribution::VARIED);
    let geometry = device.geometry();
    assert_eq!((geometry.block_size, geometry.physical_block_size, geometry.memory_alignment), (512, 4096, 1));
    let mut model = vec![0; SIZE as usize];
    let mut random = SeededRng::new(2);
    on.block_on(async {
        for _ in 0..2000 {
            let start = random.below(SIZE / 512) * 512;
            let len = (random.between(1, 100) * 512).min(SIZE - start);
            let part = start as usize..(start + len) as usize;
            let mut memory = AlignedBuf::zeroed(len as usize + 512);
            let skip = random.pick(&[0, 1, 8, 512]);
            let memory = &mut memory[skip..][..len as usize];
            let at = ByteOffset::new(start);
            match random.below(4) {
                0 => {
                    memory.fill(random.next_u64() as u8);
                    let write = device.write(at, WriteBuf::new(memory), WriteFlags::NONE);
                    write.await.expect("writes");
                    model[part].copy_from_slice(memory);
                }
                1 => {
                    let zero = device.write_zeroes(ByteRange::new(start, len), ZeroFlags::default());
                    zero.await.expect("zeroes");
                    model[part].fill(0);
                }
                _ => {
                    device.read(at, ReadBuf::new(memory)).await.expect("reads");
                    assert!(*memory == model[part]);
                }
            }
        }
    });
}

#[test]
fn neighbours_in_block_lose_no_update() {
    for seed in 0..100 {
        let on = Loop::simulated().expect("a loop");
        let (_, device) = open(&on, seed, LatencyDistribution::VARIED);
        on.block_on(async {
            // Eight writers, each with its own sector in the same two blocks.
            let writers: Vec<_> = (0..8_u64)
                .map(|index| {
                    let device = Rc::clone(&device);
                    on.spawn_with_result(async move {
                        for round in 1..20 {
                            let data = [round; 512];
                            let at = ByteOffset::new(index * 1024);
                            device.write(at, WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
                            let mut back = [0; 512];
                            device.read(at, ReadBuf::new(&mut back)).await.expect("reads");
                            assert!(back == data, "sector {index} lost round {round}");
                        }
                    })
                })
                .collect();
            for writer in writers {
                writer.await;
            }
        });
    }
}

#[test]
fn partial_write_keeps_concurrent_whole_write() {
    for seed in 0..200 {
        let on = Loop::simulated().expect("a loop");
        let (_, device) = open(&on, seed, LatencyDistribution::VARIED);
        on.block_on(async {
            let whole = Rc::clone(&device);
            let whole = on.spawn_with_result(async move {
                let mut data = AlignedBuf::zeroed(4096);
                data.fill(7);
                whole.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
            });
            let data = [9; 512];
            device.write(ByteOffset::new(512), WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
            whole.await;
            let mut back = [0; 512];
            device.read(ByteOffset::ZERO, ReadBuf::new(&mut back)).await.expect("reads");
            assert!(back == [7; 512], "seed {seed}: the neighbour is gone");
        });
    }
}

/// A power loss during a partial write leaves flushed sectors of the same blocks unchanged.
#[test]
fn crash_in_partial_write_keeps_neighbours() {
    for seed in 0..200 {
        let on = Loop::simulated().expect("a loop");
        let (disk, device) = open(&on, seed, LatencyDistribution::VARIED);
        let left = on.block_on(async {
            let old = AlignedBuf::zeroed(8192);
            let mut old = old;
            old.fill(1);
            device.write(ByteOffset::ZERO, WriteBuf::new(&old), WriteFlags::NONE).await.expect("writes");
            device.flush().await.expect("flushes");
            let new = [2; 1536];
            let write = device.write(ByteOffset::new(3584), WriteBuf::new(&new), WriteFlags::NONE);
            let _ = on.timeout(Duration::from_micros(seed * 10), write).await;
            disk.stop(DeviceStop::PowerLoss)
        });
        let mut bytes = [0; 8192];
        left.read(ByteOffset::ZERO, &mut bytes);
        assert!(bytes[..3584].iter().chain(&bytes[5120..]).all(|byte| *byte == 1));
        assert!(bytes[3584..5120].chunks(512).all(|sector| sector == [1; 512] || sector == [2; 512]));
    }
}

/// A failed read or write of the device below is reported with the operation and range of the caller's write.
#[test]
fn failure_below_reports_original_write() {
    let on = Loop::simulated().expect("a loop");
    let (disk, device) = open(&on, 1, LatencyDistribution::NONE);
    on.block_on(async {
        let data = [1; 512];
        let at = ByteOffset::new(1024);
        for below in [Operation::Read, Operation::Write] {
            disk.inject(InjectedFault::once(FaultEffect::Fail(Failure::NoSpace)).on(below));
            let error = device.write(at, WriteBuf::new(&data), WriteFlags::NONE).await.expect_err("fails");
            assert_eq!(error.failure(), Failure::NoSpace);
            assert_eq!((error.operation(), error.range()), (Operation::Write, ByteRange::new(1024, 512)));
            device.write(at, WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes again");
        }
    });
}

#[test]
fn dropped_write_releases_its_block() {
    let on = Loop::simulated().expect("a loop");
    let (disk, device) = open(&on, 1, LatencyDistribution::NONE);
    on.block_on(async {
        disk.inject(InjectedFault::once(FaultEffect::Hang).on(Operation::Write));
        let data = [1; 512];
        let stuck = device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE);
        assert!(on.timeout(Duration::from_secs(1), stuck).await.is_none());
        let next = device.write(ByteOffset::new(512), WriteBuf::new(&data), WriteFlags::NONE);
        let next = on.timeout(Duration::from_secs(1), next).await;
        next.expect("not blocked").expect("writes");
    });
}

#[test]
fn dropped_whole_write_unblocks_partial_write() {
    let on = Loop::simulated().expect("a loop");
    let (disk, device) = open(&on, 1, LatencyDistribution::NONE);
    on.block_on(async {
        disk.inject(InjectedFault::once(FaultEffect::Hang).on(Operation::Write));
        let whole = AlignedBuf::zeroed(4096);
        let stuck = device.write(ByteOffset::ZERO, WriteBuf::new(&whole), WriteFlags::NONE);
        let part = Rc::clone(&device);
        let part = on.spawn_with_result(async move {
            let data = [1; 512];
            let write = part.write(ByteOffset::new(512), WriteBuf::new(&data), WriteFlags::NONE);
            write.await.expect("writes");
        });
        assert!(on.timeout(Duration::from_secs(1), stuck).await.is_none());
        on.timeout(Duration::from_secs(1), part).await.expect("not blocked");
        let mut back = [0; 512];
        device.read(ByteOffset::new(512), ReadBuf::new(&mut back)).await.expect("reads");
        assert!(back == [1; 512]);
    });
}

/// Discards do not change partial blocks, and fast zeroes of a partial block are refused.
#[test]
fn discards_skip_partial_blocks() {
    let on = Loop::simulated().expect("a loop");
    let (_, device) = open(&on, 1, LatencyDistribution::NONE);
    on.block_on(async {
        let mut data = AlignedBuf::zeroed(16384);
        data.fill(3);
        device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
        device.discard(ByteRange::new(512, 3072)).await.expect("does nothing");
        device.discard(ByteRange::new(3584, 5120)).await.expect("discards one block");
        let fast = ZeroFlags { fast_only: true, ..ZeroFlags::default() };
        let refused = device.write_zeroes(ByteRange::new(512, 512), fast).await;
        assert_eq!(refused.err().map(|error| error.failure()), Some(Failure::Unsupported));
        let mut back = vec![0; 16384];
        device.read(ByteOffset::ZERO, ReadBuf::new(&mut back)).await.expect("reads");
        assert!(back[..4096].iter().chain(&back[8192..]).all(|byte| *byte == 3));

        let outside = device.discard(ByteRange::new(SIZE - 512, 1024)).await;
        assert_eq!(outside.err().map(|error| error.failure()), Some(Failure::OutOfRange));
        let odd = device.discard(ByteRange::new(100, 5000)).await;
        assert_eq!(odd.err().map(|error| error.failure()), Some(Failure::Misaligned));
    });
}

#[test]
fn extents_are_clipped_to_request() {
    let on = Loop::simulated().expect("a loop");
    let (_, device) = open(&on, 1, LatencyDistribution::NONE);
    on.block_on(async {
        let data = [1; 512];
        device.write(ByteOffset::new(4608), WriteBuf::new(&data), WriteFlags::NONE).await.expect("writes");
        let extents = device.extents(ByteRange::new(512, 8192), 10).await.expect("lists");
        let extents: Vec<_> = extents.iter().map(|found| (found.range, found.kind)).collect();
        let expected = [
            (ByteRange::new(512, 3584), ExtentKind::Hole),
            (ByteRange::new(4096, 4096), ExtentKind::Data),
            (ByteRange::new(8192, 512), ExtentKind::Hole),
        ];
        assert_eq!(extents, expected);
    });
}

/// Requests for any bytes have the same effect as in memory, over blocks of 512 and of 4096 bytes.
#[test]
fn any_bytes_change_exactly() {
    for (seed, block_size) in [(1, 512), (2, 4096)] {
        let on = Loop::simulated().expect("a loop");
        let options = SimulatedOptions {
            seed,
            block_size,
            memory_alignment: 1,
            latency: LatencyDistribution::VARIED,
            ..SimulatedOptions::default()
        };
        let disk = SimulatedDevice::open(&on, SimulatedMedium::new(ByteLen::new(SIZE), 512), options);
        let device = Align::new(disk, AlignOptions::BYTES);
        assert_eq!(device.geometry().block_size, 1);
        let mut model = vec![0; SIZE as usize];
        let mut random = SeededRng::new(seed + 2);
        on.block_on(async {
            for _ in 0..2000 {
                let most = random.pick(&[1, 100, 5000, SIZE / 2]);
                let len = random.between(1, most);
                let start = random.below(SIZE - len + 1);
                let (at, part) = (ByteOffset::new(start), start as usize..(start + len) as usize);
                let mut memory = vec![random.next_u64() as u8; len as usize];
                match random.below(5) {
                    0 | 1 => {
                        let write = device.write(at, WriteBuf::new(&memory), WriteFlags::NONE);
                        write.await.expect("writes");
                        model[part].copy_from_slice(&memory);
                    }
                    2 => {
                        let flags = ZeroFlags { unmap: random.chance(500), ..ZeroFlags::default() };
                        device.write_zeroes(ByteRange::new(start, len), flags).await.expect("zeroes");
                        model[part].fill(0);
                    }
                    3 => {
                        let range = ByteRange::new(start, len);
                        let extents = device.extents(range, 4).await.expect("extents");
                        let mut end = at;
                        for extent in &extents {
                            assert!(extent.range.start == end && range.contains(extent.range), "{extents:?}");
                            end = extent.range.end();
                            let bytes = &model[extent.range.start.get() as usize..end.get() as usize];
                            assert!(extent.kind == ExtentKind::Data || bytes.iter().all(|byte| *byte == 0));
                        }
                        assert!(end > at);
                    }
                    _ => {
                        device.read(at, ReadBuf::new(&mut memory)).await.expect("reads");
                        assert!(memory == model[part]);
                    }
                }
            }
        });
    }
}
