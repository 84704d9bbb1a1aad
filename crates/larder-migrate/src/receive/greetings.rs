//! Connections in the middle of their greeting, whoever they are from.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};

/// Connections that may be in the middle of their greeting; the oldest gives way to a new one.
const COUNT_MAX: usize = 64;

/// All of them, so that they can be shut.
#[derive(Default)]
pub(super) struct Greetings {
    count: u64,
    sockets: VecDeque<(u64, TcpStream)>,
}

impl Greetings {
    /// Takes one up, for which the oldest may have to go; its number.
    pub(super) fn begin(&mut self, socket: TcpStream) -> u64 {
        if self.sockets.len() == COUNT_MAX
            && let Some((_, oldest)) = self.sockets.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        self.count += 1;
        self.sockets.push_back((self.count, socket));
        self.count
    }

    /// It is over, well or not.
    pub(super) fn end(&mut self, number: u64) {
        self.sockets.retain(|(other, _)| *other != number);
    }

    /// Shuts all.
    pub(super) fn shut(&mut self) {
        for (_, socket) in self.sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
