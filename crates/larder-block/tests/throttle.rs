//! Tests of the throttle filter on the virtual clock.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::memory::MemoryDevice;
use larder_block::filter::throttle::{RateLimit, Throttle, ThrottleLimitError, ThrottleLimits};
use larder_block::{BlockDevice, ByteLen, ByteOffset, ByteRange, Loop, ReadBuf, WriteBuf, WriteFlags, ZeroFlags};

const SIZE: u64 = 1 << 20;

fn open(on: &Loop, limits: ThrottleLimits) -> Rc<Throttle> {
    let lower = Rc::new(MemoryDevice::new(ByteLen::new(SIZE), 512));
    Rc::new(Throttle::new(on, lower, limits).expect("sensible limits"))
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Read,
    Write,
}

async fn request(device: &Throttle, kind: Kind, len: usize) {
    let mut buffer = vec![0; len];
    match kind {
        Kind::Read => device.read(ByteOffset::ZERO, ReadBuf::new(&mut buffer)).await,
        Kind::Write => device.write(ByteOffset::ZERO, WriteBuf::new(&buffer), WriteFlags::NONE).await,
    }
    .expect("works");
}

fn seconds(on: &Loop) -> f64 {
    on.now().as_nanos() as f64 / 1e9
}

/// Returns the time in seconds that `count` requests take, one after the other.
fn time(limits: ThrottleLimits, kind: Kind, count: u32, len: usize) -> f64 {
    let on = Loop::simulated().expect("a loop");
    let device = open(&on, limits);
    on.block_on(async {
        for _ in 0..count {
            request(&device, kind, len).await;
        }
        seconds(&on)
    })
}

#[track_caller]
fn assert_near(measured: f64, expected: f64) {
    assert!((measured - expected).abs() < 0.02 * expected + 0.001, "{measured}, not {expected}");
}

/// A tenth of a second's worth may be done at once; after that the limit holds.
#[test]
fn limit_holds_after_initial_tenth_second() {
    let requests = ThrottleLimits { requests_total: RateLimit::per_second(100), ..ThrottleLimits::NONE };
    assert_near(time(requests, Kind::Read, 10, 512), 0.0);
    assert_near(time(requests, Kind::Read, 1010, 512), 10.0);
    let bytes = ThrottleLimits { bytes_write: RateLimit::per_second(1 << 20), ..ThrottleLimits::NONE };
    assert_near(time(bytes, Kind::Write, 1000, 64 << 10), 62.3);
    assert_near(time(bytes, Kind::Read, 1000, 64 << 10), 0.0);
}

#[test]
fn burst_keeps_its_rate_and_length() {
    let burst = |burst_seconds| ThrottleLimits {
        requests_read: RateLimit { average: 100, burst: 1000, burst_seconds },
        ..ThrottleLimits::NONE
    };
    // One second's worth may start at once, then the average applies.
    assert_near(time(burst(1), Kind::Read, 1000, 512), 0.0);
    assert_near(time(burst(1), Kind::Read, 1500, 512), 5.0);
    // Five seconds at 1000/s (during which 100/s leak), then the average applies.
    assert_near(time(burst(5), Kind::Read, 5000, 512), 4.9);
    assert_near(time(burst(5), Kind::Read, 6000, 512), 10.0);
}

#[test]
fn large_request_counts_several_if_configured() {
    let limits = |request_size| ThrottleLimits {
        requests_write: RateLimit::per_second(100),
        request_size: ByteLen::new(request_size),
        ..ThrottleLimits::NONE
    };
    assert_near(time(limits(0), Kind::Write, 110, 64 << 10), 1.0);
    assert_near(time(limits(16 << 10), Kind::Write, 110, 64 << 10), 4.26);
}

/// Zeroes count as written bytes; flushes and discards are not limited.
#[test]
fn zeroes_count_but_flushes_are_free() {
    let on = Loop::simulated().expect("a loop");
    let device = open(&on, ThrottleLimits { bytes_write: RateLimit::per_second(SIZE), ..ThrottleLimits::NONE });
    on.block_on(async {
        let all = ByteRange::new(0, SIZE);
        for _ in 0..11 {
            device.write_zeroes(all, ZeroFlags::default()).await.expect("zeroes");
        }
        assert_near(seconds(&on), 9.9);
        for _ in 0..100 {
            device.flush().await.expect("flushes");
            device.discard(all).await.expect("discards");
        }
        assert_near(seconds(&on), 9.9);
    });
}

/// Waiting requests start in order of arrival, and reads and writes take turns.
#[test]
fn waiting_reads_and_writes_take_turns() {
    let on = Loop::simulated().expect("a loop");
    let device = open(&on, ThrottleLimits { requests_total: RateLimit::per_second(10), ..ThrottleLimits::NONE });
    let order: Rc<RefCell<Vec<(Kind, u32)>>> = Rc::default();
    on.block_on(async {
        let mut waiting = Vec::new();
        for index in 0..40 {
            let kind = if index < 30 { Kind::Read } else { Kind::Write };
            let (device, order) = (Rc::clone(&device), Rc::clone(&order));
            waiting.push(on.spawn_with_result(async move {
                request(&device, kind, 512).await;
                order.borrow_mut().push((kind, index));
            }));
        }
        for one in waiting {
            one.await;
        }
    });
    let order = order.borrow();
    for kind in [Kind::Read, Kind::Write] {
        let own: Vec<u32> = order.iter().filter(|(own, _)| *own == kind).map(|(_, index)| *index).collect();
        assert!(own.is_sorted(), "{kind:?}: {own:?}");
    }
    let last_write = order.iter().rposition(|(kind, _)| *kind == Kind::Write).expect("there are writes");
    assert!(last_write <= 22, "the writes were starved: {order:?}");
}

#[test]
fn limits_change_while_requests_wait() {
    let on = Loop::simulated().expect("a loop");
    let device = open(&on, ThrottleLimits { requests_total: RateLimit::per_second(1), ..ThrottleLimits::NONE });
    on.block_on(async {
        let waiting: Vec<_> = (0..50)
            .map(|_| {
                let device = Rc::clone(&device);
                on.spawn_with_result(async move { request(&device, Kind::Write, 512).await })
            })
            .collect();
        on.sleep(Duration::from_secs(5)).await;
        assert!(device.waiting() > 40);
        device
            .set_limits(ThrottleLimits { requests_total: RateLimit::per_second(10), ..ThrottleLimits::NONE })
            .expect("sensible");
        on.sleep(Duration::from_secs(2)).await;
        assert!((15..30).contains(&device.waiting()), "{}", device.waiting());
        device.set_limits(ThrottleLimits::NONE).expect("sensible");
        for one in waiting {
            one.await;
        }
        assert_near(seconds(&on), 7.0);
        assert_eq!(device.waiting(), 0);
    });
}

#[test]
fn unlimited_request_is_answered_in_call() {
    let on = Loop::simulated().expect("a loop");
    let device = open(&on, ThrottleLimits::NONE);
    let mut buffer = [0; 512];
    assert!(device.read(ByteOffset::ZERO, ReadBuf::new(&mut buffer)).take_ready_result().is_some());
}

#[test]
fn dropped_request_uses_no_budget() {
    let on = Loop::simulated().expect("a loop");
    let device = open(&on, ThrottleLimits { requests_total: RateLimit::per_second(1), ..ThrottleLimits::NONE });
    on.block_on(async {
        request(&device, Kind::Read, 512).await;
        let first = Rc::clone(&device);
        let gives_up = async move { request(&first, Kind::Read, 512).await };
        let (weak, second) = (on.downgrade(), Rc::clone(&device));
        let given_up = on.spawn_with_result(async move {
            let on = weak.upgrade().expect("runs");
            on.timeout(Duration::from_millis(100), gives_up).await
        });
        let next = on.spawn_with_result(async move { request(&second, Kind::Read, 512).await });
        assert!(given_up.await.is_none());
        next.await;
        assert_near(seconds(&on), 0.9);
    });
}

#[test]
fn invalid_limits_are_refused() {
    let bytes = |bytes_total| ThrottleLimits { bytes_total, ..ThrottleLimits::NONE };
    let cases = [
        (bytes(RateLimit { average: 0, burst: 5, burst_seconds: 0 }), "a burst needs an average"),
        (bytes(RateLimit { average: 9, burst: 5, burst_seconds: 0 }), "below the average"),
        (bytes(RateLimit { average: 9, burst: 0, burst_seconds: 2 }), "length needs a burst"),
        (bytes(RateLimit::per_second(u64::MAX)), "more than a limit can be"),
        (ThrottleLimits { bytes_read: RateLimit::per_second(1), ..bytes(RateLimit::per_second(1)) }, "not both"),
    ];
    for (limits, expected) in cases {
        let error: ThrottleLimitError = limits.check().expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
    }
}
