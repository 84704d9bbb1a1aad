//! Acceptance of connections, and their greetings.

use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Scope;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::claim::{Grant, Offer};
use super::lane::Lane;
use super::session::ReceiveSession;
use super::{ReceiveError, lock};
use crate::decode::{Bases, FrameDecoder};
use crate::link::{Link, LinkError};
use crate::session::SessionSide as _;
use crate::wire::{ConnectionRole, Hello, Welcome};

/// Listening socket for senders, for one session after the other.
pub struct Port {
    listener: TcpListener,
    /// Greeting of a sender that waits for the next session; it has ended the previous one.
    waiting_sender: Mutex<Option<Greeting>>,
}

/// Connection that has sent its greeting.
struct Greeting {
    link: Link,
    hello: Hello,
    peer: IpAddr,
}

impl Port {
    /// Creates the port of `listener`.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn new(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, waiting_sender: Mutex::default() })
    }

    /// Returns the address of the listening socket.
    ///
    /// # Errors
    /// The address is unavailable.
    pub fn local_addr(&self) -> io::Result<std::net::SocketAddr> {
        self.listener.local_addr()
    }

    /// Refuses the sender that waits for the next session, if there is one, with a reason.
    pub fn refuse_next(&self, reason: &str) {
        if let Some(mut greeting) = lock(&self.waiting_sender).take() {
            // The sender may have disconnected.
            let _ = Welcome::refuse(&mut greeting.link, reason);
        }
    }
}

/// Role of a connection that was accepted.
enum AcceptedRole {
    /// First control connection of the session.
    Control(Link, Duration),
    /// First connection of a lane, which waits in the lane's slot.
    Lane(Arc<Lane>, Arc<Bases>, Duration),
    /// Connection that waits in a slot whose reader runs already.
    Waits,
    /// Connection for the next session.
    NextSession(Greeting),
}

impl ReceiveSession<'_> {
    /// Accepts connections until the session is over. Each one gets a thread at once, so that a silent peer blocks no
    /// other.
    pub(super) fn accept_connections<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        port: &'scope Port,
        stop: &AtomicBool,
    ) -> Result<(), ReceiveError> {
        if let Some(greeting) = lock(&port.waiting_sender).take() {
            self.spawn(scope, "a connection", move || {
                let peer = greeting.peer;
                let role = self.assign_role(greeting);
                self.run_role(scope, port, peer, role)
            });
        }
        loop {
            if self.is_over() {
                return Ok(());
            }
            if stop.load(Ordering::Relaxed) {
                return Err(ReceiveError::Stopped);
            }
            match port.listener.accept() {
                Ok((socket, peer)) => {
                    let handle = socket.try_clone().map_err(ReceiveError::io("accepting a connection"))?;
                    let number = lock(&self.greetings).begin(handle);
                    self.spawn(scope, "a connection", move || {
                        let peer = peer.ip();
                        let role = self.read_greeting(socket, peer).and_then(|greeting| self.assign_role(greeting));
                        lock(&self.greetings).end(number);
                        self.run_role(scope, port, peer, role)
                    });
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => self.wait_for_connection(&port.listener)?,
                    // The peer has disconnected before the connection was accepted.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => return Err(ReceiveError::io("waiting for a sender")(error)),
                },
            }
        }
    }

    fn wait_for_connection(&self, listener: &TcpListener) -> Result<(), ReceiveError> {
        let mut fds =
            [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN), PollFd::new(&self.over_event, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ReceiveError::io("waiting for a sender")(error.into())),
        }
    }

    /// Accepts a connection, and reads and verifies its greeting.
    fn read_greeting(&self, socket: TcpStream, peer: IpAddr) -> Result<Greeting, ReceiveError> {
        socket.set_nonblocking(false).map_err(ReceiveError::io("accepting a connection"))?;
        let mut link = Link::accept(socket, self.options.tls.as_ref())?;
        let hello = Hello::read(&mut link)?;
        if let Err(error) = link.check_peer(peer, self.options.tls.as_ref()) {
            let _ = Welcome::refuse(&mut link, &error.message_for_peer());
            return Err(LinkError::from(error).into());
        }
        Ok(Greeting { link, hello, peer })
    }

    /// Assigns a connection its role in the session, or refuses it.
    fn assign_role(&self, mut greeting: Greeting) -> Result<AcceptedRole, ReceiveError> {
        let granted = self.grant(&greeting.hello).or_else(|reason| {
            Welcome::refuse(&mut greeting.link, reason)?;
            Err(ReceiveError::Refused(reason))
        })?;
        let hello = greeting.hello.clone();
        self.welcome(granted, greeting).inspect_err(|_| lock(&self.claim).revoke(&hello))
    }

    fn grant(&self, hello: &Hello) -> Result<Grant, &'static str> {
        let offer = Offer {
            id: self.id,
            delta_memory: self.options.delta_memory,
            lanes: self.options.lanes,
            is_lost: self.lost.load(Ordering::Acquire),
            has_next: self.notes_handler.is_some(),
        };
        let mut claim = lock(&self.claim);
        if self.is_over() {
            return Err("the session has ended");
        }
        let granted = claim.grant(hello, &offer)?;
        if matches!(granted, Grant::Link) {
            // Done under the lock, so that no later link can be granted before.
            self.outcome.sockets.switch_link(hello.link);
        }
        Ok(granted)
    }

    fn welcome(&self, granted: Grant, mut greeting: Greeting) -> Result<AcceptedRole, ReceiveError> {
        let number = greeting.hello.link;
        let received = match &granted {
            Grant::Next => return Ok(AcceptedRole::NextSession(greeting)),
            Grant::Session | Grant::Link => self.mailbox.switch_link(number),
            Grant::Lane(lane) => lane.switch_link(number),
        };
        let link = &mut greeting.link;
        let Some((bases, lanes, patience)) = lock(&self.claim).terms() else {
            return Err(ReceiveError::Refused("the session has ended already"));
        };
        let welcome = Welcome {
            session: self.id,
            delta_memory: u64::from(bases.slots.len()) * larder_codec::PAGE as u64,
            window: self.window(),
            lanes,
            channels: self.channels(),
            methods: FrameDecoder::methods(),
            received,
        };
        let failed = ReceiveError::io("setting up a connection");
        let handle = link.handle().map_err(&failed)?;
        welcome.write(link)?;
        self.outcome.sockets.add(number, handle, greeting.hello.role == ConnectionRole::Control);
        let has_received = greeting.hello.received;
        match granted {
            Grant::Session => Ok(AcceptedRole::Control(greeting.link, patience)),
            Grant::Link => {
                self.pending_link.offer(number, greeting.link, has_received);
                Ok(AcceptedRole::Waits)
            }
            Grant::Lane(lane) => {
                greeting.link.finish_setup().map_err(&failed)?;
                lane.pending_link.offer(number, greeting.link, 0);
                Ok(match lane.claim_reader() {
                    true => AcceptedRole::Lane(lane, bases, patience),
                    false => AcceptedRole::Waits,
                })
            }
            Grant::Next => Ok(AcceptedRole::NextSession(greeting)),
        }
    }

    /// Runs the thread of a connection according to its role.
    fn run_role<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        port: &Port,
        peer: IpAddr,
        role: Result<AcceptedRole, ReceiveError>,
    ) -> Result<(), ReceiveError> {
        match role {
            Ok(AcceptedRole::Control(link, patience)) => self.run_control(scope, link, peer, patience),
            Ok(AcceptedRole::Lane(lane, bases, patience)) => self.run_lane(&lane, &bases, patience),
            Ok(AcceptedRole::Waits) => Ok(()),
            Ok(AcceptedRole::NextSession(greeting)) => {
                *lock(&port.waiting_sender) = Some(greeting);
                Err(ReceiveError::Replaced)
            }
            // The connection has no part in the session.
            Err(error) => {
                tracing::warn!("{peer}: {error}");
                Ok(())
            }
        }
    }
}
