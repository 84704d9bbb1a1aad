//! Reconnection of links at the level of messages: which peers may reconnect, and the counts that are exchanged.

use std::io::Write;
use std::net::TcpStream;
use std::thread;

use larder_migrate::receive::{ReceiveError, receive};
use larder_migrate::wire::{
    ConnectionRole, Hello, Message, MessageKind, Proof, ProofChain, SessionId, Welcome, WireError,
};

use crate::pair::{Pair, watch};
use crate::peers::{frame, hear, say};

/// Sender that has opened a session with two lanes, and can reconnect.
struct Raw<'a> {
    pair: &'a Pair,
    chain: ProofChain,
    session: SessionId,
    link: u32,
    control: TcpStream,
    lanes: Vec<TcpStream>,
}

/// Returns a greeting of a sender that reconnects for up to a minute.
fn greeting(role: ConnectionRole, link: u32, session: SessionId, proof: Proof) -> Hello {
    Hello { role, link, session, delta_memory: 0, lanes: 2, patience_ms: 60_000, received: 0, proof }
}

fn greet(pair: &Pair, hello: &Hello) -> Result<(TcpStream, Welcome), WireError> {
    let mut socket = TcpStream::connect(pair.tcp.local_addr().expect("bound")).expect("it listens");
    hello.write(&mut socket)?;
    let welcome = Welcome::read(&mut socket)?;
    Ok((socket, welcome))
}

impl<'a> Raw<'a> {
    fn open(pair: &'a Pair) -> Self {
        let chain = ProofChain::new().expect("random numbers");
        let hello = greeting(ConnectionRole::Control, 0, [0; 16], chain.proof(0));
        let (control, welcome) = greet(pair, &hello).expect("it is welcome");
        let mut raw = Self { pair, chain, session: welcome.session, link: 0, control, lanes: Vec::new() };
        assert_eq!(raw.connect_lanes(), [0, 0]);
        raw
    }

    /// Connects the lanes; returns the number of frames received of each.
    fn connect_lanes(&mut self) -> Vec<u64> {
        let connected = (0..2).map(|number| {
            let hello = greeting(ConnectionRole::Lane(number), self.link, self.session, [0; 32]);
            greet(self.pair, &hello).expect("it is welcome")
        });
        let connected: Vec<_> = connected.collect();
        let received = connected.iter().map(|(_, welcome)| welcome.received).collect();
        self.lanes = connected.into_iter().map(|(socket, _)| socket).collect();
        received
    }

    /// Reconnects over this link, with the count of messages received; returns the receiver's counts of messages and
    /// frames.
    fn again(&mut self, link: u32, received: u64) -> (u64, Vec<u64>) {
        (self.control_again(link, received), self.connect_lanes())
    }

    fn control_again(&mut self, link: u32, received: u64) -> u64 {
        self.link = link;
        let mut hello = greeting(ConnectionRole::Control, link, self.session, self.chain.proof(link));
        hello.received = received;
        let (control, welcome) = greet(self.pair, &hello).expect("it is welcome");
        self.control = control;
        welcome.received
    }

    fn refused(&self, hello: &Hello) -> String {
        match greet(self.pair, hello) {
            Err(WireError::Refused(reason)) => reason,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("{hello:?} is welcome"),
        }
    }

    fn send(&self, lane: usize, bytes: &[u8]) {
        (&self.lanes[lane]).write_all(bytes).expect("it takes it");
    }

    /// Waits until the receiver has confirmed this many frames of a lane.
    fn wait_for(&self, lane: u16, frames: u64) {
        loop {
            let message = crate::peers::hear_any(&self.control).expect("it lives");
            if (message.kind, message.channel) == (MessageKind::Received, lane) && message.value >= frames {
                return;
            }
        }
    }
}

/// Returns the result of a receiver while `happens` runs.
fn receives(happens: impl FnOnce(&mut Raw<'_>)) -> Result<(), ReceiveError> {
    let _watched = watch();
    let pair = Pair::new(2, 0);
    thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&pair.tcp, &pair.receiver(), &pair.stop, None).map(drop));
        let mut raw = Raw::open(&pair);
        happens(&mut raw);
        receiver.join().expect("it ends")
    })
}

/// Counts of messages and frames received in full are confirmed, and exchanged again over each new link.
#[test]
fn new_link_exchanges_received_counts() {
    let ended = receives(|raw| {
        (0..5).for_each(|number| raw.send(0, &frame(number, 100 + 2 * number, 7)));
        raw.send(1, &frame(5, 300, 7));
        // An incomplete frame.
        raw.send(1, &frame(6, 400, 7)[..50]);
        raw.wait_for(0, 5);
        raw.wait_for(1, 1);
        say(&raw.control, &Message::new(MessageKind::Close, 1, 0)).expect("it takes it");
        (&raw.control).write_all(b"LM").expect("it takes it");
        // Waits for the keep-alive that confirms the message.
        while !matches!(crate::peers::hear_any(&raw.control), Some(message) if message.kind == MessageKind::Alive && message.value == 1)
        {
        }
        assert_eq!(raw.again(3, 0), (1, vec![5, 1]));
        raw.send(1, &frame(6, 400, 7));
        raw.wait_for(1, 2);
        assert_eq!(raw.again(4, 0), (1, vec![5, 2]));
        say(&raw.control, &Message::with_body(MessageKind::Failed, 0, b"that is all")).expect("it takes it");
    });
    assert_eq!(ended.expect_err("as it was told").to_string(), "the sender: that is all");
}

/// The receiver repeats its END over a new link until the sender has confirmed it.
#[test]
fn end_is_resent_until_confirmed() {
    let ended = receives(|raw| {
        say(&raw.control, &Message::new(MessageKind::End, 0, 0)).expect("it takes it");
        let answer = hear(&raw.control).expect("it answers");
        assert_eq!(answer.kind, MessageKind::End);
        // Pretends that the answer was lost.
        assert_eq!(raw.again(5, 0), (1, vec![0, 0]));
        assert_eq!(hear(&raw.control), Some(answer));
        say(&raw.control, &Message::new(MessageKind::Alive, 0, 1)).expect("it takes it");
    });
    ended.expect("in order");
}

/// A frame that the receiver already has, sent again, ends the session.
#[test]
fn repeated_frame_ends_session() {
    let ended = receives(|raw| {
        (0..4).for_each(|number| raw.send(0, &frame(number, 100 + 2 * number, 7)));
        raw.wait_for(0, 4);
        assert_eq!(raw.again(1, 0), (0, vec![4, 0]));
        // The receiver has this frame already.
        raw.send(0, &frame(3, 106, 7));
        // On a slow machine a keep-alive arrives first.
        let mut heard = std::iter::from_fn(|| hear(&raw.control));
        let answer = heard.find(|message| message.kind != MessageKind::Alive);
        assert!(answer.is_some_and(|message| message.kind == MessageKind::Failed));
    });
    assert_eq!(ended.expect_err("again").to_string(), "frame 3 is out of order");
}

/// A sender that confirms messages that it was not sent ends the session.
#[test]
fn excess_received_count_ends_session() {
    let ended = receives(|raw| {
        assert_eq!(raw.control_again(1, 7), 0);
        assert!(hear(&raw.control).is_some_and(|message| message.kind == MessageKind::Failed));
    });
    let text = "the other side confirms 7 messages; the valid range is 0 to 0";
    assert_eq!(ended.expect_err("too many").to_string(), text);
}

/// A peer that has overheard all proofs so far cannot reconnect, join, or disturb the session.
#[test]
fn eavesdropper_cannot_take_over_session() {
    let ended = receives(|raw| {
        raw.again(2, 0);
        let control = |link, proof| greeting(ConnectionRole::Control, link, raw.session, proof);
        let others = "this session belongs to another sender";
        // Replayed and invented proofs; the sender itself has skipped link 1.
        for (link, proof) in [
            (2, raw.chain.proof(2)),
            (0x7fff_ffff, raw.chain.proof(2)),
            (3, raw.chain.proof(2)),
            (1, raw.chain.proof(1)),
            (3, [0; 32]),
        ] {
            assert_eq!(raw.refused(&control(link, proof)), others, "{link}");
        }
        let elsewhere = greeting(ConnectionRole::Control, 3, [1; 16], raw.chain.proof(3));
        let reason = raw.refused(&elsewhere);
        assert!(reason.starts_with("there is no such session here: "), "{reason}");
        let begins = greeting(ConnectionRole::Control, 0, [0; 16], [0; 32]);
        assert_eq!(raw.refused(&begins), "it is in the middle of a migration");
        for (number, link, session) in [(0, 2, raw.session), (2, 2, raw.session), (0, 3, raw.session), (0, 2, [0; 16])]
        {
            let reason = raw.refused(&greeting(ConnectionRole::Lane(number), link, session, [0; 32]));
            assert_eq!(reason, "there is no such session here, or it has all its lanes");
        }
        // None of these attempts has disturbed the session.
        say(&raw.control, &Message::new(MessageKind::End, 0, 0)).expect("it takes it");
        assert!(hear(&raw.control).is_some_and(|message| message.kind == MessageKind::End));
        say(&raw.control, &Message::new(MessageKind::Alive, 0, 1)).expect("it takes it");
    });
    ended.expect("in order");
}

/// A mover that was killed is followed by another one, which knows nothing of its session.
#[test]
fn new_sender_replaces_lost_one() {
    let _watched = watch();
    let pair = Pair::new(2, 0);
    let agent = |notes: larder_migrate::notes::Notes| {
        while notes.receive(crate::pair::LIMIT) != larder_migrate::notes::ReceivedNote::SessionEnded {}
    };
    thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let ended = receive(&pair.tcp, &pair.receiver(), &pair.stop, Some(&agent));
            (ended, receive(&pair.tcp, &pair.receiver(), &pair.stop, Some(&agent)))
        });
        let first = Raw::open(&pair);
        let session = first.session;
        drop(first);
        let hello = greeting(ConnectionRole::Control, 0, [0; 16], [0; 32]);
        let (control, welcome) = loop {
            match greet(&pair, &hello) {
                Ok(greeted) => break greeted,
                // The receiver has not detected yet that the first sender has disconnected.
                Err(WireError::Refused(_)) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        assert_ne!(welcome.session, session);
        say(&control, &Message::new(MessageKind::End, 0, 0)).expect("it takes it");
        assert!(hear(&control).is_some_and(|message| message.kind == MessageKind::End));
        say(&control, &Message::new(MessageKind::Alive, 0, 1)).expect("it takes it");
        drop(control);
        let (first, second) = receiver.join().expect("it ends");
        assert!(matches!(first, Err(ReceiveError::Replaced)), "{first:?}");
        second.expect("in order");
    });
}
