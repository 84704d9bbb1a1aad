//! Tests of the NBD client when its server dies: no acknowledged change is lost, and no unanswered request is
//! forgotten.

mod nbd_support;

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use larder_block::backend::nbd::{NbdDevice, NbdOptions};
use larder_block::event_loop::{POLL_MAX_DEFAULT, yield_now};
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, Loop, ReadBuf, WriteBuf, WriteFlags, ZeroFlags,
};
use nbd_support::fake::{DISCONNECT, Disk, Offer, Peer, READ, WRITE, connections, script};
use nbd_support::{Place, Random, contents, pattern, program, run};

const MIB: u64 = 1 << 20;

fn on_loop(test: impl AsyncFn(&Loop)) {
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(test(&on));
}

async fn open(on: &Loop, place: &Place, options: NbdOptions) -> Rc<NbdDevice> {
    match NbdDevice::open(on, &place.uri(""), options).await {
        Ok(device) => device,
        Err(error) => panic!("{error}"),
    }
}

/// A part of the disk that one task works on, and its expected content.
struct Region {
    start: u64,
    model: Vec<u8>,
}

/// Writes, zeroes, reads back and flushes in a region, one request at a time, so that the model is exact.
async fn work(device: Rc<NbdDevice>, mut region: Region, seed: u64, steps: u64) -> Region {
    let mut random = Random(seed);
    let blocks = region.model.len() as u64 / 512;
    for step in 0..steps {
        let first = random.below(blocks);
        let longest = if random.below(16) == 0 { 800 } else { 16 };
        let count = 1 + random.below((blocks - first).min(longest));
        let part = &mut region.model[first as usize * 512..(first + count) as usize * 512];
        let range = ByteRange::new(region.start + first * 512, count * 512);
        match random.below(10) {
            0..5 => {
                part.copy_from_slice(&pattern(part.len(), seed ^ step << 20));
                let flags = WriteFlags { fua: random.below(20) == 0 };
                let write = device.write(range.start, WriteBuf::new(part), flags);
                write.await.expect("writes");
            }
            5 => {
                part.fill(0);
                let zero = device.write_zeroes(range, ZeroFlags::default());
                zero.await.expect("zeroes");
            }
            6 => {
                // A discard followed by a write of the same range: the order must hold in the replay too.
                device.discard(range).await.expect("discards");
                part.fill(step as u8);
                let write = device.write(range.start, WriteBuf::new(part), WriteFlags::NONE);
                write.await.expect("writes");
            }
            7 if random.below(2) == 0 => device.flush().await.expect("flushes"),
            _ => {
                let mut back = vec![0xaa; part.len()];
                let read = device.read(range.start, ReadBuf::new(&mut back));
                read.await.expect("reads");
                assert!(back == part, "step {step}: {range} changed its mind");
            }
        }
    }
    region
}

/// Lets several tasks work concurrently, and returns the disk's expected content.
async fn work_everywhere(on: &Loop, device: &Rc<NbdDevice>, size: u64, steps: u64) -> Vec<u8> {
    const TASKS: u64 = 8;
    let len = size / TASKS;
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let region = Region { start: task * len, model: vec![0; len as usize] };
            on.spawn_with_result(work(Rc::clone(device), region, task + 1, steps))
        })
        .collect();
    let mut model = Vec::new();
    for task in tasks {
        model.extend(task.await.model);
    }
    model
}

/// Serves a random number of requests, then dies and loses unflushed changes.
fn serve_and_forget(peer: &mut Peer, disk: &Disk, random: &mut Random) -> io::Result<()> {
    let life = 50 + random.below(250);
    for _ in 0..life {
        let asked = peer.request()?;
        if asked.command == DISCONNECT {
            return Ok(());
        }
        peer.reply(false, &asked, disk)?;
    }
    match random.below(3) {
        // Dies in the middle of a request.
        0 => {
            let asked = peer.header()?;
            if asked.command == WRITE {
                peer.bytes(asked.len / 2)?;
            }
        }
        // Dies after carrying out a request and before the reply.
        1 => {
            let asked = peer.request()?;
            disk.carry_out(&asked);
        }
        // Dies in the middle of the reply to a read.
        _ => {
            let asked = peer.request()?;
            if asked.command == READ {
                let data = disk.carry_out(&asked);
                peer.simple(asked.cookie, 0, &data[..data.len() / 2])?;
            }
        }
    }
    disk.forget();
    Ok(())
}

/// The replay log restores acknowledged writes that a server lost because they were not flushed.
#[test]
fn acknowledged_writes_survive_server_power_loss() {
    const SIZE: u64 = 8 * MIB;
    for (replay_log, seed) in [(ByteLen::mib(1), 3), (ByteLen::mib(16), 5)] {
        on_loop(async |on| {
            let place = Place::new();
            let disk = Disk::new(SIZE);
            let server_disk = disk.clone();
            let mut random = Random(seed);
            let scripts = std::iter::repeat_with(move || {
                let disk = server_disk.clone();
                let mut random = Random(random.next() | 1);
                script(move |mut peer| {
                    peer.handshake(Offer::of(SIZE))?;
                    serve_and_forget(&mut peer, &disk, &mut random)
                })
            });
            let _server = connections(place.std_listener(), scripts);
            let options = NbdOptions { replay_log, ..NbdOptions::default() };
            let device = open(on, &place, options).await;
            let model = work_everywhere(on, &device, SIZE, 300).await;
            device.flush().await.expect("flushes");
            let seen = device.statistics();
            assert!(seen.connections > 5 && seen.replayed > 0, "{seen:?}");
            assert_eq!(seen.log_used, ByteLen::ZERO);
            assert!(disk.durable() == model, "an acknowledged write is lost");
        });
    }
}

#[test]
fn full_log_starts_a_flush() {
    on_loop(async |on| {
        let place = Place::new();
        let disk = Disk::new(8 * MIB);
        let honest = disk.clone();
        let server = connections(
            place.std_listener(),
            [script(move |mut peer| {
                peer.handshake(Offer::of(8 * MIB))?;
                peer.serve(false, &honest)
            })],
        );
        let options = NbdOptions { replay_log: ByteLen::mib(1), ..NbdOptions::default() };
        let device = open(on, &place, options).await;
        let data = pattern(64 << 10, 1);
        let writes: Vec<_> = (0..128)
            .map(|index| {
                let start = ByteOffset::new(index * (64 << 10));
                device.write(start, WriteBuf::new(&data), WriteFlags::NONE)
            })
            .collect();
        for write in writes {
            write.await.expect("writes");
            assert!(device.statistics().log_used <= ByteLen::mib(1));
        }
        assert!(disk.flushes() >= 8, "{} flushes for 8 MiB", disk.flushes());
        drop(device);
        on.run_blocking(move || server.join().expect("the script ends")).await.expect("a thread");
    });
}

#[test]
fn failed_log_flush_fails_waiting_writes() {
    on_loop(async |on| {
        let place = Place::new();
        let disk = Disk::new(4 * MIB);
        let server = connections(
            place.std_listener(),
            [script(move |mut peer| {
                peer.handshake(Offer::of(4 * MIB))?;
                loop {
                    let asked = peer.request()?;
                    match asked.command {
                        DISCONNECT => return Ok(()),
                        3 => peer.simple(asked.cookie, 28, &[])?,
                        _ => peer.reply(false, &asked, &disk)?,
                    }
                }
            })],
        );
        let options = NbdOptions { replay_log: ByteLen::mib(1), ..NbdOptions::default() };
        let device = open(on, &place, options).await;
        let data = pattern(256 << 10, 1);
        let mut failures = Vec::new();
        for index in 0..8 {
            let start = ByteOffset::new(index * (256 << 10));
            let write = device.write(start, WriteBuf::new(&data), WriteFlags::NONE);
            failures.extend(write.await.err().map(|error| error.failure()));
        }
        assert!(!failures.is_empty() && failures.iter().all(|failure| *failure == Failure::NoSpace));
        let mut back = vec![0; 512];
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
        read.await.expect("reads go on");
        drop(device);
        on.run_blocking(move || server.join().expect("the script ends")).await.expect("a thread");
    });
}

#[test]
fn nbdkit_killed_under_load_loses_nothing() {
    const SIZE: u64 = 16 * MIB;
    on_loop(async |on| {
        let place = Place::new();
        let image = place.path("image");
        std::fs::File::create(&image).expect("a file").set_len(SIZE).expect("room");
        let image = image.display().to_string();
        let mut server = place.nbdkit(&["file", &image]);
        let device = open(on, &place, NbdOptions::default()).await;
        let working = {
            let (on, device) = (on.clone(), Rc::clone(&device));
            async move { work_everywhere(&on, &device, SIZE, 1500).await }
        };
        let working = on.spawn_with_result(working);
        for round in 1..=4 {
            // Kill under load: some hundred requests after the last kill.
            until(|| device.statistics().connections >= round).await;
            let before = place_of(&device);
            until(|| place_of(&device) > before + 300).await;
            server.kill();
            server = place.nbdkit(&["file", &image]);
        }
        let model = working.await;
        device.flush().await.expect("flushes");
        assert!(device.statistics().connections >= 5);
        let uri = place.uri("");
        let folder = place.folder.path().to_owned();
        let seen = on.run_blocking(move || contents(&uri, &folder)).await.expect("a thread");
        assert!(seen == model);
    });
}

/// Returns the number of answered requests, as a measure of progress.
fn place_of(device: &NbdDevice) -> u64 {
    device.statistics().answered
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        yield_now().await;
    }
}

/// A kill of qemu-nbd with unflushed qcow2 metadata loses no acknowledged write.
#[test]
fn killed_qemu_nbd_loses_no_metadata() {
    const SIZE: u64 = 64 * MIB;
    on_loop(async |on| {
        let place = Place::new();
        let image = place.path("image.qcow2").display().to_string();
        run(program("qemu-img").args(["create", "-q", "-f", "qcow2", &image, "64M"]));
        let serve = ["-f", "qcow2", "--cache=writeback", "--persistent", "--discard=unmap"];
        let serve: Vec<&str> = serve.into_iter().chain([image.as_str()]).collect();
        let mut server = place.serve("qemu-nbd", &serve);
        let device = open(on, &place, NbdOptions::default()).await;
        let model = pattern(2 * MIB as usize, 9);
        for (index, block) in model.chunks(64 << 10).enumerate() {
            // The blocks are far apart, so that each allocates a cluster, whose mapping qemu-nbd keeps in its memory.
            let start = ByteOffset::new(index as u64 * 2 * MIB);
            let write = device.write(start, WriteBuf::new(block), WriteFlags::NONE);
            write.await.expect("writes");
        }
        server.kill();
        server = place.serve("qemu-nbd", &serve);
        device.flush().await.expect("flushes");
        assert_eq!(device.statistics().replayed, 32);
        server.terminate();
        drop(device);
        let uri = image.clone();
        let folder = place.path("raw").display().to_string();
        run(program("qemu-img").args(["convert", "-f", "qcow2", "-O", "raw", &uri, &folder]));
        let seen = std::fs::read(&folder).expect("is there");
        for (index, block) in model.chunks(64 << 10).enumerate() {
            let start = index * 2 * MIB as usize;
            assert!(seen[start..start + block.len()] == *block, "block {index} is lost");
        }
        assert_eq!(seen.len() as u64, SIZE);
    });
}

#[test]
fn unreachable_server_fails_requests_until_back() {
    on_loop(async |on| {
        let place = Place::new();
        let disk = Disk::new(MIB);
        let first = disk.clone();
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let server = connections(
            place.std_listener(),
            [
                script(move |mut peer| {
                    peer.handshake(Offer::of(MIB))?;
                    let asked = peer.request()?;
                    peer.reply(false, &asked, &first)?;
                    first.forget();
                    Ok(())
                }),
                // While the server is unreachable, a connection gets no answer until the test permits it.
                script(move |mut peer| {
                    held.recv().expect("the test goes on");
                    peer.wait_for_end();
                    Ok(())
                }),
                script(move |mut peer| {
                    peer.handshake(Offer::of(MIB))?;
                    peer.serve(false, &disk)
                }),
            ],
        );
        let options = NbdOptions {
            reconnect: Duration::from_millis(100),
            handshake_timeout: Duration::from_secs(3),
            ..NbdOptions::default()
        };
        let device = open(on, &place, options).await;
        let data = pattern(4096, 5);
        let write = device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE);
        write.await.expect("is acknowledged");
        let error = device.flush().await.expect_err("nobody is there");
        assert_eq!(error.failure(), Failure::Unreachable);
        let mut back = vec![0; 4096];
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
        let error = read.await.expect_err("at once");
        assert_eq!(error.failure(), Failure::Unreachable);
        hold.send(()).expect("the server waits");
        until(|| !device.statistics().unreachable).await;
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
        read.await.expect("reads again");
        assert!(back == data, "what was acknowledged before is there");
        drop(device);
        on.run_blocking(move || server.join().expect("the scripts end")).await.expect("a thread");
    });
}

/// A server that completes every handshake and breaks the protocol at every request is unreachable after the limit,
/// and the client does not reconnect to it more and more often. It is used again once it answers.
#[test]
fn handshakes_alone_end_no_outage() {
    on_loop(async |on| {
        let place = Place::new();
        let disk = Disk::new(MIB);
        let first = disk.clone();
        let limit = Duration::from_secs(1);
        // The pauses of 10, 20, 40, ... ms between connections add up to more than the limit at the eighth.
        const VIOLATIONS_MAX: u64 = 12;
        let honest = Arc::new(AtomicBool::new(false));
        let ended = Arc::new(AtomicBool::new(false));
        let violations = Arc::new(AtomicU64::new(0));
        let answers_one = script(move |mut peer| {
            peer.handshake(Offer::of(MIB))?;
            let asked = peer.request()?;
            peer.reply(false, &asked, &first)
        });
        let further = {
            let (honest, ended, violations) = (Arc::clone(&honest), Arc::clone(&ended), Arc::clone(&violations));
            std::iter::from_fn(move || {
                if ended.load(Ordering::SeqCst) {
                    return None;
                }
                let (honest, ended, violations) = (Arc::clone(&honest), Arc::clone(&ended), Arc::clone(&violations));
                let disk = disk.clone();
                Some(script(move |mut peer| {
                    peer.handshake(Offer::of(MIB))?;
                    if honest.load(Ordering::SeqCst) {
                        ended.store(true, Ordering::SeqCst);
                        return peer.serve(false, &disk);
                    }
                    violations.fetch_add(1, Ordering::SeqCst);
                    peer.request()?;
                    peer.send(&[b"no reply of the protocol"])
                }))
            })
        };
        let server = connections(place.std_listener(), std::iter::once(answers_one).chain(further));
        let options = NbdOptions { reconnect: limit, replay_log: ByteLen::new(0), ..NbdOptions::default() };
        let device = open(on, &place, options).await;
        let mut back = vec![1; 4096];
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
        read.await.expect("the first request is answered");
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
        let error = read.await.expect_err("no request is answered");
        assert_eq!(error.failure(), Failure::Unreachable);
        let count = violations.load(Ordering::SeqCst);
        assert!(count > 1, "the server is asked again");
        assert!(count <= VIOLATIONS_MAX, "the client reconnected {count} times in {limit:?}");
        honest.store(true, Ordering::SeqCst);
        loop {
            let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
            match read.await {
                Ok(()) => break,
                Err(error) => assert_eq!(error.failure(), Failure::Unreachable),
            }
            yield_now().await;
        }
        drop(device);
        on.run_blocking(move || server.join().expect("the scripts end")).await.expect("a thread");
    });
}

/// The client reconnects only to an export that has all features of the old one.
#[test]
fn lesser_export_cannot_replace_the_old() {
    on_loop(async |on| {
        let place = Place::new();
        let disk = Disk::new(2 * MIB);
        let whole = Offer { structured: true, ..Offer::of(MIB) };
        let offers = [
            whole,
            Offer { size: MIB / 2, ..whole },
            Offer { flags: nbd_support::fake::FLAGS | 2, ..whole },
            Offer { flags: 1 | 1 << 2, ..whole },
            Offer { blocks: Some([4096, 4096, 32 << 20]), ..whole },
            Offer { blocks: Some([512, 4096, 1 << 20]), ..whole },
            // This export has no block status.
            Offer::of(MIB),
        ];
        let mut scripts: Vec<_> =
            offers.into_iter().map(|offer| script(move |mut peer| peer.handshake(offer))).collect();
        scripts.push(script(move |mut peer| {
            let offer = Offer { structured: true, ..Offer::of(2 * MIB) };
            peer.handshake(offer)?;
            peer.serve(true, &disk)
        }));
        let server = connections(place.std_listener(), scripts);
        let device = open(on, &place, NbdOptions::default()).await;
        let before = device.geometry();
        let generation = device.size_changes().generation();
        let mut back = vec![1; 512];
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut back));
        read.await.expect("reads from the last one");
        assert_eq!(device.statistics().connections, 2);
        device.size_changes().changed_after(generation).await;
        let after = device.geometry();
        assert_eq!(after.size, ByteLen::mib(2));
        assert_eq!(larder_block::Geometry { size: before.size, ..after }, before);
        drop(device);
        on.run_blocking(move || server.join().expect("the scripts end")).await.expect("a thread");
    });
}

#[test]
fn request_moves_from_server_shutting_down() {
    on_loop(async |on| {
        let place = Place::new();
        let disk = Disk::new(MIB);
        let server = connections(
            place.std_listener(),
            [
                script(|mut peer| {
                    peer.handshake(Offer::of(MIB))?;
                    let asked = peer.request()?;
                    peer.simple(asked.cookie, 108, &[])?;
                    peer.wait_for_end();
                    Ok(())
                }),
                script(move |mut peer| {
                    peer.handshake(Offer::of(MIB))?;
                    peer.serve(false, &disk)
                }),
            ],
        );
        let device = open(on, &place, NbdOptions::default()).await;
        let data = pattern(4096, 5);
        let write = device.write(ByteOffset::ZERO, WriteBuf::new(&data), WriteFlags::NONE);
        write.await.expect("writes to the successor");
        assert_eq!(device.statistics().connections, 2);
        drop(device);
        on.run_blocking(move || server.join().expect("the scripts end")).await.expect("a thread");
    });
}
