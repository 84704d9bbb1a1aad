//! Strangers that connect to a receiver's port.

use std::net::{SocketAddr, TcpStream};

use crate::ends::{Between, Waiting, carries, carries_on, main_channel, write};
use crate::support::{TEST_TIMEOUT, larder_path, run_command};
use crate::wire::{hello, say};

/// More connections than a receiver greets at a time.
const MANY: usize = 200;

fn silent(to: SocketAddr, count: usize) -> Vec<TcpStream> {
    (0..count).map(|_| TcpStream::connect(to).expect("it listens")).collect()
}

/// Opens connections that send what no sender sends.
fn strangers(to: SocketAddr) -> Vec<TcpStream> {
    let mut of_another_time = hello(None);
    of_another_time[8] = 9;
    crate::wire::seal(&mut of_another_time);
    let mut damaged = hello(None);
    damaged[33] ^= 1;
    let said: [&[u8]; 6] = [
        b"GET / HTTP/1.1\r\nHost: receiver\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03 a client's hello, by TLS",
        &[0xa5; 100_000],
        &hello(None)[..20],
        &of_another_time,
        &damaged,
    ];
    said.map(|said| speaking(to, said)).into()
}

fn speaking(to: SocketAddr, said: &[u8]) -> TcpStream {
    let socket = TcpStream::connect(to).expect("it listens");
    say(&socket, said);
    socket
}

#[test]
fn strangers_do_not_disturb_session() {
    let mut between = Between::start();
    let stream = main_channel(2000);
    between.relay.hold_at(1_000_000);
    let writer = write(between.source(), stream.clone());
    between.relay.wait_until_held(TEST_TIMEOUT).expect("so much comes");
    let to = between.receiver.address();
    let mut others = strangers(to);
    // A lane of another session, and another session.
    others.push(speaking(to, &hello(Some((0, [9; 16])))));
    others.push(speaking(to, &hello(None)));
    for text in [
        "the greeting of a sender: the other side does not speak Larder's migration protocol",
        "the other side speaks version 9 of Larder's migration protocol, this one 1: use the same version",
        "the greeting of a sender: its checksum is",
    ] {
        between.receiver.process.wait_for(text, TEST_TIMEOUT).expect("it says so");
    }
    // Messages about so many connections are limited.
    others.extend(silent(to, MANY));
    let second = larder_bench::campaign::migration::larder::send_command(
        larder_path(),
        &between.path("second"),
        &to.to_string(),
        &[],
    );
    let (code, said) = run_command(second);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("larder: the receiver refuses: it is in the middle of a migration"), "{said}");
    between.relay.release();
    carries_on(&mut between, &stream, || writer.join().expect("written"));
    drop(others);
}

#[test]
fn sender_gets_past_silent_strangers() {
    let waiting = Waiting::start(&[]);
    let to = waiting.receiver.address();
    let others = (silent(to, MANY), strangers(to));
    let mut between = waiting.joined(&[]);
    carries(&mut between, 200);
    drop(others);
}
