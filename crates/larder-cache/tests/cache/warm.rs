//! Warming of a cache with lines that were hot on another host.

use std::time::Duration;

use larder_block::backend::simulated::{
    FaultEffect, InjectedFault, LatencyDistribution, SimulatedDevice, SimulatedMedium, SimulatedOptions,
};
use larder_block::{BlockDevice, ByteLen, ByteRange, Failure, Loop, Operation};
use larder_cache::{Cache, CacheMode};

use super::devices::{LINE, Notes, device, make, open, options};

const LINES: u64 = 320;
const DISK: ByteLen = ByteLen::mib(8);

/// Warms all lines, piece by piece; returns the bytes that are reported as stored.
async fn warm(cache: &Cache) -> ByteLen {
    let mut brought = ByteLen::ZERO;
    for start in (0..LINES * LINE as u64).step_by(Cache::WARM_LEN as usize) {
        let piece = ByteRange::new(start, Cache::WARM_LEN);
        brought += cache.warm(piece).await.expect("the disk works");
    }
    brought
}

/// Warming stores every line, even if there are more than may be unpersisted and each flush takes as long as all of
/// it.
#[test]
fn slow_flushes_do_not_limit_warming() {
    let on = Loop::simulated().expect("no kernel is needed");
    on.block_on(async {
        let slow = LatencyDistribution {
            synchronous_per_mille: 0,
            min: Duration::from_millis(50),
            max: Duration::from_millis(60),
            ..LatencyDistribution::NONE
        };
        let timed = SimulatedOptions { latency: slow, ..SimulatedOptions::default() };
        let disk = device(&on, SimulatedMedium::new(DISK, 512));
        let fast = SimulatedDevice::open(&on, SimulatedMedium::new(ByteLen::mib(16), 512), timed);
        make(&fast, 7, CacheMode::WriteThrough, DISK).await;
        let cache = open(&on, &disk, &fast, options(&Notes::default())).await;
        let all = ByteLen::new(LINES * LINE as u64);
        assert_eq!(warm(&cache).await, all);
        let told = cache.statistics();
        assert_eq!((told.lines, told.warmed), (LINES, all.get()));
        cache.close().await.expect("both devices work");
    });
}

/// Lines that could not be written to the cache device are not reported as stored.
#[test]
fn unstored_lines_are_not_counted() {
    let on = Loop::simulated().expect("no kernel is needed");
    on.block_on(async {
        let [disk, fast] = [DISK, ByteLen::mib(16)].map(|size| device(&on, SimulatedMedium::new(size, 512)));
        make(&fast, 7, CacheMode::WriteThrough, DISK).await;
        let cache = open(&on, &disk, &fast, options(&Notes::default())).await;
        fast.inject(InjectedFault::always(FaultEffect::Fail(Failure::Os(5))).on(Operation::Write));
        assert_eq!(warm(&cache).await, ByteLen::ZERO);
        assert_eq!(cache.statistics().warmed, 0);
    });
}
