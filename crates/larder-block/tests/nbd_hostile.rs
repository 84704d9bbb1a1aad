//! Tests of the NBD client against servers that break the protocol or stall: it reports the violation, keeps its
//! memory bounded, and continues with an honest server.

mod nbd_support;

use std::io;
use std::time::Duration;

use larder_block::backend::nbd::{ConnectError, NbdDevice, NbdOpenError, NbdOptions};
use larder_block::event_loop::POLL_MAX_DEFAULT;
use larder_block::{BlockDevice, ByteOffset, ByteRange, Loop, ReadBuf};
use nbd_support::fake::{Asked, Disk, Offer, Peer, connections, script};
use nbd_support::{Place, pattern};

const SIZE: u64 = 1 << 20;

fn on_loop(test: impl AsyncFn(&Loop)) {
    let on = Loop::new(POLL_MAX_DEFAULT).expect("io_uring");
    on.block_on(test(&on));
}

fn structured() -> Offer {
    Offer { structured: true, ..Offer::of(SIZE) }
}

/// A part of the client's error, and the server's handshake that causes it.
type HandshakeLie = (&'static str, fn(&mut Peer) -> io::Result<()>);

const HANDSHAKE_LIES: [HandshakeLie; 16] = [
    ("begins with 0x485454502f312e31", |peer| peer.send(&[b"HTTP/1.1 400 Bad Request\r\n\r\n"])),
    ("oldstyle protocol", |peer| peer.send(&[b"NBDMAGIC", &0x420281861253u64.to_be_bytes(), &[0; 136]])),
    ("a reply to an option begins with 0x7878", |peer| {
        peer.greet()?;
        peer.option()?;
        peer.send(&[&[b'x'; 100]])
    }),
    ("replied to GO when EXTENDED_HEADERS was requested", |peer| {
        peer.greet()?;
        peer.option()?;
        peer.answer(7, 1, &[])
    }),
    ("a reply of 4294967295 bytes to EXTENDED_HEADERS", |peer| {
        peer.greet()?;
        let (option, _) = peer.option()?;
        let magic = 0x3e889045565a9u64.to_be_bytes();
        let kind = (1u32 << 31 | 1).to_be_bytes();
        peer.send(&[&magic, &option.to_be_bytes(), &kind, &u32::MAX.to_be_bytes()])
    }),
    ("answered EXTENDED_HEADERS with a reply of kind 0x3", |peer| {
        peer.greet()?;
        let (option, _) = peer.option()?;
        peer.answer(option, 3, &[0; 12])
    }),
    ("too many replies to GO", |peer| {
        until_go(peer)?;
        loop {
            peer.info(Offer::of(SIZE))?;
        }
    }),
    ("reported no size", |peer| {
        until_go(peer)?;
        peer.answer(7, 1, &[])
    }),
    ("information about the export ends in the middle of size", |peer| {
        until_go(peer)?;
        peer.answer(7, 3, &[0, 0, 1])
    }),
    ("the export is empty", |peer| peer.handshake(Offer::of(0))),
    ("reports an export of 18446744073709551615 bytes", |peer| peer.handshake(Offer::of(u64::MAX))),
    ("9223372036854775297 bytes; a disk has at most 2^63 - 512", |peer| peer.handshake(Offer::of((1 << 63) - 511))),
    ("minimum 3, preferred 4096", |peer| peer.handshake(Offer { blocks: Some([3, 4096, 1 << 20]), ..Offer::of(SIZE) })),
    ("largest payload 0", |peer| peer.handshake(Offer { blocks: Some([1, 4096, 0]), ..Offer::of(SIZE) })),
    ("it has no such export, in reply to GO ('go away\\u0007')", |peer| {
        until_go(peer)?;
        peer.answer(7, 1 << 31 | 6, b"go away\x07")
    }),
    ("the connection broke during the handshake", |peer| {
        peer.greet()?;
        peer.option()?;
        Ok(())
    }),
];

fn until_go(peer: &mut Peer) -> io::Result<()> {
    peer.greet()?;
    loop {
        let (option, _) = peer.option()?;
        if option == 7 {
            return Ok(());
        }
        peer.answer(option, 1 << 31 | 1, &[])?;
    }
}

#[test]
fn handshake_violation_is_named() {
    for (part, lie) in HANDSHAKE_LIES {
        on_loop(async |on| {
            let place = Place::new();
            let lying = script(move |mut peer| {
                lie(&mut peer)?;
                peer.wait_for_end();
                Ok(())
            });
            // This script must close the connection itself.
            let leaving = script(move |mut peer| lie(&mut peer));
            let breaks_off = part.contains("broke");
            let server = connections(place.std_listener(), [if breaks_off { leaving } else { lying }]);
            let opened = NbdDevice::open(on, &place.uri(""), NbdOptions::default()).await;
            let Err(error) = opened else { panic!("opened despite: {part}") };
            let error = error.to_string();
            assert!(error.contains(part), "'{part}' is not in: {error}");
            assert!(error.contains("nbd+unix:///?socket="), "{error}");
            server.join().expect("the script ends");
        });
    }
}

#[test]
fn silent_server_times_out() {
    on_loop(async |on| {
        let place = Place::new();
        let options = NbdOptions { handshake_timeout: Duration::from_millis(100), ..NbdOptions::default() };
        let Err(NbdOpenError::Connect { source, .. }) = NbdDevice::open(on, &place.uri(""), options).await else {
            panic!("opened")
        };
        assert!(matches!(source, ConnectError::Timeout { .. }), "{source}");
    });
}

/// A description, and the server's answer to a read of 4096 bytes at 8192.
type Lie = (&'static str, fn(&mut Peer, &Asked) -> io::Result<()>);

const LIES: [Lie; 18] = [
    ("an unknown cookie", |peer, asked| peer.chunk(true, 0, asked.cookie ^ 1 << 40, 0)),
    ("another unknown cookie", |peer, asked| peer.simple(asked.cookie + 5, 22, &[])),
    ("more data than was asked for", |peer, asked| {
        peer.chunk(true, 1, asked.cookie, 8 + 8192)?;
        peer.send(&[&8192u64.to_be_bytes(), &[7; 8192]])
    }),
    ("data in front of the request", |peer, asked| {
        peer.chunk(true, 1, asked.cookie, 8 + 4096)?;
        peer.send(&[&4096u64.to_be_bytes(), &[7; 4096]])
    }),
    ("data at the end of the number line", |peer, asked| {
        peer.chunk(true, 1, asked.cookie, 8 + 4096)?;
        peer.send(&[&(u64::MAX - 5).to_be_bytes(), &[7; 4096]])
    }),
    ("data twice", |peer, asked| {
        for _ in 0..2 {
            peer.chunk(false, 1, asked.cookie, 8 + 4096)?;
            peer.send(&[&8192u64.to_be_bytes(), &[7; 4096]])?;
        }
        Ok(())
    }),
    ("a data chunk without data", |peer, asked| {
        peer.chunk(true, 1, asked.cookie, 8)?;
        peer.send(&[&8192u64.to_be_bytes()])
    }),
    ("a huge hole", |peer, asked| {
        peer.chunk(true, 2, asked.cookie, 12)?;
        peer.send(&[&8192u64.to_be_bytes(), &u32::MAX.to_be_bytes()])
    }),
    ("an empty hole", |peer, asked| {
        peer.chunk(true, 2, asked.cookie, 12)?;
        peer.send(&[&8192u64.to_be_bytes(), &0u32.to_be_bytes()])
    }),
    ("success without all data", |peer, asked| {
        peer.chunk(false, 1, asked.cookie, 8 + 512)?;
        peer.send(&[&8192u64.to_be_bytes(), &[7; 512]])?;
        peer.chunk(true, 0, asked.cookie, 0)
    }),
    ("an unknown chunk of 4 GiB", |peer, asked| peer.chunk(true, 77, asked.cookie, u32::MAX)),
    ("an error chunk of 1 GiB", |peer, asked| peer.chunk(true, 1 << 15 | 1, asked.cookie, 1 << 30)),
    ("an error message longer than its chunk", |peer, asked| {
        peer.chunk(true, 1 << 15 | 1, asked.cookie, 6)?;
        peer.send(&[&5u32.to_be_bytes(), &100u16.to_be_bytes()])
    }),
    ("a simple reply to a structured read", |peer, asked| peer.simple(asked.cookie, 0, &[7; 4096])),
    ("block status for a read", |peer, asked| {
        peer.chunk(true, 5, asked.cookie, 12)?;
        peer.send(&[&9u32.to_be_bytes(), &4096u32.to_be_bytes(), &[0; 4]])
    }),
    ("an extended reply where none was agreed", |peer, asked| {
        let magic = 0x6e8a278cu32.to_be_bytes();
        peer.send(&[&magic, &[0, 1, 0, 0], &asked.cookie.to_be_bytes(), &[0; 16]])
    }),
    ("garbage", |peer, _| peer.send(&[&pattern(5000, 3)])),
    ("goodbye", |_, _| Err(io::ErrorKind::BrokenPipe.into())),
];

/// After an invalid reply the client repeats the request on a new connection.
#[test]
fn protocol_violation_repeats_request_elsewhere() {
    for (what, lie) in LIES {
        on_loop(async |on| {
            let place = Place::new();
            let disk = Disk::new(SIZE);
            let honest = disk.clone();
            let server = connections(
                place.std_listener(),
                [
                    script(move |mut peer| {
                        peer.handshake(structured())?;
                        let asked = peer.request()?;
                        lie(&mut peer, &asked)?;
                        peer.wait_for_end();
                        Ok(())
                    }),
                    script(move |mut peer| {
                        peer.handshake(structured())?;
                        peer.serve(true, &honest)
                    }),
                ],
            );
            let device = NbdDevice::open(on, &place.uri(""), NbdOptions::default()).await;
            let device = device.unwrap_or_else(|error| panic!("{error}"));
            let mut buffer = vec![1; 3 * 4096];
            let middle = ReadBuf::new(&mut buffer).slice(4096, 4096);
            let read = device.read(ByteOffset::new(8192), middle).await;
            read.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(buffer[4096..8192].iter().all(|byte| *byte == 0), "{what}");
            assert!(
                buffer[..4096].iter().chain(&buffer[8192..]).all(|byte| *byte == 1),
                "{what}: memory beside the buffer was touched"
            );
            assert_eq!(device.statistics().connections, 2, "{what}");
            drop(device);
            on.run_blocking(move || server.join().expect("the scripts end")).await.expect("a thread");
        });
    }
}

#[test]
fn invalid_block_status_is_detected() {
    type StatusLie = fn(&mut Peer, &Asked) -> io::Result<()>;
    let lies: [StatusLie; 5] = [
        // An extent of length zero.
        |peer, asked| {
            peer.chunk(true, 5, asked.cookie, 12)?;
            peer.send(&[&9u32.to_be_bytes(), &[0; 8]])
        },
        // A context that was not negotiated.
        |peer, asked| {
            peer.chunk(true, 5, asked.cookie, 12)?;
            peer.send(&[&8u32.to_be_bytes(), &512u32.to_be_bytes(), &[0; 4]])
        },
        // A truncated descriptor.
        |peer, asked| peer.chunk(true, 5, asked.cookie, 11),
        // More descriptors than the spec allows.
        |peer, asked| peer.chunk(true, 5, asked.cookie, u32::MAX - 3),
        // Success without any extent.
        |peer, asked| peer.simple(asked.cookie, 0, &[]),
    ];
    for lie in lies {
        on_loop(async |on| {
            let place = Place::new();
            let server = connections(
                place.std_listener(),
                [
                    script(move |mut peer| {
                        peer.handshake(structured())?;
                        let asked = peer.request()?;
                        lie(&mut peer, &asked)?;
                        peer.wait_for_end();
                        Ok(())
                    }),
                    script(move |mut peer| {
                        peer.handshake(structured())?;
                        let asked = peer.request()?;
                        // More extents than requested, the last beyond the end: legal, if odd.
                        peer.chunk(true, 5, asked.cookie, 4 + 3 * 8)?;
                        peer.send(&[&9u32.to_be_bytes()])?;
                        for (len, state) in [(512u32, 3u32), (u32::MAX, 0), (7, 2)] {
                            peer.send(&[&len.to_be_bytes(), &state.to_be_bytes()])?;
                        }
                        peer.wait_for_end();
                        Ok(())
                    }),
                ],
            );
            let device = NbdDevice::open(on, &place.uri(""), NbdOptions::default()).await;
            let device = device.unwrap_or_else(|error| panic!("{error}"));
            let range = ByteRange::new(0, 8192);
            let extents = device.extents(range, 10).await.expect("maps");
            let ends: Vec<_> = extents.iter().map(|extent| extent.range.end().get()).collect();
            assert_eq!(ends, [512, 8192]);
            assert_eq!(device.statistics().connections, 2);
            drop(device);
            on.run_blocking(move || server.join().expect("the scripts end")).await.expect("a thread");
        });
    }
}

#[test]
fn stalled_server_leads_to_reconnect() {
    on_loop(async |on| {
        let place = Place::new();
        let disk = Disk::new(SIZE);
        let server = connections(
            place.std_listener(),
            [
                script(|mut peer| {
                    peer.handshake(Offer::of(SIZE))?;
                    peer.wait_for_end();
                    Ok(())
                }),
                // The second connection is accepted, and then the server sends nothing.
                script(|mut peer| {
                    peer.wait_for_end();
                    Ok(())
                }),
                script(move |mut peer| {
                    peer.handshake(Offer::of(SIZE))?;
                    peer.serve(false, &disk)
                }),
            ],
        );
        let options = NbdOptions {
            // The next server answers well within these, however busy the machine is.
            request_timeout: Duration::from_secs(2),
            handshake_timeout: Duration::from_secs(2),
            ..NbdOptions::default()
        };
        let device = NbdDevice::open(on, &place.uri(""), options).await;
        let device = device.unwrap_or_else(|error| panic!("{error}"));
        let mut buffer = vec![1; 4096];
        let read = device.read(ByteOffset::ZERO, ReadBuf::new(&mut buffer));
        read.await.expect("reads in the end");
        assert_eq!(device.statistics().connections, 2);
        drop(device);
        on.run_blocking(move || server.join().expect("the scripts end")).await.expect("a thread");
    });
}
