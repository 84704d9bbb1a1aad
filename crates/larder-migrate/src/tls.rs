//! Who the two hosts are to one another: TLS 1.3, with a certificate on both sides.
//!
//! The files are those that QEMU, libvirt and `larder disk serve` have, in one folder, since a host sends as well as it
//! receives: `ca-cert.pem`; `client-cert.pem` and `client-key.pem` for what it sends; `server-cert.pem` and
//! `server-key.pem` for what it receives. A sender wants a certificate for the name or address that it connects to.
//!
//! Beyond that, [`Peers`] says which of the hosts that the authority has signed will do.

mod peers;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use larder_block::tls::{TlsError, authorities, certificates, private_key, provider};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ServerConfig};

pub use peers::{Fingerprint, NoPeer, Peer, PeerRecords, Peers, WrongPeer};

/// How a sender shows and asks who it is.
#[derive(Clone)]
pub struct SenderTls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
    host: String,
    peers: Peers,
}

impl SenderTls {
    /// With the files of `folder`, for a receiver named `host`. All that its authority has signed for that name will do.
    ///
    /// # Errors
    /// A file is missing or damaged, or the name is none.
    pub fn load(folder: &Path, host: &str) -> Result<Self, TlsError> {
        let server = ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Name { name: host.to_owned() })?;
        let path = folder.join("client-cert.pem");
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Setup)?
            .with_root_certificates(authorities(&folder.join("ca-cert.pem"))?)
            .with_client_auth_cert(certificates(&path)?, private_key(&folder.join("client-key.pem"))?)
            .map_err(|source| TlsError::Certificate { path, source })?;
        // A lane only writes: nobody would read what comes to resume a session by.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self {
            config: Arc::new(config),
            server,
            host: host.to_ascii_lowercase(),
            peers: Peers::default(),
        })
    }

    /// The same files, for these receivers.
    #[must_use]
    pub fn with_peers(self, peers: Peers) -> Self {
        Self { peers, ..self }
    }

    pub(crate) fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.config)
    }

    pub(crate) fn server(&self) -> ServerName<'static> {
        self.server.clone()
    }

    pub(crate) fn check(&self, shown: Option<&[CertificateDer<'_>]>) -> Result<(), WrongPeer> {
        self.peers.check(&self.host, shown)
    }
}

/// How a receiver shows and asks who it is.
#[derive(Clone)]
pub struct ReceiverTls {
    config: Arc<ServerConfig>,
    peers: Peers,
}

impl ReceiverTls {
    /// With the files of `folder`. All that its authority has signed will do.
    ///
    /// # Errors
    /// A file is missing or damaged.
    pub fn load(folder: &Path) -> Result<Self, TlsError> {
        let ca = folder.join("ca-cert.pem");
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authorities(&ca)?), provider())
            .build()
            .map_err(|source| TlsError::Authorities { path: ca, source })?;
        let path = folder.join("server-cert.pem");
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Setup)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates(&path)?, private_key(&folder.join("server-key.pem"))?)
            .map_err(|source| TlsError::Certificate { path, source })?;
        config.send_tls13_tickets = 0;
        Ok(Self {
            config: Arc::new(config),
            peers: Peers::default(),
        })
    }

    /// The same files, for these senders.
    #[must_use]
    pub fn with_peers(self, peers: Peers) -> Self {
        Self { peers, ..self }
    }

    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    /// `from` is the address that the sender has.
    pub(crate) fn check(&self, from: IpAddr, shown: Option<&[CertificateDer<'_>]>) -> Result<(), WrongPeer> {
        self.peers.check(&from.to_canonical().to_string(), shown)
    }
}
