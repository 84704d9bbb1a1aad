//! Input from a peer: greetings, messages, and frames, down to the bytes of a channel.

use std::io::Cursor;

use larder_migrate::base::{Frontier, Slots};
use larder_migrate::control::{Mailbox, ReceivedCount};
use larder_migrate::decode::{Bases, DecodeError, FrameDecoder};
use larder_migrate::wire::{FRAME_RAW_MAX, FrameHeader, Hello, Message, MessageKind, Welcome};

use super::Input;

/// Bytes of delta memory, so that there are some slots.
const DELTA_MEMORY: u64 = 256 << 10;
/// Maximum frames of one input.
const FRAMES_MAX: usize = 16;

/// Runs an input; its first byte selects the format of the others.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.byte() % 4 {
        0 => greetings(input.0),
        1 => messages(input.0),
        2 => frame_headers(input.0),
        _ => frames(&mut input),
    }
}

/// Replaces the last four of the first `len` bytes by their checksum, as an attacker would.
fn sealed(bytes: &[u8], len: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= len {
        let crc = crc32c::crc32c(&bytes[..len - 4]);
        bytes[len - 4..len].copy_from_slice(&crc.to_le_bytes());
    }
    bytes
}

/// Checks that a parsed greeting, written and parsed again, is the same.
fn greetings(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), sealed(bytes, 96)] {
        if let Ok(hello) = Hello::read(&mut Cursor::new(&bytes)) {
            let mut written = Vec::new();
            hello.write(&mut written).expect("memory");
            assert_eq!(Hello::read(&mut &written[..]).expect("as it was written"), hello);
        }
    }
    for bytes in [bytes.to_vec(), sealed(bytes, 72)] {
        if let Ok(welcome) = Welcome::read(&mut Cursor::new(&bytes)) {
            let mut written = Vec::new();
            welcome.write(&mut written).expect("memory");
            assert_eq!(Welcome::read(&mut &written[..]).expect("as it was written"), welcome);
        }
    }
}

/// Checks consecutive messages, each with a corrected checksum, as the control connection parses them.
fn messages(bytes: &[u8]) {
    let mut rest = bytes.to_vec();
    let mailbox = Mailbox::new().expect("an eventfd");
    mailbox.send(&Message::new(MessageKind::Open, 0, 0));
    let mut came = ReceivedCount::default();
    while rest.len() >= Message::HEADER_LEN {
        // The checksum is corrected if the stated length is within the input.
        let len = u32::from_le_bytes([rest[4], rest[5], rest[6], rest[7]]) as usize;
        if let Some(body) = rest.get(Message::HEADER_LEN..).and_then(|rest| rest.get(..len)) {
            let crc = crc32c::crc32c_append(crc32c::crc32c(&rest[..20]), body);
            rest[20..24].copy_from_slice(&crc.to_le_bytes());
        }
        let Ok(Some((message, len))) = Message::parse(&rest) else {
            return;
        };
        let mut written = Vec::new();
        message.append_to(&mut written);
        assert_eq!(written.len(), len);
        assert_eq!(Message::parse(&written).expect("as it was written"), Some((message.clone(), len)));
        assert!(!message.text().contains(|c: char| c.is_control()));
        match message.kind {
            MessageKind::Received => {
                mailbox.record_receipt(message.channel, came.count_one(0).expect("it is this link's"))
            }
            _ => mailbox.send(&message),
        }
        rest.drain(..len);
    }
}

fn frame_headers(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), sealed(bytes, FrameHeader::LEN)] {
        let Some(bytes) = bytes.first_chunk() else { return };
        if let Ok(header) = FrameHeader::from_bytes(bytes) {
            assert!(header.body_len() <= 4 * FRAME_RAW_MAX && header.after <= header.number);
            assert_eq!(FrameHeader::from_bytes(&header.to_bytes()).expect("as it was written"), header);
        }
    }
}

/// Checks consecutive frames with sections of these bytes: the output must not exceed the frame's stated length.
fn frames(input: &mut Input<'_>) {
    let bases = Bases { slots: Slots::new(DELTA_MEMORY), frontier: Frontier::new() };
    let mut decoder = FrameDecoder::new();
    let mut out = Vec::new();
    for number in 0..FRAMES_MAX as u64 {
        if input.0.is_empty() {
            return;
        }
        let method = input.byte() % 8;
        let raw_len = u32::from(input.word()) + u32::from(input.byte()) * 1024;
        let lens = [(); 4].map(|()| u32::from(input.word()) % 1500);
        let sections = lens.map(|len| input.bytes(len as usize));
        let [operations, literals, pages, deltas] = sections.map(|section| section.len() as u32);
        let header = FrameHeader {
            channel: 0,
            method,
            number,
            // All earlier frames are decoded.
            after: number,
            offset: 0,
            raw_len,
            operations_len: operations,
            literals_len: literals,
            pages_len: pages,
            deltas_len: deltas,
            raw_crc: 0,
        };
        let Ok(header) = FrameHeader::from_bytes(&header.to_bytes()) else {
            return;
        };
        let body = sections.concat();
        match decoder.decode(&header, &body, &bases, &mut out) {
            // The output is complete.
            Ok(()) | Err(DecodeError::Checksum { .. }) => assert_eq!(out.len(), header.raw_len as usize),
            // The session would end here.
            Err(_) => return,
        }
        assert!(out.capacity() <= 2 * FRAME_RAW_MAX);
    }
}
