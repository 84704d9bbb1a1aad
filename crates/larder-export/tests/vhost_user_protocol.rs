//! Tests of the guarantees that a vhost-user front-end relies on, for any order of its messages.

mod front_end;
mod vhost_user_server;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use front_end::memory::Memory;
use front_end::queue::{AREA_BYTES, Request, T_DISCARD, T_GET_ID, T_WRITE_ZEROES};
use front_end::ring::Buffer;
use front_end::{F_CONFIG_WCE, F_FLUSH, F_LOG_ALL, F_PACKED, FrontEnd, Options, wire};
use vhost_user_server::{DISK_BYTES, Server};

const LIMIT: Duration = Duration::from_secs(240);

fn kinds() -> Vec<Options> {
    let mut all = Vec::new();
    for packed in [false, true] {
        for event_index in [false, true] {
            for indirect in [false, true] {
                all.push(Options { packed, event_index, indirect, ..Options::default() });
            }
        }
    }
    all
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

fn check_round_trip(guest: &mut FrontEnd, queue: usize, seed: u64) {
    let (data, bytes) = (guest.data(), pattern(seed, 4096));
    guest.memory.write(data, &bytes);
    let sector = seed % 1000 * 8;
    let pieces = [Buffer { address: data, len: 1024 }, Buffer { address: data + 1024, len: 3072 }];
    let done = guest.queues[queue].run(&Request::write(sector, &pieces)).expect("writes");
    assert_eq!((done.status, done.written), (0, 1));
    let back = [Buffer { address: data + 8192, len: 4096 }];
    let done = guest.queues[queue].run(&Request::read(sector, &back)).expect("reads");
    assert_eq!((done.status, done.written), (0, 4097));
    assert_eq!(guest.memory.read_vec(data + 8192, 4096), bytes);
}

/// Data that was written is read back over every kind of ring.
#[test]
fn data_reads_back_over_every_ring() {
    let server = Server::start();
    for kind in kinds() {
        let options = Options { queues: 3, ..kind };
        let mut guest = FrontEnd::over(server.connect(), options).expect("sets up");
        assert_eq!(guest.capacity().expect("a size"), DISK_BYTES);
        for round in 0..20 {
            for queue in 0..3 {
                check_round_trip(&mut guest, queue, round * 3 + queue as u64);
            }
        }
        assert_eq!(guest.queue().run(&Request::flush()).expect("flushes").status, 0);
    }
}

#[test]
fn rings_continue_after_index_wrap() {
    let server = Server::start();
    for kind in kinds() {
        // The size of a packed ring need not be a power of two.
        let size = if kind.packed { 13 } else { 16 };
        let mut guest = FrontEnd::over(server.connect(), Options { size, ..kind }).expect("sets up");
        let into = [Buffer { address: guest.data(), len: 512 }];
        let mut answered = 0u32;
        let queue = guest.queue();
        while answered < 70_000 {
            while queue.has_room(1) {
                queue.add(&Request::read(u64::from(answered % 8), &into));
            }
            queue.go();
            assert_eq!(queue.complete(LIMIT).expect("an answer and its interrupt").status, 0);
            answered += 1;
            while let Some(done) = queue.try_complete() {
                assert_eq!(done.status, 0);
                answered += 1;
            }
        }
    }
}

/// Every kind of virtio-blk request gets the status that the specification requires.
#[test]
fn every_request_gets_specified_status() {
    let server = Server::start();
    let mut guest = FrontEnd::over(server.connect(), Options::default()).expect("sets up");
    let data = guest.data();
    let into = [Buffer { address: data, len: 20 }];
    let serial = Request { kind: T_GET_ID, sector: 0, out: &[], into: &into };
    assert_eq!(guest.queue().run(&serial).expect("an answer").status, 0);
    assert_eq!(&guest.memory.read_vec(data, 20)[..9], b"a serial\0");

    let block = [Buffer { address: data, len: 512 }];
    let statuses = |guest: &mut FrontEnd, request: &Request<'_>| guest.queue().run(request).expect("an answer").status;
    let end = DISK_BYTES / 512;
    assert_eq!(statuses(&mut guest, &Request::read(end - 1, &block)), 0);
    assert_eq!(statuses(&mut guest, &Request::read(end, &block)), 1, "behind the end");
    assert_eq!(statuses(&mut guest, &Request::read(u64::MAX, &block)), 1, "far behind the end");
    assert_eq!(statuses(&mut guest, &Request::write(u64::MAX / 512, &block)), 1, "wraps around");
    let odd = [Buffer { address: data, len: 100 }];
    assert_eq!(statuses(&mut guest, &Request::read(0, &odd)), 1, "no whole sector");
    assert_eq!(statuses(&mut guest, &Request { kind: 99, sector: 0, out: &[], into: &block }), 2, "unknown");

    for (kind, sectors, flags, status) in [
        (T_DISCARD, 8, 0, 0),
        (T_DISCARD, 8, 1, 2),
        (T_DISCARD, 8, 2, 2),
        (T_WRITE_ZEROES, 8, 0, 0),
        (T_WRITE_ZEROES, 8, 1, 0),
        (T_WRITE_ZEROES, 8, 2, 2),
        (T_WRITE_ZEROES, u32::MAX, 0, 1),
    ] {
        let queue = guest.queue();
        let id = queue.add_segment(kind, 8, sectors, flags);
        let got = queue.finish(id).expect("an answer").status;
        assert_eq!(got, status, "request {kind} of {sectors} sectors with flags {flags}");
    }
    for list in [&odd[..], &[]] {
        assert_eq!(statuses(&mut guest, &Request { kind: T_DISCARD, sector: 0, out: list, into: &[] }), 1);
    }
}

/// An interrupt that a killed server did not send is sent by its successor.
#[test]
fn successor_sends_missing_interrupt() {
    for kind in kinds() {
        let (first, second) = (Server::start(), Server::start());
        let mut guest = FrontEnd::over(first.connect(), kind).expect("sets up");
        check_round_trip(&mut guest, 0, 1);
        // The first server completes the request, but cannot interrupt, as if it had been killed just before.
        guest.wire.tell(wire::SET_VRING_CALL, &wire::longs(&[0x100]), &[]).expect("without an event");
        let queue = guest.queue();
        let mut counter = [0; 8];
        let _ = rustix::io::read(&queue.call, &mut counter);
        queue.ring.want_interrupt();
        queue.add(&Request::flush());
        queue.go();
        let give_up = Instant::now() + LIMIT;
        let base = queue.ring.base();
        while guest.config(0, 8).is_ok() && first.probe.flushes.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < give_up, "the flush never arrived, base {base}");
        }
        guest.wire.stream().shutdown(std::net::Shutdown::Both).expect("hangs up");
        drop(first);
        guest.reconnect(second.connect()).expect("goes on");
        guest.queue().wait_for_interrupt(Instant::now() + LIMIT).expect("the interrupt that was owed");
        assert_eq!(guest.queue().try_complete().expect("the flush").status, 0);
        check_round_trip(&mut guest, 0, 2);
    }
}

/// A guest whose memory barriers have no effect (QEMU before 8.1 emulating a single CPU) adds a request without
/// noticing that the device wants a kick, or enables an interrupt without the device noticing it. Either costs time,
/// and hangs nothing.
#[test]
fn lost_notification_does_not_hang() {
    // The server rechecks once, soon after it has gone to sleep. A test that is paused meanwhile comes too late.
    const ATTEMPTS: u32 = 50;
    // Longer than the server spins, shorter than it sleeps before it rechecks.
    let until_it_sleeps = Duration::from_micros(500);
    let server = Server::start();
    for kind in kinds().into_iter().filter(|kind| kind.event_index) {
        let mut guest = FrontEnd::over(server.connect(), kind).expect("sets up");
        let into = [Buffer { address: guest.data(), len: 512 }];
        let read = Request::read(0, &into);
        let queue = guest.queue();

        let seen = (0..ATTEMPTS).any(|_| {
            queue.run(&read).expect("an answer");
            std::thread::sleep(until_it_sleeps);
            queue.add(&read);
            queue.show_silently();
            let seen = queue.complete(Duration::from_millis(100)).is_ok();
            if !seen {
                queue.kick_now();
                queue.complete(LIMIT).expect("an answer");
            }
            seen
        });
        assert!(seen, "a request without its kick was never seen (packed: {})", kind.packed);

        let told = (0..ATTEMPTS).any(|_| {
            queue.run(&read).expect("an answer");
            // The requested interrupt index has already passed, so no interrupt is due.
            queue.add(&read);
            queue.go();
            std::thread::sleep(until_it_sleeps);
            let Some(done) = queue.try_complete() else {
                queue.complete(LIMIT).expect("an answer");
                return false;
            };
            assert_eq!(done.status, 0);
            queue.add(&read);
            queue.go();
            std::thread::sleep(until_it_sleeps);
            queue.want_interrupt_too_late();
            let told = queue.wait_for_interrupt(Instant::now() + Duration::from_millis(100)).is_ok();
            queue.complete(LIMIT).expect("an answer");
            told
        });
        assert!(told, "an interrupt that was asked for late never came (packed: {})", kind.packed);
    }
}

/// A queue whose memory is removed and added again continues.
#[test]
fn queue_survives_removal_of_its_memory() {
    for kind in kinds() {
        let server = Server::start();
        let mut guest = FrontEnd::over(server.connect(), kind).expect("sets up");
        check_round_trip(&mut guest, 0, 3);
        let whole = guest.memory.bytes() as u64;
        let mut region = wire::longs(&[0]);
        region.extend(FrontEnd::region(0, whole));
        guest.wire.tell(wire::REM_MEM_REG, &region, &[]).expect("removes it");
        guest.queue().add(&Request::flush());
        guest.queue().go();
        // Two regions instead of the one.
        for (start, bytes) in [(0, AREA_BYTES), (AREA_BYTES, whole - AREA_BYTES)] {
            let mut region = wire::longs(&[0]);
            region.extend(FrontEnd::region(start, bytes));
            guest.wire.tell(wire::ADD_MEM_REG, &region, &[guest.memory.file()]).expect("adds it");
        }
        guest.queue().complete(LIMIT).expect("the flush from meanwhile");
        check_round_trip(&mut guest, 0, 4);
    }
}

#[test]
fn requests_survive_new_memory_table() {
    for kind in kinds() {
        let server = Server::start();
        let mut guest = FrontEnd::over(server.connect(), kind).expect("sets up");
        let data = guest.data();
        let bytes = pattern(9, 4096);
        guest.memory.write(data, &bytes);
        server.probe.hold();
        let out = [Buffer { address: data, len: 4096 }];
        guest.queue().add(&Request::write(0, &out));
        guest.queue().go();
        server.probe.wait_started(1);
        guest.set_memory().expect("the same memory, mapped anew");
        server.probe.release();
        assert_eq!(guest.queue().complete(LIMIT).expect("an answer").status, 0);
        let into = [Buffer { address: data + 4096, len: 4096 }];
        assert_eq!(guest.queue().run(&Request::read(0, &into)).expect("reads").status, 0);
        assert_eq!(guest.memory.read_vec(data + 4096, 4096), bytes);
    }
}

/// A stopped queue continues at its position, and its position can be fetched twice.
#[test]
fn stopped_queue_continues_at_its_position() {
    for kind in kinds() {
        let server = Server::start();
        let mut guest = FrontEnd::over(server.connect(), kind).expect("sets up");
        for round in 0..3 {
            check_round_trip(&mut guest, 0, round);
            server.probe.hold();
            let started = server.probe.started.load(Ordering::SeqCst);
            guest.queue().add(&Request::flush());
            guest.queue().go();
            server.probe.wait_started(started + 1);
            let probe = Arc::clone(&server.probe);
            let releaser = std::thread::spawn(move || probe.release());
            let base = guest.stop_queue(0).expect("stops when the flush is done");
            releaser.join().expect("released");
            assert_eq!(guest.queue().try_complete().expect("done before the stop").status, 0);
            assert_eq!(guest.stop_queue(0).expect("again"), base);
            assert_eq!(guest.queue().ring.base(), base, "the driver's own books say the same");
            guest.start_queue(0).expect("starts again");
        }
        check_round_trip(&mut guest, 0, 99);
    }
}

/// A ring reports its position even if the device was reset before.
#[test]
fn ring_reports_position_after_reset() {
    // QEMU before 8.1 pauses a guest in this way.
    for kind in kinds() {
        let server = Server::start();
        let mut guest = FrontEnd::over(server.connect(), kind).expect("sets up");
        for (round, reset) in [(wire::SET_STATUS, &[0u8; 8][..]), (wire::RESET_OWNER, &[])].into_iter().enumerate() {
            check_round_trip(&mut guest, 0, round as u64);
            guest.wire.tell(reset.0, reset.1, &[]).expect("stops");
            assert_eq!(guest.stop_queue(0).expect("a place"), guest.queue().ring.base());
            guest.start_queue(0).expect("goes on");
        }
        check_round_trip(&mut guest, 0, 9);
    }
}

/// The position of a stopped ring survives a server that was killed before it could report it.
#[test]
fn ring_position_survives_killed_server() {
    for kind in kinds() {
        let (first, second) = (Server::start(), Server::start());
        let mut guest = FrontEnd::over(first.connect(), kind).expect("sets up");
        let begun_at = guest.queue().ring.base();
        (0..3).for_each(|round| check_round_trip(&mut guest, 0, round));
        guest.wire.tell(wire::SET_STATUS, &[0; 8], &[]).expect("stops");
        guest.config(0, 8).expect("has stopped");
        let hang_up = guest.wire.stream().shutdown(std::net::Shutdown::Both);
        hang_up.expect("hangs up");
        drop(first);
        guest.wire = wire::Wire::new(second.connect()).expect("connects");
        guest.negotiate().expect("negotiates");
        guest.set_memory().expect("has its memory");
        guest.set_inflight().expect("has the notes");
        guest.start_queue_at(0, begun_at).expect("starts");
        let handled = second.probe.started.load(Ordering::SeqCst);
        (3..6).for_each(|round| check_round_trip(&mut guest, 0, round));
        assert_eq!(handled, 0, "nothing was done a second time");
    }
}

/// Messages in the wrong order are refused, and do not affect later connections.
#[test]
fn messages_out_of_order_are_refused() {
    let server = Server::start();
    let options = Options::default();
    let memory = || Arc::new(Memory::new(AREA_BYTES as usize + options.data_bytes).expect("memory"));
    let fresh = || {
        let mut guest = FrontEnd::unconfigured(server.connect(), options, memory()).expect("connects");
        guest.negotiate().expect("negotiates");
        guest
    };
    {
        let guest = fresh();
        // A kick before the ring is set up waits for the rest, or is refused; it starts nothing.
        let kick = &guest.queues[0].kick;
        let _ = guest.wire.tell(wire::SET_VRING_KICK, &wire::longs(&[0]), &[kick.as_fd()]);
        assert_eq!(guest.stop_queue(0).expect("a base"), 0);
    }
    {
        let guest = fresh();
        guest.wire.tell_ring(wire::SET_VRING_ENABLE, 0, 1).expect("enabling comes first with some");
        assert!(guest.set_addresses(0, 0).is_ok(), "addresses are looked at when the ring starts");
        guest.wire.tell_ring(wire::SET_VRING_NUM, 0, 128).expect("a size");
        let kick = &guest.queues[0].kick;
        let started = guest.wire.tell(wire::SET_VRING_KICK, &wire::longs(&[0]), &[kick.as_fd()]);
        assert!(started.is_err(), "there is no memory for the ring");
    }
    {
        let mut guest = fresh();
        guest.set_memory().expect("memory");
        guest.start_queues().expect("starts");
        let features = guest.features ^ F_PACKED;
        assert!(guest.wire.tell_u64(wire::SET_FEATURES, features).is_err(), "another layout while it runs");
        assert!(guest.wire.tell_ring(wire::SET_VRING_NUM, 0, 64).is_err(), "another size while it runs");
        assert!(guest.wire.tell_ring(wire::SET_VRING_BASE, 0, 5).is_err(), "another place while it runs");
        assert!(guest.wire.tell_ring(wire::SET_VRING_NUM, 64, 64).is_err(), "no such queue");
        check_round_trip(&mut guest, 0, 5);
    }
    {
        // In-flight records for split rings, then packed rings.
        let mut guest = fresh();
        guest.set_memory().expect("memory");
        guest.start_queues().expect("starts");
        check_round_trip(&mut guest, 0, 6);
        guest.stop_queue(0).expect("stops");
        let mut options = guest.options;
        options.packed = true;
        let stream = guest.wire;
        let mut packed = FrontEnd::unconfigured(server.connect(), options, memory()).expect("makes rings");
        packed.wire = stream;
        packed.features = guest.features | F_PACKED;
        packed.wire.tell_u64(wire::SET_FEATURES, packed.features).expect("the other layout");
        packed.set_memory().expect("memory");
        packed.start_queue(0).expect("starts without notes");
        check_round_trip(&mut packed, 0, 7);
    }
    for size in [0, 3, 65536, u32::MAX] {
        let guest = fresh();
        assert!(guest.wire.tell_ring(wire::SET_VRING_NUM, 0, size).is_err(), "a ring of {size}");
    }
    let mut guest = FrontEnd::over(server.connect(), options).expect("the server is well");
    check_round_trip(&mut guest, 0, 8);
}

/// The server survives front-ends that disconnect within a message, or send garbage.
#[test]
fn server_survives_broken_front_ends() {
    let server = Server::start();
    let message = wire::Wire::encode(wire::SET_FEATURES, true, &[0; 8]);
    for cut in 0..message.len() {
        let wire = wire::Wire::new(server.connect()).expect("connects");
        wire.send_raw(&message[..cut], &[]).expect("sends a part");
    }
    let mut state = 7;
    for length in [1, 11, 12, 13, 100, 5000] {
        state += 1;
        let wire = wire::Wire::new(server.connect()).expect("connects");
        let _ = wire.send_raw(&pattern(state, length), &[]);
        wire.stream().shutdown(std::net::Shutdown::Write).expect("hangs up");
        while wire.receive().is_ok() {}
    }
    let file = std::fs::File::open("/dev/null").expect("/dev/null");
    for request in 0..64 {
        for files in [0, 1, 2, 8, 20] {
            let wire = wire::Wire::new(server.connect()).expect("connects");
            let descriptors: Vec<_> = (0..files).map(|_| file.as_fd()).collect();
            let _ = wire.send_raw(&wire::Wire::encode(request, false, &[0xff; 40]), &descriptors);
        }
    }
    let mut guest = FrontEnd::over(server.connect(), Options::default()).expect("the server is well");
    check_round_trip(&mut guest, 0, 1);
}

/// With the write cache off, every write is durable, also after resets and restarts.
#[test]
fn writes_stay_durable_without_cache() {
    let (first, second) = (Server::start(), Server::start());
    let mut guest = FrontEnd::over(first.connect(), Options::default()).expect("sets up");
    let out = [Buffer { address: guest.data(), len: 512 }];
    let write = Request::write(0, &out);
    guest.queue().run(&write).expect("writes");
    let counts = |server: &Server| {
        let probe = &server.probe;
        (probe.plain_writes.load(Ordering::SeqCst), probe.durable_writes.load(Ordering::SeqCst))
    };
    assert_eq!(counts(&first), (1, 0));
    let flushes = first.probe.flushes.load(Ordering::SeqCst);
    guest.set_config(32, &[0]).expect("write cache off");
    assert_eq!(first.probe.flushes.load(Ordering::SeqCst), flushes + 1, "what was cached is made durable");
    guest.queue().run(&write).expect("writes");
    assert_eq!(counts(&first), (1, 1));
    // QEMU does not repeat the setting after any of these events.
    guest.stop_queue(0).expect("stops");
    guest.wire.tell_u64(wire::SET_STATUS, 0).expect("a reset");
    guest.start_queue(0).expect("starts");
    guest.queue().run(&write).expect("writes");
    assert_eq!(counts(&first), (1, 2));
    assert_eq!(guest.config(32, 1).expect("the setting"), [0]);
    drop(guest.wire.stream().shutdown(std::net::Shutdown::Both));
    guest.reconnect(first.connect()).expect("reconnects");
    guest.queue().run(&write).expect("writes");
    assert_eq!(counts(&first), (1, 3));
    drop(guest.wire.stream().shutdown(std::net::Shutdown::Both));
    guest.reconnect(second.connect()).expect("goes on with a server that was never told");
    guest.queue().run(&write).expect("writes");
    assert_eq!(counts(&second), (0, 1));
    guest.set_config(32, &[1]).expect("write cache on");
    guest.queue().run(&write).expect("writes");
    assert_eq!(counts(&second), (1, 1));
}

/// A driver that cannot flush gets durable writes; the next driver does not.
#[test]
fn driver_without_flush_writes_durably() {
    let server = Server::start();
    let write = |without, server: &Server| {
        let options = Options { without, ..Options::default() };
        let mut guest = FrontEnd::over(server.connect(), options).expect("sets up");
        let out = [Buffer { address: guest.data(), len: 512 }];
        guest.queue().run(&Request::write(0, &out)).expect("writes");
        (server.probe.plain_writes.load(Ordering::SeqCst), server.probe.durable_writes.load(Ordering::SeqCst))
    };
    assert_eq!(write(F_FLUSH | F_CONFIG_WCE, &server), (0, 1), "firmware");
    assert_eq!(write(0, &server), (1, 1), "the system");
}

/// The dirty log marks the written pages and the used ring.
#[test]
fn dirty_log_marks_writes_and_ring() {
    for kind in kinds() {
        let server = Server::start();
        let mut guest = FrontEnd::over(server.connect(), kind).expect("sets up");
        check_round_trip(&mut guest, 0, 1);
        let pages = guest.memory.bytes() / 4096;
        let log = Memory::new(pages.div_ceil(8).next_multiple_of(4096)).expect("a log");
        let base = wire::longs(&[log.bytes() as u64, 0]);
        guest.wire.send_raw(&wire::Wire::encode(wire::SET_LOG_BASE, false, &base), &[log.file()]).expect("sends");
        assert_eq!(guest.wire.receive().expect("its own reply").request, wire::SET_LOG_BASE);
        guest.wire.tell_u64(wire::SET_FEATURES, guest.features | F_LOG_ALL).expect("logging while it runs");
        guest.set_addresses(0, 1).expect("the ring too");
        assert!(log.read_vec(0, log.bytes()).iter().all(|byte| *byte == 0), "nothing was written yet");

        let data = guest.data();
        let into =
            [Buffer { address: data + 4096 * 3 + 100, len: 4096 }, Buffer { address: data + 4096 * 9, len: 512 }];
        guest.queue().run(&Request::read(0, &into)).expect("reads");
        let bits = log.read_vec(0, log.bytes());
        let dirty: Vec<usize> = (0..pages).filter(|page| bits[page / 8] & 1 << (page % 8) != 0).collect();
        let first = data as usize / 4096;
        for page in [first + 3, first + 4, first + 9] {
            assert!(dirty.contains(&page), "page {page} was written, dirty are {dirty:?}");
        }
        let places = guest.queue().ring.places();
        let ring = if kind.packed { places.descriptors } else { places.device };
        assert!(dirty.contains(&(ring as usize / 4096)), "the ring was written, dirty are {dirty:?}");
        assert!(dirty.len() <= 8, "only what was written is dirty: {dirty:?}");
        guest.wire.tell_u64(wire::SET_FEATURES, guest.features).expect("no logging");
        check_round_trip(&mut guest, 0, 2);
        assert_eq!(log.read_vec(0, log.bytes()), bits, "logging has ended");
    }
}

#[test]
fn guest_memory_may_be_hugetlb() {
    const HUGE: usize = 2 << 20;
    let server = Server::start();
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::HUGETLB;
    let _reserved = HugePages::reserve(4);
    let memory = Arc::new(Memory::with_flags(4 * HUGE, flags).expect("huge pages"));
    let options = Options::default();
    let mut guest = FrontEnd::unconfigured(server.connect(), options, memory).expect("connects");
    guest.negotiate().expect("negotiates");
    // QEMU splits a PC's memory at boundaries that are not multiples of a huge page.
    let whole = guest.memory.bytes() as u64;
    let mut table = wire::words(&[2, 0]);
    table.extend(FrontEnd::region(0, 0xc_0000));
    table.extend(FrontEnd::region(0xc_0000, whole - 0xc_0000));
    let file = guest.memory.file();
    guest.wire.tell(wire::SET_MEM_TABLE, &table, &[file, file]).expect("maps");
    guest.start_queues().expect("starts");
    check_round_trip(&mut guest, 0, 1);
}

/// Reservation of the host's huge pages, released on drop.
struct HugePages(u64);

impl HugePages {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    fn reserve(count: u64) -> Self {
        let before = Self::now();
        let wanted = (before + count).to_string();
        let result: io::Result<()> = std::fs::write(Self::COUNT, &wanted);
        let got = Self::now();
        assert!(
            got >= before + count,
            "this test needs {count} huge pages: run it as root, or sysctl vm.nr_hugepages={wanted} ({result:?}, {got} are there)"
        );
        Self(before)
    }

    fn now() -> u64 {
        let text = std::fs::read_to_string(Self::COUNT).expect("procfs");
        text.trim().parse().expect("a count")
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::COUNT, self.0.to_string());
    }
}
