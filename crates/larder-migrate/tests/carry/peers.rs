//! Peers that are no Larder, or a faulty one.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use larder_migrate::progress::SenderProgress;
use larder_migrate::receive::{ReceiveError, receive};
use larder_migrate::send::{self, SendError, Sender, Steering};
use larder_migrate::wire::{
    CHANNEL_FRAMES_MAX, ConnectionRole, FrameHeader, Hello, Message, MessageKind, SessionId, Welcome, WireError,
};

use crate::pair::{Pair, watch};

/// Returns a greeting of a sender that does not reconnect.
fn greeting(role: ConnectionRole, session: SessionId) -> Hello {
    Hello { role, link: 0, session, delta_memory: 0, lanes: 2, patience_ms: 0, received: 0, proof: [0; 32] }
}

/// Sender made of sockets: its control connection and two lanes.
struct Raw {
    control: TcpStream,
    lanes: [TcpStream; 2],
}

impl Raw {
    fn connect(pair: &Pair) -> Self {
        let (control, welcome) = Self::greet(pair, ConnectionRole::Control, [0; 16]).expect("it is welcome");
        let lane = |number| Self::greet(pair, ConnectionRole::Lane(number), welcome.session).expect("it is welcome").0;
        Self { control, lanes: [lane(0), lane(1)] }
    }

    fn greet(pair: &Pair, role: ConnectionRole, session: SessionId) -> Result<(TcpStream, Welcome), WireError> {
        let mut socket = TcpStream::connect(pair.tcp.local_addr().expect("bound")).expect("it listens");
        greeting(role, session).write(&mut socket)?;
        let welcome = Welcome::read(&mut socket)?;
        Ok((socket, welcome))
    }
}

pub(crate) fn say(mut to: &TcpStream, message: &Message) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    message.append_to(&mut bytes);
    to.write_all(&bytes)
}

/// Reads the next message that is neither a keep-alive nor a confirmation; returns `None` at the end.
pub(crate) fn hear(from: &TcpStream) -> Option<Message> {
    loop {
        let message = hear_any(from)?;
        if message.kind.is_retained() {
            return Some(message);
        }
    }
}

/// Reads the next message; returns `None` at the end.
pub(crate) fn hear_any(mut from: &TcpStream) -> Option<Message> {
    let mut bytes = Vec::new();
    loop {
        if let Some((message, _)) = Message::parse(&bytes).expect("a message") {
            return Some(message);
        }
        let mut byte = [0];
        if !matches!(from.read(&mut byte), Ok(1)) {
            return None;
        }
        bytes.push(byte[0]);
    }
}

/// Returns a frame of this one byte.
pub(crate) fn frame(number: u64, offset: u64, byte: u8) -> Vec<u8> {
    let header = FrameHeader {
        channel: 0,
        method: 0,
        number,
        after: 0,
        offset,
        raw_len: 1,
        operations_len: 2,
        literals_len: 1,
        pages_len: 0,
        deltas_len: 0,
        raw_crc: crc32c::crc32c(&[byte]),
    };
    [&header.to_bytes()[..], &[1, 1, byte]].concat()
}

/// A peer that disconnects before its greeting is answered does not end the receiver.
#[test]
fn peer_leaving_during_greeting_is_ignored() {
    let _watched = watch();
    let pair = Pair::new(2, 0);
    {
        let mut socket = TcpStream::connect(pair.tcp.local_addr().expect("bound")).expect("it listens");
        greeting(ConnectionRole::Control, [0; 16]).write(&mut socket).expect("there is room");
        // The connection ends with a reset, which the receiver's answer meets.
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO)).expect("a socket");
    }
    thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&pair.tcp, &pair.receiver(), &pair.stop, None));
        let control = loop {
            match Raw::greet(&pair, ConnectionRole::Control, [0; 16]) {
                Ok((control, _)) => break control,
                // The receiver has not detected yet that the first sender has disconnected.
                Err(WireError::Refused(_)) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        say(&control, &Message::new(MessageKind::End, 0, 0)).expect("it takes it");
        assert_eq!(hear(&control).map(|message| message.kind), Some(MessageKind::End));
        drop(control);
        receiver.join().expect("it ends").expect("in order");
    });
}

/// Neither open lanes nor silent connections of others delay the end of a session.
#[test]
fn open_connections_do_not_delay_end() {
    let _watched = watch();
    let pair = Pair::new(2, 0);
    thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&pair.tcp, &pair.receiver(), &pair.stop, None));
        let raw = Raw::connect(&pair);
        let stranger = TcpStream::connect(pair.tcp.local_addr().expect("bound")).expect("it listens");
        say(&raw.control, &Message::new(MessageKind::End, 0, 0)).expect("it takes it");
        let answer = hear(&raw.control).map(|message| message.kind);
        assert_eq!(answer, Some(MessageKind::End));
        drop(raw.control);
        receiver.join().expect("it ends").expect("in order");
        drop((raw.lanes, stranger));
    });
}

/// A sender that sends messages without end does not keep the receiver from stopping.
#[test]
fn flooding_sender_does_not_delay_stop() {
    let _watched = watch();
    let pair = Pair::new(2, 0);
    thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&pair.tcp, &pair.receiver(), &pair.stop, None));
        let raw = Raw::connect(&pair);
        let mut many = Vec::new();
        (0..10_000).for_each(|_| Message::new(MessageKind::Alive, 0, 0).append_to(&mut many));
        let mut control = raw.control.try_clone().expect("a socket");
        scope.spawn(move || while control.write_all(&many).is_ok() {});
        pair.stop.store(true, Ordering::Relaxed);
        let ended = receiver.join().expect("it ends");
        assert!(matches!(ended, Err(ReceiveError::Stopped)), "{ended:?}");
    });
}

#[test]
fn excess_small_frames_are_refused() {
    let _watched = watch();
    let pair = Pair::new(2, 0);
    thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&pair.tcp, &pair.receiver(), &pair.stop, None));
        let raw = Raw::connect(&pair);
        // Each frame is behind a gap, so that QEMU gets none.
        for number in 0..=CHANNEL_FRAMES_MAX as u64 {
            let bytes = frame(number, 2 * number + 1, 7);
            (&raw.lanes[0]).write_all(&bytes).expect("it takes it");
        }
        let ended = receiver.join().expect("it ends");
        assert!(matches!(ended, Err(ReceiveError::TooManyFrames { channel: 0 })), "{ended:?}");
        let told = hear(&raw.control).expect("it says why");
        assert_eq!(told.kind, MessageKind::Failed);
        assert_eq!(told.text(), ended.expect_err("it failed").to_string());
    });
}

/// Returns the result of a sender whose receiver answers the greetings with `welcome` and then sends `says`.
fn with_receiver(welcome: &Welcome, says: &[Message]) -> Result<(), SendError> {
    let _watched = watch();
    let folder = tempfile::tempdir().expect("a folder");
    let qemu = std::os::unix::net::UnixListener::bind(folder.path().join("qemu")).expect("a socket");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let options = send::Options {
        to: listener.local_addr().expect("bound").to_string(),
        tls: None,
        lanes: 1,
        delta_memory: 1 << 20,
        patience: Duration::ZERO,
        limits: Arc::default(),
        accelerators: send::Accelerators::None,
    };
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut sockets = Vec::new();
            while let Ok((mut socket, _)) = listener.accept() {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                Hello::read(&mut socket).expect("a greeting");
                welcome.write(&mut socket).expect("it takes it");
                sockets.push(socket);
                if sockets.len() == 2 {
                    for message in says {
                        say(&sockets[0], message).expect("it takes it");
                    }
                }
            }
        });
        let result = Sender::connect(&options)
            .and_then(|sender| sender.carry(&qemu, &SenderProgress::new(), &Steering::default()));
        is_over.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts connections.
        let _ = TcpStream::connect(&options.to);
        result
    })
}

fn welcome(delta_memory: u64) -> Welcome {
    Welcome { session: [3; 16], delta_memory, window: 16 << 20, lanes: 1, channels: 4, methods: 0, received: 0 }
}

#[test]
fn receiver_demanding_more_memory_is_refused() {
    let error = with_receiver(&welcome((1 << 20) + 1), &[]).expect_err("too much");
    let text = "the answer of the receiver: the delta memory is 1048577, and may be at most what this side asked for";
    assert!(error.to_string().starts_with(text), "{error}");
}

#[test]
fn unrequested_end_is_an_error() {
    let error = with_receiver(&welcome(0), &[Message::new(MessageKind::End, 0, 0)]).expect_err("nothing has ended");
    assert!(error.to_string().ends_with("which violates the protocol"), "{error}");
}
