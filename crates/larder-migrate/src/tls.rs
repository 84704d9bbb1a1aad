//! Mutual authentication of the two hosts: TLS 1.3, with a certificate on both sides.
//!
//! The files are the same as for QEMU, libvirt and `larder disk serve`. They are in one directory, since a host both
//! sends and receives: `ca-cert.pem`; `client-cert.pem` and `client-key.pem` for sending; `server-cert.pem` and
//! `server-key.pem` for receiving. A sender requires a certificate for the name or address that it connects to.
//!
//! In addition, [`Peers`] restricts which of the hosts signed by the authority are accepted.

mod peers;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use larder_block::tls::{TlsError, authorities, certificates, private_key, provider};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ServerConfig};

pub use peers::{AllowedPeer, Fingerprint, InvalidPeer, PeerError, PeerRecords, Peers};

/// TLS configuration of a sender.
#[derive(Clone)]
pub struct SenderTls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
    host: String,
    peers: Peers,
}

impl SenderTls {
    /// Loads the files of `directory`, for a receiver named `host`. Any certificate that its authority has signed for
    /// that name is accepted.
    ///
    /// # Errors
    /// A file is missing or damaged, or the name is invalid.
    pub fn load(directory: &Path, host: &str) -> Result<Self, TlsError> {
        let server = ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Name { name: host.to_owned() })?;
        let path = directory.join("client-cert.pem");
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Setup)?
            .with_root_certificates(authorities(&directory.join("ca-cert.pem"))?)
            .with_client_auth_cert(certificates(&path)?, private_key(&directory.join("client-key.pem"))?)
            .map_err(|source| TlsError::Certificate { path, source })?;
        // A lane only writes, so the session tickets that the receiver would send are never read.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self { config: Arc::new(config), server, host: host.to_ascii_lowercase(), peers: Peers::default() })
    }

    /// Restricts the accepted receivers to `peers`.
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

    pub(crate) fn check(&self, peer_certificates: Option<&[CertificateDer<'_>]>) -> Result<(), PeerError> {
        self.peers.check(&self.host, peer_certificates)
    }
}

/// TLS configuration of a receiver.
#[derive(Clone)]
pub struct ReceiverTls {
    config: Arc<ServerConfig>,
    peers: Peers,
}

impl ReceiverTls {
    /// Loads the files of `directory`. Any certificate that its authority has signed is accepted.
    ///
    /// # Errors
    /// A file is missing or damaged.
    pub fn load(directory: &Path) -> Result<Self, TlsError> {
        let ca = directory.join("ca-cert.pem");
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authorities(&ca)?), provider())
            .build()
            .map_err(|source| TlsError::Authorities { path: ca, source })?;
        let path = directory.join("server-cert.pem");
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Setup)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificates(&path)?, private_key(&directory.join("server-key.pem"))?)
            .map_err(|source| TlsError::Certificate { path, source })?;
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), peers: Peers::default() })
    }

    /// Restricts the accepted senders to `peers`.
    #[must_use]
    pub fn with_peers(self, peers: Peers) -> Self {
        Self { peers, ..self }
    }

    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    /// Checks the certificate that a sender at the address `from` has shown.
    pub(crate) fn check(
        &self,
        from: IpAddr,
        peer_certificates: Option<&[CertificateDer<'_>]>,
    ) -> Result<(), PeerError> {
        self.peers.check(&from.to_canonical().to_string(), peer_certificates)
    }
}
