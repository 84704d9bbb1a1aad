//! Connecting to the receiver, and again when the link was lost.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::{Options, SendError};
use crate::control::Mailbox;
use crate::link::{self, Link, LinkError};
use crate::tls::SenderTls;
use crate::wire::{Chain, Hello, LINKS_MAX, Role, Welcome, WireError};

/// The longest that is tried.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// What it takes to connect again.
pub(super) struct Dial {
    address: SocketAddr,
    tls: Option<SenderTls>,
    lanes: u16,
    patience: Duration,
    chain: Chain,
    hello: Hello,
}

/// All connections of a link, with how much the receiver has received of each: messages, and frames.
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

    /// How long it is worth while to try again.
    pub(super) const fn patience(&self) -> Duration {
        self.patience
    }

    /// Tries once to make all connections again, for a session with this mailbox. `turns` hears the number of the link
    /// before anything of it is there.
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

    /// Shows the session on a connection; how much the receiver has received of it.
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
    /// Whether a connection may be made when it is tried again: the network is away, and nobody has said no.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            Self::Link(error) => error.is_passing(),
            Self::Wire(WireError::Io { source, .. }) | Self::Io { source, .. } => link::is_passing(source),
            _ => false,
        }
    }
}

/// With TLS 1.3 a sender learns only after its handshake what the receiver thinks of its certificate.
fn refused(error: WireError) -> SendError {
    if let WireError::Io { source, .. } = &error
        && let Some(rustls::Error::AlertReceived(alert)) = source.get_ref().and_then(|error| error.downcast_ref())
    {
        return LinkError::Refused(*alert).into();
    }
    error.into()
}
