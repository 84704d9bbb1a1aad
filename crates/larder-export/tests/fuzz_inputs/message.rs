//! Fuzz target: arbitrary bytes as a vhost-user message, with an arbitrary number of descriptors.

use std::fs::File;
use std::os::fd::OwnedFd;

use larder_export::vhost_user::message::{HEADER_BYTES, add_descriptors, parse_header, parse_request};

use super::Input;

pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let files = usize::from(input.byte() % 10);
    let mut head = [0; HEADER_BYTES];
    let got = input.bytes(HEADER_BYTES);
    head[..got.len()].copy_from_slice(got);
    if let Ok(header) = parse_header(&head) {
        let mut payload = input.bytes(header.payload_bytes).to_vec();
        payload.resize(header.payload_bytes, 0);
        let mut descriptors = Vec::new();
        let came: Vec<OwnedFd> = (0..files).map(|_| File::open("/dev/null").expect("/dev/null").into()).collect();
        if add_descriptors(&mut descriptors, came).is_ok() {
            let _ = parse_request(&header, &payload, descriptors);
        }
    }
}
