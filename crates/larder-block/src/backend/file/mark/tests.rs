//! Tests of the verdict, case by case. Times are in ms: the capture was at 1000, the mark's process ended at about
//! 5000, and the image is opened at 9000.

use super::verdict::{Capture, Clock, Finding, Snapshot, State, judge};
use crate::opener::{DiskCounters, FileTimes};
use Finding::{Changed, NoMark, Proven, Unproven};

const MS: i64 = 1_000_000;
const SIZE: u64 = 1 << 30;

const THEN: FileTimes = FileTimes {
    inode: 12,
    size: SIZE,
    mtime_ns: 900 * MS,
    ctime_ns: 950 * MS,
};

fn clock() -> Clock {
    Clock {
        boot: 7,
        now_ns: 9000 * MS,
        ahead_ns: 500 * MS,
    }
}

/// Returns a mark of a file that was captured after ten writes. Until the kill, `begun` writes have begun and `ended`
/// have ended.
fn mark(begun: u64, ended: u64) -> Snapshot {
    Snapshot {
        boot: 7,
        ahead_ns: 500 * MS,
        begun,
        ended,
        ended_at_ns: 5000 * MS,
        alive_at_ns: 5015 * MS,
        size_max: SIZE,
        capture: Some(Capture {
            begun: 10,
            ahead_ns: 500 * MS,
            file: Some(THEN),
            ..Capture::default()
        }),
        ..Snapshot::default()
    }
}

fn quiet() -> Snapshot {
    mark(10, 10)
}

fn ended() -> Snapshot {
    mark(14, 14)
}

fn in_flight() -> Snapshot {
    mark(14, 12)
}

fn file(now: FileTimes) -> State {
    State {
        file: Some(now),
        disk: None,
        is_provable: true,
    }
}

/// Returns the file's state with the given times.
fn at(mtime_ms: i64, ctime_ms: i64) -> FileTimes {
    FileTimes {
        mtime_ns: mtime_ms * MS,
        ctime_ns: ctime_ms * MS,
        ..THEN
    }
}

/// Returns a clock that was set by `step_ms` milliseconds since the mark, and is at `now_ms`.
fn stepped(step_ms: i64, now_ms: i64) -> Clock {
    Clock {
        ahead_ns: (500 + step_ms) * MS,
        now_ns: now_ms * MS,
        ..clock()
    }
}

#[test]
fn file_verdict_follows_times() {
    let larger = |size| FileTimes { size, ..at(4990, 4990) };
    let may_grow = |mark: Snapshot| Snapshot {
        size_max: SIZE + 4096,
        ..mark
    };
    let without_capture = |mark| Snapshot { capture: None, ..mark };
    let other = FileTimes { inode: 13, ..THEN };
    for (case, mark, now, wanted) in [
        ("quiet, untouched", quiet(), THEN, Proven),
        ("quiet, chmod or rename: ctime only", quiet(), at(900, 5100), Unproven),
        ("quiet, written, then touch -r", quiet(), at(900, 6000), Unproven),
        ("quiet, written", quiet(), at(5100, 5100), Changed),
        ("quiet, mtime set back by touch -d", quiet(), at(100, 6000), Changed),
        ("quiet, ctime before the capture", quiet(), at(900, 940), Changed),
        ("quiet, another file", quiet(), other, Changed),
        ("quiet, larger", quiet(), larger(SIZE + 4096), Changed),
        (
            "quiet, and not allowed to grow",
            may_grow(quiet()),
            larger(SIZE + 4096),
            Changed,
        ),
        ("ended, own time", ended(), at(4990, 4990), Proven),
        ("ended, at the very end", ended(), at(5000, 5000), Proven),
        ("ended, own time of a slow disk", ended(), at(3000, 3000), Proven),
        ("ended, own time of a very slow disk", ended(), at(2900, 2900), Unproven),
        ("ended, written later", ended(), at(5001, 5001), Changed),
        ("ended, written 0.1 s later", ended(), at(5100, 5100), Changed),
        ("ended, chmod later", ended(), at(4990, 5100), Unproven),
        ("ended, written, then touch -r", ended(), at(4990, 6000), Unproven),
        ("ended, an older state put back", ended(), at(800, 800), Changed),
        ("ended, and no trace of it", ended(), THEN, Unproven),
        ("ended, grown by us", may_grow(ended()), larger(SIZE + 4096), Proven),
        ("ended, grown too far", may_grow(ended()), larger(SIZE + 4097), Changed),
        ("ended, shrunk", may_grow(ended()), larger(SIZE - 1), Changed),
        (
            "ended, another file",
            ended(),
            FileTimes {
                inode: 13,
                ..at(4990, 4990)
            },
            Changed,
        ),
        ("in flight, no trace", in_flight(), at(4990, 4990), Proven),
        ("begun, not submitted", mark(11, 10), THEN, Proven),
        ("in flight, late own time", in_flight(), at(5030, 5030), Proven),
        (
            "in flight, until a heartbeat later",
            in_flight(),
            at(5035, 5035),
            Proven,
        ),
        ("in flight, very late own time", in_flight(), at(5036, 5036), Unproven),
        (
            "in flight, foreign write 0.1 s later",
            in_flight(),
            at(5100, 5100),
            Unproven,
        ),
        ("in flight, chmod later", in_flight(), at(4990, 7000), Unproven),
        ("in flight, very slow disk", in_flight(), at(2000, 2000), Unproven),
        ("in flight, an older state put back", in_flight(), at(800, 800), Changed),
        ("in flight, shrunk", in_flight(), larger(SIZE - 1), Changed),
        (
            "no capture yet, untouched",
            without_capture(mark(0, 0)),
            at(4999, 4999),
            Proven,
        ),
        (
            "no capture yet, written",
            without_capture(mark(0, 0)),
            at(5100, 5100),
            Changed,
        ),
        (
            "no capture yet, in flight, late",
            without_capture(mark(1, 0)),
            at(5100, 5100),
            Unproven,
        ),
        (
            "no capture yet, old",
            without_capture(mark(1, 0)),
            at(2000, 2000),
            Unproven,
        ),
    ] {
        assert_eq!(judge(Some(&mark), &file(now), clock()), wanted, "{case}");
    }
}

#[test]
fn stepped_clock_proves_no_more() {
    for (case, mark, now, clock, wanted) in [
        ("quiet needs no clock", quiet(), THEN, stepped(-3000, 3000), Proven),
        ("quiet, written", quiet(), at(2100, 2100), stepped(-3000, 3000), Changed),
        (
            "set back, and at that time again",
            ended(),
            at(4990, 4990),
            stepped(-3000, 6000),
            Unproven,
        ),
        (
            "set back, written",
            ended(),
            at(2100, 2100),
            stepped(-3000, 3000),
            Unproven,
        ),
        (
            "set back, not yet there, own",
            ended(),
            at(4990, 4990),
            stepped(-3000, 3000),
            Proven,
        ),
        (
            "set back, not yet there, written before",
            ended(),
            at(5100, 5100),
            stepped(-3000, 3000),
            Changed,
        ),
        (
            "set back in flight, not yet there",
            in_flight(),
            at(5030, 5030),
            stepped(-3000, 3000),
            Proven,
        ),
        (
            "set back in flight, late",
            in_flight(),
            at(5100, 5100),
            stepped(-3000, 3000),
            Unproven,
        ),
        (
            "set back, older than the capture",
            ended(),
            at(800, 800),
            stepped(-8000, 3000),
            Unproven,
        ),
        (
            "set forward, own",
            ended(),
            at(4990, 4990),
            stepped(3000, 12000),
            Proven,
        ),
        (
            "set forward, written",
            ended(),
            at(8100, 8100),
            stepped(3000, 12000),
            Changed,
        ),
        (
            "set forward, older than the capture",
            ended(),
            at(800, 800),
            stepped(3000, 12000),
            Unproven,
        ),
        (
            "slewed",
            ended(),
            at(4990, 4990),
            Clock {
                ahead_ns: 500 * MS - 900_000,
                ..clock()
            },
            Proven,
        ),
    ] {
        assert_eq!(judge(Some(&mark), &file(now), clock), wanted, "{case}");
    }
}

/// A mark proves nothing after a reboot or for an image on a server; earlier findings are carried.
#[test]
fn mark_counts_only_on_its_boot() {
    let untouched = file(THEN);
    let other_boot = Clock { boot: 8, ..clock() };
    assert_eq!(judge(None, &untouched, clock()), NoMark);
    assert_eq!(judge(Some(&quiet()), &untouched, other_boot), NoMark);
    for mark in [quiet(), ended(), in_flight()] {
        let on_a_server = State::default();
        assert_eq!(judge(Some(&mark), &on_a_server, clock()), Unproven);
    }
    // Findings carried from earlier marks, and findings of the process itself.
    for known in [Proven, NoMark, Unproven, Changed] {
        for written in [false, true] {
            let now = file(if written { at(5100, 5100) } else { THEN });
            let wanted = if written { Changed } else { known };
            let carried = Snapshot {
                carried: known,
                ..quiet()
            };
            let foreign = Snapshot {
                foreign: known,
                ..quiet()
            };
            assert_eq!(judge(Some(&carried), &now, clock()), wanted);
            assert_eq!(judge(Some(&foreign), &now, clock()), wanted);
            assert_eq!(Finding::of_code(known.code()), known);
        }
    }
    assert_eq!(Finding::of_code(99), Unproven);
}

/// A foreign write later than a heartbeat after the last sign of life is never judged as proven, whatever the state
/// of the mark.
#[test]
fn late_foreign_write_is_never_proven() {
    for begun in 10..14 {
        for ended in 10..=begun {
            for alive_ms in [1000, 4000, 5000, 5015] {
                for step_ms in [-4000, -2000, 0, 2000] {
                    let mut mark = mark(begun, ended);
                    mark.alive_at_ns = alive_ms * MS;
                    for capture in [mark.capture, None] {
                        mark.capture = capture;
                        for written_ms in [5036, 5100, 7000, 8999] {
                            for is_before_step in [false, true] {
                                let time = if is_before_step {
                                    written_ms
                                } else {
                                    written_ms + step_ms
                                };
                                let clock = stepped(step_ms, 9000 + step_ms);
                                let found = judge(Some(&mark), &file(at(time, time)), clock);
                                assert_ne!(found, Proven, "{mark:?} {time} {step_ms}");
                            }
                        }
                    }
                }
            }
        }
    }
}

const COUNTED: DiskCounters = DiskCounters {
    sequence: 3,
    written: 1000,
    beside: 40,
    is_reliable: true,
    backing: None,
};

/// Returns a mark of a block device with the given numbers of sectors begun and ended since the capture.
fn disk_mark(begun: u64, ended: u64) -> Snapshot {
    Snapshot {
        begun: 10 + begun,
        ended: 10 + ended,
        begun_sectors: 100 + begun,
        ended_sectors: 100 + ended,
        capture: Some(Capture {
            begun: 10,
            begun_sectors: 100,
            disk: Some(COUNTED),
            ..Capture::default()
        }),
        ..quiet()
    }
}

#[test]
fn disk_verdict_follows_counters() {
    let grown = |sectors| DiskCounters {
        written: COUNTED.written + sectors,
        ..COUNTED
    };
    let inexact = |mark| Snapshot {
        is_inexact: true,
        ..mark
    };
    let (replaced, unknown) = (
        DiskCounters { sequence: 4, ..COUNTED },
        DiskCounters { sequence: 0, ..COUNTED },
    );
    let beside = DiskCounters { beside: 41, ..COUNTED };
    let no_capture = Snapshot {
        capture: None,
        ..disk_mark(8, 8)
    };
    for (case, mark, now, wanted) in [
        ("quiet", disk_mark(0, 0), COUNTED, Proven),
        ("quiet, written", disk_mark(0, 0), grown(8), Changed),
        ("ended", disk_mark(24, 24), grown(24), Proven),
        ("ended, written", disk_mark(24, 24), grown(32), Changed),
        ("ended, and not all counted", disk_mark(24, 24), grown(16), Changed),
        ("in flight, all done", disk_mark(24, 8), grown(24), Proven),
        ("in flight, some done", disk_mark(24, 8), grown(16), Unproven),
        ("in flight, none done", disk_mark(24, 8), grown(8), Unproven),
        ("in flight, too few", disk_mark(24, 8), grown(7), Changed),
        ("in flight, too many", disk_mark(24, 8), grown(25), Changed),
        ("another disk", disk_mark(0, 0), replaced, Changed),
        ("a disk without a number", disk_mark(0, 0), unknown, Changed),
        ("through the whole disk", disk_mark(0, 0), beside, Unproven),
        ("after a discard", inexact(disk_mark(24, 24)), grown(16), Unproven),
        ("no capture", no_capture, COUNTED, Unproven),
    ] {
        let state = State {
            file: None,
            disk: Some(now),
            is_provable: true,
        };
        assert_eq!(judge(Some(&mark), &state, clock()), wanted, "{case}");
    }
}

/// The counters of a loop device do not show foreign writes to its backing file; the file's times do.
#[test]
fn loop_device_needs_counters_and_times() {
    let with_times = |begun, ended| {
        let mut mark = disk_mark(begun, ended);
        mark.capture = mark.capture.map(|capture| Capture {
            file: Some(THEN),
            ..capture
        });
        mark
    };
    for (mark, growth, times, wanted) in [
        (with_times(0, 0), 0, THEN, Proven),
        (with_times(0, 0), 0, at(5100, 5100), Changed),
        (with_times(0, 0), 0, at(900, 5100), Unproven),
        (with_times(8, 8), 8, at(4990, 4990), Proven),
        (with_times(8, 8), 8, at(5100, 5100), Changed),
        (with_times(8, 8), 16, at(4990, 4990), Changed),
        (with_times(8, 0), 8, at(5100, 5100), Unproven),
    ] {
        let now = DiskCounters {
            written: COUNTED.written + growth,
            backing: Some(times),
            ..COUNTED
        };
        let state = State {
            file: Some(times),
            disk: Some(now),
            is_provable: true,
        };
        assert_eq!(judge(Some(&mark), &state, clock()), wanted, "{growth} {times:?}");
    }
}
