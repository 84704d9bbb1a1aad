//! Sender and receiver between two ends that replace QEMU: every byte arrives, in order, both ways.

#[path = "carry/again.rs"]
mod again;
#[allow(dead_code, unreachable_pub, reason = "other crates' tests use more of it")]
#[path = "../../larder-block/tests/nbd_support/certificates.rs"]
mod certificates;
#[path = "carry/ends.rs"]
mod ends;
#[path = "carry/pair.rs"]
mod pair;
#[path = "carry/peers.rs"]
mod peers;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use pair::Pair;

const PAGE: usize = 4096;

/// Pseudo-random numbers (xorshift), the same for the same seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            piece.copy_from_slice(&word[..piece.len()]);
        }
    }
}

/// Returns the main channel of a guest with one block of RAM, with one round for each version of its memory.
fn main_channel(versions: &[Vec<u8>]) -> Vec<u8> {
    let mut out = b"QEVM\0\0\0\x03".to_vec();
    let section = |out: &mut Vec<u8>, kind: u8| {
        out.push(kind);
        out.extend_from_slice(&2_u32.to_be_bytes());
    };
    section(&mut out, 1);
    out.extend_from_slice(b"\x03ram\0\0\0\0\0\0\0\x04");
    let bytes = versions[0].len() as u64;
    out.extend_from_slice(&(bytes | 4).to_be_bytes());
    out.extend_from_slice(b"\x06pc.ram");
    out.extend_from_slice(&bytes.to_be_bytes());
    let end = |out: &mut Vec<u8>| {
        out.extend_from_slice(&0x10_u64.to_be_bytes());
        out.push(0x7e);
        out.extend_from_slice(&2_u32.to_be_bytes());
    };
    end(&mut out);
    let mut before: Option<&Vec<u8>> = None;
    for (round, version) in versions.iter().enumerate() {
        let last = round + 1 == versions.len();
        section(&mut out, if last { 3 } else { 2 });
        let mut continues = 0;
        for (at, page) in version.chunks(PAGE).enumerate() {
            if before.is_some_and(|before| before[at * PAGE..][..PAGE] == *page) {
                continue;
            }
            let zero = page.iter().all(|&byte| byte == 0);
            let flags = continues | if zero { 2 } else { 8 };
            out.extend_from_slice(&((at * PAGE) as u64 | flags).to_be_bytes());
            if continues == 0 {
                out.extend_from_slice(b"\x06pc.ram");
                continues = 0x20;
            }
            out.extend_from_slice(if zero { &[0] } else { page });
        }
        end(&mut out);
        before = Some(version);
    }
    // Device state, whose content does not matter.
    out.push(4);
    out.extend_from_slice(&[7; 70_000]);
    out
}

/// Returns versions of a guest's memory; some words of some pages change from each version to the next.
fn versions(pages: usize, count: usize) -> Vec<Vec<u8>> {
    let mut numbers = Numbers(17);
    let mut memory = vec![0; pages * PAGE];
    for (at, page) in memory.chunks_mut(PAGE).enumerate() {
        match at % 5 {
            0 => {}
            1 => page.fill(at as u8),
            2 => numbers.fill(page),
            3 => page.copy_from_slice(&b"All work and no play makes Jack a dull boy.\n".repeat(100)[..PAGE]),
            _ => {
                for (word, place) in page.chunks_mut(8).enumerate() {
                    place.copy_from_slice(&((at * 512 + word) as u64).to_le_bytes());
                }
            }
        }
    }
    let mut versions = vec![memory];
    for _ in 1..count {
        let mut memory = versions.last().expect("one").clone();
        for page in memory.chunks_mut(PAGE) {
            if !numbers.next().is_multiple_of(3) {
                for _ in 0..3 {
                    let at = (numbers.next() % 512) as usize * 8;
                    let word = numbers.next().to_le_bytes();
                    page[at..at + 8].copy_from_slice(&word);
                }
            }
        }
        versions.push(memory);
    }
    versions
}

fn read_all(listener: &UnixListener) -> Vec<u8> {
    let (mut socket, _) = listener.accept().expect("a connection");
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).expect("reads");
    bytes
}

/// Every byte of a main channel arrives, and the link carries less than a quarter of them.
#[test]
fn main_channel_arrives_and_compresses() {
    // The first two versions of a page cannot be deltas.
    let stream = main_channel(&versions(3000, 6));
    for lanes in [1, 3] {
        let pair = Pair::new(lanes, 64 << 20);
        // Over a faster link than this, compression does not pay and is not used.
        pair.limits.update(|limits| limits.bandwidth = Some(15 << 20));
        let (_, received, totals) = pair.run(
            |path| {
                let mut socket = UnixStream::connect(path).expect("connects");
                for piece in stream.chunks(50_000) {
                    socket.write_all(piece).expect("writes");
                }
            },
            read_all,
        );
        assert!(received == stream, "{} bytes became {}", stream.len(), received.len());
        assert_eq!(totals.raw_bytes, stream.len() as u64);
        assert_eq!(totals.delivered_bytes, stream.len() as u64);
        assert!(totals.delta_pages > 4000, "{totals:?}");
        assert!(totals.same_pages > 500, "{totals:?}");
        assert!(totals.zero_pages >= 600, "{totals:?}");
        assert!(totals.wire_bytes < totals.raw_bytes / 4, "{totals:?}");
    }
}

/// Memory of a store of random values, two to a page, of which one or both are set anew.
#[test]
fn incompressible_pages_are_sent_as_deltas() {
    const PAGES: usize = 2000;
    let mut numbers = Numbers(31);
    let mut memory = vec![0; PAGES * PAGE];
    numbers.fill(&mut memory);
    let mut versions = vec![memory];
    for changed in [..PAGE / 2, ..PAGE, ..PAGE, ..PAGE, ..PAGE / 2] {
        let mut memory = versions.last().expect("one").clone();
        for page in memory.chunks_mut(PAGE) {
            numbers.fill(&mut page[changed]);
        }
        versions.push(memory);
    }
    let stream = main_channel(&versions);
    let pair = Pair::new(1, 64 << 20);
    pair.limits.update(|limits| limits.bandwidth = Some(30 << 20));
    let (_, received, totals) = pair.run(
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            socket.write_all(&stream).expect("writes");
        },
        read_all,
    );
    assert!(received == stream, "{} bytes became {}", stream.len(), received.len());
    // At first the value of link time is unknown.
    assert!(totals.delta_pages > PAGES as u64 * 3 / 2, "{totals:?}");
}

/// Most of a guest's memory becomes zero, in an order that no single record can express.
#[test]
fn scattered_zero_pages_arrive() {
    const PAGES: usize = 20_000;
    let full = vec![1; PAGES * PAGE];
    for stays in [2, 3] {
        let mut scattered = full.clone();
        for (at, page) in scattered.chunks_mut(PAGE).enumerate() {
            if at % stays != 0 {
                page.fill(0);
            }
        }
        let stream = main_channel(&[full.clone(), scattered]);
        let (_, received, totals) = Pair::new(2, 0).run(
            |path| {
                let mut socket = UnixStream::connect(path).expect("connects");
                socket.write_all(&stream).expect("writes");
            },
            read_all,
        );
        assert!(received == stream, "{} bytes became {}", stream.len(), received.len());
        assert!(totals.zero_pages > 9000, "{totals:?}");
    }
}

#[test]
fn opaque_channels_arrive_concurrently() {
    let contents: Vec<Vec<u8>> = (0..5)
        .map(|channel| {
            let mut bytes = vec![0; 3_000_001 * channel + 5];
            Numbers(channel as u64 + 1).fill(&mut bytes);
            bytes
        })
        .collect();
    let pair = Pair::new(4, 0);
    let (_, received, _) = pair.run(
        |path| {
            let mut sockets = Vec::new();
            for _ in &contents {
                sockets.push(UnixStream::connect(path).expect("connects"));
            }
            thread::scope(|scope| {
                for (mut socket, content) in sockets.into_iter().zip(&contents) {
                    scope.spawn(move || socket.write_all(content).expect("writes"));
                }
            });
        },
        |listener| {
            let sockets: Vec<UnixStream> =
                contents.iter().map(|_| listener.accept().expect("a connection").0).collect();
            thread::scope(|scope| {
                let readers: Vec<_> = sockets
                    .into_iter()
                    .map(|mut socket| {
                        scope.spawn(move || {
                            let mut bytes = Vec::new();
                            socket.read_to_end(&mut bytes).expect("reads");
                            bytes
                        })
                    })
                    .collect();
                readers.into_iter().map(|reader| reader.join().expect("read")).collect::<Vec<_>>()
            })
        },
    );
    assert!(received == contents);
}

/// Bytes of the return path are not held back, and arrive even after the source has closed its direction.
#[test]
fn return_path_is_immediate() {
    let pair = Pair::new(2, 1 << 20);
    pair.run(
        |path| {
            let mut socket = UnixStream::connect(path).expect("connects");
            // Question and answer, so that no bytes may be held back.
            for round in 0..200_u32 {
                let question = vec![round as u8; 1 + round as usize * 40];
                socket.write_all(&question).expect("writes");
                let mut answer = vec![0; question.len()];
                socket.read_exact(&mut answer).expect("reads");
                assert_eq!(answer, question);
            }
            socket.shutdown(Shutdown::Write).expect("shuts");
            let mut rest = Vec::new();
            socket.read_to_end(&mut rest).expect("reads");
            assert_eq!(rest, b"good bye");
        },
        |listener| {
            let (mut socket, _) = listener.accept().expect("a connection");
            let mut buffer = vec![0; 100_000];
            loop {
                let len = socket.read(&mut buffer).expect("reads");
                if len == 0 {
                    break;
                }
                socket.write_all(&buffer[..len]).expect("writes");
            }
            socket.write_all(b"good bye").expect("writes");
        },
    );
}
