//! Random inputs for whatever reads bytes of a guest or a front-end: a small part of what `testbed/fuzz.sh` does.

mod front_end;
mod fuzz_inputs;

use fuzz_inputs::{message, nbd, ring, session};

/// Inputs from a fixed sequence, of many lengths, with more zeros and small numbers than chance would give.
fn each(count: u64, mut run: impl FnMut(&[u8])) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..count {
        let len = next() % 700;
        let input: Vec<u8> = (0..len)
            .map(|_| match next() % 4 {
                0 => 0,
                1 => (next() % 8) as u8,
                _ => next() as u8,
            })
            .collect();
        run(&input);
    }
}

#[test]
fn any_bytes_are_a_message_or_refused() {
    each(20_000, message::run);
}

#[test]
fn any_memory_is_a_split_ring_or_refused() {
    each(20_000, |data| ring::run(data, false));
}

#[test]
fn any_memory_is_a_packed_ring_or_refused() {
    each(20_000, |data| ring::run(data, true));
}

#[test]
fn any_connection_comes_to_an_end() {
    each(3_000, session::run);
}

#[test]
fn an_nbd_server_outlives_any_client() {
    each(3_000, nbd::server);
}

#[test]
fn an_nbd_client_outlives_any_server() {
    each(150, nbd::client);
}
