//! Taking in connections, and greeting them.

use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Scope;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::claim::{Granted, Offer};
use super::lane::Lane;
use super::session::Session;
use super::{ReceiveError, lock};
use crate::decode::{Bases, FrameDecoder};
use crate::link::{Link, LinkError};
use crate::session::Side as _;
use crate::wire::{Hello, Role, Welcome};

/// Where senders come, for one session after the other.
pub struct Port {
    listener: TcpListener,
    /// Whoever has come for the next session, and ended the one before.
    next: Mutex<Option<Greeting>>,
}

/// Somebody who has said what he wants.
struct Greeting {
    link: Link,
    hello: Hello,
    peer: IpAddr,
}

impl Port {
    /// With whoever comes at `listener`.
    ///
    /// # Errors
    /// It is no socket that can be waited for.
    pub fn new(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            next: Mutex::default(),
        })
    }

    /// Where it is.
    ///
    /// # Errors
    /// It is nowhere.
    pub fn local_addr(&self) -> io::Result<std::net::SocketAddr> {
        self.listener.local_addr()
    }

    /// Tells whoever has come for the next session why there is none.
    pub fn refuse_next(&self, reason: &str) {
        if let Some(mut greeting) = lock(&self.next).take() {
            // It may have gone.
            let _ = Welcome::refuse(&mut greeting.link, reason);
        }
    }
}

/// What somebody has become who was greeted.
enum Placed {
    /// The first control connection.
    Opens(Link, Duration),
    /// The first connection of a lane, which waits at its berth.
    Begins(Arc<Lane>, Arc<Bases>, Duration),
    /// One that waits where somebody takes it up.
    Waits,
    /// One for the next session.
    Next(Greeting),
}

impl Session<'_> {
    /// Accepts connections until the session is over. Each has a thread of its own from its beginning, so that a stranger
    /// who says nothing keeps nobody waiting.
    pub(super) fn take_in<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        port: &'scope Port,
        stop: &AtomicBool,
    ) -> Result<(), ReceiveError> {
        if let Some(greeting) = lock(&port.next).take() {
            self.spawn(scope, "a connection", move || {
                let peer = greeting.peer;
                let placed = self.place(greeting);
                self.attend(scope, port, peer, placed)
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
                    let handle = socket.try_clone().map_err(ReceiveError::io("taking in a connection"))?;
                    let number = lock(&self.greetings).begin(handle);
                    self.spawn(scope, "a connection", move || {
                        let peer = peer.ip();
                        let placed = self.greeting(socket, peer).and_then(|greeting| self.place(greeting));
                        lock(&self.greetings).end(number);
                        self.attend(scope, port, peer, placed)
                    });
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => self.wait_for(&port.listener)?,
                    // It has gone before it was taken in.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => return Err(ReceiveError::io("waiting for a sender")(error)),
                },
            }
        }
    }

    fn wait_for(&self, listener: &TcpListener) -> Result<(), ReceiveError> {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::new(&self.over_event, PollFlags::IN),
        ];
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ReceiveError::io("waiting for a sender")(error.into())),
        }
    }

    /// Hears what somebody wants who has connected.
    fn greeting(&self, socket: TcpStream, peer: IpAddr) -> Result<Greeting, ReceiveError> {
        socket
            .set_nonblocking(false)
            .map_err(ReceiveError::io("taking in a connection"))?;
        let mut link = Link::accept(socket, self.options.tls.as_ref())?;
        let hello = Hello::read(&mut link)?;
        if let Err(error) = link.check(peer, self.options.tls.as_ref()) {
            let _ = Welcome::refuse(&mut link, &error.to_peer());
            return Err(LinkError::from(error).into());
        }
        Ok(Greeting { link, hello, peer })
    }

    /// Gives him what he may have of the session; those who are no part of it are told so.
    fn place(&self, mut greeting: Greeting) -> Result<Placed, ReceiveError> {
        let granted = self.grant(&greeting.hello).or_else(|reason| {
            Welcome::refuse(&mut greeting.link, reason)?;
            Err(ReceiveError::Refused(reason))
        })?;
        let hello = greeting.hello.clone();
        self.welcome(granted, greeting)
            .inspect_err(|_| lock(&self.claim).give_back(&hello))
    }

    fn grant(&self, hello: &Hello) -> Result<Granted, &'static str> {
        let offer = Offer {
            id: self.id,
            delta_memory: self.options.delta_memory,
            lanes: self.options.lanes,
            is_lost: self.lost.load(Ordering::Acquire),
            has_next: self.agent.is_some(),
        };
        let mut claim = lock(&self.claim);
        if self.is_over() {
            return Err("it has ended");
        }
        let granted = claim.grant(hello, &offer)?;
        if matches!(granted, Granted::Link) {
            // Before somebody else can have a later one.
            self.ending.sockets.turn(hello.link);
        }
        Ok(granted)
    }

    fn welcome(&self, granted: Granted, mut greeting: Greeting) -> Result<Placed, ReceiveError> {
        let number = greeting.hello.link;
        let received = match &granted {
            Granted::Next => return Ok(Placed::Next(greeting)),
            Granted::Session | Granted::Link => self.mailbox.turn(number),
            Granted::Lane(lane) => lane.turn(number),
        };
        let link = &mut greeting.link;
        let Some((bases, lanes, patience)) = lock(&self.claim).terms() else {
            return Err(ReceiveError::Refused("it has gone"));
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
        self.ending
            .sockets
            .add(number, handle, greeting.hello.role == Role::Control);
        let has_received = greeting.hello.received;
        match granted {
            Granted::Session => Ok(Placed::Opens(greeting.link, patience)),
            Granted::Link => {
                self.berth.put(number, greeting.link, has_received);
                Ok(Placed::Waits)
            }
            Granted::Lane(lane) => {
                greeting.link.ready().map_err(&failed)?;
                lane.berth.put(number, greeting.link, 0);
                Ok(match lane.needs_reader() {
                    true => Placed::Begins(lane, bases, patience),
                    false => Placed::Waits,
                })
            }
            Granted::Next => Ok(Placed::Next(greeting)),
        }
    }

    /// Does what is to be done for one who was greeted.
    fn attend<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        port: &Port,
        peer: IpAddr,
        placed: Result<Placed, ReceiveError>,
    ) -> Result<(), ReceiveError> {
        match placed {
            Ok(Placed::Opens(link, patience)) => self.control(scope, link, peer, patience),
            Ok(Placed::Begins(lane, bases, patience)) => self.lane(&lane, &bases, patience),
            Ok(Placed::Waits) => Ok(()),
            Ok(Placed::Next(greeting)) => {
                *lock(&port.next) = Some(greeting);
                Err(ReceiveError::Replaced)
            }
            // It is nobody's who has anything to do with the session.
            Err(error) => {
                tracing::warn!("{peer}: {error}");
                Ok(())
            }
        }
    }
}
