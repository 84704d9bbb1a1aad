//! Connections that have not finished their greeting, from any peer.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};

/// Maximum connections that have not finished their greeting; a new one replaces the oldest.
const GREETINGS_MAX: usize = 64;

/// Sockets of these connections, so that they can be shut.
#[derive(Default)]
pub(super) struct Greetings {
    count: u64,
    sockets: VecDeque<(u64, TcpStream)>,
}

impl Greetings {
    /// Registers a connection, shutting the oldest if there are too many; returns its number.
    pub(super) fn begin(&mut self, socket: TcpStream) -> u64 {
        if self.sockets.len() == GREETINGS_MAX
            && let Some((_, oldest)) = self.sockets.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        self.count += 1;
        self.sockets.push_back((self.count, socket));
        self.count
    }

    /// Removes a connection whose greeting has succeeded or failed.
    pub(super) fn end(&mut self, number: u64) {
        self.sockets.retain(|(other, _)| *other != number);
    }

    /// Shuts all connections.
    pub(super) fn shut(&mut self) {
        for (_, socket) in self.sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
