//! Hostile peers that send invalid messages, one by one: a receiver, or a sender, ends with the reason, reports it to
//! the peer, and passes nothing of it to a QEMU.

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use larder_bench::campaign::migration::larder::send_command;
use larder_bench::campaign::process::Process;

use crate::ends::{Received, Waiting, was_closed};
use crate::support::{TEST_TIMEOUT, larder_path, temp_dir_on_tmpfs};
use crate::wire::{
    ALIVE, CLOSE, CLOSED, DELIVERED, END, FAILED, Frame, HELLO_BYTES, NOTE, OPEN, RECEIVED, RETURN, WELCOME_BYTES,
    crc32c, hello, message, next_message, put, say, seal, welcome,
};

fn read<const LEN: usize>(mut from: &TcpStream) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    std::io::Read::read_exact(&mut from, &mut bytes).expect("it answers");
    bytes
}

/// A fake sender.
struct Sender {
    control: TcpStream,
    lanes: [TcpStream; 2],
    window: u64,
}

impl Sender {
    fn connect(waiting: &Waiting) -> Self {
        let connect = |lane| {
            let socket = TcpStream::connect(waiting.receiver.address()).expect("it listens");
            say(&socket, &hello(lane));
            let welcome: [u8; WELCOME_BYTES] = read(&socket);
            (socket, welcome)
        };
        let (control, welcome) = connect(None);
        let session = welcome[16..32].try_into().expect("16 bytes");
        Self {
            control,
            lanes: [0, 1].map(|number| connect(Some((number, session))).0),
            window: u32::from_le_bytes(welcome[40..44].try_into().expect("4 bytes")).into(),
        }
    }

    fn tell(&self, kind: u8, value: u64) {
        say(&self.control, &message(kind, 0, value, b""));
    }

    fn send(&self, lane: usize, frame: &Frame) {
        say(&self.lanes[lane], &frame.bytes());
    }
}

/// Data that the fake sender always sends first, and that QEMU may get.
const FIRST: &[u8] = b"what QEMU says";

/// Asserts that a sender which begins correctly and then does this ends the receiver with this error.
fn bad_sender(text: &str, does: impl Fn(&Sender)) {
    let mut waiting = Waiting::start(&["--channels", "4"]);
    let sender = Sender::connect(&waiting);
    sender.tell(OPEN, 0);
    let destination = waiting.qemu();
    let received = Received::from(destination);
    sender.send(0, &Frame::literal(0, 0, FIRST));
    received.wait_for(FIRST.len());
    does(&sender);
    // The sender gets the error as the last message, unless it sent an error itself.
    loop {
        match next_message(&sender.control) {
            Ok((FAILED, _, _, body)) => break assert!(String::from_utf8_lossy(&body).contains(text), "{body:?}"),
            Ok((DELIVERED | CLOSED, ..)) => {}
            Err(_) if text.starts_with("larder: the sender: ") => break,
            other => panic!("{other:?}"),
        }
    }
    drop(sender);
    let (code, said) = waiting.receiver.end().expect("it ends");
    assert!(code == Some(2) && said.contains(text), "not '{text}', but {code:?}:\n{said}");
    assert_eq!(received.end(), FIRST, "{text}");
}

fn next(number: u64, bytes: &[u8]) -> Frame {
    Frame::literal(number, FIRST.len() as u64, bytes)
}

#[test]
fn frames_outside_window_are_refused() {
    bad_sender("of channel 0, of which it may send up to ", |sender| {
        sender.send(0, &Frame::literal(1, FIRST.len() as u64 + sender.window, b"too far"));
    });
    bad_sender("of channel 0, of which it may send up to ", |sender| {
        sender.send(0, &Frame::literal(1, 3, b"what has come already"));
    });
    bad_sender("of channel 0, of which it may send up to ", |sender| {
        // Data after a gap is held back until the next frame fills the gap.
        sender.send(0, &Frame::literal(1, 100, b"behind a gap"));
        sender.send(0, &Frame::literal(2, 105, b"partly the same"));
    });
    bad_sender("of channel 0, of which it may send up to ", |sender| {
        sender.send(0, &Frame::literal(1, 100, b"behind a gap"));
        sender.send(0, &Frame::literal(2, 100, b"behind a gap"));
    });
    bad_sender("the sender sent data of channel 4", |sender| {
        let frame = Frame { channel: 4, ..next(1, b"of no channel") };
        sender.send(0, &frame);
    });
    bad_sender("of channel 0, of which it may send up to ", |sender| {
        sender.tell(CLOSE, FIRST.len() as u64 + 3);
        // Either of the two may arrive first.
        sender.send(0, &next(1, b"more than the whole"));
    });
}

#[test]
fn frames_out_of_order_are_refused() {
    for (number, lane) in [(0, 0), (0, 1), (1 << 40, 0), (u64::MAX, 1)] {
        bad_sender(&format!("frame {number} is out of order"), |sender| sender.send(lane, &next(number, b"again")));
    }
    bad_sender("frame 3 is out of order", |sender| {
        sender.send(0, &Frame::literal(5, 100, b"behind a gap"));
        sender.send(0, &Frame::literal(3, 200, b"behind a gap"));
    });
    bad_sender("a frame's header: the order is 1, and may be that of a frame of at least one byte", |sender| {
        let frame = Frame { after: 2, ..next(1, b"after a later one") };
        sender.send(0, &frame);
    });
}

#[test]
fn frames_that_decode_wrongly_are_refused() {
    let page = [9; 4096];
    // A page that is stored in a slot.
    let stored = Frame {
        raw: 4096,
        raw_crc: crc32c(&page),
        operations: vec![4, 1, 0],
        literals: Vec::new(),
        pages: page.to_vec(),
        ..next(1, b"")
    };
    let wrong: [(&str, Frame); 9] = [
        ("frame 1: the decoded data has the checksum ", Frame { raw_crc: 5, ..next(1, b"changed") }),
        ("frame 1: the decoded data has the checksum ", Frame { raw_crc: crc32c(&[8; 4096]), ..stored.clone() }),
        ("frame 1: ", Frame { raw: 9, ..next(1, b"shorter") }),
        ("frame 1: ", Frame { operations: vec![1, 99], ..next(1, b"longer") }),
        ("frame 1: ", Frame { operations: vec![0x55], ..next(1, b"unknown") }),
        (
            "frame 1: ",
            Frame {
                operations: vec![1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
                ..next(1, b"endless")
            },
        ),
        ("frame 1: unknown method number 77", Frame { method: 77, ..stored.clone() }),
        // With 1 MiB of delta memory there are 256 slots.
        ("frame 1: ", Frame { operations: vec![4, 1, 0x80, 4], ..stored.clone() }),
        ("frame 1: ", Frame { operations: vec![5, 1, 0], pages: Vec::new(), deltas: vec![0xff; 9], ..stored.clone() }),
    ];
    for (text, frame) in &wrong {
        bad_sender(text, |sender| sender.send(0, frame));
    }
    let too_long = [
        ("the number of raw bytes is 278529", 32, 278_529_u32),
        ("the length of the operations is 65537", 36, 65_537),
        ("the length of the literals is 4294967295", 40, u32::MAX),
        ("the length of the pages is 4097", 44, 4097),
        ("the length of the deltas is 262145", 48, 262_145),
    ];
    for (text, at, value) in too_long {
        bad_sender(text, |sender| {
            let mut bytes = stored.bytes();
            put(&mut bytes, at, &value.to_le_bytes());
            seal(&mut bytes[..64]);
            say(&sender.lanes[0], &bytes);
        });
    }
    bad_sender("a frame's header: the order is 1", |sender| sender.send(0, &next(1, b"")));
}

#[test]
fn invalid_sender_messages_are_refused() {
    let whole = FIRST.len() as u64;
    bad_sender("the sender sent Open of channel 0 with 0 and 0 bytes, which violates the protocol", |sender| {
        sender.tell(OPEN, 0)
    });
    bad_sender("the end of channel 0 at 13 bytes", |sender| sender.tell(CLOSE, whole - 1));
    bad_sender("the end of channel 0 at 14 bytes", |sender| {
        sender.tell(CLOSE, whole);
        sender.tell(CLOSE, whole);
    });
    bad_sender("the sender sent END while channel 0 is open", |sender| sender.tell(END, 0));
    for kind in [DELIVERED, RETURN, CLOSED, RECEIVED] {
        bad_sender(", which violates the protocol", |sender| sender.tell(kind, 1));
    }
    bad_sender("the sender sent data of channel 4", |sender| say(&sender.control, &message(OPEN, 4, 0, b"")));
    bad_sender("larder: the sender: it \u{fffd} says so [2J", |sender| {
        say(&sender.control, &message(FAILED, 0, 0, b"it \xff says so\x1b[2J"));
    });
}

#[test]
fn malformed_messages_are_refused() {
    bad_sender("a control message: the magic is ", |sender| say(&sender.control, &[0x20; 24]));
    bad_sender("a control message: the kind is 11", |sender| sender.tell(11, 0));
    bad_sender("a control message: its checksum is ", |sender| {
        let mut bytes = message(NOTE, 0, 0, b"a note");
        bytes[25] ^= 1;
        say(&sender.control, &bytes);
    });
    bad_sender("a control message: the length of the body is 65537", |sender| {
        let mut bytes = message(NOTE, 0, 0, b"");
        put(&mut bytes, 4, &65_537_u32.to_le_bytes());
        say(&sender.control, &bytes);
    });
    bad_sender("the sender moves a complete virtual machine", |sender| {
        say(&sender.control, &message(NOTE, 0, 0, &[1; 1000]));
    });
}

/// Runs a fake receiver that answers each connection's greeting with `answer`, and returns the sender's final output.
fn greets(answer: impl Fn() -> Vec<u8>) -> String {
    let (folder, listener) = (temp_dir_on_tmpfs(), TcpListener::bind("127.0.0.1:0").expect("a port"));
    let to = listener.local_addr().expect("bound").to_string();
    let command = send_command(larder_path(), &folder.path().join("sender"), &to, &["--lanes", "1"]);
    let mut process = Process::start(command).expect("starts");
    let (socket, _) = listener.accept().expect("it connects");
    let _: [u8; HELLO_BYTES] = read(&socket);
    say(&socket, &answer());
    drop(socket);
    let status = process.wait(TEST_TIMEOUT).expect("it ends");
    assert_eq!(status.code(), Some(2), "{}", process.output());
    process.output()
}

#[test]
fn invalid_receiver_greetings_are_refused() {
    let changed = |at: usize, value: &'static [u8]| {
        move || {
            let mut bytes = welcome();
            put(&mut bytes, at, value);
            seal(&mut bytes);
            bytes.to_vec()
        }
    };
    for (at, value, text) in [
        (0, &b"HTTP/1.1"[..], "the answer of the receiver: the other side does not speak Larder's migration protocol"),
        (8, &[2], "the other side speaks version 2 of Larder's migration protocol, this one 1"),
        (40, &[0; 4], "the answer of the receiver: the window is 0, and may be at least a frame (278528)"),
        (44, &[0; 2], "the answer of the receiver: the number of lanes is 0, and may be 1 to 64"),
        (44, &[65, 0], "the answer of the receiver: the number of lanes is 65, and may be 1 to 64"),
        (46, &[0; 2], "the answer of the receiver: the number of channels is 0, and may be 1 to 256"),
        (46, &[1, 1], "the answer of the receiver: the number of channels is 257, and may be 1 to 256"),
    ] {
        let said = greets(changed(at, value));
        assert!(said.contains(text), "not '{text}', but {said}");
    }
    let refusal = |len: u32, reason: &'static [u8]| {
        move || {
            let mut bytes = welcome();
            bytes[10] = 1;
            put(&mut bytes, 12, &len.to_le_bytes());
            seal(&mut bytes);
            [&bytes[..], reason].concat()
        }
    };
    let said = greets(refusal(9, b"no\x1b[2J\nok"));
    assert!(said.contains("larder: the receiver refuses: no [2J ok"), "{said:?}");
    let said = greets(refusal(1025, &[b'a'; 1025]));
    assert!(said.contains("the length of the reason is 1025, and may be at most 1024"), "{said}");
    let said = greets(|| welcome()[..30].to_vec());
    assert!(said.contains("the answer of the receiver: the other side has closed the connection"), "{said}");
    let said = greets(|| {
        let mut bytes = welcome();
        bytes[20] ^= 1;
        bytes.to_vec()
    });
    assert!(said.contains("the answer of the receiver: its checksum is "), "{said}");
}

/// Arguments of a sender with one lane that does not reconnect.
const ONE_LANE: [&str; 4] = ["--lanes", "1", "--patience", "0"];

/// Asserts that a receiver which begins correctly and then sends this ends the sender with this error.
fn bad_receiver(text: &str, says: &[Vec<u8>]) {
    let (folder, listener) = (temp_dir_on_tmpfs(), TcpListener::bind("127.0.0.1:0").expect("a port"));
    let to = listener.local_addr().expect("bound").to_string();
    let path = folder.path().join("sender");
    let mut process = Process::start(send_command(larder_path(), &path, &to, &ONE_LANE)).expect("starts");
    let sockets = [(); 2].map(|()| {
        let (socket, _) = listener.accept().expect("it connects");
        let _: [u8; HELLO_BYTES] = read(&socket);
        say(&socket, &welcome());
        socket
    });
    process.wait_for("ready to send", TEST_TIMEOUT).expect("it is content");
    let source = UnixStream::connect(&path).expect("it listens");
    assert_eq!(next_message(&sockets[0]).expect("a message").0, OPEN);
    std::io::Write::write_all(&mut &source, FIRST).expect("it takes it");
    let _: [u8; 64] = read(&sockets[1]);
    for said in says {
        say(&sockets[0], said);
    }
    // The sender first reports the reason, unless the receiver sent it, and then closes the connection.
    while next_message(&sockets[0]).is_ok() {}
    drop(sockets);
    let status = process.wait(TEST_TIMEOUT).expect("it ends");
    let said = process.output();
    assert!(status.code() == Some(2) && said.contains(text), "not '{text}', but {status}: {said}");
    assert!(was_closed(&source));
}

#[test]
fn invalid_receiver_messages_are_refused() {
    let whole = FIRST.len() as u64;
    let text = ", which violates the protocol";
    bad_receiver(
        "that 15 bytes of channel 0 were delivered, of which 14 were sent",
        &[message(DELIVERED, 0, whole + 1, b"")],
    );
    bad_receiver(
        "that 13 bytes of channel 0 were delivered, of which 14 were sent",
        &[message(DELIVERED, 0, whole, b""), message(DELIVERED, 0, whole - 1, b"")],
    );
    for kind in [DELIVERED, RETURN, CLOSED] {
        bad_receiver(text, &[message(kind, 1, 0, b"")]);
    }
    for kind in [OPEN, CLOSE, END] {
        bad_receiver(text, &[message(kind, 0, 0, b"")]);
    }
    bad_receiver(
        "the receiver confirms 2 frames of lane 0; the valid range is 0 to 1",
        &[message(RECEIVED, 0, 2, b"")],
    );
    bad_receiver(
        "the receiver confirms 0 frames of lane 1; the valid range is 0 to 0",
        &[message(RECEIVED, 1, 0, b"")],
    );
    bad_receiver("the other side confirms 2 messages; the valid range is 0 to 1", &[message(ALIVE, 0, 2, b"")]);
    bad_receiver("too many unread notes", &vec![message(NOTE, 0, 0, b"a note"); 100]);
    bad_receiver("larder: the receiver: as it says", &[message(FAILED, 0, 0, b"as it says")]);
    bad_receiver("a control message: the magic is ", &[vec![0x20; 24]]);
}
