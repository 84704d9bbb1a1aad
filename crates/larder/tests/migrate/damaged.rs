//! Bytes that are changed, lost or repeated in transit: TCP's checksum is weak, and middleboxes are not always
//! harmless. Both sides fail, and the destination's QEMU gets nothing that the source's QEMU has not sent.

use std::net::Shutdown;

use larder_bench::campaign::Random;
use larder_bench::campaign::migration::relay::{Tamper, Way};

use crate::ends::{Received, Waiting, main_channel, was_closed, write};
use crate::wire::{FRAME_BYTES, HELLO_BYTES, WELCOME_BYTES, frame_body};

const CONTROL: usize = 0;
const LANE: usize = 1;

/// A change to the data of one connection in one direction.
struct Change {
    connection: usize,
    way: Way,
    how: How,
}

#[derive(Clone, Copy, Debug)]
enum How {
    /// This bit of the byte at this offset flips.
    Flip { at: usize, bit: u8 },
    /// This many bytes from this offset are lost.
    Lose { at: usize, count: usize },
    /// This many bytes from this offset come twice.
    Repeat { at: usize, count: usize },
    /// The connection ends at this offset.
    End { at: usize },
    /// This frame and the next one are exchanged.
    Swap { frame: usize },
    /// This frame comes twice.
    Replay { frame: usize },
    /// This frame comes again after `later` others.
    Again { frame: usize, later: usize },
}

struct Changer {
    how: How,
    /// Number of bytes or frames that have passed.
    passed: usize,
    /// Bytes since the last whole frame.
    held: Vec<u8>,
    kept: Vec<u8>,
}

impl Changer {
    fn new(how: How) -> Self {
        Self { how, passed: 0, held: Vec::new(), kept: Vec::new() }
    }

    fn byte(&mut self, byte: u8, out: &mut Vec<u8>) {
        let now = self.passed;
        self.passed += 1;
        match self.how {
            How::Flip { at, bit } if now == at => out.push(byte ^ 1 << bit),
            How::Lose { at, count } if (at..at + count).contains(&now) => {}
            How::Repeat { at, count } if (at..at + count).contains(&now) => {
                out.push(byte);
                self.kept.push(byte);
                if now + 1 == at + count {
                    out.append(&mut self.kept);
                }
            }
            _ => out.push(byte),
        }
    }

    fn frame(&mut self, frame: &[u8], out: &mut Vec<u8>) {
        let now = self.passed;
        self.passed += 1;
        match self.how {
            How::Swap { frame: first } if now == first => self.kept = frame.to_vec(),
            How::Swap { frame: first } if now == first + 1 => {
                out.extend_from_slice(frame);
                out.append(&mut self.kept);
            }
            How::Replay { frame: which } if now == which => out.extend_from_slice(&frame.repeat(2)),
            How::Again { frame: which, later } if now == which + later => {
                out.extend_from_slice(frame);
                out.append(&mut self.kept);
            }
            How::Again { frame: which, .. } if now == which => {
                self.kept = frame.to_vec();
                out.extend_from_slice(frame);
            }
            _ => out.extend_from_slice(frame),
        }
    }

    /// Removes the greeting, as frame -1, and the complete frames from the received bytes.
    fn frames(&mut self, out: &mut Vec<u8>) {
        if self.passed == 0 && self.held.len() >= HELLO_BYTES && self.held.starts_with(b"LARDMIG") {
            out.extend(self.held.drain(..HELLO_BYTES));
        }
        while self.held.starts_with(b"LFRM") && self.held.len() >= FRAME_BYTES {
            let len = FRAME_BYTES + frame_body(&self.held);
            if self.held.len() < len {
                return;
            }
            let frame: Vec<u8> = self.held.drain(..len).collect();
            self.frame(&frame, out);
        }
    }
}

impl Tamper for Changer {
    fn pass(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        match self.how {
            How::Swap { .. } | How::Replay { .. } | How::Again { .. } => {
                self.held.extend_from_slice(bytes);
                self.frames(out);
            }
            _ => bytes.iter().for_each(|&byte| self.byte(byte, out)),
        }
        match self.how {
            How::End { at } if self.passed >= at => {
                out.truncate(out.len() - (self.passed - at));
                false
            }
            _ => true,
        }
    }
}

/// Number of pages of the guest: some 5 MB on the link.
const PAGES: usize = 2000;

/// Carries a guest over one lane with this change. Returns true if everything has arrived.
fn carried(change: &Change) -> bool {
    let &Change { connection, way, how } = change;
    let tamper = move |number, going: Way| -> Option<Box<dyn Tamper>> {
        (number == connection && going == way).then(|| Box::new(Changer::new(how)) as Box<dyn Tamper>)
    };
    let mut between = Waiting::start(&["--lanes", "1"]).joined_by(&["--patience", "0"], tamper);
    let stream = main_channel(PAGES);
    // The damaged message may be one that precedes the stream.
    let source = between.source_unless_over();
    let writer = source.as_ref().map(|source| write(source.try_clone().expect("a socket"), stream.clone()));
    let received = between.destination_unless_over().map(|destination| {
        let received = Received::from(destination.try_clone().expect("a socket"));
        let source = writer.expect("it was opened").join().expect("written");
        let _ = source.shutdown(Shutdown::Write);
        let received = received.end();
        drop(destination);
        received
    });
    let said = between.fail();
    assert!(source.is_none_or(|source| was_closed(&source)), "{how:?}");
    let received = received.unwrap_or_default();
    assert!(stream.starts_with(&received), "{how:?}: other bytes arrived; {said:#?}");
    received.len() == stream.len()
}

/// Asserts that with each of these changes on a lane not everything arrives.
fn are_found_out(all: impl IntoIterator<Item = How>) {
    for how in all {
        let change = Change { connection: LANE, way: Way::There, how };
        assert!(!carried(&change), "{how:?}");
    }
}

/// A flipped bit on a lane ends the session, and reaches no guest.
#[test]
fn flipped_lane_bit_ends_session() {
    let mut random = Random::new(5);
    let first = HELLO_BYTES..HELLO_BYTES + FRAME_BYTES;
    let random = (0..40).map(|_| HELLO_BYTES + random.below(4_000_000) as usize);
    are_found_out(first.step_by(3).chain(random).map(|at| How::Flip { at, bit: (at % 8) as u8 }));
}

#[test]
fn lost_or_repeated_bytes_end_session() {
    let at = HELLO_BYTES;
    are_found_out([
        How::Lose { at, count: 1 },
        How::Lose { at: at + 10, count: FRAME_BYTES },
        How::Lose { at: 1_000_000, count: 1 },
        How::Lose { at: 1_000_001, count: 100_000 },
        How::Repeat { at, count: 1 },
        How::Repeat { at: at + 60, count: 8 },
        How::Repeat { at: 2_000_000, count: 4096 },
        How::End { at: at + 1 },
        How::End { at: at + FRAME_BYTES },
        How::End { at: 1_000_000 },
    ]);
}

#[test]
fn reordered_or_repeated_frames_end_session() {
    are_found_out([
        How::Swap { frame: 0 },
        How::Swap { frame: 5 },
        How::Replay { frame: 0 },
        How::Replay { frame: 7 },
        How::Again { frame: 0, later: 1 },
        How::Again { frame: 3, later: 6 },
    ]);
}

#[test]
fn damaged_control_message_ends_session() {
    const MESSAGE_BYTES: usize = 24;
    // The first two messages in each direction: a keepalive, and the one that opens the channel or acknowledges data.
    let ways = [(Way::There, HELLO_BYTES), (Way::Back, WELCOME_BYTES)];
    std::thread::scope(|scope| {
        for (way, first) in ways {
            for at in (first..first + 2 * MESSAGE_BYTES).step_by(5) {
                // A message with a damaged length is missed only after some seconds, so the cases run concurrently.
                scope.spawn(move || {
                    for how in [How::Flip { at, bit: 1 }, How::Lose { at, count: 3 }] {
                        carried(&Change { connection: CONTROL, way, how });
                    }
                });
            }
        }
    });
    // The message that opens the channel comes twice.
    carried(&Change {
        connection: CONTROL,
        way: Way::There,
        how: How::Repeat { at: HELLO_BYTES + MESSAGE_BYTES, count: MESSAGE_BYTES },
    });
}
