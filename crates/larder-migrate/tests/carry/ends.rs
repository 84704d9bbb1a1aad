//! How sessions end, and events that do not end them.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Barrier, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use larder_migrate::limits::Limits;
use larder_migrate::notes::{Notes, ReceivedNote};
use larder_migrate::progress::SenderTotals;
use larder_migrate::receive::receive;
use larder_migrate::send::{SendError, Sender};
use larder_migrate::wire::{CHANNEL_FRAMES_MAX, FRAME_RAW_MAX};

use crate::pair::{LIMIT, Pair, watch};
use crate::{Numbers, read_all};

/// Writes these bytes, then waits for the end of the connection, of either kind.
fn write(path: &Path, bytes: &[u8]) {
    let mut socket = UnixStream::connect(path).expect("connects");
    socket.write_all(bytes).expect("writes");
    let _ = socket.read(&mut [0]);
}

fn pairs() -> impl Iterator<Item = Pair> {
    (0..12).map(|at| {
        let pair = Pair::new(3, 1 << 20);
        if at % 3 == 0 { pair.encrypted() } else { pair }
    })
}

#[test]
fn tls_session_carries_every_byte() {
    let mut bytes = vec![0; 5_000_001];
    Numbers(5).fill(&mut bytes);
    let pair = Pair::new(3, 1 << 20).encrypted();
    let (_, received, _) = pair.run(
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            socket.write_all(&bytes).expect("writes");
        },
        read_all,
    );
    assert!(received == bytes);
}

#[test]
fn receiver_reports_why_sender_ended() {
    for pair in pairs() {
        let ended = pair.end(
            |path| write(path, b"the beginning"),
            |listener| {
                let (mut socket, _) = listener.accept().expect("a connection");
                socket.read_exact(&mut [0; 13]).expect("reads");
                pair.steering.stop.store(true, Ordering::Relaxed);
                let _ = socket.read(&mut [0]);
            },
        );
        assert_eq!(ended.errors(), ["stopped", "the sender: stopped"]);
    }
}

#[test]
fn sender_reports_why_receiver_ended() {
    for pair in pairs() {
        let ended = pair.end(
            |path| write(path, b"the beginning"),
            |listener| {
                let (mut socket, _) = listener.accept().expect("a connection");
                socket.read_exact(&mut [0; 13]).expect("reads");
                pair.stop.store(true, Ordering::Relaxed);
                let _ = socket.read(&mut [0]);
            },
        );
        assert_eq!(ended.errors(), ["the receiver: stopped", "stopped"]);
    }
    for pair in pairs() {
        std::fs::remove_file(pair.connect()).expect("it is there");
        // More bytes are in flight when the receiver ends.
        let ended = pair.end(
            |path| {
                let mut socket = UnixStream::connect(path).expect("connects");
                while socket.write_all(&[7; 100_000]).is_ok() {}
            },
            |_| {},
        );
        let [sender, receiver] = ended.errors();
        assert!(receiver.starts_with("cannot connect to QEMU at "), "{receiver}");
        assert_eq!(sender, format!("the receiver: {receiver}"));
    }
}

#[test]
fn receiver_ends_when_sender_disconnects() {
    for mut pair in pairs() {
        pair.patience = Duration::ZERO;
        let _watched = watch();
        let ended = thread::scope(|scope| {
            let receiver = scope.spawn(|| receive(&pair.tcp, &pair.receiver(), &pair.stop, None));
            // Simulates a kill: the sender sends no reason.
            drop(Sender::connect(&pair.sender()).expect("it connects"));
            receiver.join().expect("it ends")
        });
        let error = ended.expect_err("nothing has come").to_string();
        assert!(
            error.ends_with("its larder process ended, or something between the hosts cut the connection"),
            "{error}"
        );
    }
}

#[test]
fn panicking_thread_ends_both_sides() {
    let pair = Pair::new(2, 0);
    let ended = pair.end_with(
        Some(&|notes: Notes| {
            let _ = notes.receive(LIMIT);
            panic!("as a test");
        }),
        |sender| sender.notes().send(b"panic"),
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            let _ = socket.read(&mut [0]);
        },
        |_| {},
    );
    let [sender, receiver] = ended.errors();
    assert!(receiver.starts_with("a thread panicked (moving the VM)"), "{receiver}");
    assert_eq!(sender, format!("the receiver: {receiver}"));
}

/// A channel ends when the destination's QEMU closes it while the source's waits for room.
#[test]
fn channel_closed_while_full_ends() {
    let mut pair = Pair::new(2, 0);
    pair.window = 2 * FRAME_RAW_MAX as u32;
    let ended = pair.end(
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            let error = socket.write_all(&[9; 8 << 20]).expect_err("nobody reads all that");
            assert_eq!(error.kind(), ErrorKind::BrokenPipe);
        },
        |listener| {
            let (socket, _) = listener.accept().expect("a connection");
            let full = u64::from(pair.window) - FRAME_RAW_MAX as u64;
            pair.wait_until(|totals| totals.raw_bytes.saturating_sub(totals.delivered_bytes) > full);
            drop(socket);
        },
    );
    // The channel is opaque, so its early end does not count as a failure.
    ended.sender.expect("it carries");
    ended.receiver.expect("it receives");
}

#[test]
fn bandwidth_limited_sender_can_be_stopped() {
    let pair = Pair::new(1, 0);
    pair.limits.update(|limits| limits.bandwidth = Some(1000));
    let mut bytes = vec![0; 2 * FRAME_RAW_MAX + 100_000];
    Numbers(8).fill(&mut bytes);
    let written = Barrier::new(2);
    let ended = pair.end(
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            // Once these are written, the second frame is being made, which the limit delays for minutes.
            socket.write_all(&bytes).expect("writes");
            written.wait();
            let _ = socket.read(&mut [0]);
        },
        |listener| {
            let (mut socket, _) = listener.accept().expect("a connection");
            written.wait();
            pair.wait_until(|totals| totals.frames == 1);
            pair.steering.stop.store(true, Ordering::Relaxed);
            let _ = socket.read_to_end(&mut Vec::new());
        },
    );
    assert!(matches!(ended.sender, Err(SendError::Stopped)), "{:?}", ended.sender);
    assert_eq!(ended.errors()[1], "the sender: stopped");
}

/// Returns memory that compresses, and takes time to do so.
fn text(len: usize) -> Vec<u8> {
    larder_codec::measure::MemoryContent::Text.generate(len, 3)
}

/// Carries bytes, and calls `begun` after the first frame was sent.
fn carry(pair: &Pair, bytes: &[u8], begun: impl FnOnce() + Send) -> SenderTotals {
    let (_, read, totals) = pair.run(
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            socket.write_all(bytes).expect("writes");
            socket.shutdown(Shutdown::Write).expect("ends");
            let _ = socket.read(&mut [0]);
        },
        |listener| {
            let (mut socket, _) = listener.accept().expect("a connection");
            pair.wait_until(|totals| totals.frames >= 1);
            begun();
            let mut read = Vec::new();
            socket.read_to_end(&mut read).expect("reads");
            read
        },
    );
    assert!(read == bytes, "other bytes");
    totals
}

#[test]
fn lanes_obey_cpu_limit() {
    let pair = Pair::new(3, 0);
    pair.limits.update(|limits| limits.processors = Some(0.05));
    let bytes = text(48 << 20);
    let begun = Instant::now();
    let totals = carry(&pair, &bytes, || {});
    let processors = totals.cpu_ns as f64 / begun.elapsed().as_nanos() as f64;
    println!("{processors} processors");
    assert!(processors < 0.055, "{processors}");
    assert!(totals.encode_cpu_ns > 0 && totals.encode_cpu_ns < totals.cpu_ns, "{totals:?}");
    assert!(!pair.progress.choice().classes.is_empty(), "nothing says what was picked");
}

/// Limits that are lifted during a session no longer delay it.
#[test]
fn lifted_limits_take_effect_at_once() {
    let limit: [fn(&mut Limits); 2] = [|limits| limits.processors = Some(1e-6), |limits| limits.bandwidth = Some(1)];
    for limit in limit {
        let pair = Pair::new(2, 0);
        pair.limits.update(limit);
        // With the limit, the rest would take days.
        carry(&pair, &text(4 << 20), || {
            pair.limits.update(|limits| *limits = Limits::default());
        });
    }
}

/// A QEMU that does not accept connections delays no notes.
#[test]
fn unaccepting_qemu_blocks_no_notes() {
    let pair = Pair::new(2, 0);
    rustix::net::listen(&pair.incoming, 0).expect("a shorter queue");
    // Fills the backlog; the kernel accepts one more connection than its configured length.
    let filler = UnixStream::connect(pair.connect()).expect("there is room");
    let notes = OnceLock::new();
    let heard = Barrier::new(2);
    let ended = pair.end_with(
        Some(&|notes: Notes| {
            assert_eq!(notes.receive(LIMIT), ReceivedNote::Note(b"after it was opened".to_vec()));
            heard.wait();
        }),
        |sender| drop(notes.set(sender.notes())),
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            socket.write_all(b"all of it").expect("writes");
            pair.wait_until(|totals| totals.frames == 1);
            notes.wait().send(b"after it was opened");
        },
        |listener| {
            heard.wait();
            drop(listener.accept().expect("the one that was there first"));
            read_all(listener)
        },
    );
    drop(filler);
    assert_eq!(ended.destination, b"all of it");
    ended.sender.expect("it carries");
    ended.receiver.expect("it receives");
}

#[test]
fn receiver_stops_while_qemu_accepts_nothing() {
    let pair = Pair::new(2, 0);
    rustix::net::listen(&pair.incoming, 0).expect("a shorter queue");
    let filler = UnixStream::connect(pair.connect()).expect("there is room");
    let ended = pair.end(
        |path| write(path, b"all of it"),
        |_| {
            pair.wait_until(|totals| totals.frames == 1);
            pair.stop.store(true, Ordering::Relaxed);
        },
    );
    drop(filler);
    assert_eq!(ended.errors(), ["the receiver: stopped", "stopped"]);
}

/// A source QEMU that does not read its return path delays no notes.
#[test]
fn unread_return_path_blocks_no_notes() {
    const LEN: usize = 4 << 20;
    let pair = Pair::new(2, 0);
    let notes = OnceLock::new();
    let written = Barrier::new(2);
    let ended = pair.end_with(
        Some(&|notes: Notes| {
            written.wait();
            notes.send(b"after all that");
            while notes.receive(LIMIT) != ReceivedNote::SessionEnded {}
        }),
        |sender| drop(notes.set(sender.notes())),
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            let notes = notes.wait();
            assert_eq!(notes.receive(LIMIT), ReceivedNote::Note(b"after all that".to_vec()));
            let mut bytes = Vec::new();
            socket.read_to_end(&mut bytes).expect("reads");
            bytes
        },
        |listener| {
            let (mut socket, _) = listener.accept().expect("a connection");
            let mut bytes = vec![0; LEN];
            Numbers(3).fill(&mut bytes);
            socket.write_all(&bytes).expect("writes");
            written.wait();
            bytes
        },
    );
    assert!(ended.source == ended.destination, "{} of {LEN} bytes", ended.source.len());
    ended.sender.expect("it carries");
    ended.receiver.expect("it receives");
}

/// A channel has at most [`CHANNEL_FRAMES_MAX`] frames that QEMU has not taken, however small they are.
#[test]
fn frames_waiting_for_qemu_are_bounded() {
    let bytes: Vec<u8> = (0..4 * CHANNEL_FRAMES_MAX).map(|at| at as u8).collect();
    let pair = Pair::new(3, 0);
    let full = Barrier::new(2);
    let ended = pair.end(
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            let under_way = |totals: &SenderTotals| totals.raw_bytes.saturating_sub(totals.delivered_bytes);
            let mut rest = bytes.chunks(1);
            // One frame for each byte, until the limit is reached.
            for (at, byte) in (1..).zip(&mut rest) {
                socket.write_all(byte).expect("writes");
                pair.wait_until(|totals| totals.raw_bytes >= at || under_way(totals) >= CHANNEL_FRAMES_MAX as u64);
                if under_way(&pair.progress.totals()) >= CHANNEL_FRAMES_MAX as u64 {
                    break;
                }
            }
            assert!(rest.len() > 0, "nothing has to wait");
            // Further bytes wait here and do not become frames one by one, however much time passes.
            socket.set_nonblocking(true).expect("a socket");
            let mut unread = Vec::new();
            for byte in &mut rest {
                let before = pair.progress.totals().raw_bytes;
                if socket.write(byte).is_err() {
                    unread.push(byte);
                    break;
                }
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_millis(1) && pair.progress.totals().raw_bytes == before {
                    thread::yield_now();
                }
            }
            socket.set_nonblocking(false).expect("a socket");
            full.wait();
            unread.into_iter().chain(rest).for_each(|byte| socket.write_all(byte).expect("writes"));
        },
        |listener| {
            let (mut socket, _) = listener.accept().expect("a connection");
            full.wait();
            let mut received = Vec::new();
            socket.read_to_end(&mut received).expect("reads");
            received
        },
    );
    assert!(ended.destination == bytes);
    ended.sender.expect("it carries");
    ended.receiver.expect("it receives");
}
