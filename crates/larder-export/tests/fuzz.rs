//! Random inputs for all code that parses bytes of a guest, a front-end or an NBD peer: a small part of the fuzzing
//! that `testbed/fuzz.sh` does.

mod front_end;
mod fuzz_inputs;

use fuzz_inputs::{message, nbd, ring, session};

/// Calls `run` with `count` inputs from a fixed pseudo-random sequence, of many lengths, with extra zeros and small
/// numbers.
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
fn random_message_is_parsed_or_refused() {
    each(20_000, message::run);
}

#[test]
fn random_split_ring_is_refused_safely() {
    each(20_000, |data| ring::run(data, false));
}

#[test]
fn random_packed_ring_is_refused_safely() {
    each(20_000, |data| ring::run(data, true));
}

#[test]
fn random_session_ends() {
    each(3_000, session::run);
}

#[test]
fn nbd_server_survives_random_client() {
    each(3_000, nbd::server);
}

#[test]
fn nbd_client_survives_random_server() {
    each(150, nbd::client);
}
