//! Tests of the simulated device: data that it keeps and loses, failures and delays.

use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::memory::MemoryDevice;
use larder_block::backend::simulated::{
    DeviceStop, FaultEffect, InjectedFault, LatencyDistribution, RequestDirection, SeededRng, ServiceModel,
    SimulatedDevice, SimulatedMedium, SimulatedOptions, SlowDevice,
};
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, ExtentKind, Failure, Loop, Operation, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags,
};

const SECTOR: usize = 512;
/// The host's error number for an I/O error.
const EIO: i32 = 5;

const SIZE: ByteLen = ByteLen::kib(64);

fn medium() -> SimulatedMedium {
    SimulatedMedium::new(SIZE, SECTOR as u32)
}

fn quick(seed: u64) -> SimulatedOptions {
    SimulatedOptions { seed, latency: LatencyDistribution::NONE, ..SimulatedOptions::default() }
}

fn sector(index: u64) -> ByteOffset {
    ByteOffset::new(index * SECTOR as u64)
}

async fn write(device: &SimulatedDevice, index: u64, value: u8, flags: WriteFlags) {
    let data = [value; SECTOR];
    let result = device.write(sector(index), WriteBuf::new(&data), flags).await;
    result.expect("writes");
}

fn first_byte(medium: &SimulatedMedium, index: u64) -> u8 {
    let mut bytes = [0; SECTOR];
    medium.read(sector(index), &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a torn sector");
    bytes[0]
}

/// A flushed or FUA write survives a power loss; an unflushed one survives only sometimes.
#[test]
fn flushed_write_survives_power_loss() {
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..200 {
        let on = Loop::simulated().expect("a loop");
        let device = SimulatedDevice::open(&on, medium(), quick(seed));
        let left = on.block_on(async {
            write(&device, 0, 1, WriteFlags::NONE).await;
            device.flush().await.expect("flushes");
            write(&device, 0, 2, WriteFlags::NONE).await;
            write(&device, 1, 3, WriteFlags::FUA).await;
            device.stop(DeviceStop::PowerLoss)
        });
        assert_eq!(left.volatile_sectors(), 0);
        assert_eq!(first_byte(&left, 1), 3, "seed {seed}: a FUA write is lost");
        match first_byte(&left, 0) {
            1 => lost += 1,
            2 => kept += 1,
            other => panic!("seed {seed}: {other} was flushed away"),
        }
    }
    assert!(lost > 20 && kept > 20, "{lost} lost, {kept} kept");
}

/// A flush covers the writes that had completed when it was called, and may leave later ones volatile.
#[test]
fn flush_may_skip_later_writes() {
    let mut lost = false;
    for seed in 0..100 {
        let on = Loop::simulated().expect("a loop");
        let device = SimulatedDevice::open(&on, medium(), quick(seed));
        let left = on.block_on(async {
            device.inject(InjectedFault::once(FaultEffect::Delay(Duration::from_millis(1))).on(Operation::Flush));
            let flush = device.flush();
            write(&device, 0, 2, WriteFlags::NONE).await;
            flush.await.expect("flushes");
            device.stop(DeviceStop::PowerLoss)
        });
        lost |= first_byte(&left, 0) == 0;
    }
    assert!(lost, "the flush covered a write that came after it");
}

/// Completed writes survive a kill of the process, but not a power loss after it.
#[test]
fn kill_keeps_completed_writes_volatile() {
    let mut lost = false;
    for seed in 0..50 {
        let on = Loop::simulated().expect("a loop");
        let device = SimulatedDevice::open(&on, medium(), quick(seed));
        let left = on.block_on(async {
            write(&device, 4, 9, WriteFlags::NONE).await;
            device.stop(DeviceStop::Kill)
        });
        assert_eq!(first_byte(&left, 4), 9);
        assert_eq!(left.volatile_sectors(), 1);
        let again = SimulatedDevice::open(&on, left, quick(seed));
        lost |= first_byte(&again.stop(DeviceStop::PowerLoss), 4) == 0;
    }
    assert!(lost);
}

#[test]
fn write_in_flight_tears_at_sectors() {
    let (mut whole, mut torn) = (0, 0);
    for seed in 0..300 {
        let on = Loop::simulated().expect("a loop");
        let options = SimulatedOptions { latency: LatencyDistribution::VARIED, ..quick(seed) };
        let device = SimulatedDevice::open(&on, medium(), options);
        let data = [5; 8 * SECTOR];
        let left = on.block_on(async {
            let request = device.write(sector(8), WriteBuf::new(&data), WriteFlags::NONE);
            let _ = on.timeout(Duration::from_micros(300), request).await;
            device.stop(DeviceStop::PowerLoss)
        });
        let written = (8..16).filter(|index| first_byte(&left, *index) == 5).count();
        whole += u32::from(written == 8);
        torn += u32::from(written > 0 && written < 8);
    }
    assert!(whole > 20 && torn > 20, "{whole} whole, {torn} torn");
}

#[test]
fn same_seed_gives_same_behaviour() {
    let run = |seed| {
        let on = Loop::simulated().expect("a loop");
        let options = SimulatedOptions { latency: LatencyDistribution::VARIED, failures_per_mille: 200, ..quick(seed) };
        let device = SimulatedDevice::open(&on, medium(), options);
        on.block_on(async {
            let mut random = SeededRng::new(seed);
            let mut results = Vec::new();
            for _ in 0..50 {
                let data = [random.next_u64() as u8; SECTOR];
                let at = sector(random.below(16));
                let result = device.write(at, WriteBuf::new(&data), WriteFlags::NONE).await;
                results.push((result.is_ok(), on.now()));
            }
            let left = device.stop(DeviceStop::PowerLoss);
            let bytes: Vec<u8> = (0..16).map(|index| first_byte(&left, index)).collect();
            (results, bytes)
        })
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn faults_apply_only_where_set() {
    let on = Loop::simulated().expect("a loop");
    let device = SimulatedDevice::open(&on, medium(), quick(1));
    let full = InjectedFault::once(FaultEffect::Fail(Failure::NoSpace));
    device.inject(full.on(Operation::Write).after(1).within(ByteRange::new(4096, 4096)));
    on.block_on(async {
        let data = [1; SECTOR];
        for (at, expected) in [(0, None), (4096, None), (0, None), (4608, Some(Failure::NoSpace)), (4608, None)] {
            let result = device.write(ByteOffset::new(at), WriteBuf::new(&data), WriteFlags::NONE).await;
            assert_eq!(result.err().map(|error| error.failure()), expected, "at {at}");
        }
        assert_eq!(device.failures(), 1);

        device.inject(InjectedFault::always(FaultEffect::Fail(Failure::Os(EIO))).on(Operation::Flush));
        for _ in 0..3 {
            assert!(device.flush().await.is_err());
        }
        device.clear_faults();
        device.flush().await.expect("healed");
    });
}

#[test]
fn stuck_request_waits_for_release() {
    let on = Loop::simulated().expect("a loop");
    let device = SimulatedDevice::open(&on, medium(), quick(1));
    device.inject(InjectedFault::once(FaultEffect::Hang));
    on.block_on(async {
        let stuck = Rc::clone(&device);
        let waiting = on.spawn_with_result(async move { stuck.flush().await.is_ok() });
        on.sleep(Duration::from_secs(3600)).await;
        device.flush().await.expect("only one is stuck");
        device.release();
        assert!(waiting.await);
    });
}

/// Discarded bytes read as their old content or as zeros, and always the same.
#[test]
fn discarded_bytes_read_consistently() {
    let (mut old, mut zero) = (0, 0);
    for seed in 0..50 {
        let on = Loop::simulated().expect("a loop");
        let device = SimulatedDevice::open(&on, medium(), quick(seed));
        on.block_on(async {
            write(&device, 3, 8, WriteFlags::FUA).await;
            device.discard(ByteRange::new(0, 4096)).await.expect("discards");
            let mut first = [1; 4096];
            device.read(ByteOffset::ZERO, ReadBuf::new(&mut first)).await.expect("reads");
            let mut second = [2; 4096];
            device.read(ByteOffset::ZERO, ReadBuf::new(&mut second)).await.expect("reads");
            assert!(first == second);
            assert!(first[..3 * SECTOR].iter().all(|byte| *byte == 0));
            match first[3 * SECTOR] {
                8 => old += 1,
                0 => zero += 1,
                other => panic!("{other}"),
            }
        });
    }
    assert!(old > 5 && zero > 5, "{old} old, {zero} zeros");
}

#[test]
fn huge_zeroed_disk_takes_no_memory() {
    let on = Loop::simulated().expect("a loop");
    let size = ByteLen::new(64 << 40);
    let device = SimulatedDevice::open(&on, SimulatedMedium::new(size, 512), quick(1));
    on.block_on(async {
        let far = ByteOffset::new(40 << 40);
        let data = [1; 4096];
        device.write(far, WriteBuf::new(&data), WriteFlags::FUA).await.expect("writes");
        let all = ByteRange::new(0, size.get());
        let kinds = device.extents(all, 10).await.expect("lists");
        let kinds: Vec<_> = kinds.iter().map(|extent| (extent.range.start.get(), extent.kind)).collect();
        assert_eq!(kinds, [(0, ExtentKind::Hole), (40 << 40, ExtentKind::Data), ((40 << 40) + 4096, ExtentKind::Hole)]);
        device.write_zeroes(all, ZeroFlags::default()).await.expect("zeroes");
        let mut back = [1; 4096];
        device.read(far, ReadBuf::new(&mut back)).await.expect("reads");
        assert!(back == [0; 4096]);
    });
}

#[test]
fn shrunk_disk_announces_and_refuses_reads() {
    let on = Loop::simulated().expect("a loop");
    let device = SimulatedDevice::open(&on, medium(), quick(1));
    on.block_on(async {
        let generation = device.size_changes().generation();
        device.set_size(ByteLen::kib(32));
        device.size_changes().changed_after(generation).await;
        let mut buffer = [0; SECTOR];
        let result = device.read(sector(64), ReadBuf::new(&mut buffer)).await;
        assert_eq!(result.err().map(|error| error.failure()), Some(Failure::OutOfRange));
    });
}

/// Runs `depth` requests at a time over a modelled disk. Returns the requests per second, and the mean time of one.
fn measure(model: ServiceModel, kind: RequestDirection, depth: u64, len: usize, sequential: bool) -> (f64, Duration) {
    const STORE: u64 = 64 << 20;
    let requests = if len > 4096 { 200 } else { 4000 };
    let on = Loop::simulated().expect("a loop");
    let store = Rc::new(MemoryDevice::new(ByteLen::new(STORE), 512));
    let device = Rc::new(SlowDevice::new(&on, store, model));
    let worker = |number| {
        let (device, on) = (Rc::clone(&device), on.downgrade());
        async move {
            let mut random = SeededRng::new(number);
            let mut time = Duration::ZERO;
            let mut buffer = vec![0; len];
            for index in 0..requests / depth {
                let blocks = STORE / len as u64;
                let block = if sequential { index % blocks } else { random.below(blocks) };
                let at = ByteOffset::new(block * len as u64);
                let begin = on.upgrade().map(|on| on.now()).expect("runs");
                match kind {
                    RequestDirection::Read => device.read(at, ReadBuf::new(&mut buffer)).await,
                    RequestDirection::Write => device.write(at, WriteBuf::new(&buffer), WriteFlags::NONE).await,
                }
                .expect("works");
                time += on.upgrade().map(|on| on.now().since(begin)).expect("runs");
            }
            time
        }
    };
    on.block_on(async {
        let workers: Vec<_> = (0..depth).map(|number| on.spawn_with_result(worker(number))).collect();
        let mut total = Duration::ZERO;
        for worker in workers {
            total += worker.await;
        }
        let done = (requests / depth * depth) as f64;
        let rate = done / Duration::from_nanos(on.now().as_nanos()).as_secs_f64();
        (rate, total.div_f64(done))
    })
}

fn near(measured: f64, expected: f64) -> bool {
    (measured / expected - 1.0).abs() < 0.05
}

/// Every preset has its latency with one request at a time, and its rate with many.
#[test]
fn presets_reach_their_latency_and_rate() {
    for (name, model) in ServiceModel::PRESETS {
        for (kind, service) in [(RequestDirection::Read, model.read), (RequestDirection::Write, model.write)] {
            let (_, alone) = measure(model, kind, 1, 4096, false);
            let floor = service
                .latency
                .as_secs_f64()
                .max(f64::from(model.channels.min(1)) / f64::from(service.requests_per_second));
            assert!(near(alone.as_secs_f64(), floor), "{name} {kind:?}: {alone:?} alone");
            let (rate, _) = measure(model, kind, 200, 4096, false);
            assert!(near(rate, f64::from(service.requests_per_second)), "{name} {kind:?}: {rate} IOPS");
            let (rate, _) = measure(model, kind, 8, 1 << 20, true);
            let bytes = rate * f64::from(1 << 20);
            assert!(bytes < service.bytes_per_second as f64 * 1.05, "{name} {kind:?}: {bytes} B/s");
        }
    }
}

#[test]
fn model_delays_requests_on_real_clock() {
    let on = Loop::new(Duration::ZERO).expect("io_uring");
    let store = Rc::new(MemoryDevice::new(ByteLen::mib(1), 512));
    let device = SlowDevice::new(&on, store, ServiceModel::SAS_DISK);
    on.block_on(async {
        let begin = on.now();
        let mut buffer = [0; 4096];
        for block in [9, 3, 7] {
            let at = ByteOffset::new(block * 4096);
            device.read(at, ReadBuf::new(&mut buffer)).await.expect("reads");
        }
        assert!(on.now().since(begin) >= 3 * ServiceModel::SAS_DISK.read.latency);
    });
}
