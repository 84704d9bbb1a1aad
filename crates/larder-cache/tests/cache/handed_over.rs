//! Hand-over of a disk: it has all dirty data of its cache.

use std::time::Duration;

use larder_block::backend::simulated::{LatencyDistribution, SimulatedDevice, SimulatedMedium, SimulatedOptions};
use larder_block::{AlignedBuf, BlockDevice, ByteLen, ByteOffset, Loop, ReadBuf, WriteBuf, WriteFlags};
use larder_cache::CacheMode;

use super::devices::{LINE, Notes, device, make, open, options};

const DISK: ByteLen = ByteLen::mib(8);
const HALF: usize = LINE / 2;
const LINES: u64 = 40;

/// A line counts as handed over while its other half is still being filled on a slow cache device.
#[test]
fn filling_line_counts_as_handed_over() {
    let on = Loop::simulated().expect("no kernel is needed");
    on.block_on(async {
        let timed = SimulatedOptions {
            latency: LatencyDistribution {
                synchronous_per_mille: 0,
                min: Duration::from_millis(1),
                max: Duration::from_millis(9),
                ..LatencyDistribution::NONE
            },
            ..SimulatedOptions::default()
        };
        let disk = device(&on, SimulatedMedium::new(DISK, 512));
        let fast = SimulatedDevice::open(&on, SimulatedMedium::new(ByteLen::mib(16), 512), timed);
        make(&fast, 7, CacheMode::WriteBack, DISK).await;
        let cache = open(&on, &disk, &fast, options(&Notes::default())).await;
        let mut bytes = AlignedBuf::zeroed(HALF);
        bytes.fill(1);
        let lines = (0..LINES).map(|line| ByteOffset::new(line * LINE as u64));
        for at in lines.clone() {
            cache.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await.expect("written");
        }
        cache.flush_dirty().await.expect("both devices work");
        for at in lines {
            let rest = at + ByteLen::of_buffer(HALF);
            cache.read(rest, ReadBuf::new(&mut bytes)).await.expect("read");
            cache.flush_dirty().await.expect("both devices work");
            assert!(cache.disk_has_all_data().await, "line at {at}");
        }
        cache.close().await.expect("both devices work");
    });
}
