//! Tests with guests that violate the rules of their rings: only the affected queue stops.

mod front_end;
mod vhost_user_server;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use front_end::queue::{AREA_BYTES, Request};
use front_end::ring::{Buffer, DESC_F_AVAIL, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DriverRing};
use front_end::{FrontEnd, Options, wire};
use vhost_user_server::Server;

const LIMIT: Duration = Duration::from_secs(240);

fn flush_works(guest: &mut FrontEnd, queue: usize) {
    assert_eq!(guest.queues[queue].run(&Request::flush()).expect("an answer").status, 0);
}

/// Resets queue 0 and starts it anew, as a guest's driver does after such an error.
fn reset(guest: &mut FrontEnd) {
    guest.stop_queue(0).expect("stops");
    let (places, options) = (guest.queues[0].ring.places(), guest.queues[0].ring.options());
    guest.queues[0].ring = DriverRing::new(&guest.memory, places, options);
    guest.start_queue(0).expect("starts");
}

/// Sets up a guest with two queues, lets `corrupt` damage queue 0, and checks that only this queue stops, until its
/// reset.
fn check(what: &str, options: Options, corrupt: impl Fn(&mut FrontEnd)) {
    let server = Server::start();
    let mut guest = FrontEnd::over(server.connect(), Options { queues: 2, ..options }).expect("sets up");
    flush_works(&mut guest, 0);
    corrupt(&mut guest);
    guest.queue().kick_now();
    // The other queue and the connection still work.
    flush_works(&mut guest, 1);
    assert!(guest.capacity().is_ok(), "{what}");
    // This reply shows that the kick of the broken queue was handled, too, in an earlier turn of the loop.
    flush_works(&mut guest, 1);
    assert_eq!(server.probe.errors.load(Ordering::SeqCst), 1, "{what}: noticed, and reported once");
    reset(&mut guest);
    flush_works(&mut guest, 0);
    drop(guest);
    let mut next = FrontEnd::over(server.connect(), options).expect("the server is well");
    flush_works(&mut next, 0);
}

fn split() -> Options {
    Options { size: 16, ..Options::default() }
}

fn packed() -> Options {
    Options { packed: true, ..split() }
}

/// Makes a chain of these descriptors available in a split ring: (address, length, flags, next).
fn put_split(guest: &mut FrontEnd, chain: &[(u64, u32, u16, u16)]) {
    let ring = &mut guest.queues[0].ring;
    for (index, (address, len, flags, next)) in chain.iter().enumerate() {
        let at = ring.places().descriptors + 16 * index as u64;
        ring.write_descriptor(at, Buffer { address: *address, len: *len }, [*flags, *next]);
    }
    ring.put_available(0);
    ring.publish();
}

/// Makes a chain of these descriptors available in a packed ring, whose first slots the earlier flush used: (address,
/// length, flags).
fn put_packed(guest: &mut FrontEnd, chain: &[(u64, u32, u16)]) {
    let ring = &mut guest.queues[0].ring;
    let first = 2;
    for (index, (address, len, flags)) in chain.iter().enumerate().rev() {
        let at = ring.places().descriptors + 16 * (first + index as u64);
        ring.write_descriptor(at, Buffer { address: *address, len: *len }, [0, flags | DESC_F_AVAIL]);
    }
}

#[test]
fn corrupt_split_ring_stops_its_queue() {
    let size = split().size;
    check("an available index that jumps", split(), |guest| {
        let places = guest.queue().ring.places();
        guest.memory.word16(places.driver + 2).store(1 + size + 1, Ordering::SeqCst);
    });
    check("a head outside the table", split(), |guest| {
        guest.queue().ring.put_available(size);
        guest.queue().ring.publish();
    });
    check("a next outside the table", split(), |guest| {
        let data = guest.data();
        put_split(guest, &[(data, 16, DESC_F_NEXT, size)]);
    });
    check("a chain that loops", split(), |guest| {
        let data = guest.data();
        put_split(guest, &[(data, 16, DESC_F_NEXT, 1), (data, 16, DESC_F_NEXT, 0)]);
    });
    check("something to read behind something to write", split(), |guest| {
        let data = guest.data();
        put_split(guest, &[(data, 16, DESC_F_NEXT | DESC_F_WRITE, 1), (data, 16, 0, 0)]);
    });
    for (address, len) in [(u64::MAX, 16), (u64::MAX - 8, 16), (1 << 40, 16), (0, u32::MAX), (u64::MAX - 15, 15)] {
        check("memory that is not the guest's", split(), |guest| {
            put_split(guest, &[(address, len, 0, 0)]);
        });
    }
    check("memory that runs over the end", split(), |guest| {
        let end = guest.memory.bytes() as u64;
        put_split(guest, &[(end - 8, 16, 0, 0)]);
    });
}

#[test]
fn corrupt_packed_ring_stops_its_queue() {
    check("a chain without an end", packed(), |guest| {
        let data = guest.data();
        put_packed(guest, &[(data, 16, DESC_F_NEXT); 14]);
        let ring = &guest.queues[0].ring;
        for index in 0..2 {
            let at = ring.places().descriptors + 16 * index;
            ring.write_descriptor(at, Buffer { address: data, len: 16 }, [0, DESC_F_NEXT]);
        }
    });
    check("something to read behind something to write", packed(), |guest| {
        let data = guest.data();
        put_packed(guest, &[(data, 16, DESC_F_NEXT | DESC_F_WRITE), (data, 16, 0)]);
    });
    for (address, len) in [(u64::MAX, 16), (1 << 40, 16), (0, u32::MAX)] {
        check("memory that is not the guest's", packed(), |guest| put_packed(guest, &[(address, len, 0)]));
    }
    check("an indirect table behind another descriptor", packed(), |guest| {
        let data = guest.data();
        put_packed(guest, &[(data, 16, DESC_F_NEXT), (data, 16, DESC_F_INDIRECT)]);
    });
}

#[test]
fn corrupt_indirect_table_stops_its_queue() {
    for options in [split(), packed()] {
        let put = move |guest: &mut FrontEnd, address: u64, len: u32, flags: u16| {
            if options.packed {
                put_packed(guest, &[(address, len, flags)]);
            } else {
                put_split(guest, &[(address, len, flags, 0)]);
            }
        };
        for len in [0, 1, 15, 17, 1 << 20, u32::MAX] {
            check("a table of a wrong length", options, |guest| {
                let data = guest.data();
                put(guest, data, len, DESC_F_INDIRECT);
            });
        }
        for address in [u64::MAX, u64::MAX - 15, u64::MAX - 31, 1 << 40] {
            check("a table that is not in memory", options, |guest| put(guest, address, 32, DESC_F_INDIRECT));
        }
        check("a table that runs over the end", options, |guest| {
            let (data, end) = (guest.data(), guest.memory.bytes() as u64);
            let tail = if options.packed { [0, 0] } else { [DESC_F_NEXT, 1] };
            guest.queues[0].ring.write_descriptor(end - 16, Buffer { address: data, len: 16 }, tail);
            put(guest, end - 16, 32, DESC_F_INDIRECT);
        });
        check("a table with more behind it", options, |guest| {
            let data = guest.data();
            put(guest, data, 16, DESC_F_INDIRECT | DESC_F_NEXT);
        });
        check("a table in a table", options, |guest| {
            let data = guest.data();
            let tail = if options.packed { [0, DESC_F_INDIRECT] } else { [DESC_F_INDIRECT, 0] };
            guest.queues[0].ring.write_descriptor(data, Buffer { address: data, len: 16 }, tail);
            put(guest, data, 16, DESC_F_INDIRECT);
        });
    }
    check("a table that loops", split(), |guest| {
        let data = guest.data();
        let ring = &guest.queues[0].ring;
        for (index, next) in [(0, 1), (1, 0)] {
            ring.write_descriptor(data + 16 * index, Buffer { address: data, len: 16 }, [DESC_F_NEXT, next]);
        }
        put_split(guest, &[(data, 32, DESC_F_INDIRECT, 0)]);
    });
}

/// Descriptors that are made available again before they were used stop only their queue.
#[test]
fn descriptor_reuse_in_flight_stops_queue() {
    let server = Server::start();
    let options = Options { queues: 2, size: 4, indirect: true, ..Options::default() };
    let mut guest = FrontEnd::over(server.connect(), options).expect("sets up");
    server.probe.hold();
    for _ in 0..4 {
        guest.queue().add(&Request::flush());
    }
    guest.queue().go();
    server.probe.wait_started(4);
    // All four are in flight, and are now made available again.
    for id in 0..4 {
        guest.queue().ring.put_available(id);
    }
    guest.queue().ring.publish();
    guest.queue().kick_now();
    assert!(guest.capacity().is_ok(), "the process lives");
    server.probe.release();
    for _ in 0..4 {
        assert_eq!(guest.queue().complete(LIMIT).expect("what was under way ends").status, 0);
    }
    flush_works(&mut guest, 1);
    drop(guest);
    let mut next = FrontEnd::over(server.connect(), split()).expect("the server is well");
    flush_works(&mut next, 0);
}

/// A chain without room for a header or a status is pushed as used without being written to.
#[test]
fn short_chain_is_returned_untouched() {
    let server = Server::start();
    let mut guest = FrontEnd::over(server.connect(), split()).expect("sets up");
    let data = guest.data();
    let head = Buffer { address: data, len: 15 };
    let room = Buffer { address: data + 64, len: 1 };
    let empty = Buffer { address: data, len: 0 };
    for (out, into) in [(vec![head], vec![room]), (vec![], vec![room]), (vec![Buffer { len: 16, ..head }], vec![empty])]
    {
        guest.memory.write(data + 64, &[0xaa]);
        let queue = guest.queue();
        let id = queue.ring.add(&out, &into, None);
        let done = queue.finish(id).expect("comes back");
        assert_eq!(done.written, 0);
        assert_eq!(guest.memory.read_vec(data + 64, 1), [0xaa]);
    }
}

/// A queue that is always busy delays neither the other queue nor protocol messages.
#[test]
fn busy_queue_does_not_starve_others() {
    let server = Server::start();
    let options = Options { queues: 2, ..Options::default() };
    let mut guest = FrontEnd::over(server.connect(), options).expect("sets up");
    let busy = guest.queues.remove(0);
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let theirs = std::sync::Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        // Makes completed requests available again at once, and never sleeps.
        let mut busy = busy;
        while !theirs.load(Ordering::Relaxed) {
            while busy.has_room(0) {
                busy.add(&Request::flush());
            }
            busy.go();
            while let Some(done) = busy.try_complete() {
                assert_eq!(done.status, 0);
            }
        }
    });
    let give_up = Instant::now() + LIMIT;
    for _ in 0..100 {
        assert_eq!(guest.queues[0].run(&Request::flush()).expect("an answer").status, 0);
        assert!(guest.capacity().is_ok());
        assert!(Instant::now() < give_up, "starved");
    }
    stop.store(true, Ordering::Relaxed);
    thread.join().expect("every answer was right");
}

#[test]
fn invalid_memory_table_is_refused() {
    let server = Server::start();
    let options = split();
    let whole = AREA_BYTES + options.data_bytes as u64;
    for regions in [
        vec![[0, whole + (1 << 20), 0, 0]],
        vec![[0, whole, 0, 4096]],
        vec![[0, whole, 0, u64::MAX - 4095]],
        vec![[0, 0, 0, 0]],
        vec![[u64::MAX - 4095, 8192, 0, 0]],
        vec![[0, 8192, u64::MAX - 4095, 0]],
        vec![[0, 8192, 0, 0], [4096, 8192, 1 << 30, 0]],
    ] {
        let guest = FrontEnd::over(server.connect(), options).expect("sets up");
        let mut table = wire::words(&[regions.len() as u32, 0]);
        regions.iter().for_each(|region| table.extend(wire::longs(region)));
        let files = vec![guest.memory.file(); regions.len()];
        assert!(guest.wire.tell(wire::SET_MEM_TABLE, &table, &files).is_err(), "{regions:x?}");
    }
    let mut next = FrontEnd::over(server.connect(), options).expect("the server is well");
    flush_works(&mut next, 0);
}
