//! Connection set-up to the receiver, at first and after a lost link.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::{Options, SendError};
use crate::control::Mailbox;
use crate::link::{self, Link, LinkError};
use crate::tls::SenderTls;
use crate::wire::{ConnectionRole, Hello, LINKS_MAX, ProofChain, Welcome, WireError};

/// Maximum time of reconnection attempts.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// Parameters for connecting again.
pub(super) struct Connector {
    address: SocketAddr,
    tls: Option<SenderTls>,
    lanes: u16,
    patience: Duration,
    chain: ProofChain,
    hello: Hello,
}

/// All connections of a link, each with the count that the receiver has received of it: messages, or frames.
pub(super) struct LinkConnections {
    pub(super) number: u32,
    pub(super) control: Link,
    pub(super) received: u64,
    pub(super) lanes: Vec<(Link, u64)>,
}

impl Connector {
    /// Opens a session.
    pub(super) fn open(options: &Options) -> Result<(Self, LinkConnections, Welcome), SendError> {
        let tls = options.tls.as_ref();
        let no_random = || SendError::io("random numbers")(io::Error::other("the system has none"));
        let chain = ProofChain::new().ok_or_else(no_random)?;
        let patience = options.patience.min(PATIENCE_MAX);
        let mut hello = Hello {
            role: ConnectionRole::Control,
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
        let welcome = Welcome::read(&mut control).map_err(greeting_error)?;
        welcome.check_answer(&hello)?;
        hello.session = welcome.session;
        let mut connector =
            Self { address, tls: options.tls.clone(), lanes: welcome.lanes.min(options.lanes), patience, chain, hello };
        let lanes = connector.connect_lanes(connect)?;
        let connected = LinkConnections { number: 0, control, received: welcome.received, lanes };
        Ok((connector, connected, welcome))
    }

    /// Returns the time for which reconnection is tried.
    pub(super) const fn patience(&self) -> Duration {
        self.patience
    }

    /// Tries once to make all connections again, for the session of this mailbox. `on_new_link` is called with the
    /// number of the new link before any connection of it exists.
    pub(super) fn reconnect(
        &mut self,
        mailbox: &Mailbox,
        on_new_link: impl FnOnce(u32),
    ) -> Result<LinkConnections, SendError> {
        let number = self.hello.link + 1;
        if number > LINKS_MAX {
            return Err(SendError::TooManyLinks);
        }
        on_new_link(number);
        self.hello = Hello {
            role: ConnectionRole::Control,
            link: number,
            received: mailbox.switch_link(number),
            proof: self.chain.proof(number),
            ..self.hello.clone()
        };
        let (address, tls) = (self.address, self.tls.clone());
        let connect = || Link::reconnect(address, tls.as_ref());
        let mut control = connect()?;
        let received = self.greet(&mut control)?;
        let lanes = self.connect_lanes(connect)?;
        Ok(LinkConnections { number, control, received, lanes })
    }

    fn connect_lanes(&mut self, connect: impl Fn() -> Result<Link, LinkError>) -> Result<Vec<(Link, u64)>, SendError> {
        let mut lanes = Vec::new();
        for number in 0..self.lanes {
            self.hello.role = ConnectionRole::Lane(number);
            self.hello.proof = [0; 32];
            let mut lane = connect()?;
            let received = self.greet(&mut lane)?;
            lane.finish_setup().map_err(SendError::io("setting up a lane"))?;
            lanes.push((lane, received));
        }
        Ok(lanes)
    }

    /// Presents the session on a connection; returns the count that the receiver has received of it.
    fn greet(&self, link: &mut Link) -> Result<u64, SendError> {
        self.hello.write(link)?;
        let welcome = Welcome::read(link).map_err(greeting_error)?;
        if welcome.session == self.hello.session { Ok(welcome.received) } else { Err(SendError::OtherSession) }
    }
}

impl SendError {
    /// Returns true if another attempt may succeed: the network is down, and the receiver has not refused.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Link(error) => error.is_transient(),
            Self::Wire(WireError::Io { source, .. }) | Self::Io { source, .. } => link::is_transient(source),
            _ => false,
        }
    }
}

/// Converts an error of a greeting. In TLS 1.3 a sender learns only after its handshake that its certificate is
/// refused.
fn greeting_error(error: WireError) -> SendError {
    if let WireError::Io { source, .. } = &error
        && let Some(rustls::Error::AlertReceived(alert)) = source.get_ref().and_then(|error| error.downcast_ref())
    {
        return LinkError::CertificateRefused(*alert).into();
    }
    error.into()
}
