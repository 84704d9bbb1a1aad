//! Tests of the verdict, case by case. Times are in ms: the capture was at 1000, the mark's process ended at about
//! 5000, and the image is opened at 9000.

use super::verdict::{Capture, ClockReading, Finding, ImageState, Snapshot, judge};
use crate::opener::{DiskCounters, FileTimes};
use Finding::{Changed, NoRecord, Unchanged, Unproven};

const MS: i64 = 1_000_000;
const SIZE: u64 = 1 << 30;

const CAPTURED: FileTimes = FileTimes { inode: 12, size: SIZE, mtime_ns: 900 * MS, ctime_ns: 950 * MS };

fn clock() -> ClockReading {
    ClockReading { boot: 7, now_ns: 9000 * MS, clock_offset_ns: 500 * MS }
}

/// Returns a mark of a file that was captured after ten writes. Until the kill, `begun` writes have begun and `ended`
/// have ended.
fn file_snapshot(begun: u64, ended: u64) -> Snapshot {
    Snapshot {
        boot: 7,
        clock_offset_ns: 500 * MS,
        started: begun,
        completed: ended,
        completed_at_ns: 5000 * MS,
        heartbeat_at_ns: 5015 * MS,
        size_max: SIZE,
        capture: Some(Capture { started: 10, clock_offset_ns: 500 * MS, file: Some(CAPTURED), ..Capture::default() }),
        ..Snapshot::default()
    }
}

fn no_writes() -> Snapshot {
    file_snapshot(10, 10)
}

fn all_completed() -> Snapshot {
    file_snapshot(14, 14)
}

fn in_flight() -> Snapshot {
    file_snapshot(14, 12)
}

fn file(now: FileTimes) -> ImageState {
    ImageState { file: Some(now), disk: None, is_provable: true }
}

/// Returns the file's state with the given times.
fn at(mtime_ms: i64, ctime_ms: i64) -> FileTimes {
    FileTimes { mtime_ns: mtime_ms * MS, ctime_ns: ctime_ms * MS, ..CAPTURED }
}

/// Returns a clock that was set by `step_ms` milliseconds since the mark, and is at `now_ms`.
fn stepped(step_ms: i64, now_ms: i64) -> ClockReading {
    ClockReading { clock_offset_ns: (500 + step_ms) * MS, now_ns: now_ms * MS, ..clock() }
}

#[test]
fn file_verdict_follows_times() {
    let larger = |size| FileTimes { size, ..at(4990, 4990) };
    let may_grow = |mark: Snapshot| Snapshot { size_max: SIZE + 4096, ..mark };
    let without_capture = |mark| Snapshot { capture: None, ..mark };
    let other = FileTimes { inode: 13, ..CAPTURED };
    for (case, snapshot, now, expected) in [
        ("quiet, untouched", no_writes(), CAPTURED, Unchanged),
        ("quiet, chmod or rename: ctime only", no_writes(), at(900, 5100), Unproven),
        ("quiet, written, then touch -r", no_writes(), at(900, 6000), Unproven),
        ("quiet, written", no_writes(), at(5100, 5100), Changed),
        ("quiet, mtime set back by touch -d", no_writes(), at(100, 6000), Changed),
        ("quiet, ctime before the capture", no_writes(), at(900, 940), Changed),
        ("quiet, another file", no_writes(), other, Changed),
        ("quiet, larger", no_writes(), larger(SIZE + 4096), Changed),
        ("quiet, and not allowed to grow", may_grow(no_writes()), larger(SIZE + 4096), Changed),
        ("ended, own time", all_completed(), at(4990, 4990), Unchanged),
        ("ended, at the very end", all_completed(), at(5000, 5000), Unchanged),
        ("ended, own time of a slow disk", all_completed(), at(3000, 3000), Unchanged),
        ("ended, own time of a very slow disk", all_completed(), at(2900, 2900), Unproven),
        ("ended, written later", all_completed(), at(5001, 5001), Changed),
        ("ended, written 0.1 s later", all_completed(), at(5100, 5100), Changed),
        ("ended, chmod later", all_completed(), at(4990, 5100), Unproven),
        ("ended, written, then touch -r", all_completed(), at(4990, 6000), Unproven),
        ("ended, an older state put back", all_completed(), at(800, 800), Changed),
        ("ended, and no trace of it", all_completed(), CAPTURED, Unproven),
        ("ended, grown by us", may_grow(all_completed()), larger(SIZE + 4096), Unchanged),
        ("ended, grown too far", may_grow(all_completed()), larger(SIZE + 4097), Changed),
        ("ended, shrunk", may_grow(all_completed()), larger(SIZE - 1), Changed),
        ("ended, another file", all_completed(), FileTimes { inode: 13, ..at(4990, 4990) }, Changed),
        ("in flight, no trace", in_flight(), at(4990, 4990), Unchanged),
        ("begun, not submitted", file_snapshot(11, 10), CAPTURED, Unchanged),
        ("in flight, late own time", in_flight(), at(5030, 5030), Unchanged),
        ("in flight, until a heartbeat later", in_flight(), at(5035, 5035), Unchanged),
        ("in flight, very late own time", in_flight(), at(5036, 5036), Unproven),
        ("in flight, foreign write 0.1 s later", in_flight(), at(5100, 5100), Unproven),
        ("in flight, chmod later", in_flight(), at(4990, 7000), Unproven),
        ("in flight, very slow disk", in_flight(), at(2000, 2000), Unproven),
        ("in flight, an older state put back", in_flight(), at(800, 800), Changed),
        ("in flight, shrunk", in_flight(), larger(SIZE - 1), Changed),
        ("no capture yet, untouched", without_capture(file_snapshot(0, 0)), at(4999, 4999), Unchanged),
        ("no capture yet, written", without_capture(file_snapshot(0, 0)), at(5100, 5100), Changed),
        ("no capture yet, in flight, late", without_capture(file_snapshot(1, 0)), at(5100, 5100), Unproven),
        ("no capture yet, old", without_capture(file_snapshot(1, 0)), at(2000, 2000), Unproven),
    ] {
        assert_eq!(judge(Some(&snapshot), &file(now), clock()), expected, "{case}");
    }
}

#[test]
fn stepped_clock_proves_no_more() {
    for (case, snapshot, now, clock, expected) in [
        ("quiet needs no clock", no_writes(), CAPTURED, stepped(-3000, 3000), Unchanged),
        ("quiet, written", no_writes(), at(2100, 2100), stepped(-3000, 3000), Changed),
        ("set back, and at that time again", all_completed(), at(4990, 4990), stepped(-3000, 6000), Unproven),
        ("set back, written", all_completed(), at(2100, 2100), stepped(-3000, 3000), Unproven),
        ("set back, not yet there, own", all_completed(), at(4990, 4990), stepped(-3000, 3000), Unchanged),
        ("set back, not yet there, written before", all_completed(), at(5100, 5100), stepped(-3000, 3000), Changed),
        ("set back in flight, not yet there", in_flight(), at(5030, 5030), stepped(-3000, 3000), Unchanged),
        ("set back in flight, late", in_flight(), at(5100, 5100), stepped(-3000, 3000), Unproven),
        ("set back, older than the capture", all_completed(), at(800, 800), stepped(-8000, 3000), Unproven),
        ("set forward, own", all_completed(), at(4990, 4990), stepped(3000, 12000), Unchanged),
        ("set forward, written", all_completed(), at(8100, 8100), stepped(3000, 12000), Changed),
        ("set forward, older than the capture", all_completed(), at(800, 800), stepped(3000, 12000), Unproven),
        (
            "slewed",
            all_completed(),
            at(4990, 4990),
            ClockReading { clock_offset_ns: 500 * MS - 900_000, ..clock() },
            Unchanged,
        ),
    ] {
        assert_eq!(judge(Some(&snapshot), &file(now), clock), expected, "{case}");
    }
}

/// A mark proves nothing after a reboot or for an image on a server; earlier findings are carried.
#[test]
fn record_counts_only_on_its_boot() {
    let untouched = file(CAPTURED);
    let other_boot = ClockReading { boot: 8, ..clock() };
    assert_eq!(judge(None, &untouched, clock()), NoRecord);
    assert_eq!(judge(Some(&no_writes()), &untouched, other_boot), NoRecord);
    for snapshot in [no_writes(), all_completed(), in_flight()] {
        let on_a_server = ImageState::default();
        assert_eq!(judge(Some(&snapshot), &on_a_server, clock()), Unproven);
    }
    // Findings carried from earlier marks, and findings of the process itself.
    for known in [Unchanged, NoRecord, Unproven, Changed] {
        for written in [false, true] {
            let now = file(if written { at(5100, 5100) } else { CAPTURED });
            let expected = if written { Changed } else { known };
            let carried = Snapshot { carried: known, ..no_writes() };
            let foreign = Snapshot { foreign: known, ..no_writes() };
            assert_eq!(judge(Some(&carried), &now, clock()), expected);
            assert_eq!(judge(Some(&foreign), &now, clock()), expected);
            assert_eq!(Finding::from_code(known.code()), known);
        }
    }
    assert_eq!(Finding::from_code(99), Unproven);
}

/// A foreign write later than a heartbeat after the last sign of life is never judged as proven, whatever the state
/// of the mark.
#[test]
fn late_foreign_write_is_never_proven() {
    for begun in 10..14 {
        for ended in 10..=begun {
            for alive_ms in [1000, 4000, 5000, 5015] {
                for step_ms in [-4000, -2000, 0, 2000] {
                    let mut mark = file_snapshot(begun, ended);
                    mark.heartbeat_at_ns = alive_ms * MS;
                    for capture in [mark.capture, None] {
                        mark.capture = capture;
                        for written_ms in [5036, 5100, 7000, 8999] {
                            for is_before_step in [false, true] {
                                let time = if is_before_step { written_ms } else { written_ms + step_ms };
                                let clock = stepped(step_ms, 9000 + step_ms);
                                let found = judge(Some(&mark), &file(at(time, time)), clock);
                                assert_ne!(found, Unchanged, "{mark:?} {time} {step_ms}");
                            }
                        }
                    }
                }
            }
        }
    }
}

const COUNTED: DiskCounters =
    DiskCounters { sequence: 3, written_sectors: 1000, written_through_disk: 40, is_reliable: true, backing: None };

/// Returns a mark of a block device with the given numbers of sectors begun and ended since the capture.
fn disk_snapshot(begun: u64, ended: u64) -> Snapshot {
    Snapshot {
        started: 10 + begun,
        completed: 10 + ended,
        started_sectors: 100 + begun,
        completed_sectors: 100 + ended,
        capture: Some(Capture { started: 10, started_sectors: 100, disk: Some(COUNTED), ..Capture::default() }),
        ..no_writes()
    }
}

#[test]
fn disk_verdict_follows_counters() {
    let grown = |sectors| DiskCounters { written_sectors: COUNTED.written_sectors + sectors, ..COUNTED };
    let inexact = |mark| Snapshot { is_inexact: true, ..mark };
    let (replaced, unknown) = (DiskCounters { sequence: 4, ..COUNTED }, DiskCounters { sequence: 0, ..COUNTED });
    let beside = DiskCounters { written_through_disk: 41, ..COUNTED };
    let no_capture = Snapshot { capture: None, ..disk_snapshot(8, 8) };
    for (case, snapshot, now, expected) in [
        ("quiet", disk_snapshot(0, 0), COUNTED, Unchanged),
        ("quiet, written", disk_snapshot(0, 0), grown(8), Changed),
        ("ended", disk_snapshot(24, 24), grown(24), Unchanged),
        ("ended, written", disk_snapshot(24, 24), grown(32), Changed),
        ("ended, and not all counted", disk_snapshot(24, 24), grown(16), Changed),
        ("in flight, all done", disk_snapshot(24, 8), grown(24), Unchanged),
        ("in flight, some done", disk_snapshot(24, 8), grown(16), Unproven),
        ("in flight, none done", disk_snapshot(24, 8), grown(8), Unproven),
        ("in flight, too few", disk_snapshot(24, 8), grown(7), Changed),
        ("in flight, too many", disk_snapshot(24, 8), grown(25), Changed),
        ("another disk", disk_snapshot(0, 0), replaced, Changed),
        ("a disk without a number", disk_snapshot(0, 0), unknown, Changed),
        ("through the whole disk", disk_snapshot(0, 0), beside, Unproven),
        ("after a discard", inexact(disk_snapshot(24, 24)), grown(16), Unproven),
        ("no capture", no_capture, COUNTED, Unproven),
    ] {
        let state = ImageState { file: None, disk: Some(now), is_provable: true };
        assert_eq!(judge(Some(&snapshot), &state, clock()), expected, "{case}");
    }
}

/// The counters of a loop device do not show foreign writes to its backing file; the file's times do.
#[test]
fn loop_device_needs_counters_and_times() {
    let with_times = |begun, ended| {
        let mut snapshot = disk_snapshot(begun, ended);
        snapshot.capture = snapshot.capture.map(|capture| Capture { file: Some(CAPTURED), ..capture });
        snapshot
    };
    for (snapshot, growth, times, expected) in [
        (with_times(0, 0), 0, CAPTURED, Unchanged),
        (with_times(0, 0), 0, at(5100, 5100), Changed),
        (with_times(0, 0), 0, at(900, 5100), Unproven),
        (with_times(8, 8), 8, at(4990, 4990), Unchanged),
        (with_times(8, 8), 8, at(5100, 5100), Changed),
        (with_times(8, 8), 16, at(4990, 4990), Changed),
        (with_times(8, 0), 8, at(5100, 5100), Unproven),
    ] {
        let now = DiskCounters { written_sectors: COUNTED.written_sectors + growth, backing: Some(times), ..COUNTED };
        let state = ImageState { file: Some(times), disk: Some(now), is_provable: true };
        assert_eq!(judge(Some(&snapshot), &state, clock()), expected, "{growth} {times:?}");
    }
}
