//! Connection set-up to the receiver, at first and after a lost link.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::{Options, SendError};
use crate::control::Mailbox;
use crate::link::{self, Link, LinkError};
use crate::tls::SenderTls;
use crate::wire::{Chain, Hello, LINKS_MAX, Role, Welcome, WireError};

/// Maximum time of reconnection attempts.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// Parameters for connecting again.
pub(super) struct Dial {
    address: SocketAddr,
    tls: Option<SenderTls>,
    lanes: u16,
    patience: Duration,
    chain: Chain,
    hello: Hello,
}

/// All connections of a link, each with the count that the receiver has received of it: messages, or frames.
pub(super) struct Connected {
    pub(super) number: u32,
    pub(super) control: Link,
    pub(super) received: u64,
    pub(super) lanes: Vec<(Link, u64)>,
}

impl Dial {
    /// Opens a session.
    pub(super) fn open(options: &Options) -> Result<(Self, Connected, Welcome), SendError> {
        let tls = options.tls.as_ref();
        let none = || SendError::io("random numbers")(io::Error::other("the system has none"));
        let chain = Chain::new().ok_or_else(none)?;
        let patience = options.patience.min(PATIENCE_MAX);
        let mut hello = Hello {
            role: Role::Control,
            link: 0,
            session: [0; 16],
            delta_memory: options.delta_memory,
            lanes: options.lanes,
            patience_ms: patience.as_millis() as u32,
            received: 0,
            proof: chain.proof(0),
        };
        let connect = || Link::connect(&options.to, tls);
        let mut control = connect()?;
        let address = control.peer().map_err(SendError::io("the control connection"))?;
        hello.write(&mut control)?;
        let welcome = Welcome::read(&mut control).map_err(refused)?;
        welcome.answers(&hello)?;
        hello.session = welcome.session;
        let mut dial = Self {
            address,
            tls: options.tls.clone(),
            lanes: welcome.lanes.min(options.lanes),
            patience,
            chain,
            hello,
        };
        let lanes = dial.lanes(connect)?;
        let connected = Connected {
            number: 0,
            control,
            received: welcome.received,
            lanes,
        };
        Ok((dial, connected, welcome))
    }

    /// Returns the time for which reconnection is tried.
    pub(super) const fn patience(&self) -> Duration {
        self.patience
    }

    /// Tries once to make all connections again, for the session of this mailbox. `turns` is called with the number
    /// of the new link before any connection of it exists.
    pub(super) fn again(&mut self, mailbox: &Mailbox, turns: impl FnOnce(u32)) -> Result<Connected, SendError> {
        let number = self.hello.link + 1;
        if number > LINKS_MAX {
            return Err(SendError::TooOften);
        }
        turns(number);
        self.hello = Hello {
            role: Role::Control,
            link: number,
            received: mailbox.turn(number),
            proof: self.chain.proof(number),
            ..self.hello.clone()
        };
        let (address, tls) = (self.address, self.tls.clone());
        let connect = || Link::connect_again(address, tls.as_ref());
        let mut control = connect()?;
        let received = self.greet(&mut control)?;
        let lanes = self.lanes(connect)?;
        Ok(Connected {
            number,
            control,
            received,
            lanes,
        })
    }

    fn lanes(&mut self, connect: impl Fn() -> Result<Link, LinkError>) -> Result<Vec<(Link, u64)>, SendError> {
        let mut lanes = Vec::new();
        for number in 0..self.lanes {
            self.hello.role = Role::Lane(number);
            self.hello.proof = [0; 32];
            let mut lane = connect()?;
            let received = self.greet(&mut lane)?;
            lane.ready().map_err(SendError::io("setting up a lane"))?;
            lanes.push((lane, received));
        }
        Ok(lanes)
    }

    /// Presents the session on a connection; returns the count that the receiver has received of it.
    fn greet(&self, link: &mut Link) -> Result<u64, SendError> {
        self.hello.write(link)?;
        let welcome = Welcome::read(link).map_err(refused)?;
        if welcome.session == self.hello.session {
            Ok(welcome.received)
        } else {
            Err(SendError::OtherSession)
        }
    }
}

impl SendError {
    /// Returns true if another attempt may succeed: the network is down, and the receiver has not refused.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            Self::Link(error) => error.is_passing(),
            Self::Wire(WireError::Io { source, .. }) | Self::Io { source, .. } => link::is_passing(source),
            _ => false,
        }
    }
}

/// Converts an error of a greeting. In TLS 1.3 a sender learns only after its handshake that its certificate is
/// refused.
fn refused(error: WireError) -> SendError {
    if let WireError::Io { source, .. } = &error
        && let Some(rustls::Error::AlertReceived(alert)) = source.get_ref().and_then(|error| error.downcast_ref())
    {
        return LinkError::Refused(*alert).into();
    }
    error.into()
}
